"""Build a run from its recipe, or open a trained one. ``mmrl.app.trainer`` trains it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import mmrl
from mmrl.algorithms.objective import Objective, copies_of, prepared_by
from mmrl.config.algorithm_settings import CriticSettings
from mmrl.config.checks import possible
from mmrl.config.learning_rate import for_critic
from mmrl.config.names import refuse_code_inside
from mmrl.config.schema import Recipe
from mmrl.config.shipped_paths import moved
from mmrl.controller import Controller
from mmrl.core import checkpoint_reader as reader
from mmrl.core import sharded_loading
from mmrl.core.checkpoint_reader import Saved
from mmrl.core.errors import UserError, refuse
from mmrl.core.hub_files import check_files
from mmrl.core.out_of_memory import in_phase
from mmrl.core.packages.places import lacking
from mmrl.core.secrets import given_again
from mmrl.data.loading import in_order, load_prompts
from mmrl.data.sampler import Chosen
from mmrl.inference.this_machine import check_features, choose_device
from mmrl.logging.rundir import RunDir
from mmrl.models import performance, quantized
from mmrl.models.context_parallel import InContext
from mmrl.models.policy import Policy, snapshot_name
from mmrl.models.protocol import Pipeline, of_text
from mmrl.models.sequence_parallel import InSequence
from mmrl.models.sharded import Sharded
from mmrl.models.teachers import copies_of_adapters
from mmrl.models.weights import Replicated, Weights
from mmrl.placement.single_device import SingleDevice
from mmrl.rewards.patience import Patience
from mmrl.rewards.scoring import RewardSet
from mmrl.rollout.async_rollout import AsyncRollout
from mmrl.rollout.collect import SynchronousRollout
from mmrl.rollout.curriculum import Curriculum
from mmrl.rollout.dynamic_sampling import DynamicSampling
from mmrl.rollout.hints import asks_for_feedback
from mmrl.rollout.partial_rollout import PartialRollout
from mmrl.rollout.workload import Balance
from mmrl.step.objectives import load_objective
from mmrl.step.step_context import Compute, Devices, Rollout, RolloutStrategy, StepContext, StepPart
from mmrl.training.evaluation import Evaluator, summary

Ranks: TypeAlias = tuple[dist.ProcessGroup, dist.ProcessGroup | None]
"""Those that divide the weights, and those with the same rows as this one; None where there are no others."""


@in_phase("load")
def build(
    recipe: Recipe,
    controller: Controller | None = None,
    devices: Devices | None = None,
    *,
    scored: bool = True,
) -> StepContext:
    """Load everything a step needs; what fails cheaply fails first.

    ``controller``: which of several this is; None is the only one. ``devices``: what computes; None is this process.
    ``scored``: False leaves out rewards and training prompts, for who only samples.
    """
    controller = controller or Controller(recipe.seed)
    device = _settled_device(recipe)
    if unset := lacking(path := recipe.model.path):
        raise UserError(f"model.path: {unset}")
    prompts = in_order(recipe, load_prompts(recipe, "train")) if scored else []
    later = recipe.placement.sleep or recipe.devices_per_controller > 1  # judges wake when a device first judges
    patience = Patience(recipe.scoring, controller.gather)
    listed = recipe.rewards if scored else []
    rewards = RewardSet(
        listed, device, controller.total, awake=not later, patience=patience, feedback=asks_for_feedback(recipe)
    )
    family = mmrl.load("pipelines", recipe.pipeline)
    rewards.can_read(recipe, sounds=getattr(family, "sounds", False))
    if recipe.placement.sleep:
        rewards.sleep()
    objective = load_objective(recipe)
    if scored and objective.kind == "pathwise":
        _require_gradients(recipe, rewards)
    ranks = _sharded_over(recipe, controller)
    check_files(path)
    with sharded_loading.reading(ranks and ranks[0]):
        pipeline = family.build(recipe, path, device)
    total = recipe.train.steps * recipe.train.updates_per_step
    # A critic is a copy of the policy, so it is made before the policy is in shards.
    critic = critic_of(pipeline, recipe, total, controller, ranks)
    weights = weights_of(pipeline.policy, recipe, controller, ranks)
    continues = recipe.model.continues_adapter
    policy = Policy(pipeline.policy, recipe.optim, total, weights, recipe.performance, continues=continues)
    keep_copies(policy, objective, recipe)
    strategy, parts = strategy_of(recipe)
    if isinstance(prompts, Chosen):
        parts = {"sampler": Curriculum(prompts), **parts}
    streams = recipe.rollout.partial or recipe.placement.apart  # slots begin before the costs of now are known
    balance = Balance(recipe) if pipeline.makes == "text" else None
    if balance is not None:
        parts = {"balance": balance, **parts}
    return StepContext(
        recipe,
        controller,
        pipeline,
        policy,
        objective,
        rewards,
        prompts,
        Compute(device, devices or SingleDevice()),
        Rollout(strategy, parts, None if balance is None or streams else balance.cost),
        critic,
    )


def _settled_device(recipe: Recipe) -> torch.device:
    """The recipe's device, with its settings made. Raises ``UserError`` for what this machine cannot do."""
    device = choose_device(recipe.device)
    refused = [
        *performance.refusals(recipe, performance.ability(str(device))),
        *quantized.refusals(recipe.model.quantize, device.type),
    ]
    refuse(refused)
    performance.settle(recipe.performance, device, recipe.model.dtype)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    check_features(recipe)
    return device


