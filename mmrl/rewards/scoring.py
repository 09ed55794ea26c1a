"""All rewards of a recipe together: weights, normalisation, batches and the failure policy.

``B`` samples in groups (lists of indices into them) of one prompt each. A sample that a reward could not score is NaN
in the total, never 0, and has a ``Failure`` that says why; with ``on_failure: fail`` the run stops instead.

Rewards compute while sampling continues: ``start`` a step, ``add`` each micro-batch, ``finish``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mmrl.algorithms.advantages import AllSum, alone
from mmrl.config import schema
from mmrl.config.evaluation_checks import label_of
from mmrl.core.errors import UserError, refuse
from mmrl.core.plugins.user_code import blaming, describe, place_of
from mmrl.core.reward_contract import Context, Input
from mmrl.core.trajectory import Sample
from mmrl.episodes.loading import draws
from mmrl.rewards.apart import apart_problems, build_apart
from mmrl.rewards.async_scoring import (
    Entry,
    Failure,
    RewardError,
    Scores,
    Scoring,
    batches,
    check_inputs,
    normalise,
    total_of,
)
from mmrl.rewards.calling import Caller, Calls
from mmrl.rewards.last_words import watched
from mmrl.rewards.loading import Found, Loaded, build, called, find, problems, refused
from mmrl.rewards.patience import Patience
from mmrl.rewards.returned import Answer
from mmrl.rewards.sound import problems_of_sound
from mmrl.rewards.views import views

__all__ = ["Failure", "RewardError", "RewardSet", "Scores", "Scoring", "check", "normalise"]


def check(
    rewards: Sequence[schema.Reward],
    makes: schema.Makes | None = None,
    key: str = "rewards",
    *,
    drawn: bool = False,
) -> list[Found]:
    """Find all rewards and check their signatures and options; build none. Raises ``UserError`` with all mistakes.

    ``makes``: the kind of samples; a reward may read only their fields. None: not checked. ``key``: the recipe's key
    of these rewards. ``drawn``: the samples have a picture that was drawn in their episode, too.
    """
    found: list[Found] = []
    mistakes: list[str] = []
    for i, reward in enumerate(rewards):
        label = label_of(reward.name, reward.label)
        try:
            one = find(reward.name)
            one = replace(one, name=called(one.name))
            found.append(one)
            wrong = problems(one, reward.options)
            if reward.process:
                wrong += apart_problems(one, reward.name)
            if makes is not None and not wrong:
                wrong = unmade(one.reads(reward.options), makes, one, drawn=drawn)
            wrong = wrong or refused(one, reward.options)
        except UserError as error:
            wrong = [str(error)]
        mistakes += [f"{key}[{i}] ({label}): {problem}" for problem in wrong]
    refuse(mistakes)
    return found


_FIELDS: dict[schema.Makes, tuple[tuple[Input, ...], str]] = {
    "text": (("text", "tokens"), "text"),
    "image": (("image", "tensor"), "pictures"),
    "video": (("video", "tensor"), "clips"),
}
"""The fields that a sample of this kind has, and its name in messages."""


def unmade(inputs: Sequence[Input], makes: schema.Makes, reward: Found | Loaded, *, drawn: bool = False) -> list[str]:
    """A message for fields that ``reward`` reads and samples of this kind do not have; an empty list if it has all.
    ``drawn``: see ``check``."""
    fields, word = (("text", "image", "tokens"), "text and a picture") if drawn else _FIELDS[makes]
    lacking = [name for name in inputs if name not in fields and (name, makes) != ("audio", "video")]
    if not lacking:
        return []
    if reward.declaration.reads is not None:
        edit = "change the options that say what it reads (rubric of judge, inputs of http)"
    else:
        edit = f"declare what it reads at {reward.place}: @mmrl.reward(inputs=({fields[0]!r},))"
    if makes == "video" and "image" in lacking:
        edit += ", or take name: frames with this one in its options"
    return [
        f"reads {', '.join(map(repr, lacking))}, and this pipeline makes {word}, whose samples have "
        f"{' and '.join(map(repr, fields))}; {edit}, or take another reward"
    ]


def silent(recipe: schema.Recipe, rewards: Mapping[str, Found | Loaded]) -> Iterator[str]:
    """Messages for teachers that are a reward which says nothing of tokens; ``rewards``: by label."""
    for n, teacher in enumerate(recipe.teacher):
        one = rewards.get(teacher.reward or "")
        if one is not None and one.declaration.spans != "token":
            yield (
                f"teacher[{n}].reward: {one.name} says nothing of single tokens; name a reward teacher, or return the "
                f'log-prob of each at {one.place}: @mmrl.reward(inputs=("tokens",), spans="token")'
            )


class RewardSet:
    """The rewards of a recipe, loaded and built.

    ``device`` is where a reward's model computes. ``all_sum`` adds a small tensor over
    all controllers, for the statistics of ``normalize: batch``; the default is one controller. ``folder``: the run's
    directory, for caches and transcripts; may be set later. ``awake``: load models onto the device and start servers
    now, not at the first call. ``patience``: how long training steps wait for failed samples; None: they do not wait.
    ``feedback``: ask for the texts that rewards may give of samples. Raises ``UserError``.
    """

    def __init__(
        self,
        rewards: Sequence[schema.Reward],
        device: torch.device | str = "cpu",
        all_sum: AllSum = alone,
        folder: Path | None = None,
        patience: Patience | None = None,
        *,
        awake: bool = True,
        feedback: bool = False,
    ) -> None:
        self.device, self.folder, self._feedback = device, folder, feedback
        self._all_sum, self._patience = all_sum, patience
        self._here: dict[str, Caller] = {}
        self._entries: list[Entry] = []
        for found, config in zip(check(rewards), rewards, strict=True):
            there = config.process
            loaded = build_apart(found, config.name, config.options) if there else build(found, config.options)
            label = label_of(config.name, config.label)
            self._here[label] = Caller(loaded, config.timeout, config.retries)
            self._entries.append(Entry(label, config, loaded, self._here[label]))
        if awake:
            try:
                self.wake()
            except BaseException:
                self.close()
                raise

    def heed(self, stopped: Callable[[], bool]) -> None:
        """End a wait for failed samples by ``StoppedError`` once ``stopped``."""
        if self._patience is not None:
            self._patience.stopped = stopped

    @property
    def labels(self) -> list[str]:
        """What metrics call the rewards, in the recipe's order."""
        return [entry.label for entry in self._entries]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward by its label."""
        return {entry.label: entry.config.weight for entry in self._entries}

    @property
    def inputs(self) -> frozenset[Input]:
        """The fields of a sample that any of the rewards reads."""
        return frozenset(name for entry in self._entries for name in entry.loaded.declaration.inputs)

    def can_read(self, recipe: schema.Recipe, *, sounds: bool | None = None) -> None:
        """Raises ``UserError`` where a reward reads what samples of this recipe do not have, or does with their sound
        what cannot be done (``sounds``: whether they have one; None: not checked)."""
        drawn = draws(recipe.environment)
        for entry in self._entries:
            wrong = unmade(entry.loaded.declaration.inputs, recipe.shows, entry.loaded, drawn=drawn)
            if wrong:
                raise UserError(f"the reward {entry.label} {wrong[0]}")
        refuse(silent(recipe, {entry.label: entry.loaded for entry in self._entries}))
        reads = [entry.loaded.declaration.inputs for entry in self._entries]
        if sounds is not None and reads:
            refuse(problems_of_sound(recipe, reads, sounds=sounds))

    @property
    def sent(self) -> Counter[str]:
        """Bytes that the rewards gave to other processes so far, by kind (``Context.sent``)."""
        return sum((entry.sent for entry in self._entries), Counter())

    @property
    def differentiable(self) -> bool:
        """Whether every reward carries a gradient for each sample."""
        return all(entry.loaded.declaration.has_gradient for entry in self._entries)

    @property
    def spans(self) -> list[str]:
        """The labels of the rewards that score pieces of a response."""
        return [entry.label for entry in self._entries if entry.loaded.declaration.spans]

    @property
    def by_token(self) -> list[str]:
        """Those of them whose pieces are of tokens."""
        return [entry.label for entry in self._entries if entry.loaded.declaration.spans == "token"]

    @property
    def votes(self) -> bool:
        """Whether any of the rewards says what the answer of a response is."""
        return any(entry.loaded.answer_of is not None for entry in self._entries)

    def answers(self, samples: Sequence[Sample]) -> dict[str, list[str | None]]:
        """The answer of each sample, None without one, by the label of each reward that says what it is.

        Raises ``UserError`` from a mistake there.
        """
        found: dict[str, list[str | None]] = {}
        for entry in self._entries:
            ask = entry.loaded.answer_of
            if ask is None:
                continue
            with blaming(f"answer_of of {entry.label}", entry.loaded.file), watched(entry.loaded.name):
                found[entry.label] = [ask(sample) for sample in views(samples)]
        return found

    @property
    def on_device(self) -> list[str]:
        """The labels of the rewards that compute with a model on a device."""
        return [entry.label for entry in self._entries if entry.loaded.declaration.device]

    def call_by(self, on_device: Callable[[str], Calls], outside: Callable[[Calls], Calls]) -> None:
        """Call the rewards that compute on a device by ``on_device(label)``, and each of the others by
        ``outside`` of what called it before."""
        there = set(self.on_device)
        self._entries = [
            replace(e, caller=on_device(e.label) if e.label in there else outside(e.caller)) for e in self._entries
        ]

    def answer(self, label: str, samples: Sequence[Sample], step: int) -> Answer:
        """One reward's answer for a batch, computed in this process."""
        context = Context(step, self.device, self.folder, label, feedback=self._feedback)
        return replace(self._here[label].one(samples, context), sent=context.sent)

    def sleep(self, but: str = "") -> None:
        """Free the device's memory that rewards use, for those that can sleep, ``but`` this one. Raises
        ``UserError``."""
        for entry in self._entries:
            if entry.label != but:
                entry.loaded.sleep(self.device)

    def wake(self, label: str = "") -> bool:
        """Make the rewards, or the one called ``label``, ready on the device. Returns whether a later waking is faster.
        Raises ``UserError``."""
        came = [entry.loaded.wake(self.device) for entry in self._entries if label in ("", entry.label)]
        return any(came)

    @property
    def by_batch(self) -> list[str]:
        """The labels of the rewards that count and are normalised by the batch."""
        return [e.label for e in self._entries if e.config.normalize == "batch" and e.config.weight != 0]

    def start(
        self,
        step: int = -1,
        group_size: int | None = None,
        *,
        scale: bool = True,
        round: int = 0,
        patient: bool = True,
        labels: Sequence[str] = (),
    ) -> Scoring:
        """Begin to score the samples of ``step``, which come in micro-batches.

        ``group_size``: samples of one slot and attempt that make a group whole, so that rewards per group need not wait
        for ``finish``; None makes them. ``scale``: whether the samples are the whole batch that rewards are normalised
        by, and of all controllers; where they are not, ``total`` does that later. ``round``: of dynamic sampling.
        ``patient``: wait where too many of them fail. ``labels``: of the rewards that score; none: all.
        """
        entries = [entry for entry in self._entries if not labels or entry.label in labels]
        all_sum, patience = self._all_sum if scale else None, self._patience if patient else None
        longest = math.inf if self._patience is None else self._patience.settings.patience
        return Scoring(
            entries,
            step,
            self.device,
            self.folder,
            group_size,
            all_sum,
            round,
            patience,
            longest,
            feedback=self._feedback,
        )

    def total(self, parts: Mapping[str, torch.Tensor], groups: Sequence[Sequence[int]]) -> torch.Tensor:
        """The weighted sum ``[B]`` of the normalised rewards, of their raw values by label; NaN where one is missing.

        ``groups`` hold each index once. All controllers must call it equally often.
        """
        return total_of(self._entries, parts, groups, self._all_sum)

    def score(self, samples: Sequence[Sample], groups: Sequence[Sequence[int]], *, step: int = -1) -> Scores:
        """Score ``samples``, all rewards at once, and take failures as they come.

        ``groups`` hold each index of the samples once. Raises ``RewardError`` when a reward whose policy is ``fail``
        leaves a sample without a score.
        """
        scoring = self.start(step, patient=False)
        scoring.add(samples)
        return scoring.finish(groups)

    def weighted(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum ``[B]`` of every reward's values by label."""
        return torch.stack([entry.config.weight * parts[entry.label] for entry in self._entries]).sum(0)

    def gradient_parts(self, samples: Sequence[Sample], *, step: int = -1) -> dict[str, torch.Tensor]:
        """Each reward's values ``[B]`` by label, with their graphs to ``sample.tensor``. Raises ``RewardError``.

        Runs in the caller's thread, where its autocast and checkpoint settings hold; hence without the deadline.
        """
        return {entry.label: self._differentiate(entry, samples, step) for entry in self._entries}

    def close(self) -> None:
        """Let the rewards' threads end."""
        for caller in self._here.values():
            caller.close()

    def _differentiate(self, entry: Entry, samples: Sequence[Sample], step: int) -> torch.Tensor:
        where = f"reward {entry.label!r} ({entry.loaded.place})"
        check_inputs(entry, samples)
        found = []
        context = Context(step, self.device, self.folder, entry.label)
        parts = batches(entry, range(len(samples)), samples)
        for batch in parts:
            try:
                with watched(entry.loaded.name):
                    value = entry.loaded.call(views([samples[i] for i in batch]), context=context)
            except UserError:
                raise
            except Exception as error:
                place = place_of(error, entry.loaded.file)
                raise RewardError(f"{where} raised {describe(error)} at {place}, step {step}; mend {place}") from error
            found.append(_checked_gradient(value, [samples[i] for i in batch], where))
        order = [i for batch in parts for i in batch]
        values = torch.cat(found)
        return values if order == sorted(order) else values[sorted(range(len(order)), key=order.__getitem__)]


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
