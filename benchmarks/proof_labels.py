"""Does a reward that is spread from 200 labels make a model better, by a verifier that does not train?

    python benchmarks/proof_labels.py --cache /tmp/labels --json benchmarks/results/proof_labels.json --seeds 0 1 2

The pictures are those of ``labels.py`` (about 5,000, drawn by the shipped model of ``shapes-full``; kept in
``--cache``). For each seed 200 others of them get the verifier's verdict as their label. ``mmrl spread`` makes a reward
of them, with the model's own embedding; the best method on held-out labels gives the scores. Then GRPO trains the
recipe with this reward alone, whose seed is that of the labels. Held-out success by the verifier is measured before and
after, on the same prompts and noise; the reward on the same samples too. ``oracle`` is the same run with the verifier
as the reward, the most that labels can give. ``--json`` gets each run as it ends; what stands there is not done again.
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
from tempfile import TemporaryDirectory
from typing import Any

import torch
from labels import RECIPE, drawn
from PIL import Image

ARMS = ("labels", "oracle")


def pictures(cache: Path, count: int) -> Path:
    """The folder of the drawn pictures with their prompts, made where it is not there."""
    found, folder = drawn(cache, count), cache / f"pictures-{count}"
    if not folder.exists():
        made = folder.with_suffix(".part")
        made.mkdir(exist_ok=True)
        for n, (picture, prompt) in enumerate(zip(found["pixels"], found["prompts"], strict=True)):
            Image.fromarray(picture).save(made / f"{n:05d}.png")
            (made / f"{n:05d}.txt").write_text(str(prompt))
        made.rename(folder)
    return folder


def spread_of(given: argparse.Namespace, seed: int) -> tuple[Path, dict[str, Any]]:
    """The reward of a seed's labels, and what ``mmrl spread`` said of it."""
    from mmrl.config.loader import load_recipe
    from mmrl.labels.readers import described
    from mmrl.labels.spread_folder import spread_folder

    truth = drawn(given.cache, given.samples)["success"]
    folder, out = pictures(given.cache, given.samples), given.cache / f"spread-{given.labels}-{seed}"
    if not out.exists():
        draw = torch.Generator().manual_seed(seed)
        chosen = sorted(torch.randperm(len(truth), generator=draw)[: given.labels].tolist())
        table = given.cache / f"labels-{given.labels}-{seed}.csv"
        table.write_text("file,label\n" + "".join(f"{n:05d}.png,{truth[n]:g}\n" for n in chosen))
        loaded = load_recipe([RECIPE], [])
        spread_folder(folder, out, table, model=described(loaded.recipe, loaded.root))
    said = json.loads((out / "labels.json").read_text())
    return out, {"by": said["by"], "held out": said["figures"][said["by"]]["auc"]}


def trained(arm: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train in this process: held-out success before and after, the reward, the CPU-seconds."""
    import mmrl

    said: dict[str, Any] = {}
    listed = "[{name: shapes}]"
    if arm == "labels":
        path, said = spread_of(given, seed)
        listed = f"[{{name: labels, options: {{path: {path}}}}}, {{name: shapes, weight: 0}}]"
    changes = [f"rewards={listed}", f"seed={seed}", "model.dtype=float32", f"train.steps={given.steps}"]
    changes += ["train.max_cpu_seconds=null", f"eval.every={given.steps}", f"eval.samples={given.heldout}"]
    with TemporaryDirectory(dir=given.cache) as folder:
        run = mmrl.train(RECIPE, changes, out=Path(folder) / "run")
        heldout = [json.loads(line) for line in (run.path / "heldout.jsonl").read_text().splitlines()]
        spent = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["perf/cpu_seconds"]
        run.close()
    for row, when in ((heldout[0], "before"), (heldout[-1], "after")):
        said |= {when: row["reward/shapes/success"], f"reward {when}": row.get("reward/labels")}
    return {**said, "cpu_seconds": spent}


def interval(before: float, after: float, samples: int) -> tuple[float, float]:
    """95 % of a difference of two shares, taken as independent, which is wider than for equal prompts and noise."""
    near = 1.96 * math.sqrt(sum(share * (1 - share) / samples for share in (before, after)))
    return after - before - near, after - before + near


def of(given: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """The result of a run, from the file or, where it is not there, from a process of its own."""
    rows = json.loads(given.json.read_text()) if given.json.exists() else {}
    key = f"{arm}, seed {seed}, {given.labels} of {given.samples}, {given.steps} steps"
    if key not in rows:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", arm, str(seed)]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows[key] = json.loads(found.stdout.decode().splitlines()[-1])
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows[key]


def lines(arm: str, seeds: Sequence[int], runs: Sequence[dict[str, Any]], samples: int) -> list[str]:
    """Lines of the table: a run each, and the mean of them."""
    found = []
    for seed, run in zip(seeds, runs, strict=True):
        low, high = interval(run["before"], run["after"], samples)
        rewards = [run[f"reward {when}"] for when in ("before", "after")]
        scored = "" if rewards[0] is None else f"{rewards[0]:.3f} to {rewards[1]:.3f}"
        change = f"{run['after'] - run['before']:+.3f} ({low:+.3f} to {high:+.3f})"
        cells = [arm, str(seed), run.get("by", ""), f"{run['before']:.3f}", f"{run['after']:.3f}", change, scored]
        found.append(f"| {' | '.join([*cells, format(run['cpu_seconds'], '.0f')])} |")
    means = [mean(run[when] for run in runs) for when in ("before", "after")]
    last = [arm, "mean", "", f"{means[0]:.3f}", f"{means[1]:.3f}", f"{means[1] - means[0]:+.3f}", "", ""]
    return [*found, f"| {' | '.join(last)} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=5000, help="pictures that are drawn")
    parser.add_argument("--labels", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--heldout", type=int, default=512, help="held-out samples of an evaluation")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help="this run alone (used by the command itself)")
    given = parser.parse_args()
    given.cache = given.cache.resolve()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(trained(given.one[0], given, int(given.one[1]))))
        return
    print("| reward | seed | scores by | before | after | difference (95 %) | the reward | CPU-seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for arm in given.arms:
        runs = [of(given, arm, seed) for seed in given.seeds]
        print("\n".join(lines(arm, given.seeds, runs, given.heldout)), flush=True)


if __name__ == "__main__":
    main()
