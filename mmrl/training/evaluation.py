"""Held-out evaluation: fixed prompts and noise, no exploration noise, optionally rewards that training does not use.

Several responses to one prompt have metrics of their own: pass@k, and the majority's answer (maj@k).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.algorithms.objective import ComparesBatch, compares_batch
from mmrl.config.evaluation_checks import label_of
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.grouping import grouped
from mmrl.core.randomness import seed_of
from mmrl.core.trajectory import Prompt, Rows, Sample, SampleId, Slot, text_rows
from mmrl.data.buckets import by_size
from mmrl.data.mixture import SOURCE, by_source, counts_of_sources, values_of_sources
from mmrl.logging.grids import write_samples
from mmrl.logging.metrics import MetricsLog, read_numbers
from mmrl.logging.progress import Progress
from mmrl.logging.rundir import RunDir
from mmrl.logging.texts import write_texts
from mmrl.placement import device_tasks
from mmrl.rewards.loading import NOBODY_VOTES
from mmrl.rewards.patience import one_line, too_many
from mmrl.rewards.scoring import Failure, RewardSet
from mmrl.rollout.collect import prompts_only
from mmrl.rollout.encoding import encode
from mmrl.rollout.kto_baseline import mismatched
from mmrl.step.batch import chunks, chunks_of_a_size
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.step_context import Chunk, SamplingSpec, StepContext
from mmrl.training import guards, per_sample
from mmrl.training.alarm import Alarm, with_more
from mmrl.training.guards import MOST, Measures
from mmrl.training.per_sample import PerSample

SEED = 20_261_121
"""The seed of all held-out noise. It does not depend on the run's seed, so that runs are compared with equal noise."""

FAILED = "failed/"
"""Prefix of a reward's label in heldout.jsonl for the number of samples that it could not score; absent if there are
none."""


@dataclass
class Made:
    """The samples of an evaluation, and the scores of each by ``label`` and ``label/part``."""

    samples: list[Sample] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    gaps: tuple[float, int] = (0.0, 0)
    """For texts: the sum of the tokens' log-probs minus those of the base model, and the number of tokens."""
    kept: list[PerSample] = field(default_factory=list)
    """The figures of each sample and of each given record, of all controllers."""
    alike: dict[str, float] = field(default_factory=dict)
    """The rewards and parts that gave all samples of all controllers one value, with that value."""


