"""Compare a judge with held-out true verdicts before a run uses it (``mmrl judge``). Works with any reward.

A row of the truth (JSONL):

    {"prompt": "...", "response": "...", "truth": 1, "image": "a.png", "images": ["q.png"], "meta": {}, "id": "7"}

``image`` is the picture to judge, ``images`` are the prompt's own; paths start at the file's folder.

``truth`` is 0 or 1 (or false and true), a number, or, for a judge of steps, the list of the wrong ones. Rows of one id
(one prompt, where there is none) are a group for judges that compare. A row that cannot be read is skipped, counted and
named; where more than a tenth are such, the file is not what it seems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mmrl
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, finite
from mmrl.core.media import Media
from mmrl.core.media.images import BadImageError, read_rgb
from mmrl.core.reward_contract import Span
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.calibration import BINS, Calibration, calibration
from mmrl.rewards.judging.json_answer import whole_numbers
from mmrl.rewards.judging.rubric import split_steps
from mmrl.rewards.judging.statistics import Confusions, auc, auc_interval, concordance, rows_of, spearman, wilson
from mmrl.rewards.scoring import RewardSet, Scores

MAX_BAD = 0.1
"""The share of rows that may be unreadable."""
_NAMED = 5
_BATCH = 64
_PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Case:
    """Something to judge, and the truth about it: yes or no, a number, or the wrong steps."""

    sample: Sample
    truth: bool | float | list[int]


@dataclass(frozen=True)
class Agreement:
    """What a judge said against the truth.

    ``kind``: ``binary``, ``number`` or ``steps``. ``figures``: name -> (value, low, high), NaN where there is no
    interval of 95 %. ``confusions``: of yes and no (in ``steps``, of single steps). ``disagreements``: the cases
    where it was furthest off. ``unjudged``: (case, why). ``skipped``: rows that could not be read. ``calibration``:
    scores against truth in bins; None of steps, and of true numbers outside [0, 1].
    """

    kind: str
    cases: int
    judged: int
    figures: dict[str, tuple[float, float, float]]
    confusions: Confusions | None = None
    disagreements: list[JsonObject] = field(default_factory=list)
    unjudged: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    calibration: Calibration | None = None


def measure(
    reward: Reward,
    truth: str,
    *,
    limit: int | None = None,
    threshold: float = 0.5,
    bins: int = BINS,
    device: str = "cpu",
    folder: Path | None = None,
) -> Agreement:
    """Let ``reward`` judge the cases of ``truth`` (a JSONL file, or a data set by name) and compare.

    ``threshold``: from which score on it says yes. ``bins``: of the calibration. ``folder``: where cache and
    transcripts go. Raises ``UserError``.
    """
    cases, skipped = read_cases(truth, limit)
    # No run waits here: failures are counted, and the deadline is for a batch, not for the whole file.
    patient = {
        "on_failure": "drop",
        "batch_size": reward.batch_size or _BATCH,
        "timeout": max(reward.timeout, _PATIENCE_S),
    }
    rewards = RewardSet([reward.model_copy(update=patient)], device, folder=folder)
    try:
        samples = [case.sample for case in cases]
        scores = rewards.score(samples, rows_of([sample.prompt.id for sample in samples]))
    finally:
        rewards.close()
    found = compare(cases, scores, rewards.labels[0], threshold, bins)
    return replace(found, skipped=skipped, seconds=scores.seconds[rewards.labels[0]])


def read_cases(truth: str, limit: int | None = None) -> tuple[list[Case], list[str]]:
    """The cases, at most ``limit``, and a line for each row that could not be read. Raises ``UserError``."""
    path = Path(truth)
    if not path.is_file():
        return _cases_of_data_set(truth, limit), []
    cases: list[Case] = []
    skipped: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--truth: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and (limit is None or len(cases) < limit):
            try:
                cases.append(_case(json.loads(line), len(cases), path.parent))
            except (ValueError, RecursionError) as error:
                skipped.append(f"line {number}: {error}")
    if len(skipped) > MAX_BAD * (len(cases) + len(skipped)) or not cases:
        named = "; ".join(skipped[:_NAMED]) or "it is empty"
        raise UserError(
            f"--truth: {len(skipped)} of {len(cases) + len(skipped)} rows of {path} cannot be read: {named}\n"
            '  Write a JSON object a line: {"prompt": "...", "response": "...", "truth": 1}'
        )
    return cases, skipped


def compare(cases: Sequence[Case], scores: Scores, label: str, threshold: float = 0.5, bins: int = BINS) -> Agreement:
    """The agreement of scores ``[B]`` with the truth of their cases."""
    values = scores.parts[label].tolist()
    kept = [i for i, value in enumerate(values) if not math.isnan(value)]
    reasons = {failure.sample: failure.reason for failure in scores.failures}
    ids = [case.sample.id for case in cases]
    unjudged = [(_name(cases[i]), reasons.get(ids[i], "no score")) for i in range(len(cases)) if i not in set(kept)]
    kinds = {type(case.truth) for case in cases}
    if kinds == {list}:
        found = _of_steps([cases[i] for i in kept], [scores.spans[label][i] or [] for i in kept])
    elif kinds == {bool}:
        found = _binary([cases[i] for i in kept], [values[i] for i in kept], threshold)
    elif list in kinds:
        raise UserError("--truth: some rows list wrong steps and others do not; write the same kind in every row")
    else:
        found = _of_numbers([cases[i] for i in kept], [values[i] for i in kept])
    if kinds != {list}:
        truth = [cases[i].truth for i in kept]
        found = _calibrated(found, [t for t in truth if not isinstance(t, list)], [values[i] for i in kept], bins)
    return replace(found, cases=len(cases), unjudged=unjudged)


def _calibrated(found: Agreement, truth: Sequence[float], values: Sequence[float], bins: int) -> Agreement:
    """With the calibration, where scores and true values are shares."""
    if not values or not all(0 <= float(value) <= 1 for value in (*values, *truth)):
        return found
    made = calibration(values, [float(value) for value in truth], bins)
    return replace(found, calibration=made, figures={**found.figures, "calibration error": made.error})


def _binary(cases: Sequence[Case], values: Sequence[float], threshold: float) -> Agreement:
    truth = [bool(case.truth) for case in cases]
    said = Confusions.of([value >= threshold for value in values], truth)
    positives = sum(truth)
    area = auc(values, truth)
    figures = {
        "accuracy": _proportion(said.both + said.neither, said.n),
        "kappa": (said.kappa, math.nan, math.nan),
        "auc": (area, *auc_interval(area, positives, len(truth) - positives)),
        "right ones found": _proportion(said.both, positives),
        "wrong ones found": _proportion(said.neither, len(truth) - positives),
    }
    off = sorted(range(len(cases)), key=lambda i: -abs(values[i] - truth[i]))
    shown = [_shown(cases[i], values[i]) for i in off if (values[i] >= threshold) != truth[i]]
    return Agreement("binary", 0, len(cases), figures, said, shown[:_NAMED])


def _of_numbers(cases: Sequence[Case], values: Sequence[float]) -> Agreement:
    truth = [float(case.truth) for case in cases if not isinstance(case.truth, list)]
    groups = [case.sample.prompt.id for case in cases]
    within, pairs_within = concordance(values, truth, groups)
    overall, pairs = concordance(values, truth, [0] * len(cases))
    figures = {
        "spearman": (spearman(values, truth), math.nan, math.nan),
        "order of pairs": (overall / pairs if pairs else math.nan, math.nan, math.nan),
        "order within a prompt": (within / pairs_within if pairs_within else math.nan, math.nan, math.nan),
        "mean absolute error": (
            math.fsum(abs(v - t) for v, t in zip(values, truth, strict=True)) / len(truth) if truth else math.nan,
            math.nan,
            math.nan,
        ),
    }
    off = sorted(range(len(cases)), key=lambda i: -abs(values[i] - truth[i]))
    return Agreement("number", 0, len(cases), figures, None, [_shown(cases[i], values[i]) for i in off[:_NAMED]])


def _of_steps(cases: Sequence[Case], spans: Sequence[Sequence[Span]]) -> Agreement:
    judged: list[bool] = []
    truth: list[bool] = []
    exact = 0
    shown = []
    for case, pieces in zip(cases, spans, strict=True):
        assert isinstance(case.truth, list)
        steps = split_steps(case.sample.text or "")
        marked = {piece.start for piece in pieces if piece.value <= -0.5}
        says = [step.start in marked for step in steps]
        is_so = [number in case.truth for number in range(1, len(steps) + 1)]
        judged += says
        truth += is_so
        exact += says == is_so
        if says != is_so:
            shown.append(_shown(case, [n for n, wrong in enumerate(says, 1) if wrong]))
    said = Confusions.of(judged, truth)
    wrong = said.both + said.truth_alone
    figures = {
        "accuracy": _proportion(said.both + said.neither, said.n),
        "kappa": (said.kappa, math.nan, math.nan),
        "whole responses": _proportion(exact, len(cases)),
        "wrong steps found": _proportion(said.both, wrong),
        "right steps spared": _proportion(said.neither, said.n - wrong),
    }
    return Agreement("steps", 0, len(cases), figures, said, shown[:_NAMED])


def _case(row: Json, index: int, folder: Path) -> Case:
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    text, response, meta = row.get("prompt", ""), row.get("response"), row.get("meta", {})
    if not isinstance(text, str) or not isinstance(response, str | None) or not isinstance(meta, dict):
        raise ValueError("prompt and response must be texts, meta an object")
    system, images = row.get("system"), row.get("images", [])
    if not isinstance(system, str | None) or not isinstance(images, list):
        raise ValueError("system must be a text, images a list of paths")
    image = None
    if row.get("image") is not None:
        try:
            image, _ = read_rgb(folder / str(row["image"]))
        except BadImageError as error:
            raise ValueError(f"{row['image']}: {error}") from None
    media = tuple(Media("image", str(folder / str(name))) for name in images)
    prompt = Prompt(str(row.get("id", text)), text, meta, media, system)
    return Case(Sample(prompt, SampleId(-1, index, 0, 0), image, text=response), _truth(row.get("truth")))


def _cases_of_data_set(name: str, limit: int | None) -> list[Case]:
    """Held-out prompts whose meta holds ``response`` and ``truth``."""
    try:
        prompts = mmrl.load("datasets", name if ":" in name else f"{name}:prompts")("heldout")
    except UserError as error:
        raise UserError(f"--truth: there is no file {name}, and as a data set: {error}") from None
    cases = []
    for i, prompt in enumerate(prompts[:limit]):
        try:
            truth, response = _truth(prompt.meta.get("truth")), prompt.meta.get("response")
        except ValueError as error:
            raise UserError(
                f"--truth: prompt {prompt.id!r} of the data set {name}: meta.{error}; a data set of cases has "
                "meta.truth, and meta.response where there is one; or give a JSONL file"
            ) from None
        cases.append(Case(Sample(prompt, SampleId(-1, i, 0, 0), text=response), truth))
    return cases


def _truth(value: Json) -> bool | float | list[int]:
    steps = whole_numbers(value)
    if steps is not None:
        return steps
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"truth is {value!r}; write 0 or 1, a number, or a list of wrong steps")


def _proportion(k: int, n: int) -> tuple[float, float, float]:
    return (k / n if n else math.nan, *wilson(k, n))


def _shown(case: Case, said: float | list[int]) -> JsonObject:
    return {"case": _name(case), "response": case.sample.text, "truth": case.truth, "said": said}


def _name(case: Case) -> str:
    return case.sample.prompt.text or case.sample.prompt.id


def as_json(agreement: Agreement) -> JsonObject:
    """Ready for JSON; NaN becomes null."""
    made = agreement.calibration
    return {
        **vars(agreement),
        "calibration": None
        if made is None
        else {
            "bins": [{name: finite(value) for name, value in vars(one).items()} for one in made.bins],
            "by_chance": finite(made.by_chance),
        },
        "confusions": vars(agreement.confusions) if agreement.confusions else None,
        "figures": {
            name: {"value": finite(value), "low": finite(low), "high": finite(high)}
            for name, (value, low, high) in agreement.figures.items()
        },
    }
