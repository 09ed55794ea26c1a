"""What to try next, by rules on a run's metrics. Each rule is a function; ``RULES`` has their order.

A rule says an edit of the recipe (``optim.lr=5e-5``) and why, with the numbers that it read. It changes nothing. The
first edits are the surest: what kept the run from learning, then what lets it learn more, then what measures better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mmrl.core.episode import MOSTLY
from mmrl.report.heldout import Change, label_in
from mmrl.report.recorded import RecordedRun

MOST = 3
"""Edits that are named."""
RECENT = 10
"""Steps at the beginning and at the end that are compared."""
NO_SPREAD, TRUNCATED, CLIPPED, DROPPED = 0.3, 0.2, 0.3, 0.1
"""Shares from which on a rule speaks: of groups without spread, cut responses, clipped ratios, samples without a
score."""
GAP = 0.01
"""Divergence of sampler and trainer in nats per token from which on their gap matters."""
RATIO = 1.0
"""Largest |ratio - 1| from which on updates are too large, where few ratios are counted as clipped."""
RIGHT, WRONG = 0.95, 0.02
"""Held-out success from which on prompts are too easy, and below which they are too hard."""
FEW_TAUGHT = 0.02
"""Share of the responses with a hint at which a policy that teaches itself learns nothing."""
ROSE = 3
"""Standard errors from which on the reward rose in training."""
WIDE = 0.05
"""Half of an interval that cannot tell small changes."""


@dataclass(frozen=True)
class Advice:
    """``edit``: settings as on the command line, or what else to do; ``why`` is a sentence."""

    edit: str
    why: str


@dataclass(frozen=True)
class Facts:
    """What rules read: the run, its held-out measure and how that changed. ``fallen``: the figure of a reward that
    training did not use, where it fell; ``alike``: the diversity left, where it is below its limit."""

    run: RecordedRun
    measure: str | None
    change: Change | None
    fallen: str | None = None
    alike: float | None = None

    @property
    def outcome(self) -> Literal["rose", "fell", "unclear", "unknown"]:
        """``rose``, ``fell`` and ``unclear`` as training wants it: a reward with a negative weight should fall."""
        if self.change is None:
            return "unknown"
        weight = self.run.trained.get(label_in(self.measure or "") or "", 1.0)
        verdict = self.change.verdict
        if weight >= 0 or verdict == "unclear":
            return verdict
        return "fell" if verdict == "rose" else "rose"

    def mean(self, key: str) -> float | None:
        """A metric of training, mean over the last steps; None where it was not recorded."""
        values = [value for _, value in self.run.column(key) if value is not None]
        return statistics.fmean(values[-RECENT:]) if values else None

    def above(self, key: str, limit: float) -> float | None:
        """That mean over the last steps, where it is above ``limit``."""
        found = self.mean(key)
        return found if found is not None and found > limit else None

    def number(self, key: str) -> float | None:
        """A setting that is a number."""
        found = self.run.setting(key)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None

    def times(self, key: str, factor: float) -> str:
        """The edit that multiplies a setting."""
        value = (self.number(key) or 0.0) * factor
        whole = isinstance(self.run.setting(key), int)
        return f"{key}={round(value)}" if whole else f"{key}={value:.3g}" if value < 100 else f"{key}={value:g}"

    @property
    def trained_more(self) -> float | None:
        """How much the training reward rose from the first steps to the last, in standard errors; None of few steps."""
        values = [value for _, value in self.run.column("reward/mean") if value is not None]
        if len(values) < 2 * RECENT:
            return None
        first, last = values[:RECENT], values[-RECENT:]
        error = ((statistics.variance(first) + statistics.variance(last)) / RECENT) ** 0.5
        return (statistics.fmean(last) - statistics.fmean(first)) / error if error else None


def advice(facts: Facts) -> list[Advice]:
    """At most ``MOST`` edits, of different settings."""
    found: dict[str, Advice] = {}
    for rule in RULES if facts.run.metrics else ():
        for one in rule(facts):
            found.setdefault(one.edit.partition("=")[0], one)
    return list(found.values())[:MOST]


def no_evaluation(facts: Facts) -> Iterator[Advice]:
    if not facts.run.heldout:
        yield Advice("eval.every=10", "Without evaluations on held-out prompts nothing says whether the run learns.")


def rewards_failed(facts: Facts) -> Iterator[Advice]:
    dropped = facts.mean("reward/dropped")
    samples = (facts.number("train.prompts_per_step") or 0) * (facts.number("train.group_size") or 0)
    if dropped and samples and dropped / samples > DROPPED:
        yield Advice(
            "mend the reward", f"{dropped / samples:.0%} of the samples had no score; failures.jsonl says why."
        )


def over_optimised(facts: Facts) -> Iterator[Advice]:
    if facts.fallen is None and facts.alike is None:
        return
    why = "Samples became alike" if facts.fallen is None else "A reward that training did not use fell"
    kept = facts.number("algorithm.kl_coef")
    if kept is None:
        yield from _slower(facts, f"{why}; a smaller learning rate stays nearer to the base model.")
    else:
        edit = facts.times("algorithm.kl_coef", 4) if kept else "algorithm.kl_coef=0.01"
        yield Advice(edit, f"{why}; a larger pull to the base model keeps the policy near it.")


def stop_before_it_falls(facts: Facts) -> Iterator[Advice]:
    if facts.fallen is not None and facts.run.setting("eval.early_stopping") is None:
        yield Advice(
            f"eval.early_stopping={{metric: {facts.fallen}, patience: 2}}",
            "The run ends when the reward that training does not use ceases to rise, and keeps the weights of its "
            "best.",
        )


def fell(facts: Facts) -> Iterator[Advice]:
    if facts.outcome == "fell":
        yield from _slower(facts, "The held-out measure got worse; updates may be too large.")


def stop_at_the_best(facts: Facts) -> Iterator[Advice]:
    """An evaluation between was better than the last by more than half an interval."""
    key, change = facts.measure, facts.change
    if key is None or change is None or facts.run.setting("eval.early_stopping") is not None:
        return
    rows = [row for row in facts.run.heldout if row.get(key) is not None]
    best = max(rows, key=lambda row: row[key])
    wide = change.half if change.known else 0.0
    if best is rows[-1] or best[key] - rows[-1][key] <= wide or (facts.outcome == "rose" and not wide):
        return
    yield Advice(
        f"eval.early_stopping={{metric: {key}, patience: 2}}",
        f"The measure was best after step {best['step']}; this keeps those weights and ends the run.",
    )


def too_easy(facts: Facts) -> Iterator[Advice]:
    if facts.change is not None and _is_success(facts) and facts.change.before >= RIGHT:
        yield Advice("harder prompts (data.train)", f"{facts.change.before:.0%} were right before training.")


def too_hard(facts: Facts) -> Iterator[Advice]:
    if facts.change is not None and _is_success(facts) and facts.change.after <= WRONG:
        yield Advice(
            "easier prompts (data.train), or first SFT (algorithm.type: sft)",
            f"{facts.change.after:.0%} were right after training: a model that is never right gets no reward to learn "
            "from.",
        )


def episodes_cut(facts: Facts) -> Iterator[Advice]:
    share = facts.above("episode/cut", TRUNCATED)
    if share is not None:
        yield Advice(
            facts.times("environment.max_tokens", 4),
            f"{share:.0%} of the episodes ended because what the environment said, or the next turn, did not fit.",
        )


def turns_without_action(facts: Facts) -> Iterator[Advice]:
    share = facts.above("episode/turns_without_action", MOSTLY)
    if share is not None:
        yield Advice(
            "other words for the actions (environment.options), or first SFT (algorithm.type: sft)",
            f"{share:.0%} of the turns were no action that the environment takes: the model does not write its words.",
        )


def groups_without_spread(facts: Facts) -> Iterator[Advice]:
    share = facts.above("advantage/zero_std_groups", NO_SPREAD)
    if share is None or facts.run.setting("teacher") or facts.run.setting("algorithm.type") == "sdpo":
        return  # they teach without a spread
    why = f"In {share:.0%} of the groups all samples had the same reward, so they taught nothing"
    if facts.run.setting("algorithm.dynamic_sampling") is False:
        yield Advice("algorithm.dynamic_sampling=true", f"{why}; this draws other prompts in their place.")
    else:
        yield Advice(facts.times("train.group_size", 2), f"{why}; in larger groups samples differ more often.")


def no_hints(facts: Facts) -> Iterator[Advice]:
    share = facts.mean("self_teacher/taught")
    if share is None or share > FEW_TAUGHT:
        return
    why = f"{share:.0%} of the responses had a hint, and the others did not train"
    if (facts.mean("self_teacher/too_long") or 0) > share:
        yield Advice(facts.times("algorithm.max_prompt_tokens", 2), f"{why}: prompts with their hints were too long.")
    else:
        said = "no other response of their prompt was right (algorithm.success), and no reward gave feedback on them"
        yield Advice(facts.times("train.group_size", 2), f"{why}: {said}.")


def hotter(facts: Facts) -> Iterator[Advice]:
    """Samples that are too much alike to differ in reward, where they can be made to vary more."""
    heat = facts.number("sampling.temperature")
    if facts.above("advantage/zero_std_groups", NO_SPREAD) is not None and heat is not None and heat < 1:
        yield Advice("sampling.temperature=1.0", f"At temperature {heat:g} the samples of a group are too much alike.")


def truncated(facts: Facts) -> Iterator[Advice]:
    share = facts.above("text/truncated", TRUNCATED)
    if share is not None:
        edit = facts.times("sampling.max_new_tokens", 2)
        yield Advice(edit, f"{share:.0%} of the responses were cut at the length limit.")


def clipped(facts: Facts) -> Iterator[Advice]:
    share = facts.above("policy/clip_fraction", CLIPPED)
    apart = facts.above("policy/ratio_max_dev", RATIO)
    if share is not None:
        yield from _slower(facts, f"{share:.0%} of the ratios were outside the clip range, where nothing is learned.")
    elif apart is not None:
        yield from _slower(facts, f"Within a step ratios moved away from 1 by up to {apart:.2g}.")


def sampler_apart(facts: Facts) -> Iterator[Advice]:
    gap = facts.above("mismatch/kl_k3", GAP)
    if gap is not None and facts.run.setting("rollout.importance") not in ("token", "sequence"):
        yield Advice(
            "rollout.importance=token",
            f"The engine's probabilities differ from the trainer's by {gap:.2g} nats a token; importance weights "
            "correct it.",
        )


def only_training_rose(facts: Facts) -> Iterator[Advice]:
    if facts.outcome in ("unclear", "fell") and (facts.trained_more or 0) >= ROSE:
        yield Advice(
            "more prompts (data.train)",
            "The reward rose in training and not on held-out prompts: they are too few, or too different.",
        )


def too_slow(facts: Facts) -> Iterator[Advice]:
    """Nothing moved, though groups differ and nothing is clipped."""
    limits = {"advantage/zero_std_groups": NO_SPREAD, "policy/clip_fraction": CLIPPED, "policy/ratio_max_dev": RATIO}
    if facts.outcome != "unclear" or (facts.trained_more or 0) >= ROSE:
        return
    if any(facts.above(key, limit) is not None for key, limit in limits.items()):
        return
    if len(facts.run.metrics) < 2 * RECENT:
        yield from _longer(facts, f"A run of {len(facts.run.metrics)} steps is short.")
    elif facts.number("optim.lr") is not None:
        yield Advice(
            facts.times("optim.lr", 3), "The reward is flat, though samples of a group differ: updates are small."
        )


def still_rising(facts: Facts) -> Iterator[Advice]:
    """The last evaluation is the best, and the second half of the run brought a fifth of the rise or more."""
    key, change = facts.measure, facts.change
    if key is None or change is None or facts.outcome != "rose" or facts.fallen is not None:
        return
    values = [row[key] for row in facts.run.heldout if row.get(key) is not None]
    middle = values[len(values) // 2]
    if len(values) >= 3 and abs(values[-1] - middle) >= abs(change.value) / 5 and middle != max(values):
        yield from _longer(facts, "The measure was still rising at the end.")


def wide(facts: Facts) -> Iterator[Advice]:
    if facts.change is None or facts.outcome != "unclear" or not _is_success(facts):
        return
    if facts.change.half > WIDE and facts.number("eval.samples") is not None:
        yield Advice(
            facts.times("eval.samples", 4),
            f"A change below {facts.change.half:.2f} cannot be seen; this makes the interval half as wide.",
        )


def no_other_reward(facts: Facts) -> Iterator[Advice]:
    if facts.outcome == "rose" and not facts.run.watches_others:
        yield Advice(
            "eval.rewards=[{name: ...}]",
            "A reward that training does not use would show over-optimisation (docs/reward_hacking.md).",
        )


RULES: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    no_evaluation,
    rewards_failed,
    episodes_cut,
    turns_without_action,
    over_optimised,
    stop_before_it_falls,
    fell,
    too_easy,
    too_hard,
    groups_without_spread,
    no_hints,
    hotter,
    truncated,
    clipped,
    sampler_apart,
    stop_at_the_best,
    only_training_rose,
    too_slow,
    still_rising,
    wide,
    no_other_reward,
)


def _slower(facts: Facts, why: str) -> Iterator[Advice]:
    if facts.number("optim.lr") is not None:
        yield Advice(facts.times("optim.lr", 1 / 3), why)


def _longer(facts: Facts, why: str) -> Iterator[Advice]:
    """Twice the limit that ended the run; nothing where something else ended it."""
    if facts.run.ended is not None and facts.run.ended.how != "finished":
        return
    steps, limit = facts.number("train.steps"), facts.number("train.max_cpu_seconds")
    spent = facts.run.metrics[-1].get("perf/cpu_seconds")
    if limit and spent and spent >= limit:
        yield Advice(facts.times("train.max_cpu_seconds", 2), f"{why} The limit of CPU seconds ended the run.")
    elif steps:
        yield Advice(facts.times("train.steps", 2), why)


def _is_success(facts: Facts) -> bool:
    """Whether the measure is a share of right samples."""
    return (facts.measure or "").rpartition("/")[2] in ("success", "correct", "accuracy")
