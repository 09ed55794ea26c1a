"""Check whether a run can continue with a recipe: which changes ``--resume`` accepts."""

from __future__ import annotations

import json
import sys
from typing import Any

from mmrl.config.loader import LoadedRecipe
from mmrl.config.older_keys import renamed
from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.judge.usage import without_budgets
from mmrl.report.rundir import RunDir
from mmrl.secrets import masked
from mmrl.training.divergence import CHANGEABLE, diverged

_LAYOUT = (
    *("backend", "tensor_parallel", "sequence_parallel", "context_parallel", "pipeline_parallel", "pipeline_chunks"),
    *("expert_parallel", "distributed_optimizer", "steps_per_forward", "balance"),
)
"""Of ``train``, how weights and rows lie on devices, and how many go through a model at once."""
_MEMORY = (
    *("train.micro_batch_size", "train.micro_batch_tokens", "sampling.batch_size"),
    *("model.offload", "model.gradient_checkpointing"),
)
"""What a run that has run out of memory goes on with otherwise: the same work, in other parts."""
_BEFORE = {"algorithm.guidance": "sampling", "algorithm.last_level": False, "algorithm.t_min": 0.0}
"""What versions did that did not have these keys, where it is not today's default."""


def same_run(directory: RunDir, loaded: LoadedRecipe) -> None:
    """Refuse to go on with another recipe than the run's, but for how long it runs, where, and what it shows.

    A key that the run's version of mmrl did not have has the value that this version worked with, and is named on the
    terminal. Raises ``UserError`` naming the keys that differ.
    """
    free = {"train.steps", "train.max_cpu_seconds", "eval", "checkpoint", "features", "log", "threads", "architecture"}
    free |= {"controllers", "devices_per_controller", "placement", "ray", "runtime", "scoring", "profile"}
    free |= {"performance"}
    free |= {f"train.{key}" for key in _LAYOUT} | set(_MEMORY)
    free |= set(CHANGEABLE) if diverged(directory) else set()
    if loaded.recipe.optim.schedule != "constant":
        free -= {"train.steps", "train.max_cpu_seconds"}  # the learning rate of every step depends on them
    stored = renamed(json.loads(directory.resolved.read_text()))
    before, now = (flatten(masked(without_budgets(recipe))) for recipe in (stored, loaded.resolved()))
    filled = flatten(masked(without_budgets(Recipe.model_validate(stored).model_dump(mode="json")))) | _BEFORE
    new = {key: filled.get(key) for key in sorted(now.keys() - before.keys()) if not {key, key.split(".")[0]} & free}
    before |= new
    changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    changed = [k for k in changed if k == "placement.staleness" or not {k, k.split(".")[0]} & free]
    if changed:
        began = "".join(f"; it began with {k}={json.dumps(new[k])}" for k in changed if k in new)
        raise UserError(
            f"--resume: {', '.join(changed)} differ from {directory.resolved}{began}. Resume with the "
            "same recipe and overrides, or start a new run with --out"
        )
    if told := [f"{key}={json.dumps(value)}" for key, value in new.items() if value is not None]:
        print(f"the run began before there was {', '.join(told)}: it goes on so", file=sys.stderr)


def as_it_worked(stored: dict[str, Any]) -> dict[str, Any]:
    """A resolved recipe of a run with what its version of mmrl did for the keys that it did not have, where that is not
    today's default."""
    known, given = (flatten(tree) for tree in (Recipe.model_validate(stored).model_dump(mode="json"), stored))
    filled = {name: dict(section) if isinstance(section, dict) else section for name, section in stored.items()}
    for key, value in _BEFORE.items():
        section, _, name = key.partition(".")
        if key in known and key not in given:
            filled[section][name] = value
    return filled


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flatten(sub, f"{prefix}.{key}" if prefix else key).items()}
