"""Distil a judge: collect its verdicts, train the students, calibrate and measure them, and write the folder.

The judge of a recipe is asked about samples of the recipe's own policy, or of a run's. A student is measured on
verdicts that it was not trained on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import scipy  # its parts are loaded when they are first used
import torch
from torch import Tensor

from mmrl.algorithms.objective import sampler
from mmrl.app.build import build, find_checkpoint, open_run
from mmrl.app.export import new_directory, refuse_taken
from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Recipe, Reward
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject, as_object, as_text, finite
from mmrl.core.randomness import seed_of
from mmrl.core.trajectory import Sample, Slot
from mmrl.logging.progress import Progress
from mmrl.models.protocol import recorded_steps
from mmrl.rewards.judging.calibration import calibration
from mmrl.rewards.judging.statistics import auc, rows_of, spearman
from mmrl.rewards.learned.distilled.comparing import Comparing
from mmrl.rewards.learned.distilled.encoders import Backbone, Encoder, Words, backbone_of
from mmrl.rewards.learned.distilled.folder import STUDENTS, Record, Student, read, write
from mmrl.rewards.learned.distilled.read_students import ReadStudents
from mmrl.rewards.learned.distilled.sides import VERDICTS, Pairs, read_pairs, sides_of, unique, write_pairs
from mmrl.rewards.learned.distilled.students import Inputs, Shape, Students
from mmrl.rewards.learned.formulas import platt, sureness, threshold_of
from mmrl.rewards.loading import find
from mmrl.rollout.encoding import encode
from mmrl.rollout.midway import chunked
from mmrl.step.batch import samples_of
from mmrl.step.step_context import SamplingSpec, StepContext
from mmrl.studies.distill.training import Settings, Table, scores, split, table_of, train

_LEAST_PROMPTS = 8
_EQUAL = 1e-6
_READ = {"patience": None, "lr": 1e-3, "weight_decay": 0.1}
"""Settings of students for whom a model reads: with few groups the validation loss is too noisy to choose a pass."""
_DRAWS = 1000
CLEAR = 0.1
"""Pairs whose verdicts are nearer than this are not counted: their order is the judge's noise."""
SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of samples to ask the judge about, for which the thresholds are printed."""


@dataclass(frozen=True)
class Source:
    """Whose policy is sampled and whose judge is asked: a recipe, or that of a ``run``."""

    recipe: Recipe
    run: Path | None = None
    checkpoint: str = "latest"


@dataclass(frozen=True)
class Outcome:
    """The held-out agreement of each student, the ``student`` that the folder names, and what thresholds would do."""

    verdicts: int
    asked: int
    agreements: dict[Student, Agreement]
    student: Student
    askings: list[Asking]

    def as_json(self) -> JsonObject:
        return {
            "verdicts": self.verdicts,
            "new_verdicts": self.asked,
            "student": self.student,
            "heldout": {name: found.as_json() for name, found in self.agreements.items()},
            "judge_below": [one.as_json() for one in self.askings],
        }


def distil(
    source: Source,
    out: Path,
    samples: int,
    reward: str | None = None,
    also: Sequence[Path] = (),
    settings: Settings | None = None,
    *,
    from_nothing: bool = False,
) -> Outcome:
    """Ask the judge of ``source`` about ``samples`` new samples, train students, and write them into the new folder
    ``out``.

    ``reward``: the label of the judge, needed where there are several. ``also``: folders of earlier distillations,
    whose verdicts are used too. ``settings``: None takes those that fit the students. ``from_nothing``: the students
    read words and pixels; otherwise the recipe's own model reads for them, as it is before training.
    Raises ``UserError`` for a judge that cannot be distilled, for verdicts that teach nothing, for a model that cannot
    read, and where no student is better than chance; then ``out`` keeps the verdicts alone.
    """
    refuse_taken(out)
    judge = judge_of(source.recipe, reward)
    before = Pairs()
    for folder in also:
        before.extend(read_pairs(folder / VERDICTS))
    said = None if from_nothing else backbone_of(source.recipe)
    backbone = None if said is None else Backbone(said)  # before the judge is asked: it may be unable to read
    with new_directory(out, "the distilled judge") as aside:
        made, device = _asked(source, judge, samples, aside, start=len({*before.groups}))
        pairs = Pairs(*sides_of(made.samples), made.values, made.groups)
        asked = len(pairs)
        pairs.extend(before)
        check(pairs)
        options = {key: value for key, value in judge.options.items() if key != "budget"}
        write_pairs(aside / VERDICTS, pairs)  # they cost the judge's calls: kept if no student is good enough, too
        try:
            students, record, measured = fitted(pairs, settings or Settings(), device, backbone)
        except UserError as error:
            outcome: Outcome | UserError = error
        else:
            outcome = replace(measured, asked=asked)
            named = {"name": judge.name, "options": options}
            done = replace(record, judge=named, figures=outcome.as_json(), backbone=said)
            write(aside, done, students, backbone.adapter if backbone is not None else {})
    if isinstance(outcome, UserError):
        raise UserError(
            f"{outcome}. The {len(pairs)} verdicts are kept: a call with --also {out} and another --out uses them too"
        ) from outcome
    return outcome


def _asked(source: Source, judge: Reward, samples: int, folder: Path, start: int) -> tuple[Verdicts, str]:
    """The judge's verdicts of new samples, and the device that computed. Says how many samples have none."""
    context = open_policy(source.recipe, judge, source.run, source.checkpoint)
    with closing(context), closing(context.rewards):
        made = collect(context, samples, folder, start)
    if made.failed:
        print(f"warning: {len(made.failed)} samples have no verdict: {made.failed[0]}", file=sys.stderr)
    return made, str(context.compute.device)


