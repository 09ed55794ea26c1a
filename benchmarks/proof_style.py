"""Does RL keep a style that was learned from 30 pictures, and gain success? Several seeds, with and without likeness.

    python benchmarks/proof_style.py --seeds 0 1 2 --jobs 1
    python benchmarks/proof_style.py --seeds 0 --plain          # RL without the reward for likeness

Every run is resumable: what is finished is not done again. Each seed: SFT (``shapes-sft``, 60 steps) on 30 drawn
miniatures, whose objects have 0.75 of the usual size; then Flow-GRPO (``shapes-lora``) on the verifier and on likeness
to the 30 pictures, by the vision tower of the shipped ``scenes-vl``. Measured on held-out captions, from equal noise:

- success: the verifier's strict verdict, with a 95 % interval,
- small: the share of pictures whose objects are nearer to the style's size than to the usual one; RL does not see it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmrl

ROOT = Path(__file__).resolve().parents[1]
USUAL = {True: 6.0, False: 4.9}
"""The mean radius of ``shapes``, in pixels, of one object and of several."""
UNIT_AREA = {"circle": math.pi, "square": 3.24, "triangle": 1.8, "cross": 2.3616}
"""The area of a kind of radius 1."""
SFT = ["optim.lr=3e-4", "train.prompts_per_step=16", "train.steps=60", "eval.every=60", "eval.samples=28"]


@mmrl.reward()
def small(samples: Sequence[Any], *, context: object = None) -> dict[str, list[float]]:
    """``score``: 1 where the mean size of a picture's objects over the usual one, ``size``, is below 0.875."""
    shapes = mmrl.load("rewards", "shapes")
    sizes = list[float]()
    for sample in samples:
        meta = sample.prompt.meta
        found, _, _ = shapes.objects_in(sample.image, meta["palette"], meta["background"])
        radii = [math.sqrt(one.area / UNIT_AREA[max(one.overlaps, key=one.overlaps.get)]) for one in found]
        usual = USUAL[sum(one["count"] for one in meta["objects"]) == 1]
        sizes.append(sum(radii) / len(radii) / usual if radii else 1.0)
    return {"score": [float(size < 0.875) for size in sizes], "size": sizes}


def drawn(folder: Path) -> Path:
    """The 30 pictures with captions, as somebody would have them."""
    folder.mkdir(parents=True, exist_ok=True)
    for n, prompt in enumerate(mmrl.load("datasets", "shape_style").prompts("train")):
        (folder / f"{n:02}.png").write_bytes(prompt.media[0].data)
        (folder / f"{n:02}.txt").write_text(prompt.text)
    return folder


def rewards(pictures: Path, weight: float) -> str:
    """The rewards of RL; without likeness where its ``weight`` is 0."""
    tower = ROOT / "pipelines" / "vlm" / "models" / "scenes-vl"
    options = f"{{pictures: {pictures.resolve()}, path: {tower}, copy_above: 0.995}}"
    likeness = f", {{name: likeness, weight: {weight}, normalize: batch, options: {options}}}" if weight else ""
    return f"rewards=[{{name: shapes, normalize: batch}}{likeness}]"


def one_seed(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train both stages, and read what their evaluations measured."""
    from proof_shapes import train

    measured = f"{{name: {Path(__file__).resolve()}:small}}"
    style, lora = given.out / f"style-{seed}", given.out / f"lora-{seed}"
    train("shapes-sft", seed, style, [*SFT, f"eval.rewards=[{{name: shapes}}, {measured}]"])
    if not lora.exists():
        command = [sys.executable, "-m", "mmrl", "export", str(style), "--what", "lora", "--out", str(lora)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    run = given.out / f"rl-{given.weight:g}-{seed}"
    settings = [
        f"model.lora={{path: {lora.resolve()}}}",
        rewards(drawn(given.out / "mine"), given.weight),
        f"eval.rewards=[{measured}]",
        f"train.max_cpu_seconds={given.cpu_seconds}",
        "eval.every=45",
        f"eval.samples={given.samples}",
        "eval.guards.untrained_drop=null",
    ]
    train("shapes-lora", seed, run, [*settings, *given.overrides])
    return read(style, run)


def read(style: Path, run: Path) -> dict[str, float]:
    """What is in the logs of a run of SFT and of the RL that followed."""
    before, after = ([json.loads(line) for line in (one / "heldout.jsonl").open()] for one in (style, run))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    result = {"steps": len(steps), "cpu_seconds": steps[-1]["perf/cpu_seconds"], "samples": after[-1]["samples"]}
    for name, row in (("base", before[0]), ("style", after[0]), ("rl", after[-1])):
        result |= {f"{name}/success": row["reward/shapes/success"], f"{name}/small": row["reward/small"]}
    return result | {"rl/copied": after[-1].get("reward/likeness/copied", math.nan)}


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed, mean and standard deviation, and the intervals."""
    from proof_shapes import of_seeds

    from mmrl.rewards.judging.statistics import wilson

    keys = [
        "cpu_seconds",
        "steps",
        *(f"{when}/{what}" for what in ("success", "small") for when in ("base", "style", "rl")),
    ]
    lines = of_seeds({str(seed): found for seed, found in results.items()}, [*keys, "rl/copied"])
    for what in ("success", "small"):
        for when in ("style", "rl"):
            counts = [(round(r[f"{when}/{what}"] * r["samples"]), round(r["samples"])) for r in results.values()]
            lines.append(f"{when}/{what}: " + ", ".join("{:.3f} to {:.3f}".format(*wilson(*count)) for count in counts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--weight", type=float, default=2.0, help="of likeness")
    parser.add_argument("--plain", dest="weight", action="store_const", const=0.0, help="without likeness")
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="of RL, each seed")
    parser.add_argument("--samples", type=int, default=256, help="held-out pictures")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/proof-style"))
    parser.add_argument("overrides", nargs="*", help="a.b=c, of RL")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda seed: one_seed(given, seed), given.seeds))
    print(table(dict(zip(given.seeds, found, strict=True))))


if __name__ == "__main__":
    main()
