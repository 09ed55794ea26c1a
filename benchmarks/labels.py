"""200 labels of 5,000 samples: the graph transformer beside label propagation, nearest neighbours, a supervised head.

    python benchmarks/labels.py --cache /tmp/labels --seeds 0 1 2
    python benchmarks/labels.py --cache /tmp/labels --seeds 0 1 2 --job scenes

The shipped model of ``shapes-full`` draws pictures, 12 of each of its training prompts in turn; that of ``scenes``
answers questions about pictures, 8 times each. The truth is the verifier's success. A seed chooses which samples have
a label; all methods get the same ones, and the figures are of all others. Each method chooses its own setting by the
labels alone, in five parts. Embeddings: ``pixels`` (colours, edges and shades, with the prompt's words; of answers
``words``) and ``model`` (what the model that made them reads of them). Drawing takes about 200 CPU-seconds and the
embedding ``model`` 50; both are kept in ``--cache`` as npz.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.media import open_image
from mmrl.rewards.judging.statistics import auc
from mmrl.rewards.learned.labels.baselines import head
from mmrl.rewards.learned.labels.embeddings import MODEL, PIXELS, WORDS, Content, Embedder, Encoders, Space, model_of
from mmrl.rewards.learned.labels.graph import symmetric
from mmrl.rewards.learned.labels.inputs import HEAD, Inputs
from mmrl.rewards.learned.labels.spreading import GRAPH, baselines_of, methods
from mmrl.rewards.learned.labels.training import Settings, parted, train
from mmrl.studies.distill.distilling import collect, open_policy

RECIPE = "shapes-full"
ANSWERS = "scenes"
GROUP = {"shapes": 12, "scenes": 8}
"""Samples of a prompt that were drawn together, one after another."""
Drawn = dict[str, Any]
Alone = tuple[torch.Tensor, torch.Tensor]
THESE = Encoders("image", MODEL, "", {})
"""Of pictures that a model reads, as far as a space asks."""


def drawn(cache: Path, count: int) -> Drawn:
    """``pixels`` ``[N, 32, 32, 3]``, ``prompts`` and ``success`` ``[N]``."""
    file = cache / f"samples-{count}.npz"
    if not file.exists():
        loaded = load_recipe([RECIPE], ["model.dtype=float32", "threads=1"])
        context = open_policy(loaded.recipe, loaded.recipe.rewards[0], None, "latest")
        with TemporaryDirectory() as folder:
            samples = collect(context, count, Path(folder)).samples
        truth = mmrl.load("rewards", "shapes").score(samples)["success"]
        cache.mkdir(parents=True, exist_ok=True)
        pictures = np.stack([np.asarray(sample.image) for sample in samples])
        np.savez_compressed(file, pixels=pictures, prompts=[s.prompt.text for s in samples], success=truth)
    with np.load(file) as found:
        return dict(found)


def parts_of(cache: Path, kind: str, given: Drawn) -> list[torch.Tensor]:
    """The parts ``[N, D]`` of embeddings of pictures."""
    file = cache / f"{kind}-{len(given['pixels'])}.npz"
    if not file.exists():
        loaded = load_recipe([RECIPE], ["model.dtype=float32"])
        pixels = Encoders("image", PIXELS, WORDS)
        encoders = pixels if kind == PIXELS else Encoders("image", MODEL, "", model_of(loaded.recipe))
        embedder, began = Embedder(encoders), time.process_time()
        rows = zip(given["prompts"], given["pixels"], strict=True)
        contents = [Content(str(prompt), frames=(Image.fromarray(picture),)) for prompt, picture in rows]
        parts = [embedder.parts(contents[n : n + 64]) for n in range(0, len(contents), 64)]
        print(f"embedding {kind}: {time.process_time() - began:.0f} CPU-seconds", flush=True)
        np.savez(file, *(torch.cat(part).numpy() for part in zip(*parts, strict=True)))
    with np.load(file) as found:
        return [torch.from_numpy(found[name]) for name in sorted(found)]


def alone_of(parts: Sequence[torch.Tensor]) -> Alone:
    """The samples and their prompts apart, rows of length 1."""
    one, other = Space.of(parts).moved(parts)
    return one, other


def answer_parts(cache: Path, count: int, kind: str) -> tuple[list[torch.Tensor], torch.Tensor, Encoders]:
    """The parts ``[N, D]`` of embeddings of answers of the model of ``scenes``, which are right ``[N]``, and what
    embedded them."""
    loaded = load_recipe([ANSWERS], ["model.dtype=float32", "threads=1"])
    words = Encoders("text", WORDS, WORDS)
    encoders = words if kind == WORDS else Encoders("text", MODEL, "", model_of(loaded.recipe))
    file = cache / f"answers-{kind}-{count}.npz"
    if not file.exists():
        context = open_policy(loaded.recipe, loaded.recipe.rewards[0], None, "latest")
        with TemporaryDirectory() as folder:
            made = collect(context, count, Path(folder))
        embedder, began = Embedder(encoders), time.process_time()
        contents = []
        for sample in made.samples:
            shown = tuple(open_image(media) for media in sample.prompt.media)
            contents.append(Content(sample.prompt.text, sample.text or "", pictures=shown))
        parts = [embedder.parts(contents[n : n + 64]) for n in range(0, len(contents), 64)]
        print(f"embedding {kind}: {time.process_time() - began:.0f} CPU-seconds", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        whole = [torch.cat(part).numpy() for part in zip(*parts, strict=True)]
        np.savez(file, *whole, truth=np.array(made.values, dtype=np.float32))
    with np.load(file) as found:
        whole = [torch.from_numpy(found[name]) for name in sorted(found) if name != "truth"]
        return whole, torch.from_numpy(found["truth"]), encoders


def answers(cache: Path, count: int, kind: str) -> tuple[torch.Tensor, Alone | None, torch.Tensor]:
    """The embeddings ``[N, D]`` of answers of the model of ``scenes``, answers and prompts apart, and which are right
    ``[N]``."""
    parts, truth, _ = answer_parts(cache, count, kind)
    return Space.of(parts)(parts), alone_of(parts) if kind == WORDS else None, truth


def order(scores: torch.Tensor, truth: torch.Tensor, told: torch.Tensor, group: int) -> float:
    """The share of pairs of a right and a wrong sample of the same prompt whose scores are in this order; a tie counts
    half, and a sample with a label is in no pair."""
    right = pairs = 0.0
    for first in range(0, len(scores), group):
        of, so = scores[first : first + group], truth[first : first + group] >= 0.5
        asked = ~told[first : first + group]
        lead = of[so & asked].unsqueeze(1) - of[~so & asked]
        right += float((lead > 0).sum() + 0.5 * (lead == 0).sum())
        pairs += lead.numel()
    return right / pairs


class Embedded(NamedTuple):
    """Embeddings ``[N, D]``, samples and prompts apart, and the numbers ``[N, S]`` that count as they are."""

    of: torch.Tensor
    alone: Alone | None
    numbers: torch.Tensor | None = None


def arms(
    given_to: Embedded, truth: torch.Tensor, labels: int, settings: Settings, group: int
) -> dict[str, list[float]]:
    """Of each method AUC, accuracy and order on the samples without a label, and CPU-seconds."""
    embedded = given_to.of
    draw = torch.Generator().manual_seed(settings.seed)
    given = torch.zeros(len(truth), dtype=torch.bool)
    given[torch.randperm(len(truth), generator=draw)[:labels]] = True
    known = torch.where(given, truth, 0.0)
    graph = symmetric(embedded, settings.neighbours)
    began = time.process_time()
    inputs = Inputs.of(*given_to)
    count = inputs.numbers.shape[1]
    trained = train(inputs.kept(embedded), graph, known, given, settings, count)
    spent = {GRAPH: time.process_time() - began}
    began = time.process_time()
    folds = parted(known, given, settings.folds, settings.seed)
    by_head = head(inputs.of_head(embedded), known, given, folds, count)[1]
    others = baselines_of(embedded, graph, known, given, folds)
    of_each = (time.process_time() - began) / 3
    scores = methods(trained, by_head, others, known, given).scores
    rest = truth[~given] >= 0.5
    return {
        name: [
            auc(of[~given].tolist(), rest.tolist()),
            float(((of[~given] >= 0.5) == rest).float().mean()),
            order(of, truth, given, group),
            spent.get(name, of_each),
        ]
        for name, of in scores.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--labels", type=int, nargs="+", default=[200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--embeddings", nargs="+", choices=(PIXELS, WORDS, MODEL), help="default: all of the job")
    parser.add_argument("--job", choices=("shapes", "scenes"), default="shapes")
    parser.add_argument("--layers", type=int, default=Settings.layers)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.job == "shapes":
        found = drawn(given.cache, given.samples)
        truth = torch.from_numpy(found["success"]).float()
        alone = alone_of(parts_of(given.cache, PIXELS, found))
        parts = {kind: parts_of(given.cache, kind, found) for kind in given.embeddings or (PIXELS, MODEL)}
        spaces = {kind: Space.of(of, THESE if kind == MODEL else None) for kind, of in parts.items()}
        embedded_by = {kind: Embedded(spaces[kind](of), alone, spaces[kind].numbers(of)) for kind, of in parts.items()}
    else:
        made = {kind: answers(given.cache, given.samples, kind) for kind in given.embeddings or (WORDS, MODEL)}
        truth = next(iter(made.values()))[2]
        embedded_by = {kind: Embedded(of, alone) for kind, (of, alone, _) in made.items()}
    print(f"{len(truth)} samples, {float(truth.mean()):.1%} of them right\n")
    print(
        "| embedding | labels | method | AUC | accuracy | order within a prompt | "
        "AUC beside the head's, draws above it | CPU-seconds |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for kind, embedded in embedded_by.items():
        for labels in given.labels:
            runs = [
                arms(embedded, truth, labels, Settings(seed=s, layers=given.layers), GROUP[given.job])
                for s in given.seeds
            ]
            for name in runs[0]:
                area, right, ordered, spent = ([run[name][n] for run in runs] for n in range(4))
                gain = [run[name][0] - run[HEAD][0] for run in runs]
                cells = [f"{mean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in (area, right, ordered)]
                cells.append(f"{mean(gain):+.3f} ({min(gain):+.3f} to {max(gain):+.3f}), {sum(g > 0 for g in gain)}")
                print(f"| {kind} | {labels} | {name} | {' | '.join(cells)} | {mean(spent):.0f} |", flush=True)


if __name__ == "__main__":
    main()
