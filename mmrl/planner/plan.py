"""``mmrl plan``: what a recipe needs and computes, before a weight is loaded. ``mmrl train`` starts with it.

The plan is that of one controller, the one with the most work, and of one of its devices.
"""

from __future__ import annotations

import inspect
import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path

import psutil
import torch
from PIL import Image

import mmrl
from mmrl.algorithms.objective import Objective
from mmrl.config.dtype import choose, has_bfloat16
from mmrl.config.evaluation_checks import label_of
from mmrl.config.left_to_plan import left_open
from mmrl.config.loader import LoadedRecipe, load_recipe
from mmrl.config.model import Quantize
from mmrl.config.replicas import has_replicas
from mmrl.config.sampling import Sampling, TextSampling, shares_steps
from mmrl.config.schema import Recipe
from mmrl.config.warm_start import problems_of_first_stage
from mmrl.core.errors import UserError, refuse
from mmrl.core.hub_files import check_files, check_weights
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.packages.places import lacking
from mmrl.core.trajectory import AskedSize, Prompt
from mmrl.data.buckets import count_by_size
from mmrl.data.loading import in_order, load_prompts
from mmrl.episodes.loading import draws
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.inference import own_class, sampling_options, this_machine
from mmrl.logging.metrics import read_numbers
from mmrl.models import context_parallel as context
from mmrl.models import performance, quantized
from mmrl.models import sequence_parallel as sequence
from mmrl.models.description import Description
from mmrl.models.megatron import mapping
from mmrl.models.protocol import Pipeline, recorded_steps
from mmrl.models.row_tables import recordable
from mmrl.models.teachers import copies_of_adapters
from mmrl.planner import buckets, calibration_file
from mmrl.planner.calibration_file import key_of
from mmrl.planner.choices import chosen
from mmrl.planner.counts import count
from mmrl.planner.device_roles import SAMPLED, calls, idle, inside, models_of, refusals, servers_of
from mmrl.planner.estimate import Episodes, Estimate, Step, estimated
from mmrl.planner.fit_check import does_not_fit
from mmrl.planner.gpus import Gpu, cpu, like
from mmrl.planner.judge_work import Answering, answering, sample_like
from mmrl.planner.judges import Asked, on_devices
from mmrl.planner.memory import measure
from mmrl.planner.memory_budget import load_of, offloads, on_host, phases_of, roles_of, sizes_of
from mmrl.planner.plan_data import PHASES, Plan
from mmrl.planner.prompt_check import lacking_truths, unread_messages, unreadable, unscored
from mmrl.planner.rates import Assumed, Calibrated, Rates
from mmrl.planner.steps_per_forward import settle
from mmrl.planner.unread import few, unread
from mmrl.rewards.loading import NOBODY_VOTES, Found
from mmrl.rewards.scoring import check, silent
from mmrl.rewards.sound import problems_of_sound
from mmrl.step.objectives import load_objective


def plan(
    loaded: LoadedRecipe,
    device_memory: int | None = None,
    gpu: Gpu | None = None,
    gpus: int | None = None,
    episodes: Episodes | None = None,
) -> Plan:
    """Resolve a recipe on the meta device, with what it leaves to the plan chosen. Loads no weight; all errors are
    collected in ``problems``.

    ``device_memory`` in bytes replaces that of the device, to plan for a different machine; ``gpu`` replaces the whole
    device (it is then cuda), ``gpus``: how many such GPUs; ``episodes``: what a run measured of its environment.
    """
    if gpu is not None:
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"device": "cuda"}))
    made = chosen(
        loaded.recipe, lambda recipe: _planned(replace(loaded, recipe=recipe), device_memory, gpu, gpus, episodes)
    )
    made.problems = [*dict.fromkeys([*made.problems, *problems_of_first_stage(loaded)])]  # two parts may say the same
    if loaded.recipe.warm_start is not None:
        made.notes.append("warm_start: a run of its own comes first, which this plan does not count")
    return made


