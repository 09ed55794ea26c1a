"""The memory of a device, by role (weights, optimizer, activations, ...) and by phase of the step, in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import nn

from mmrl.algorithms.objective import Objective, prepared_by
from mmrl.algorithms.objective import copies_of as kept_by
from mmrl.config.schema import Recipe
from mmrl.core.sizes import size as amount
from mmrl.models.description import Beside, Component, Description
from mmrl.models.policy import snapshot_name
from mmrl.models.quantized import quantized_layers
from mmrl.models.sharded import blocks
from mmrl.planner.device_roles import judges_beside_sampling
from mmrl.planner.fake_tensors import nbytes
from mmrl.planner.memory import kept_copies
from mmrl.planner.plan_data import PHASES, PhaseMemory, Plan, Role


@dataclass(frozen=True)
class Size:
    """Bytes that one device keeps; of trained weights its shard. In addition ``gathered`` when it computes without the
    other ranks, and ``gathered_blocks`` in a training slice. ``whole``: what is then sharded. ``as_loaded``: before it
    is quantised."""

    parameters: int
    trained_parameters: int
    total: int
    trained: int
    dtypes: str
    gathered: int = 0
    gathered_blocks: int = 0
    whole: int = 0
    as_loaded: int = 0


def sizes_of(
    description: Description, shards: int | Fraction, *, by_block: bool, gathered: str = "float32"
) -> dict[int, Size]:
    """The size of each component, by ``id``. Trained weights are split into ``shards``, and gathered block by block for
    training with ``by_block``; in the dtype ``gathered`` those that are float32."""

    sizes = {}
    for component in description.components:
        parameters = list(component.module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in frozen or trained})
        packed = quantized_layers(component.module)
        total = nbytes([*parameters, *component.module.buffers()])
        plain = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for layer in packed)
        sizes[id(component)] = Size(
            sum(p.numel() for p in parameters) + sum(layer.in_features * layer.out_features for layer in packed),
            sum(p.numel() for p in trained),
            total,
            nbytes(trained),
            ", ".join([*dtypes, *sorted({layer.kind for layer in packed})]),
            as_loaded=total + plain - nbytes(b for layer in packed for b in layer.buffers()) if packed else 0,
        )
        if trained and shards > 1:
            whole, dtype = sizes[id(component)], getattr(torch, gathered)
            sizes[id(component)] = _in_shards(component.module, whole, shards, by_block, dtype)
    return sizes


def _in_shards(module: nn.Module, whole: Size, shards: int | Fraction, by_block: bool, gathered: torch.dtype) -> Size:
    """By block: in a slice two blocks are on the device at once, one that computes and one that is being gathered, with
    their full gradients until these are reduced; weights outside blocks are there all the time."""

    groups = [list(block.parameters()) for block in blocks(module)]
    inside = {id(p) for group in groups for p in group}
    groups.append([p for p in module.parameters() if id(p) not in inside])
    saved = [sum(p.nbytes - p.numel() * min(p.element_size(), gathered.itemsize) for p in group) for group in groups]
    moving = [
        nbytes(group) - less + nbytes(p for p in group if p.requires_grad)
        for group, less in zip(groups, saved, strict=True)
    ]
    return replace(
        whole,
        total=-(-whole.total // shards),
        trained=-(-whole.trained // shards),
        gathered=whole.total - sum(saved),
        whole=whole.total,
        gathered_blocks=by_block * (moving[-1] + 2 * max(moving[:-1], default=0)),
    )


def offloads(made: Plan) -> bool:
    """Whether idle models leave the device."""
    return made.recipe.model.offload and made.device != "cpu"


def keeps_optimizer(made: Plan) -> bool:
    """Whether the optimizer's state is on the device outside of its step."""
    return made.device == "cpu" or not made.recipe.performance.offload_optimizer


def keeps_reference(made: Plan) -> bool:
    """Whether the reference, if it is a copy, is on the device outside of training."""
    return made.device == "cpu" or not made.recipe.performance.offload_reference


