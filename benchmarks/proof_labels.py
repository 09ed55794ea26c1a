"""Does a reward that is spread from 200 labels make a model better, by a verifier that does not train?

    python benchmarks/proof_labels.py --cache /tmp/labels --json benchmarks/results/proof_labels.json --seeds 0 1 2

The pictures are those of ``labels.py`` (about 5,000, drawn by the shipped model of ``shapes-full``; kept in
``--cache``). For each seed 200 others of them get the verifier's verdict as their label. ``mmrl spread`` makes a reward
of them, with the model's own embedding; the best method on held-out labels gives the scores. Then GRPO trains the
recipe with this reward alone, whose seed is that of the labels. Held-out success by the verifier is measured before and
after, on the same prompts and noise; the reward on the same samples too. ``oracle`` is the same run with the verifier
as the reward, the most that labels can give. ``--json`` gets each run as it ends; what stands there is not done again.

``pairs``: the same labels are spread with ``--pairs``, and Diffusion-DPO (``shapes-dpo``, an adapter) trains on the
pairs that the scores pick among the drawn pictures. So nothing is scored that a trained model drew. ``pairs-twice``:
half of the labels for the first pairs; the trained model draws ``--again`` pictures, of which as many are labelled, at
random; the labels of both are spread together, and the model trains on the new pairs. ``pairs-oracle``: pairs by the
verifier, which is told everything.

``--job scenes``: answers of the vision-language model of ``scenes`` in place of pictures; it needs ``mmrl[vlm]``.
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
from labels import ANSWERS, RECIPE, answer_parts, drawn
from PIL import Image

ARMS = ("labels", "oracle", "pairs", "pairs-twice", "pairs-oracle")
DPO = "shapes-dpo"
VERIFIER = {RECIPE: ("shapes", "reward/shapes/success"), ANSWERS: ("answer:exact", "reward/exact/correct")}
"""Of each recipe the reward that is the truth, and its figure."""


def written(folder: Path, images: Sequence[Image.Image], prompts: Sequence[str]) -> Path:
    """The folder of pictures with their prompts."""
    made = folder.with_suffix(".part")
    made.mkdir(exist_ok=True)
    for n, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        image.save(made / f"{n:05d}.png")
        (made / f"{n:05d}.txt").write_text(prompt)
    made.rename(folder)
    return folder


def pictures(cache: Path, count: int) -> Path:
    """The folder of the drawn pictures with their prompts, made where it is not there."""
    found, folder = drawn(cache, count), cache / f"pictures-{count}"
    if folder.exists():
        return folder
    return written(folder, [Image.fromarray(one) for one in found["pixels"]], [str(one) for one in found["prompts"]])


def drawn_again(given: argparse.Namespace, model: Path, folder: Path) -> tuple[Path, list[float]]:
    """``--again`` pictures of a trained model for prompts of training, in ``folder``, and which of them are right."""
    import mmrl
    from mmrl.config.loader import load_recipe
    from mmrl.studies.distill.distilling import collect, open_policy

    loaded = load_recipe([RECIPE], ["model.dtype=float32", "threads=1", f"model.path={model}"])
    context = open_policy(loaded.recipe, loaded.recipe.rewards[0], None, "latest")
    groups = math.ceil(given.samples / loaded.recipe.train.group_size)
    with TemporaryDirectory() as kept:
        samples = collect(context, given.again, Path(kept), groups).samples
    written(
        folder,
        [sample.image for sample in samples if sample.image is not None],
        [sample.prompt.text for sample in samples],
    )
    return folder, mmrl.load("rewards", "shapes").score(samples)["success"]


def labelled(folder: Path, truth: Sequence[float], count: int, seed: int) -> None:
    """labels.csv of ``folder``: the verifier's verdict on ``count`` of its pictures, drawn by ``seed``."""
    draw = torch.Generator().manual_seed(seed)
    chosen = sorted(torch.randperm(len(truth), generator=draw)[:count].tolist())
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{n:05d}.png,{truth[n]:g}\n" for n in chosen))


def spread_of(folders: Sequence[Path], out: Path, pairs: int = 0) -> dict[str, Any]:
    """Spread the labels of ``folders`` into ``out``, where it is not there; what ``mmrl spread`` said of it."""
    from mmrl.config.loader import load_recipe
    from mmrl.rewards.learned.labels.readers import described
    from mmrl.studies.labels.spread_folder import spread_folder

    if not out.exists():
        loaded = load_recipe([RECIPE], [])
        spread_folder(folders, out, model=described(loaded.recipe), pairs=pairs)
    said = json.loads((out / "labels.json").read_text())
    return {"by": said["by"], "held out": said["figures"][said["by"]]["auc"]}


