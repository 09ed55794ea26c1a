"""Partial rollout: long responses are cut and continue in later steps, with the weights of those steps.

The *stream* is the sequence of the run's slots, step after step. A group is *in flight* while a response of it is
unfinished. A step takes slots from the stream until ``prompts_per_step + extra`` groups are in flight. The engine then
samples at most ``cut_after`` tokens for every unfinished response, in rounds, until ``prompts_per_step`` groups are
complete. Complete groups are scored at once and trained on; the others keep their tokens. So a long response does not
delay a step, every step trains on the same number of groups, and no group is lost or trained on twice. Groups that are
complete at the same time are taken in the order of the stream.

Each token keeps the log-prob of the weights that sampled it. Truncated importance sampling corrects the difference to
the policy that trains (``mmrl.algorithms.mismatch``).

Short responses are complete sooner, so the first steps of a run train on a larger share of them.

Slots and ``extra`` are divided into independent ``pools``: which groups of a pool are complete depends only on the
weights and on its slots. A controller has whole pools, so results do not depend on the number of controllers. Tokens
leave their controller only in a checkpoint, which saves each pool as a separate part.

With asynchronous rollout (``mmrl.rollout.async_rollout``) this happens while earlier steps train. Sampling for a step
begins when that for the step before has ended, and continues its unfinished groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.algorithms.objective import sampler
from mmrl.config.schema import Partial
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, as_integer, as_list, as_text
from mmrl.core.trajectory import Slot, TextRows
from mmrl.models.policy import Version
from mmrl.models.protocol import of_text
from mmrl.rewards.scoring import Failure, Scoring
from mmrl.rollout.encoding import encode
from mmrl.step.batch import Groups, Round, chunks, samples_of
from mmrl.step.step_context import FinishedStep, RolloutStrategy, SamplingSpec, StepContext, StepPart
from mmrl.step.step_metrics import StepMetrics

_FILE = "flight"
"""Prefix of its files in a checkpoint; the pool follows."""


def _read_place(row: Json) -> tuple[int, int, int, str]:
    """A slot in a checkpoint: step, index, attempt, and the id of its prompt."""
    step, index, attempt, prompt = as_list(row)
    return as_integer(step), as_integer(index), as_integer(attempt), as_text(prompt)


@dataclass(frozen=True, eq=False)
class Group:
    """The samples of one slot, possibly unfinished. ``keys``: the features in the store that it uses."""

    slot: Slot
    keys: list[str]
    rows: TextRows

    @property
    def whole(self) -> bool:
        return not _going(self.rows).any()


@dataclass(frozen=True)
class PartialRound:
    """The sampling of a step. ``groups``: the complete ones, in the order of scoring. ``left``: those that stay in
    flight, in the order of the stream. ``taken``: for each pool the number of slots taken from its stream so far."""

    groups: list[Group]
    micro_batches: list[TextRows]
    scoring: Scoring
    unusable: list[Failure]
    rounds: int
    left: list[Group]
    taken: dict[int, int]


class PartialRollout(StepPart, RolloutStrategy):
    """Final class: this controller's groups in flight, in the order of the stream."""

    own = True  # each controller saves its own unfinished responses

    def __init__(self, settings: Partial) -> None:
        self.settings = settings
        self.in_flight: list[Group] = []
        self._taken: dict[int, int] = {}
        self._landed: tuple[list[Group], dict[int, int]] = ([], {})
        self._settled: tuple[list[Group], JsonObject] = ([], {"taken": [0] * settings.pools, "slots": []})

    def groups(self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        """Sample and score the groups of ``step``. ``slots`` is not used: the stream gives the slots, some from earlier
        steps."""
        whole = self.collect(context, self.draw(context, step, step, clock), step, clock, metrics)
        return Groups.of_round(whole, context.recipe.train.group_size)

    def draw(
        self, context: StepContext, step: int, of: int, clock: Clock, version: Version | None = None
    ) -> PartialRound:
        """Sample until as many groups are complete as ``step`` trains on, and submit them to the rewards. May run in a
        separate thread.

        ``of``: the number of finished steps of the weights; ``version``: see ``Devices.continue_generation``. Raises
        ``UserError``.
        """
        pools = range(context.controller.rank, self.settings.pools, context.controller.size)
        wanted = {pool: len(self._share(context, pool)) for pool in pools}
        with clock("encode"):
            unusable = self._fill(context, wanted)
        scoring = context.rewards.start(step, context.recipe.train.group_size)
        landed: list[Group] = []
        micro_batches: list[TextRows] = []
        rounds = 0
        while True:
            ready = [group for pool, most in wanted.items() for group in self._whole(pool)[:most]]
            if ready:
                with clock("decode"):
                    micro_batches.append(TextRows.join([group.rows for group in ready]))
                    scoring.add(context.pipeline.samples(micro_batches[-1], context.rewards.inputs))
                self.in_flight = [group for group in self.in_flight if group not in ready]
                landed += ready
                for group in ready:
                    wanted[self._pool(group.slot)] -= 1
            lacking = [pool for pool, most in wanted.items() if most]
            if not lacking:
                return PartialRound(landed, micro_batches, scoring, unusable, rounds, self.in_flight, dict(self._taken))
            with clock("sample"):
                inputs = context.rewards.inputs
                how = SamplingSpec(
                    [], sampler(context.objective, step), context.recipe.seed, inputs, step=step, round=rounds
                )
                self._draw(context, lacking, of, how, version)
            rounds += 1

    def collect(
        self, context: StepContext, drawn: PartialRound, step: int, clock: Clock, metrics: StepMetrics
    ) -> Round:
        """Wait for the rewards of ``step``; returns its round. Raises ``RewardError``."""
        size = context.recipe.train.group_size
        with clock("reward"):
            scores = drawn.scoring.finish([list(range(n, n + size)) for n in range(0, len(drawn.groups) * size, size)])
        scores.failures.extend(drawn.unusable)
        _measure(drawn, step, metrics)
        self._landed = drawn.left, drawn.taken
        keys = [key for group in drawn.groups for key in group.keys]
        return Round([group.slot for group in drawn.groups], keys, drawn.micro_batches, scores)

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Gather the slots in flight on all controllers: a checkpoint after this step keeps them."""
        groups, taken = self._landed
        mine = [[g.slot.step, g.slot.index, g.slot.attempt, g.slot.prompt.id] for g in groups]
        everyone = context.controller.gather(([[pool, n] for pool, n in taken.items()], mine))
        counts = {pool: n for taken, _ in everyone for pool, n in taken}
        slots = sorted((slot for _, slots in everyone for slot in slots), key=lambda slot: slot[:2])
        self._settled = (groups, {"taken": [counts[pool] for pool in range(self.settings.pools)], "slots": slots})
        return {}

    def state_dict(self) -> PartState:
        """The groups in flight after the last finished step: for each pool of this controller the rows of its groups,
        joined, and the slots of all controllers."""
        groups, state = self._settled  # neither the list nor its groups are changed in place
        rows: dict[int, TextRows] = {}
        for pool in sorted({self._pool(group.slot) for group in groups}):
            rows[pool] = TextRows.join([group.rows for group in groups if self._pool(group.slot) == pool])
        return PartState(state, {f"{_FILE}-{pool}": _saved(of) for pool, of in rows.items()})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        """Restore this controller's part, including the prompts' features.

        Raises ``UserError`` if the data set has changed.
        """
        self._load(context, {int(part.partition("-")[2]): rows for part, rows in saved.parts(_FILE).items()}, numbers)

    def _load(self, context: StepContext, tensors: Mapping[int, Mapping[str, Tensor]], state: JsonObject) -> None:
        pools = range(context.controller.rank, self.settings.pools, context.controller.size)
        self.in_flight = []
        rows = dict.fromkeys(pools, 0)
        for step, index, attempt, prompt in map(_read_place, as_list(state["slots"])):
            pool = index % self.settings.pools
            if pool not in rows:
                continue  # it belongs to a different controller
            (slot,) = _slots(context, step, [index])
            slot = context.controller.replacement(slot, attempt, context.prompts) if attempt else slot
            if slot.prompt.id != prompt:
                raise UserError(
                    f"--resume: slot {index} of step {step} had the prompt {prompt}, and now has {slot.prompt.id}: the "
                    "data set has changed, and responses to its old prompts are unfinished. Restore it, or start a "
                    "new run with --out"
                )
            group = _begun(context, slot)
            first, size = rows[pool], len(group.rows)
            saved = {name: column[first : first + size] for name, column in tensors[pool].items()}
            self.in_flight.append(replace(group, rows=_restored(group.rows, saved)))
            rows[pool] += size
        taken = as_list(state["taken"])
        self._taken = {pool: as_integer(taken[pool]) for pool in pools}
        self._landed = (self.in_flight, dict(self._taken))
        self._settled = (self.in_flight, state)

    def _pool(self, slot: Slot) -> int:
        return slot.index % self.settings.pools

    def _share(self, context: StepContext, pool: int) -> range:
        """The indices of a pool's slots of a step."""
        return range(pool, context.recipe.train.prompts_per_step, self.settings.pools)

    def _whole(self, pool: int) -> list[Group]:
        return [group for group in self.in_flight if self._pool(group.slot) == pool and group.whole]

    def _fill(self, context: StepContext, wanted: Mapping[int, int]) -> list[Failure]:
        """Start groups for the next slots of each pool's stream, until it has ``wanted`` and its part of ``extra``.
        Returns the failures of unusable prompts."""
        fresh: list[Slot] = []
        for pool, n in wanted.items():
            share, taken = self._share(context, pool), self._taken.get(pool, 0)
            extra = len(range(pool, self.settings.extra, self.settings.pools))
            flying = sum(self._pool(group.slot) == pool for group in self.in_flight)
            self._taken[pool] = taken + n + extra - flying
            for place in range(taken, self._taken[pool]):
                fresh += _slots(context, place // len(share), [share[place % len(share)]])
        slots, keys, unusable = encode(context, fresh)
        groups = [*self.in_flight, *(_begun(context, slot) for slot in slots)]
        self.in_flight = sorted(groups, key=lambda group: (group.slot.step, group.slot.index))
        context.pipeline.features.release(keys)  # each group holds its own: two may share a prompt
        return unusable

    def _draw(
        self, context: StepContext, pools: Sequence[int], of: int, how: SamplingSpec, version: Version | None
    ) -> None:
        """One round: sample at most ``cut_after`` tokens for every unfinished response in ``pools``."""
        size = context.recipe.train.group_size
        flying = [group for group in self.in_flight if not group.whole and self._pool(group.slot) in pools]
        before = TextRows.join([group.rows for group in flying])
        going = _going(before).tolist()
        order = sorted(range(len(before)), key=lambda row: going[row])  # stable: complete rows first
        done, asked = order[: going.count(False)], order[going.count(False) :]
        parts = [before.rows(rows) for rows in chunks(asked, context.recipe.sampled_at_once)]
        grown = context.compute.devices.continue_generation(context, parts, self.settings.cut_after, how, version)
        dated = [_with_steps(part, more, of) for part, more in zip(parts, grown, strict=True)]
        after = TextRows.join([*([before.rows(done)] if done else []), *dated])
        place = {row: n for n, row in enumerate(order)}
        rows = [after.rows([place[row] for row in range(n, n + size)]) for n in range(0, len(before), size)]
        further = {id(group): replace(group, rows=of) for group, of in zip(flying, rows, strict=True)}
        self.in_flight = [further.get(id(group), group) for group in self.in_flight]


def _measure(drawn: PartialRound, step: int, metrics: StepMetrics) -> None:
    ages = torch.cat([step - t.column("drawn_at")[t.action_mask] for t in drawn.micro_batches])
    oldest = ages.max() if len(ages) else torch.tensor(0)
    largest = {"sampling/stale_steps": oldest, "sampling/rounds": torch.tensor(drawn.rounds)}
    metrics.gather({"sampling/stale_tokens": (ages > 0).sum(), "sampling/stale_age": ages.sum()}, largest, len(ages))
    waiting = sum(group.whole for group in drawn.left)
    metrics.count({"sampling/in_flight": len(drawn.left) - waiting, "sampling/waiting": waiting})


def _slots(context: StepContext, step: int, indices: Sequence[int]) -> list[Slot]:
    return context.controller.slots_at(indices, step, context.prompts, context.recipe.train.prompts_per_step)


def _begun(context: StepContext, slot: Slot) -> Group:
    """A group without tokens yet; it holds its prompt's features."""
    keys = context.pipeline.encode([slot])
    rows = samples_of([slot], context.recipe.train.group_size)
    return Group(slot, keys, of_text(context.pipeline).unwritten([s for s, _ in rows], [i for _, i in rows]))


def _with_steps(before: TextRows, after: TextRows, step: int) -> TextRows:
    """``after`` with the step of each token; tokens that ``before`` does not have get ``step``."""
    known = before.column("drawn_at").split(before.lengths)
    dates = [pad(old, (0, n - len(old)), value=step) for old, n in zip(known, after.lengths, strict=True)]
    return replace(after, drawn_at=torch.cat(dates))


def _saved(rows: TextRows) -> dict[str, Tensor]:
    """What a checkpoint has of the responses of ``rows``, ``[R, T]`` or ``[R]`` each."""
    return {
        "clean": rows.padded("tokens"),
        "log_probs": rows.padded("log_probs"),
        "mask": rows.padded("action_mask").float(),
        "truncated": rows.truncated,
        "under_way": _going(rows),
        "drawn_at": rows.padded("drawn_at"),
    }


def _restored(begun: TextRows, saved: Mapping[str, Tensor]) -> TextRows:
    """``begun``, which has prompts alone, with the responses that ``_saved`` left."""
    of = {name: column.to(begun.tokens.device) for name, column in saved.items()}
    lengths = saved["mask"].sum(1).long().tolist()
    tokens, log_probs, dates = (
        [row[:n] for row, n in zip(of[name], lengths, strict=True)] for name in ("clean", "log_probs", "drawn_at")
    )
    prompts = list(zip(begun.features, begun.tokens.split(begun.lengths), strict=True))
    rows = TextRows.answers(begun.slots, begun.ids, prompts, tokens, of["truncated"], log_probs, dates)
    return replace(rows, under_way=of["under_way"])


def _going(rows: TextRows) -> Tensor:
    """``[R]`` bool: the responses that are not finished."""
    assert rows.under_way is not None
    return rows.under_way