def copies_of(recipe: Recipe, objective: Objective) -> list[str]:
    """Copies of the trained weights that the run keeps; LoRA's reference is the base model with the adapter off, unless
    training started from a saved adapter."""
    base = recipe.model.lora is not None and not recipe.model.continues_adapter
    kept = [name for name in kept_copies(recipe, objective) if name != "reference" or not base]
    kept += [snapshot_name(name, n + 1) for name in kept_by(objective) for n in range(recipe.placement.staleness or 0)]
    return [*kept, *(["ema"] if recipe.optim.ema_decay else [])]


def on_host(made: Plan, description: Description, sizes: dict[int, Size], objective: Objective) -> int:
    """Bytes of the optimizer's state and of the reference in the host's memory, for each device."""
    copied = sum(sizes[id(c)].trained for c in description.components if c.role == "policy")
    away = 0 if keeps_reference(made) else copied * ("reference" in copies_of(made.recipe, objective))
    assert made.measured is not None
    return away + (0 if keeps_optimizer(made) else made.measured.adam)


def roles_of(
    made: Plan, description: Description, sizes: dict[int, Size], objective: Objective, features: int
) -> Iterator[Role]:
    """The lines of the roles' table; ``features``: bytes of the prompts' features that are kept."""

    counts, measured = made.known
    for component in description.components:
        size = sizes[id(component)]
        always = len(component.needed) == len(PHASES) or not offloads(made)
        where = " and ".join(phase for phase in PHASES if phase in component.needed)
        where = "always" if always else f"{where}, else in host memory"
        what = f"{component.name}, {size.dtypes}"
        frozen = size.parameters - size.trained_parameters
        if size.trained and frozen:
            rests = "one of two, else in host memory" if component.resting and offloads(made) else where
            yield Role(f"{component.role}, frozen", what, frozen, size.total - size.trained, rests)
        elif not size.trained:
            yield Role(component.role, what, size.parameters, size.total, where)
        if size.trained:
            yield from _trained_roles(made, component, size, where, objective)
    trained = sum(size.trained_parameters for size in sizes.values())
    where = "always" if keeps_optimizer(made) else "optimizer, else in host memory"
    dtype = "8 bits with scales" if made.recipe.performance.optimizer == "adamw_8bit" else "float32"
    yield Role("optimizer", f"Adam's two moments, {dtype}", trained * 2, measured.adam, where)
    together = judges_beside_sampling(made.recipe)
    for one in description.beside:
        where = f"{'encode, ' * together}sample and decode, else {'in host memory' if one.kept else 'freed'}"
        yield Role(one.role, one.what, 0, _held(made, one), where if made.recipe.placement.sleep else "always")
    judging = "sample and decode" if together else "judge"
    asleep = "freed" if made.device == "cpu" else "in host memory"
    for asked in made.asked:
        where = f"{judging}, else {asleep}" if made.recipe.placement.sleep and asked.sleeps else "always"
        yield Role(f"reward {asked.label}", asked.what, asked.parameters, asked.bytes, where)
    if made.recipe.placement.lend:
        size = sum(sizes[id(c)].trained for c in description.components if c.role == "policy")
        yield Role(
            "borrowed weights", "of the version that samples, while a device is lent", 0, size, "sample and decode"
        )
    yield Role("prompt features", f"{amount(measured.features)} a prompt", 0, features, "always")
    if measured.trajectory:
        total = measured.trajectory * counts.samples
        yield Role("trajectories", f"{amount(measured.trajectory)} a sample, float32", 0, total, "sample to optimizer")


