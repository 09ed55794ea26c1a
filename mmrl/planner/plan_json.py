"""A plan as JSON data, for scripts (``mmrl plan --json``; docs/reference/json.md has the keys)."""

from __future__ import annotations

from dataclasses import asdict, replace

from mmrl.core.json_types import JsonObject
from mmrl.planner.device_roles import rows
from mmrl.planner.plan_data import PhaseMemory, Plan


def as_json(plan: Plan) -> JsonObject:
    """The output of ``mmrl plan`` as data: sizes in bytes, times in seconds, and null for unknown values."""
    recipe, c, peak, time = plan.recipe, plan.counts, plan.peak, plan.time
    share = peak.total / plan.device_memory if peak is not None and plan.device_memory else None
    devices = [{"device": device, "generate": generate, "train": train} for device, generate, train in rows(plan)]
    return {
        "recipe": recipe.name,
        "possible": not plan.problems,
        "device": plan.device,
        "device_bytes": plan.device_memory,
        "gpu": plan.gpu.name if plan.gpu else None,
        "gpus": plan.gpus,
        "controllers": recipe.controllers,
        "devices_per_controller": recipe.devices_per_controller,
        "dtype": recipe.model.dtype,
        "sizes_from": plan.source or None,
        "algorithm": recipe.algorithm.model_dump(mode="json"),
        "steps": recipe.train.steps,
        "step": None if c is None else asdict(c),
        "roles": [asdict(role) for role in plan.roles],
        "phases": [_phase(phase) for phase in plan.phases],
        "loading": _phase(plan.load) if plan.load else None,
        "peak": None if peak is None else {**_phase(peak), "share": share},
        "host_bytes": plan.host,
        "rewards_on_devices": [asdict(replace(one, models=())) for one in plan.asked],
        "placement": {"type": recipe.placement.type, "devices": devices},
        "between_devices_bytes": plan.inside,
        "seconds": None
        if time is None
        else {
            "step": time.step,
            "step_interval": list(time.interval),
            "run": plan.lasts,
            "phases": time.seconds,
            "calibrated": time.calibrated,
        },
        "uncalibrated": plan.uncalibrated or None,
        "notes": plan.notes,
        "problems": plan.problems,
    }


def _phase(phase: PhaseMemory) -> JsonObject:
    return {"name": phase.name, "bytes": phase.total, "parts": phase.parts}