def spread_answers(given: argparse.Namespace, out: Path, seed: int) -> dict[str, Any]:
    """The reward of labels of answers, as ``mmrl spread --model scenes`` writes it; what it says of itself. The
    embeddings are kept in ``--cache``."""
    from mmrl.rewards.learned.labels.embeddings import MODEL, Space
    from mmrl.rewards.learned.labels.spreading import spread, write
    from mmrl.rewards.learned.labels.training import Settings

    parts, truth, encoders = answer_parts(given.cache, given.samples, MODEL)
    space, settings = Space.of(parts, encoders), Settings()
    told = torch.zeros(len(truth), dtype=torch.bool)
    told[torch.randperm(len(truth), generator=torch.Generator().manual_seed(seed))[: given.labels]] = True
    made = spread(space(parts), truth, told, settings, numbers=space.numbers(parts))
    out.mkdir()
    write(out, made, space(parts), space, encoders, settings)
    return {"by": made.by, "held out": list(made.quality[made.by].area)}


def measured(
    given: argparse.Namespace, model: Path | None, reward: Path | None = None, more: Sequence[str] = ()
) -> dict[str, float]:
    """Success of ``model`` (None: the recipe's) on the recipe's held-out prompts, and the ``reward`` of labels."""
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.data.loading import load_prompts
    from mmrl.training.evaluation import Evaluator

    name, figure = VERIFIER[given.job]
    changes = ["model.dtype=float32", "threads=1", f"eval.samples={given.heldout}", *more]
    if model is not None:
        changes.append(f"model.path={model}")
    if reward is not None:
        changes.append(f"rewards=[{{name: labels, options: {{path: {reward}}}}}, {{name: '{name}', weight: 0}}]")
    loaded = load_recipe([given.job], changes)
    context = build(loaded.recipe)
    with TemporaryDirectory() as kept:
        context.rewards.folder = Path(kept)
        heldout = Evaluator(context, load_prompts(loaded.recipe, "heldout"))
        row = heldout.score(given.heldout)[0]
    return {"success": row[figure], "reward": row.get("reward/labels", math.nan)}


def preferred(given: argparse.Namespace, pairs: Path, seed: int, model: Path | None, out: Path) -> tuple[Path, float]:
    """Train with Diffusion-DPO on ``pairs``; the trained model, and CPU-seconds."""
    import mmrl

    options = f"{{path: {pairs}, images: [chosen, rejected], heldout: 0.1}}"
    changes = ["data.name=jsonl", f"data.train={options}", f"data.heldout={options}", "eval.rewards=[]"]
    changes += [f"algorithm.beta={given.beta}", f"train.steps={given.dpo_steps}", f"eval.every={given.dpo_steps}"]
    changes += ["sampling.steps=8", "optim.ema_decay=0.95", "eval.samples=64", "model.dtype=float32", f"seed={seed}"]
    if model is not None:
        changes.append(f"model.path={model}")
    run = mmrl.train(DPO, changes, out=out / "run")
    spent = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["perf/cpu_seconds"]
    run.close()
    return run.export(out / "model"), spent


def by_verifier(given: argparse.Namespace, out: Path, seed: int) -> None:
    """The pairs that ``mmrl spread`` would pick if every score were the verifier's verdict, equal ones at random."""
    from mmrl.rewards.learned.labels.items import items_of
    from mmrl.studies.labels import pairs

    items = items_of(pictures(given.cache, given.samples))
    chance = torch.rand(len(items), generator=torch.Generator().manual_seed(seed)) / 10
    scores = (torch.from_numpy(drawn(given.cache, given.samples)["success"]) + chance).tolist()
    out.mkdir()
    pairs.write(out, items, pairs.paired(items, scores, given.pairs))