def _trained_roles(made: Plan, component: Component, size: Size, where: str, objective: Objective) -> Iterator[Role]:
    """The trained weights of a component, their gradients, and the policy's copies."""
    lora, policy = made.recipe.model.lora, component.role == "policy"
    kind = f"LoRA of rank {lora.rank}" if lora and policy else component.name
    yield Role(f"{component.role}, trained", f"{kind}, float32", size.trained_parameters, size.trained, where)
    of = "" if policy else f", {component.role}"
    yield Role(f"gradients{of}", "float32", size.trained_parameters, size.trained, "train")
    if policy:
        for name in copies_of(made.recipe, objective):
            stays = name != "reference" or keeps_reference(made)
            where = "always" if stays else "train, else in host memory"
            yield Role(f"copy: {name}", "float32", size.trained_parameters, size.trained, where)
        if lora and lora.path is None and any("reference" in name for name in objective.needs | prepared_by(objective)):
            yield Role("reference", "the policy with its adapter switched off", 0, 0, "train")


def _held(made: Plan, one: Beside) -> int:
    return one.bytes + int(one.share * (made.device_memory or 0))


def load_of(made: Plan, description: Description, sizes: dict[int, Size]) -> PhaseMemory:
    """What a device holds while a run is loaded.

    Every rank puts the whole model on its device, in the dtypes of training, before it keeps only its part; or it reads
    only some rows of it (``Plan.by_rows``). With Megatron-Core these are gathered tensor by tensor into its part. Judge
    models and the engine beside the trainer are loaded before, unless they sleep.
    """
    recipe, n, asleep = made.recipe, made.recipe.devices_per_controller, made.recipe.placement.sleep
    megatron, ranks = recipe.train.backend == "megatron", recipe.controllers * recipe.placement.training(n)
    weights: dict[str, int] = {}
    for component in description.components:
        if not offloads(made) or "train" in component.needed:
            size = sizes[id(component)]
            # the host quantises what it has read, before anything is on a device
            before = size.as_loaded if made.device == "cpu" else 0
            whole = size.whole or before or size.total
            once = whole if before or not made.by_rows else -(-whole // ranks) if megatron else size.total
            once -= component.resting.freed if component.resting and offloads(made) else 0
            weights[component.role] = weights.get(component.role, 0) + once
    parts = {
        **weights,
        "this device's part of the model": sum(s.total for s in sizes.values()) if megatron else 0,
        "a tensor being gathered": _largest(description) if megatron and made.by_rows else 0,
        **{one.role: 0 if asleep else _held(made, one) for one in description.beside},
        "rewards' models": sum(one.bytes for one in made.asked if one.trained_on) if n == 1 and not asleep else 0,
    }
    return PhaseMemory("load", {name: size for name, size in parts.items() if size})


def _largest(description: Description) -> int:
    """The bytes of the largest trained tensor."""
    return max((p.nbytes for c in description.components for p in c.module.parameters() if p.requires_grad), default=0)


def phases_of(
    made: Plan,
    description: Description,
    sizes: dict[int, Size],
    objective: Objective,
    features: int,
    inputs: frozenset[str],
    *,
    pathwise: bool,
) -> Iterator[PhaseMemory]:
    """What each phase of the step holds. With several devices ``judge`` is a separate phase if judges are awake only in
    it.

    ``inputs``: what rewards read of a sample; ``pathwise``: the update samples.
    """
    counts, measured = made.known
    copied = sum(sizes[id(c)].trained for c in description.components if c.role == "policy")
    sleepers = [one.bytes for one in made.asked if one.sleeps] if made.recipe.placement.sleep else []
    sleeping, together = sum(sleepers), judges_beside_sampling(made.recipe)
    engine = {one.role: _held(made, one) for one in description.beside}
    copies = copies_of(made.recipe, objective)
    visiting = {"train": copied * ("reference" in copies)} if not keeps_reference(made) else {}
    always = {
        "copies of the trained weights": copied * len(copies) - sum(visiting.values()),
        **({} if made.recipe.placement.sleep else engine),
        "rewards' models": sum(one.bytes for one in made.asked) - sleeping,
        "prompt features": features,
    }
    lent = {"borrowed weights": copied} if made.recipe.placement.lend else {}
    awake: dict[str, dict[str, int]] = dict.fromkeys(("sample", "decode"), engine | lent)
    if together:
        judges = {"rewards' models": always["rewards' models"] + sleeping}
        awake = {"encode": engine} | dict.fromkeys(awake, engine | judges)
    judging = always["rewards' models"] + (max(sleepers, default=0) if made.recipe.placement.one_judge else sleeping)
    own = _own_of_phases(made, sizes, inputs, judging)
    for phase in ("encode", "sample", "decode", "judge"):
        own[phase] |= _gathered_to_sample(made, description, sizes)
    for phase in (*PHASES[:3], "judge", *PHASES[3:]):
        if phase in ("sample", "decode", "judge") and not counts.micro_batches:
            continue
        if phase == "judge" and (not sleeping or together):
            continue
        inside = {phase, "sample", "decode"} if pathwise else {phase}  # the modules that sample stay during its update
        if phase == "judge":
            inside = {"optimizer"}  # on the device in every phase
        parts = {
            **_weights(made, description, sizes, inside),
            **({"optimizer state": measured.adam} if phase == "optimizer" or keeps_optimizer(made) else {}),
            **always,
            **awake.get(phase, {}),
            **own[phase],
        }
        parts["copies of the trained weights"] += visiting.get(phase, 0)
        yield PhaseMemory(phase, {name: size for name, size in parts.items() if size})


def _weights(made: Plan, description: Description, sizes: dict[int, Size], inside: Collection[str]) -> dict[str, int]:
    """Bytes of the modules that are on the device in all phases of ``inside``, by their role."""
    weights: dict[str, int] = {}
    for component in description.components:
        if not offloads(made) or component.needed & set(inside):
            away = component.resting if offloads(made) else None
            freed = away.freed if away and away.phases >= set(inside) else 0
            weights[component.role] = weights.get(component.role, 0) + sizes[id(component)].total - freed
    return weights


def _gathered_to_sample(made: Plan, description: Description, sizes: dict[int, Size]) -> dict[str, int]:
    """The bytes gathered of weights in shards: all of them where the device itself samples; one tensor at a time where
    an engine gets them, in a placement in which every device trains."""
    whole, recipe = sum(size.gathered for size in sizes.values()), made.recipe
    if whole and not recipe.rollout.in_process and not recipe.placement.apart:
        return {"a tensor being gathered": _largest(description)}
    return {"weights gathered for the phase": whole}


def _own_of_phases(
    made: Plan, sizes: dict[int, Size], inputs: frozenset[str], judges: int
) -> dict[str, dict[str, int]]:
    """What each phase holds in addition to the tensors of all phases; ``judges``: bytes of the judge models."""
    counts, measured = made.known
    trained = sum(size.trained for size in sizes.values())
    shown = max(counts.samples + counts.predicted, counts.begun)
    pictures = measured.picture * shown if "tensor" in inputs else 0
    if inputs & {"image", "video"} and made.device == "cpu":
        pictures += measured.picture * shown // 4  # 8-bit copies, if the host is the device
    trajectories = {"trajectories": measured.trajectory * counts.samples}
    # Latents, their velocity and the prediction. A trajectory has as many tensors if it records steps, else one.
    begun = counts.begun * measured.trajectory * (3 if made.recipe.algorithm.kind == "forward_process" else 1)
    own: dict[str, dict[str, int]] = {
        "encode": {"working memory": measured.encode},
        "sample": {
            **trajectories,
            "begun samples (midway)": begun,
            "pictures for the rewards": pictures,
            "working memory": measured.sample,
        },
        "decode": {**trajectories, "pictures for the rewards": pictures, "working memory": measured.decode},
        "judge": {
            **trajectories,
            "pictures for the rewards": pictures,
            "rewards' models": judges,
        },
        "train": {**trajectories, "gradients": trained, "working memory": measured.train},
        "optimizer": {**trajectories, "gradients": trained, "working memory": measured.optimizer},
    }
    blocks_gathered = sum(size.gathered_blocks for size in sizes.values())
    own["train"]["blocks being gathered, and their gradients"] = blocks_gathered
    if made.recipe.controllers * made.recipe.devices_per_controller > 1 and made.recipe.train.backend == "replicated":
        own["optimizer"]["gradients being summed"] = trained
    return own
