"""Does RL keep a style that was learned from 30 pictures, and gain success? Several seeds, with and without likeness.

    python benchmarks/proof_style.py --seeds 0 1 2 --jobs 1
    python benchmarks/proof_style.py --seeds 0 --plain          # RL without a reward for the style
    python benchmarks/proof_style.py --seeds 0 --tower          # likeness by a vision tower

Every run is resumable: what is finished is not done again. Each seed: SFT (``shapes-sft``, 60 steps) on 30 drawn
miniatures, whose objects have 0.75 of the usual size; then RL (``shapes-lora``) on the verifier and on a reward for the
style, by DGPO. The reward is learned: samples of the model after SFT (1) and before (0), of the 30 captions, are
labels, and ``mmrl spread --model`` makes a reward of them, which reads pictures with the model that draws. Measured on
held-out captions, from equal noise:

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
from statistics import mean
from typing import Any

import mmrl

ROOT = Path(__file__).resolve().parents[1]
USUAL = {True: 6.0, False: 4.9}
"""The mean radius of ``shapes``, in pixels, of one object and of several."""
UNIT_AREA = {"circle": math.pi, "square": 3.24, "triangle": 1.8, "cross": 2.3616}
"""The area of a kind of radius 1."""
RL = [
    *("algorithm={type: dgpo, noise_levels: 2}", "eval.steps=10", "eval.solver=euler"),
    *("train.steps=40", "eval.every=45", "eval.guards.untrained_drop=null"),
]
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


def mmrl_(*words: object) -> None:
    """Run the command line."""
    command = [sys.executable, "-m", "mmrl", *map(str, words)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def learned(style: Path, captions: Sequence[str], out: Path) -> Path:
    """The folder of a reward that tells samples of the model after SFT from those of the model before."""
    if (out / "labels.json").exists():
        return out
    both = out.with_name(f"{out.name}-samples")
    both.mkdir(parents=True, exist_ok=True)
    (both / "captions.txt").write_text("\n".join(captions))
    rows = ["file,label"]
    for label, which in enumerate(("base", "latest")):
        drawn = out.with_name(f"{out.name}-{which}")
        if not drawn.exists():
            mmrl_("sample", style, "--checkpoint", which, "--prompts", both / "captions.txt", "--n", 6, "--out", drawn)
        for line in (drawn / "samples.jsonl").read_text().splitlines():
            row = json.loads(line)
            name = f"{which}-{row['file'].replace('/', '-')}"
            (both / name).write_bytes((drawn / row["file"]).read_bytes())
            (both / name).with_suffix(".txt").write_text(row["prompt"])
            rows.append(f"{name},{label}")
    (both / "captions.txt").unlink()
    (both / "labels.csv").write_text("\n".join(rows))
    mmrl_("spread", both, "--model", "shapes-full", "--by", "head", "--out", out)
    return out


def rewards(given: argparse.Namespace, style: Path, seed: int) -> str:
    """The rewards of RL; without one for the style where its weight is 0."""
    if not given.weight:
        return "rewards=[{name: shapes, normalize: batch}]"
    mine = drawn(given.out / "mine")
    if given.tower:
        tower = ROOT / "pipelines" / "vlm" / "models" / "scenes-vl"
        own = f"name: likeness, options: {{pictures: {mine.resolve()}, path: {tower}, copy_above: 0.995}}"
    else:
        captions = [file.read_text() for file in sorted(mine.glob("*.txt"))]
        own = f"name: labels, options: {{path: {learned(style, captions, given.out / f'reward-{seed}').resolve()}}}"
    return f"rewards=[{{name: shapes, normalize: batch}}, {{{own}, weight: {given.weight}, normalize: batch}}]"


def one_seed(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train both stages, and read what their evaluations measured."""
    from cost_jobs import FORWARD  # not above: this file is a reward, too
    from proof_shapes import train

    measured = f"{{name: {Path(__file__).resolve()}:small}}"
    style, lora = given.out / f"style-{seed}", given.out / f"lora-{seed}"
    train("shapes-sft", seed, style, [*SFT, f"eval.rewards=[{{name: shapes}}, {measured}]"])
    if not lora.exists():
        mmrl_("export", style, "--what", "lora", "--out", lora)
    run = given.out / f"rl-{'tower-' * given.tower}{given.weight:g}-{seed}{given.name}"
    settings = [
        f"model.lora={{path: {lora.resolve()}}}",
        rewards(given, style, seed),
        f"eval.rewards=[{measured}]",
        f"train.max_cpu_seconds={given.cpu_seconds}",
        f"eval.samples={given.samples}",
    ]
    train("shapes-lora", seed, run, [*FORWARD, *RL, *settings, *given.overrides])
    return read(style, run)


def read(style: Path, run: Path) -> dict[str, float]:
    """What is in the logs of a run of SFT and of the RL that followed."""
    before, after = ([json.loads(line) for line in (one / "heldout.jsonl").open()] for one in (style, run))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    result = {"steps": len(steps), "cpu_seconds": steps[-1]["perf/cpu_seconds"], "samples": after[-1]["samples"]}
    for name, row in (("base", before[0]), ("style", after[0]), ("rl", after[-1])):
        result |= {f"{name}/success": row["reward/shapes/success"], f"{name}/small": row["reward/small"]}
    if "reward/likeness/copied" in after[-1]:
        result["rl/copied"] = after[-1]["reward/likeness/copied"]
    return result


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed, mean and standard deviation, and the intervals."""
    from proof_labels import interval
    from proof_shapes import of_seeds

    from mmrl.rewards.judging.statistics import wilson

    keys = [
        "cpu_seconds",
        "steps",
        *(f"{when}/{what}" for what in ("success", "small") for when in ("base", "style", "rl")),
    ]
    copied = ["rl/copied"] if all("rl/copied" in found for found in results.values()) else []
    lines = of_seeds({str(seed): found for seed, found in results.items()}, [*keys, *copied])
    for what in ("success", "small"):
        for when in ("style", "rl"):
            counts = [(round(r[f"{when}/{what}"] * r["samples"]), round(r["samples"])) for r in results.values()]
            lines.append(f"{when}/{what}: " + ", ".join("{:.3f} to {:.3f}".format(*wilson(*count)) for count in counts))
        style, rl = (mean(found[f"{when}/{what}"] for found in results.values()) for when in ("style", "rl"))
        low, high = interval(style, rl, sum(round(found["samples"]) for found in results.values()))
        lines.append(f"by RL, {what}: {rl - style:+.3f} ({low:+.3f} to {high:+.3f}), all seeds together")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--weight", type=float, default=0.3, help="of the reward for the style")
    parser.add_argument("--plain", dest="weight", action="store_const", const=0.0, help="without it")
    parser.add_argument("--tower", action="store_true", help="likeness by the vision tower of scenes-vl")
    parser.add_argument("--name", default="", help="of the folder of RL, for other settings")
    parser.add_argument("--cpu-seconds", type=float, default=320.0, help="of RL, each seed")
    parser.add_argument("--samples", type=int, default=512, help="held-out pictures")
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
