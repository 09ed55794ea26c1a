"""The proof of the main job: held-out success before and after RL, several seeds, with a measure RL does not see.

    python benchmarks/proof_shapes.py --recipe shapes-full --seeds 0 1 2 --jobs 2   # or shapes-ar, pictures as tokens

Every run is resumable: what is finished is not done again. A run trains the recipe (600 CPU-seconds of RL), then makes
1,024 pictures of held-out compositions with the base model and with the trained one, from the same noise, and prints

- success: the verifier's strict verdict (RL's own reward, on compositions RL never sampled), with a 95 % interval,
- distance: Frechet distance between the pictures and as many drawn pictures of the same captions, in features of the
  VAE's latents (means and second moments over 2 x 2 regions); RL does not see it. Two drawn sets give its floor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

SAMPLES = 1024
OTHER_SAMPLES = 360


def train(recipe: str, seed: int, out: Path, overrides: list[str]) -> None:
    """Train in a process of its own, resuming what an earlier call left."""
    command = [sys.executable, "-m", "mmrl.cli", "train", recipe, f"seed={seed}", *overrides, "--out", str(out)]
    if (out / "resolved.json").exists():
        command.append("--resume")
    with (out.parent / f"{out.name}.log").open("a") as log:  # a name may have a dot: kl-0.02
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measure(out: Path) -> dict[str, float]:
    """Evaluate the base model and the last checkpoint of a run; kept in ``proof.json``."""
    kept = out / "proof.json"
    if kept.exists():
        return json.loads(kept.read_text())
    command = [sys.executable, __file__, "--measure", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(kept.read_text())


def measured(script: str, out: Path, samples: int) -> dict[str, float]:
    """What ``script --measure`` says of a run's base model and last checkpoint; kept in ``proof.json``."""
    kept = out / "proof.json"
    if not kept.exists():
        command = [sys.executable, script, "--measure", str(out), "--samples", str(samples)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(kept.read_text())


def measure_here(path: str) -> None:
    """The work of ``measure``, in this process."""
    import mmrl
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    out = Path(path)
    shapes = mmrl.load("datasets", "shapes")
    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {"steps": len(rows), "cpu_seconds": rows[-1]["perf/cpu_seconds"]}
    for name, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        heldout = Evaluator(run, load_prompts(run.recipe, "heldout"))
        trained = {prompt.text for prompt in heldout.run.prompts}
        assert not any(p.text in trained for p in heldout.prompts), "a held-out composition is among those trained on"
        row, made, _ = heldout.score(SAMPLES)
        images = [sample.image for sample in made.samples if sample.image is not None]
        vae = run.pipeline.adapter.vae if run.pipeline.makes == "image" else shipped_vae()  # type: ignore[attr-defined]
        features = latent_features(vae, images)
        prompts = [sample.prompt for sample in made.samples]
        drawn = [latent_features(vae, [shapes.picture(p, 2 * i + k) for i, p in enumerate(prompts)]) for k in (0, 1)]
        result |= {
            f"{name}/success": row["reward/shapes/success"],
            f"{name}/score": row["reward/shapes"],
            f"{name}/distance": frechet(features, drawn[0]),
            "floor/distance": frechet(drawn[0], drawn[1]),
        }
        # Two-object captions are not in the recipe's training prompts at all: what becomes of them is shown beside.
        others = [p for p in shapes.prompts("heldout") if p.meta["task"] == "relation"]
        _, more, _ = Evaluator(run, others).score(OTHER_SAMPLES)
        for task in ("count", "side", "relation"):
            scored = more if task == "relation" else made
            result[f"{name}/success/{task}"] = mean(
                scores["shapes/success"]
                for scores, sample in zip(scored.scores, scored.samples, strict=True)
                if sample.prompt.meta["task"] == task
            )
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def shipped_vae():
    """The VAE of ``shapes-sd3``, for a policy that writes pictures as tokens."""
    import torch
    from diffusers import AutoencoderKL

    path = Path(__file__).resolve().parents[1] / "pipelines/diffusion/models/shapes-sd3/vae"
    return AutoencoderKL.from_pretrained(path, dtype=torch.float32)


def latent_features(vae, images):
    """``[n, 64]`` float64: mean and second moment of every latent channel over 2 x 2 regions."""
    import numpy
    import torch

    pixels = torch.from_numpy(numpy.stack([numpy.asarray(i) for i in images])).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        z = torch.cat([vae.encode(x).latent_dist.mean for x in pixels.split(128)])
    pool = torch.nn.functional.adaptive_avg_pool2d
    return torch.cat([pool(z, 2).flatten(1), pool(z.square(), 2).flatten(1)], 1).double().numpy()


def frechet(a, b) -> float:
    """Frechet distance of two Gaussians fitted to the rows of ``a`` and ``b`` (Heusel et al. 2017, eq. 6)."""
    import numpy
    import scipy.linalg

    root: Any = scipy.linalg.sqrtm(numpy.cov(a.T) @ numpy.cov(b.T))
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + numpy.trace(numpy.cov(a.T) + numpy.cov(b.T) - 2 * root.real))


