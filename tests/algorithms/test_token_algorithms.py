"""Policy gradients over tokens against closed forms, float64 differences and the values of a public implementation.

Values marked "verl" were printed by the functions of verl's core_algos.py (commit 1dda039, 2026-08-22) in float64 on
the batch below. verl whitens with the sample's standard deviation, this package with the population's.
"""

import dataclasses
import itertools
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mmrl.algorithms.advantages import flat_groups, group_advantages, group_statistics, leave_one_out
from mmrl.algorithms.dapo import overlong_punishment
from mmrl.algorithms.dr_grpo import DrGRPO, DrGRPOSettings
from mmrl.algorithms.mismatch import Correction, mismatch, summed_weights
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import clipped_surrogate, divergence, k3
from mmrl.algorithms.ppo import clipped_value_loss
from mmrl.algorithms.returns import gae, reward_to_go, whiten
from mmrl.config.algorithm_settings import with_length_limit
from mmrl.config.algorithms import find_algorithm
from mmrl.config.rollout import Rejection, Rollout
from mmrl.config.sampling import TextSampling
from mmrl.core.errors import UserError

TOKEN_TYPES = [
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "drpo",
    "ppo",
    "capo",
    "raft",
]
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


MASK = f64([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
NEW = f64([[-1.0, -0.5, -2.0], [-0.3, -1.2, 0], [-0.7, 0, 0], [-1.5, -0.1, -0.9]])
OLD = f64([[-1.1, -0.8, -1.6], [-0.35, -1.0, 0], [-0.6, 0, 0], [-1.2, -0.4, -0.9]])
REFERENCE = f64([[-1.3, -0.4, -1.5], [-0.5, -1.1, 0], [-0.9, 0, 0], [-1.0, -0.3, -1.2]])
VALUES = f64([[0.1, 0.2, 0.4], [0.0, -0.3, 0], [0.5, 0, 0], [0.2, 0.1, 0.3]])
REWARDS = f64([1.0, 0.0, 0.25, 1.5])
GROUPS = torch.tensor([0, 0, 1, 1])
ADVANTAGES = f64([1.0, -1.0, -0.5, 2.0])
LENGTHS = MASK.sum(1)


def objective(name, **settings):
    found = find_algorithm(name)
    return found.objective(with_length_limit(found.settings(**settings), 8))


def scored(**fields):
    every = {
        "rewards": REWARDS, "groups": GROUPS, "mask": MASK, "log_probs": OLD, "reference_log_probs": REFERENCE,
        "values": VALUES,
    }  # fmt: skip
    return Scored(**{**every, **fields})


def batch(**fields):
    """Everything an objective may read in its loss, on the batch above: ``new`` and ``old``."""
    new = {"log_probs": NEW, "reference_log_probs": REFERENCE, "entropy": NEW.abs(), "values": VALUES + 0.1}
    old = {
        "log_probs": OLD, "advantages": ADVANTAGES, "weights": torch.ones(4, dtype=torch.float64), "mask": MASK,
        "values": VALUES, "returns": REWARDS.unsqueeze(1).expand(4, 3),
    }  # fmt: skip
    return {k: fields.get(k, v) for k, v in new.items()}, old | {k: v for k, v in fields.items() if k not in new}


def run(algorithm, *, total=None, **fields):
    new, old = batch(**fields)
    if total is None:
        total = algorithm.loss_denominator(old["weights"], old["mask"].sum(1))
    return algorithm.loss(new, old, total), total


def gradient(algorithm, **fields):
    x = fields.pop("log_probs", NEW).clone().requires_grad_()
    run(algorithm, log_probs=x, **fields)[0].value.backward()
    return x.grad


# Advantages.


def test_rloo_advantages_are_verls():
    a = objective("rloo", kl_coef=0).advantages(scored())
    assert a.values.tolist() == pytest.approx([1.0, -1.0, -1.25, 1.25])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
@hypothesis_settings(max_examples=30, deadline=None)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards):
    a = leave_one_out(f64(rewards), torch.zeros(len(rewards), dtype=torch.long)).values
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert a.tolist() == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)], abs=1e-5)


def test_leave_one_out_counts_the_valid_alone():
    a = leave_one_out(f64([1.0, math.nan, 0.0, 5.0, math.nan]), torch.tensor([0, 0, 0, 1, 1]))
    assert a.values.tolist() == [1.0, 0.0, -1.0, 0.0, 0.0]
    assert a.valid.tolist() == [True, False, True, True, False]
    assert a.zero_std_groups == 1


def test_rloo_takes_the_divergence_of_the_whole_response_from_its_reward():
    a = objective("rloo", kl_coef=0.1).advantages(scored())
    kl = ((OLD - REFERENCE) * MASK).sum(1)
    expected = leave_one_out(REWARDS - 0.1 * kl, GROUPS).values
    assert torch.allclose(a.values, expected)
    assert a.metrics["advantage/kl"] == pytest.approx(float(kl.sum() / MASK.sum()))
    assert objective("rloo", kl_coef=0.1).prepares == {"log_probs", "reference_log_probs"}
    assert objective("rloo", kl_coef=0).prepares == frozenset()


SAMPLE_TO_POPULATION = math.sqrt(9 / 8)


def test_reinforce_pp_advantages_are_verls():
    a = objective("reinforce_pp", kl_coef=0.1).advantages(scored())
    verl = [
        0.27128898, 0.30289547, 0.2396825, -1.39595301, -1.37224815, 0, -1.00877359, 0, 0, 1.01404134, 0.98243486,
        0.96663162,
    ]  # fmt: skip
    assert a.values.flatten().tolist() == pytest.approx([v * SAMPLE_TO_POPULATION for v in verl], abs=1e-6)


def test_reinforce_pp_baseline_advantages_are_verls():
    a = objective("reinforce_pp", variant="baseline").advantages(scored())
    verl = [0.54965656] * 3 + [-1.24921946] * 2 + [0, -1.47407896, 0, 0] + [0.77451607] * 3
    assert a.values.flatten().tolist() == pytest.approx([v * SAMPLE_TO_POPULATION for v in verl], abs=1e-6)


def test_ppo_returns_and_advantages_are_verls():
    a = objective("ppo", kl_coef=0.1).advantages(scored())
    returns = [0.958525, 1.0195, 1.01, -0.0395, -0.01, 0, 0.22, 0, 0, 1.375425, 1.4215, 1.47]
    whitened = [
        0.35516086, 0.28590915, -0.08585851, -1.23842699, -0.65371365, 0, -1.66520561, 0, 0, 0.9175149, 1.1767319,
        0.90788798,
    ]  # fmt: skip
    assert a.returns is not None
    assert a.returns.flatten().tolist() == pytest.approx(returns, abs=1e-6)
    assert a.values.flatten().tolist() == pytest.approx([v * SAMPLE_TO_POPULATION for v in whitened], abs=1e-6)