def _planned(
    loaded: LoadedRecipe, device_memory: int | None, gpu: Gpu | None, gpus: int | None, episodes: Episodes | None
) -> Plan:
    recipe = loaded.recipe
    device, memory = ("cuda", gpu.memory) if gpu else _device(recipe.device)
    made = Plan(recipe, device, device_memory or memory, gpu=gpu, gpus=gpus, episodes=episodes)
    made.notes += _about_dtype(made, loaded.chose_dtype)
    has = performance.Ability(gpu.name, "cuda", gpu.ampere) if gpu else performance.ability(device)
    made.problems += [*performance.refusals(recipe, has), *quantized.refusals(recipe.model.quantize, has.type)]
    made.problems += _on_this_machine(made)
    made.problems += (wrong := own_class.problems(recipe))
    made.problems += sampling_options.problems(recipe)
    if not wrong and own_class.ends_to_sleep(recipe):
        made.notes.append(
            f"placement.sleep: {recipe.rollout.engine_name} cannot sleep, so its process ends while other models work, "
            "and starts again"
        )
    if unset := lacking(recipe.model.path):
        made.problems.append(f"model.path: {unset}")
    objective = load_objective(recipe)
    try:
        module = mmrl.load("pipelines", recipe.pipeline)
    except UserError as error:
        made.problems.append(str(error))
        return made
    inputs = _rewards(recipe, objective, made, sounds=getattr(module, "sounds", False))
    try:
        if not hasattr(module, "describe"):
            lacks = "has no describe(recipe, path, architecture), so its memory is not known"
            made.notes.append(f"{recipe.pipeline} {lacks}")
            settle(made)
            return made
        prompts = _prompts(recipe, made)
        if prompts:
            shown = [_looked_at(split) if len(split) else [] for split in prompts]
            made.problems += [*lacking_truths(recipe, *shown), *unscored(recipe, *shown)]
            made.notes += unread_messages(recipe, [prompt for split in shown for prompt in split])
            made.notes += few(recipe, len(prompts[0]))
        architecture = Path(recipe.architecture) if recipe.architecture else None
        check_files(recipe.model.path)
        description = module.describe(recipe, recipe.model.path, architecture)
        copies_of_adapters(recipe, description.pipeline.policy)
    except UserError as error:
        made.problems += [str(error)] if str(error) not in made.problems else []
        return made
    if isinstance(description.pipeline, LanguagePipeline):
        made.recordable = recipe.rollout.in_process and recordable(description.pipeline.policy)
        if made.gpu is None:
            made.problems += _without_weights(recipe.model.path)
    made.quantized = _saved(recipe, description)
    _account(made, description, objective, prompts, inputs)
    settle(made)
    made.time = _time(made, description, objective, prompts)
    made.problems += does_not_fit(made)
    made.notes += [*idle(made), *_unused(made), *_through_one(made)]
    return made


