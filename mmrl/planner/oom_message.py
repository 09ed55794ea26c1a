"""Explain an out-of-memory error: what the plan expected, and the edits that help."""

from __future__ import annotations

from mmrl.config.loader import LoadedRecipe
from mmrl.core.out_of_memory import OutOfMemoryError, free
from mmrl.core.sizes import size
from mmrl.planner.fit_check import edits
from mmrl.planner.plan import plan
from mmrl.planner.plan_data import PhaseMemory


def explained(error: OutOfMemoryError, loaded: LoadedRecipe) -> str:
    """The error, with the memory that the plan expected in its phase, and the edits that need less."""
    free()
    try:
        made = plan(loaded)
    except Exception:  # of any kind: a failed explanation must not replace the error
        return str(error)
    name = {"prepare": "train"}.get(error.phase, error.phase)
    phases = {phase.name: phase for phase in (*made.phases, *([made.load] if made.load else []))}
    phase, peak = phases.get(name), made.peak
    expected = "The plan does not know the memory it needs"
    if peak is not None:
        has = f" of {made.device}'s {size(made.device_memory)}" if made.device_memory else ""
        there = f"{size(phase.total)} there and " if phase else ""
        expected = f"The plan expected {there}{size(peak.total)} at most (in {peak.name}){has}"
    listed = "; ".join(edits(made, phase or PhaseMemory(name, peak.parts if peak else {})))
    return (
        f"{error}\n{expected}; it does not count other processes on the device, workspaces of kernels and "
        f"memory lost to fragmentation. Try: {listed}"
    )
