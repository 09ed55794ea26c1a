"""The proofs of Wan 2.2 on a CPU, at small size: a model with two experts, and clips from a first frame; several seeds.

    python benchmarks/proof_wan22.py --kind experts --seeds 0 1 2 --jobs 2
    python benchmarks/proof_wan22.py --kind picture --seeds 0 1 2 --jobs 2

Both are made of the shipped ``motions-wan`` and train its recipe, 600 CPU-seconds of RL. Every run is resumable. Of
held-out clips, in colours and kinds that RL never saw together and from the same noise, it prints how many move as
their caption says, before and after; ``rise`` has a 95 % interval of paired differences.

- ``experts``: a ``WanPipeline`` with ``transformer_2`` and ``boundary_ratio``, as Wan 2.2 A14B. The transformer is
  there twice, one for steps 0 and 1 of 8 and one for the others. A LoRA on each is trained, in two neighbouring steps
  of the first four. ``first alone``, ``second alone``: with the LoRA of the other taken away; ``moved/...``: the norm
  of what each LoRA adds to its weights.
- ``picture``: a ``WanImageToVideoPipeline`` with ``expand_timesteps``, as Wan 2.2 TI2V-5B. Each prompt has a first
  frame of its own, which the model was never trained to go on from. ``steady``: whether the shape moves evenly and
  stays what it is in that frame, for which RL is not paid.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from proof_shapes import every_seed, measured, of_seeds

COMMON = ["train.steps=120", "train.max_cpu_seconds=600"]
SETTINGS = {
    "experts": [
        *COMMON,
        "pipeline=diffusion/wan22_a14b",
        "model.lora={rank: 16, alpha: 32}",
        "sampling.window={size: 2, last: 4}",
        "optim.lr=2e-3",
    ],
    "picture": [
        *COMMON,
        "pipeline=diffusion/wan22_i2v_5b",
        "data={name: motions, train: {pictures: 50}, heldout: {pictures: 50}}",
        "eval.rewards=[{name: 'motion:steady'}]",
    ],
}
BOUNDARY = 0.93
"""Noise levels of the eight steps: 1, 0.95, 0.9, 0.83 and less."""
ARMS = {"experts": ("before", "after", "first alone", "second alone"), "picture": ("before", "after")}


def made(kind: str, out: Path) -> Path:
    """The pipeline of this kind, in ``out``; made where it is not there yet."""
    from mmrl.config.loader import load_recipe

    index = out / "model_index.json"
    if not index.exists():
        shutil.copytree(load_recipe(["moving-shapes"]).recipe.model.path, out, dirs_exist_ok=True)
        said = json.loads(index.read_text())
        if kind == "picture":
            said |= {"_class_name": "WanImageToVideoPipeline", "expand_timesteps": True}
        else:
            shutil.copytree(out / "transformer", out / "transformer_2", dirs_exist_ok=True)
            said |= {"boundary_ratio": BOUNDARY, "transformer_2": said["transformer"]}
        index.write_text(json.dumps(said))
    return out


def measure_here(kind: str, out: Path, samples: int) -> None:
    """The work of ``measured``, in this process."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    rows, found = read(out / "metrics.jsonl"), dict[str, list[float]]()
    result: dict[str, float] = {"cpu_seconds": rows[-1]["perf/cpu_seconds"], "steps": len(rows)}
    for arm in ARMS[kind]:
        run, _, _ = restored(out, "base" if arm == "before" else "latest")
        pipe: Any = run.pipeline.adapter.pipe  # type: ignore[attr-defined]
        experts = {"first": pipe.transformer, "second": pipe.transformer_2} if kind == "experts" else {}
        if arm == "after":
            result |= {f"moved/{name}": added(expert) for name, expert in experts.items()}
        for name, expert in experts.items():
            if arm.endswith("alone") and not arm.startswith(name):
                without(expert)
        row, one, _ = Evaluator(run, load_prompts(run.recipe, "heldout")).score(samples)
        found[arm] = [scores["motion/success"] for scores in one.scores]
        result[arm] = mean(found[arm])
        if kind == "picture":
            result[f"{arm}/steady"] = row["reward/steady"]
    rises = [b - a for a, b in zip(found["before"], found["after"], strict=True)]
    half = 1.96 * stdev(rises) / len(rises) ** 0.5
    result |= {"rise": mean(rises), "rise from": mean(rises) - half, "rise to": mean(rises) + half}
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def added(expert: Any) -> float:
    """The norm of what the LoRA of ``expert`` adds to its weights."""
    squares = [
        (layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight).square().sum().item()
        for layer in expert.modules()
        for name in getattr(layer, "lora_A", {})
    ]
    return sum(squares) ** 0.5


def without(expert: Any) -> None:
    """Let the LoRA of ``expert`` add nothing, whatever weights it gets."""
    for layer in expert.modules():
        for name in getattr(layer, "lora_A", {}):
            layer.scaling[name] = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*SETTINGS], default="experts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=512, help="held-out clips a figure")
    parser.add_argument("--out", type=Path, default=Path("runs/wan22"))
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    given = parser.parse_args()
    if given.measure:
        measure_here(given.measure.parent.name, given.measure, given.samples)
        return
    given.out = given.out.resolve() / given.kind
    model = made(given.kind, given.out / "model")
    given.recipe, given.overrides = (
        "moving-shapes",
        [*SETTINGS[given.kind], f"model.path={model}", *given.overrides],
    )
    results = every_seed(given, lambda out: measured(__file__, out, given.samples))
    print("\n".join(of_seeds({str(seed): of for seed, of in results.items()}, list(next(iter(results.values()))))))


if __name__ == "__main__":
    main()
