"""Partial rollout: responses that are cut, stay in flight, and go on in later steps under the weights of then.

The stream is the controller's slots, step after step. A step fills the flight up to ``prompts_per_step + extra`` groups
from it, and has the engine draw at most ``cut_after`` tokens for every response under way, round after round, until
``prompts_per_step`` groups are whole: those are scored, as soon as they are, and trained on. The others stay with their
tokens. So a long response holds up no step, every step trains on equally many groups, and no group is lost or trained
on twice. Among groups that are whole at the same time the first of the stream go first.

Each token keeps the log-prob it was drawn with, under the weights of then. Their distance from the policy that trains
is part of the gap that truncated importance sampling corrects (``mmrl.algorithms.mismatch``).

Short responses come back sooner: the first steps of a run see more of them than the data's share.

Each of several controllers has a flight of its own, of its own slots and its part of ``extra``. Tokens never leave it:
a checkpoint says which slots are under way, and a resumed run begins those anew, whoever has them now. One controller
alone saves the tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.batch import Run, chunks, samples_of
from mmrl.config.schema import Partial
from mmrl.errors import UserError
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure
from mmrl.rollout import Round, encode
from mmrl.tally import Tally
from mmrl.trajectory import Slot, Trajectory

_SAVED = ("clean", "log_probs", "mask", "truncated", "under_way", "drawn_at")


@dataclass(frozen=True, eq=False)
class Group:
    """The samples of one slot, as far as they are drawn. ``keys``: the features it holds in the store."""

    slot: Slot
    keys: list[str]
    rows: Trajectory

    @property
    def whole(self) -> bool:
        return not _column(self.rows.under_way).any()


class Flight:
    """Final class: the groups in flight, in the order of the stream."""

    def __init__(self, settings: Partial) -> None:
        self.settings = settings
        self.groups: list[Group] = []
        self.stream = Stream()
        self._settled: tuple[list[Group], dict[str, Any]] = ([], {"first": 0, "taken": [], "slots": []})

    def land(self, run: Run, wanted: int, step: int, clock: Clock, tally: Tally) -> Round:
        """Draw until ``wanted`` groups, a step's slots on this controller, are whole, and score them.

        They are in the order in which they were scored. Raises ``UserError``.
        """
        size = run.recipe.train.group_size
        with clock("encode"):
            bad = self._fill(run, wanted + len(run.controller.share(self.settings.extra)))
        scoring = run.rewards.start(step, size)
        landed: list[Group] = []
        micro_batches: list[Trajectory] = []
        rounds = 0
        with run.policy.using(run.objective.samples_with):
            run.pipeline.sync(run.policy.tag)
            while True:
                ready = [group for group in self.groups if group.whole][: wanted - len(landed)]
                if ready:
                    with clock("decode"):
                        micro_batches.append(Trajectory.join([group.rows for group in ready]))
                        scoring.add(run.pipeline.samples(micro_batches[-1], run.rewards.inputs))
                    self.groups = [group for group in self.groups if group not in ready]
                    landed += ready
                if len(landed) == wanted:
                    break
                with clock("sample"):
                    self._draw(run, step)
                rounds += 1
        with clock("reward"):
            scores = scoring.finish([list(range(n, n + size)) for n in range(0, wanted * size, size)])
        scores.failures.extend(bad)
        self._measure(micro_batches, step, rounds, tally)
        return Round([g.slot for g in landed], [key for g in landed for key in g.keys], micro_batches, scores)

    def settle(self, run: Run) -> None:
        """The step is done: what is in flight now, on all controllers, is what a checkpoint keeps."""
        mine = [[g.slot.step, g.slot.index, g.slot.attempt, g.slot.prompt.id] for g in self.groups]
        everyone = run.controller.gather({"next": self.stream.next, "slots": mine})
        first, taken = self.stream.whole(run, [one["next"] for one in everyone])
        slots = sorted((slot for one in everyone for slot in one["slots"]), key=lambda slot: slot[:2])
        alone = self.groups if len(everyone) == 1 else []  # neither the list nor its groups are changed in place
        self._settled = (alone, {"first": first, "taken": taken, "slots": slots})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What was in flight after the last finished step: the slots, and of a controller alone the rows of its groups
        one after another."""
        groups, state = self._settled
        rows = Trajectory.join([group.rows for group in groups]) if groups else None
        return {} if rows is None else {name: _column(getattr(rows, name)) for name in _SAVED}, state

    def load_state(self, run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore this controller's part of ``state``, features of the prompts too.

        Raises ``UserError`` where the data set has changed.
        """
        size = run.recipe.train.group_size
        self.groups = []
        for n, (step, index, attempt, prompt) in enumerate(state["slots"]):
            slot = next((s for s in _slots(run, step) if s.index == index), None)
            if slot is None:
                continue  # another controller's
            slot = run.controller.replacement(slot, attempt, run.prompts) if attempt else slot
            if slot.prompt.id != prompt:
                raise UserError(
                    f"--resume: slot {index} of step {step} held the prompt {prompt}, and now {slot.prompt.id}: the "
                    "data set has changed, and responses to its old prompts are in flight. Put it back, or start a "
                    "new run with --out"
                )
            group = _begun(run, slot)
            if not tensors:
                self.groups.append(group)
                continue
            device = group.rows.clean.device
            saved = {name: column[n * size : (n + 1) * size].to(device) for name, column in tensors.items()}
            without_padding = replace(group.rows, **saved).rows(list(range(size)))
            self.groups.append(replace(group, rows=without_padding))
        self.stream = Stream(state["first"], frozenset(state["taken"]))
        self._settled = (self.groups if run.controller.size == 1 else [], state)

    def _fill(self, run: Run, most: int) -> list[Failure]:
        """Begin groups for the next slots of the stream, ``most`` in all; returns the prompts that cannot be used."""
        fresh = self.stream.take(run, most - len(self.groups))
        slots, keys, bad = encode(run, fresh)
        groups = [*self.groups, *(_begun(run, slot) for slot in slots)]
        self.groups = sorted(groups, key=lambda group: _position(run, group.slot))
        run.pipeline.features.release(keys)  # each group holds its own: two may share a prompt
        return bad

    def _draw(self, run: Run, step: int) -> None:
        """One round: at most ``cut_after`` tokens for every response under way."""
        size = run.recipe.train.group_size
        flying = [group for group in self.groups if not group.whole]
        before = Trajectory.join([group.rows for group in flying])
        going = _column(before.under_way).tolist()
        order = sorted(range(len(before)), key=lambda row: going[row])  # stable: what is complete, then what goes on
        done, asked = order[: going.count(False)], order[going.count(False) :]
        parts = [before.rows(done)] if done else []
        for rows in chunks(asked, run.recipe.sampling.batch_size or run.recipe.train.micro_batch_size):
            part = before.rows(rows)
            parts.append(_dated(part, run.pipeline.go_on(part, self.settings.cut_after, run.recipe.seed), step))
        after = Trajectory.join(parts)
        place = {row: n for n, row in enumerate(order)}
        grown = iter([after.rows([place[row] for row in range(n, n + size)]) for n in range(0, len(before), size)])
        self.groups = [group if group.whole else replace(group, rows=next(grown)) for group in self.groups]

    def _measure(self, landed: Sequence[Trajectory], step: int, rounds: int, tally: Tally) -> None:
        ages = torch.cat([step - _column(t.drawn_at)[_column(t.mask) > 0] for t in landed])
        oldest = ages.max() if len(ages) else torch.tensor(0)
        largest = {"sampling/stale_steps": oldest, "sampling/rounds": torch.tensor(rounds)}
        tally.gather({"sampling/stale_tokens": (ages > 0).sum()}, largest, len(ages))
        waiting = sum(group.whole for group in self.groups)
        tally.count({"sampling/in_flight": len(self.groups) - waiting, "sampling/waiting": waiting})


class Stream:
    """Final class: this controller's slots, step after step, each taken once.

    A slot's position is ``step * prompts_per_step + index``. Its own before ``next`` are taken, and those in ``taken``:
    controllers of another number had come to different places.
    """

    def __init__(self, first: int = 0, taken: frozenset[int] = frozenset()) -> None:
        self.next, self.taken = first, taken

    def take(self, run: Run, n: int) -> list[Slot]:
        """The next ``n`` slots; none where ``n`` is negative."""
        slots: list[Slot] = []
        step = self.next // run.recipe.train.prompts_per_step
        while len(slots) < n:
            for slot in _slots(run, step):
                at = _position(run, slot)
                if len(slots) < n and at >= self.next and at not in self.taken:
                    slots.append(slot)
                    self.next = at + 1
            step += 1
        return slots

    def whole(self, run: Run, places: Sequence[int]) -> tuple[int, list[int]]:
        """``first`` and ``taken`` of all controllers, whose ``next`` are ``places``."""
        per_step, first = run.recipe.train.prompts_per_step, min(places)
        ahead = {at for at in range(first, max(places)) if at < places[at % per_step % len(places)]}
        return first, sorted(ahead | {at for at in self.taken if at >= first})


def _position(run: Run, slot: Slot) -> int:
    return slot.step * run.recipe.train.prompts_per_step + slot.index


def _slots(run: Run, step: int) -> list[Slot]:
    return run.controller.slots(step, run.prompts, run.recipe.train.prompts_per_step)


def _begun(run: Run, slot: Slot) -> Group:
    """A group of which nothing is drawn yet, holding its prompt's features."""
    keys = run.pipeline.encode([slot])
    rows = samples_of([slot], run.recipe.train.group_size)
    device = next(iter(run.policy.trainable.values())).device
    none = torch.zeros(len(rows), 0, device=device)
    start = Trajectory(
        [s for s, _ in rows],
        [i for _, i in rows],
        none.long(),
        keys * len(rows),
        log_probs=none,
        mask=none,
        truncated=torch.ones(len(rows), dtype=torch.bool, device=device),
        under_way=torch.ones(len(rows), dtype=torch.bool, device=device),
        drawn_at=none.long(),
    )
    return Group(slot, keys, start)


def _dated(before: Trajectory, after: Trajectory, step: int) -> Trajectory:
    """``after`` with the steps in which its tokens were drawn: those that ``before`` lacks in ``step``."""
    mask, old = _column(after.mask), _column(before.mask)
    known = pad(old, (0, mask.shape[1] - old.shape[1])) > 0
    dates = pad(_column(before.drawn_at), (0, mask.shape[1] - old.shape[1]))
    return replace(after, drawn_at=torch.where(known, dates, step) * mask.long())


def _column(column: Tensor | None) -> Tensor:
    assert column is not None
    return column
