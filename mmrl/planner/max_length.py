"""Estimate how long rows of text can be until a phase no longer fits."""

from __future__ import annotations

from mmrl.planner.plan_data import Plan


def max_length(plan: Plan) -> tuple[int, str] | None:
    """The tokens of the longest rows that fit where each grows alike, and the phase that says so; None where a device's
    memory, or what a token takes, is not known.

    A slice was measured at two lengths and takes more in proportion; sampling in proportion to its whole.
    """
    c, m, memory = plan.counts, plan.measured, plan.device_memory
    if c is None or m is None or memory is None or not m.train_token:
        return None
    kept = m.trajectory * c.samples / c.row_tokens
    grows = {"train": m.train_token + kept, "sample": m.sample / c.row_tokens + kept}
    found = {p.name: c.row_tokens + int((memory - p.total) / grows[p.name]) for p in plan.phases if p.name in grows}
    phase = min(found, key=lambda name: found[name])
    return max(0, found[phase]), phase