class Evaluator:
    """The held-out prompts of a run and the rewards measured on them; for an offline run the given texts.

    ``pulse``: entered as ``reward`` while rewards, which have deadlines of their own, are waited for.
    """

    def __init__(
        self,
        context: StepContext,
        prompts: Sequence[Prompt],
        pulse: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.run, self.prompts, self._pulse = context, prompts, pulse
        self.rewards = [context.rewards, RewardSet(context.recipe.eval.rewards, context.rewards.device)]
        self.rewards[1].can_read(context.recipe)
        if context.recipe.eval.maj_at and not any(rewards.votes for rewards in self.rewards):
            raise UserError(NOBODY_VOTES)
        self.each = context.recipe.eval.samples_per_prompt
        watched = [*context.recipe.rewards, *context.recipe.eval.rewards] if context.recipe.eval.rewards else []
        labels = [label_of(reward.name, reward.label) for reward in watched]
        self.guards = Measures(context.controller, len(prompts), labels)
        settings, untrained = context.recipe.eval.guards, self.rewards[1].labels
        sequential = settings.method == "sequential"
        self.alarm = Alarm(context.rewards.weights, untrained, settings.alpha, settings.follow) if sequential else None
        if sequential:
            self._check_independent()

    def score(self, samples: int) -> tuple[dict[str, float], Made, list[Failure]]:
        """Evaluate ``samples`` samples; returns the means, the samples, and those that could not be scored.

        Sample ``i`` is of prompt ``i mod n``; with ``eval.samples_per_prompt`` the samples of a prompt are consecutive.
        The noise is always the same. An unusable prompt is named and replaced, always with the same prompt. An offline
        run is measured on its first ``samples`` records with the objective's metrics, and samples only if the recipe
        has ``eval.rewards``.
        """
        if self.run.objective.kind != "offline":
            return self._score(self._slots(samples))
        slots, row, bad, records = self._compare(self._slots(min(samples, len(self.prompts))))
        made, failures = Made(), []
        if self.run.recipe.eval.rewards:
            rewards, made, failures = self._score(slots)
            row |= rewards
        made.kept.insert(0, records)
        count = self.run.controller.count
        row |= {"samples": count(len(slots)), "dropped": row.get("dropped", 0) + count(len(bad))}
        return row, made, [*bad, *failures]

    def _check_independent(self) -> None:
        """Raise ``UserError`` where samples that the alarm takes for independent are copies of others."""
        recipe, settings, count = self.run.recipe, self.run.recipe.eval, len(self.prompts)
        if recipe.sampling.type != "text":
            return
        temperature = settings.temperature if settings.temperature is not None else recipe.decoding.temperature
        most, key = (
            settings.guards.samples or settings.samples,
            "guards.samples" if settings.guards.samples else "samples",
        )
        if temperature == 0 and most > count and self.run.objective.kind != "offline":
            raise UserError(
                f"eval.{key}: at temperature 0 {most} responses to {count} held-out prompts repeat themselves, and the "
                f"alarm takes them for independent; set it to {count}, or eval.temperature above 0"
            )

    def alarmed(self, alarm: Alarm, step: int, samples: PerSample) -> tuple[dict[str, float], list[Failure]]:
        """What ``alarm`` says of an evaluation's ``samples``, which get the further ones that it asks for, and the
        failures of these. All controllers call it together."""
        settings, scores, failures = self.run.recipe.eval, samples.short(), list[Failure]()
        most = settings.guards.samples or 0
        if self.run.objective.kind == "offline":
            most = min(most, len(self.prompts))
        most = min(most, alarm.base_samples or most)
        if most > settings.samples and alarm.wants_more(scores):
            _, more, failures = self._score([slot for slot in self._slots(most) if slot.index >= settings.samples])
            samples.more = more.kept[-1]
            scores = with_more(scores, samples.more.short())
        return alarm.saw(step, scores), failures

    def draw_base(self) -> None:
        """Sample the base model for the guards on resume, before the checkpoint is loaded: its evaluation ran in an
        earlier process. Texts are compared by their likelihood instead. All controllers call it together."""
        recipe = self.run.recipe
        if recipe.shows == "text" or recipe.eval.every is None:
            return
        if self.run.objective.kind == "offline" and not recipe.eval.rewards:
            return
        self.guards.keep(self._make(self._slots(recipe.eval.samples, MOST))[0].samples)

    def _slots(self, samples: int, most: int | None = None) -> list[Slot]:
        """This controller's share of the evaluation's slots, or of the first ``most``: all slots of a prompt."""
        if samples % self.each:
            raise UserError(f"{samples} samples are not a multiple of eval.samples_per_prompt, {self.each}; change one")
        groups, count, controller = samples // self.each, len(self.prompts), self.run.controller
        mine = controller.share(groups)
        if groups > count >= controller.size:
            mine = [n for n in range(groups) if n % count % controller.size == controller.rank]
        prompts = {n: self.prompts[n % count] for n in mine}
        slots = [Slot(-1, n * self.each + k, 0, prompts[n]) for n in mine for k in range(self.each)]
        return [slot for slot in slots if most is None or slot.index < most]

    def _score(self, slots: list[Slot]) -> tuple[dict[str, float], Made, list[Failure]]:
        """Sample ``slots`` and score the samples with all rewards."""
        (whole, bad), gather = self._make(slots), self.run.controller.gather
        made = whole.samples
        groups = [*grouped((sample.prompt.id, i) for i, sample in enumerate(made)).values()]
        with torch.no_grad(), self._pulse("reward"):
            scores = [rewards.score(made, groups, step=-1) for rewards in self.rewards]
        parts = {name: values for s in scores for name, values in s.parts.items()}
        failures = [f for s in scores for f in s.failures]
        rows = [{k: v[i].item() for k, v in parts.items() if math.isfinite(v[i])} for i in range(len(slots))]
        mine = {name: values.tolist() for name, values in parts.items()}
        sources = by_source([sample.prompt for sample in made], self.run.recipe.data.labels)
        where = [(sample.id.slot, sample.prompt.id) for sample in made]
        gathered = gather((where, mine, values_of_sources(mine, sources)))
        whole.kept.append(per_sample.gathered([(places, values) for places, values, _ in gathered], "reward/"))
        everyone = [values | of_sources for _, values, of_sources in gathered]
        names = dict.fromkeys(name for one in everyone for name in one)  # a reward that failed has no parts
        row = {
            name if name.startswith(SOURCE) else f"reward/{name}": finite_mean(
                torch.tensor([v for one in everyone for v in one.get(name, ())], dtype=torch.float64)
            )
            for name in names
        }
        whole.alike = alike({name: [v for one in everyone for v in one.get(name, ())] for name in names})
        failed = Counter(f.reward for f in failures)
        counts = gather((len(slots), len({f.sample.slot for f in failures}), dict(failed)))
        row |= {"samples": sum(n for n, _, _ in counts), "dropped": sum(n for _, n, _ in counts)}
        row |= self._repeated(made, mine) | counts_of_sources(everyone)
        row |= {f"{FAILED}{label}": n for label, n in sum((Counter(of) for _, _, of in counts), Counter()).items()}
        whole.scores = rows
        return row, whole, [*bad, *failures]

    def _repeated(self, made: Sequence[Sample], values: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """``pass@k`` and ``maj@k`` of every reward, mean over the prompts of all controllers."""
        settings = self.run.recipe.eval
        if not settings.pass_at and not settings.maj_at:
            return {}
        answers = (
            {k: v for rewards in self.rewards for k, v in rewards.answers(made).items()} if settings.maj_at else {}
        )
        mine: dict[str, tuple[float, int]] = {}
        groups = list(chunks(list(range(len(made))), self.each))
        for label in [*self.rewards[0].labels, *self.rewards[1].labels]:
            if label not in values:  # no sample has a score
                continue
            right = values.get(f"{label}/correct", values[label])
            found = sums_at(groups, right, answers.get(label), settings.pass_at, settings.maj_at)
            mine |= {f"{name}/{label}": summed for name, summed in found.items()}
        everyone = self.run.controller.gather(mine)
        totals: dict[str, list[float]] = {}
        for name, (total, n) in (item for one in everyone for item in one.items()):
            so_far = totals.setdefault(name, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + total, so_far[1] + n
        return {name: total / n for name, (total, n) in totals.items()}

    def _compare(self, slots: list[Slot]) -> tuple[list[Slot], dict[str, float], list[Failure], PerSample]:
        """The usable slots, the objective's metrics with the evaluation's weights, as means over the records of
        ``slots`` (or their tokens), the failures of the other slots, and the figures of each record."""
        run, good, bad = self.run, list[Slot](), list[Failure]()
        prepared = dict[str, Tensor]()
        sums: defaultdict[str, float] = defaultdict(float)
        total, each = 0.0, per_sample.Records(run.objective)
        with (
            run.compute.devices.sampling_phase(run, run.policy.evaluated),
            torch.no_grad(),
            Progress(len(slots), "evaluate", "records") as progress,
        ):
            if compares_batch(run.objective):
                slots, bad, prepared = self._prepared(slots, run.objective)
            rows = {slot.index: n for n, slot in enumerate(slots)}  # the records of a mixture are ordered by source
            for source, chunk in self._by_source(slots):
                usable, keys, unusable = self._encode(chunk)
                good, bad = good + usable, bad + unusable
                batch = prompts_only(run, usable, keys)
                batch.prepared = {name: of[[rows[slot.index] for slot in usable]] for name, of in prepared.items()}
                total += run.objective.loss_denominator(batch.weights, batch.lengths)
                each.place(usable, batch.weights, batch.lengths)
                for micro_batch in split_micro_batches(run, batch, list(range(len(usable)))):
                    new = run.pipeline.compare(micro_batch.rows, run.objective.needs, run.policy.using)
                    found = run.objective.loss(new, micro_batch.old, 1.0).sums
                    each.add(usable, micro_batch, new, found)
                    for name, value in found.items():
                        sums[name] += value.item()
                        if source:
                            sums[f"{SOURCE}{source}/{name}"] += value.item()
                if source:
                    sums[f"{SOURCE}{source}/samples"] += len(usable)
                run.pipeline.features.release(keys)
                progress.advance(len(chunk))
        everyone = run.controller.gather((total, dict(sums), each.of_controller()))
        count = sum(n for n, _, _ in everyone)
        if not count:
            named = f"; of {bad[0].prompt!r}: {bad[0].reason}" if bad else ""
            raise UserError(f"data.heldout: none of its records can be used{named}")
        names = dict.fromkeys(name for _, sums, _ in everyone for name in sums)
        whole = {name: sum(sums.get(name, 0.0) for _, sums, _ in everyone) for name in names}
        return good, means_of_pairs(whole, count), bad, per_sample.of_records([own for *_, own in everyone])

    def _by_source(self, slots: list[Slot]) -> Iterator[tuple[str, list[Slot]]]:
        """The slots in micro-batches, each with its source (empty for a single data set)."""
        size = self.run.recipe.train.micro_batch_size
        sources = by_source([slot.prompt for slot in slots], self.run.recipe.data.labels)
        for source, of in sources.items() or [("", range(len(slots)))]:
            for chunk in chunks([slots[i] for i in of], size):
                yield source, chunk

    def _prepared(
        self, slots: list[Slot], objective: ComparesBatch
    ) -> tuple[list[Slot], list[Failure], dict[str, Tensor]]:
        """The usable slots, each with the response of a different prompt; the failures of the others; and the
        objective's statistics of all of them, ``[B]`` each."""
        run, good, bad = self.run, list[Slot](), list[Failure]()
        columns: defaultdict[str, list[Tensor]] = defaultdict(list)
        for chunk in chunks(slots, run.recipe.train.micro_batch_size):
            usable, keys, unusable = self._encode(chunk)
            good, bad = good + usable, bad + unusable
            run.pipeline.features.release(keys)
        good = mismatched(run, good, lambda place: self.prompts[place[0] // self.each % len(self.prompts)])
        for chunk in chunks(good, run.recipe.train.micro_batch_size):
            keys = run.pipeline.encode(chunk)
            batch = prompts_only(run, chunk, keys)
            new = run.pipeline.compare(batch.micro_batches[0], objective.prepares, run.policy.using)
            for name in objective.prepares:
                columns[name].append(new[name].cpu())
            run.pipeline.features.release(keys)
        whole = {name: torch.cat(of) if (of := columns[name]) else torch.zeros(0) for name in objective.prepares}
        return good, bad, objective.of_batch(whole, torch.ones(len(good)), run.controller.total)

    def _encode(self, slots: list[Slot]) -> tuple[list[Slot], list[str], list[Failure]]:
        """Encode the usable records. The others are not replaced, so that every evaluation uses the same records."""
        good, bad = list(slots), list[Failure]()
        while True:
            try:
                return good, self.run.pipeline.encode(good), bad
            except BadPromptError as error:
                wrong = [s for s in good if s.prompt.id == error.prompt]
                if not wrong:
                    raise
                good = [s for s in good if s.prompt.id != error.prompt]
                bad += [Failure(SampleId(-1, s.index, 0, 0), s.prompt.text, "prompt", error.reason) for s in wrong]

    def _other(self, slot: Slot, attempt: int) -> Slot:
        """The slot with a prompt in place of an unusable one, the same in every run."""
        n = seed_of(SEED, slot.index // self.each, attempt, "replacement") % len(self.prompts)
        return Slot(slot.step, slot.index, attempt, self.prompts[n])

    def _make(self, slots: list[Slot]) -> tuple[Made, list[Failure]]:
        """Sample with the settings and the weights of the evaluation. Returns the samples and the replaced prompts."""
        run, recipe = self.run, self.run.recipe
        inputs = self.rewards[0].inputs | self.rewards[1].inputs
        if recipe.shows != "text":
            inputs |= frozenset({recipe.shows})
        how = SamplingSpec([], run.policy.evaluated, SEED, inputs, evaluate=True)
        keys, order, bad = list[list[str]](), list[list[int]](), list[Failure]()

        def asked() -> Iterator[Chunk]:
            prompts = [slot.prompt for slot in slots]
            for index in chunks_of_a_size(prompts, recipe.sampling, recipe.sampled_at_once):
                usable, held, unusable = encode(run, [slots[n] for n in index], self._other)
                bad.extend(unusable)
                parts = by_size([slot.prompt for slot in usable], recipe.sampling)  # replaced ones may be of another
                for part in parts:
                    chunk = [usable[n] for n in part]
                    keys.append(held if len(parts) == 1 else run.pipeline.encode(chunk))
                    order.append([index[n] for n in part])
                    yield Chunk(chunk, [SampleId(-1, s.index, s.attempt, 0) for s in chunk])
                if len(parts) > 1:
                    run.pipeline.features.release(held)

        made, gaps = dict[int, Sample](), (0.0, 0)
        with (
            run.compute.devices.sampling_phase(run, how.weights),
            Progress(len(slots), "evaluate", "samples") as progress,
        ):
            for n, rows, samples in run.compute.devices.sample(run, asked(), how, Clock(run.compute.device)):
                made |= zip(order[n], samples, strict=True)
                total, tokens = self._gaps(rows)
                gaps = gaps[0] + total, gaps[1] + tokens
                run.pipeline.features.release(keys[n])
                progress.advance(len(samples))
        run.compute.devices.run_on_other_trainers(run, device_tasks.release)
        return Made([made[n] for n in sorted(made)], gaps=gaps), bad

    def _gaps(self, rows: Rows) -> tuple[float, int]:
        """See ``Made.gaps``; 0 and 0 if it is not available: for pictures, if an engine samples, if the model is
        sharded, or without a reference (full weights, or training that continues a saved adapter)."""
        run, train = self.run, self.run.recipe.train
        kept = run.policy.base_is_reference or "reference" in run.policy.copies
        beside = run.recipe.rollout.in_process and train.backend == "replicated" and train.width == 1
        if run.recipe.shows != "text" or not (kept and beside):
            return 0.0, 0
        drawn = text_rows(rows)
        longest = max(drawn.responses)
        size = max(1, min(train.micro_batch_size, (train.micro_batch_tokens or math.inf) // max(1, longest)))
        total, tokens = 0.0, 0
        with torch.no_grad(), run.policy.using(run.policy.evaluated):
            for index in chunks(list(range(len(drawn))), int(size)):
                part = drawn.rows(index)
                found = run.pipeline.replay(part, [], frozenset({"log_probs", "reference_log_probs"}), run.policy.using)
                gap = (found["log_probs"] - found["reference_log_probs"]).double() * part.padded("action_mask")
                total, tokens = total + gap.sum().item(), tokens + sum(part.written)
        return total, tokens


def means_of_pairs(sums: Mapping[str, float], count: float) -> dict[str, float]:
    """``sums`` over ``count`` pairs as means; sums of a mixture's source are divided by that source's pairs."""
    found = {}
    for name, value in sums.items():
        own = sums.get(f"{'/'.join(name.split('/')[:2])}/samples", 0.0) if name.startswith(SOURCE) else count
        found[name] = (
            value if name.startswith(SOURCE) and name.endswith("/samples") else value / own if own else math.nan
        )
    return found


def alike(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The rewards and parts that have one and the same value for all of two or more samples, with that value. A part is
    left out where the reward itself is there, and so are sources of a mixture."""
    mine = {name: given for name, given in values.items() if not name.startswith(SOURCE)}
    finite = {name: [v for v in given if math.isfinite(v)] for name, given in mine.items()}
    found = {name: given[0] for name, given in finite.items() if len(given) > 1 and len(set(given)) == 1}
    return {name: value for name, value in found.items() if "/" not in name or name.split("/")[0] not in found}


def constant(found: Mapping[str, float], samples: int) -> str:
    """A line that names what is constant (see ``alike``) and says what it means; empty where nothing is."""
    if not found:
        return ""
    said = ", ".join(f"{name} is {value:.4g}" for name, value in found.items())
    return (
        f"\nnote: {said} for all {samples} held-out samples: a reward or a part that is the same everywhere teaches "
        "nothing; read some samples beside what it looks for (its options, the answer's form)"
    )


def finite_mean(values: Tensor) -> float:
    return values[values.isfinite()].mean().item()


def summary(row: Mapping[str, float], failures: Sequence[Failure]) -> str:
    """A row of heldout.jsonl as a line for the terminal, with the reasons for missing values. ``failures``: of this
    controller."""
    said = []
    for key, value in row.items():
        if key in ("samples", "dropped") or key.startswith((FAILED, SOURCE, guards.PREFIX)):
            continue
        name = key.removeprefix("reward/")
        said.append(f"{name} {value:.3f}" if math.isfinite(value) else f"{name} -")
        if bad := row.get(f"{FAILED}{name}"):
            why = Counter(f.reason for f in failures if f.reward == name).most_common(1)
            reason = one_line(why[0][0]) if why else "on other controllers"
            said[-1] += f" ({bad:g} of {row['samples']:g} samples failed: {reason})"
    return "  ".join(said)


def unmeasured(row: Mapping[str, float], metric: str, most: float) -> bool:
    """Whether the reward of ``metric`` failed for more than the share ``most`` of the samples of ``row``."""
    label = metric.removeprefix("reward/").partition("/")[0]
    return too_many(int(row.get(f"{FAILED}{label}", 0)), int(row["samples"]), most)


def measure(
    context: StepContext, heldout: Evaluator, samples: int, directory: RunDir, step: int, log: MetricsLog
) -> tuple[dict[str, float], str]:
    """Evaluate after ``step`` steps: write a row of heldout.jsonl and a grid of samples. Returns the row, and a summary
    for the terminal."""
    row, made, failures = heldout.score(samples)
    said = "" if read_numbers(directory.heldout) else constant(made.alike, int(row["samples"]))
    if context.controller.count(len(made.samples)):
        row |= guarded(heldout.guards, row, made, base=step == 0)
        if heldout.alarm is not None:
            found, more = heldout.alarmed(heldout.alarm, step, made.kept[-1])
            row, failures = row | found, [*failures, *more]
    for f in failures:
        directory.failure(step, "heldout", f.prompt, f.reason, reward=f.reward, sample=vars(f.sample))
    if context.controller.leads:
        directory.evaluated(step, [kept.row() for kept in made.kept])
    log.write(step, row)
    shown, scores = made.samples[: context.recipe.eval.grid], made.scores[: context.recipe.eval.grid]
    if shown and context.recipe.shows != "text":
        images = [made for s in shown if (made := s.image or s.video) is not None]
        log.picture(step, "samples", write_samples(directory, step, images, [s.prompt.text for s in shown], scores))
    elif shown:
        write_texts(directory, step, shown, scores)
    watched = [label_of(reward.name, reward.label) for reward in context.recipe.eval.rewards]
    return row, "  ".join(filter(None, (summary(row, failures), guards.summary(row, watched)))) + said


def guarded(measures: Measures, row: Mapping[str, float], made: Made, *, base: bool) -> dict[str, float]:
    """The guards' metrics of an evaluation, whose ``row`` has its rewards; ``base``: it is that of the base model."""
    if base:
        measures.keep(made.samples)
    found = measures.of(made.samples, made.scores, made.gaps)
    both = {**row, **found}
    if base:
        measures.base = both
    return found | measures.beside(both)


def pass_at(n: int, right: int, k: int) -> float:
    """The probability that at least one of ``k`` samples is correct, estimated from ``n`` samples, ``right`` of them
    correct.

    Unbiased: ``1 - C(n - right, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"{right} right ones of {n} samples, and {k} of them")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at(answers: Sequence[str | None], right: Sequence[float], k: int) -> float:
    """How often the majority answer is correct, mean over disjoint sets of ``k`` consecutive samples; samples left over
    at the end are not used.

    ``answers``: of each sample, or None, which is no vote. ``right``: 1 if the answer is correct, else 0. Ties count as
    their mean, the expectation of drawing one of the answers. Without any answer the result is 0.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"{k} of {len(answers)} samples")
    starts = range(0, len(answers) - k + 1, k)
    return sum(_majority(answers[i : i + k], right[i : i + k]) for i in starts) / len(starts)


def _majority(answers: Sequence[str | None], right: Sequence[float]) -> float:
    votes = grouped((answer, value) for answer, value in zip(answers, right, strict=True) if answer is not None)
    most = max(map(len, votes.values()), default=0)
    best = [sum(values) / len(values) for values in votes.values() if len(values) == most]
    return sum(best) / len(best) if best else 0.0


def sums_at(
    groups: Sequence[Sequence[int]],
    right: Sequence[float],
    answers: Sequence[str | None] | None,
    pass_ks: Sequence[int],
    maj_ks: Sequence[int],
) -> dict[str, tuple[float, int]]:
    """``pass@k`` and ``maj@k`` summed over ``groups`` (the samples of a prompt, in order), and the number of groups.

    ``right`` is NaN for a sample without a score, which does not count; a group with fewer than ``k`` scored samples is
    left out. ``answers``: None if the reward extracts none.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        scored = [i for i in group if not math.isnan(right[i])]
        count = sum(right[i] >= 1 for i in scored)
        for k in pass_ks:
            if k <= len(scored):
                found[f"pass@{k}"].append(pass_at(len(scored), count, k))
        for k in maj_ks:
            if answers is not None and k <= len(scored):
                correct = [float(right[i] >= 1) for i in scored]
                found[f"maj@{k}"].append(majority_at([answers[i] for i in scored], correct, k))
    return {name: (sum(values), len(values)) for name, values in found.items()}
