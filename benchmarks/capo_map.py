"""Where credit by critique (CAPO) beats GRPO: a map of the length of a chain and the accuracy of the critic.

    python benchmarks/capo_map.py --json benchmarks/results/capo_map.json
    python benchmarks/capo_map.py --json FILE --lengths 5 --arms capo:0.75:4:majority capo:0.75:4:union --seeds 0 1 2

The task is the data set ``sums`` with 3, 5 and 7 operations. The shipped model knows chains of 3 only, so that it first
learns right answers of all these lengths for a little while (``--warm-up`` steps of SFT; kept in ``--work``). The model
that results is the start of every run. The longer the chain, the rarer a right answer.

Arms, all of the same steps, samples and learning rate:

- ``grpo``: the verifier of the answer alone.
- ``capo:ACCURACY[:VOTES:RULE]``: the verifier, and a critic of steps that is right with this chance about each
  (``step_critic.py``: a program, which costs nothing), as rewards of tokens.
- ``share:ACCURACY[:VOTES:RULE]``: GRPO with the same critic as a second reward of the whole response.
- ``judge``: CAPO with the generative critic that is shipped, within the CPU-seconds that ``grpo`` spent with this seed.

The table has the share of right answers to the same held-out prompts, sampled from the same noise. ``--json`` gets each
run as it ends. Runs that stand there are not done again, and all of them are printed.

    python benchmarks/capo_map.py --votes 0.75

trains nothing: it prints the mean penalty of a wrong step and of a right one by the number of independent critiques and
the rule that combines them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CRITIC = ROOT / "benchmarks/step_critic.py"
MODELS = ROOT / "pipelines/llm/models"
TOKENS = 12
"""Of one operation at most, its blank line counted; the answer has less."""
STEPS = {3: 20, 5: 14, 7: 10}
"""Of a run by the length of its chains, about 50 CPU-seconds each."""
LENGTHS = (3, 5, 7)
ARMS = ("grpo", "capo:1", "capo:0.9", "capo:0.75", "capo:0.5", "share:1")


@dataclass(frozen=True)
class Spec:
    """Final class; one run: its arm and what it is given. ``seconds``: CPU-seconds that end it, for the judge."""

    arm: str
    length: int
    seed: int
    steps: int
    warm_up: int
    samples: int
    lr: float
    seconds: float | None = None

    @property
    def key(self) -> str:
        """The name of the run in the file."""
        asked = f"{self.steps} steps at {self.lr:g}, {self.samples} samples, warm-up {self.warm_up}"
        return f"{self.arm}, length {self.length}, seed {self.seed}, {asked}"


def rewards(arm: str) -> tuple[str, str]:
    """The algorithm and the rewards of an arm. Exits where there is no such arm."""
    verifier = '{name: answer:number, options: {after: "answer:"}}'
    kind, *given = arm.split(":")
    if kind in ("capo", "share") and len(given) in (1, 3):
        keys = ("accuracy", "votes", "vote")[: len(given)]
        options = ", ".join(f"{key}: {value}" for key, value in zip(keys, given, strict=True))
        name, weight = ("Critic", 1) if kind == "capo" else ("Share", 0.5)
        critic = f"{{name: '{CRITIC}:{name}', label: critic, weight: {weight}, options: {{{options}}}}}"
        return ("capo" if kind == "capo" else "grpo"), f"[{verifier}, {critic}]"
    if arm == "grpo":
        return "grpo", f"[{verifier}]"
    if arm != "judge":
        sys.exit(f"--arms {arm}: give grpo, judge, capo:ACCURACY[:VOTES:RULE] or share:ACCURACY[:VOTES:RULE]")
    folder = MODELS / "sums-critic"
    options = f"model: {{path: {folder}, batch: 256}}, rubric: {folder}/rubric.txt, mode: steps, max_tokens: 48"
    judge = f"{{name: judge, label: critic, on_failure: drop, batch_size: 512, options: {{{options}}}}}"
    return "capo", f"[{verifier}, {judge}]"


def overrides(spec: Spec, model: Path) -> list[str]:
    """Of the recipe ``sums``."""
    algorithm, listed = rewards(spec.arm)
    return [
        f"model.path={model}",
        f"data.train.operations={spec.length}",
        f"data.heldout.operations={spec.length}",
        f"sampling.max_new_tokens={TOKENS * (spec.length + 1)}",
        f"algorithm={{type: {algorithm}, aggregation: token_mean, clip_high: 0.28, kl_coef: 0.0}}",
        f"rewards={listed}",
        f"train.steps={spec.steps if spec.seconds is None else 10 * spec.steps}",
        "train.prompts_per_step=16",
        "train.group_size=8",
        f"train.max_cpu_seconds={'null' if spec.seconds is None else spec.seconds}",
        f"optim.lr={spec.lr}",
        "model.dtype=float32",
        f"seed={spec.seed}",
        "eval.every=null",
        "checkpoint.every=1000",
        # The shipped critic knows chains of 3 operations and fails on a part of the longer ones: that is a result.
        *(["scoring={max_failed: 1.0, patience: 0}"] if spec.arm == "judge" else []),
    ]


def warmed(steps: int, work: Path) -> Path:
    """The model that has learned the longer chains, made where it is not there."""
    model = work / f"warm-{steps}"
    if not model.exists():
        import mmrl

        work.mkdir(parents=True, exist_ok=True)
        sources = ", ".join(
            f"{{name: sum_pairs, label: n{n}, train: {{kind: steps, count: 4000, operations: {n}}},"
            f" heldout: {{kind: steps, count: 256, operations: {n}}}}}"
            for n in LENGTHS
        )
        changes = [
            *(f"data={{mixture: [{sources}]}}", "model.lora=null", "model.dtype=float32", f"train.steps={steps}"),
            *("train.prompts_per_step=64", "train.micro_batch_size=64", "optim.lr=2e-3", "eval.every=null"),
            f"sampling.max_new_tokens={TOKENS * (max(LENGTHS) + 1)}",
        ]
        with tempfile.TemporaryDirectory(dir=work) as folder:
            run = mmrl.train("sums-sft", changes, out=Path(folder) / "run")
            run.export(model)
            run.close()
    return model


def run(spec: Spec, work: Path) -> dict[str, Any]:
    """Train an arm in this process. ``success``: of held-out answers after it; ``alike``: of the critic's verdicts."""
    import mmrl
    from mmrl.logging.metrics import read

    model = warmed(spec.warm_up, work)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        trained = mmrl.train("sums", overrides(spec, model), out=Path(folder) / "run")
        rows = read(trained.path / "metrics.jsonl")
        after = trained.evaluate(samples=spec.samples)
        before = (
            trained.evaluate(samples=spec.samples, checkpoint="base") if (spec.arm, spec.seed) == ("grpo", 0) else None
        )
        trained.close()
    return {
        "success": after["reward/number/correct"],
        "before": before and before["reward/number/correct"],
        "cpu_seconds": rows[-1]["perf/cpu_seconds"],
        "steps": len(rows),
        "alike": mean(row["reward/critic/alike"] for row in rows) if "reward/critic/alike" in rows[0] else None,
        "rewarded": [row["reward/number/correct"] for row in rows],
        "flat": [row["advantage/zero_std_groups"] for row in rows],
    }


