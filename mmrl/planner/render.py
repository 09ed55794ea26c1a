"""A plan as text: tables on a console."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Column, Table

from mmrl.core.durations import duration
from mmrl.core.secrets import hidden
from mmrl.core.sizes import size
from mmrl.planner.device_roles import rows, shares
from mmrl.planner.max_length import max_length
from mmrl.planner.plan_data import PhaseMemory, Plan

if TYPE_CHECKING:
    from rich.console import Console

    from mmrl.config.midway import Midway
    from mmrl.config.schema import Recipe
    from mmrl.planner.estimate import Estimate


NOT_COUNTED = (
    "Every tensor is counted, attention as the flash kernel computes it. Not counted: workspaces of kernels, the "
    "allocator's slack, the device's context, and memory of rewards besides the weights of their models."
)


def render(plan: Plan, console: Console, *, short: bool = False) -> None:
    """Print the plan. ``short``: three lines, without the problems, which the caller raises."""
    if not short:
        _render_whole(plan, console)
        return
    for line in filter(None, (_long(plan), _step(plan), _peak(plan), *plan.notes)):
        console.print(hidden(line), markup=False, highlight=False)


def _render_whole(plan: Plan, console: Console) -> None:
    """Everything, problems last."""

    def say(text: str) -> None:
        console.print(hidden(text), markup=False, highlight=False, soft_wrap=True)

    recipe = plan.recipe
    several = f", the first of {recipe.devices_per_controller} devices" if recipe.devices_per_controller > 1 else ""
    say(f"{recipe.name} on {plan.where}, one controller{several}")
    if long := _long(plan):
        say(long)
    if plan.source:
        say(f"sizes from {plan.source}")
    say(_algorithm(plan))
    if plan.counts and plan.measured:
        say("")
        for line in _arithmetic(plan):
            say(line)
    if plan.phases:
        console.print(_roles(plan))
        console.print(_phases(plan))
        say(_peak(plan))
        if plan.load:
            console.print(_loading(plan, plan.load), markup=False, highlight=False)
        if plan.recipe.train.context_parallel > 1:
            say(_cut(plan))
        if plan.host:
            say(f"offloaded tensors, page-locked in host memory: {size(plan.host)}")
        if recipe.controllers * recipe.devices_per_controller > 1:
            console.print(_placed(plan))
            for line in _moves(plan):
                say(line)
        say(_crossing(plan))
        if plan.inside:
            parts = ", ".join(f"{kind} {size(n)}" for kind, n in plan.inside.items())
            say(f"between a controller and its other devices, on their host, per step: up to about {parts}")
        say(NOT_COUNTED)
        if plan.time is not None:
            _time(plan, plan.time, console)
    for note in plan.notes:
        say(f"note: {note}")
    for problem in plan.problems:
        say(f"problem: {problem}")


_DAY = 86400


def _long(plan: Plan) -> str:
    """How long a run of more than a day takes, and how many GPU-days that is; empty for a shorter one."""
    recipe = plan.recipe
    seconds = plan.lasts
    if seconds <= _DAY:
        return ""
    n = recipe.controllers * recipe.devices_per_controller
    where = f"{n} x " * (n > 1) + (plan.gpu.name if plan.gpu else f"this machine's {plan.device}")
    spent = "" if plan.device == "cpu" else f", {n * seconds / _DAY:,.1f} GPU-days"
    return (
        f"this run takes about {seconds / _DAY:,.1f} days on {where}{spent} (an estimate, evaluation not counted): "
        "fewer train.steps, train.prompts_per_step or sampling.steps, a smaller picture or model, or more devices "
        "shorten it"
    )


def _algorithm(plan: Plan) -> str:
    """The algorithm's name and all its settings."""
    settings = plan.recipe.algorithm.model_dump(mode="json", exclude={"type"})
    written = ", ".join(f"{key} {json.dumps(value)}" for key, value in settings.items())
    return f"algorithm {plan.recipe.algorithm.type}: {written}"