def judge_of(recipe: Recipe, label: str | None) -> Reward:
    """The reward to distil; of a ``distilled`` one the judge that it was distilled from. Raises ``UserError``."""
    labels = {label_of(one.name, one.label): one for one in recipe.rewards}
    usual = [name for name, one in labels.items() if one.name.partition(":")[0] in ("judge", "distilled")]
    wanted = usual if label is None else [name for name in labels if name == label]
    if len(wanted) != 1:
        kind = "judges" if label is None else f"rewards called {label!r}"
        raise UserError(f"the recipe has {len(wanted)} {kind}; name one with --reward ({', '.join(labels)})")
    chosen = labels[wanted[0]]
    if chosen.name.partition(":")[0] == "distilled":
        said = as_object(read(Path(as_text(chosen.options["path"]))).judge)
        chosen = chosen.model_copy(update={"name": as_text(said["name"]), "options": dict(as_object(said["options"]))})
    found = find(chosen.name)
    if found.declaration.differentiable or found.reads(chosen.options) not in (("image",), ("text",)):
        raise UserError(f"the reward {wanted[0]} does not read pictures or texts alone, so it cannot be distilled")
    if chosen.options.get("mode") == "steps":
        raise UserError("options.mode: steps gives verdicts of single steps, and a distilled judge one of a sample")
    return chosen


def check(pairs: Pairs) -> None:
    """Raise ``UserError`` for verdicts that teach nothing."""
    low, high = min(pairs.verdicts), max(pairs.verdicts)
    if low < -_EQUAL or high > 1 + _EQUAL:
        raise UserError(
            f"the scores go from {low:.3g} to {high:.3g}, and verdicts are from 0 to 1; distil a judge, or a reward in "
            "that range"
        )
    if high - low < _EQUAL:
        raise UserError(
            f"all {len(pairs)} verdicts are equal ({low:.3g}), so they teach nothing; look at the judge with mmrl "
            "judge, or take a policy whose samples are good and bad"
        )
    prompts = len({(side.text, *(one.tobytes() for one in side.pictures)) for side in pairs.prompts})
    if prompts < _LEAST_PROMPTS:
        raise UserError(
            f"the verdicts are about {prompts} prompts, and {_LEAST_PROMPTS} are needed, so that some can be held out; "
            "raise --samples"
        )


