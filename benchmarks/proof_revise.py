"""Revised answers beside one turn, pruning, branches and best-of-N, at equal compute: small sums, several seeds.

    python benchmarks/proof_revise.py --seeds 0 1 2

The model of ``sums`` has never seen a second turn, and writes nonsense there. So it first learns by SFT (20
CPU-seconds) right answers to sums, and to what it is told after a wrong one. From there every arm trains the recipe
``sums`` for the same CPU-seconds, with the same prompts and samples a step:

- one_turn: GRPO, one answer a sample;
- revise: GRPO in the environment ``revise``: a wrong answer is told its score by the verifier, and asked again once;
- pruning: GRPO, twice as many answers are begun, and the half is finished whose steps so far spread most (``midway``);
- branches: GRPO, half as many answers are begun, and each is continued twice (``midway.branches``);
- raft: likelihood of the best answer of each group.

Each is then asked held-out prompts (RL never sampled them) twice, with the same random numbers for all:

- first: one answer is right; either: one of two independent answers is, as if the verifier chose (``pass@2``);
- last: the answer is right at last, in the environment ``revise``; tokens: what it wrote for that, a prompt.

``last`` is to be compared with ``either``: both may ask the verifier once more. ``one_turn`` and ``revise`` are also
compared at equal tokens (``equal/...``): the arm that wrote more is taken back to the checkpoint in which it had
written as many. Every run is resumable; the JSON file has all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from proof_shapes import of_seeds, train

import mmrl

COMMON = [
    "train.prompts_per_step=16",
    "train.group_size=8",
    "train.steps=2000",
    "optim.lr=3e-4",
    "eval={every: 1000, samples: 16}",
    "checkpoint={every: 5, keep: 1000}",
]
TOLD = "That scores 0. Try again."
_ANSWER = f"{{reward: 'answer:number', options: {{after: 'answer:'}}, told: '{TOLD}'}}"
REVISE = [
    f"environment={{name: revise, options: {_ANSWER}, role: user, max_turns: 2, max_tokens: 130}}",
    "rewards=[{name: environment}]",
]
_SO_FAR = f"{Path(__file__).resolve().parent}/right_so_far.py:right_so_far"
_NUMBER = "{name: 'answer:number', options: {after: 'answer:'}}"
_PARTIAL = f"rewards=[{_NUMBER}, {{name: '{_SO_FAR}', label: so_far, weight: 0}}]"
ARMS = {
    "one_turn": [],
    "revise": REVISE,
    "pruning": [_PARTIAL, "midway={tokens: 16, group_size: 16, rewards: [so_far]}"],
    "branches": [_PARTIAL, "midway={tokens: 16, group_size: 4, branches: 2, rewards: [so_far]}"],
    "raft": ["algorithm={type: raft}"],
}


def warmed(out: Path) -> Path:
    """The model that answers again when it is told to; made where it is not there yet."""
    model, run = out / "warmed", out / "warm"
    if not (model / "model.safetensors").exists():
        for split, count in (("train", 3000), ("heldout", 300)):
            (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in conversations(split, count)))
        data = f"data={{name: jsonl, train: {{path: {out}/train.jsonl}}, heldout: {{path: {out}/heldout.jsonl}}}}"
        sft = ["model.lora=null", data, "algorithm={type: sft}", "train.steps=60", "eval={every: 60, samples: 64}"]
        train("sums-sft", 0, run, sft)
        command = [sys.executable, "-m", "mmrl.cli", "export", str(run), "--out", str(model)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return model


def conversations(split: str, count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Right answers, of any cut into steps, to sums, and in half of the records to ``TOLD`` behind a wrong answer."""
    sums, rng = mmrl.load("datasets", "sums"), random.Random(split)
    found = list[dict[str, list[dict[str, str]]]]()
    for n, pair in enumerate(mmrl.load("datasets", "sum_pairs").prompts(split, kind="slips", count=count, seed=1)):
        sizes = rng.choice([(1, 1, 1), (2, 1), (1, 2), (3,)])
        said = [pair.text, *([pair.meta["rejected"], TOLD] if n % 2 else []), sums.response(pair, sizes)]
        roles = ("user", "assistant")
        found.append({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]})
    return found


def tokens(run: Path) -> dict[int, float]:
    """Tokens that the policy had written after each step."""
    total, found = 0.0, dict[int, float]()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        total += 16 * 8 * row["text/length"]
        found[int(row["step"]) + 1] = total
    return found