def _require_gradients(recipe: Recipe, rewards: RewardSet) -> None:
    """Raises ``UserError`` where a reward has no gradient."""
    if not rewards.differentiable:
        raise UserError(
            f"algorithm.type: {recipe.algorithm.type} follows the reward's gradient, and not every reward declares "
            "@mmrl.reward(differentiable=True) for a sample; take one that does (colour:target), or "
            "algorithm={type: flow_grpo} with groups of two or more"
        )


def strategy_of(recipe: Recipe) -> tuple[RolloutStrategy, dict[str, StepPart]]:
    """How a step of the recipe gets its groups, and the parts of the step that it is made of."""
    partial = PartialRollout(recipe.rollout.partial) if recipe.rollout.partial else None
    attempts = recipe.algorithm.attempts
    dynamic = None if attempts is None else DynamicSampling(attempts)
    ahead = AsyncRollout(recipe.placement.staleness or 1, partial, dynamic) if recipe.placement.apart else None
    parts = {"flight": partial, "attempts": dynamic, "ahead": ahead}
    return ahead or partial or dynamic or SynchronousRollout(), {
        name: part for name, part in parts.items() if part is not None
    }


def critic_of(
    pipeline: Pipeline, recipe: Recipe, total: int, controller: Controller, ranks: Ranks | None = None
) -> Policy | None:
    """The critic with its optimizer, of ``total`` updates; None where the algorithm has none. ``ranks``: as for
    ``weights_of``."""
    if not isinstance(recipe.algorithm, CriticSettings):
        return None
    settings = for_critic(recipe.optim, recipe.algorithm.critic_lr)
    module = of_text(pipeline).open_critic()
    weights = weights_of(module, recipe, controller, ranks)
    return Policy(module, settings, total, weights, recipe.performance, "critic_")


def keep_copies(policy: Policy, objective: Objective, recipe: Recipe) -> None:
    """The copies of the trained weights that the objective asks for, each at every age that samples may have; and the
    adapters that teach."""
    for copy in copies_of(objective):
        policy.keep(copy)
        for n in range(1, (recipe.placement.staleness or 0) + 1):
            policy.keep(snapshot_name(copy, n))
    for copy, of_teacher in copies_of_adapters(recipe, policy.module).items():
        policy.hold(copy, of_teacher)
    if any("reference" in name for name in objective.needs | prepared_by(objective)):
        policy.keep("reference")


def weights_of(module: nn.Module, recipe: Recipe, controller: Controller, ranks: Ranks | None = None) -> Weights:
    """How the trained weights of ``module`` lie on the controllers, and which of them share rows. ``ranks``: with FSDP
    those that divide the weights, and those that have the same rows, if there are several such groups."""
    weights, size = _weight_layout(module, recipe, controller, ranks), recipe.train.context_parallel
    if size == 1 or recipe.train.backend == "megatron" or controller.peers.ranks is None:
        return weights  # Megatron-Core shares rows itself, and a run that is looked at has one process
    shared = InContext if recipe.sampling.type == "text" else InSequence
    return shared(module, weights, size)


