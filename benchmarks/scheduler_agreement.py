"""Compare the simulator with live devices that sleep: the seconds of a step, over loads and placements.

    python benchmarks/scheduler_agreement.py

Live: ``MultiDevice`` with eight devices, their threads, the task queue, role switches and decisions; what a device
computes is a sleep. The times are those of a load of ``placement_loads``, or of recorded runs (``--trace``), scaled so
that a step takes about ``--seconds``. Simulated: ``mmrl.planner.simulator.simulate`` with the seconds that each sleep
really took, since a busy machine wakes sleeping threads late; the last column has the error with the seconds that were
asked for. Both begin a run without knowledge, so that under ``adaptive`` a different decision shows in all later steps.
With ``disaggregated`` a step is the time between two updates; a decision's own time counts as training, since nothing
trains meanwhile.

The goals: a median error of at most 5 %, a 95th percentile of at most 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import placement_loads
from sleeping_devices import SleepingDevices

from mmrl.config.placement import Placement
from mmrl.placement.simulated_devices import MicroBatch
from mmrl.planner.simulator.simulate import Cluster, placed, sampled_ahead
from mmrl.planner.simulator.trace import Trace, Work
from mmrl.planner.simulator.trace_from_run import fitted, read_run

DEVICES = 8
PLACEMENTS = {
    "colocate": Placement(sleep=True),
    "partial": Placement(type="partial", judges=3, sleep=True),
    "greedy": Placement(type="greedy", sleep=True),
    "static with moves": Placement(type="greedy", judges=3, sleep=True),
    "adaptive": Placement(type="adaptive", sleep=True),
    "disaggregated": Placement(type="disaggregated", trainers=3, judges=2, staleness=1),
    "disaggregated, lent": Placement(type="disaggregated", trainers=3, judges=2, staleness=1, lend=True),
    "three roles, greedy": Placement(type="disaggregated", trainers=3, staleness=1, split="greedy", lend=True),
    "three roles, not lent": Placement(type="disaggregated", trainers=3, staleness=1, split="greedy"),
    "three roles": Placement(type="disaggregated", trainers=3, staleness=1, split="adaptive", lend=True),
}
GOALS = 0.05, 0.10
PRICE = 0.1
"""Of a switch, as a share of the even generate phase."""


def scaled(trace: Trace, seconds: float) -> Trace:
    """One controller's work, with an even generate phase of ``seconds`` in the mean."""
    shares = [work.shares[0] for work in trace.steps]
    even = (
        statistics.mean(sum(b.sampling + b.judging for batches in share for b in batches) for share in shares) / DEVICES
    )
    by = seconds / even
    steps = [
        Work([[[MicroBatch(b.sampling * by, b.judging * by) for b in batches] for batches in share]], work.train * by)
        for share, work in zip(shares, trace.steps, strict=True)
    ]
    return Trace(steps, (trace.price or PRICE * even) * by, trace.source)


def live(trace: Trace, settings: Placement) -> tuple[list[float], Trace]:
    """The seconds of each step's generate phase of devices that sleep, and the work as it was measured."""
    devices, seconds, steps, prices = SleepingDevices(DEVICES, settings, trace.price), [], [], []
    try:
        for step, work in enumerate(trace.steps):
            seconds.append(devices.run_step(step, work.shares[0]))
            steps.append(Work([devices.record.measured(work.shares[0])], work.train))
            prices += [turned - began for began, turned, _, _ in devices.record.done.values() if turned > began]
    finally:
        devices.close()
    return seconds, Trace(steps, statistics.median(prices) if prices else trace.price, trace.source)


def live_ahead(trace: Trace, settings: Placement) -> tuple[list[float], Trace]:
    """As ``live``, of devices that sample ahead: the seconds between two updates."""
    devices, rounds = SleepingDevices(DEVICES, settings, trace.price), [work.shares[0] for work in trace.steps]
    slower = DEVICES / settings.training(DEVICES)
    try:
        ends = devices.run_ahead(rounds, [work.train * slower for work in trace.steps], settings.staleness or 1)
        between = [decided / slower for decided in (0.0, *devices.decided)]
        steps = [Work([devices.measured(n, one)], trace.steps[n].train + between[n]) for n, one in enumerate(rounds)]
    finally:
        devices.close()
    return [after - before for before, after in pairwise([0.0, *ends])], Trace(steps, trace.price, trace.source)


def predicted_by(trace: Trace, settings: Placement, name: str) -> list[float]:
    """The simulator's seconds of each step, as ``live`` or ``live_ahead`` measures them."""
    if not settings.apart:
        return placed(trace, Cluster(1, DEVICES), settings, name).generate
    return sampled_ahead(trace, Cluster(1, DEVICES), settings, settings.staleness or 1, name).steps


def compared(traces: dict[str, Trace], placements: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for load, trace in traces.items():
        for name, settings in ((name, PLACEMENTS[name]) for name in placements):
            real, measured = (live_ahead if settings.apart else live)(trace, settings)
            asked, predicted = (predicted_by(work, settings, name) for work in (trace, measured))
            errors, late = ([p / r - 1 for p, r in zip(found, real, strict=True)] for found in (predicted, asked))
            row = {
                "load": load,
                "placement": name,
                "live": real,
                "predicted": predicted,
                "errors": errors,
                "late": late,
            }
            rows.append(row)
            line = f"| {load} | {name} | {sum(real):.2f} | {sum(predicted):.2f} | {spread(errors)} | {spread(late)} |"
            print(line, flush=True)
    return rows


def spread(errors: Sequence[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    return f"{statistics.median(sizes):.1%} | {sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]:.1%}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="*", choices=placement_loads.NAMES, default=list(placement_loads.NAMES))
    parser.add_argument("--trace", nargs="*", type=Path, default=[], help="directories of recorded runs")
    parser.add_argument("--placements", nargs="*", choices=list(PLACEMENTS), default=list(PLACEMENTS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.3, help="of an even generate phase")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    arguments = parser.parse_args(given)
    cluster, traces = Cluster(1, DEVICES), {}
    for name in arguments.loads:
        trace = placement_loads.trace_of(name, PRICE, cluster, arguments.steps, seed=0)
        traces[name] = scaled(trace, arguments.seconds)
    for run in arguments.trace:
        trace = fitted(read_run(run), 1, DEVICES, DEVICES * placement_loads.MICRO_BATCHES)
        traces[run.name] = scaled(replace(trace, steps=trace.steps[: arguments.steps]), arguments.seconds)
    print(f"{DEVICES} devices, {arguments.steps} steps each, load average {os.getloadavg()[0]:.1f}\n")
    print("| load | placement | live (s) | simulated (s) | error of a step | 95th % | as asked | 95th % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = compared(traces, arguments.placements)
    errors, late = ([error for row in rows for error in row[key]] for key in ("errors", "late"))
    print(f"| all | {len(errors)} steps | | | {spread(errors)} | {spread(late)} |")
    print(f"\ngoals: median {GOALS[0]:.0%}, 95th percentile {GOALS[1]:.0%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
