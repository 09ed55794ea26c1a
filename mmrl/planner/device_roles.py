"""Plan how a controller's devices share a step: roles by phase, traffic, and idle devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from mmrl.algorithms.objective import Objective, prepared_by
from mmrl.config.replicas import devices_of_workers, has_replicas, in_workers, leaders, of_engine, of_judges
from mmrl.config.schema import Recipe
from mmrl.episodes.loading import draws
from mmrl.placement.adaptive import Split, starting
from mmrl.planner.counts import Counts
from mmrl.planner.plan_data import Plan

SAMPLED = ("policy_gradient", "forward_process")
"""The kinds of objective that sample before their updates."""


def split_of(plan: Plan) -> Split:
    """The split of a controller's workers at the start of a run."""
    recipe = in_workers(plan.recipe)
    return starting(
        recipe.placement, recipe.devices_per_controller, judged=any(one.trained_on for one in plan.asked)
    ).split


def servers_of(plan: Plan) -> Split:
    """The devices that sample and those that judge at the start of a run, a replica of several as one."""
    split, led = split_of(plan), leaders(plan.recipe)
    if not led:
        return split
    sampling = sum(device < split.rollout for device in led)
    return Split(sampling, len(led) - sampling)


def judges_beside_sampling(recipe: Recipe) -> bool:
    """Whether judge models stay awake while their device samples; each of several devices has one role at a time."""
    return recipe.devices_per_controller == 1


def refusals(plan: Plan, objective: Objective) -> Iterator[str]:
    """Errors, with the edit, about a placement that has nothing to place or to put to sleep."""
    kind = plan.recipe.placement.type
    judged = [one.label for one in plan.asked if one.trained_on]
    if kind == "colocate" and judged and has_replicas(plan.recipe):
        yield (
            f"placement: with colocate every device samples and then judges ({', '.join(judged)}), and an engine takes "
            f"{of_engine(plan.recipe)} devices; set placement.type to partial, whose first devices sample and whose "
            "last judge before all train, or to disaggregated"
        )
    if plan.recipe.placement.one_judge and len(judged) < 2:
        yield f"placement.one_judge: {len(judged)} of the recipe's rewards computes on devices; remove it"
    if plan.recipe.placement.sleep and plan.recipe.devices_per_controller == 1:
        yield from _all_awake(plan)
    mend = "set placement=colocate"
    if kind == "disaggregated":
        yield from _apart(plan)
    elif kind != "colocate" and objective.kind not in SAMPLED:
        yield (
            f"placement: {kind} has some devices judge while others sample, and {plan.recipe.algorithm.type} does not "
            f"sample before its updates; {mend}"
        )
    elif kind != "colocate" and not judged:
        yield (
            f"placement: {kind} has some devices judge while others sample, and no reward of this recipe runs on a "
            f"device (as a judge with a local model or @mmrl.reward(device=True) does); {mend}"
        )


def _all_awake(plan: Plan) -> Iterator[str]:
    if not plan.recipe.rollout.in_process or any(one.sleeps for one in plan.asked) or draws(plan.recipe.environment):
        return
    awake = [one.label for one in plan.asked if one.trained_on]
    if awake:
        yield (
            f"placement.sleep: {', '.join(awake)} cannot sleep: give the class sleep(device) and wake(device), like "
            "mmrl.rewards.sleeping.Sleeping, or remove placement.sleep"
        )
    else:
        yield (
            "placement.sleep: no reward of this recipe computes with a model on the device, and the policy itself "
            "samples, so nothing sleeps; remove it, or set rollout.engine"
        )