def _step(plan: Plan) -> str:
    c = plan.counts
    if c is None:
        return ""
    train, n = plan.recipe.train, plan.recipe.controllers
    of_each = f" of each of {n} controllers" if n > 1 else ""
    return (
        f"a step{of_each}: {c.prompts} prompts x {train.group_size} = {c.samples:,} samples, "
        f"{c.slices:,} training slices, {c.optimizer_steps} optimizer step{'s' * (c.optimizer_steps > 1)}; "
        f"{train.steps:,} steps"
    )


def _arithmetic(plan: Plan) -> list[str]:
    (c, m), recipe = plan.known, plan.recipe
    text, own = recipe.sampling.type == "text", recipe.rollout.own_class
    twice, twice_loss = (" (twice that with guidance)" if guided else "" for guided in (m.guided, m.guided_loss))
    lines = [_step(plan)]
    if c.micro_batches:
        each = _drawn(recipe) if text else f"{recipe.denoising.taken} denoising steps"
        batches = f"  sampling: {c.micro_batches:,} micro-batches of {c.batch} samples{twice}"
        if own:
            lines.append(f"{batches}, {each} each, drawn by {recipe.rollout.engine_name}: it chooses its own forwards")
        else:
            lines.append(f"{batches} x {each} = {c.sampling_forwards:,} forwards{_engine(plan)}{_shared(plan)}")
        if recipe.midway is not None:
            forwards = f"{c.sampling_forwards:,} forwards{_engine(plan)}{_shared(plan)}"
            chosen = f", drawn by {recipe.rollout.engine_name}: it chooses its own forwards"
            lines[-1] = f"{batches}; {_pruned(plan, recipe.midway)}{chosen if own else f' = {forwards}'}"
    if c.predicted:
        lines.append(f"  scoring: {c.samples:,} samples, and {c.predicted:,} results predicted before recorded steps")
    without = f" and {m.forwards} without" if m.forwards else ""
    plural = "s" * (m.graph_forwards > 1)
    checkpointed = ", recomputed in it (gradient checkpointing)" if recipe.model.gradient_checkpointing else ""
    at_once = f", {c.at_once} in a forward" if c.at_once > 1 else ""
    taken = (
        f" of up to {c.row_tokens:,} tokens" if text else f"{twice_loss}, {c.entries} entries of each sample{at_once}"
    )
    lines.append(
        f"  training: {c.slices:,} slices of up to {c.slice_rows} samples{taken}; "
        f"a slice is {m.graph_forwards} forward{plural} with a graph{without}, and a backward{checkpointed}"
    )
    steps = recipe.train.steps
    forwards = c.slices * (m.forwards + m.graph_forwards) + (0 if own else c.sampling_forwards)
    of_training = " of training" if own else ""
    lines.append(
        f"  the run: {steps:,} steps = {steps * c.samples:,} samples, {steps * forwards:,} forwards{of_training}, "
        f"{steps * c.slices:,} backwards, {steps * c.optimizer_steps:,} optimizer steps (evaluation not counted)"
    )
    return lines


def _drawn(recipe: Recipe) -> str:
    """What is sampled of a response, or of an episode, at most."""
    turn = f"up to {recipe.decoding.max_new_tokens} tokens"
    if recipe.environment is None:
        return turn
    return (
        f"up to {recipe.environment.max_turns} turns of {turn}, {recipe.environment.max_tokens} with what they are told"
    )


