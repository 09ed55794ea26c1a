"""``mmrl plan``: what a recipe would hold and do, resolved before a weight is loaded. ``mmrl train`` begins with it.

Everything of a controller is in its device's memory at some phase of the step; of several, the one with most to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config.loader import LoadedRecipe
from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.placement.arithmetic import Counts, count
from mmrl.placement.room import room
from mmrl.placement.sharing import SAMPLED, idle, inside, refusals, sleeps

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from mmrl.algorithms.objective import Objective
    from mmrl.placement.description import Beside, Component, Description
    from mmrl.placement.judges import Asked
    from mmrl.placement.memory import Measured
    from mmrl.trajectory import Prompt


@dataclass(frozen=True)
class Role:
    """A line of the roles' table. ``where``: when it is on the device; ``bytes`` while it is."""

    name: str
    what: str
    parameters: int
    bytes: int
    where: str


@dataclass(frozen=True)
class PhaseMemory:
    """What is on the device during a phase of the step, by part, at the phase's highest moment."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass
class Plan:
    """A resolved recipe. Bytes throughout; ``phases`` and ``roles`` are empty where a problem prevents them.

    ``problems`` are why it cannot run, each with the edit that mends it; ``device_memory`` is None where the device is
    not on this machine.
    """

    recipe: Recipe
    device: str
    device_memory: int | None
    source: str = ""
    counts: Counts | None = None
    measured: Measured | None = None
    roles: list[Role] = field(default_factory=list)
    phases: list[PhaseMemory] = field(default_factory=list)
    host: int = 0
    asked: list[Asked] = field(default_factory=list)
    """The rewards that compute on a device."""
    inside: dict[str, int] = field(default_factory=dict)
    """Bytes that go between a controller and its further devices in a step, the most, by kind."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def peak(self) -> PhaseMemory | None:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total, default=None)

    def render(self, console: Console, short: bool = False) -> None:
        """Print it; ``short`` is three lines, without the problems (for a caller who raises them)."""
        from mmrl.placement.tables import render, render_short

        (render_short if short else render)(self, console)


def plan(loaded: LoadedRecipe, device_memory: int | None = None) -> Plan:
    """Resolve a recipe on the meta device. Loads no weight; what is wrong becomes ``problems``, all of it at once.

    ``device_memory`` in bytes stands for the device's own, to plan for a machine that is not this one.
    """
    import mmrl
    from mmrl.run import load_objective

    recipe = loaded.recipe
    device, memory = _device(recipe.device)
    made = Plan(recipe, device, device_memory or memory)
    objective = load_objective(recipe)
    inputs = _rewards(loaded, objective, made)
    name = loaded.resolve_drop_in(recipe.pipeline)
    try:
        module = mmrl.load("pipelines", name)
        if not hasattr(module, "describe"):
            made.notes.append(f"{name} has no describe(recipe, path, architecture), so its memory is not known")
            return made
        prompts = _prompts(loaded, made)
        architecture = Path(loaded.resolve(recipe.architecture)) if recipe.architecture else None
        description = module.describe(recipe, loaded.resolve(recipe.model.path), architecture)
    except UserError as error:
        made.problems.append(str(error))
        return made
    _account(made, description, objective, prompts, inputs)
    made.problems += room(made)
    made.notes += idle(made)
    return made


