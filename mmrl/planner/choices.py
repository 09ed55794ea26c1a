"""Choose what a recipe leaves to the plan (``auto``, or no value) for a GPU: the samples and tokens of a micro-batch,
those that are drawn at once, whether activations are checkpointed, code is compiled, and idle models leave the GPU.

The choice is a function of the recipe and the device's memory alone. The memory of a phase grows by the same bytes with
each sample, so that plans at two sizes tell that of all. A plan at the chosen size checks it. ``mmrl train`` stores the
choice with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from mmrl.config.checks import impossibilities
from mmrl.config.left_to_plan import left_open, value_of, with_values
from mmrl.config.schema import Recipe
from mmrl.core.durations import duration
from mmrl.core.json_types import Json
from mmrl.core.notices import tell
from mmrl.planner.gpus import GPUS, Gpu
from mmrl.planner.plan_data import PHASES, Plan
from mmrl.planner.steps_per_forward import ROWS, SHARE, even

COMPILING = 300.0
"""Seconds that a run has to save before code is compiled for it; compiling takes minutes for each size of pictures."""
TOKENS = 16_384
"""The most tokens of a slice of text: more gain next to nothing."""
_UPDATE, _SAMPLING = ("train", "optimizer"), ("encode", "sample", "decode")


def chosen(recipe: Recipe, planned: Callable[[Recipe], Plan]) -> Plan:
    """The plan of the recipe with what it leaves open chosen, and a note on each choice. As the recipe stands where
    nothing is open, the device is no GPU, or its memory or that of a step is not known."""
    planned = _each_once(planned)
    text = recipe.sampling.type == "text"
    keys = [key for key in left_open(recipe) if key != ("model.offload" if text else "train.micro_batch_tokens")]
    sizes = "train.micro_batch_size" in keys and not recipe.algorithm.whole
    probes = sizes and recipe.device.startswith("cuda")
    first = planned(_alike(recipe, _probed_sizes(recipe)[0]) if probes else recipe)  # what probing needs, too
    if not keys or not first.device.startswith("cuda") or first.device_memory is None or first.measured is None:
        return planned(recipe) if probes else first
    made = _best(recipe, first, planned, keys)
    if not made.problems:
        made = _compiled(made, planned) if "performance.compile" in keys else made
        made = _kept(made, planned) if "model.offload" in keys else made
    open_values = {key: value_of(made.recipe, key) for key in left_open(made.recipe)}
    made.recipe = with_values(made.recipe, open_values)  # else the start of the run would choose once more
    return made


def _each_once(planned: Callable[[Recipe], Plan]) -> Callable[[Recipe], Plan]:
    """``planned``, which computes nothing twice for equal recipes: a plan of large models takes many seconds."""
    known: list[tuple[Recipe, Plan]] = []

    def plan(recipe: Recipe) -> Plan:
        made = next((plan for other, plan in known if other == recipe), None)
        if made is None:
            made = planned(recipe)
            known.append((recipe, made))
        return replace(made, notes=[*made.notes], problems=[*made.problems])

    return plan


def _best(recipe: Recipe, first: Plan, planned: Callable[[Recipe], Plan], keys: list[str]) -> Plan:
    known = "model.gradient_checkpointing" not in keys
    checkpointed = [recipe.model.gradient_checkpointing] if known else [False, True]
    if "train.micro_batch_size" not in keys or recipe.algorithm.whole:
        return first if known else _fitting(recipe, first, planned)
    tell(f"the plan chooses {', '.join(keys)} for {first.where}, which can take a minute")
    found: list[_Choice] = []
    for way in checkpointed:
        one = with_values(recipe, {"model.gradient_checkpointing": way})
        found.append(_largest(one, planned, "sampling.batch_size" in keys))
        if found[-1].enough:
            break
    best = min(found, key=lambda one: one.cost)
    if best.plan.recipe.sampling.type != "text" and "sampling.batch_size" in keys:
        rows = best.plan.recipe.train.micro_batch_size
        best.plan.notes.append(f"sampling.batch_size: auto is {rows} as in a micro-batch, so that first ratios stay 1")
    if not known:
        best.plan.notes.append(_why_checkpointed(best, found))
    return best.plan


@dataclass(frozen=True)
class _Choice:
    """``enough``: memory does not limit the micro-batches; ``on_larger``: nor those of the next larger GPU."""

    plan: Plan
    enough: bool
    on_larger: bool

    @property
    def cost(self) -> tuple[bool, float, bool, float]:
        """Less is better: whether it does not fit, and by how much, whether it has no margin, and the seconds of a step
        (its slices where they are not known)."""
        counts, _ = self.plan.known
        seconds = counts.slices if self.plan.time is None else self.plan.time.step
        over = _over(self.plan)
        needs = self.plan.peak.total if over and self.plan.peak is not None else 0
        return over, needs, _over(self.plan, SHARE), seconds


def _why_checkpointed(best: _Choice, found: list[_Choice]) -> str:
    chosen = best.plan.recipe.model.gradient_checkpointing
    if len(found) == 1:
        why = "false, because memory does not limit micro-batches without it"
    elif _over(best.plan):
        why = f"{str(chosen).lower()}, which takes the least memory"
    elif best.plan.recipe.model.gradient_checkpointing:
        why = "true, because smaller micro-batches without it take longer, or do not fit"
        why += _on(best.plan, "false") if found[0].on_larger else ""
    else:
        why = "false, because larger micro-batches with it take longer"
    return f"model.gradient_checkpointing: auto is {why}"


def _largest(recipe: Recipe, planned: Callable[[Recipe], Plan], of_sampling: bool) -> _Choice:
    """The largest micro-batch that fits with a margin and still saves time. ``of_sampling``: a batch that is sampled is
    chosen, too; of pictures it is the micro-batch, so that first ratios stay 1."""
    probe = _probed(recipe, planned)
    text, most = recipe.sampling.type == "text", probe.most
    by_tokens = recipe.train.micro_batch_tokens is not None  # what limits a slice whatever the number of rows
    n = most if by_tokens else probe.largest(_UPDATE if text else PHASES, most)
    apart = text and of_sampling and recipe.rollout.in_process
    batch = probe.largest(_SAMPLING, probe.plan.known[0].samples) if apart else 0
    while True:
        n, batch = even(probe.samples, n), batch and even(probe.plan.known[0].samples, batch)
        made = planned(
            with_values(recipe, {"train.micro_batch_size": n} | ({"sampling.batch_size": batch} if batch else {}))
        )
        over = _over(made, SHARE)
        if over and batch > 1 and made.peak is not None and made.peak.name in _SAMPLING:
            batch = batch * 3 // 4
        elif over and n > 1 and not by_tokens:
            n = max(1, n * 3 // 4)
        else:
            break
    enough = not over and n >= even(probe.samples, most)
    why = f"more than {most} save no time" if enough else f"{SHARE:.0%} of {made.where}'s memory"
    why = "train.micro_batch_tokens limits them" if by_tokens else "all of an update" if n == probe.samples else why
    more = probe.on_larger(_UPDATE if text else PHASES, most)
    said = "" if enough or by_tokens else _on(made, str(even(probe.samples, more)), more > n)
    made.notes.append(f"train.micro_batch_size: auto is {n} ({why}){said}")
    if batch:
        _say_batch(made, probe, batch)
    if "micro_batch_tokens" in recipe.train.open_keys and text:
        _limit_tokens(made, probe.samples, n, over)
    return _Choice(made, enough, more >= most)


def _say_batch(made: Plan, probe: _Probe, batch: int) -> None:
    draws = made.known[0].samples
    all_of_them, more = batch == draws, even(draws, probe.on_larger(_SAMPLING, draws))
    why = "that a step draws" if all_of_them else f"that a step draws ({SHARE:.0%} of {made.where}'s memory)"
    made.notes.append(
        f"sampling.batch_size: auto is {batch}, of {draws} samples {why}{_on(made, str(more), more > batch)}"
    )


def _limit_tokens(made: Plan, samples: int, n: int, over: bool) -> None:
    """Have tokens limit a micro-batch of text, of ``n`` rows, in place of rows, of which short ones take less."""
    counts, _ = made.known
    if not counts.row_tokens or not counts.micro_batches or made.recipe.algorithm.kind != "policy_gradient":
        return
    if n >= samples or over:
        why = "one row is the least" if over else f"{n} rows of the greatest length fit"
        made.notes.append(f"train.micro_batch_tokens: auto is no limit, since {why}")
        return
    tokens = counts.slice_rows * counts.row_tokens
    values = {"train.micro_batch_tokens": tokens, "train.micro_batch_size": samples}
    if made.recipe.sampling.batch_size is None:  # else it would be the new size
        values["sampling.batch_size"] = counts.batch
    made.recipe = with_values(made.recipe, values)
    made.notes.append(
        f"train.micro_batch_tokens: auto is {tokens}, those of {counts.slice_rows} rows of the greatest length; up to "
        f"{samples} shorter ones share a micro-batch"
    )


def _again(made: Plan, planned: Callable[[Recipe], Plan], key: str, value: Json) -> Plan:
    """The plan with one more value, and the notes on those that were chosen before."""
    new = planned(with_values(made.recipe, {key: value}))
    new.notes += [note for note in made.notes if ": auto is " in note and note not in new.notes]
    return new


def _compiled(made: Plan, planned: Callable[[Recipe], Plan]) -> Plan:
    key, recipe = "performance.compile", made.recipe
    compiled = with_values(recipe, {key: True})
    if refused := [one for one in impossibilities(compiled) if one.startswith(key)]:
        made.notes.append(f"{key}: auto is false, because it is refused here: {refused[0].removeprefix(key + ': ')}")
    elif recipe.sampling.type == "text":
        if made.recordable and made.known[0].micro_batches and recipe.train.backend == "replicated":
            made.recipe = compiled
            made.notes.append(f"{key}: auto is true: a step of sampling is recorded once and replayed (CUDA graphs)")
        else:
            made.notes.append(f"{key}: auto is false, because no steps of sampling here can be recorded")
    elif made.gpu is None and find_spec("triton") is None:
        made.notes.append(f"{key}: auto is false, because triton is not installed")
    else:
        new, sizes = _again(made, planned, key, True), len(recipe.denoising.sizes)
        saved = made.lasts - new.lasts
        if saved > COMPILING * sizes and not _over(new, SHARE):
            new.notes.append(f"{key}: auto is true, which saves {duration(saved)} of the run by the estimate")
            return new
        said = duration(max(0.0, saved))
        made.notes.append(f"{key}: auto is false: compiling takes minutes, and would save {said} of the run")
    return made


def _kept(made: Plan, planned: Callable[[Recipe], Plan]) -> Plan:
    """With the models that are idle in some phases on the GPU in all, where there is room."""
    key, new = "model.offload", _again(made, planned, "model.offload", value=False)
    if _over(new, SHARE) or new.problems:
        larger = _next_larger(made)
        fits = larger is not None and new.peak is not None and new.peak.total <= SHARE * larger.memory
        why = f"without it the plan takes more than {SHARE:.0%} of the memory"
        made.notes.append(f"{key}: auto is true, because {why}{_on(made, 'false', fits)}")
        return made
    new.notes.append(f"{key}: auto is false, because text encoders and VAE have room beside what trains")
    return new


@dataclass(frozen=True)
class _Probe:
    """``samples``: those of an update. ``phases``: of each the bytes without a sample, and those of a sample."""

    plan: Plan
    samples: int
    phases: Mapping[str, tuple[float, float]]

    @property
    def most(self) -> int:
        """The most samples of a micro-batch that still save time."""
        (counts, measured), recipe = self.plan.known, self.plan.recipe
        if recipe.sampling.type != "text":
            return min(self.samples, ROWS // (2 if measured.guided_loss else 1))
        if recipe.train.micro_batch_tokens is not None:
            return self.samples
        return min(self.samples, -(-TOKENS // max(1, counts.row_tokens)))

    def largest(self, phases: Sequence[str], most: int, memory: float | None = None) -> int:
        """The samples that fit in each of ``phases``, from 1 to ``most``; ``memory`` of another device, in bytes."""
        limit = SHARE * (memory or self.plan.device_memory or 0)
        room = [(limit - fixed) / each for name, (fixed, each) in self.phases.items() if name in phases and each > 0]
        return max(1, min(most, *map(int, room))) if room else most

    def on_larger(self, phases: Sequence[str], most: int) -> int:
        """The samples that ``largest`` finds for the memory of the next larger GPU; 0 where there is none."""
        larger = _next_larger(self.plan)
        return 0 if larger is None else self.largest(phases, most, larger.memory)


def _next_larger(made: Plan) -> Gpu | None:
    more = [one for one in GPUS.values() if one.memory > 1.1 * (made.device_memory or 0)]
    return min(more, key=lambda gpu: gpu.memory, default=None)


def _on(made: Plan, value: str, differs: bool = True) -> str:
    """What the next larger GPU would change; nothing where it does not differ."""
    larger = _next_larger(made)
    return f"; on {larger.name} it would be {value}" if larger is not None and differs else ""


def _probed(recipe: Recipe, planned: Callable[[Recipe], Plan]) -> _Probe:
    more, fewer = _probed_sizes(recipe)
    made = [planned(_alike(recipe, n)) for n in (more, fewer)]
    counts, _ = made[0].known
    sizes = [min(n, counts.samples // counts.optimizer_steps) for n in (more, fewer)]
    large, small = ({phase.name: phase.total for phase in one.phases} for one in made)
    each = {name: (large[name] - small[name]) / max(1, sizes[0] - sizes[1]) for name in large}
    phases = {name: (large[name] - sizes[0] * each[name], each[name]) for name in large}
    return _Probe(made[0], counts.samples // counts.optimizer_steps, phases)


def _probed_sizes(recipe: Recipe) -> tuple[int, int]:
    """The two numbers of samples that tell the memory of all: few where rows are long, which takes long to plan."""
    long = recipe.sampling.type == "text" and 8 * recipe.decoding.max_new_tokens > 2 * TOKENS
    return (2, 1) if long else (8, 4)


def _alike(recipe: Recipe, n: int) -> Recipe:
    """``n`` samples in every batch."""
    drawn = {"sampling.batch_size": n} if "batch_size" in recipe.sampling.open_keys else {}
    return with_values(recipe, {"train.micro_batch_size": n} | drawn)


def _over(made: Plan, share: float = 1.0) -> bool:
    """Whether it needs more than ``share`` of the device's memory."""
    return made.peak is not None and made.device_memory is not None and made.peak.total > share * made.device_memory


def _fitting(recipe: Recipe, first: Plan, planned: Callable[[Recipe], Plan]) -> Plan:
    """With checkpointing, where a recipe with its own micro-batches does not fit without it."""
    key = "model.gradient_checkpointing"
    if not _over(first):
        first.notes.append(f"{key}: auto is false, because the recipe fits without it")
        return first
    made, larger = planned(with_values(recipe, {key: True})), _next_larger(first)
    if made.peak is None or first.peak is None or made.peak.total >= first.peak.total:
        return first
    fits = larger is not None and first.peak.total <= larger.memory
    made.notes.append(f"{key}: auto is true, because the recipe does not fit without it{_on(made, 'false', fits)}")
    return made
