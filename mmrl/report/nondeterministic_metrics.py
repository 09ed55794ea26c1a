"""Patterns of values that differ between equal runs, such as times. Imports nothing of mmrl.

``*`` in a pattern stands for any text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MEASURED = {
    "metrics": {
        "time/*": "times",
        "plan/*": "what the plan expected of this machine",
        "perf/cpu_seconds": "times",
        "perf/engine_update_seconds": "times",
        "placement/*_busy": "times",
        "placement/wake": "times",
        "placement/idle": "shares of times",
        "placement/cpu": "shares of times",
        "balance/load": "shares of times",
        "balance/residual": "shares of times",
        "perf/peak_memory_mib": "memory",
    },
    "state": {
        "cpu_seconds": "times",
        "balance.workload.measured[*][1]": "times",
        "balance.workload.coefficients": "fitted to times",
    },
}
"""Of metrics and of a checkpoint's state.json: what differs between equal runs, and why."""
OF_PROCESS = {
    "features/*": "what the process held in memory",
    "sent/*": "traffic",
    "judge/*": "traffic",
    "perf/engine_*": "traffic",
    "perf/shared_steps": "placement",
    "engine/*": "what the engine reports of itself",
    "placement/*": "placement",
}
"""Of metrics: what differs also where one process repeats a step of another, as it did other things before."""


def matches(name: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def why_not_compared(name: str, tables: Mapping[str, str]) -> str | None:
    """Why the values called ``name`` say nothing, by the first pattern of ``tables`` that fits; None where they do."""
    return next((why for pattern, why in tables.items() if matches(name, pattern)), None)