def _device(name: str) -> tuple[str, int | None]:
    """The device as ``mmrl.run`` will choose it, and its memory where it is on this machine."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and torch.cuda.is_available():
        return name, torch.cuda.get_device_properties(torch.device(name)).total_memory
    return name, _main_memory() if name == "cpu" else None


def _main_memory() -> int:
    import psutil

    total = psutil.virtual_memory().total
    try:  # of the container, where it has less than its machine
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _prompts(loaded: LoadedRecipe, made: Plan) -> list[Sequence[Prompt]]:
    """The prompts of both splits, as lazy as the data set makes them; none where it cannot be read."""
    from mmrl.run import load_prompts

    try:
        return [load_prompts(loaded.recipe, loaded.root, split) for split in ("train", "heldout")]
    except UserError as error:
        made.problems.append(str(error))
        return []


def _looked_at(prompts: Sequence[Prompt]) -> list[Prompt]:
    """All prompts, or where they are read as they are asked for, some in equal distances: pictures cost time."""
    if isinstance(prompts, list):
        return prompts
    most = 100 if prompts[0].media else 4000
    return [prompts[n * len(prompts) // min(most, len(prompts))] for n in range(min(most, len(prompts)))]


def _rewards(loaded: LoadedRecipe, objective: Objective, made: Plan) -> frozenset[str]:
    """What the rewards read of a sample."""
    import inspect

    from mmrl.placement.judges import on_devices
    from mmrl.rewards.scoring import check

    try:
        found = check(loaded.recipe.rewards, loaded.root)
        evaluated = check(loaded.recipe.eval.rewards, loaded.root)
    except UserError as error:
        made.problems.extend(str(error).splitlines())
        return frozenset()
    made.asked, problems, notes = on_devices(loaded, found, evaluated)
    made.notes += notes
    made.problems += problems or refusals(made, objective)
    if objective.kind == "pathwise":
        made.problems += [
            f"rewards: {loaded.recipe.algorithm.type} follows the reward's gradient, and {one.name} declares none "
            "(@mmrl.reward(differentiable=True)); use colour:target, or algorithm.type=flow_grpo"
            for one in found
            if not inspect.isclass(one.target) and not one.declaration.differentiable
        ]
    return frozenset(name for one in found for name in one.declaration.inputs)


def _account(
    made: Plan,
    description: Description,
    objective: Objective,
    prompts: list[Sequence[Prompt]],
    inputs: frozenset[str],
) -> None:
    """Fill in counts, measured sizes, roles and phases."""
    from mmrl.placement.memory import measure
    from mmrl.trajectory import Prompt

    recipe, made.source = made.recipe, description.source
    pathwise = objective.kind == "pathwise"
    entries = objective.entries or description.pipeline.entries(objective.kind)
    store = description.pipeline.features
    shards = recipe.controllers if recipe.train.backend == "fsdp" else 1
    sizes = _sizes(description, shards)
    prompt, row_tokens = Prompt("plan", "plan"), 0
    try:
        if description.longest is not None:
            if not prompts:
                return
            prompt, row_tokens = description.longest([p for split in prompts for p in _looked_at(split)])
        made.counts = counts = count(recipe, entries, objective.kind in SAMPLED, row_tokens)
        measured = measure(description, recipe, objective, counts, made.device.startswith("cuda"), prompt)
    except UserError as error:
        made.problems.append(str(error))
        return
    except Exception as error:  # a pipeline that fake tensors cannot run may still train: an estimate must not stop it
        made.notes.append(f"memory is not known: the step cannot be run without data ({type(error).__name__}: {error})")
        return
    made.measured = measured = replace(
        measured, adam=-(-measured.adam // shards), optimizer=-(-measured.optimizer // shards)
    )
    different = _different(prompts, description)
    in_use = min(counts.prompts, max(counts.batch, counts.slice_rows)) + 1  # the others may lie on disk
    kept = min(different or store.budget_bytes, max(in_use, store.budget_bytes // max(1, measured.features)))
    features = measured.features * kept
    made.roles = list(_roles(made, description, sizes, objective, features))
    made.phases = list(_phases(made, description, sizes, objective, features, inputs, pathwise))
    if _offloads(made):
        moved = (c for c in description.components if len(c.needed) < len(PHASES))
        made.host = sum(sizes[id(c)].total for c in moved)
    if sleeps(recipe) and made.device != "cpu":
        made.host += sum(one.bytes for one in made.asked if one.trained_on)
    shown = measured.picture if "tensor" in inputs else measured.picture // 4 if "image" in inputs else 0
    made.inside = inside(made, objective, shown)


def _different(prompts: list[Sequence[Prompt]], description: Description) -> int:
    """How many different prompts the run may encode, at most; 0 where that is not known."""
    if description.longest is not None:
        return sum(map(len, prompts))
    texts = {prompt.text for split in prompts for prompt in split}
    return len(texts) + 1 if texts else 0  # the empty prompt of guidance


PHASES = ("encode", "sample", "decode", "train", "optimizer")


@dataclass(frozen=True)
class Size:
    """Bytes are what one controller keeps: of what trains, its shard; ``gathered`` and ``gathered_blocks`` come on top
    where it computes without the others, and in a training slice."""

    parameters: int
    trained_parameters: int
    total: int
    trained: int
    dtypes: str
    gathered: int = 0
    gathered_blocks: int = 0


def _sizes(description: Description, shards: int) -> dict[int, Size]:
    """Of each component, by ``id``; what trains lies in so many ``shards``."""
    from mmrl.placement.memory import nbytes

    sizes = {}
    for component in description.components:
        parameters = list(component.module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in frozen or trained})
        sizes[id(component)] = Size(
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in trained),
            nbytes([*parameters, *component.module.buffers()]),
            nbytes(trained),
            ", ".join(dtypes),
        )
        if trained and shards > 1:
            sizes[id(component)] = _in_shards(component.module, sizes[id(component)], shards)
    return sizes


def _in_shards(module: nn.Module, whole: Size, shards: int) -> Size:
    """In a slice two blocks are there at once, one computing and one on its way, with their gradients until each rank
    has its rows; what is in no block is there all the time."""
    from mmrl.engines.sharded import blocks
    from mmrl.placement.memory import nbytes

    groups = [list(block.parameters()) for block in blocks(module)]
    inside = {id(p) for group in groups for p in group}
    groups.append([p for p in module.parameters() if id(p) not in inside])
    moving = [nbytes(group) + nbytes(p for p in group if p.requires_grad) for group in groups]
    return replace(
        whole,
        total=-(-whole.total // shards),
        trained=-(-whole.trained // shards),
        gathered=whole.total,
        gathered_blocks=moving[-1] + 2 * max(moving[:-1], default=0),
    )


def _offloads(made: Plan) -> bool:
    return made.recipe.model.offload and made.device != "cpu"


def _copies(recipe: Recipe, objective: Objective) -> list[str]:
    """Copies of the trained weights that the run keeps; LoRA's reference is the base with the adapter off."""
    from mmrl.placement.memory import kept_copies

    kept = [name for name in kept_copies(objective) if name != "reference" or recipe.model.lora is None]
    return [*kept, *(["ema"] if recipe.optim.ema_decay else [])]