# -- the table ---------------------------------------------------------------------------------------------------------


class Runs:
    """The runs that are done, in a file; ``of`` does one that is not there."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work = path, work
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, spec: Spec) -> dict[str, Any]:
        if spec.key not in self.rows:
            self.work.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "result.json"
                command = [sys.executable, __file__, "--one", json.dumps(asdict(spec))]
                command += ["--json", str(out), "--work", str(self.work)]
                with (Path(folder) / "log").open("w+") as log:
                    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                    if subprocess.run(command, stdout=log, stderr=log, env=environment).returncode:
                        log.seek(0)
                        sys.exit(f"{spec.key} failed:\n{log.read()[-3000:]}")
                result = json.loads(out.read_text())
            self.rows[spec.key] = {"spec": asdict(spec), **result}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows, indent=1))
            shown = f"{result['cpu_seconds']:.0f} CPU-seconds, success {result['success']:.3f}"
            print(f"{spec.key}: {shown}", file=sys.stderr, flush=True)
        return self.rows[spec.key]


def cell(found: list[dict[str, Any]]) -> str:
    """The mean of the seeds, and where there are several the least and the largest."""
    if not found:
        return ""
    values = [one["success"] for one in found]
    spread = f" ({min(values):.3f} to {max(values):.3f}, {len(values)} seeds)" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def table(rows: dict[str, Any]) -> str:
    """A row for each arm and rate, and a column for each length, of all runs of the file."""
    runs = list(rows.values())

    def of(length: int, arm: str | None = None, rate: float = 0.0) -> list[dict[str, Any]]:
        alike = [one for one in runs if one["spec"]["length"] == length]
        return [one for one in alike if arm is None or (one["spec"]["arm"], one["spec"]["lr"]) == (arm, rate)]

    lengths = sorted({one["spec"]["length"] for one in runs})
    kinds = sorted({(one["spec"]["arm"], one["spec"]["lr"]) for one in runs}, key=lambda k: (k[0] != "grpo", *k))
    head = ["arm", "rate", *(f"{n} operations" for n in lengths), "verdicts that are right"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    starts = [next((f"{one['before']:.3f}" for one in of(n) if one["before"] is not None), "") for n in lengths]
    lines.append(f"| before | | {' | '.join(starts)} | |")
    for arm, rate in kinds:
        said = [one["alike"] for n in lengths for one in of(n, arm, rate) if one["alike"] is not None]
        cells = [arm, f"{rate:g}", *(cell(of(n, arm, rate)) for n in lengths), f"{mean(said):.2f}" if said else ""]
        lines.append(f"| {' | '.join(cells)} |")
    spent = [[one["cpu_seconds"] for one in of(n)] for n in lengths]
    lines.append(f"| CPU-seconds of a run | | {' | '.join(f'{min(s):.0f} to {max(s):.0f}' for s in spent)} | |")
    return "\n".join(lines)


def punished(accuracy: float, votes: int, rule: Any) -> tuple[float, float]:
    """The mean penalty of a wrong step and of a right one, where ``votes`` independent critiques are each right about a
    step with the chance ``accuracy``."""
    from mmrl.rewards.judging.modes import vote_steps

    def mean_of(named: float) -> float:
        chances = [comb(votes, k) * named**k * (1 - named) ** (votes - k) for k in range(votes + 1)]
        penalties = [vote_steps([[1]] * k + [[]] * (votes - k), rule).get(1, 0.0) for k in range(votes + 1)]
        return sum(chance * penalty for chance, penalty in zip(chances, penalties, strict=True))

    return mean_of(accuracy), mean_of(1 - accuracy)


def votes_table(accuracy: float) -> str:
    """A row for each rule and a column for each number of votes."""
    numbers = (1, 2, 4, 8)
    lines = [f"| rule | {' | '.join(f'{n} votes' for n in numbers)} |", "|---" * (1 + len(numbers)) + "|"]
    for rule in ("intersection", "majority", "union", "average"):
        cells = [" and ".join(f"{share:.3f}" for share in punished(accuracy, n, rule)) for n in numbers]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS))
    made.add_argument("--arms", nargs="+", default=list(ARMS))
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--lr", type=float, default=3e-4)
    made.add_argument("--warm-up", type=int, default=120, help="steps of SFT on right answers")
    made.add_argument("--samples", type=int, default=512, help="held-out samples of an evaluation")
    made.add_argument("--work", type=Path, default=Path("runs/capo_map"), help="where the warmed model is kept")
    made.add_argument("--json", type=Path, help="where runs are kept")
    made.add_argument(
        "--votes", type=float, metavar="ACCURACY", help="print what votes do to errors, and train nothing"
    )
    made.add_argument("--one", help="train this run alone (used by the command itself)")
    return made


def main() -> None:
    given = parser().parse_args()
    if given.votes is not None:
        print(votes_table(given.votes))
        return
    if given.json is None:
        sys.exit("name --json FILE, where runs are kept, or --votes ACCURACY")
    work = given.work.resolve()
    if given.one:
        given.json.write_text(json.dumps(run(Spec(**json.loads(given.one)), work)))
        return
    for arm in given.arms:
        rewards(arm)
    runs = Runs(given.json, work)
    for length in given.lengths:
        for arm in given.arms:
            for seed in given.seeds:
                asked = Spec(arm, length, seed, STEPS[length], given.warm_up, given.samples, given.lr)
                if arm == "judge":
                    spent = runs.of(Spec(**{**asdict(asked), "arm": "grpo"}))["cpu_seconds"]
                    asked = Spec(**{**asdict(asked), "seconds": spent})
                runs.of(asked)
    print(table(runs.rows))


if __name__ == "__main__":
    main()