def of_seeds(rows: Mapping[str, Mapping[str, float]], keys: Sequence[str]) -> list[str]:
    """Lines of a table: a row per seed, mean and standard deviation over them; the first two ``keys`` are whole."""
    values = {k: [r[k] for r in rows.values()] for k in keys}
    means = {k: mean(v) for k, v in values.items()}
    spread = {k: stdev(v) if len(v) > 1 else math.nan for k, v in values.items()}
    lines = ["| seed | " + " | ".join(keys) + " |", "|" + "---|" * (len(keys) + 1)]
    lines += [
        f"| {name} | " + " | ".join(f"{r[k]:.0f}" if k in keys[:2] else f"{r[k]:.3f}" for k in keys) + " |"
        for name, r in {**rows, "mean": means, "std": spread}.items()
    ]
    return lines


def every_seed(given: argparse.Namespace, measure: Callable[[Path], dict[str, float]]) -> dict[int, dict[str, float]]:
    """Train ``given.recipe`` with every seed, ``given.jobs`` at a time; what ``measure`` says of each."""
    given.out.mkdir(parents=True, exist_ok=True)

    def one(seed: int) -> dict[str, float]:
        out = given.out / f"{Path(given.recipe).stem}-{seed}"
        train(given.recipe, seed, out, given.overrides)
        print(f"seed {seed}: trained", flush=True)
        return measure(out)

    with ThreadPoolExecutor(given.jobs) as pool:
        return dict(zip(given.seeds, pool.map(one, given.seeds), strict=True))


def rise(before: float, after: float) -> dict[str, float]:
    """How much success rose, and the 95 % interval of the difference of two shares of ``SAMPLES``."""
    half = 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / SAMPLES)
    return {"rise": after - before, "rise from": after - before - half, "rise to": after - before + half}


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed, and mean and standard deviation over seeds."""
    keys = ["cpu_seconds", "steps", "before/success", "after/success", "rise", "rise from", "rise to"]
    keys += [f"{when}/success/{task}" for task in ("count", "side", "relation") for when in ("before", "after")]
    keys += ["before/distance", "after/distance", "floor/distance"]
    rows = {str(seed): r | rise(r["before/success"], r["after/success"]) for seed, r in results.items()}
    lines = of_seeds(rows, keys)
    after = mean(r["after/success"] for r in results.values())
    half = 1.96 * math.sqrt(after * (1 - after) / SAMPLES)
    lines.append(
        f"\n{SAMPLES} held-out samples a figure; a single success of {after:.3f} has a 95 % interval of +-{half:.3f}."
    )
    return "\n".join(lines)


def draw_images(runs: list[Path], folder: Path) -> None:
    """The held-out curve of all runs, and before/after of the first one: the same captions and the same noise."""
    from PIL import Image

    from mmrl.logging.grids import before_after
    from mmrl.report.curve import curve_png

    folder.mkdir(parents=True, exist_ok=True)
    curve_png(runs, folder / "curve.png", label="shapes/success", title="held-out success")
    samples = runs[0] / "samples"
    first, last = (
        json.loads(p.read_text())["samples"] for p in (min(samples.glob("*.json")), max(samples.glob("*.json")))
    )
    images = [[Image.open(samples / row["file"]).convert("RGB") for row in rows] for rows in (first, last)]
    before_after(images[0], images[1], [row["prompt"] for row in first], columns=6).save(folder / "before_after.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="shapes-full")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--images", type=Path, help="also draw the README's two pictures into this folder")
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(str(arguments.measure))
        return
    print(table(every_seed(arguments, measure)))
    if arguments.images:
        runs = [arguments.out / f"{Path(arguments.recipe).stem}-{seed}" for seed in arguments.seeds]
        draw_images(runs, arguments.images)


if __name__ == "__main__":
    main()