def _roles(
    made: Plan, description: Description, sizes: dict[int, Size], objective: Objective, features: int
) -> Iterator[Role]:
    from mmrl.placement.tables import size as amount

    measured, counts = made.measured, made.counts
    assert measured is not None
    assert counts is not None
    for component in description.components:
        size = sizes[id(component)]
        always = len(component.needed) == len(PHASES) or not _offloads(made)
        where = "always" if always else " and ".join(sorted(component.needed)) + ", else in host memory"
        what = f"{component.name}, {size.dtypes}"
        frozen = size.parameters - size.trained_parameters
        if size.trained and frozen:
            yield Role(f"{component.role}, frozen", what, frozen, size.total - size.trained, where)
        elif not size.trained:
            yield Role(component.role, what, size.parameters, size.total, where)
        if size.trained:
            yield from _trained_roles(made, component, size, where, objective)
    trained = sum(size.trained_parameters for size in sizes.values())
    yield Role("optimizer", "Adam's two moments, float32", trained * 2, measured.adam, "always")
    for one in description.beside:
        yield Role(one.role, one.what, 0, _held(made, one), "always")
    for asked in made.asked:
        where = "always"
        if sleeps(made.recipe) and asked.trained_on:
            where = f"judge, else {'freed' if made.device == 'cpu' else 'in host memory'}"
        yield Role(f"reward {asked.label}", asked.what, asked.parameters, asked.bytes, where)
    yield Role("prompt features", f"{amount(measured.features)} a prompt", 0, features, "always")
    if measured.trajectory:
        total = measured.trajectory * counts.samples
        yield Role("trajectories", f"{amount(measured.trajectory)} a sample, float32", 0, total, "sample to optimizer")


