"""The proof of RL on clips: held-out success before and after, several seeds, with a measure that RL does not see.

    python benchmarks/proof_clips.py --seeds 0 1 2 --jobs 2
    python benchmarks/proof_clips.py --recipe RECIPE.yaml --seeds 0 1 2 --jobs 2

Every run is resumable: what is finished is not done again. A run trains ``moving-shapes`` (at most 1,200 CPU-seconds of
RL), or another recipe on the data set ``motions``. It then makes the same held-out clips with the base model and with
the trained one, from the same noise, and prints

- success: does the shape move as the caption says, in colour and kind that RL never saw together;
- looks: colour and kind in every frame, for which RL is not paid;
- steady (where ``eval.rewards`` of the recipe has ``motion:steady``): does it move evenly and stay what it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from proof_shapes import every_seed, measured, of_seeds

from mmrl.rewards.judging.statistics import wilson

KEYS = {
    "success": "reward/motion/success",
    "looks": "reward/looks",
    "colour": "reward/looks/colour",
    "steady": "reward/steady",
}


def measure_here(out: Path, samples: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {
        "steps": len(rows),
        "cpu_seconds": rows[-1]["perf/cpu_seconds"],
        "samples": samples,
    }
    for name, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        prompts = load_prompts(run.recipe, "heldout")
        trained = {(p.meta["colour"], p.meta["kind"]) for p in run.prompts}
        assert not any((p.meta["colour"], p.meta["kind"]) in trained for p in prompts), "held-out pairs were trained on"
        row, _, _ = Evaluator(run, prompts).score(samples)
        result |= {f"{name}/{key}": row[metric] for key, metric in KEYS.items() if metric in row}
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed, and mean and standard deviation over seeds."""
    said = [f"{when}/{key}" for key in KEYS for when in ("before", "after")]
    keys = ["cpu_seconds", "steps", *(key for key in said if key in next(iter(results.values()))), "rise"]
    rows = {str(seed): r | {"rise": r["after/success"] - r["before/success"]} for seed, r in results.items()}
    lines = of_seeds(rows, keys)
    counts = [(round(r["after/success"] * r["samples"]), round(r["samples"])) for r in results.values()]
    shown = ", ".join("{:.3f} to {:.3f}".format(*wilson(*count)) for count in counts)
    return "\n".join([*lines, f"\n95 % intervals of success after RL, of each seed's own samples: {shown}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="moving-shapes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=1024, help="held-out clips a figure")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.samples)
        return
    print(table(every_seed(arguments, lambda out: measured(__file__, out, arguments.samples))))


if __name__ == "__main__":
    main()
