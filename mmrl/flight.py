"""Partial rollout: responses that are cut, stay in flight, and go on in later steps under the weights of then.

The stream is the controller's slots, step after step. A step fills the flight up to ``prompts_per_step + extra`` groups
from it, and has the engine draw at most ``cut_after`` tokens for every response under way, round after round, until
``prompts_per_step`` groups are whole: those are scored, as soon as they are, and trained on. The others stay with their
tokens. So a long response holds up no step, every step trains on equally many groups, and no group is lost or trained
on twice. Among groups that are whole at the same time the first of the stream go first.

Each token keeps the log-prob it was drawn with, under the weights of then. Their distance from the policy that trains
is part of the gap that truncated importance sampling corrects (``mmrl.algorithms.mismatch``).

Short responses come back sooner: the first steps of a run see more of them than the data's share.
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
        self.taken = 0
        """Slots taken from the stream so far."""
        self._settled: tuple[list[Group], int] = ([], 0)

    def land(self, run: Run, wanted: int, step: int, clock: Clock, tally: Tally) -> Round:
        """Draw until ``wanted`` groups, a step's slots on this controller, are whole, and score them.

        They are in the order in which they were scored. Raises ``UserError``.
        """
        size = run.recipe.train.group_size
        with clock("encode"):
            bad = self._fill(run, wanted + self.settings.extra)
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
        tally.set({"sampling/rounds": rounds, **self._metrics(micro_batches, step)})
        return Round([g.slot for g in landed], [key for g in landed for key in g.keys], micro_batches, scores)

    def settle(self) -> None:
        """The step is done: what is in flight now is what a checkpoint keeps."""
        self._settled = (self.groups, self.taken)  # neither list nor groups are changed in place

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What was in flight after the last finished step: rows of its groups one after another, and their slots."""
        groups, taken = self._settled
        rows = Trajectory.join([group.rows for group in groups]) if groups else None
        tensors = {} if rows is None else {name: _column(getattr(rows, name)) for name in _SAVED}
        slots = [[g.slot.step, g.slot.index, g.slot.attempt, g.slot.prompt.id] for g in groups]
        return tensors, {"taken": taken, "slots": slots}

    def load_state(self, run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore ``state``, features of the prompts too. Raises ``UserError`` where the data set has changed."""
        size = run.recipe.train.group_size
        self.groups = []
        for n, (step, index, attempt, prompt) in enumerate(state["slots"]):
            slot = next(s for s in _slots(run, step) if s.index == index)
            slot = run.controller.replacement(slot, attempt, run.prompts) if attempt else slot
            if slot.prompt.id != prompt:
                raise UserError(
                    f"--resume: slot {index} of step {step} held the prompt {prompt}, and now {slot.prompt.id}: the "
                    "data set has changed, and responses to its old prompts are in flight. Put it back, or start a "
                    "new run with --out"
                )
            group = _begun(run, slot)
            device = group.rows.clean.device
            saved = {name: column[n * size : (n + 1) * size].to(device) for name, column in tensors.items()}
            without_padding = replace(group.rows, **saved).rows(list(range(size)))
            self.groups.append(replace(group, rows=without_padding))
        self.taken = state["taken"]
        self.settle()

    def _fill(self, run: Run, most: int) -> list[Failure]:
        """Begin groups for the next slots of the stream, ``most`` in all; returns the prompts that cannot be used."""
        fresh = _stream(run, self.taken, most - len(self.groups))
        slots, keys, bad = encode(run, fresh)
        self.groups = [*self.groups, *(_begun(run, slot) for slot in slots)]
        run.pipeline.features.release(keys)  # each group holds its own: two may share a prompt
        self.taken += len(fresh)
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

    def _metrics(self, landed: Sequence[Trajectory], step: int) -> dict[str, float]:
        ages = torch.cat([step - _column(t.drawn_at)[_column(t.mask) > 0] for t in landed])
        waiting = sum(group.whole for group in self.groups)
        return {
            "sampling/in_flight": len(self.groups) - waiting,
            "sampling/waiting": waiting,
            "sampling/stale_tokens": (ages > 0).float().mean().item() if len(ages) else 0.0,
            "sampling/stale_steps": ages.max().item() if len(ages) else 0,
        }


def _stream(run: Run, first: int, n: int) -> list[Slot]:
    """``n`` slots of this controller from number ``first`` on, step after step."""
    step, skipped = divmod(first, len(_slots(run, 0)))
    slots: list[Slot] = []
    while len(slots) < skipped + n:
        slots += _slots(run, step)
        step += 1
    return slots[skipped : skipped + n]


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