def _pruned(plan: Plan, midway: Midway) -> str:
    (c, _), recipe = plan.known, plan.recipe
    if recipe.makes == "text":
        what, done = f"up to {recipe.decoding.max_new_tokens} tokens", "tokens at most"
    else:
        what, done = f"{recipe.denoising.taken} denoising steps", "steps of samples"
    if midway.draft_steps is not None:
        return (
            f"midway draws {c.begun:,} drafts of {midway.draft_steps} denoising steps, and {c.samples:,} of them again "
            f"with {recipe.denoising.taken}: {c.sample_steps:,} {done}"
        )
    goes_on = f"finishes {c.samples:,}"
    if midway.branches > 1:
        goes_on = f"continues {c.samples // midway.branches:,} of them {midway.branches} times each"
    return (
        f"midway begins {c.begun:,} samples, scores them after {midway.at} of {what} and {goes_on}: "
        f"{c.sample_steps:,} {done}"
    )


def _shared(plan: Plan) -> str:
    c, _ = plan.known
    if not c.saved_steps:
        return ""
    return (
        f"; a group shares the {c.shared_steps:.3g} steps before the window (mean), so that {c.saved_steps:,} of "
        f"{c.sample_steps + c.saved_steps:,} denoising steps of samples are not computed"
    )


def _engine(plan: Plan) -> str:
    if plan.recipe.sampling.type != "text" or plan.recipe.rollout.in_process:
        return ""
    return f" of {plan.recipe.rollout.engine_name}, which chooses its own batches"


def _roles(plan: Plan) -> Table:
    table = _table(
        "models and tensors",
        Column("role", overflow="fold"),
        Column("what", overflow="fold"),
        Column("parameters", justify="right", overflow="fold"),
        Column("memory", justify="right", overflow="fold"),
        Column("on the device", overflow="fold"),
    )
    for role in plan.roles:
        number = f"{role.parameters:,}" if role.parameters else ""
        table.add_row(escape(role.name), escape(role.what), number, size(role.bytes) if role.bytes else "-", role.where)
    return table


def _phases(plan: Plan) -> Table:
    phases = [Column(phase.name, justify="right", no_wrap=True) for phase in plan.phases]
    table = _table(f"{plan.where} by phase of a step", "", *phases)
    for part in dict.fromkeys(name for phase in plan.phases for name in phase.parts):
        table.add_row(escape(part), *(size(p.parts[part]) if part in p.parts else "" for p in plan.phases))
    table.add_section()
    table.add_row("in all", *(size(p.total) for p in plan.phases), style="bold")
    return table


def _placed(plan: Plan) -> Table:
    """The roles of the devices in each phase."""
    n, devices = plan.recipe.controllers, plan.recipe.devices_per_controller
    table = _table(
        f"placement: {plan.recipe.placement.type}, {n} controller{'s' * (n > 1)} x {devices} "
        f"device{'s' * (devices > 1)}",
        Column("device of each", overflow="fold"),
        Column("generate", overflow="fold"),
        Column("prepare, train", overflow="fold"),
    )
    for row in rows(plan):
        table.add_row(*map(escape, row))
    return table


def _moves(plan: Plan) -> Iterator[str]:
    """How the devices of a controller share a step, and when they switch their roles, if there are several."""
    if plan.recipe.devices_per_controller > 1:
        yield f"of a controller: {shares(plan)}"
    placement = plan.recipe.placement
    if placement.follows:
        inside = "a device without work switches its role" if placement.inside else "roles stay"
        yield f"between steps the split follows the measured times; within a step {inside}"
    elif placement.moves:
        begins = "the run" if placement.apart else "each step"
        yield f"{begins} begins so; within a step a device without work switches its role"


def _table(title: str, *columns: str | Column) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")


def _peak(plan: Plan) -> str:
    peak = plan.peak
    if peak is None:
        return ""
    if plan.device_memory is None:
        return (
            f"peak: {size(peak.total)} in {peak.name} ({plan.device} is not on this machine: its memory is not known)"
        )
    share = peak.total / plan.device_memory
    return f"peak: {size(peak.total)} in {peak.name}, {share:.0%} of {plan.where}'s {size(plan.device_memory)}"


