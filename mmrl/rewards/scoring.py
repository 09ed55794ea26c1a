"""The rewards of a recipe together: weights, normalisation, batches and the failure policy (DESIGN 7).

``B`` samples in groups (lists of indices into them) of one prompt each. A sample that a reward could not score is NaN
in the total, never 0, and has a ``Failure`` that says why; or the run stops, as the reward's ``on_failure`` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmrl.config import schema
from mmrl.config.checks import label_of
from mmrl.errors import UserError
from mmrl.rewards.calling import NAN, Answer, BatchError, Caller
from mmrl.rewards.contract import Context, Input
from mmrl.rewards.loading import Found, Loaded, build, describe, find, place_of, problems
from mmrl.trajectory import Sample, SampleId

STD_FLOOR = 1e-4
"""Added to the standard deviations that rewards are divided by."""
_NAMED = 5

AllSum = Callable[[torch.Tensor], torch.Tensor]


class RewardError(UserError):
    """A reward failed where its policy says ``fail``."""


@dataclass(frozen=True)
class Failure:
    """A sample that the reward called ``reward`` could not score, and why."""

    sample: SampleId
    prompt: str
    reward: str
    reason: str


@dataclass(frozen=True)
class Scores:
    """What the rewards said of ``B`` samples; tensors are float64 on the CPU.

    ``total`` ``[B]``: the weighted sum of the normalised rewards, NaN where a sample is to be dropped. ``parts``: each
    reward's raw values ``[B]`` under its label, and its named parts under ``label/part``. ``seconds``: per label.
    """

    total: torch.Tensor
    parts: dict[str, torch.Tensor]
    failures: list[Failure] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Entry:
    label: str
    config: schema.Reward
    loaded: Loaded
    caller: Caller


def check(rewards: Sequence[schema.Reward], root: Path) -> list[Found]:
    """Find all rewards and check their signatures and options, building none; ``UserError`` holds all mistakes."""
    found: list[Found] = []
    mistakes: list[str] = []
    for i, reward in enumerate(rewards):
        label = label_of(reward.name, reward.label)
        try:
            one = find(reward.name, root)
        except UserError as error:
            mistakes.append(f"rewards[{i}] ({label}): {error}")
            continue
        found.append(one)
        mistakes += [f"rewards[{i}] ({label}): {problem}" for problem in problems(one, reward.options)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return found


class RewardSet:
    """The rewards of a recipe, loaded and built.

    ``root`` is the recipe's folder, ``device`` where a reward's model computes. ``all_sum`` adds a small tensor over
    all controllers, for the statistics of ``normalize: batch``; the default is one controller. Raises ``UserError``.
    """

    def __init__(
        self,
        rewards: Sequence[schema.Reward],
        root: Path,
        device: torch.device | str = "cpu",
        all_sum: AllSum | None = None,
    ) -> None:
        self.device = device
        self._all_sum: AllSum = all_sum or (lambda tensor: tensor)
        self._entries: list[_Entry] = []
        for found, config in zip(check(rewards, root), rewards, strict=True):
            loaded = build(found, config.options)
            caller = Caller(loaded, config.timeout, config.retries)
            self._entries.append(_Entry(label_of(config.name, config.label), config, loaded, caller))

    @property
    def labels(self) -> list[str]:
        """What metrics call the rewards, in the recipe's order."""
        return [entry.label for entry in self._entries]

    @property
    def inputs(self) -> frozenset[Input]:
        """The fields of a sample that any of the rewards reads."""
        return frozenset(name for entry in self._entries for name in entry.loaded.declaration.inputs)

    @property
    def differentiable(self) -> bool:
        """Whether every reward carries a gradient."""
        return all(entry.loaded.declaration.differentiable for entry in self._entries)

    def score(self, samples: Sequence[Sample], groups: Sequence[Sequence[int]], *, step: int = -1) -> Scores:
        """Score ``samples``; ``groups`` hold each of their indices once. One reward after another.

        Raises ``RewardError`` when a reward whose policy is ``fail`` leaves a sample without a score.
        """
        if sorted(i for group in groups for i in group) != list(range(len(samples))):
            raise ValueError(f"groups must hold each of the {len(samples)} samples once, got {groups}")
        total = torch.zeros(len(samples), dtype=torch.float64)
        scores = Scores(total, {})
        for entry in self._entries:
            _check_inputs(entry, samples)
            began = time.perf_counter()
            raw, parts, failures = self._ask(entry, samples, groups, step)
            scores.seconds[entry.label] = time.perf_counter() - began
            scores.parts[entry.label] = raw
            scores.parts.update({f"{entry.label}/{name}": values for name, values in parts.items()})
            scores.failures.extend(failures)
            normal = normalise(raw, groups, entry.config.normalize, self._all_sum)
            if entry.config.weight != 0:  # a reward of weight 0 is watched only, so it drops no sample
                total += entry.config.weight * normal
        return scores

    def gradient(self, samples: Sequence[Sample], *, step: int = -1) -> torch.Tensor:
        """The weighted sum ``[B]`` of the rewards, with the graph to ``sample.tensor``. Raises ``RewardError``."""
        return self.weighted(self.gradient_parts(samples, step=step))

    def weighted(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum ``[B]`` of every reward's values by label."""
        return torch.stack([entry.config.weight * parts[entry.label] for entry in self._entries]).sum(0)

    def gradient_parts(self, samples: Sequence[Sample], *, step: int = -1) -> dict[str, torch.Tensor]:
        """Each reward's values ``[B]`` by label, with their graphs.

        Runs in the caller's thread, where its autocast and checkpoint settings hold; hence without the deadline.
        """
        return {entry.label: self._differentiate(entry, samples, step) for entry in self._entries}

    def close(self) -> None:
        """Let the rewards' threads end."""
        for entry in self._entries:
            entry.caller.close()

    def _ask(
        self, entry: _Entry, samples: Sequence[Sample], groups: Sequence[Sequence[int]], step: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Failure]]:
        raw = torch.full((len(samples),), NAN, dtype=torch.float64)
        parts: dict[str, torch.Tensor] = {}
        failures: list[Failure] = []
        batches = _batches(entry, len(samples), groups)
        answers = entry.caller.many([[samples[i] for i in batch] for batch in batches], Context(step, self.device))
        for batch, answer in zip(batches, answers, strict=True):
            raw[batch] = torch.tensor(answer.total, dtype=torch.float64)
            for name, values in answer.parts.items():
                part = parts.setdefault(name, torch.full_like(raw, NAN))
                part[batch] = torch.tensor(values, dtype=torch.float64)
            failed = [
                Failure(samples[i].id, samples[i].prompt.text, entry.label, reason)
                for i, reason in zip(batch, answer.reasons, strict=True)
                if reason is not None
            ]
            if failed and entry.config.on_failure == "fail":
                raise _refusal(entry, answer, failed, len(batch), step)
            failures += failed
        return raw, parts, failures

    def _differentiate(self, entry: _Entry, samples: Sequence[Sample], step: int) -> torch.Tensor:
        declaration, where = entry.loaded.declaration, f"reward {entry.label!r} ({entry.loaded.place})"
        if not declaration.differentiable or declaration.per == "group":
            raise RewardError(
                f"{where} declares no gradient per sample; declare it with @mmrl.reward(differentiable=True) "
                "or use algorithm.type=flow_grpo"
            )
        _check_inputs(entry, samples)
        found = []
        for batch in _batches(entry, len(samples), []):
            try:
                value = entry.loaded.call([samples[i] for i in batch], context=Context(step, self.device))
            except UserError:
                raise
            except Exception as error:
                place = place_of(error, entry.loaded.file)
                raise RewardError(f"{where} raised {describe(error)} at {place}, step {step}; mend {place}") from error
            found.append(_checked_gradient(value, [samples[i] for i in batch], where))
        return torch.cat(found)


