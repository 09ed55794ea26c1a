"""Samples of a run that are voted on while it trains, and the reward that the votes so far make of them.

Under ``votes/`` of the run: ``000003/`` has what training step 3 (from 0) scored, each batch with its embeddings
(``*.safetensors``), its prompts and texts (``*.json``) and its pictures; ``fit-3-812/`` is the reward that step 3 made
of the first 812 bytes of the log, as ``mmrl spread`` writes one. Embeddings are kept, so that a run that goes on fits
the same numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from mmrl.core.files import write_atomic
from mmrl.core.json_types import Json, JsonObject, as_list, as_object
from mmrl.core.model_folder import write_model
from mmrl.core.stored import LARGEST_LINES, read_bytes
from mmrl.core.tensor_files import load
from mmrl.core.trajectory import Sample
from mmrl.core.untrusted import read_json
from mmrl.rewards.judging.statistics import rows_of
from mmrl.rewards.learned.formulas import rising
from mmrl.rewards.learned.labels import baselines
from mmrl.rewards.learned.labels.embeddings import Encoders, Space
from mmrl.rewards.learned.labels.folder import FORMAT, NAME, Known, load_known
from mmrl.rewards.learned.labels.inputs import HEAD, Projection
from mmrl.rewards.learned.labels.model import Shape
from mmrl.rewards.learned.labels.spreading import Quality, spread, write
from mmrl.rewards.learned.labels.training import Settings, parted, to_label_next
from mmrl.rewards.learned.labels.votes import Tally, place_of

ASKED = 40
"""Samples, or pairs, that the page may show at a time."""
_KEPT_FITS = 2


class Shown(NamedTuple):
    """A sample of the pool: its name, prompt and text (empty of a picture), and its prompt's ``Sample.prompt.id``."""

    name: str
    prompt: str
    text: str


class Batch(NamedTuple):
    """What one call of the reward scored: its samples with the parts of their embeddings ``[B, D]``."""

    samples: list[Shown]
    parts: list[Tensor]


class Pool:
    """The samples that a run scored, by step and batch. ``folder``: of its votes; ``into``: where new ones
    are written."""

    def __init__(self, folder: Path, into: Path) -> None:
        self.into = into
        self.batches: dict[tuple[int, str], Batch] = {}
        for file in sorted(folder.glob("[0-9]*/*.json")):
            rows = [as_object(row) for row in as_list(read_json(file, most=LARGEST_LINES, root=folder))]
            tensors = load(read_bytes(file.with_suffix(".safetensors"), LARGEST_LINES), str(file))
            samples = [Shown(str(row["name"]), str(row["prompt"]), str(row["text"])) for row in rows]
            self.batches[int(file.parent.name), file.stem] = Batch(samples, [tensors[n] for n in sorted(tensors)])

    def add(self, step: int, samples: Sequence[Sample], parts: Sequence[Tensor]) -> None:
        """Keep a batch of ``step``. What a run that was killed had kept of it is replaced."""
        names = [f"{step}/{s.id.step}.{s.id.slot}.{s.id.attempt}.{s.id.sample}" for s in samples]
        key = names[0].partition("/")[2]
        folder = self.into / f"{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, sample in zip(names, samples, strict=True):
            if sample.image is not None:
                sample.image.save(place_of(self.into, name).with_name(name.partition("/")[2] + ".png"))
        known = [Shown(name, s.prompt.conversation, s.text or "") for name, s in zip(names, samples, strict=True)]
        rows = [one._asdict() for one in known]
        write_atomic(folder / f"{key}.safetensors", save({f"{n:02d}": p.contiguous() for n, p in enumerate(parts)}))
        write_atomic(folder / f"{key}.json", json.dumps(rows, ensure_ascii=False))
        self.batches[step, key] = Batch(known, list(parts))

    def before(self, step: int, batches: Sequence[str], voted: Collection[str], keep: int) -> Batch:
        """The samples of the steps before ``step`` and of ``batches`` of it, the newest ``keep`` and those that are
        ``voted`` on, oldest first."""
        chosen = sorted(key for key in self.batches if key[0] < step or (key[0] == step and key[1] in batches))
        samples = [sample for key in chosen for sample in self.batches[key].samples]
        parts = [torch.cat(part) for part in zip(*(self.batches[key].parts for key in chosen), strict=True)]
        kept = [n for n, one in enumerate(samples) if n >= len(samples) - keep or one.name in voted]
        return Batch([samples[n] for n in kept], [part[kept] for part in parts])


def fitted(pool: Batch, tally: Tally, encoders: Encoders, by: str, out: Path) -> Known:
    """The reward that the votes make, written to the folder ``out`` and read from it; what an earlier process wrote is
    taken as it is."""
    if not (out / NAME).exists():
        out.mkdir(parents=True, exist_ok=True)
        if by == HEAD or tally.votes == "pairs":
            _fit_head(pool, tally, encoders, out)
        else:
            _fit_graph(pool, tally, encoders, by, out)
        fits = sorted(out.parent.glob("fit-*"), key=lambda path: int(path.name.split("-")[1]))
        for old in fits[:-_KEPT_FITS]:
            shutil.rmtree(old, ignore_errors=True)
    return load_known(out)