def _loading(plan: Plan, load: PhaseMemory) -> str:
    """The memory of loading; without ``by_rows`` each rank has the whole model on its device for a moment."""
    listed = ", ".join(f"{name} {size(n)}" for name, n in load.parts.items())
    first = "" if plan.device == "cpu" else "; each process first has the weights in the host's memory"
    if plan.by_rows:
        first = "; each process reads only its part of the checkpoint"
    return f"loading: {size(load.total)} ({listed}){first}"


def _time(plan: Plan, time: Estimate, console: Console) -> None:
    """The estimated time of a step on the planned device."""
    console.print(f"time of a step on {plan.where}: an estimate, not measured", style="bold", highlight=False)
    table = Table(Column(no_wrap=True), Column("estimate", justify="right", no_wrap=True), box=box.SIMPLE_HEAD)
    for name, seconds in time.seconds.items():
        table.add_row(name, _about(seconds))
    table.add_section()
    beside = " (training beside the rest)" if time.beside else ""
    steps = plan.recipe.train.steps
    for name, times in ((f"a step{beside}", 1), (f"{steps:,} steps", steps)):
        low, high = (_about(times * seconds) for seconds in time.interval)
        table.add_row(name, f"{low} to {high}", style="bold")
    console.print(table)
    console.print(time.basis, markup=False, highlight=False)
    if plan.uncalibrated:
        console.print(hidden(plan.uncalibrated), markup=False, highlight=False)


def _about(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds >= 1e-4 else "< 0.1 ms"
    days = seconds / 86400
    return f"{days:,.1f} days" if days >= 2 else duration(seconds)


def _cut(plan: Plan) -> str:
    """The share of a row per device with context parallelism, and the longest rows that fit."""
    (c, m), n = plan.known, plan.recipe.train.context_parallel
    if m.tokens:
        return _divided(plan)
    said = f"rows are split: each of {n} devices has 1/{n} of the tokens in training ({size(m.train)} of activations)"
    if (found := max_length(plan)) is None:
        return said
    tokens, phase = found
    whole = ", where a device has whole rows" if phase == "sample" else ""
    most = f"; by {phase}{whole}, rows of up to {tokens:,} tokens fit"
    return f"{said}{most} (now {c.row_tokens:,}), {c.slice_rows} to a slice"


def _divided(plan: Plan) -> str:
    """The share of a sample per device with context parallelism, and from which size that pays: where a device alone
    has no memory for a slice of one sample."""
    (c, m), n = plan.known, plan.recipe.train.context_parallel
    said = (
        f"samples are divided: each of {n} devices has 1/{n} of the {m.tokens:,} tokens of a sample in sampling and "
        f"training ({size(m.train)} of activations in place of {size(m.whole)})"
    )
    if plan.device_memory is None:
        return said
    kept = next(phase.total for phase in plan.phases if phase.name == "train") - m.train
    most = max(0, int((plan.device_memory - kept) * c.slice_rows / m.whole * m.tokens))
    if most >= m.tokens:
        less = "here it does not pay: samples of their own would keep the devices as busy, without exchange"
        return f"{said}; a device alone trains one sample of up to {most:,} tokens, so that {less}"
    return f"{said}; a device alone trains one sample of up to {most:,} tokens: from there on it pays"


def _crossing(plan: Plan) -> str:
    (c, m), n = plan.known, plan.recipe.controllers
    shown = c.samples + c.begun + c.predicted
    pictures = f"; the rewards get {shown:,} pictures a step, {size(shown * m.picture // 4)} as bytes"
    crossing = "0 bytes, there is one"
    if n > 1:
        trained = next(role.bytes for role in plan.roles if role.name == "gradients")
        plural = "s" * (c.optimizer_steps > 1)
        crossing = (
            f"the gradients ({size(trained)}) of {c.optimizer_steps} update{plural} a step, and numbers; no samples"
        )
        if plan.recipe.train.backend == "fsdp":
            crossing = "weights and gradients of every training slice, weights once a step, and numbers; no samples"
    return f"between controllers: {crossing}{pictures if m.picture else ''}"
