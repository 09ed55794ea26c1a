"""The proof of the recipe on a real language model: constraints kept on held-out tasks before and after RL.

    mmrl fetch smollm2-135m-instruct all-minilm-l6-v2
    python benchmarks/proof_smollm2.py --seeds 0 1 2 --jobs 1

Every run is resumable: what is finished is not done again. A run trains the recipe (2,700 CPU-seconds of RL at most),
then answers the same held-out tasks with the base model and with the trained one, with the same random numbers. Their
subjects were never asked about in training. It prints the share of answers that keep their constraint, for the kinds
that were trained and for those that were not, and what RL does not see: the number of words, the likeness in meaning
with the whole prompt, and the share of the answer that is copied from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean

from proof_shapes import every_seed, measured, of_seeds

from mmrl.rewards.judging.statistics import wilson

SAMPLES = 448
UNSEEN = {
    "words": "constraints/words",
    "likeness": "relevance_to_prompt/cosine",
    "copied": "constraints/copied",
}
"""What is measured and not trained on, by its metric."""


def measure_here(out: Path, samples: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {"steps": len(rows), "cpu_seconds": rows[-1]["perf/cpu_seconds"], "samples": samples}
    for when, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        prompts = load_prompts(run.recipe, "heldout")
        asked = {prompt.meta["subject"] for prompt in run.prompts}
        assert not any(prompt.meta["subject"] in asked for prompt in prompts), "a held-out subject was trained on"
        row, _, _ = Evaluator(run, prompts).score(samples)
        trained = {source.label for source in run.recipe.data.mixture if source.train is not None}
        kinds = {str(s.label): row[f"source/{s.label}/reward/constraints/kept"] for s in run.recipe.data.mixture}
        result |= {f"{when}/kind/{kind}": kept for kind, kept in kinds.items()}
        result[f"{when}/trained kinds"] = mean(kept for kind, kept in kinds.items() if kind in trained)
        result[f"{when}/other kinds"] = mean(kept for kind, kept in kinds.items() if kind not in trained)
        result[f"{when}/kept"] = row["reward/constraints/kept"]
        result |= {f"{when}/{name}": row[f"reward/{metric}"] for name, metric in UNSEEN.items()}
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed of each measure, with mean and standard deviation over seeds; then the kinds, over seeds."""
    lines = []
    for measures in (["kept"], ["trained kinds", "other kinds"], list(UNSEEN)):
        keys = ["cpu_seconds", "steps", *(f"{when}/{name}" for name in measures for when in ("before", "after"))]
        lines += [*of_seeds({str(seed): row for seed, row in results.items()}, keys), ""]
    lines += ["| kind | before | after |", "|---|---|---|"]
    first = next(iter(results.values()))
    for kind in (key.removeprefix("before/kind/") for key in first if key.startswith("before/kind/")):
        shown = [f"{mean(row[f'{when}/kind/{kind}'] for row in results.values()):.3f}" for when in ("before", "after")]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    right = [(round(row["after/kept"] * row["samples"]), int(row["samples"])) for row in results.values()]
    shown = ", ".join("{:.3f} to {:.3f}".format(*wilson(k, n)) for k, n in right)
    return "\n".join([*lines, "", f"95 % intervals of what is kept after RL, for each seed: {shown}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-instructions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="held-out answers, before and after")
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
