"""Guards against over-optimisation: metrics of held-out samples at every evaluation, and limits on them.

While an over-optimised reward rises, the samples of a prompt become similar, they move away from the base model's, and
other rewards fall. All three are measured on the samples of the evaluation:

``guard/diversity``
    Pictures and clips: the root mean square difference of pixels (in [0, 1]) between two samples of a prompt, over all
    pairs of its samples and all prompts. Texts: distinct-2 (Li et al., arXiv 1510.03055, sec. 5.1), the share of
    distinct word bigrams in the responses to a prompt, mean over prompts. If no prompt has two samples, the samples of
    all prompts are taken together, on each controller its own: the figure then depends a little on their number.
``guard/distance``
    Pictures and clips: the same difference to the base model's sample of the same prompt and noise, over the first
    ``MOST`` samples. Texts: log-prob of the tokens under the weights that sampled minus that under the reference, mean
    over tokens, in nats: an estimate of the KL divergence if the evaluation samples at sampling.temperature.
``guard/change/<label>``
    The change of a reward in standard deviations of the base model's scores.

Pixels are taken on a grid (``GRID``); smaller pictures are taken whole. Only sums leave a controller, no pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from mmrl.config.schema import Guards
from mmrl.controller import Controller
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.grouping import grouped
from mmrl.core.json_types import JsonObject
from mmrl.core.trajectory import Sample

PREFIX = "guard/"
EVIDENCE = f"{PREFIX}evidence"
"""With ``method: sequential`` (mmrl/training/alarm.py) the evidence so far in units of what raises the alarm, and as a
prefix that of each untrained reward."""
GOOD = f"{PREFIX}good"
"""The step of the last evaluation without a sign of it: what is over-optimised began after it."""
MOST = 64
"""Number of samples that are compared with the base model's, which are drawn again on resume."""
GRID = 64
"""Grid points per side of a picture; for a clip half as many, in each of ``FRAMES`` frames at equal distances."""
FRAMES = 4

Place = tuple[int, int]
"""Slot and attempt of a held-out sample."""
Row = Mapping[str, float]