def normalise(
    raw: torch.Tensor, groups: Sequence[Sequence[int]], how: str, all_sum: AllSum = lambda tensor: tensor
) -> torch.Tensor:
    """Bring one reward ``[B]`` to a common scale, ignoring NaN; standard deviations are of the population, + 1e-4.

    ``none``: as it is; ``batch``: divided by the batch's standard deviation; ``group``: centred and divided by the
    standard deviation in each group.
    """
    if how == "none":
        return raw
    if how == "batch":
        valid = raw[~raw.isnan()]
        count, total = all_sum(torch.stack([torch.tensor(float(len(valid)), dtype=raw.dtype), valid.sum()]))
        squares = all_sum((valid - total / count.clamp(min=1)).square().sum())
        return raw / ((squares / count.clamp(min=1)).sqrt() + STD_FLOOR)
    result = raw.clone()
    for group in groups:
        rows = raw[list(group)]
        valid = rows[~rows.isnan()]
        if len(valid):
            result[list(group)] = (rows - valid.mean()) / (valid.std(correction=0) + STD_FLOOR)
    return result


def _batches(entry: _Entry, n: int, groups: Sequence[Sequence[int]]) -> list[list[int]]:
    if entry.loaded.declaration.per == "group":
        return [list(group) for group in groups if len(group)]
    size = entry.config.batch_size or max(n, 1)
    return [list(range(first, min(first + size, n))) for first in range(0, n, size)]


def _check_inputs(entry: _Entry, samples: Sequence[Sample]) -> None:
    for name in entry.loaded.declaration.inputs:
        if any(getattr(sample, name) is None for sample in samples):
            raise RewardError(
                f"reward {entry.label!r} ({entry.loaded.place}) reads {name!r}, which the samples do not have; "
                f"declare what it reads with @mmrl.reward(inputs=(...)), or use a pipeline that makes {name!r}"
            )


def _refusal(entry: _Entry, answer: Answer, failed: list[Failure], n: int, step: int) -> RewardError:
    named = [f"{f.prompt!r} (slot {f.sample.slot}, sample {f.sample.sample})" for f in failed[:_NAMED]]
    more = f", and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    error: BatchError | None = answer.error
    mend = error.mend if error else f"see why {entry.loaded.place} has no number for them"
    at = f"at step {step}" if step >= 0 else "outside training"
    return RewardError(
        f"reward {entry.label!r} ({entry.loaded.name}) {failed[0].reason}\n"
        f"  {at}, for {len(failed)} of a batch of {n}: {', '.join(named)}{more}\n"
        f"  {mend + '; or set' if mend else 'Or set'} on_failure: drop for this reward, to leave such samples out of "
        "the update (they are counted and named)"
    )


def _checked_gradient(value: object, samples: Sequence[Sample], where: str) -> torch.Tensor:
    n = len(samples)
    if not isinstance(value, torch.Tensor) or value.shape != (n,):
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise RewardError(f"{where} returned {shape}; a differentiable reward returns a tensor of shape [{n}]")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise RewardError(
            f"{where} returned a tensor without a gradient; compute it from sample.tensor with torch alone "
            "(no .item(), .detach(), numpy or torch.no_grad)"
        )
    finite = value.detach().isfinite()
    if not finite.all():
        i = int((~finite).nonzero()[0])
        raise RewardError(f"{where} returned {value[i].item()} for {samples[i].prompt.text!r}; mend it there")
    return value if value.dtype.itemsize >= 4 else value.float()