def fitted(
    pairs: Pairs, settings: Settings, device: str, backbone: Backbone | None = None
) -> tuple[Comparing, Record, Outcome]:
    """Students trained on ``pairs``, with what their folder says (but for the judge and the backbone), and their
    held-out agreement. ``backbone``: what reads for them; without it they begin from nothing.

    Measured are students that were not trained on the held-out part; returned are others, trained on that part too.
    Raises ``UserError`` where none is better than chance.
    """
    answers = "text" if any(side.text for side in pairs.answers) or not pairs.answers[0].pictures else "image"
    encoder: Encoder = backbone or Words(_shape(pairs))
    if backbone is not None:
        backbone.modules.to(device)
        backbone.at(device)
        settings = replace(settings, **_READ)
    elif answers == "image":
        settings = replace(settings, others=1.0)
    learn, check, test = split(unique(pairs.prompts)[1], rows_of(pairs.groups), settings.seed)
    students, table = _trained(pairs, learn, check, encoder, settings, device)
    lines: dict[Student, tuple[float, float]] = {}
    record = Record(students.shape, answers, _places(table), lines, "interaction", {}, {})
    _calibrate(students, table.part(check), lines, device)
    part = table.part(test)
    logits: dict[Student, torch.Tensor] = dict(zip(STUDENTS, scores(students, part, device), strict=True))
    found: dict[Student, Agreement] = {
        name: agreement(record.verdicts(logits[name], name), part.verdicts, _numbers(part), part.of_prompt.tolist())
        for name in STUDENTS
    }
    _refuse_chance(found, lines)
    student = max(STUDENTS, key=lambda name: (lines[name][0] > 0, found[name].order[0], found[name].spearman))
    chosen = record.verdicts(logits[student], student)
    outcome = Outcome(len(pairs), 0, found, student, askings(chosen, part.verdicts, _numbers(part)))
    students, table = _trained(pairs, [*learn, *test], check, encoder, settings, device)
    _calibrate(students, table.part(check), lines, device)
    return students, replace(record, student=student), outcome


def _trained(
    pairs: Pairs, learn: Sequence[int], check: Sequence[int], encoder: Encoder, settings: Settings, device: str
) -> tuple[Students | ReadStudents, Table]:
    """Students trained on the groups ``learn``, after the model that reads for them, and the table of what is read."""
    if isinstance(encoder, Backbone):
        encoder.tune(pairs, learn, settings.seed)
    table = table_of(pairs.prompts, pairs.answers, pairs.verdicts, pairs.groups, encoder)
    students = train(table.part(learn), table.part(check), encoder, settings, device)
    assert isinstance(students, Students | ReadStudents)
    return students, table


def _calibrate(students: Comparing, part: Table, lines: dict[Student, tuple[float, float]], device: str) -> None:
    """Fill ``lines`` with slope and shift of each student, on verdicts that it was not trained on."""
    for name, logits in zip(STUDENTS, scores(students, part, device), strict=True):
        lines[name] = platt(logits, part.verdicts)


def _shape(pairs: Pairs) -> Shape:
    """The shape of students that read pictures of 32 x 32 pixels where all are small, else of 64 x 64."""
    sides = [*pairs.prompts, *pairs.answers]
    sizes = [max(one.size) for side in sides for one in side.pictures]
    most = max(len(side.pictures) for side in sides)
    return Shape(pictures=max(1, most), side=32 if not sizes or max(sizes) <= 40 else 64)


def _places(table: Table) -> tuple[int, int]:
    """Places for pictures of a prompt and of an answer, where students read pictures themselves."""
    prompts, answers = table.prompts, table.answers
    if isinstance(prompts, Inputs) and isinstance(answers, Inputs):
        return prompts.pictures.shape[1], answers.pictures.shape[1]
    return 0, 0


def _numbers(part: Table) -> list[int]:
    """The number of each row's group."""
    number = {row: n for n, rows in enumerate(part.groups) for row in rows}
    return [number[row] for row in range(len(part.verdicts))]


def _refuse_chance(found: dict[Student, Agreement], lines: dict[Student, tuple[float, float]]) -> None:
    if any(found[name].better_than_chance and lines[name][0] > 0 for name in STUDENTS):
        return
    orders = ", ".join(
        f"{name} {one.order[0]:.3f} [{one.order[1]:.3f}, {one.order[2]:.3f}]" for name, one in found.items()
    )
    raise UserError(
        f"no student orders held-out samples of a prompt better than chance (0.5): {orders}. No student is written. "
        "Raise --samples; if that does not help, the verdicts depend on what the students cannot see, and the judge "
        "has to be asked itself"
    )


