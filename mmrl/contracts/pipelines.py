"""What a diffusion family owes the training loop: ``mmrl.pipelines.diffusion.contract``, on a small checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import mmrl
from mmrl._load import folders, names
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.contracts.running import CannotRun, Check
from mmrl.errors import UserError

contract = mmrl.load("pipelines", "diffusion/contract")
SIZE = 32
"""Pixels a side, the least that most small checkpoints can make."""
SHIPPED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "diffusion/sd3": ("shapes-sd3", {"max_sequence_length": 12}),
    "diffusion/wan": ("motions-wan", {"frames": 5, "max_sequence_length": 16}),
}
"""Families whose small models mmrl ships, and how these sample."""


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
    return Recipe.model_validate(load_recipe([name], [f"sampling.{k}={v}" for k, v in options.items()]).resolved())


def opened(name: str, options: Mapping[str, object], model: str | None) -> Recipe:
    """A small recipe of the family ``name`` with the checkpoint ``model``; ``options`` are of its ``sampling``.

    Raises ``UserError`` where there is no checkpoint.
    """
    if model is None:
        raise UserError(
            f"checking {name} takes a small checkpoint of its family; give its folder with --model (random weights "
            "will do: docs/families.md), or name a recipe in place of the family"
        )
    return Recipe.model_validate(
        {
            "name": "check",
            "pipeline": name,
            "model": {"path": model, "lora": {"rank": 4, "alpha": 8}},
            "data": {"name": "shapes"},
            "sampling": {"steps": 3, "height": SIZE, "width": SIZE, **options},
            "rewards": [{"name": "jpeg:compressibility"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )


def checks(recipe: Recipe) -> Iterator[Check]:
    """All checks; that of the exported LoRA where the recipe trains one."""
    for check in contract.CHECKS:
        lacks = recipe.model.lora is None and check is contract.exported_lora_draws_the_same
        yield Check(check.__name__.replace("_", " "), _without_lora if lacks else _run(check, recipe))


def _run(check: Callable[[Recipe], str], recipe: Recipe) -> Callable[[], str]:
    return partial(check, recipe)


def _without_lora() -> str:
    raise CannotRun("the recipe trains no LoRA (model.lora)")