class Measures:
    """Final class. The guards' metrics of a run's evaluations, relative to the base model's; ``prompts``: the number of
    held-out prompts, ``labels``: rewards whose change is measured."""

    def __init__(self, controller: Controller, prompts: int, labels: Sequence[str]) -> None:
        self.controller, self.prompts, self.labels = controller, prompts, labels
        self.base: Row = {}
        """The evaluation before training, as in heldout.jsonl; empty if there is none."""
        self.pictures: dict[Place, Tensor] = {}
        """The base model's samples that this controller compares its own samples with."""

    def keep(self, samples: Iterable[Sample]) -> None:
        """Store ``samples`` of the base model's evaluation."""
        self.pictures = {_place(s): pixels(s) for s in samples if s.text is None and s.id.slot < MOST}

    def of(self, samples: Sequence[Sample], scores: Sequence[Row], gaps: tuple[float, int]) -> dict[str, float]:
        """The metrics of an evaluation. ``scores``: of each of this controller's samples; ``gaps``: see ``Made.gaps``.
        All controllers call it together."""
        alone = self.controller.count(len(samples)) <= self.prompts
        groups = grouped((("" if alone else sample.prompt.id, _size(sample)), sample) for sample in samples)
        texts = any(sample.text is not None for sample in samples)
        apart = [distinct(group) if texts else squares(group) for group in groups.values()]
        away = gaps if texts else self._away(samples)
        moments = {label: _moments([row[label] for row in scores if label in row]) for label in self.labels}
        everyone = self.controller.gather((texts, _sums(apart), away, moments))
        row = self._summed(
            any(texts for texts, *_ in everyone), _sums(d for _, d, *_ in everyone), _sums(d for _, _, d, _ in everyone)
        )
        for label in self.labels:
            n, total, square = map(sum, zip(*(of[label] for *_, of in everyone), strict=True))
            if n:
                row[f"{PREFIX}std/{label}"] = math.sqrt(max(0.0, square / n - (total / n) ** 2))
        return row

    def beside(self, row: Row) -> dict[str, float]:
        """The metrics of ``row``, a row of heldout.jsonl with those of ``of``, relative to the base model's."""
        found: dict[str, float] = {}
        diversity, base = f"{PREFIX}diversity", self.base
        if diversity in row and base.get(diversity):
            found[f"{diversity}_share"] = row[diversity] / base[diversity]
        for label in self.labels:
            spread, key = base.get(f"{PREFIX}std/{label}"), f"reward/{label}"
            if spread and key in base and key in row:
                found[f"{PREFIX}change/{label}"] = (row[key] - base[key]) / spread
        return found

    def _away(self, samples: Sequence[Sample]) -> tuple[float, int]:
        pairs = [(s, self.pictures[_place(s)]) for s in samples if _place(s) in self.pictures]
        return sum((pixels(s) - base).square().mean().item() for s, base in pairs), len(pairs)

    def _summed(self, texts: bool, apart: tuple[float, int], away: tuple[float, int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, (total, n), root in (("diversity", apart, not texts), ("distance", away, not texts)):
            if n:
                found[f"{PREFIX}{name}"] = math.sqrt(max(0.0, total / n)) if root else total / n
        return found


def pixels(sample: Sample) -> Tensor:
    """The pixels of a picture or clip that are compared, flat, float64 in [0, 1]."""
    if sample.video is not None:
        chosen = [sample.video[i] for i in _spread(len(sample.video), FRAMES)]
        return torch.cat([_on_grid(frame, GRID // 2) for frame in chosen])
    assert sample.image is not None
    return _on_grid(sample.image, GRID)


def _size(sample: Sample) -> tuple[int, int] | None:
    """The size of a picture or of a clip's frames; only those of one size are compared."""
    shown = sample.video[0] if sample.video else sample.image
    return None if shown is None else shown.size


def squares(group: Sequence[Sample]) -> tuple[float, int]:
    """The mean squared difference of pixels, summed over all pairs of ``group``, and the number of pairs. The sum over
    pairs is ``n sum |x|^2 - |sum x|^2`` of centred samples."""
    if len(group) < 2:
        return 0.0, 0
    rows = torch.stack([pixels(sample) for sample in group])
    rows = rows - rows[0]  # equal samples have a difference of exactly 0
    centred = rows - rows.mean(0)
    return len(group) * centred.square().mean(1).sum().item(), len(group) * (len(group) - 1) // 2


def distinct(group: Sequence[Sample]) -> tuple[float, int]:
    """Distinct-2 of the responses of ``group``, and 1; 0 and 0 if they have no two neighbouring words."""
    words = [(sample.text or "").split() for sample in group]
    pairs = [pair for said in words for pair in pairwise(said)]
    if len(group) < 2 or not pairs:
        return 0.0, 0
    return len(set(pairs)) / len(pairs), 1


class Limits:
    """Final class: checks the rows of heldout.jsonl against the limits of ``eval.guards``, or their evidence. It is
    equal on every controller, and a function of the rows, so it needs no state in a checkpoint. ``watched``: rewards
    that are not trained on."""

    def __init__(self, settings: Guards, watched: Sequence[str], after: int = 0) -> None:
        self.settings, self.watched, self.after = settings, watched, after
        """Evaluations up to the step ``after`` do not end training."""
        self.since = 0
        """Evaluations in a row beyond a limit."""
        self.within = 0
        """The step of the last evaluation within all limits."""
        self.why: list[str] = []
        """Descriptions of the exceeded limits."""

    def saw(self, step: int, row: Row) -> list[str]:
        """Read a row; returns a description of each exceeded limit, with the limit's name."""
        self.why = list(self._beyond(row))
        good = int(row.get(GOOD, self.within if self.why else step))
        if self.why:
            self.since, self.within = self.since + (step > self.after), min(self.within, good)
        else:
            self.since, self.within = 0, good
        return self.why

    def _beyond(self, row: Row) -> Iterable[str]:
        limits = self.settings
        share, distance = row.get(f"{PREFIX}diversity_share"), row.get(f"{PREFIX}distance")
        if limits.diversity_min is not None and share is not None and share < limits.diversity_min:
            yield f"diversity is {share:.2f} of the base model's (diversity_min {limits.diversity_min:g})"
        if limits.distance_max is not None and distance is not None and distance > limits.distance_max:
            yield f"distance to the base model is {distance:.3f} (distance_max {limits.distance_max:g})"
        if limits.method == "sequential":
            yield from self._evident(row)
            return
        most = math.inf if limits.untrained_drop is None else limits.untrained_drop
        for label in self.watched:
            fell = -row.get(f"{PREFIX}change/{label}", 0.0)
            if fell > most:
                yield f"{label}, not trained on, fell by {fell:.2f} std (untrained_drop {most:g})"

    def _evident(self, row: Row) -> Iterable[str]:
        if row.get(EVIDENCE, 0.0) < 1:
            return
        shares = {label: row.get(f"{EVIDENCE}/{label}", 0.0) for label in self.watched}
        label = max(shares, key=lambda name: shares[name])
        change = row.get(f"{PREFIX}change/{label}")
        yield (
            f"{label}, not trained on, does not follow what is trained on since step {row[GOOD]:g}"
            + ("" if change is None else f" ({change:+.2f} std)")
            + f", with a chance of error of at most {self.settings.alpha:g} in the whole run"
        )

    @property
    def keeps(self) -> bool:
        """Whether the checkpoint of the last evaluation within the limits is kept."""
        return self.settings.method == "sequential" and self.settings.action == "stop"

    def state_dict(self) -> PartState:
        """What a checkpoint tells the writer to keep; the rest is read from the rows."""
        return PartState({"step": self.within})

    def load_state_dict(self, numbers: JsonObject, saved: Saved) -> None:
        """The rows have everything."""

    @property
    def stopped(self) -> bool:
        return self.settings.action == "stop" and self.since >= self.settings.patience

    def reason(self) -> str:
        """Why training ends, in a few words."""
        return f"{'; '.join(self.why)} (eval.guards)"

    def message(self) -> str:
        """Why training ends, for the terminal."""
        kept = "base" if self.within == 0 else f"{self.within}{'' if self.keeps else ', if it is kept'}"
        return (
            f"stopping: {self.reason()}. The weights are saved; the last evaluation within the "
            f"limits was after step {self.within} (--checkpoint {kept}). To go on: mmrl continue RUN, with another "
            "limit or eval.guards.action=warn"
        )


def summary(row: Row, watched: Sequence[str]) -> str:
    """The guards' metrics for the terminal; empty if there are none."""
    said = []
    diversity, share = row.get(f"{PREFIX}diversity"), row.get(f"{PREFIX}diversity_share")
    if diversity is not None:
        said.append(f"diversity {diversity:.3f}" + ("" if share is None else f" ({share:.0%} of the base's)"))
    if (distance := row.get(f"{PREFIX}distance")) is not None:
        said.append(f"distance {distance:.3f}")
    changes = {k.removeprefix(f"{PREFIX}change/"): v for k, v in row.items() if k.startswith(f"{PREFIX}change/")}
    said += [f"{k}{' (not trained on)' if k in watched else ''} {v:+.2f} std" for k, v in changes.items()]
    return "  ".join(said)


def _place(sample: Sample) -> Place:
    return sample.id.slot, sample.id.attempt


def _on_grid(image: Image, points: int) -> Tensor:
    found = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    rows, columns = _spread(found.shape[0], points), _spread(found.shape[1], points)
    return torch.from_numpy(found[rows][:, columns].reshape(-1))


def _spread(n: int, most: int) -> list[int]:
    """At most ``most`` of ``n`` positions, in the middle of equal parts."""
    count = min(n, most)
    return [(2 * i + 1) * n // (2 * count) for i in range(count)]


def _moments(values: Sequence[float]) -> tuple[int, float, float]:
    return len(values), math.fsum(values), math.fsum(v * v for v in values)


def _sums(pairs: Iterable[tuple[float, int]]) -> tuple[float, int]:
    found = list(pairs)
    return math.fsum(total for total, _ in found), sum(n for _, n in found)