@dataclass(frozen=True)
class Verdicts:
    """Samples of one prompt after another, each with the judge's verdict in [0, 1].

    ``groups``: for each sample the number of its group, whose samples have the same prompt. ``failed``: why the judge
    could not score further samples, a reason for each.
    """

    samples: list[Sample] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def open_policy(recipe: Recipe, judge: Reward, run: Path | None, checkpoint: str) -> StepContext:
    """The policy with the judge as its only reward; ``run``: with the weights of a checkpoint of this run.

    Raises ``UserError``.
    """
    if recipe.algorithm.kind == "offline":
        raise UserError(
            f"algorithm.type: {recipe.algorithm.label} trains on given data, so there are no samples to ask the judge "
            "about; name a recipe with an algorithm that samples, such as grpo or flow_grpo"
        )
    alone = judge.model_copy(update={"weight": 1.0, "normalize": "none", "on_failure": "drop"})
    evaluation = recipe.eval.model_copy(update={"rewards": []})
    context = build(recipe.model_copy(update={"rewards": [alone], "eval": evaluation}))
    if run is not None:
        found = find_checkpoint(open_run(run)[1], checkpoint)
        if found is not None:
            found.into("policy", context.policy.load_state_dict)
    return context


def collect(context: StepContext, samples: int, folder: Path, start: int = 0) -> Verdicts:
    """Sample ``samples`` samples as training does, in groups, and ask the judge; ``folder`` keeps its verdicts.

    Prompts and noise are not those of a run with the recipe's seed: what a run samples later is new to the students.
    ``start``: how many groups were drawn before, so that these are others. Raises ``UserError`` where the
    judge gives no verdict at all.
    """
    recipe, size = context.recipe, context.recipe.train.group_size
    context.rewards.folder = folder
    seed = seed_of(recipe.seed, "distill")
    controller = Controller(seed)
    per_step = recipe.train.prompts_per_step
    count = max(1, math.ceil(samples / size))
    made = Verdicts()
    with Progress(count, "ask the judge", "groups") as progress:
        for first in range(start, start + count, per_step):
            indices = range(first, min(first + per_step, start + count))
            slots = controller.slots_at(indices, 0, context.prompts, per_step)
            found, values, why = _judged(context, controller, slots, seed)
            made.failed.extend(why)
            for n, sample in enumerate(found):
                if math.isfinite(values[n]):
                    made.samples.append(sample)
                    made.values.append(values[n])
                    made.groups.append(first + n // size)
            progress.advance(len(indices))
    if not made.values:
        said = f": {made.failed[0]}" if made.failed else ""
        raise UserError(f"the judge gave no verdict for {count * size} samples, so there is nothing to distil{said}")
    return made


def _judged(
    context: StepContext, controller: Controller, slots: list[Slot], seed: int
) -> tuple[list[Sample], list[float], list[str]]:
    """The samples of ``slots``, group after group, their verdicts (NaN where there is none), and why there is none."""
    size = context.recipe.train.group_size
    slots, keys, _ = encode(context, slots, lambda slot, n: controller.replacement(slot, n, context.prompts))
    actions = recorded_steps(context.pipeline, 0) if "log_probs" in context.objective.needs else []
    weights = sampler(context.objective, 0)
    how = SamplingSpec(actions, weights, seed, context.rewards.inputs, step=0)
    chunks, places = chunked(context, samples_of(slots, size))
    made: dict[int, Sample] = {}
    devices = context.compute.devices
    with devices.sampling_phase(context, weights), torch.no_grad():
        for n, _, samples in devices.sample(context, chunks, how, Clock(context.compute.device)):
            made |= zip(places[n], samples, strict=True)
    context.pipeline.features.release(keys)
    whole = [made[n] for n in range(len(made))]
    groups = [list(range(n, n + size)) for n in range(0, len(whole), size)]
    scores = context.rewards.score(whole, groups)
    return whole, scores.total.tolist(), [failure.reason for failure in scores.failures]


@dataclass(frozen=True)
class Agreement:
    """How far a student agrees with the judge.

    ``order``: of the pairs of one group whose verdicts differ clearly (``CLEAR``), the
    share that it orders alike, with an interval of 95 % (bootstrap over prompts); 0.5 is chance. ``area``: under the
    ROC curve of verdicts of 0.5 or more; NaN where all are on one side. ``calibration``: the expected calibration
    error, and ``error`` the mean distance, of calibrated verdicts."""

    samples: int
    prompts: int
    order: tuple[float, float, float]
    pairs: int
    spearman: float
    kendall: float
    area: float
    calibration: float
    error: float

    @property
    def better_than_chance(self) -> bool:
        """Whether the interval is above chance; without pairs, whether the ranks correlate at all."""
        return self.order[1] > 0.5 if self.pairs else self.spearman > 0

    def as_json(self) -> dict[str, float | int | list[float | None] | None]:
        """JSON, with null for what is not known."""
        return {
            "samples": self.samples,
            "prompts": self.prompts,
            "order": [finite(value) for value in self.order],
            "pairs": self.pairs,
            "spearman": finite(self.spearman),
            "kendall": finite(self.kendall),
            "auc": finite(self.area),
            "calibration_error": finite(self.calibration),
            "mean_error": finite(self.error),
        }


@dataclass(frozen=True)
class Asking:
    """With ``judge_below: threshold`` the judge is asked about the share ``asked``, and the order of pairs is
    ``order``."""

    threshold: float
    asked: float
    order: float

    def as_json(self) -> JsonObject:
        return {"judge_below": self.threshold, "asked": self.asked, "order": finite(self.order)}


def agreement(said: Tensor, verdicts: Tensor, groups: Sequence[int], prompts: Sequence[int]) -> Agreement:
    """The agreement of calibrated verdicts ``said`` ``[N]`` with the judge's ``verdicts`` ``[N]``. ``groups``,
    ``prompts``: the number of each sample's group and prompt."""
    ours, judge = said.double().tolist(), verdicts.double().tolist()
    of_prompt = rows_of(prompts)
    counts = np.array(
        [_alike([ours[n] for n in rows], [judge[n] for n in rows], [groups[n] for n in rows]) for rows in of_prompt]
    )
    kendall = scipy.stats.kendalltau(ours, judge).statistic if len({*ours}) > 1 and len({*judge}) > 1 else math.nan
    return Agreement(
        len(ours),
        len(of_prompt),
        _interval(counts),
        int(counts[:, 1].sum()),
        spearman(ours, judge),
        float(kendall),
        auc(ours, [value >= 0.5 for value in judge]),
        calibration(ours, judge).error[0],
        float((said.double() - verdicts.double()).abs().mean()),
    )


def _alike(said: Sequence[float], judge: Sequence[float], groups: Sequence[int]) -> tuple[float, int]:
    """How many pairs of one group with clearly different verdicts ``said`` orders alike, and how many there are; where
    it says the same of both, the pair counts half."""
    alike, pairs = 0.0, 0
    for rows in rows_of(groups):
        ours, theirs = (np.array([of[n] for n in rows]) for of in (said, judge))
        apart = theirs[:, None] - theirs[None, :]
        above = apart >= CLEAR
        alike += float((0.5 * (np.sign(ours[:, None] - ours[None, :]) + 1))[above].sum())
        pairs += int(above.sum())
    return alike, pairs


def _interval(counts: np.ndarray) -> tuple[float, float, float]:
    """The share of all pairs that are alike, of counts ``[prompts, (alike, pairs)]``, and the interval."""
    if not counts[:, 1].sum():
        return math.nan, math.nan, math.nan
    draw = np.random.default_rng(0)
    again = counts[draw.integers(0, len(counts), (_DRAWS, len(counts)))].sum(1)
    shares = again[again[:, 1] > 0]
    low, high = np.quantile(shares[:, 0] / shares[:, 1], (0.025, 0.975))
    alike, pairs = counts.sum(0)
    return float(alike / pairs), float(low), float(high)


def askings(said: Tensor, verdicts: Tensor, groups: Sequence[int]) -> list[Asking]:
    """What the thresholds for ``SHARES`` would do on these samples."""
    sure, found = sureness(said), []
    for share in SHARES:
        threshold = threshold_of(sure, share)
        asked = sure < threshold
        mixed = torch.where(asked, verdicts.double(), said.double())
        alike, pairs = _alike(mixed.tolist(), verdicts.double().tolist(), groups)
        order = alike / pairs if pairs else math.nan
        found.append(Asking(threshold, float(asked.double().mean()), order))
    return found
