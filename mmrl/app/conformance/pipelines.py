"""What a diffusion family owes the training loop: ``mmrl.pipelines.diffusion.contract``, on a small checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from pydantic import ValidationError

import mmrl
from mmrl.app.conformance.running import CannotRun, Check
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.plugins.loading import folders, names
from mmrl.core.stored import faults

contract = mmrl.load("pipelines", "diffusion/contract")
STEPS = 4
"""A divisor of 1000, as timesteps that trail take."""
SIZE = 32
"""Pixels a side, the least that most small checkpoints can make."""
UNREAD = {"shapes-sd3": ("transformer_blocks.3.attn.add_q_proj",)}
"""Parameters of our models that nothing reads: the last block drops its text stream."""
SHIPPED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "diffusion/sd3": ("shapes-sd3", {"max_sequence_length": 12}),
    "diffusion/wan": ("motions-wan", {"frames": 5, "max_sequence_length": 16}),
}
"""Families whose small models mmrl ships, and how these sample."""


_OF_PICTURES = (
    "mmrl check has the contract of families of diffusion models alone; write mmrl check FILE.py:CLASS for a rollout "
    "engine of text, or mmrl verify RUN for a run of text"
)


def of_name(name: str, options: Mapping[str, object]) -> Recipe:
    """The recipe ``name``, or one of a family of ours whose small model mmrl ships. Raises ``UserError``."""
    if name in SHIPPED:
        folder, more = SHIPPED[name]
        models = next(
            root / "diffusion" / "models" / folder for root in folders("pipelines") if (root / "diffusion").is_dir()
        )
        return opened(name, {**more, **options}, str(models))
    if name in names("pipelines"):
        return opened(name, options, None)
    changes = [f"sampling.{key}={json.dumps(value)}" for key, value in options.items()]
    recipe = load_recipe([name], changes).recipe
    if recipe.sampling.type == "text":
        raise UserError(f"{name} samples text; {_OF_PICTURES}")
    return recipe


def opened(name: str, options: Mapping[str, object], model: str | None) -> Recipe:
    """A small recipe of the family ``name`` with the checkpoint ``model``; ``options`` are of its ``sampling``.

    Raises ``UserError`` where there is no checkpoint.
    """
    if name.startswith(("llm/", "vlm/")):
        raise UserError(f"{name} is a text pipeline; {_OF_PICTURES}")
    if model is None:
        raise UserError(
            f"checking {name} takes a small checkpoint of its family; give its folder with --model (random weights "
            "will do: docs/families.md), or name a recipe in place of the family"
        )
    settings = {
        "name": "check",
        "pipeline": name,
        "model": {"path": model, "lora": {"rank": 4, "alpha": 8}},
        "data": {"name": "shapes"},
        "sampling": {"steps": STEPS, "height": SIZE, "width": SIZE, **options},
        "rewards": [{"name": "jpeg:compressibility"}],
        "algorithm": {"type": "flow_grpo"},
        "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
    }
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"--options: a recipe cannot sample so: {faults(error)}") from None


def checks(recipe: Recipe) -> Iterator[Check]:
    """All checks; that of the exported LoRA where the recipe trains one."""
    for check in contract.CHECKS:
        lacks = recipe.model.lora is None and check is contract.exported_lora_draws_the_same
        run: Callable[[], str] = partial(check, recipe)
        if check is contract.two_steps_move_every_parameter:
            run = partial(check, recipe, UNREAD.get(Path(recipe.model.path).name, ()))
        yield Check(check.__name__.replace("_", " "), _without_lora if lacks else run)


def _without_lora() -> str:
    raise CannotRun("the recipe trains no LoRA (model.lora)")
