"""The proof of worlds that nobody here wrote, several seeds: how often a small vision-language model reaches the green
square of MiniGrid's ``Empty-Random-5x5``, and a small language model, or SmolLM2, answers a question of reasoning-gym
within three tries, or finds the number of TextArena's ``GuessTheNumber``, before and after RL.

    python benchmarks/proof_world.py --seeds 0 1 2
    python benchmarks/proof_world.py --recipe reasoning-gym --seeds 0 1 2
    python benchmarks/proof_world.py --recipe guess-number --seeds 0 1 2
    python benchmarks/proof_world.py --recipe smollm2-sums --seeds 0 1 2

Each seed trains the recipe. The shipped model of MiniGrid writes drawn moves and sees where the triangle is, and
knows nothing of where to go; the recipe of reasoning-gym begins with SFT, and ``before`` is behind it. Every run is
resumable. Success is the share of held-out worlds, which RL never drew, in which the square is reached within 20
moves, the answer is right within three, or the number is found within three guesses. Of the questions only those count
that no prompt of training asks, each once. The interval is of paired differences, the same worlds before and after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from proof_shapes import of_seeds, train

LEAST = {"guess-number": 0.16}
"""What is won by a recipe has a higher reward: two refused moves, at 0.4 each, end a game with 0.95 at most."""

QUESTIONS = ("reasoning-gym", "smollm2-sums")


def reached(run: Path) -> tuple[list[float], list[float]]:
    """For each held-out world 1 where the aim was reached, before and after."""
    rows = [json.loads(line) for line in (run / "heldout_samples.jsonl").read_text().splitlines()]
    before, after = (
        dict(zip(row["prompts"], row["values"]["reward/environment"], strict=True)) for row in (rows[0], rows[-1])
    )
    of = run.name.rpartition("-")[0]
    least, counted = LEAST.get(of, 0.0), new_questions(run) if of in QUESTIONS else before.keys()
    names = [name for name in before if name in counted]
    return [float(before[name] > least) for name in names], [float(after[name] > least) for name in names]


def new_questions(run: Path) -> set[str]:
    """The held-out questions that no prompt of training asks, each once."""
    from mmrl.config.loader import load_recipe
    from mmrl.data.loading import load_prompts

    recipe = load_recipe([run / "resolved.json"]).recipe
    asked = {prompt.text for prompt in load_prompts(recipe, "train")}
    new = {prompt.text: prompt.id for prompt in load_prompts(recipe, "heldout") if prompt.text not in asked}
    return {*new.values()}


def figures(run: Path) -> dict[str, float]:
    before, after = reached(run)
    rises = [b - a for a, b in zip(before, after, strict=True)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    half = 1.96 * stdev(rises) / len(rises) ** 0.5
    return {
        "cpu_seconds": rows[-1]["perf/cpu_seconds"],
        "steps": len(rows),
        "worlds": len(rises),
        "before": mean(before),
        "after": mean(after),
        "rise": mean(rises),
        "rise from": mean(rises) - half,
        "rise to": mean(rises) + half,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="minigrid", choices=["minigrid", "guess-number", *QUESTIONS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/world"))
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = dict[str, dict[str, float]]()
    for seed in given.seeds:
        run = given.out / f"{given.recipe}-{seed}"
        train(given.recipe, seed, run, given.overrides)
        results[str(seed)] = figures(run)
        print(f"seed {seed}: trained", flush=True)
    print("\n".join(of_seeds(results, list(next(iter(results.values()))))))


if __name__ == "__main__":
    main()
