"""The proof of RL on edits: held-out edits done as asked, and what was to stay, before and after, several seeds.

    python benchmarks/proof_edits.py --seeds 0 1 2 --jobs 2

Every run is resumable: what is finished is not done again. A run trains ``shapes-edit`` (600 CPU-seconds of RL). It
then edits 1,024 held-out pictures with the base model and with the trained one, from the same noise, and prints

- done: the verifier's strict verdict on what was asked, for changes of the colour and of the place;
- kept: how much of what was to stay is there (outlines after a change of the colour, the area after one of the place);
- both: the share of edits that are done, with ``kept`` of 0.8 or more; its rise has a 95 % interval of paired samples.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev

from proof_shapes import every_seed, measured, of_seeds

KEPT = 0.8
"""Drawn edits keep 0.9 or more, and two drawings of the same words 0.2 of their outlines."""


def measure_here(out: Path, samples: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {"cpu_seconds": rows[-1]["perf/cpu_seconds"], "steps": len(rows)}
    both: dict[str, dict[int, float]] = {}
    for name, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        prompts = load_prompts(run.recipe, "heldout")
        trained = {wanted(p) for p in run.prompts}
        assert not any(wanted(p) in trained for p in prompts), "a held-out edit is among those trained on"
        _, made, _ = Evaluator(run, prompts).score(samples)
        of = [(s.prompt.meta["edit"], scores) for s, scores in zip(made.samples, made.scores, strict=True)]
        for change in ("colour", "place"):
            result[f"{name}/done/{change}"] = mean(s["shapes/success"] for kind, s in of if kind == change)
            result[f"{name}/kept/{change}"] = mean(s["kept"] for kind, s in of if kind == change)
        both[name] = {
            s.id.slot: float(scores["shapes/success"] and scores["kept"] >= KEPT)
            for s, (_, scores) in zip(made.samples, of, strict=True)
        }
        result[f"{name}/both"] = mean(both[name].values())
    gains = [both["after"][slot] - both["before"][slot] for slot in both["before"]]
    half = 1.96 * stdev(gains) / math.sqrt(len(gains))
    result |= {"rise": mean(gains), "rise from": mean(gains) - half, "rise to": mean(gains) + half}
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def wanted(prompt) -> str:
    """What the picture is to show."""
    return json.dumps(prompt.meta, sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="shapes-edit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=1024, help="held-out edits a figure")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments.measure, arguments.samples)
        return
    results = every_seed(arguments, lambda out: measured(__file__, out, arguments.samples))
    rows = {str(seed): result for seed, result in results.items()}
    print("\n".join(of_seeds(rows, list(next(iter(rows.values()))))))


if __name__ == "__main__":
    main()
