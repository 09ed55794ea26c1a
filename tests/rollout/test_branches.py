"""Branches: samples of a group that share their beginning, and the credit of what they share."""

import io
from dataclasses import replace
from itertools import product

import pytest
import torch
from rich.console import Console

from mmrl.algorithms.advantages import group_advantages, leave_one_out
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.logging.metrics import describe
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.rollout.branches import shared_credit
from mmrl.rollout.collect import collect_batch
from mmrl.rollout.midway import chosen
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import backward, train_step
from tests.support.midway import AFTER, SMALL, run_of
from tests.support.midway_text import AT, LONGEST, make, responses, rounds, write

BRANCHED = ["midway.branches=2", "midway.group_size=5", "train.group_size=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("branches"))


# ---- the estimator, in a task small enough to add up all outcomes

REWARDS = torch.tensor([[0.3, 1.0, -0.5], [2.0, 0.1, 0.4]], dtype=torch.float64)
"""Of two beginnings with three rests each."""


def log_policy(parameters):
    """Log-probs of the beginnings ``[2]``, and of the rests behind each ``[2, 3]``."""
    return parameters[:2].log_softmax(0), parameters[2:].view(2, 3).log_softmax(1)


def expected_reward(parameters):
    beginning, rest = log_policy(parameters)
    return ((beginning.unsqueeze(1) + rest).exp() * REWARDS).sum()


def expected_gradient(parameters, credit, branches=2):
    """The exact mean of the estimate over all outcomes of two beginnings with ``branches`` branches each, of the loss
    that sums each row's advantage times its whole log-prob."""
    parameters = parameters.clone().requires_grad_()
    beginning, rest = log_policy(parameters)
    surrogate = torch.zeros((), dtype=torch.float64)
    for h in product(range(2), repeat=2):
        for s in product(range(3), repeat=2 * branches):
            rows = [(h[n // branches], s[n]) for n in range(2 * branches)]
            log_prob = sum(beginning[i] for i in h) + sum(rest[row] for row in rows)
            rewards = torch.stack([REWARDS[row] for row in rows])
            advantages = credit(rewards).double()
            estimate = torch.stack([beginning[i] + rest[i, k] for i, k in rows]) @ advantages / len(rows)
            surrogate = surrogate + log_prob.detach().exp() * estimate
    return torch.autograd.grad(surrogate, parameters)[0]


def plain(rewards):
    return group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), "none").values


def of_others(rewards):
    return shared_credit(plain(rewards), torch.ones(len(rewards), dtype=torch.bool), len(rewards), 2)


def test_the_expected_gradient_is_that_of_the_expected_reward():
    at = torch.tensor([0.2, -0.3, 0.5, 0.1, -0.4, 0.0, 0.7, -0.2], dtype=torch.float64)
    step = 1e-5 * torch.eye(len(at), dtype=torch.float64)
    true = torch.stack([(expected_reward(at + d) - expected_reward(at - d)) / 2e-5 for d in step])
    found = expected_gradient(at, of_others)
    torch.testing.assert_close(found, 3 / 4 * true, rtol=1e-5, atol=1e-7)  # (K - 1) / K, as GRPO without branches
    without = expected_gradient(at, plain)  # the group's mean has the branches of the same beginning in it
    torch.testing.assert_close(without[:2], 1 / 2 * true[:2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(without[2:], 3 / 4 * true[2:], rtol=1e-5, atol=1e-7)


def test_a_branch_is_compared_with_the_branches_of_other_beginnings():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 2.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    groups, valid = torch.arange(2).repeat_interleave(6), torch.ones(12, dtype=torch.bool)
    others = torch.cat([(g.sum() - g.view(-1, 2).sum(1)).repeat_interleave(2) / 4 for g in rewards.view(2, 6)])
    found = shared_credit(group_advantages(rewards, groups, "none").values, valid, 6, 2)
    torch.testing.assert_close(found, (rewards - others) * 5 / 6)
    torch.testing.assert_close(shared_credit(leave_one_out(rewards, groups).values, valid, 6, 2), rewards - others)
    one = group_advantages(rewards, groups, "none").values
    torch.testing.assert_close(shared_credit(one, valid, 6, 1), one)


def test_rows_without_a_reward_have_no_advantage_and_do_not_count():
    rewards = torch.tensor([1.0, float("nan"), 0.5, 0.2, 2.0, 0.0])
    of = group_advantages(rewards, torch.zeros(6, dtype=torch.long), "none")
    found = shared_credit(of.values, of.valid, 6, 2)
    assert found[1] == 0
    torch.testing.assert_close(found[0], torch.tensor((1.0 - 2.7 / 4) * 4 / 5))
    lone = torch.tensor([1.0, 0.0, *[float("nan")] * 4])
    of = group_advantages(lone, torch.zeros(6, dtype=torch.long), "none")
    torch.testing.assert_close(shared_credit(of.values, of.valid, 6, 2), of.values)


# ---- text


def test_branches_of_text_share_their_first_tokens(folder):
    made = make(folder, *BRANCHED, "midway.keep=best")
    first, again = rounds(made), rounds(made)
    assert first.measured is not None
    for whole in (first, again):
        found = [
            (
                whole.micro_batches[m].ids[i],
                responses(whole.micro_batches[m])[i],
                whole.micro_batches[m].padded("log_probs")[i],
            )
            for m, i in whole.places(0)
        ]
        differ = 0
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert other[0] == replace(one[0], sample=one[0].sample + 5)
            assert one[1][:AT] == other[1][:AT]
            n = min(AT, len(one[1]))
            assert torch.equal(one[2][:n], other[2][:n])
            differ += one[1] != other[1]
            assert len(one[1]) > AT or one[1] == other[1]
        assert differ >= 2
    assert [t.spoken() for t in first.micro_batches] == [t.spoken() for t in again.micro_batches]


def test_the_first_branch_is_the_sample_of_that_number(folder):
    made = make(folder, *BRANCHED)
    for part in rounds(made).micro_batches:
        kept = [i for i, name in enumerate(part.ids) if name.sample < 5]
        whole = made.pipeline.sample([part.slots[i] for i in kept], [part.ids[i] for i in kept], [], made.recipe.seed)
        assert responses(whole) == [responses(part)[i] for i in kept]


def test_a_beginning_is_trained_once_with_the_mean_of_its_branches(folder):
    """The gradient of a step against one computed by hand: each beginning once, with the mean of its advantages."""
    made = make(folder, *BRANCHED, "algorithm={type: dr_grpo, kl_coef: 0}")
    slots = made.controller.slots(0, made.prompts, 2, None)
    batch = collect_batch(made, slots, 0, Clock(torch.device("cpu")), StepMetrics())
    whole, size = [batch.micro_batches[m].rows([i]) for m, i in batch.places], len(batch.places)
    rewards = torch.stack([batch.rewards["vowels"]]).view(2, 3, 2)
    others = (rewards.sum((1, 2), keepdim=True) - rewards.sum(2, keepdim=True)) / 4
    torch.testing.assert_close(batch.advantages.double(), ((rewards - others) * 5 / 6).flatten(), rtol=1e-4, atol=1e-6)
    by_hand = torch.zeros(())
    for n in range(0, size, 2):
        mean = batch.advantages[n : n + 2].mean()
        for b, row in enumerate(whole[n : n + 2]):
            log_probs = made.pipeline.replay(row, [0], frozenset({"log_probs"}), made.policy.using)["log_probs"][0]
            by_hand = by_hand - batch.advantages[n + b] * log_probs[AT:].sum()
            if b == 0:
                by_hand = by_hand - 2 * mean * log_probs[:AT].sum()  # once for two rows of the mean over rows
    weights = list(made.policy.trainable.values())
    wanted = torch.autograd.grad(by_hand / (size * LONGEST), weights)
    total = made.objective.loss_denominator(batch.weights, batch.lengths)
    made.policy.module.zero_grad()
    backward(made, split_micro_batches(made, batch, list(range(size))), total, 0, first=True)
    for one, parameter in zip(wanted, weights, strict=True):
        torch.testing.assert_close(parameter.grad, one, rtol=1e-3, atol=1e-4 * one.abs().max().item())


@pytest.mark.parametrize(
    "changes", [[], ["train.updates_per_step=2"], ["algorithm={type: dapo, dynamic_sampling: true, max_attempts: 2}"]]
)
def test_a_step_trains_on_branches_of_text(folder, changes):
    row, failures = train_step(make(folder, *BRANCHED, *changes), 0, Clock(torch.device("cpu")))
    assert failures == []
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]
    assert row["midway/dropped"] >= 2 * 2
    assert row["midway/branch_std"] > 0
    assert row["optim/grad_norm"] > 0
    assert row["policy/first_ratio_max_dev"] <= 1e-5


# ---- pictures

PICTURES = ["midway={step: 2, group_size: 3, branches: 2, keep: best}"]


@pytest.mark.slow
@pytest.mark.parametrize("window", [AFTER, "sampling.window={size: 3, first: 1, last: 4}", "sampling.window=null"])
def test_branches_of_pictures_share_their_first_steps(window):
    made = run_of(*PICTURES, window, "algorithm.advantage_std=group")
    slots = made.controller.slots(0, made.prompts, 2, None)
    batch = collect_batch(made, slots, 0, Clock(torch.device("cpu")), StepMetrics())
    parts = [batch.micro_batches[m].rows([i]) for m, i in batch.places]
    for group in range(2):
        kept = [name.sample for name in batch.ids[4 * group : 4 * group + 4 : 2]]
        slots, ids = [parts[4 * group].slots[0]] * 3, [replace(parts[4 * group].ids[0], sample=k) for k in range(3)]
        begun = made.pipeline.begin(slots, ids, made.pipeline.noisy_steps(0), made.recipe.seed, 2)
        values = made.rewards.score(made.pipeline.samples(begun, made.rewards.inputs), [range(3)]).total
        assert kept == chosen(values, 2, "best")
    for one, other in zip(parts[::2], parts[1::2], strict=True):
        assert other.ids[0].sample == one.ids[0].sample + 3
        assert not torch.allclose(one.clean, other.clean, atol=1e-3)
        early = [n for n, action in enumerate(one.actions.tolist()) if action < 2]
        assert torch.equal(one.log_probs[0, early], other.log_probs[0, early])
        assert torch.equal(one.states[0, : len(early) + 1], other.states[0, : len(early) + 1])
        whole = made.pipeline.sample(one.slots, one.ids, one.actions.tolist(), made.recipe.seed)
        torch.testing.assert_close(one.clean, whole.clean, rtol=1e-4, atol=1e-4)
    rewards = batch.rewards["shapes"].view(2, 2, 2)
    a = batch.advantages.double().view(2, 2, 2)
    others = rewards.mean(2, keepdim=True).flip(1)
    scale = rewards.flatten(1).std(1, correction=0).view(2, 1, 1) + 1e-4
    torch.testing.assert_close(a, (rewards - others) * 3 / 4 / scale, rtol=1e-4, atol=1e-5)


def test_a_step_trains_on_branches_of_pictures():
    made = run_of(*PICTURES, "sampling.window={size: 2, first: 1, last: 4}", "train.updates_per_step=2")
    row, failures = train_step(made, 0, Clock(torch.device("cpu")))
    assert failures == []
    assert row["midway/branch_std"] > 0
    assert row["midway/dropped"] == 2
    assert row["optim/grad_norm"] > 0
    assert row["policy/first_ratio_max_dev"] <= 1e-5


# ---- refusals and the plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.group_size=5"], r"midway.branches: a group of 5 .* is not two or more .* set train.group_size to 4"),
        (["train.group_size=2"], r"midway.branches: a group of 2 .* set train.group_size to 4"),
        (["midway.group_size=2"], "3 samples of a group are continued .* and 2 are begun; set it to 3 or more"),
        (["algorithm={type: ppo}"], "midway.branches: .* ppo has no such advantages; set it to 1, or use grpo"),
        (["algorithm={type: capo}"], "midway.branches: .* capo has no such advantages"),
        (["sampling.top_k=1"], "midway.branches: sampling.top_k is 1"),
    ],
)
def test_branches_of_text_that_cannot_work_are_refused(folder, changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe([folder / "recipe.yaml"], [*BRANCHED, *changes])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["sampling.window={size: 2, first: 0, last: 4}"],
            r"no step after the first 2 carries noise in every training step \(sampling.window may end with step 1\), "
            "so .* equal; set midway.step to 1 or less, or sampling.window.first to 1 or more",
        ),
        (["sampling.window=null", "midway.step=4"], "the last step has none.*; set midway.step to 3 or less"),
    ],
)
def test_branches_without_noise_are_refused(changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(["shapes-lora"], [*SMALL, *PICTURES, *changes])


def test_an_objective_without_log_probs_refuses_branches():
    changes = [change for change in SMALL if "kl_coef" not in change]
    with pytest.raises(RecipeError, match="diffusion_nft has no such advantages; set it to 1, or use flow_grpo"):
        load_recipe(["shapes-nft"], [*changes, *PICTURES])


def test_the_plan_counts_what_branches_compute(folder):
    found = plan(load_recipe([folder / "recipe.yaml"], BRANCHED))
    assert found.counts.sample_steps == 2 * (5 * AT + 6 * (LONGEST - AT))
    said = io.StringIO()
    render(found, Console(file=said, width=400))
    assert "midway begins 10 samples, scores them after 4 of up to 14 tokens and continues 6 of them 2 times each" in (
        said.getvalue()
    )
