"""Teachers that are LoRAs of the student's base: their weights as a copy of the student's own adapter.

Such a copy lies as the reference does where that is one (``mmrl.models.policy``): a teacher costs the megabytes of an
adapter, and its forward is the student's with other numbers in the same layers. A smaller rank is filled with zeros and
the scale of one adapter is carried into the other, so that the two compute the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmrl.algorithms.policy_gradient import divergence
from mmrl.config.adapters import CONFIG, SavedAdapter, read_adapter
from mmrl.config.schema import Recipe
from mmrl.config.teacher import Teacher
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Slot
from mmrl.data.mixture import source_of
from mmrl.models.lora import PREFIX, lora_layers, read_weights
from mmrl.models.text.base_model import peft_model

_OWN = ".default.weight"
"""How the names of the student's adapter end, where a file has ``.weight``."""


class Lesson(NamedTuple):
    """What one teacher says: of the rows ``taught``, ``times`` its ``teacher.weight``."""

    teacher: Teacher
    copy: str
    """The name of the policy's copy that it is, if it is an adapter."""
    taught: list[int]


def lessons(recipe: Recipe, slots: Sequence[Slot]) -> Iterator[Lesson]:
    """Each teacher that teaches some of these rows, and which."""
    labels = recipe.data.labels
    for n, teacher in enumerate(recipe.teacher):
        of = teacher.prompts
        index = [i for i, slot in enumerate(slots) if of is None or source_of(slot.prompt, labels) == of]
        if index:
            yield Lesson(teacher, copy_name(n), index)


def column_name(label: str) -> str:
    """What a batch calls the log-probs ``[B, T]`` of a teacher that is the reward ``label``."""
    return f"teacher/{label}"


def with_rewards(
    recipe: Recipe, slots: Sequence[Slot], new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """``new`` with what teachers that are rewards add to ``teacher_kl`` and ``teacher_loss`` ``[B, T]``: the estimate
    of ``divergence: sampled`` from the log-probs in ``old`` (``column_name``), where these are not NaN."""
    out, own = dict(new), new["log_probs"]
    for name in ("teacher_kl", "teacher_loss"):
        out.setdefault(name, torch.zeros_like(own))
    for teacher, _, index in lessons(recipe, slots):
        if teacher.reward is not None:
            said = old[column_name(teacher.reward)]
            known = ~said.isnan() & (old["mask"] > 0)
            known &= torch.tensor([[n in index] for n in range(len(slots))], device=known.device)
            kl = divergence(own, said.nan_to_num(), known, "k1+")
            out["teacher_kl"], out["teacher_loss"] = out["teacher_kl"] + kl, out["teacher_loss"] + teacher.weight * kl
    return out


def copy_name(n: int) -> str:
    """What the policy's copy is called that is teacher ``n``."""
    return f"teacher{n}"


def copies_of_adapters(recipe: Recipe, policy: nn.Module) -> dict[str, dict[str, Tensor]]:
    """For each teacher that is an adapter its weights, by the name of its copy and those of the trained weights of
    ``policy``. On the meta device as well. Raises ``UserError`` where one does not fit, with the edit."""
    found: dict[str, dict[str, Tensor]] = {}
    for n, teacher in enumerate(recipe.teacher):
        if teacher.model and not teacher.is_adapter and recipe.makes != "text":
            raise UserError(
                f"teacher[{n}].model: {teacher.model} has no {CONFIG}, and only a LoRA of the student's base teaches a "
                "model that makes pictures; name the folder that mmrl export --what lora wrote"
            )
        if teacher.model and teacher.is_adapter:
            try:
                saved = read_adapter(teacher.model)
                found[copy_name(n)] = _fitted(policy, saved)
            except ValueError as error:
                why = str(error).removeprefix("path: ").replace("remove lora.path, and a new adapter is trained", "")
                raise UserError(f"teacher[{n}].model: {why}") from error
    return found


def _fitted(policy: nn.Module, saved: SavedAdapter) -> dict[str, Tensor]:
    """The saved adapter in the shapes and with the scale of the student's. Raises ``ValueError``."""
    assert saved.settings is not None
    if saved.settings.alpha_pattern:
        raise ValueError(
            f"{saved.weights.parent} scales its modules in several ways (alpha_pattern); export it with one alpha"
        )
    state = read_weights(policy, saved)[1]
    given = {name.removesuffix(".weight") + _OWN: tensor for name, tensor in state.items()}
    own = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    scales = {f"{PREFIX}{name}": layer.scaling["default"] for name, layer in lora_layers(peft_model(policy))}
    if lacking := sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in given.keys() - own.keys()}):
        raise ValueError(
            f"it adapts {len(lacking)} modules that the student does not, such as {lacking[0]}; add "
            f"{lacking[0].rpartition('.')[2]} to model.lora.targets"
        )
    most = max(tensor.shape[0] for name, tensor in given.items() if ".lora_A" in name)
    out = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in own.items()}
    for name, tensor in given.items():
        room, rank = out[name], 0 if ".lora_A" in name else 1
        if tensor.shape[rank] > room.shape[rank]:
            raise ValueError(f"its rank is {most} and the student's {room.shape[rank]}; set model.lora.rank to {most}")
        if tensor.shape[1 - rank] != room.shape[1 - rank] or tensor.ndim != room.ndim:
            raise ValueError(f"{name} has another shape than the student's; name a LoRA of model.path")
        if room.is_meta:
            continue
        scale = 1.0 if rank == 0 else _scale(saved, tensor.shape[1]) / scales[name.partition(".lora_")[0]]
        room.narrow(rank, 0, tensor.shape[rank]).copy_(tensor.float() * scale)
    return out


def _scale(saved: SavedAdapter, rank: int) -> float:
    """What the output of a layer's adapter of this ``rank`` is multiplied by, as peft has it."""
    assert saved.settings is not None
    return saved.settings.lora_alpha / (math.sqrt(rank) if saved.settings.use_rslora else rank)
