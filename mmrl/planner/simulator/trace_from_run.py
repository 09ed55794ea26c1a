"""Read the durations of a run's micro-batches from its records, for the simulator.

``placement.jsonl`` has a line for everything that a device did, seconds from the step's start,

    {"step": 3, "controller": 0, "device": 1, "role": "rollout", "began": 0.1, "ended": 2.3}

where the role is rollout, judge, train, wake (a change of role; ``priced`` is false if its time is not typical of a
change inside a phase) or call (of a reward outside of the devices: ``reward``, ``requests``, their ``seconds`` together
and ``at_once`` in place of a device). ``round`` is the round of dynamic sampling. With asynchronous rollout ``of`` is
the later step that the work was for, and ``cut`` says that the work continued in the next step. Lines with ``decision``
are decisions of the adaptive placement. Without that file ``metrics.jsonl`` has the total time of each phase of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.stored import read_object
from mmrl.logging.metrics import read, read_numbers
from mmrl.placement.simulated_devices import MicroBatch, Rounds
from mmrl.placement.tasks import Call, Event
from mmrl.placement.what_if import rounds
from mmrl.planner.simulator.trace import Trace, Work

ROLLOUT, JUDGE, WAKE, CALL = "rollout", "judge", "wake", "call"
Row = Mapping[str, Any]


_MOST, _MOST_STEPS = 1 << 16, 10**6
"""Controllers and devices, and steps, of a run."""


@dataclass(frozen=True)
class Recorded:
    """The trace of a run with ``controllers`` controllers of ``devices`` devices each."""

    trace: Trace
    controllers: int
    devices: int


def read_run(run: Path) -> Recorded:
    """Read a run directory. Raises ``UserError`` if nothing was recorded, or the records cannot be read."""
    metrics = {row["step"]: row for row in read_numbers(run / "metrics.jsonl") if row.get("time/step") is not None}
    events = [row for row in read(run / "placement.jsonl") if "role" in row]
    if any("sampling/stale_tokens" in row for row in metrics.values()):
        raise UserError(
            f"{run} sampled responses in parts over several steps (rollout.partial), so that no step measures its "
            "own work; name a run without rollout.partial"
        )
    apart = any("sampling/stale_steps" in row for row in metrics.values()) and bool(events)
    if apart and not any("of" in row for row in events):
        raise UserError(
            f"{run} sampled ahead of its training (disaggregated), and its version did not record for which step, so "
            "that no step measures its own work; name a run of this version, or of a different placement"
        )
    if not metrics and not events:
        raise UserError(f"{run} has no metrics.jsonl with steps in it; name the directory of a run with finished steps")
    try:
        return _of_events(run, events, metrics, apart) if events else _of_metrics(run, metrics)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        name = "placement.jsonl" if events else "metrics.jsonl"
        raise UserError(f"{run / name} has a line with an unexpected format ({error!r}); delete it") from None


def fitted(recorded: Recorded, controllers: int, devices: int, micro_batches: int, seed: int = 0) -> Trace:
    """The trace for other numbers of controllers and devices; unchanged for those of the run.

    Every step gets ``micro_batches`` random ones of the run's step, in one round, divided over ``controllers``.
    Training time grows with their number, and falls with the total of ``devices``.
    """
    own = recorded.controllers * recorded.devices
    if (controllers, devices) == (recorded.controllers, own):
        return recorded.trace
    rng = np.random.default_rng(seed)
    steps = []
    for work in recorded.trace.steps:
        pool = [batch for rounds in work.shares for batches in rounds for batch in batches]
        drawn = [pool[n] for n in rng.integers(len(pool), size=micro_batches)]
        train = work.train * micro_batches / len(pool) * own / devices
        steps.append(Work([[drawn[rank::controllers]] for rank in range(controllers)], train))
    return Trace(steps, recorded.trace.price, recorded.trace.source)


def _of_events(run: Path, events: Sequence[Row], metrics: Mapping[int, Row], apart: bool) -> Recorded:
    for row in events:
        if not (0 <= int(row["controller"]) < _MOST and -1 <= int(row.get("device", -1)) < _MOST):
            raise ValueError(f"controller {row['controller']}, device {row.get('device')}")
        if not 0 <= int(row["step"]) < _MOST_STEPS:
            raise ValueError(f"step {row['step']}")
    controllers = 1 + max(int(row["controller"]) for row in events)
    devices = 1 + max(int(row["device"]) for row in events if row["role"] != CALL)
    rows_by_step = _by_their_step(events, metrics) if apart else events
    by_step = grouped((int(row["step"]), row) for row in rows_by_step)
    steps = []
    for step, rows in sorted(by_step.items()):
        if not any(row["role"] == ROLLOUT for row in rows):
            continue
        shares = [_rounds([row for row in rows if row["controller"] == rank]) for rank in range(controllers)]
        trainers = len({row["device"] for row in rows if row["role"] == "train"})
        after = _after(rows, None) * trainers / devices if apart else _after(rows, metrics.get(step))
        if trainers or not apart:  # else the run ended before it trained on them
            steps.append(Work(shares, after))
    if not steps:
        raise UserError(f"{run / 'placement.jsonl'} has no sampling in it; run a step, or remove the file")
    prices = [row["ended"] - row["began"] for row in events if row["role"] == WAKE and row.get("priced", True)]
    price = statistics.median(prices) if prices else 0.0
    return Recorded(Trace(steps, price, f"{run}, {len(steps)} steps"), controllers, devices)


def _by_their_step(events: Sequence[Row], metrics: Mapping[int, Row]) -> list[Row]:
    """Asynchronous rollout: the events with the step that they belong to, and with times from the start of the run. An
    event that was divided by the end of a step is joined."""
    starts, began = {}, 0.0
    for step in range(min(metrics, default=1), 1 + max(int(row["step"]) for row in events)):
        starts[step] = began
        began += metrics[step]["time/step"] if step in metrics else 0.0
    out: list[Row] = []
    going: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in events:
        place, at = (row["controller"], row.get("device", -1), row["role"]), starts[int(row["step"])]
        whole = going.pop(place, None)
        if whole is not None and (row["began"] == 0 or at + row["began"] == whole["ended"]):
            whole["ended"] += row["ended"] - row["began"]
        else:
            whole = {**row, "step": row.get("of", row["step"]), "began": at + row["began"], "ended": at + row["ended"]}
            out.append(whole)
        if row.get("cut"):
            going[place] = whole
    return out


def _rounds(rows: Sequence[Row]) -> Rounds:
    return rounds(
        Event(
            row.get("device", -1),
            row["role"],
            row["began"],
            row["ended"],
            row.get("round", 0),
            call=_call(row),
            judge=row.get("judge", ""),
        )
        for row in rows
    )


def _call(row: Row) -> Call | None:
    if row["role"] != CALL:
        return None
    call = Call(str(row["reward"]), int(row["requests"]), float(row["seconds"]), int(row["at_once"]))
    if call.requests < 1 or call.at_once < 1:
        raise ValueError(f"{call.requests} requests, {call.at_once} at once")
    return call


def _after(rows: Sequence[Row], metrics: Row | None) -> float:
    """Seconds of a step outside its generate phase: of the whole step, if it was measured, else of training."""
    generate = [row for row in rows if row["role"] in (ROLLOUT, JUDGE, CALL)]
    if metrics is not None:
        phase = max(row["ended"] for row in generate) - min(row["began"] for row in generate)
        return max(metrics["time/step"] - phase, 0.0)
    train = [row for row in rows if row["role"] == "train"]
    return max(row["ended"] for row in train) - min(row["began"] for row in train) if train else 0.0


def _of_metrics(run: Path, metrics: Mapping[int, Row]) -> Recorded:
    """Every micro-batch has the mean duration of its step. The time of judging is only the wait for it, which is less
    than its duration if it overlapped with sampling."""
    settings = read_object(run / "resolved.json")
    train, sampling = settings["train"], settings["sampling"]
    controllers = settings.get("controllers", 1)
    prompts = -(-train["prompts_per_step"] // controllers)
    count = -(-prompts * train["group_size"] // (sampling.get("batch_size") or train["micro_batch_size"]))
    steps = []
    for row in metrics.values():
        sampled, judged = row.get("time/sample", 0.0) + row.get("time/decode", 0.0), row.get("time/reward", 0.0)
        share: Rounds = [[MicroBatch(sampled / count, judged / count)] * count]
        steps.append(Work([share] * controllers, max(row["time/step"] - sampled - judged, 0.0)))
    return Recorded(Trace(steps, 0.0, f"{run}, {len(steps)} steps (metrics alone)"), controllers, 1)
