"""Whether a run learned, in words, and what to try next."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch

from mmrl.algorithms.dpo import DPO, DPOSettings
from mmrl.algorithms.objective import Loss
from mmrl.app.trainer import Outcome
from mmrl.config.loader import load_recipe
from mmrl.core.trajectory import Prompt, Slot
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir
from mmrl.report.advice import MOST, RULES, Advice
from mmrl.report.heldout import Change, change, level, number, read_samples
from mmrl.report.html import write_report
from mmrl.report.verdict import judge_run
from mmrl.runtime.start import finish
from mmrl.step.batch import MicroBatch
from mmrl.training.per_sample import Records, gathered, of_records
from tests.support.verdict import FLAT, accuracy, made, right


def prompts_of(values):
    """Figures of an evaluation with one sample of each prompt."""
    return {str(i): (float(value), 1.0) for i, value in enumerate(values)}


# ---- the interval


def test_the_interval_is_that_of_a_paired_comparison():
    draw = np.random.default_rng(1)
    easy = draw.normal(size=200)
    before, after = easy + draw.normal(scale=0.3, size=200), easy + 0.1 + draw.normal(scale=0.3, size=200)
    found = change(prompts_of(before), prompts_of(after))
    expected = scipy.stats.ttest_rel(after, before).confidence_interval()
    assert found.value == pytest.approx(after.mean() - before.mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    alone = scipy.stats.ttest_ind(after, before).confidence_interval()
    assert alone.high - alone.low > 2 * (found.high - found.low)  # what pairing is for


def test_samples_of_a_prompt_are_drawn_together():
    """Equal samples of a prompt say no more than one of them; unequal numbers of samples count by their weight."""
    draw = np.random.default_rng(2)
    values = draw.normal(size=(2, 50))
    single = [prompts_of(of) for of in values]
    eight = [{k: (8 * v, 8.0) for k, (v, _) in of.items()} for of in single]
    a, b = change(*single), change(*eight)
    assert (b.low, b.high) == pytest.approx((a.low, a.high))
    assert level({"a": (2.0, 4.0), "b": (1.0, 1.0)}).value == pytest.approx(3 / 5)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draw, held = np.random.default_rng(3), 0
    for _ in range(100):
        before, after = draw.random(60) < 0.4, draw.random(60) < 0.6
        found = change(
            {str(i): (v, 1.0) for i, v in enumerate(before)}, {str(i): (v, 1.0) for i, v in enumerate(after)}
        )
        held += found.low <= 0.2 <= found.high
    assert 88 <= held <= 100


@pytest.mark.parametrize(("changed", "verdict"), [(0, "unclear"), (5, "unclear"), (6, "rose")])
def test_a_few_prompts_that_changed_say_nothing(changed, verdict):
    before, after = right(0.5), right(0.5 + changed / 64)
    found = change(prompts_of(before), prompts_of(after))
    assert (found.changed, found.verdict) == (changed, verdict)


def test_only_prompts_of_both_evaluations_count():
    found = change({"a": (1.0, 1.0), "b": (0.0, 1.0)}, {"b": (1.0, 1.0), "c": (1.0, 1.0)})
    assert (found.count, found.before, found.after) == (1, 0.0, 1.0)
    assert change({"a": (1.0, 1.0)}, {"b": (1.0, 1.0)}) is None


def test_numbers_have_the_digits_that_their_interval_needs():
    assert [number(0.43219, near) for near in (0.2, 0.04, 0.004)] == ["0.43", "0.43", "0.432"]
    assert (number(-0.001, 0.1), number(123.4, 20), number(5e-7, 1e-7)) == ("0.00", "123", "5e-7")


# ---- the words


def test_a_rise_is_said_with_its_interval(tmp_path):
    judged = judge_run(made(tmp_path / "run", accuracy(0.25, 0.5, 0.75)))
    assert judged.outcome == "rose"
    assert judged.measure == "reward/number/correct"
    (said,) = judged.sentences
    assert said.startswith("Held-out accuracy rose from 0.25 to 0.75: +0.50, 95 % interval 0.3")
    assert said.endswith(", 64 held-out samples.")
    assert "Nothing independent was measured" in judged.remark
    assert "Held-out accuracy rose" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("evaluations", "outcome", "said"),
    [
        (accuracy(0.75, 0.25), "fell", "fell from 0.75 to 0.25: -0.50, 95 % interval -0.6"),
        (
            accuracy(0.5, 0.53),
            "unclear",
            "no significant change, from 0.50 to 0.53; the reward of only 2",
        ),
        (accuracy(0.5, 0.5), "unclear", "the reward of none of 64 prompts changed"),
        (accuracy(0.5), "unknown", "was 0.50 before training; there is no second evaluation"),
        ({}, "unknown", "Whether it learned is not known: there is no held-out evaluation yet."),
    ],
)
def test_other_ends_are_said_plainly(tmp_path, evaluations, outcome, said):
    judged = judge_run(made(tmp_path / "run", evaluations))
    assert judged.outcome == outcome
    assert said in judged.sentences[0]


def test_chance_is_said_where_the_interval_contains_0(tmp_path):
    alike = {0: {"reward/number": right(0.5)}, 10: {"reward/number": right(0.5)[::-1]}}
    judged = judge_run(made(tmp_path / "run", alike))
    assert judged.outcome == "unclear"
    assert "no significant change, from 0.50 to 0.50, +0.00, 95 % interval -0.2" in judged.sentences[0]


def test_an_older_run_has_no_interval(tmp_path):
    run = made(tmp_path / "run", accuracy(0.25, 0.75))
    RunDir(run).heldout_samples.unlink()
    judged = judge_run(run)
    assert judged.outcome == "unknown"
    assert "went from 0.25 to 0.75: +0.50. There is no interval" in judged.sentences[0]
    assert "Held-out accuracy went" in write_report(run).read_text()


def test_a_last_evaluation_without_a_score_is_named(tmp_path):
    run = made(tmp_path / "run", accuracy(0.25, 0.75))
    with MetricsLog(RunDir(run).heldout) as log:
        log.write(20, {"reward/number": math.nan, "reward/number/correct": math.nan, "samples": 64, "dropped": 64})
    assert "after step 10, the last with a score" in judge_run(run).sentences[0]


def test_a_reward_with_a_negative_weight_should_fall(tmp_path):
    rewards = [{"name": "answer:number", "label": None, "weight": -1.0}]
    judged = judge_run(made(tmp_path / "run", accuracy(0.75, 0.25), changes={"rewards": rewards}))
    assert judged.outcome == "rose"
    assert judged.sentences[0].endswith("Lower is better: its weight is negative.")


@pytest.mark.parametrize(
    ("shares", "outcome", "said"),
    [
        ((0.2, 0.6), "rose", "Other (not trained on) rose from 0.20 to 0.59: +0.39"),
        ((0.5, 0.5), "rose", "Other (not trained on): no significant change"),
        ((0.6, 0.2), "hacked", "the reward is over-optimised (docs/reward_hacking.md)."),
    ],
)
def test_a_reward_that_training_does_not_use_is_said_beside(tmp_path, shares, outcome, said):
    evaluations = accuracy(0.25, 0.75)
    for step, share in zip(evaluations, shares, strict=True):
        evaluations[step]["reward/other"] = right(share)
    judged = judge_run(made(tmp_path / "run", evaluations))
    assert judged.outcome == outcome
    assert said in judged.sentences[1]
    assert judged.remark == ""


def test_samples_that_became_alike_are_named(tmp_path):
    judged = judge_run(made(tmp_path / "run", accuracy(0.25, 0.75), guards={"guard/diversity_share": 0.4}))
    assert judged.sentences[1].startswith("Samples became alike: their diversity is 40% of the base model's")
    assert judged.advice[0].edit == "algorithm.kl_coef=0.01"


def test_offline_runs_lead_with_what_they_measure(tmp_path):
    pairs = {"dpo/accuracy": [0.0] * 64, "dpo/margin": [0.0] * 64}
    later = {"dpo/accuracy": right(0.9), "dpo/margin": [v - 0.5 for v in right(0.9)]}
    judged = judge_run(made(tmp_path / "pairs", {0: pairs, 10: later}, changes={"rewards": []}))
    assert judged.sentences[0].startswith("Held-out dpo/accuracy rose from 0.50 to 0.91")  # a tie counts half
    both = {step: {**of, **accuracy(0.25, 0.75)[step]} for step, of in ((0, pairs), (10, later))}
    judged = judge_run(made(tmp_path / "sampled", both, changes={"rewards": []}))
    assert judged.measure == "reward/number/correct"
    assert judged.sentences[1] == "Training did not use this reward (number)."


def test_the_metric_of_early_stopping_is_the_measure(tmp_path):
    evaluations = accuracy(0.25, 0.75)
    for step, share in zip(evaluations, (0.6, 0.2), strict=True):
        evaluations[step]["reward/other"] = right(share)
    stopping = {"eval.early_stopping": {"metric": "reward/other", "patience": 2}}
    judged = judge_run(made(tmp_path / "run", evaluations, changes=stopping))
    assert judged.sentences[0].startswith("Held-out other fell from 0.59 to 0.20")
    assert judged.sentences[1:] == [
        "Training did not use this reward (other).",
        judged.sentences[2],
    ]
    assert judged.sentences[2].startswith("Accuracy of number (trained on) rose from 0.25 to 0.75")


def test_train_ends_with_the_same_words_in_80_columns(tmp_path, capsys):
    run = made(tmp_path / "run", accuracy(0.25, 0.5, 0.75))
    finish(RunDir(run), Outcome(True, 30, 30, 12.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("done: 30 steps")
    assert " ".join(lines[:-1]) == judge_run(run).sentences[0]
    assert max(map(len, lines[:-1])) <= 80
    assert len(lines) <= 3


# ---- what to try next


def risen(step):
    return 0.2 + step / 60


CASES = {
    "no_evaluation": ({}, {}, {}, "eval.every=10"),
    "rewards_failed": (accuracy(0.5, 0.5), {"reward/dropped": 20.0}, {}, "mend the reward"),
    "fell": (accuracy(0.75, 0.25), {}, {}, "optim.lr=0.0001"),
    "too_easy": (accuracy(0.97, 0.97), {}, {}, "harder prompts (data.train)"),
    "too_hard": (accuracy(0.0, 0.0), {}, {}, "easier prompts (data.train), or first SFT (algorithm.type: sft)"),
    "groups_without_spread": (
        accuracy(0.5, 0.5),
        {"advantage/zero_std_groups": 0.6},
        {},
        "algorithm.dynamic_sampling=true",
    ),
    "episodes_cut": (
        accuracy(0.5, 0.5),
        {"episode/cut": 0.5},
        {"environment": {"name": "revise", "max_tokens": 64}},
        "environment.max_tokens=256",
    ),
    "turns_without_action": (
        accuracy(0.5, 0.5),
        {"episode/turns_without_action": 0.9},
        {},
        "other words for the actions (environment.options), or first SFT (algorithm.type: sft)",
    ),
    "larger_groups": (
        accuracy(0.5, 0.5),
        {"advantage/zero_std_groups": 0.6},
        {"algorithm.dynamic_sampling": True},
        "train.group_size=16",
    ),
    "hotter": (
        accuracy(0.5, 0.5),
        {"advantage/zero_std_groups": 0.6},
        {"sampling.temperature": 0.5},
        "sampling.temperature=1.0",
    ),
    "truncated": (accuracy(0.5, 0.5), {"text/truncated": 0.5}, {}, "sampling.max_new_tokens=80"),
    "clipped": (accuracy(0.5, 0.5), {"policy/clip_fraction": 0.5}, {}, "optim.lr=0.0001"),
    "ratios": (accuracy(0.5, 0.5), {"policy/ratio_max_dev": 4.0}, {}, "optim.lr=0.0001"),
    "sampler_apart": (accuracy(0.5, 0.5), {"mismatch/kl_k3": 0.05}, {}, "rollout.importance=token"),
    "stop_at_the_best": (
        accuracy(0.25, 0.9, 0.5),
        {},
        {},
        "eval.early_stopping={metric: reward/number/correct, patience: 2}",
    ),
    "only_training_rose": (accuracy(0.5, 0.5), {"reward/mean": risen}, {}, "more prompts (data.train)"),
    "too_slow": (accuracy(0.5, 0.5), {}, {}, "optim.lr=0.0009"),
    "still_rising": (accuracy(0.25, 0.5, 0.75), {}, {}, "train.steps=60"),
    "limit_of_time": (
        accuracy(0.25, 0.5, 0.75),
        {"perf/cpu_seconds": lambda step: step * 25.0},
        {},
        "train.max_cpu_seconds=1200",
    ),
    "no_other_reward": (accuracy(0.25, 0.75), {}, {}, "eval.rewards=[{name: ...}]"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rule_says_its_edit(tmp_path, name):
    evaluations, row, changes, edit = CASES[name]
    said = judge_run(made(tmp_path / "run", evaluations, FLAT | row, changes)).advice
    assert edit in [one.edit for one in said]
    assert len(said) <= MOST
    assert all(one.why.endswith(".") for one in said)


def test_a_wide_interval_asks_for_more_samples(tmp_path):
    alike = {0: {"reward/number/correct": right(0.5), "reward/number": right(0.5)}}
    alike[10] = {key: of[::-1] for key, of in alike[0].items()}
    assert "eval.samples=256" in [one.edit for one in judge_run(made(tmp_path / "run", alike)).advice]


def test_over_optimisation_comes_first(tmp_path):
    evaluations = accuracy(0.25, 0.75)
    for step, share in zip(evaluations, (0.6, 0.2), strict=True):
        evaluations[step]["reward/other"] = right(share)
    said = judge_run(made(tmp_path / "run", evaluations, FLAT, {"algorithm.kl_coef": 0.01})).advice
    assert said[0].edit == "algorithm.kl_coef=0.04"
    assert said[1].edit == "eval.early_stopping={metric: reward/other, patience: 2}"


def test_a_run_without_fault_gets_no_edit_of_its_training(tmp_path):
    said = judge_run(made(tmp_path / "run", accuracy(0.25, 0.74, 0.75))).advice
    assert [one.edit for one in said] == ["eval.rewards=[{name: ...}]"]


def test_the_settings_that_rules_name_are_settings_of_recipes():
    edits = [edit for *_, edit in CASES.values() if "=" in edit and "..." not in edit]
    for edit in {
        edit.partition("=")[0]: edit for edit in [*edits, "algorithm.kl_coef=0.01", "eval.samples=512"]
    }.values():
        load_recipe(["sums-tool" if edit.startswith("environment") else "sums"], [edit])
    assert len(RULES) >= len({rule.__name__ for rule in RULES} & CASES.keys()) >= 13
    assert Advice("a=1", "b").edit == "a=1"


# ---- figures of single samples


def test_the_order_of_samples_does_not_depend_on_the_number_of_controllers():
    places, values = [(i, f"p{i}") for i in range(4)], {"a": [0.1, 0.2, 0.3, 0.4], "b": [1.0, 1.0, math.nan, 0.0]}
    alone = gathered([(places, values)], "reward/")
    shares = [(places[r::2], {name: of[r::2] for name, of in values.items()}) for r in range(2)]
    assert gathered(shares, "reward/").row() == alone.row()
    assert alone.row() == {
        "prompts": ["p0", "p1", "p2", "p3"],
        "values": {"reward/a": [0.1, 0.2, 0.3, 0.4], "reward/b": [1.0, 1.0, None, 0.0]},
    }
    lacking = gathered([shares[0], (places[1::2], {"a": [0.2, 0.4]})])
    assert [math.isnan(v) for v in lacking.values["b"]] == [False, True, True, True]


def pairs_of(objective):
    draw = torch.Generator().manual_seed(0)
    new = {name: torch.randn(4, generator=draw) for name in objective.needs}
    slots = [Slot(-1, i, 0, Prompt(f"p{i}", "")) for i in range(4)]
    micro_batch = MicroBatch(None, [0], [0, 1, 2, 3], {"weights": torch.ones(4)}, 4, 4)
    records = Records(objective)
    records.place(slots, torch.ones(4), torch.ones(4))
    whole = objective.loss(new, micro_batch.old, 1.0).sums
    records.add(slots, micro_batch, new, whole)
    return whole, of_records([records.of_controller()])


def test_records_have_the_figures_that_their_mean_is_made_of():
    whole, found = pairs_of(DPO(DPOSettings(type="dpo")))
    assert found.weights == [1.0] * 4
    assert set(found.values["dpo/accuracy"]) <= {0.0, 1.0}
    for name, of in found.values.items():
        assert sum(of) == pytest.approx(whole[name].item(), rel=1e-5)


def test_a_figure_of_a_whole_micro_batch_is_not_kept_per_record():
    class Spread(DPO):
        def loss(self, new, old, total):
            margins = new["chosen_log_probs"] - new["rejected_log_probs"]
            both = {"own/mean": margins.sum(), "own/spread": margins.std(correction=0) * len(margins)}
            return Loss(margins.sum(), both, {})

    _, found = pairs_of(Spread(DPOSettings(type="dpo")))
    assert list(found.values) == ["own/mean"]


def test_a_resumed_run_forgets_and_repeats_the_samples_of_its_evaluations(tmp_path):
    run = RunDir(made(tmp_path / "run", accuracy(0.25, 0.5, 0.75)))
    run.truncate_after(10)
    assert sorted(read_samples(run.path)) == [0, 10]
    run.evaluated(10, [{"prompts": ["p"], "values": {"reward/number": [1.0]}}])
    assert read_samples(run.path)[10]["reward/number"] == {"p": (1.0, 1.0)}  # of a repeated evaluation the last
    assert isinstance(change({"p": (0.0, 1.0)}, read_samples(run.path)[10]["reward/number"]), Change)
