"""Estimate the longest rows of text that fit into memory."""

from __future__ import annotations

from mmrl.planner.plan_data import Plan


def max_length(plan: Plan) -> tuple[int, str] | None:
    """The tokens of the longest rows that fit, if all rows grow equally, and the phase that sets the limit; None if the
    device's memory, or the memory of a token, is not known.

    The memory of a slice was measured at two lengths and grows linearly; that of sampling grows in proportion to the
    length.
    """
    c, m, memory = plan.counts, plan.measured, plan.device_memory
    if c is None or m is None or memory is None or not m.train_token:
        return None
    kept = m.trajectory * c.samples / c.row_tokens
    grows = {"train": m.train_token + kept, "sample": m.sample / c.row_tokens + kept}
    found = {p.name: c.row_tokens + int((memory - p.total) / grows[p.name]) for p in plan.phases if p.name in grows}
    phase = min(found, key=lambda name: found[name])
    return max(0, found[phase]), phase
