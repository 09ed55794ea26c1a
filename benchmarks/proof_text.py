"""The proof of a text recipe: held-out accuracy before and after RL, several seeds, sampled and greedy.

    python benchmarks/proof_text.py --recipe sums --seeds 0 1 2 --jobs 2 --part number/correct

Every run is resumable: what is finished is not done again. A run trains the recipe, then answers the same held-out
prompts (which RL never sampled) with the base model and with the trained one, at the recipe's sampling temperature with
the same random numbers, and greedily. ``--part`` is the held-out metric that counts, such as the verifier's verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

from proof_shapes import every_seed, of_seeds

from mmrl.rewards.judging.statistics import wilson

KEYS = [f"{when}/{how}" for how in ("sampled", "greedy") for when in ("before", "after")]


def measure(out: Path, part: str, samples: int) -> dict[str, float]:
    """Evaluate the base model and the last checkpoint of a run; kept in ``proof.json``."""
    kept = out / "proof.json"
    if not kept.exists():
        command = [sys.executable, __file__, "--measure", str(out), "--part", part, "--samples", str(samples)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(kept.read_text())


def measure_here(out: Path, part: str, samples: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {"steps": len(rows), "cpu_seconds": rows[-1]["perf/cpu_seconds"]}
    for name, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        prompts = load_prompts(run.recipe, "heldout")
        trained = {prompt.text for prompt in run.prompts} if not run.prompts[0].media else set()
        assert not any(p.text in trained for p in prompts), "a held-out prompt is among those trained on"
        for how, temperature in (("sampled", run.recipe.decoding.temperature), ("greedy", 0.0)):
            settings = run.recipe.eval.model_copy(update={"temperature": temperature})
            recipe = run.recipe.model_copy(update={"eval": settings})
            run.pipeline.recipe = recipe  # type: ignore[attr-defined]
            row, made, _ = Evaluator(run, prompts).score(samples)
            result[f"{name}/{how}"] = row[f"reward/{part}"]
            result[f"{name}/{how}/length"] = mean(len(sample.text or "") for sample in made.samples)
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def table(results: dict[int, dict[str, float]], samples: int) -> str:
    """A row per seed, and mean and standard deviation over seeds."""
    keys = ["cpu_seconds", "steps", *KEYS, "rise/sampled", "rise/greedy"]
    rows = {
        str(seed): r | {f"rise/{how}": r[f"after/{how}"] - r[f"before/{how}"] for how in ("sampled", "greedy")}
        for seed, r in results.items()
    }
    lines = of_seeds(rows, keys)
    for how in ("sampled", "greedy"):
        right = [round(r[f"after/{how}"] * samples) for r in results.values()]
        shown = ", ".join("{:.3f} to {:.3f}".format(*wilson(k, samples)) for k in right)
        lines.append(f"\n95 % intervals after RL, {how}, {samples} held-out answers a seed: {shown}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sums")
    parser.add_argument("--part", default="number/correct", help="the held-out metric that counts, after reward/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=1024, help="held-out answers a figure")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.part, arguments.samples)
        return
    found = every_seed(arguments, lambda out: measure(out, arguments.part, arguments.samples))
    print(table(found, arguments.samples))


if __name__ == "__main__":
    main()
