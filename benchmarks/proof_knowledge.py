"""Does a language model that is trained with the reward ``knowledge`` state more true facts, and not fewer facts?

    python benchmarks/proof_knowledge.py --json benchmarks/results/proof_knowledge.json --seeds 0

The graph is that of towns. A small model is made: from random weights it learns (SFT, ``--sft-steps``) texts about
``--asked`` people, with one to three facts each, of which half are wrong. Then GRPO trains it, by arms:

- ``note``, ``transe``: the reward ``knowledge``, with an embedding of this kind and ``wanted: 3``.
- ``note, asked``: the same with ``asked: true``; facts about others than the person in the prompt do not count.
- ``note, asked, kl``: that with the KL term of GRPO's paper, so that the model stays near what it was.
- ``note, wanted 1``: without a wish for three facts.
- ``oracle``: the truth as the reward (``true_facts.py``), the most that a reward can tell.

Of the people asked about, a third is never asked about in GRPO (*new people*). A third of the facts about citizenship
and language of all of them is not in the graph that is embedded, so that the reward has to conclude them (*held out*).
Measured before and after: the share of true facts among those stated, of all, of the held-out ones and about new
people; the number of facts, of true facts, and of true facts that are held out in an answer, of these also the number
about the person asked about (*of them own*); and the share of facts about that person (*own*). A fact that an answer
states twice counts once. Each person is asked ``--each`` times, with the same noise for all arms.
``--json`` gets each run as it ends; runs that stand there with all figures are not done again. ``--work`` keeps the
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from true_facts import PATTERN, SAID, facts

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("note", "note, asked", "note, asked, kl", "note, wanted 1", "transe", "oracle")
KL = 0.04
"""The coefficient in the paper of GRPO (arXiv 2402.03300)."""
WORDS = {relation: said for said, relation in SAID.items()}
HIDDEN = ("citizen_of", "speaks")
"""Relations of which a part is held out: they follow from the others."""
FIGURES = ("true", "held out", "new people", "facts", "true facts", "true held-out facts", "of them own", "own")
Row = tuple[str, str, str]


class World:
    """The graph, whom the model is asked about, and what is held out, of a seed. Final class."""

    def __init__(self, seed: int, people: int, asked: int) -> None:
        from mmrl.studies.knowledge.towns import towns

        self.rows: list[Row] = towns(people=people, seed=seed)
        draw = random.Random(f"proof|{seed}")
        everybody = [head for head, relation, _ in self.rows if relation == "lives_in"]
        self.asked = draw.sample(everybody, asked)
        self.prompted = self.asked[: 2 * asked // 3]
        mine = set(self.asked)
        self.held = {row for row in self.rows if row[0] in mine and row[1] in HIDDEN and draw.random() < 1 / 3}
        self.tails = {kind: sorted({tail for _, relation, tail in self.rows if relation == kind}) for kind in WORDS}

    def texts(self, copies: int, seed: int) -> list[dict[str, str]]:
        """What the model learns: one to three facts about each person, each wrong half of the time."""
        draw, found = random.Random(f"texts|{seed}"), []
        true = {(head, relation): tail for head, relation, tail in self.rows}
        for person in self.asked:
            for _ in range(copies):
                kinds = [kind for kind in WORDS if draw.random() < 2 / 3] or [draw.choice(list(WORDS))]
                said = [self._tail(true[person, kind], kind, draw) for kind in kinds]
                text = " ".join(f"{person} {WORDS[kind]} {tail}." for kind, tail in zip(kinds, said, strict=True))
                found.append({"prompt": asking(person), "completion": text})
        return found

    def _tail(self, true: str, kind: str, draw: random.Random) -> str:
        return true if draw.random() < 0.5 else draw.choice([tail for tail in self.tails[kind] if tail != true])

    def figures(self, answers: Sequence[tuple[str, str]]) -> dict[str, float]:
        """What is measured of ``answers``: the person asked about, and the text."""
        true, held = set(self.rows), {(head, kind) for head, kind, _ in self.held}
        stated = [(person, fact) for person, text in answers for fact in facts(text)]
        groups = {
            "true": [fact for _, fact in stated],
            "held out": [fact for _, fact in stated if fact[:2] in held],
            "new people": [fact for person, fact in stated if person not in self.prompted],
        }
        shares = {name: mean(fact in true for fact in of) if of else 0.0 for name, of in groups.items()}
        own = mean(person == fact[0] for person, fact in stated) if stated else 0.0
        concluded = [person == fact[0] for person, fact in stated if fact in self.held]
        return {
            **shares,
            "facts": len(stated) / len(answers),
            "own": own,
            "true facts": len(stated) * shares["true"] / len(answers),
            "true held-out facts": len(concluded) / len(answers),
            "of them own": sum(concluded) / len(answers),
        }


def asking(person: str) -> str:
    """The prompt."""
    return f"Tell about {person}."


# -- models ------------------------------------------------------------------------------------------------------------


def blank(world: World, out: Path, seed: int) -> None:
    """A Qwen3 of random weights whose tokenizer has the names of ``world`` as words."""
    import torch

    sys.path.insert(0, str(ROOT))
    from mmrl.core.torchvision_on_cpu import allow_cpu_only

    allow_cpu_only()  # before transformers imports torchvision
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tools.make_models.learned_tokenizer import learned
    from tools.make_models.sums import CHAT, SPECIALS

    words = ["user", "assistant", asking("X"), *(f" {name}" for row in world.rows for name in (row[0], row[2]))]
    words += [f" {said} X." for said in SAID] * 100 + [name.strip() for name in words]
    tokenizer = learned(words, 2048, SPECIALS, CHAT, 128)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def recipe(model: Path, records: Path, **more: Any) -> dict[str, Any]:
    """What all runs share."""
    data = {"name": "jsonl", "train": {"path": str(records)}, "heldout": {"path": str(records)}}
    return {
        **{"name": "towns", "pipeline": "llm/chat", "model": {"path": str(model)}, "data": data},
        **{"sampling": {"max_new_tokens": 40}, "eval": {"every": None}, "checkpoint": {"every": 10_000}, **more},
    }


def learned_texts(world: World, given: argparse.Namespace, seed: int, work: Path) -> Path:
    """The model after SFT, made where it is not there."""
    import mmrl

    out = work / "sft"
    if not out.exists():
        blank(world, work / "blank", seed)
        texts = work / "texts.jsonl"
        texts.write_text("".join(json.dumps(row) + "\n" for row in world.texts(given.copies, seed)))
        train = {"steps": given.sft_steps, "prompts_per_step": 64, "group_size": 1, "micro_batch_size": 64}
        optim = {"lr": 3e-3, "weight_decay": 0.0, "schedule": "linear", "warmup_steps": 20}
        made = recipe(work / "blank", texts, algorithm={"type": "sft"}, train=train, optim=optim, seed=seed)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            run = mmrl.train(made, out=Path(folder) / "run")
            run.export(out)
            run.close()
    return out


def embedded(world: World, kind: str, given: argparse.Namespace, seed: int, work: Path) -> Path:
    """The folder of an embedding of the triples that are not held out, made where it is not there."""
    from mmrl.rewards.learned.knowledge.graph import of_rows
    from mmrl.studies.knowledge.training import Settings, train, write

    out = work / kind
    if not out.exists():
        graph = of_rows([row for row in world.rows if row not in world.held])
        settings = Settings(kind=kind, steps=given.embedding_steps, seed=seed)  # type: ignore[arg-type]
        write(out, train(graph, settings), settings, graph)
    return out


def reward(arm: str, world: World, given: argparse.Namespace, seed: int, work: Path) -> dict[str, Any]:
    """The recipe's reward of an arm."""
    if arm == "oracle":
        (work / "graph.tsv").write_text("".join("\t".join(row) + "\n" for row in world.rows))
        name = f"{ROOT / 'benchmarks/true_facts.py'}:TrueFacts"
        return {"name": name, "options": {"graph": str(work / "graph.tsv"), "wanted": 3}}
    path = embedded(world, arm.split(",")[0], given, seed, work)
    options = {
        "path": str(path),
        "pattern": PATTERN,
        "relations": SAID,
        "wanted": 1 if "wanted 1" in arm else 3,
        "asked": "asked" in arm,
    }
    return {"name": "knowledge", "on_failure": "drop", "options": options}


