"""Stepwise-Flow-GRPO: gains and their advantages in float64, the loss of steps, and what a run has scored."""

import math

import pytest
import torch

from mmrl.algorithms.objective import Scored
from mmrl.algorithms.stepwise_flow_grpo import StepwiseFlowGRPO, StepwiseFlowGRPOSettings, gain_advantages
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.planner.plan import plan
from mmrl.planner.render import _arithmetic
from mmrl.rollout.rounds import sample_and_score
from mmrl.step.batch import Groups
from tests.support.training_loop import SMALL, make, step


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


BEFORE = f64([[0.1, 0.3], [0.2, 0.1], [0.0, 0.4], [0.5, 0.6], [0.5, 0.6], [0.5, 0.6]])
REWARDS, GROUPS = f64([0.9, 0.4, 0.7, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
GAINS = f64([[0.2, 0.6], [-0.1, 0.3], [0.4, 0.3]])


@pytest.mark.parametrize("centre", ["joint", "step"])
@pytest.mark.parametrize("std", ["group", "none", "batch"])
def test_gains_become_advantages(centre, std):
    found = gain_advantages(BEFORE, REWARDS, GROUPS, std, centre)
    centred = GAINS - (GAINS.mean() if centre == "joint" else GAINS.mean(0))
    flat = torch.zeros(3, 2).double() if centre == "step" else f64([[0.1, 0.4]] * 3) - 0.25
    size = {"group": centred.std(correction=0), "batch": torch.cat([centred, flat]).std(correction=0)}.get(std)
    expected = centred if size is None else centred / (size + 1e-4)
    torch.testing.assert_close(found.values[:3], expected.float())
    assert not found.values[3:].any(), "samples that gain the same have no advantage, whatever the steps gain"
    assert (found.groups, found.zero_std_groups) == (2, 1)
    assert found.metrics["advantage/first_gain"] == pytest.approx((0.2 + 0.1 + 0.4 + 3 * 0.1) / 6)


def test_a_sample_with_a_prediction_that_was_not_scored_is_left_out():
    before = BEFORE.clone()
    before[1, 1] = math.nan
    found = gain_advantages(before, REWARDS, GROUPS, "group", "step")
    assert found.valid.tolist() == [True, False, True, True, True, True]
    assert not found.values[1].any()
    left = GAINS[[0, 2]] - GAINS[[0, 2]].mean(0)
    torch.testing.assert_close(found.values[[0, 2]], (left / (left.std(correction=0) + 1e-4)).float())
    scored = Scored(REWARDS, GROUPS, step_rewards=before)
    objective = StepwiseFlowGRPO(StepwiseFlowGRPOSettings(centre="step"))
    assert torch.equal(objective.advantages(scored).values, found.values)


def test_each_step_has_its_own_advantage_in_the_loss():
    objective = StepwiseFlowGRPO(StepwiseFlowGRPOSettings(kl_coef=0, clip_range=0.1))
    a, ratio = f64([[1.0, -2.0], [9.0, 0.5]]), f64([[1.05, 0.8], [1.2, 1.0]])
    log_probs = ratio.log().requires_grad_()
    old = {"log_probs": torch.zeros(2, 2).double(), "advantages": a, "weights": torch.ones(2).double()}
    loss = objective.loss({"log_probs": log_probs}, old, 4.0)
    expected = -(1.05 * 1.0) + 2.0 * 0.9 - 5.0 * 1.1 - 0.5
    assert loss.value.item() == pytest.approx(expected / 4)
    loss.value.backward()
    torch.testing.assert_close(log_probs.grad, f64([[-1.05, 0.0], [0.0, -0.5]]) / 4)


REWARD = """
import mmrl

@mmrl.reward(inputs=("tensor",))
def bright(samples, *, context):
    return [float(s.tensor.mean()) for s in samples]

@mmrl.reward(inputs=("tensor",), per="group")
def ranked(samples, *, context):
    assert len({s.id.sample for s in samples}) == len(samples) == 4
    best = sorted(float(s.tensor.mean()) for s in samples)
    return [float(best.index(float(s.tensor.mean()))) for s in samples]
"""


@pytest.mark.slow
def test_what_is_predicted_before_each_recorded_step_is_scored(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    file = tmp_path / "mine.py"
    rewards = f"rewards=[{{name: '{file}:bright', weight: 2.0}}, {{name: '{file}:ranked', weight: 0}}]"
    run = make("algorithm={type: stepwise_flow_grpo, centre: step}", rewards, "sampling.batch_size=3")
    slots = run.controller.slots(0, run.prompts, 2, run.rollout.cost)
    found = sample_and_score(run, slots, 0, Clock(torch.device("cpu")))
    steps = Groups.of_round(found, 4).steps
    assert steps.shape == (8, 2)
    n = 0
    for rows in found.micro_batches:
        assert rows.predicted is None, "it is decoded, and let go"
        features = run.pipeline.batch_features(rows.slots)
        for k, i in enumerate(rows.actions.tolist()):
            schedule = run.pipeline.adapter.schedule(4)
            x = rows.states[:, k]
            with torch.no_grad():
                v = run.pipeline.velocity(x, schedule.timesteps[i].expand(len(x)), features)
            rows.clean = x - schedule.sigmas[i].item() * v
            images = run.pipeline.images(rows)
            torch.testing.assert_close(steps[n : n + len(rows), k], 2.0 * images.flatten(1).mean(1).double())
        n += len(rows)
    ranked = make("algorithm={type: stepwise_flow_grpo}", f"rewards=[{{name: '{file}:ranked'}}]")
    row, _ = step(ranked)
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["advantage/last_gain"] > 0


def test_a_plan_counts_the_predictions_that_are_scored():
    made = plan(load_recipe(["shapes-lora"], [*SMALL, "algorithm={type: stepwise_flow_grpo}"]))
    assert made.counts.predicted == 16
    assert "  scoring: 8 samples, and 16 results predicted before recorded steps" in _arithmetic(made)


STEPWISE = "algorithm={type: stepwise_flow_grpo"
TWO = "rewards=[{name: shapes}, {name: 'colour:brightness'}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{STEPWISE}, advantage_aggregation: each}}", TWO], "set it to sum, or algorithm.type to flow_grpo"),
        ([f"{STEPWISE}}}", "midway={step: 2, group_size: 8}"], "remove midway, or set algorithm.type"),
        ([f"{STEPWISE}}}", "rewards=[{name: shapes, normalize: group}]"], r"rewards\[0\].normalize: .* set it to none"),
        ([f"{STEPWISE}, trained_steps: 3}}"], "2 steps carry noise and can be trained; set it to 2"),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-lora"], [*SMALL, *overrides])