def with_pairs(arm: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train on pairs in this process, as ``trained`` does with rewards."""
    first, truth = pictures(given.cache, given.samples), drawn(given.cache, given.samples)["success"]
    rounds = 2 if arm == "pairs-twice" else 1
    said, model, spent = dict[str, Any](), None, 0.0
    with TemporaryDirectory(dir=given.cache) as kept:
        root, folders, out = Path(kept), [first], Path(kept)
        for n in range(rounds):
            out = root / f"spread-{n}"
            if arm == "pairs-oracle":
                by_verifier(given, out, seed)
            else:
                labelled(folders[-1], truth, given.labels // rounds, seed + 1000 * n)
                said |= spread_of(folders, out, given.pairs)
            (root / f"round-{n}").mkdir()
            model, more = preferred(given, out / "pairs.jsonl", seed, model, root / f"round-{n}")
            spent += more
            if n + 1 < rounds:
                said["after the first"] = measured(given, model)["success"]
                folder, truth = drawn_again(given, model, root / "pictures")
                folders.append(folder)
        reward = None if arm == "pairs-oracle" else out
        for when, one in (("before", None), ("after", model)):
            found = measured(given, one, reward)
            said |= {when: found["success"], f"reward {when}": None if reward is None else found["reward"]}
    return {**said, "cpu_seconds": spent}


def trained(arm: str, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train in this process: held-out success before and after, the reward, the CPU-seconds."""
    import mmrl

    said: dict[str, Any] = {}
    name, figure = VERIFIER[given.job]
    listed = f"[{{name: '{name}'}}]"
    with TemporaryDirectory(dir=given.cache) as kept:
        if arm == "labels":
            path = Path(kept) / "spread"
            if given.job == ANSWERS:
                said = spread_answers(given, path, seed)
            else:
                shown = pictures(given.cache, given.samples)
                labelled(shown, drawn(given.cache, given.samples)["success"], given.labels, seed)
                said = spread_of([shown], path)
            listed = f"[{{name: labels, options: {{path: {path}}}}}, {{name: '{name}', weight: 0}}]"
        changes = [f"rewards={listed}", f"seed={seed}", "model.dtype=float32", f"train.steps={given.steps}"]
        changes += ["train.max_cpu_seconds=null", f"eval.every={given.steps}", f"eval.samples={given.heldout}"]
        run = mmrl.train(given.job, changes, out=Path(kept) / "run")
        heldout = [json.loads(line) for line in (run.path / "heldout.jsonl").read_text().splitlines()]
        spent = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["perf/cpu_seconds"]
        run.close()
        if given.job == ANSWERS:  # sampled answers also become better where a model is only surer
            models = {"before": None, "after": run.export(Path(kept) / "model")}
            greedy = {when: measured(given, model, more=["eval.temperature=0"]) for when, model in models.items()}
            said |= {f"greedy {when}": found["success"] for when, found in greedy.items()}
    for row, when in ((heldout[0], "before"), (heldout[-1], "after")):
        said |= {when: row[figure], f"reward {when}": row.get("reward/labels")}
    return {**said, "cpu_seconds": spent}


def interval(before: float, after: float, samples: int) -> tuple[float, float]:
    """95 % of a difference of two shares, taken as independent, which is wider than for equal prompts and noise."""
    near = 1.96 * math.sqrt(sum(share * (1 - share) / samples for share in (before, after)))
    return after - before - near, after - before + near


def of(given: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """The result of a run, from the file or, where it is not there, from a process of its own."""
    rows = json.loads(given.json.read_text()) if given.json.exists() else {}
    key = f"{arm}, seed {seed}, {given.labels} of {given.samples}, {given.steps} steps"
    if arm.startswith("pairs"):
        key = f"{arm}, seed {seed}, {given.labels} of {given.samples}, {given.dpo_steps} steps of DPO"
        key += f", beta {given.beta:g}, {given.pairs} pairs of a prompt, {given.heldout} held out"
    if given.job != RECIPE:
        key = f"{given.job}: {key}"
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
        if "greedy before" in run:
            change += f"; greedy {run['greedy before']:.3f} to {run['greedy after']:.3f}"
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
    parser.add_argument("--job", choices=tuple(VERIFIER), default=RECIPE, help="scenes: answers, for labels and oracle")
    parser.add_argument("--pairs", type=int, default=6, help="most pairs of a prompt")
    parser.add_argument("--beta", type=float, default=60, help="of DPO")
    parser.add_argument("--dpo-steps", type=int, default=60, help="of DPO, in each round")
    parser.add_argument("--again", type=int, default=2400, help="pictures of the second round")
    parser.add_argument("--heldout", type=int, default=512, help="held-out samples of an evaluation")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help="this run alone (used by the command itself)")
    given = parser.parse_args()
    given.cache = given.cache.resolve()
    if given.job != RECIPE and any(arm.startswith("pairs") for arm in given.arms):
        parser.error("the arms with pairs are of pictures; add --arms labels oracle")
    given.cache.mkdir(parents=True, exist_ok=True)
    if given.one:
        torch.set_num_threads(1)
        run = with_pairs if given.one[0].startswith("pairs") else trained
        print(json.dumps(run(given.one[0], given, int(given.one[1]))))
        return
    print("| reward | seed | scores by | before | after | difference (95 %) | the reward | CPU-seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for arm in given.arms:
        runs = [of(given, arm, seed) for seed in given.seeds]
        print("\n".join(lines(arm, given.seeds, runs, given.heldout)), flush=True)


if __name__ == "__main__":
    main()