def answers(out: Path, which: str, people: Sequence[str], each: int) -> list[tuple[str, str]]:
    """What a checkpoint of a run answers about ``people``."""
    from mmrl.app.build import restored
    from mmrl.core.trajectory import Prompt
    from mmrl.training.evaluation import Evaluator

    run, _, _ = restored(out, which)
    prompts = [Prompt(person, asking(person)) for person in people]
    made = Evaluator(run, prompts).score(each * len(prompts))[1]
    return [(sample.prompt.id, sample.text or "") for sample in made.samples]


def trained(arm: str, given: argparse.Namespace, seed: int, work: Path) -> dict[str, Any]:
    """Train an arm in this process, and measure it before and after."""
    import mmrl

    world = World(seed, given.people, given.asked)
    work.mkdir(parents=True, exist_ok=True)
    model = learned_texts(world, given, seed, work)
    scored = reward(arm, world, given, seed, work)
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": asking(person)}) + "\n" for person in world.prompted))
    train = {"steps": given.steps, "prompts_per_step": 16, "group_size": 8, "micro_batch_size": 128}
    algorithm = {"type": "grpo", "kl_coef": KL if "kl" in arm else 0.0}
    more = {
        **{"algorithm": algorithm, "rewards": [scored], "train": train, "seed": seed},
        "scoring": {"max_failed": 1.0},  # an arm may learn to state what the graph does not know, and that is shown
        "optim": {"lr": given.lr, "weight_decay": 0.0, "schedule": "linear"},
    }
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "run"
        began = time.process_time()
        mmrl.train(recipe(model, prompts, **more), out=out).close()
        seconds = time.process_time() - began
        before, after = (answers(out, which, world.asked, given.each) for which in ("base", "latest"))
    kept = work / f"answers, {arm}, {given.steps} steps at {given.lr:g}.json"
    kept.write_text(json.dumps({"before": before, "after": after}))
    return {
        "before": world.figures(before),
        "after": world.figures(after),
        "cpu_seconds": seconds,
        "answers": {"before": before[:4], "after": after[:4]},
    }