def resolved(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe with the values that the plan chose for ``auto``."""
    recipe = loaded.recipe
    on_gpu = _device(recipe.device)[0].startswith("cuda") and left_open(recipe)
    return replace(loaded, recipe=plan(loaded).recipe) if on_gpu or recipe.train.steps_per_forward == "auto" else loaded


def changed(loaded: LoadedRecipe, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe with ``overrides`` on top of its own, and with what the plan chose. Raises ``UserError`` where it
    cannot run here."""
    one = load_recipe(loaded.paths, [*loaded.overrides, *overrides], root=loaded.root)
    planned = plan(one)
    refuse(planned.problems, "this recipe cannot run here")
    return replace(one, recipe=planned.recipe)


def measured_episodes(run: Path) -> Episodes:
    """What the steps of a run measured of its environment. Raises ``UserError`` where they did not."""
    rows = [row for row in read_numbers(run / "metrics.jsonl") if row.get("time/environment") is not None]
    if not rows:
        raise UserError(f"--trace: {run} has no step with an environment; name the directory of a run that has one")
    seconds, told, wrote = (
        statistics.mean(row.get(name) or 0.0 for row in rows)
        for name in ("time/environment", "episode/told_tokens", "text/length")
    )
    return Episodes(seconds, told / max(1.0, told + wrote), str(run))


def _time(
    made: Plan, description: Description, objective: Objective, prompts: Sequence[Sequence[Prompt]]
) -> Estimate | None:
    """The estimated time of a step on the planned GPU, or on this machine's device."""
    c, m, split = made.counts, made.measured, servers_of(made)
    rates = _rates(made)
    if rates is None or c is None or m is None:
        return None
    asked = [one for one in made.asked if one.trained_on and c.micro_batches]
    first = prompts[0][0] if prompts and len(prompts[0]) else None
    known = {one.label: found for one in asked if first and (found := _answering(made, one, first)) is not None}
    judged = sum(-(-calls(c, one.batch_size) // split.judging) * one.weights for one in asked if one.label not in known)
    answers = [(found, ceil(c.samples / found.rows / split.judging)) for found in known.values()]
    encoding = made.encoding if made.gpu is None else 0.0
    step = Step(made.recipe, c, m, split.rollout, models_of(made.recipe), judged, answers, encoding)
    return estimated(step, rates, description, objective, made.episodes)


def _answering(made: Plan, judge: Asked, prompt: Prompt) -> Answering | None:
    """The operators of a judge that answers in the process; None where they are not known."""
    (c, _), recipe = made.known, made.recipe
    if not judge.weights or len(judge.models) != 1 or judge.models[0].asks is None:
        return None
    try:
        shown = sample_like(recipe, prompt)
        return answering(judge.models[0], shown, min(judge.batch_size or c.batch, c.batch, c.samples))
    except (UserError, ValueError, RuntimeError) as error:
        made.notes.append(f"reward {judge.label}: its answers are not timed: {str(error).splitlines()[0]}")
        return None


def _rates(made: Plan) -> Rates | None:
    """How long operators take on the planned device; None where that is not known. Notes why it is not calibrated."""
    recipe = made.recipe
    tf32 = recipe.performance.tf32_beside(recipe.model.dtype)
    if made.gpu is None and made.device.partition(":")[0] in ("cpu", "cuda"):
        try:
            found, why = calibration_file.find(key_of(made.device, recipe.threads), recipe.model.dtype)
        except (AssertionError, RuntimeError):  # a device that is not here
            return None
        if found is not None:
            return Calibrated(found, tf32)
        made.uncalibrated = why
    gpu = made.gpu or _here(made)
    return None if gpu is None else Assumed(gpu, tf32)


def _here(made: Plan) -> Gpu | None:
    """This machine's device as the estimate reads it; None where its rates are not known."""
    if made.device == "cpu":
        return cpu(len(os.sched_getaffinity(0)))
    if not torch.cuda.is_available() or made.device_memory is None:
        return None
    return like(torch.cuda.get_device_name(torch.device(made.device)), made.device_memory)


def _unused(made: Plan) -> Iterator[str]:
    """A note on GPUs that the recipe leaves idle."""
    recipe = made.recipe
    n = recipe.controllers * recipe.devices_per_controller
    if made.gpus is not None and n < made.gpus:
        more = made.gpus // recipe.devices_per_controller
        wider = f"devices_per_controller={made.gpus // recipe.controllers}"
        edit = f"controllers={more}" if recipe.controllers < more <= _most_controllers(recipe) else wider
        yield f"the recipe uses {n} of {made.gpus} GPUs; set {edit}"


def _through_one(made: Plan) -> Iterator[str]:
    """A note on GPUs of a controller that would do the same with a controller each."""
    recipe, n = made.recipe, made.recipe.devices_per_controller
    alone = recipe.placement.type == "colocate" and recipe.train.width == 1 and not has_replicas(recipe)
    if made.device.startswith("cuda") and n > 1 and alone:
        many = n * recipe.controllers
        fewer = f"raise train.prompts_per_step and eval.samples to {many} or more, and "
        first = fewer if many > _most_controllers(recipe) else ""
        yield (
            f"devices_per_controller={n}: every tensor between the GPUs passes through one process; {first}set "
            f"controllers={many} devices_per_controller=1, where each GPU has a process of its own"
        )


def _most_controllers(recipe: Recipe) -> int:
    """Each has a prompt of a step and a sample of an evaluation."""
    return min(recipe.train.prompts_per_step, recipe.eval.samples)


def _device(name: str) -> tuple[str, int | None]:
    """The device that ``mmrl.app.build`` will choose, and its memory if it is on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    number = int(name.partition(":")[2] or 0)
    if name.startswith("cuda") and number < torch.cuda.device_count():
        return name, torch.cuda.get_device_properties(torch.device(name)).total_memory
    return name, _main_memory() if name == "cpu" else None


def _on_this_machine(made: Plan) -> Iterator[str]:
    """What this machine lacks, unless the plan is for another one: with ``gpu``, or for a device that is not here."""
    if made.gpu is not None:
        return
    try:
        this_machine.choose_device(made.recipe.device)
    except UserError as error:
        made.notes.append(f"training stops here: {error}")
        return
    yield from this_machine.refusals(made.recipe)


def _without_weights(path: str) -> Iterator[str]:
    try:
        check_weights(path)
    except UserError as error:
        yield f"model.path: {error}"


def _about_dtype(made: Plan, chosen: bool) -> Iterator[str]:
    """Notes: the dtype of ``model.dtype: auto``, if it was ``chosen``; or that this CPU is slow in the given dtype."""
    model, device = made.recipe.model, made.recipe.device
    if made.gpu is not None:
        lacks = f"{made.gpu.name} has no instructions for bfloat16"
        if chosen:
            why = lacks if not made.gpu.bfloat16 else f"{made.gpu.name} has instructions for it"
            yield f"model.dtype: auto is {model.dtype}, because {why}"
        elif model.dtype == "bfloat16" and not made.gpu.bfloat16:
            yield f"{lacks} and computes it slowly; set model.dtype=float32"
    elif chosen:
        dtype, why = choose(device)
        yield f"model.dtype: auto is {model.dtype}, {why if model.dtype == dtype else 'as the run began'}"
    elif made.device == "cpu" and model.dtype == "bfloat16" and not has_bfloat16(device):
        yield "this CPU has no instructions for bfloat16 and computes faster in float32; set model.dtype=float32"


def _main_memory() -> int:
    total = psutil.virtual_memory().total
    try:  # a container may have less than its machine
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def _prompts(recipe: Recipe, made: Plan) -> list[Sequence[Prompt]]:
    """The prompts of both splits, lazy if the data set is; empty if it cannot be read."""

    try:
        found = [load_prompts(recipe, split) for split in ("train", "heldout")]
        in_order(recipe, found[0])  # check that the sampler can be built
        return found
    except UserError as error:
        made.problems.append(str(error))
        return []


def _looked_at(prompts: Sequence[Prompt]) -> list[Prompt]:
    """All prompts, or of a lazy data set some at equal distances, because reading pictures costs time."""
    if isinstance(prompts, list):
        return prompts
    most = 100 if prompts[0].media else 4000
    return [prompts[n * len(prompts) // min(most, len(prompts))] for n in range(min(most, len(prompts)))]


def _counted(prompts: Sequence[Prompt], recipe: Recipe) -> Sequence[Prompt]:
    """Whose tokens are counted: all where none may be too long, else up to 4000 at equal distances."""
    most = len(prompts) if recipe.overlong == "error" else min(4000, len(prompts))
    return [prompts[n * len(prompts) // most] for n in range(most)]


def _rewards(recipe: Recipe, objective: Objective, made: Plan, *, sounds: bool) -> frozenset[str]:
    """The inputs that the rewards read of a sample; ``sounds``: whether it has a sound."""
    both = list[list[Found]]()
    for key, listed in (("rewards", recipe.rewards), ("eval.rewards", recipe.eval.rewards)):
        try:
            both.append(check(listed, recipe.shows, key, drawn=draws(recipe.environment)))
        except UserError as error:
            made.problems.extend(str(error).splitlines())
    if len(both) < 2:
        return frozenset()
    found, evaluated = both
    reads = [one.reads(reward.options) for reward, one in zip(recipe.rewards, found, strict=True)]
    watched = [one.reads(reward.options) for reward, one in zip(recipe.eval.rewards, evaluated, strict=True)]
    made.problems += problems_of_sound(recipe, reads, watched, sounds=sounds)
    labels = [label_of(reward.name, reward.label) for reward in recipe.rewards]
    made.problems += silent(recipe, dict(zip(labels, found, strict=True)))
    if recipe.eval.maj_at and not any(one.votes for one in (*found, *evaluated)):
        made.problems.append(NOBODY_VOTES)
    half = made.gpu.bfloat16 if made.gpu else has_bfloat16(recipe.device)
    made.asked, problems, notes = on_devices(recipe, found, evaluated, made.device, made.device_memory, half=half)
    made.notes += notes
    made.problems += problems or refusals(made, objective)
    if objective.kind == "pathwise":
        groups = "" if recipe.train.group_size > 1 else " and set train.group_size to 2 or more"
        edit = f"set algorithm={{type: flow_grpo}}{groups}"
        made.problems += [
            f"rewards: {recipe.algorithm.type} follows the reward's gradient, and {one.name} declares none of a "
            f"sample (@mmrl.reward(differentiable=True)); take one that does (colour:target), or {edit}"
            for one in found
            if not inspect.isclass(one.target) and not one.declaration.has_gradient
        ]
    return frozenset(name for inputs in reads for name in inputs)


def _account(
    made: Plan,
    description: Description,
    objective: Objective,
    prompts: list[Sequence[Prompt]],
    inputs: frozenset[str],
) -> None:
    """Fill in counts, measured sizes, roles and phases."""
    recipe, made.source = made.recipe, description.source
    pathwise = objective.kind == "pathwise"
    entries = objective.entries or description.pipeline.entries(objective.kind)
    store = description.pipeline.features
    trainers = recipe.controllers * recipe.placement.training(recipe.devices_per_controller)
    shards = _shards(made, description, trainers)
    if shards is None:
        return
    by_block, gathered = recipe.train.backend == "fsdp", recipe.performance.gather_dtype
    sizes = sizes_of(description, shards, by_block=by_block, gathered=gathered)
    given = {"picture_pairs": 2, "given_pictures": 1}
    media = _pictures(given.get(recipe.algorithm.trains_on, description.pictures))
    try:
        _carried(made, description, prompts)
        if description.longest is not None and not prompts:
            return
        prompt, row_tokens, others = _rows(made, description, prompts, media)
        shared = _shared_steps(recipe, description.pipeline, objective)
        sampled = objective.kind in SAMPLED
        made.counts = counts = count(recipe, entries, row_tokens, sampled=sampled, shared_steps=shared)
        measured = measure(
            description, recipe, objective, counts, prompt, foreach=made.device.startswith("cuda"), others=others
        )
    except UserError as error:
        made.problems.append(str(error))
        return
    except Exception as error:  # a pipeline that fake tensors cannot run may still train: an estimate must not stop it
        made.notes.append(f"memory is not known: the step cannot be run without data ({type(error).__name__}: {error})")
        return
    of_optimizer = trainers if recipe.train.distributed_optimizer else shards
    divided = {name: -(-getattr(measured, name) // of_optimizer) for name in ("adam", "trained", "optimizer")}
    made.measured = measured = replace(measured, **divided)
    different, negatives = _different(prompts, description, recipe.sampling)
    in_use = min(counts.prompts, max(counts.batch, counts.slice_rows))  # the others may be on disk
    in_use += max(1, min(negatives, in_use))
    kept = min(different or store.budget_bytes, max(in_use, store.budget_bytes // max(1, measured.features)))
    features = measured.features * kept
    made.roles = list(roles_of(made, description, sizes, objective, features))
    made.phases = list(phases_of(made, description, sizes, objective, features, inputs, pathwise=pathwise))
    in_parts = recipe.train.backend != "replicated" and trainers > 1
    made.by_rows = in_parts and description.by_rows
    if made.device != "cpu" or in_parts:
        made.load = load_of(made, description, sizes)
    if offloads(made):
        made.host += sum(sizes[id(c)].total for c in description.components if len(c.needed) < len(PHASES))
        made.host += sum(c.resting.kept for c in description.components if c.resting)  # one of them computes at a time
    made.host += on_host(made, description, sizes, objective)
    if recipe.placement.sleep and made.device != "cpu":
        made.host += sum(one.weights for one in made.asked if one.sleeps)
        made.host += sum(one.kept for one in description.beside)
    shown = measured.picture if "tensor" in inputs else measured.picture // 4 if inputs & {"image", "video"} else 0
    made.inside = inside(made, objective, shown)


def _saved(recipe: Recipe, description: Description) -> dict[Quantize, dict[str, int]]:
    """``Plan.quantized``; empty where the base is quantised, or trains."""
    kinds: tuple[Quantize, ...] = ("int8", "nf4")
    if recipe.model.lora is None or recipe.model.quantize is not None:
        return {}
    found: dict[Quantize, dict[str, int]] = {kind: {} for kind in kinds}
    for kind, one in itertools.product(kinds, description.components):
        if one.role in ("policy", "text encoders"):
            found[kind][one.role] = found[kind].get(one.role, 0) + quantized.saved(one.module, kind)
    return found


def _carried(made: Plan, description: Description, prompts: list[Sequence[Prompt]]) -> None:
    """Note what records carry and the recipe does not use, what the pipeline says of itself, and the problem of a
    negative prompt without guidance."""
    looked_at = [prompt for split in prompts for prompt in _looked_at(split)]
    made.notes += [*unread(made.recipe, looked_at, reads_media=description.pipeline.reads_media), *description.notes]
    every = looked_at if description.longest is not None else (prompt for split in prompts for prompt in split)
    made.problems += itertools.islice(filter(None, map(description.pipeline.unused_negative, every)), 1)


def _shared_steps(recipe: Recipe, pipeline: Pipeline, objective: Objective) -> float:
    """``Counts.shared_steps``, of the first thousand steps of a longer run."""
    if not shares_steps(recipe.sampling, recipe.train.group_size) or "log_probs" not in objective.needs:
        return 0
    firsts = [min(recorded_steps(pipeline, step)) for step in range(min(recipe.train.steps, 1000))]
    return sum(firsts) / len(firsts)


def _rows(
    made: Plan, description: Description, prompts: list[Sequence[Prompt]], media: tuple[Media, ...]
) -> tuple[Prompt, int, list[tuple[Prompt, float]]]:
    """The prompt that takes most, the tokens of its row (text), and prompts of other sizes with their shares of the
    rows (pictures). Raises ``UserError``."""
    recipe = made.recipe
    if description.longest is not None:
        every = recipe.overlong == "error"  # any overlong prompt must stop the run before it starts
        looked_at = [p for split in prompts for p in (split if every else _looked_at(split))]
        prompt, row_tokens, said, made.encoding = description.longest(looked_at)
        made.notes += said
        if isinstance(description.pipeline, LanguagePipeline):
            problems, notes = unreadable(description.pipeline, looked_at)
            made.problems += problems
            made.notes += notes
        return prompt, row_tokens, []
    plain, sampling = Prompt("plan", "plan", media=media), recipe.sampling
    if description.too_long is not None:
        made.notes += description.too_long([p for split in prompts for p in _counted(split, recipe)])
    if sampling.type == "text" or sampling.buckets is None:
        return plain, 0, []
    of = count_by_size(_looked_at(prompts[0]) if prompts else [], sampling)
    made.notes.append(buckets.note_of(of, sampling))
    most = buckets.largest(sampling)
    others = [(replace(plain, size=AskedSize(*size)), share) for size, share in buckets.others(of, most)]
    return replace(plain, size=AskedSize(*most)), 0, others


def _shards(made: Plan, description: Description, trainers: int) -> int | Fraction | None:
    """The number of shards of the trained weights, after checks that may refuse it; None if rows cannot be split."""

    train, policy = made.recipe.train, description.pipeline.policy
    shards: int | Fraction = train.parts(trainers)
    if train.backend == "megatron":
        made.problems += mapping.refusals(policy, train)
        shards = mapping.shares(policy, train)
        made.notes.append("activations are counted in full, although devices that share a model divide most of them")
    of = context if made.recipe.sampling.type == "text" else sequence
    refused = list(of.refusals(policy, train.context_parallel))
    made.problems += refused
    return None if refused else shards


def _pictures(count: int) -> tuple[Media, ...]:
    """``count`` different pictures of a pixel."""
    pictures = (Image.new("RGB", (1, 1), (shade, shade, shade)) for shade in range(count))
    return tuple(Media("image", data=png_bytes(picture)) for picture in pictures)


def _different(
    prompts: list[Sequence[Prompt]], description: Description, sampling: Sampling | TextSampling
) -> tuple[int, int]:
    """The most different prompts that the run may encode, negative ones included, and the number of negative ones; 0 if
    that is not known."""
    if description.longest is not None:
        return sum(map(len, prompts)), 0
    every = [prompt for split in prompts for prompt in split]
    sizes = 1 if sampling.type == "text" else len(sampling.sizes)
    said = [repr(p.size) if sizes > 1 else "" for p in every]
    found = {(p.text, p.media if description.pictures else (), size) for p, size in zip(every, said, strict=True)}
    negatives = len({p.negative_prompt for p in every}) * sizes  # without one: the recipe's, or the empty one
    return len(found) + negatives, negatives