def _fit_graph(pool: Batch, tally: Tally, encoders: Encoders, by: str, out: Path) -> None:
    """The scores of ``mmrl spread``, by the method that it chooses."""
    space, settings = Space.of(pool.parts, encoders), Settings()
    embeddings, moved = space(pool.parts), space.moved(pool.parts)
    labels, given = _labels(pool, tally)
    with torch.enable_grad():
        alone = (moved[-2], moved[-1]) if encoders.prompts else None
        made = spread(embeddings, labels, given, settings, by, alone, space.numbers(pool.parts))
    write(out, made, embeddings, space, encoders, settings)


def _labels(pool: Batch, tally: Tally) -> tuple[Tensor, Tensor]:
    """The mean votes ``[N]`` on the samples, and which have one."""
    means = {samples[0]: value for samples, value in tally.means.items()}
    labels = torch.tensor([means.get(one.name, 0.0) for one in pool.samples])
    return labels, torch.tensor([one.name in means for one in pool.samples])


def _fit_head(pool: Batch, tally: Tally, encoders: Encoders, out: Path) -> None:
    """The supervised head of ``mmrl spread`` alone. Of pairs it is fitted to the differences of two samples (Bradley
    and Terry 1952); a sample's score is then the sigmoid of its own share, with the mean of the pool at one half."""
    space, settings = Space.of(pool.parts, encoders), Settings()
    embeddings, numbers = space(pool.parts), space.numbers(pool.parts)
    projection = Projection.of(embeddings)
    features = torch.cat([projection(embeddings), numbers], 1)
    if tally.votes == "scores":
        read, (labels, given) = features, _labels(pool, tally)
    else:
        place, means = {one.name: n for n, one in enumerate(pool.samples)}, tally.means
        first, second = (torch.tensor([place[pair[side]] for pair in means]) for side in (0, 1))
        read, labels = features[first] - features[second], torch.tensor(list(means.values()))
        given = torch.ones(len(means), dtype=torch.bool)
    folds = parted(labels, given, settings.folds, settings.seed)
    weights, held = baselines.head(read, labels, given, folds, numbers.shape[1])
    slope, shift = rising(held[given], labels[given])
    if tally.votes == "pairs":  # its bias is what voters give to the first of two, and no part of a score
        weights[-1], shift = -(features.double() @ weights[:-1]).mean(), 0.0
    scores = torch.sigmoid(slope * held[given] + shift).float()
    said: JsonObject = {
        "format": FORMAT,
        "by": HEAD,
        "encoders": asdict(encoders),
        "widths": space.widths,
        "shape": asdict(Shape(features.shape[1])),
        "settings": asdict(settings),
        "models": 1,
        "calibration": (slope, shift),
        "figures": {HEAD: Quality.of(scores, labels[given]).as_json()},
    }
    tensors = {"centre": space.centre, "mean": projection.mean, "axes": projection.axes, "head": weights}
    write_model(out / NAME, said, tensors)


def asks(pool: Batch, tally: Tally, known: Known | None, encoders: Encoders) -> list[Json]:
    """What to vote on next among the samples of ``pool``, the least sure first, as ``asks.json`` has it. ``known``: the
    reward so far; None: all are as unsure."""
    scores = torch.full((len(pool.samples),), 0.5) if known is None else known.scores(pool.parts)
    if tally.votes == "pairs":
        found = _uncertain_pairs(pool.samples, scores, tally)
    else:
        voted = {samples[0] for samples in tally.means}
        given = torch.tensor([one.name in voted for one in pool.samples])
        embeddings = Space.of(pool.parts, encoders)(pool.parts)
        chosen = to_label_next(scores.float(), torch.zeros(len(scores)), embeddings, given, ASKED)
        found = [(pool.samples[n],) for n in chosen]
    return [
        {"samples": [one.name for one in some], "prompt": some[0].prompt, "texts": [one.text for one in some]}
        for some in found
    ]


def _uncertain_pairs(samples: Sequence[Shown], scores: Tensor, tally: Tally) -> list[tuple[Shown, ...]]:
    """Pairs of a prompt that nobody has voted on, each sample in one: first those whose scores, as logits, differ
    least."""
    logits = torch.logit(scores.double().clamp(1e-12, 1 - 1e-12)).tolist()
    groups = rows_of([one.prompt for one in samples])
    seen = {frozenset(pair) for pair in tally.means}
    pairs = [(abs(logits[n] - logits[m]), n, m) for g in groups for i, n in enumerate(g) for m in g[i + 1 :]]
    found: list[tuple[Shown, ...]] = []
    taken: set[int] = set()
    for _, n, m in sorted(pairs):
        if not {n, m} & taken and frozenset((samples[n].name, samples[m].name)) not in seen:
            found.append((samples[n], samples[m]))
            taken |= {n, m}
    return found[:ASKED]