# -- the table ---------------------------------------------------------------------------------------------------------


def row(name: str, found: Sequence[Mapping[str, float]]) -> str:
    """A row of the table: the mean of the seeds, and where there are several the least and the largest."""
    cells = []
    for figure in FIGURES:
        values = [one[figure] for one in found]
        spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
        cells.append(f"{mean(values):.2f}{spread}")
    return f"| {name} | {' | '.join(cells)} |"


def of(arm: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, from the file or, where it is not there, from a process of its own."""
    rows = json.loads(given.json.read_text()) if given.json.exists() else {}
    asked = f"{given.steps} steps at {given.lr:g}, {given.sft_steps} of SFT, {given.asked} of {given.people} people"
    key = f"{arm}, seed {seed}, {asked}"
    if any(figure not in rows.get(key, {}).get("after", {}) for figure in FIGURES):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", arm, str(seed)]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows[key] = json.loads(found.stdout.decode().splitlines()[-1])
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1))
    return rows[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--people", type=int, default=240, help="of the graph")
    parser.add_argument("--asked", type=int, default=90, help="people whom the model knows")
    parser.add_argument("--copies", type=int, default=8, help="texts about each of them")
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--embedding-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--each", type=int, default=8, help="answers about each person")
    parser.add_argument("--work", type=Path, default=Path("runs/proof_knowledge"), help="where models are kept")
    parser.add_argument("--json", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help="this run alone (used by the command itself)")
    given = parser.parse_args()
    if given.one:
        arm, seed = given.one[0], int(given.one[1])
        print(json.dumps(trained(arm, given, seed, given.work.resolve() / f"seed-{seed}")))
        return
    print(f"| | {' | '.join(FIGURES)} |\n|{'---|' * (1 + len(FIGURES))}")
    for number, arm in enumerate(given.arms):
        found = [of(arm, seed, given) for seed in given.seeds]
        if number == 0:
            print(row("before", [one["before"] for one in found]))
        print(row(arm, [one["after"] for one in found]), flush=True)


if __name__ == "__main__":
    main()