def _apart(plan: Plan) -> Iterator[str]:
    recipe, split = plan.recipe, split_of(plan)
    judged = [one.label for one in plan.asked if one.trained_on]
    fixed = recipe.placement.split == "fixed"
    if judged and not split.judge and fixed:
        yield (
            f"placement: disaggregated devices keep their role, and none of {recipe.devices_per_controller} is left "
            f"for {', '.join(judged)}; set devices_per_controller to 3 or more, or lower placement.trainers, or set "
            "placement.split to greedy"
        )
    if not judged and not fixed:
        yield (
            "placement.split: no reward of this recipe runs on a device, so there is nothing to judge beside sampling; "
            "remove it"
        )
    if judged and has_replicas(recipe) and not recipe.placement.judges:
        yield (
            f"placement.judges: {', '.join(judged)} judges on devices, and engines or judges of several devices do not "
            "divide by themselves; say how many devices judge"
        )
    if not judged and recipe.placement.judges:
        yield "placement.judges: no reward of this recipe runs on a device, so judges would idle; remove it"


def idle(plan: Plan) -> Iterator[str]:
    """Notes on devices that would idle, with the edit."""
    c, recipe, devices = plan.counts, plan.recipe, plan.recipe.devices_per_controller
    if c is None or devices == 1:
        return
    split, trainers = servers_of(plan), models_of(recipe)
    width = 1 if recipe.sampling.type == "text" else recipe.train.width
    groups = f"groups of {recipe.train.width} devices"
    if 0 < c.micro_batches < (rollout := split.rollout // width):
        edit = _fewer_rows("sampling.batch_size", c.samples, rollout)
        yield (
            f"a controller's {c.micro_batches} sampling micro-batch{'es' * (c.micro_batches > 1)} cannot keep "
            f"{rollout} {groups if width > 1 else 'devices'} busy; {edit}"
        )
    elif c.micro_batches:
        for one in plan.asked:
            judges, asked = split.judging, calls(c, one.batch_size)
            if one.trained_on and asked < judges:
                edit = _fewer_rows("sampling.batch_size", c.samples, judges)
                of = f"{asked} call{'s' * (asked > 1)} of {one.label}"
                yield f"{of} cannot keep {judges} devices of a controller busy; {edit}"
    slices = c.slices // c.optimizer_steps
    if slices < trainers:
        edit = _fewer_rows("train.micro_batch_size", c.samples // c.optimizer_steps, -(-trainers // c.passes))
        of = f"an update's {slices} slice{'s' * (slices > 1)} of a controller"
        yield f"{of} cannot keep {trainers} {groups if _shared(recipe) else 'devices'} busy; {edit}"


def models_of(recipe: Recipe) -> int:
    """How many slices of an update a controller computes at once: devices that share a model or rows count as one."""
    return recipe.placement.training(recipe.devices_per_controller) // recipe.train.width


def _shared(recipe: Recipe) -> str:
    train = recipe.train
    rows = "rows" if recipe.sampling.type == "text" else "samples"
    shared = ["a model"] * (train.sharing > 1) + [rows] * (train.context_parallel > 1)
    return f" x {train.width}, which share {' and '.join(shared)}" if shared else ""


def _fewer_rows(key: str, samples: int, parts: int) -> str:
    if samples < parts:
        return "lower devices_per_controller, or raise train.prompts_per_step"
    return f"set {key}={samples // parts} or less"


def calls(counts: Counts, batch_size: int | None) -> int:
    """A reward's calls in a step: a call never joins samples of several micro-batches."""
    most = batch_size or counts.batch
    whole, rest = divmod(counts.samples, counts.batch)
    return whole * -(-counts.batch // most) + -(-rest // most)


def rows(plan: Plan) -> list[tuple[str, str, str]]:
    """A controller's devices, grouped by role: which devices, their work in the generate phase, and in training."""
    recipe = plan.recipe
    split, sampled = split_of(plan), bool(plan.counts and plan.counts.micro_batches)
    judging = ", ".join(one.label for one in plan.asked if one.trained_on)
    judge = "judge" if judging == "judge" else f"judge ({judging})"
    engine = "" if recipe.rollout.in_process else "engine"
    resting = ", ".join(one.label for one in plan.asked if one.sleeps)
    asleep = _asleep(recipe, resting)
    at_first = ", at first" * (recipe.placement.type in ("greedy", "adaptive"))
    engines, judges = (f", in replicas of {n} devices" * (n > 1) for n in (of_engine(recipe), of_judges(recipe)))
    done = []
    for worker, devices in enumerate(devices_of_workers(recipe) if recipe.placement.apart else ()):
        done += [_always(plan, split, worker, judge, devices)] * devices
    for device in range(0 if recipe.placement.apart else recipe.devices_per_controller):
        if not sampled:
            generate = "-"
        elif not judging:
            generate = f"sample{engines}"
        elif not split.judge:
            generate = f"sample, then {judge}{at_first}"
        elif device < split.rollout:
            generate = f"sample{at_first}{engines}{asleep}"
        else:
            generate = f"{judge}{at_first}{judges}{_asleep(recipe, engine)}"
        done.append((generate, f"train{_asleep(recipe, resting, engine)}"))
    out, first = [], 0
    for (generate, train), same in groupby(done):
        last = first + len(list(same)) - 1
        out.append((str(first) if first == last else f"{first} to {last}", generate, train))
        first = last + 1
    return out


def _always(plan: Plan, split: Split, worker: int, judge: str, devices: int) -> tuple[str, str]:
    """The work of a worker in a disaggregated placement in the generate phase, and in training."""
    placement, trainers = plan.recipe.placement, plan.recipe.placement.training(plan.recipe.devices_per_controller)
    if worker < trainers:
        return "sample or judge while it waits" if placement.lend else "wait for samples", "train"
    steps = f"{placement.staleness} step{'s' * (placement.staleness != 1)}"
    if placement.split != "fixed":
        first = "judge" if worker >= trainers + split.rollout else "sample"
        role = f"sample {steps} ahead or {judge}; {first} at first"
        return role, role
    role = f"sample {steps} ahead" if worker < trainers + split.rollout else judge
    role += f", in replicas of {devices} devices" * (devices > 1)
    return role, role


def _asleep(recipe: Recipe, *who: str) -> str:
    named = ", ".join(name for name in who if name)
    return f"; {named} asleep" if named and recipe.placement.sleep else ""


def shares(plan: Plan) -> str:
    """How the counts of a step are divided among a controller's devices."""
    c, recipe = plan.counts, plan.recipe
    assert c is not None
    split, parts = servers_of(plan), []
    if c.micro_batches:
        together = recipe.train.width if recipe.sampling.type != "text" else 1
        on = f"{split.rollout // together}{_shared(recipe) if together > 1 else ''}"
        parts.append(f"{c.micro_batches:,} sampling micro-batches on {on}")
        for one in plan.asked:
            if one.trained_on:
                parts.append(f"{calls(c, one.batch_size):,} calls of {one.label} on {split.judging}")
    parts.append(f"{c.slices // c.optimizer_steps:,} slices of an update on {models_of(recipe)}{_shared(recipe)}")
    return "; ".join(parts)


def inside(plan: Plan, objective: Objective, pictures: int) -> dict[str, int]:
    """The most bytes sent between a controller and its other devices in a step, by kind, without small messages.

    ``pictures``: bytes of a sample's picture that are sent to rewards.
    """
    (c, m), others = plan.known, in_workers(plan.recipe).devices_per_controller - 1
    if not others:
        return {}
    trajectories = m.trajectory * c.samples
    passes = 1 + bool(prepared_by(objective) or c.optimizer_steps > 1)
    placement, given = plan.recipe.placement, 0
    trainers = placement.training(plan.recipe.devices_per_controller)
    if placement.apart:  # the controller's own device, the first, has them
        split = split_of(plan)
        given = split.rollout + split.judge * (placement.split != "fixed") + (trainers - 1) * placement.lend
    found = {
        "features": m.features * c.prompts * others,
        "samples": (trajectories + pictures * c.samples) if c.micro_batches else 0,
        "pictures to judge": pictures * c.samples if c.micro_batches and any(a.trained_on for a in plan.asked) else 0,
        "weights": m.trained * given,
        "slices": trajectories * passes * min(trainers - 1, c.passes),
    }
    return {kind: size for kind, size in found.items() if size}
