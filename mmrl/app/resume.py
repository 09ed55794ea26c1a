"""Check whether a run can continue with a recipe: which changes ``--resume`` accepts."""

from __future__ import annotations

import json
import shlex

from mmrl.app.divergence import CHANGEABLE, diverged
from mmrl.config.loader import LoadedRecipe
from mmrl.config.schema import Recipe
from mmrl.config.shipped_paths import moved
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, as_object
from mmrl.core.notices import note
from mmrl.core.secrets import masked
from mmrl.core.stored import blamed
from mmrl.logging.rundir import RunDir
from mmrl.rewards.judging.usage import without_limits

_LAYOUT = (
    *(
        "backend",
        "shard_size",
        "tensor_parallel",
        "sequence_parallel",
        "context_parallel",
        "pipeline_parallel",
        "pipeline_chunks",
    ),
    *("expert_parallel", "distributed_optimizer", "steps_per_forward", "balance"),
)
"""Keys of ``train`` that set how weights and rows are divided among devices."""
_MEMORY = (
    *("train.micro_batch_size", "train.micro_batch_tokens", "train.packing", "sampling.batch_size"),
    *("model.offload", "model.gradient_checkpointing"),
)
"""Keys that may change after a run has run out of memory, because the work stays the same."""
_RATES = ("train.steps", "train.max_cpu_seconds", "optim.lr", "optim.held", "optim.earlier")
"""What ``mmrl continue`` may change, too."""


def same_run(directory: RunDir, loaded: LoadedRecipe) -> None:
    """Refuse to resume with a different recipe than the run's. Its length, its devices and its logging may change, and
    where it continues its stored recipe (``mmrl continue``) its learning rate.

    A key that the run's version of mmrl did not have gets today's default, and the terminal names it. Raises
    ``UserError`` with the keys that differ.
    """
    free = {"train.steps", "train.max_cpu_seconds", "eval", "checkpoint", "features", "log", "threads", "architecture"}
    free |= {"controllers", "devices_per_controller", "placement", "ray", "env", "runtime", "scoring", "profile"}
    free |= {"performance"}
    free |= {f"train.{key}" for key in _LAYOUT} | set(_MEMORY)
    free |= set(CHANGEABLE) if diverged(directory) else set()
    if loaded.continues is not None:
        free |= set(_RATES)
    elif loaded.recipe.optim.schedule != "constant":
        free -= {"train.steps", "train.max_cpu_seconds"}  # the learning rate of every step depends on them
    with blamed(directory.resolved):
        stored = moved(directory.settings())
        filled = flatten(masked(without_limits(Recipe.model_validate(stored).model_dump(mode="json"))))
    before, now = (flatten(masked(without_limits(recipe))) for recipe in (stored, moved(loaded.resolved())))
    new = {key: filled.get(key) for key in sorted(now.keys() - before.keys()) if not {key, key.split(".")[0]} & free}
    before |= new
    changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    changed = [k for k in changed if k == "placement.staleness" or not {k, k.split(".")[0]} & free]
    if changed:
        began = "".join(f"; it started with {k}={json.dumps(new[k])}" for k in changed if k in new)
        raise UserError(_refusal(directory, loaded, changed, began))
    if kept := [f"{key}={json.dumps(value)}" for key, value in new.items() if value not in (None, [])]:
        note(f"the run is older than these settings and continues with {', '.join(kept)}")


def _refusal(directory: RunDir, loaded: LoadedRecipe, changed: list[str], began: str) -> str:
    differ = f"{', '.join(changed)} differ from {directory.resolved}{began}"
    if loaded.continues is not None:
        return (
            f"mmrl continue: {differ}, and would change what the run is. train.steps, train.max_cpu_seconds, optim.lr, "
            "eval, checkpoint, log and what says where it computes may change; for the rest start a new run: "
            "mmrl train with another --out"
        )
    again = f"mmrl continue {shlex.quote(str(directory.path))}"
    stored = as_object(directory.settings().get("optim") or {})
    if set(changed) <= set(_RATES) and stored.get("earlier") and not loaded.recipe.optim.earlier:
        return (
            f"--resume: {differ}, because the run was continued with other steps or another rate. Go on with: {again}"
        )
    if set(changed) <= set(_RATES):
        edits = " ".join(f"{key}={json.dumps(flatten(loaded.resolved()).get(key))}" for key in changed)
        how = " (and --extend or --hold)" if loaded.recipe.optim.schedule != "constant" else ""
        return f"--resume: {differ}. To go on with another length or learning rate: {again} {edits}{how}"
    return (
        f"--resume: {differ}. Resume with the same recipe and overrides, or without any: {again}; or start a new run "
        "with --out"
    )


def flatten(tree: Json, prefix: str = "") -> dict[str, Json]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flatten(sub, f"{prefix}.{key}" if prefix else key).items()}