def in_shards(work, n):
    """``[work(0, all_sum), ..., work(n - 1, all_sum)]``, run at once and meeting at every sum."""
    meeting, posted, results = threading.Barrier(n, timeout=60), [None] * n, [None] * n

    def controller(rank):
        def all_sum(tensor):
            posted[rank] = tensor
            meeting.wait()
            total = torch.stack(posted).sum(0)
            meeting.wait()  # nobody posts the next before all have read this
            return total

        results[rank] = work(rank, all_sum)

    threads = [threading.Thread(target=controller, args=(rank,)) for rank in range(n)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


def test_whitening_is_over_the_tokens_of_all_controllers():
    values = 1e3 + torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = f64([[1, 1, 1, 0, 0]] * 3 + [[0] * 5] + [[1, 1, 1, 1, 1]] * 3)
    cuts = [slice(0, 3), slice(3, 4), slice(4, 7)]  # the second shard has nothing to add
    parts = in_shards(lambda n, all_sum: whiten(values[cuts[n]], mask[cuts[n]], all_sum), 3)
    torch.testing.assert_close(torch.cat(parts), whiten(values, mask), rtol=0, atol=1e-12)
    assert not torch.allclose(whiten(values[cuts[0]], mask[cuts[0]]), parts[0], atol=0.01)


SHARDED = {
    "ppo": {"kl_coef": 0.1}, "reinforce_pp": {"kl_coef": 0.1}, "grpo": {"advantage_std": "batch"},
    "dapo": {"advantage_std": "batch"}, "gspo": {"advantage_std": "batch"}, "cispo": {"advantage_std": "batch"},
    "flow_grpo": {"advantage_std": "batch"}, "diffusion_nft": {"advantage_std": "batch"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*SHARDED, "reinforce_pp baseline"])
def test_two_controllers_have_the_advantages_of_one(name):
    name, _, variant = name.partition(" ")
    algorithm = objective(name, **({"variant": variant} if variant else SHARDED[name]))
    one = algorithm.advantages(scored()).values

    def shard(rank, all_sum):
        mine = slice(2 * rank, 2 * rank + 2)
        columns = {"rewards": REWARDS, "mask": MASK, "log_probs": OLD, "reference_log_probs": REFERENCE}
        cut = {key: value[mine] for key, value in {**columns, "values": VALUES}.items()}
        own = scored(groups=torch.tensor([0, 0]), **cut)
        return algorithm.advantages(dataclasses.replace(own, all_sum=all_sum)).values, algorithm.advantages(own).values

    shards = in_shards(shard, 2)
    torch.testing.assert_close(torch.cat([together for together, _ in shards]), one, rtol=0, atol=1e-6)
    assert not torch.allclose(torch.cat([apart for _, apart in shards]), one, atol=0.01)


def test_a_controller_without_a_valid_row_still_takes_part_in_the_sums():
    rewards = f64([1.0, 0.0, math.nan, math.nan])
    parts = in_shards(lambda n, s: group_advantages(rewards[2 * n :][:2], torch.tensor([0, 0]), "batch", s), 2)
    whole = group_advantages(rewards, GROUPS, "batch").values
    assert torch.equal(torch.cat([part.values for part in parts]), whole)


@given(st.integers(1, 6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
@hypothesis_settings(max_examples=40, deadline=None)
def test_gae_is_the_discounted_sum_of_td_errors(length, gamma, lam, seed):
    """Against the definition, on the tokens that count, wherever padding lies between them."""
    generator = torch.Generator().manual_seed(seed)
    r, v = (torch.randn(1, length, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(1, length, generator=generator) < 0.7).double()
    at = mask[0].nonzero().flatten().tolist()
    td = [r[0, t] + gamma * (v[0, at[i + 1]] if i + 1 < len(at) else 0.0) - v[0, t] for i, t in enumerate(at)]
    out = gae(r, v, mask, gamma, lam)
    for i, t in enumerate(at):
        expected = sum((gamma * lam) ** (j - i) * float(td[j]) for j in range(i, len(at)))
        assert float(out[0, t]) == pytest.approx(expected, abs=1e-9)
    assert float((out * (1 - mask)).abs().sum()) == 0


def test_reward_to_go_sums_what_comes():
    r = f64([[1.0, 2.0, 4.0, 9.0]])
    assert reward_to_go(r, f64([[1, 1, 1, 0]]), 0.5).tolist() == [[3.0, 4.0, 4.0, 0.0]]


def test_whitening_ignores_what_is_outside_and_survives_equal_values():
    out = whiten(f64([[1.0, 3.0, math.inf]]), f64([[1, 1, 0]]))
    assert out.tolist()[0] == pytest.approx([-1.0, 1.0, 0.0])
    assert whiten(f64([[2.0, 2.0]]), f64([[1, 1]])).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo", "capo", "grpo", "dapo", "rloo"])
def test_a_dropped_row_changes_no_other_rows_advantage(name):
    whole = objective(name).advantages(scored())
    more = scored(
        rewards=torch.cat([REWARDS, f64([math.nan])]),
        groups=torch.cat([GROUPS, torch.tensor([1])]),
        **{
            key: torch.cat([value, torch.full((1, 3), 7.0, dtype=torch.float64)])
            for key, value in {"log_probs": OLD, "reference_log_probs": REFERENCE, "values": VALUES}.items()
        },
        mask=torch.cat([MASK, torch.ones(1, 3, dtype=torch.float64)]),
    )
    dropped = objective(name).advantages(more)
    assert torch.allclose(dropped.values[:4], whole.values)
    assert not dropped.values[4].any()
    assert dropped.valid.tolist() == [True] * 4 + [False]


def test_rewards_of_tokens_count_where_the_algorithm_says_so():
    token_rewards = f64([[0, -1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    for name in TOKEN_TYPES:
        algorithm = objective(name)
        changed = not torch.equal(
            algorithm.advantages(scored(token_rewards=token_rewards)).values, algorithm.advantages(scored()).values
        )
        section = find_algorithm(name).settings()
        assert changed == section.uses_token_rewards, name


def test_raft_keeps_the_best_of_each_group_and_nothing_of_equal_ones():
    rewards = f64([0.2, 0.9, 0.9, math.nan, 1.0, 1.0, -3.0, math.nan])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    a = objective("raft").advantages(scored(rewards=rewards, groups=groups))
    assert a.values.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]  # of equal ones the first; one sample alone is not best
    assert a.valid.tolist() == [value > 0 for value in a.values.tolist()]
    assert (a.groups, a.zero_std_groups) == (3, 2)
    two = objective("raft", keep=2).advantages(
        scored(rewards=f64([3, 1, 2, 1, 0, 4]), groups=torch.tensor([0] * 4 + [1] * 2))
    )
    assert two.values.tolist() == [1, 0, 1, 0, 1, 1]


def test_raft_is_sft_on_what_it_keeps():
    """Its value and gradient are those of the likelihood of the kept responses, 1 and 3, over their 5 tokens."""
    algorithm = objective("raft")
    a = algorithm.advantages(scored(rewards=f64([0.0, 1.0, 0.25, 1.5])))
    fields = {"advantages": a.values.double(), "weights": a.valid.double()}
    loss, total = run(algorithm, **fields)
    assert total == 5
    assert loss.value.item() == pytest.approx((0.3 + 1.2 + 1.5 + 0.1 + 0.9) / 5, rel=1e-12)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[1, :2] = expected[3] = -1 / 5
    assert torch.allclose(gradient(algorithm, **fields), expected, rtol=1e-12, atol=0)
    sft = find_algorithm("sft").objective(find_algorithm("sft").settings())
    new = {"completion_log_probs": (NEW * MASK).sum(1)}
    theirs = sft.loss(new, {"weights": fields["weights"]}, sft.loss_denominator(fields["weights"], LENGTHS))
    assert loss.value.item() == pytest.approx(theirs.value.item(), rel=1e-12)
    moved, _ = run(algorithm, **fields, log_probs=OLD)  # the ratio to what sampled has no part in it
    assert moved.value.item() == pytest.approx(-(OLD * MASK)[[1, 3]].sum().item() / 5, rel=1e-12)


def test_capo_tokens_earn_the_papers_rewards():
    """A right and a wrong answer, each with a right and a wrong step: 2, 1, 0, -1; mean 1/2, variance 5/4."""
    case = scored(
        rewards=f64([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        mask=torch.ones(2, 2, dtype=torch.float64),
        token_rewards=f64([[0, -1], [0, -1]]),
    )
    a = objective("capo").advantages(case)
    scale = math.sqrt(1.25) + 1e-4
    assert a.values.flatten().tolist() == pytest.approx([(x - 0.5) / scale for x in (2, 1, 0, -1)], rel=1e-6)
    assert a.metrics["advantage/wrong_step_fraction"] == 0.5


@given(st.integers(0, 10_000))
@hypothesis_settings(max_examples=20, deadline=None)
def test_capo_advantages_sum_to_zero_over_the_tokens_of_a_group(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(6, 4, generator=generator) < 0.8).double()
    penalties = -(torch.rand(6, 4, generator=generator) < 0.4).double()
    rewards = torch.randint(0, 2, (6,), generator=generator).double()
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    a = objective("capo").advantages(scored(rewards=rewards, groups=groups, mask=mask, token_rewards=penalties))
    for g in (0, 1):
        assert abs(float(a.values[groups == g].double().sum())) < 1e-5


def test_capo_counts_a_group_without_any_difference():
    a = objective("capo").advantages(scored(rewards=f64([1, 1, 0, 1]), token_rewards=None))
    assert (a.groups, a.zero_std_groups) == (2, 1)
    assert not a.values[:2].any()


def test_overlong_punishment_is_the_papers():
    """DAPO, sec. 3.4 and 4.1: limit 20480, of which the last 4096 are punished on a slope."""
    lengths = torch.tensor([1, 16384, 16385, 18432, 20480, 30000])
    expected = [0, 0, -1 / 4096, -0.5, -1, -1]
    assert overlong_punishment(lengths, 20480, 4096).tolist() == pytest.approx(expected)


def test_dapo_punishes_length_before_it_compares():
    mask = torch.tensor([[1.0] * 10, [1.0] * 5 + [0.0] * 5])
    same = scored(rewards=f64([1, 1]), groups=torch.tensor([0, 0]), mask=mask)
    a = objective("dapo", max_new_tokens=10).advantages(same)
    assert a.values.tolist() == pytest.approx([-1, 1], abs=1e-3)
    assert a.metrics["advantage/overlong_fraction"] == 0.5
    b = objective("dapo", max_new_tokens=10, overlong_buffer=0.0).advantages(same)
    assert b.zero_std_groups == 1
    assert flat_groups(same.rewards, same.groups).tolist() == [True]


def test_group_statistics_on_any_groups():
    stats = group_statistics(f64([1, 3, math.nan, 5]), torch.tensor([1, 1, 0, 1]), torch.tensor([2, 2, 2, 0]))
    assert stats.mean.tolist() == [5.0, 0.0, 2.0]
    assert stats.count.tolist() == [1.0, 0.0, 2.0]
    assert stats.flat.tolist() == [True, True, False]


# Losses.


@pytest.mark.parametrize(
    ("mode", "verl"),
    [
        ("token_mean", -0.75274521),
        ("seq_mean_token_mean", -0.41123904),
        ("seq_mean_token_sum", -1.69367671),
        ("seq_mean_token_sum_norm", -0.21170959),
    ],
)
def test_clipped_surrogate_aggregates_as_verl(mode, verl):
    loss, _ = run(objective("dapo", aggregation=mode, overlong_buffer=0.0))
    assert loss.value.item() == pytest.approx(verl, abs=1e-7)


def test_gspo_is_verls():
    algorithm = objective("gspo", clip_low=0.05, clip_high=0.06)
    assert run(algorithm)[0].value.item() == pytest.approx(-0.39375, abs=1e-8)
    verl = [-1 / 12] * 3 + [0] * 6 + [-1 / 6] * 3
    assert gradient(algorithm).flatten().tolist() == pytest.approx(verl, abs=1e-8)


def test_gmpo_is_verls():
    """Of ``compute_policy_loss_geo_mean`` of verl 0.9.1 (called in float64 with its own masked_sum and masked_mean)."""
    algorithm = objective("gmpo", clip_low=0.15, clip_high=0.25)
    loss = run(algorithm)[0]
    assert loss.value.item() == pytest.approx(-0.3866915567163661, rel=1e-7)
    verl = [-0.08195595, 0, -0.08195595, 0.11890368, 0, 0, 0.11310468, 0, 0, -0.16391191, 0, -0.16391191]
    assert gradient(algorithm).flatten().tolist() == pytest.approx(verl, abs=1e-7)
    assert loss.sums["policy/clip_fraction_high"].item() == pytest.approx(2 / 3)  # one token of three, in two responses
    assert loss.sums["policy/clip_fraction_low"].item() == pytest.approx(1 / 2)  # one of two


def test_gmpo_of_one_token_is_a_clipped_ratio_in_log_space():
    one, x = f64([[1.0]] * 4), f64([[0.6], [-0.6], [0.6], [-0.6]])
    algorithm = objective("gmpo")
    made = algorithm.surrogate(x, x, f64([[1.0], [1.0], [-1.0], [-1.0]]), one)
    assert made.loss.flatten().tolist() == pytest.approx(
        [-math.exp(0.4), -math.exp(-0.6), math.exp(0.6), math.exp(-0.4)]
    )


def test_cispo_is_verls():
    algorithm = objective("cispo", ratio_max=1.2)
    assert run(algorithm)[0].value.item() == pytest.approx(0.63263493, abs=1e-8)
    verl = [
        -0.12279677, -0.13333333, -0.07448001, 0.1168079, 0.09097008, 0, 0.05026875, 0, 0, -0.16462627, -0.26666667,
        -0.22222222,
    ]  # fmt: skip
    assert gradient(algorithm).flatten().tolist() == pytest.approx(verl, abs=1e-8)


def test_k3_is_verls_and_nothing_outside():
    verl = [
        0.04081822, 0.00517092, 0.14872127, 0.01873075, 0.00517092, 0, 0.01873075, 0, 0, 0.14872127, 0.01873075,
        0.04081822,
    ]  # fmt: skip
    assert k3(NEW, REFERENCE, MASK > 0).flatten().tolist() == pytest.approx(verl, abs=1e-8)


def test_clipped_values_are_verls():
    values = VALUES + f64([[0.3, -0.1, 0.05]])
    loss, _ = clipped_value_loss(values, VALUES, REWARDS.unsqueeze(1).expand(4, 3), 0.2)
    assert float((loss * MASK).sum() / MASK.sum()) == pytest.approx(0.38541667, abs=1e-8)


def test_value_clipping_holds_back_only_what_would_move_further():
    before, returns = f64([0.0, 0.0, 0.0]), f64([1.0, 1.0, -1.0])
    values = f64([0.5, 0.1, 0.5]).requires_grad_()
    loss, clipped = clipped_value_loss(values, before, returns, 0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 1.5])
    assert clipped.tolist() == [1.0, 0.0, 0.0]


def test_rloo_ratio_is_of_the_whole_response():
    ratio = ((NEW - OLD) * MASK).sum(1).exp()
    expected = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(0.8, 1.2)).mean()
    assert run(objective("rloo"))[0].value.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_gradient_at_ratio_one_is_reinforce(name):
    """Without a pull to the reference, every algorithm starts as ``-A`` times the aggregation's weight of the token."""
    algorithm = objective(name, **({"kl_coef": 0.0} if name == "grpo" else {}))
    weights = algorithm.aggregation.loss_weights(torch.ones(4, dtype=torch.float64), MASK)
    total = algorithm.loss_denominator(torch.ones(4), LENGTHS)
    expected = -ADVANTAGES.unsqueeze(1) * weights / total
    if name == "rloo":  # a response is one action: each of its tokens moves it whole
        expected = -ADVANTAGES.unsqueeze(1) * MASK / total
    assert torch.allclose(gradient(algorithm, log_probs=OLD), expected)


def test_dr_grpo_weighs_tokens_alike_whatever_the_length():
    one = gradient(objective("dr_grpo"), log_probs=OLD) / ADVANTAGES.unsqueeze(1)
    assert torch.allclose(one, -MASK / (4 * 8))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_clipping_takes_the_gradient_only_from_what_would_move_further(advantage):
    log_probs = OLD + torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
    grad = gradient(
        objective("dapo", overlong_buffer=0.0), log_probs=log_probs, advantages=torch.full((4,), advantage).double()
    )
    moves = [g != 0 for g in grad[0].tolist()]
    assert moves == ([False, True, True] if advantage > 0 else [True, True, False])


def test_asymmetric_clip_fractions_say_where_gradients_were_taken():
    log_probs = OLD + torch.tensor([0.3, 0.2, -0.3], dtype=torch.float64)  # 0.2: inside 1.28, outside 1.2
    loss, total = run(objective("dapo", overlong_buffer=0.0), log_probs=log_probs)
    # Rows 0 and 3 have positive advantages (first tokens above), row 1 and 2 negative and no third token.
    assert loss.sums["policy/clip_fraction_high"] / total == pytest.approx(2 / 9)
    assert loss.sums["policy/clip_fraction_low"] / total == 0
    low, total = run(objective("dapo", overlong_buffer=0.0), log_probs=log_probs, advantages=-ADVANTAGES)
    assert low.sums["policy/clip_fraction_low"] / total == pytest.approx(2 / 9)


# In rloo, gspo and gmpo a response has one loss, and nothing to choose.
AGGREGATED = [(n, {"aggregation": m}) for n in TOKEN_TYPES for m in MODES if n not in ("rloo", "gspo", "gmpo")]


@pytest.mark.parametrize(("name", "aggregation"), [*AGGREGATED, ("rloo", {}), ("gspo", {}), ("gmpo", {})])
def test_any_split_into_micro_batches_and_controllers_has_the_same_gradient(name, aggregation):
    """Padding of a slice is cut to its own longest response, rows are dropped and one is empty."""
    generator = torch.Generator().manual_seed(3)
    algorithm = objective(name, kl_coef=0.1, entropy_coef=0.01, **aggregation)
    lengths = torch.tensor([5, 2, 7, 1, 0, 3, 6, 4])
    mask = (torch.arange(7) < lengths.unsqueeze(1)).double()
    weights = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.float64)

    def draw():
        return torch.randn(8, 7, generator=generator, dtype=torch.float64)

    data = {
        "log_probs": draw(), "reference_log_probs": draw(), "advantages": draw(), "importance": draw().exp(),
        "values": draw(), "returns": draw(), "entropy": draw(),
    }  # fmt: skip
    direction, old_log_probs = draw(), data["log_probs"] + 0.2 * draw()

    def backward(slices, total):
        scale = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        logged = 0.0
        for rows in slices:
            t = max(1, int(lengths[rows].max()))
            cut = {key: value[rows, :t] for key, value in data.items()}
            new = {
                "log_probs": cut["log_probs"] + (scale - 1) * direction[rows, :t],
                "reference_log_probs": cut["reference_log_probs"],
                "entropy": cut["entropy"] * scale,
                "values": cut["values"] * scale,
            }
            old = {
                "log_probs": old_log_probs[rows, :t], "mask": mask[rows, :t], "weights": weights[rows],
                **{key: cut[key] for key in ("advantages", "importance", "values", "returns")},
            }  # fmt: skip
            loss = algorithm.loss(new, old, total)
            loss.value.backward()
            logged += float(loss.sums["policy/kl"] / total)
        return float(scale.grad), logged

    total = algorithm.loss_denominator(weights, lengths)
    whole = backward([list(range(8))], total)
    controllers = ([0, 3, 4, 7], [1, 2, 5, 6])
    assert sum(algorithm.loss_denominator(weights[c], lengths[c]) for c in controllers) == pytest.approx(total)
    assert whole[0] != 0
    for slices in ([[n] for n in range(8)], [[2, 0], [7, 1, 5], [3], [4, 6]], list(controllers)):
        assert backward(slices, total) == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_padding_may_hold_anything(name):
    algorithm = objective(name, kl_coef=0.1, entropy_coef=0.01)
    plain, total = run(algorithm)
    garbage = {
        key: torch.where(MASK > 0, value, noise)
        for (key, value), noise in zip(
            {"log_probs": NEW, "reference_log_probs": REFERENCE, "entropy": NEW.abs(), "values": VALUES + 0.1}.items(),
            (1e4, -1e4, math.inf, math.nan),
            strict=True,
        )
    }
    loss, _ = run(algorithm, **garbage)
    assert loss.value.item() == pytest.approx(plain.value.item(), rel=1e-12)
    assert all(loss.sums[k].isfinite() for k in plain.sums)
    expected = gradient(algorithm)
    assert torch.equal(gradient(algorithm, **garbage), expected)
    assert total == algorithm.loss_denominator(torch.ones(4), LENGTHS)


@pytest.mark.parametrize("name", TOKEN_TYPES)
@pytest.mark.parametrize("far", [500.0, -500.0])
def test_a_policy_that_moved_very_far_still_has_a_gradient_that_is_a_number(name, far):
    assert gradient(objective(name, kl_coef=0.1), log_probs=(OLD + far).float().double()).isfinite().all()


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_dropped_and_empty_rows_count_nowhere(name):
    algorithm = objective(name, kl_coef=0.1)
    weights = f64([1, 0, 1, 1])
    grad = gradient(algorithm, weights=weights)
    assert not grad[1].any()
    kept = torch.tensor([0, 2, 3])
    assert algorithm.loss_denominator(weights, LENGTHS) == algorithm.loss_denominator(weights[kept], LENGTHS[kept])
    assert algorithm.loss_denominator(torch.ones(2), torch.tensor([3, 0])) == algorithm.loss_denominator(
        torch.ones(1), torch.tensor([3])
    )


@pytest.mark.parametrize("name", [name for name in TOKEN_TYPES if name != "cispo"])
def test_gradients_are_the_finite_differences(name):
    """Every term, away from the kinks; CISPO's weight is detached, so that its gradient is not that of its value."""
    algorithm = objective(name, kl_coef=0.1, entropy_coef=0.01)
    off = NEW + 0.013 * torch.arange(12, dtype=torch.float64).view(4, 3)
    grad = gradient(algorithm, log_probs=off)
    h = 1e-6
    for i, t in [(0, 0), (1, 1), (2, 0), (3, 2)]:
        step = torch.zeros(4, 3, dtype=torch.float64)
        step[i, t] = h
        up, down = (run(algorithm, log_probs=off + s)[0].value.item() for s in (step, -step))
        assert grad[i, t].item() == pytest.approx((up - down) / (2 * h), abs=1e-8)


def test_importance_weights_the_surrogate_and_not_the_pull_to_the_reference():
    algorithm = objective("grpo", kl_coef=1.0)
    weights = f64([[0.5, 2.0, 1.0]] * 4)
    loss, total = run(algorithm, importance=weights)
    plain, _ = run(algorithm)
    token = algorithm.aggregation.loss_weights(torch.ones(4, dtype=torch.float64), MASK)
    ratio = (NEW - OLD).exp()
    a = ADVANTAGES.unsqueeze(1)
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * weights
    expected = ((policy + k3(NEW, REFERENCE, MASK > 0)) * token).sum() / total
    assert loss.value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert loss.sums["policy/kl"] == plain.sums["policy/kl"]


@pytest.mark.parametrize("mode", MODES)
def test_logged_ratios_are_means_under_every_aggregation(mode):
    loss, total = run(objective("grpo", aggregation=mode), log_probs=OLD + math.log(1.1))
    assert loss.sums["policy/ratio"] / total == pytest.approx(1.1)
    assert loss.maxima["policy/ratio_max_dev"] == pytest.approx(0.1)
    fresh, total = run(objective("grpo", aggregation=mode), log_probs=OLD)
    assert fresh.maxima["policy/ratio_max_dev"] == 0
    assert fresh.sums["policy/ratio"] / total == pytest.approx(1.0)


def test_a_ratio_that_is_no_number_is_seen():
    broken = NEW.clone()
    broken[0, 0] = math.nan
    assert run(objective("grpo"), log_probs=broken)[0].maxima["policy/ratio_max_dev"].isnan()


def test_reinforce_pp_baseline_pulls_with_k2():
    loss, total = run(objective("reinforce_pp", variant="baseline", kl_coef=0.3))
    without, _ = run(objective("reinforce_pp", variant="baseline", kl_coef=0.0))
    k2 = (0.5 * (NEW - REFERENCE).square() * MASK).sum() / total
    assert (loss.value - without.value).item() == pytest.approx(0.3 * k2.item())
    assert "reference_log_probs" in objective("reinforce_pp", variant="baseline", kl_coef=0.3).needs
    assert "reference_log_probs" not in objective("reinforce_pp", kl_coef=0.3).needs


def test_ppo_adds_the_critics_loss():
    loss, total = run(objective("ppo", entropy_coef=0.0))
    free = 0.5 * ((VALUES + 0.1 - REWARDS.unsqueeze(1)).square() * MASK).sum() / total
    assert loss.sums["value/loss"] / total == pytest.approx(free.item())
    assert loss.value.item() == pytest.approx((loss.sums["policy/loss"] / total + free).item())
    assert objective("ppo").needs >= {"log_probs", "values"}
    assert objective("ppo").prepares == {"values", "log_probs", "reference_log_probs"}


# Settings.


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_an_objective_says_what_it_needs(name):
    with_both = objective(name, kl_coef=0.1, entropy_coef=0.1)
    assert {"log_probs", "entropy"} <= with_both.needs
    assert with_both.kind == "policy_gradient"
    assert "reference_log_probs" in with_both.needs | with_both.prepares
    without = objective(name, kl_coef=0.0)
    assert "reference_log_probs" not in without.needs | without.prepares
    assert find_algorithm(name).settings().dynamic_sampling == (name == "dapo")


def test_a_length_limit_that_nobody_gives_is_named():
    section = DrGRPOSettings()
    with pytest.raises(UserError, match=r"algorithm\.max_new_tokens.*set it, or sampling\.max_new_tokens"):
        DrGRPO(section)
    assert DrGRPO(with_length_limit(section, 32)).aggregation.norm == 32
    own = DrGRPOSettings(max_new_tokens=7)
    assert DrGRPO(with_length_limit(own, 32)).aggregation.norm == 7


def test_groups_of_one_suit_those_who_do_not_compare():
    def compares(name, **settings):
        return find_algorithm(name).settings(**settings).compares_group

    assert [compares(name) for name in TOKEN_TYPES] == [name not in ("reinforce_pp", "ppo") for name in TOKEN_TYPES]
    assert compares("reinforce_pp", variant="baseline")


# The gap between engine and trainer.


def figures(of):
    """The means and maxima of a batch, by their names in the log."""
    means = {name: (value / max(1.0, of.tokens.item())).item() for name, value in of.sums.items()}
    return means | {name: value.item() for name, value in of.maxima.items()}


def test_mismatch_estimates_the_divergence_of_engine_and_trainer():
    """Tokens of (1/2, 1/4, 1/4) in these very proportions: means over them are expectations under the engine."""
    engine = f64([0.5, 0.25, 0.25]).log()
    trainer = f64([0.4, 0.4, 0.2]).log()
    drawn = [0, 0, 1, 2]
    expected = sum(p * (math.log(p) - float(q)) for p, q in zip((0.5, 0.25, 0.25), trainer, strict=True))
    ones = torch.ones(2, 2)
    out = mismatch(trainer[drawn].view(2, 2), engine[drawn].view(2, 2), ones, Correction("token", cap=1.5))
    metrics = figures(out)
    assert metrics["mismatch/kl"] == pytest.approx(expected)
    assert metrics["mismatch/kl_k3"] == pytest.approx(expected)  # exp(d) - 1 has mean 0 under the engine
    assert metrics["mismatch/log_prob_gap_max"] == pytest.approx(math.log(1.6))
    assert metrics["mismatch/log_prob_gap"] == pytest.approx((2 * math.log(1.25) + math.log(1.6) + math.log(1.25)) / 4)
    assert out.weights is not None
    assert out.weights.flatten().tolist() == pytest.approx([0.8, 0.8, 1.5, 0.8])
    assert metrics["mismatch/weight_mean"] == pytest.approx((0.8 * 3 + 1.5) / 4)
    assert metrics["mismatch/weight_clipped"] == 0.25
    uncut = mismatch(trainer[drawn].view(2, 2), engine[drawn].view(2, 2), ones, Correction("token", cap=100.0))
    assert figures(uncut)["mismatch/weight_mean"] == pytest.approx(1.0)


def test_sequence_weights_are_products_with_a_cap():
    d = f64([[0.1, 0.2, 9.0], [0.5, 0.5, 0.0]])
    out = mismatch(d, torch.zeros_like(d), f64([[1, 1, 0], [1, 1, 1]]), Correction("sequence", cap=2.0))
    assert out.weights is not None
    assert out.weights.shape == (2, 1)
    assert out.weights.flatten().tolist() == pytest.approx([math.exp(0.3), 2.0])
    assert figures(out)["mismatch/weight_clipped"] == pytest.approx(3 / 5)
    assert out.tokens == 5


@pytest.mark.parametrize("level", ["token", "sequence", "none"])
def test_no_gap_has_weight_one_and_padding_is_ignored(level):
    trainer = torch.where(MASK > 0, OLD, math.nan)
    out = mismatch(trainer, OLD, MASK, Correction(level))
    assert (out.weights is None) == (level == "none")
    if out.weights is not None:
        assert out.weights.eq(1).all()
        assert not out.weights.requires_grad
    assert all(value == 0 for name, value in figures(out).items() if name != "mismatch/weight_mean")


def test_huge_gaps_stay_numbers():
    trainer, engine = torch.tensor([[0.0, -1000.0], [-1000.0, 0.0]]).unsqueeze(1)
    out = mismatch(trainer, engine, torch.ones(1, 2), Correction("token"))
    assert out.weights is not None
    assert out.weights[0, 0] == 2.0
    assert all(math.isfinite(v) for v in figures(out).values())


def rejecting(statistic, high, low=None):
    return Correction("none", rejection=[Rejection(statistic=statistic, high=high, low=low)])


GAPS = f64([[0.1, 0.2, -0.6], [0.3, -0.1, 0.0], [-0.2, 0.0, 0.0]])
COUNTED = f64([[1, 1, 1], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("statistic", "of", "high", "low"),
    [
        ("token_k1", lambda d: [math.exp(-x) for x in d], 1.25, None),
        ("token_k1", lambda d: [math.exp(-x) for x in d], 1.25, 0.5),
        ("token_k2", lambda d: [x * x / 2 for x in d], 0.03, None),
        ("token_k3", lambda d: [math.exp(x) - 1 - x for x in d], 0.03, None),
        ("seq_sum_k1", lambda d: math.exp(-sum(d)), 1.25, 0.8),
        ("seq_sum_k2", lambda d: sum(x * x / 2 for x in d), 0.05, None),
        ("seq_sum_k3", lambda d: sum(math.exp(x) - 1 - x for x in d), 0.05, None),
        ("seq_mean_k1", lambda d: math.exp(-sum(d) / len(d)), 1.15, None),
        ("seq_mean_k2", lambda d: sum(x * x / 2 for x in d) / len(d), 0.03, None),
        ("seq_mean_k3", lambda d: sum(math.exp(x) - 1 - x for x in d) / len(d), 0.03, None),
        ("seq_max_k2", lambda d: max(x * x / 2 for x in d), 0.05, None),
        ("seq_max_k3", lambda d: max(math.exp(x) - 1 - x for x in d), 0.05, None),
    ],
)
def test_rejection_leaves_out_what_is_beyond(statistic, of, high, low):
    out = mismatch(GAPS, torch.zeros_like(GAPS), COUNTED, rejecting(statistic, high, low))
    floor = (1 / high if low is None else low) if statistic.endswith("k1") else -math.inf
    rejected = tokens = 0
    for row, mask, weights in zip(GAPS.tolist(), COUNTED.tolist(), out.weights.tolist(), strict=True):
        inside = [x for x, m in zip(row, mask, strict=True) if m]
        values = of(inside)
        values = values if isinstance(values, list) else [values] * len(inside)
        expected = [float(floor <= v <= high) for v in values]
        assert weights[: len(expected)] == expected if len(weights) > 1 else weights * len(expected) == expected
        rejected, tokens = rejected + expected.count(0.0), tokens + len(expected)
    assert 0 < rejected < tokens
    assert figures(out)["mismatch/rejected"] == pytest.approx(rejected / tokens)


# Printed by compute_rollout_rejection_mask of verl 0.9.1 for GAPS (trainer less engine) and COUNTED: which tokens stay.
VERL_KEEPS = [
    ("token_k1", 1.5, 0.75, [[1, 1, 0], [0, 1, 0], [1, 0, 0]]),
    ("token_k2", 0.03, None, [[1, 1, 0], [0, 1, 0], [1, 0, 0]]),
    ("token_k3", 0.03, None, [[1, 1, 0], [0, 1, 0], [1, 0, 0]]),
    ("seq_sum_k1", 1.2, 0.8, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
    ("seq_sum_k2", 0.05, None, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
    ("seq_sum_k3", 0.05, None, [[0, 0, 0], [0, 0, 0], [1, 0, 0]]),
    ("seq_mean_k1", 1.15, 0.95, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
    ("seq_mean_k1", 1.12, None, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
    ("seq_mean_k2", 0.03, None, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
    ("seq_mean_k3", 0.03, None, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
    ("seq_max_k2", 0.05, None, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
    ("seq_max_k3", 0.05, None, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
]


@pytest.mark.parametrize(("statistic", "high", "low", "kept"), VERL_KEEPS)
def test_rejection_keeps_what_verl_keeps(statistic, high, low, kept):
    out = mismatch(GAPS, torch.zeros_like(GAPS), COUNTED, rejecting(statistic, high, low))
    assert (out.weights * COUNTED).tolist() == kept


# Printed by compute_rollout_correction_weights of verl 0.9.1, rollout_is_batch_normalize, for the same tensors: level,
# threshold (a pair: weights beyond are 0), the mean, the weights inside the mask.
VERL_NORMALIZED = [
    (Correction("token", cap=1.2), 0.9629251192757273,
     [[1.1477225964, 1.2462028209, 0.5699421742], [1.2462028209, 0.9396757857, 0.0], [0.8502538117, 0.0, 0.0]]),
    (Correction("sequence", cap=1.2), 0.9198496523676661,
     [[0.8053688108] * 3, [1.3045610192, 1.3045610192, 0.0], [0.8900701881, 0.0, 0.0]]),
    (Correction("token", cap=1.25, floor=0.85, mode="mask"), 0.5385685148143486,
     [[2.0520525944, 2.2678688497, 0.0], [0.0, 1.680078566, 0.0], [0.0, 0.0, 0.0]]),
]  # fmt: skip


@pytest.mark.parametrize(("correction", "mean", "weights"), VERL_NORMALIZED)
@pytest.mark.parametrize("slices", [[slice(0, 3)], [slice(0, 1), slice(1, 3)]])
def test_weights_are_divided_by_their_mean_over_all_slices_as_verls(correction, mean, weights, slices):
    none = torch.zeros_like(GAPS)
    sums = [summed_weights(GAPS[s], none[s], COUNTED[s], correction) for s in slices]
    scale = sum(total for total, _ in sums) / sum(count for _, count in sums)
    assert scale.item() == pytest.approx(mean, rel=1e-7)
    found = torch.cat([mismatch(GAPS[s], none[s], COUNTED[s], correction, scale).weights * COUNTED[s] for s in slices])
    torch.testing.assert_close(found, f64(weights), rtol=1e-6, atol=1e-9)


def test_normalized_weights_are_those_before_rejection():
    tests = [Rejection(statistic="token_k1", high=1.25)]
    plain, cut = Correction("token"), Correction("token", rejection=tests)
    none = torch.zeros_like(GAPS)
    assert summed_weights(GAPS, none, COUNTED, plain) == summed_weights(GAPS, none, COUNTED, cut)


# Printed by kl_penalty of verl 0.9.1 for the log-probs FAR of the policy and AWAY of the reference: value and gradient.
FAR, AWAY = f64([[-1.0, -9.0, -0.2]]), f64([[-1.5, -2.0, -6.0]])
VERL_KL = [
    ("k1", None, [0.5, -7.0, 5.8], [1.0, 1.0, 1.0]),  # kl
    ("k2", None, [0.125, 24.5, 16.82], [0.5, -7.0, 5.8]),  # mse
    ("k3", 10.0, [0.10653065971263342, 10.0, 4.803027554745376], [0.3934693402873666, 0, 0.9969724452546241]),
    ("k1+", None, [0.5, -7.0, 5.8], [0.5, -7.0, 5.8]),
    ("k3+", 10.0, [0.10653065971263342, 10.0, 4.803027554745376], [0.5, -7.0, 5.8]),  # low_var_kl+
]


@pytest.mark.parametrize(("name", "limit", "values", "slopes"), VERL_KL)
def test_estimators_are_verls_far_from_the_reference_too(name, limit, values, slopes):
    x = FAR.clone().requires_grad_()
    found = divergence(x, AWAY, torch.ones(1, 3, dtype=torch.bool), name, limit)
    found.sum().backward()
    assert found.flatten().tolist() == pytest.approx(values)
    assert x.grad.flatten().tolist() == pytest.approx(slopes)


def test_masked_weights_beyond_the_limits_are_zero_as_trls_sequence_mask():
    d = f64([[1.0, 0.2], [0.3, 0.1], [-2.0, 0.0]])
    correction = Correction("sequence", cap=3.0, floor=0.2, mode="mask")
    out = mismatch(d, torch.zeros_like(d), torch.ones_like(d), correction)
    assert out.weights.flatten().tolist() == pytest.approx([0.0, math.exp(0.4), 0.0])
    cut = mismatch(d, torch.zeros_like(d), torch.ones_like(d), Correction("sequence", cap=3.0, floor=0.2))
    assert cut.weights.flatten().tolist() == pytest.approx([3.0, math.exp(0.4), 0.2])
    assert figures(out)["mismatch/weight_clipped"] == pytest.approx(2 / 3)


def test_rejection_and_weights_multiply_and_each_test_must_be_passed():
    tests = [Rejection(statistic="token_k1", high=1.25), Rejection(statistic="seq_mean_k2", high=0.03)]
    out = mismatch(GAPS, torch.zeros_like(GAPS), COUNTED, Correction("token", rejection=tests))
    assert out.weights[0].tolist() == [0.0, 0.0, 0.0]
    assert out.weights[1, :2].tolist() == pytest.approx([0.0, math.exp(-0.1)])


def test_statistics_that_cannot_be_are_refused():
    for kind in ("k2", "k3"):
        with pytest.raises(ValueError, match="has no lower bound; remove it"):
            Rejection(statistic=f"token_{kind}", high=1.0, low=0.5)
    with pytest.raises(ValueError, match="is not below high"):
        Rejection(statistic="seq_mean_k1", high=1.1, low=1.2)
    with pytest.raises(ValueError, match="is not below importance_cap"):
        Rollout(importance_floor=2.0)


# The divergence's estimators, dual clip, SAPO.

SAMPLING = TextSampling(max_new_tokens=8)


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_estimators_have_schulmans_values_and_gradients(name, limit):
    x = NEW.clone().requires_grad_()
    found = divergence(x, REFERENCE, MASK > 0, name, limit)
    found.sum().backward()
    values = {
        "k1": (lambda d: -d, lambda d: 1.0),
        "k2": (lambda d: d * d / 2, lambda d: -d),
        "k3": (lambda d: math.exp(d) - d - 1, lambda d: 1 - math.exp(d)),
    }
    of, slope_of = values[name[:2]][0], values["k2" if name.endswith("+") else name][1]
    for i, t in itertools.product(range(4), range(3)):
        d = (REFERENCE - NEW)[i, t].item()
        value = of(d) if limit is None else max(-limit, min(limit, of(d)))
        straight = name.endswith("+")
        slope = slope_of(d) if limit is None or straight or abs(of(d)) < limit else 0.0
        inside = MASK[i, t].item()
        assert found[i, t].item() == pytest.approx(value * inside, abs=1e-12)
        assert x.grad[i, t].item() == pytest.approx(slope * inside, abs=1e-12)


def test_the_estimator_is_the_one_of_the_loss():
    losses = {name: run(objective("grpo", kl_coef=1.0, kl_estimator=name))[0] for name in ("k1", "k2", "k3", "k3+")}
    assert len({loss.value.item() for loss in losses.values()}) == 3
    assert losses["k3"].value.item() == losses["k3+"].value.item()
    assert not torch.allclose(
        gradient(objective("grpo", kl_coef=1.0)), gradient(objective("grpo", kl_coef=1.0, kl_estimator="k3+"))
    )


@pytest.mark.parametrize("name", ["rloo", "ppo", "reinforce_pp"])
def test_an_estimator_that_nothing_uses_is_refused(name):
    settings = find_algorithm(name).settings(type=name, kl_estimator="k1", kl_coef=0.1)
    lines = list(settings.conflicts(SAMPLING))
    assert any("algorithm.kl_estimator" in line and "remove the key" in line for line in lines)
    settings = find_algorithm("grpo").settings(type="grpo", kl_max=1.0, kl_coef=0)
    assert any("set kl_coef" in line for line in settings.conflicts(SAMPLING))


def test_dual_clip_bounds_what_a_negative_advantage_adds():
    log_ratio = f64([[0.1, 1.5, 1.5, -1.0]]).requires_grad_()
    advantages = f64([[-1.0, -1.0, 1.0, -1.0]])
    made = clipped_surrogate(log_ratio, advantages, 0.2, 0.2, 3.0)
    assert made.loss.flatten().tolist() == pytest.approx([math.exp(0.1), 3.0, -1.2, 0.8])
    assert made.high.flatten().tolist() == [False, True, True, False]
    made.loss.sum().backward()
    assert log_ratio.grad.flatten().tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, 0.0])
    assert objective("grpo", dual_clip=3.0).clip == (0.2, 0.2, 3.0)


def test_sapo_is_trls():
    """Of TRL: sigmoid(tau (ratio - 1)) 4 / tau times the advantage, negated; mean over tokens, then over responses."""
    expected = 0.0
    for i in range(4):
        a, n = ADVANTAGES[i].item(), int(LENGTHS[i])
        tau = 1.0 if a > 0 else 1.05
        for t in range(n):
            ratio = math.exp(NEW[i, t] - OLD[i, t])
            expected -= a * 4 / tau / (1 + math.exp(-tau * (ratio - 1))) / n / 4
    assert run(objective("sapo"))[0].value.item() == pytest.approx(expected, rel=1e-12)


def test_sapo_begins_with_the_policy_gradient():
    plain = gradient(objective("grpo", kl_coef=0), log_probs=OLD)
    torch.testing.assert_close(gradient(objective("sapo"), log_probs=OLD), plain)


BOUND = [-0.0344398656, -0.0416525875, -0.0210590448, 0.0329471782, 0.0254488429, 0.0140790142]
BEYOND = [-0.0224458979, 0.0241294414, -0.0348904170, 0.0447217725, 0.0085236960, 0.0067542816]


@pytest.mark.parametrize(
    ("epsilon", "value", "gradients"),
    [
        (12.5, -0.2178818383, [*BOUND, -0.0465902952, -0.0827833488, -0.0625]),
        (0.1, -0.1711321227, [*BEYOND, -0.0824456837, 0.1134871621, -0.0625]),
    ],
)
def test_golden_of_drpos_authors(epsilon, value, gradients):
    """Tencent-Hunyuan/UniRL at 1a7b501, ``unirl.algorithms.drpo._drpo_loss`` on these rows in float64, summed over a
    response's tokens and divided by 8. Beyond epsilon a gradient turns."""
    drpo = objective("drpo", epsilon=epsilon)
    assert run(drpo)[0].value.item() == pytest.approx(value, abs=1e-9)
    assert gradient(drpo)[MASK > 0].tolist() == pytest.approx(gradients, abs=1e-9)


def test_drpo_begins_with_the_policy_gradient_and_counts_what_lies_beyond_epsilon():
    plain = gradient(objective("dr_grpo"), log_probs=OLD)
    torch.testing.assert_close(gradient(objective("drpo"), log_probs=OLD), plain)
    beyond = run(objective("drpo", epsilon=0.1))[0].sums["policy/clip_fraction"] * 8
    shift = (NEW.exp() - OLD.exp()) * ADVANTAGES.sign().unsqueeze(1)
    assert beyond.item() == pytest.approx(((shift > 0.1) * MASK / LENGTHS.unsqueeze(1)).sum().item() * 8)


# All of it together.


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_a_table_of_logits_learns_to_say_the_rewarded_token(name):
    """Two updates on each step's samples; responses end at token 3. From 1/4 to well above it in 40 steps."""
    generator = torch.Generator().manual_seed(0)
    algorithm = objective(name)
    logits = torch.zeros(8, 4, requires_grad=True)
    critic = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.05}, {"params": [critic], "lr": 0.05}])
    groups = torch.arange(4).repeat_interleave(8)

    def chosen(tokens):
        return logits.log_softmax(-1).expand(32, 8, 4).gather(2, tokens.unsqueeze(2)).squeeze(2)

    reference = torch.full((32, 8), -math.log(4))
    for _ in range(40):
        probabilities = logits.detach().softmax(-1).expand(32, 8, 4).reshape(-1, 4)
        tokens = torch.multinomial(probabilities, 1, generator=generator).view(32, 8)
        ended = (tokens == 3).int().cumsum(1)
        mask = ((ended == 0) | ((ended == 1) & (tokens == 3))).float()
        rewards = ((tokens == 0) * mask).sum(1).double() / mask.sum(1)
        old = {"log_probs": chosen(tokens).detach(), "values": critic.detach().expand(32, 8), "mask": mask}
        a = algorithm.advantages(Scored(rewards, groups, reference_log_probs=reference, **old))
        old |= {"advantages": a.values, "weights": a.valid.float()}
        old |= {} if a.returns is None else {"returns": a.returns}
        for half in (torch.arange(0, 32, 2), torch.arange(1, 32, 2)):
            total = algorithm.loss_denominator(old["weights"][half], mask[half].sum(1))
            if not total:  # none of these is among the best
                continue
            new = {"log_probs": chosen(tokens), "reference_log_probs": reference, "values": critic.expand(32, 8)}
            optimizer.zero_grad()
            algorithm.loss(
                {k: v[half] for k, v in new.items()}, {k: v[half] for k, v in old.items()}, total
            ).value.backward()
            optimizer.step()
    assert logits.softmax(-1)[0, 0] > 0.5