def _weight_layout(module: nn.Module, recipe: Recipe, controller: Controller, ranks: Ranks | None) -> Weights:
    """The layout of the trained weights on the ranks; a single controller holds all of them."""
    backend = recipe.train.backend
    if controller.size * recipe.devices_per_controller == 1:
        return Replicated(module)
    if backend == "replicated":
        return Replicated(module, controller.gradients)
    if controller.peers.ranks is None:  # a run that is looked at, by one process
        return Replicated(module)
    if backend == "megatron":
        from mmrl.models.megatron.weights import ModelParallel

        return ModelParallel(module, recipe.train, recipe.model, controller.peers.sent, controller.peers.ranks)
    shards, replicas = ranks or (controller.peers.ranks, None)
    return Sharded(module, shards, controller.peers.sent, getattr(torch, recipe.performance.gather_dtype), replicas)


def _sharded_over(recipe: Recipe, controller: Controller) -> Ranks | None:
    """The ranks that will read some rows of the weights each (FSDP keeps them so, Megatron-Core divides them anew), and
    those with the same rows as this one where there are several groups of them; None for another layout."""
    size, every = recipe.train.shard_size, controller.peers.ranks
    if recipe.train.backend == "replicated" or every is None or controller.size * recipe.devices_per_controller == 1:
        return None
    return (every, None) if size is None or size == every.size() else controller.peers.divided(size)


def open_run(path: Path) -> tuple[Recipe, RunDir]:
    """A finished or interrupted run's recipe. Raises ``UserError`` where ``path`` is no run."""
    directory = RunDir(path)
    directory.check()
    try:
        stored = given_again(directory.settings())
        refuse_code_inside(path, stored)
        settings = moved(stored, missing_only=True)
        return possible(Recipe.model_validate_json(json.dumps(settings))), directory
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no run directory: its resolved.json cannot be read ({error}); "
            "name a directory that mmrl train of this version made"
        ) from error


def opened(path: Path, *, scored: bool = True) -> tuple[StepContext, RunDir]:
    """The run at ``path`` as it began, on what this machine has; ``scored`` as in ``build``. Raises ``UserError``."""
    recipe, directory = open_run(path)
    if recipe.device != "cpu":
        recipe = recipe.model_copy(update={"device": "auto"})  # a GPU's run may be looked at without one
    recipe = recipe.model_copy(update={"teacher": []})  # which a run that does not go on need not have any more
    return build(recipe, scored=scored), directory


def find_checkpoint(directory: RunDir, which: str) -> Saved | None:
    """The checkpoint ``latest``, ``best`` (of early stopping) or of a step; None for ``base``.

    Raises ``UserError`` where there is none such, or it is damaged.
    """
    if which == "base":
        return None
    if which == "latest":
        found = reader.newest(directory.checkpoints, reader.ELSEWHERE)
    elif which == "best":
        found = reader.load_best(directory.checkpoints)
    elif which.isascii() and which.isdigit():
        found = reader.load(directory.checkpoints, int(which))
    else:
        raise UserError(f"--checkpoint {which}: give latest, best, base or a step")
    if found is None:
        raise UserError(f"{directory.path} has no whole checkpoint yet; use --checkpoint base, or train first")
    return found


def restored(path: Path, which: str) -> tuple[StepContext, RunDir, int]:
    """The run at ``path`` with the weights of a checkpoint: ``latest``, ``best`` (of early stopping), a step, or
    ``base`` (as it began).

    The weights are those that evaluation and export use (the moving average where the recipe keeps one).
    """
    run, directory = opened(path)
    found = find_checkpoint(directory, which)
    if found is not None:
        found.into("policy", run.policy.load_state_dict)
    return run, directory, 0 if found is None else found.step


def evaluate(path: Path, samples: int | None = None, which: str = "latest") -> dict[str, float | None]:
    """Held-out rewards of a run's checkpoint over ``samples`` samples (None: as many as the recipe says)."""
    run, _, step = restored(path, which)
    heldout = Evaluator(run, load_prompts(run.recipe, "heldout"))
    row, _, failures = heldout.score(samples or run.recipe.eval.samples)
    if failures:
        print(f"warning: {summary(row, failures)}", file=sys.stderr)
    return {"step": step} | {k: v if math.isfinite(v) else None for k, v in row.items()}