def measure(run: Path, step: str, prompts: int) -> dict[str, float]:
    """The held-out figures of a checkpoint; kept in the run's folder."""
    kept = run / f"proof-{step}-{prompts}.json"
    if not kept.exists():
        command = [sys.executable, __file__, "--measure", str(run), step, "--prompts", str(prompts)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(kept.read_text())


def measure_here(run: Path, step: str, prompts: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import build, find_checkpoint, open_run
    from mmrl.config.loader import load_recipe
    from mmrl.data.loading import load_prompts
    from mmrl.training.evaluation import Evaluator

    of, directory = open_run(run)
    found = find_checkpoint(directory, step)
    result = dict[str, float]()
    for way in (["eval.samples_per_prompt=2", "eval.pass_at=[2]"], REVISE):
        recipe = load_recipe(["sums"], [*COMMON, *way, f"model.path={of.model.path}"]).recipe
        context = build(recipe)
        if found is not None:
            found.into("policy", context.policy.load_state_dict)
        evaluator = Evaluator(context, load_prompts(recipe, "heldout"))
        row, made, _ = evaluator.score(prompts if way is REVISE else 2 * prompts)
        if way is REVISE:
            played = [sample.episode for sample in made.samples if sample.episode is not None]
            written = [sum(len(turn.action.tokens) for turn in one.turns) for one in played]
            first = [one.turns[0].told[0].reward for one in played]
            result |= {"last": row["reward/environment"], "tokens": mean(written), "first of two": mean(first)}
        else:
            result |= {"first": row["reward/number/correct"], "either": row["pass@2/number"]}
    (run / f"proof-{step}-{prompts}.json").write_text(json.dumps(result, indent=1))


def of_seed(
    out: Path, seed: int, arms: Sequence[str], prompts: int, overrides: Sequence[str]
) -> dict[str, dict[str, float]]:
    """The figures of each arm; ``before`` is the model that all begin with."""
    runs, found = {arm: out / f"{arm}-{seed}" for arm in arms}, dict[str, dict[str, float]]()
    for arm, run in runs.items():
        train("sums", seed, run, [*COMMON, *ARMS[arm], *overrides])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        spent = {"cpu_seconds": rows[-1]["perf/cpu_seconds"], "steps": len(rows), "written": max(tokens(run).values())}
        found[arm] = spent | measure(run, "latest", prompts)
        print(f"seed {seed}, {arm}: {found[arm]}", flush=True)
    found["before"] = {"cpu_seconds": 0.0, "steps": 0, "written": 0.0} | measure(runs[arms[0]], "base", prompts)
    if {"one_turn", "revise"} <= {*arms}:
        most = min(found["one_turn"]["written"], found["revise"]["written"])
        for arm in ("one_turn", "revise"):
            saved = [n for n, so_far in tokens(runs[arm]).items() if so_far <= most and n % 5 == 0]
            at = max(saved, default=0)
            known = measure(runs[arm], str(at) if at else "base", prompts)
            found[f"equal/{arm}"] = {"cpu_seconds": 0.0, "steps": at, "written": tokens(runs[arm]).get(at, 0.0)} | known
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    parser.add_argument("--cpu-seconds", type=float, default=120.0, help="of training, an arm")
    parser.add_argument("--prompts", type=int, default=512, help="held-out ones")
    parser.add_argument("--out", type=Path, default=Path("runs/revise"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "proof_revise.json")
    parser.add_argument("--measure", nargs=2, help="only evaluate this run's checkpoint (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    given = parser.parse_args()
    if given.measure:
        measure_here(Path(given.measure[0]), given.measure[1], given.prompts)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    model = warmed(given.out.resolve())
    overrides = [f"model.path={model}", f"train.max_cpu_seconds={given.cpu_seconds:g}", *given.overrides]
    results = {seed: of_seed(given.out, seed, given.arms, given.prompts, overrides) for seed in given.seeds}
    kept = {"command": " ".join(sys.argv), "cpu_seconds": given.cpu_seconds, "seeds": results}
    given.results.write_text(json.dumps(kept, indent=1) + "\n")
    for arm in next(iter(results.values())):
        rows = {str(seed): of[arm] for seed, of in results.items()}
        print(f"\n{arm}\n\n" + "\n".join(of_seeds(rows, list(next(iter(rows.values()))))))


if __name__ == "__main__":
    main()