def _trained_roles(made: Plan, component: Component, size: Size, where: str, objective: Objective) -> Iterator[Role]:
    """What trains of a component, its gradients, and of the policy its copies."""
    lora, policy = made.recipe.model.lora, component.role == "policy"
    kind = f"LoRA of rank {lora.rank}" if lora and policy else component.name
    yield Role(f"{component.role}, trained", f"{kind}, float32", size.trained_parameters, size.trained, where)
    of = "" if policy else f", {component.role}"
    yield Role(f"gradients{of}", "float32", size.trained_parameters, size.trained, "train")
    if policy:
        for name in _copies(made.recipe, objective):
            yield Role(f"copy: {name}", "float32", size.trained_parameters, size.trained, "always")
        if lora and any("reference" in name for name in objective.needs | objective.prepares):
            yield Role("reference", "the policy with its adapter switched off", 0, 0, "train")


def _held(made: Plan, one: Beside) -> int:
    return one.bytes + int(one.share * (made.device_memory or 0))


def _phases(
    made: Plan,
    description: Description,
    sizes: dict[int, Size],
    objective: Objective,
    features: int,
    inputs: frozenset[str],
    pathwise: bool,
) -> Iterator[PhaseMemory]:
    measured, counts = made.measured, made.counts
    assert measured is not None
    assert counts is not None
    trained = sum(size.trained for size in sizes.values())
    copied = sum(sizes[id(c)].trained for c in description.components if c.role == "policy")
    sleeping = sum(one.bytes for one in made.asked if one.trained_on) if sleeps(made.recipe) else 0
    always = {
        "optimizer state": measured.adam,
        "copies of the trained weights": copied * len(_copies(made.recipe, objective)),
        **{one.role: _held(made, one) for one in description.beside},
        "rewards' models": sum(one.bytes for one in made.asked) - sleeping,
        "prompt features": features,
    }
    pictures = measured.picture * counts.samples if "tensor" in inputs else 0
    if "image" in inputs and made.device == "cpu":
        pictures += measured.picture * counts.samples // 4  # as bytes, where the host is the device
    trajectories = {"trajectories": measured.trajectory * counts.samples}
    own: dict[str, dict[str, int]] = {
        "encode": {"working memory": measured.encode},
        "sample": {**trajectories, "pictures for the rewards": pictures, "working memory": measured.sample},
        "decode": {**trajectories, "pictures for the rewards": pictures, "working memory": measured.decode},
        "judge": {
            **trajectories,
            "pictures for the rewards": pictures,
            "rewards' models": always["rewards' models"] + sleeping,
        },
        "train": {**trajectories, "gradients": trained, "working memory": measured.train},
        "optimizer": {**trajectories, "gradients": trained, "working memory": measured.optimizer},
    }
    gathered = {name: sum(getattr(size, name) for size in sizes.values()) for name in ("gathered", "gathered_blocks")}
    for phase in ("encode", "sample", "decode"):
        own[phase]["weights gathered for the phase"] = gathered["gathered"]
    own["train"]["blocks being gathered, and their gradients"] = gathered["gathered_blocks"]
    if made.recipe.controllers * made.recipe.devices_per_controller > 1 and made.recipe.train.backend == "replicated":
        own["optimizer"]["gradients being summed"] = trained
    for phase in (*PHASES[:3], "judge", *PHASES[3:]):
        if phase in ("sample", "decode", "judge") and not counts.micro_batches:
            continue
        if phase == "judge" and not sleeping:
            continue
        inside = {phase, "sample", "decode"} if pathwise else {phase}  # what its update samples with stays meanwhile
        if phase == "judge":
            inside = {"optimizer"}  # what is there in every phase
        weights: dict[str, int] = {}
        for component in description.components:
            if not _offloads(made) or component.needed & inside:
                weights[component.role] = weights.get(component.role, 0) + sizes[id(component)].total
        parts = {**weights, **always, **own[phase]}
        yield PhaseMemory(phase, {name: size for name, size in parts.items() if size})
