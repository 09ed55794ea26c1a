"""The step program on the shipped model, in this process: what must hold whatever the numbers in the recipe."""

import copy
from pathlib import Path

import pytest
import torch

from mmrl.core.errors import UnscoredError, UserError
from mmrl.logging.metrics import describe
from mmrl.step.step_metrics import StepMetrics
from tests.support.training_loop import FORWARD, make, step, update_gradient

ROOT = Path(__file__).resolve().parents[2]


def test_any_micro_batch_gives_the_same_gradient():
    # A reward with small differences between samples would hide nothing: JPEG size differs for every picture.
    reward = 'rewards=[{name: "jpeg:compressibility"}]'
    whole, _ = update_gradient(make(reward, "train.micro_batch_size=8"))
    for size in (4, 8):
        # sampled at one shape, so that the pictures (and rewards) are the same to the bit
        other, _ = update_gradient(make(reward, f"train.micro_batch_size={size}", "sampling.batch_size=8"))
        assert (other - whole).norm() <= 1e-5 * whole.norm()


TARGET = [
    "sampling.window=null",
    "train.group_size=1",
    'rewards=[{name: "colour:target", options: {rgb: [60, 95, 235]}}]',
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo_guard", ["algorithm={type: grpo_guard}", "train.updates_per_step=2"]),
        ("flow_dppo", ["algorithm={type: flow_dppo, kl_coef: 0.01}", "train.updates_per_step=2"]),
        (
            "dance_grpo",
            [
                "algorithm={type: flow_grpo, trained_steps: 2, step_weight: flash}",
                "sampling.window=null",
                "sampling.sde={kind: dance, noise_level: 0.3}",
            ],
        ),
        ("awm", ["algorithm={type: awm, noise_levels: 2}", "train.updates_per_step=2", *FORWARD]),
        ("dgpo", ["algorithm={type: dgpo, noise_levels: 2}", *FORWARD]),
        ("v_grpo", ["algorithm={type: v_grpo, noise_levels: 2}", "train.updates_per_step=2", *FORWARD]),
        ("crd", ["algorithm={type: crd, noise_levels: 2}", *FORWARD]),
        ("diffusion_dpo", ["algorithm={type: diffusion_dpo, noise_levels: 2}", *FORWARD]),
        ("rwr", ["algorithm={type: rwr, noise_levels: 2}", *FORWARD]),
        ("sft", ["algorithm={type: rwr, weights: best, noise_levels: 2}", *FORWARD]),
        ("draft_lv", ["algorithm={type: draft, renoise: 2}", *TARGET]),
        ("refl", ["algorithm={type: refl}", *TARGET]),
        ("srpo", ["algorithm={type: srpo, threshold: 5.0}", *TARGET]),
        ("direct_align", ["algorithm={type: srpo, wanted: [], unwanted: [], threshold: 5.0}", *TARGET]),
        ("alignprop", ["algorithm={type: alignprop, target: 2.0}", *TARGET]),
        (
            "stepwise_flow_grpo",
            [
                "algorithm={type: stepwise_flow_grpo, trained_steps: 2}",
                "sampling.window=null",
                "train.updates_per_step=2",
            ],
        ),
        ("flow_grpo", ["algorithm.kl_coef=0.01", "train.updates_per_step=2"]),
        ("flow_grpo_full", ["model.lora=null", "algorithm.kl_coef=0.01", "sampling.guidance_scale=2.0"]),
        (
            "diffusion_nft",
            [
                "algorithm={type: diffusion_nft, noise_levels: 2}",
                "sampling.window=null",
                "sampling.same_initial_noise=false",
            ],
        ),
        (
            "draft",
            [
                "algorithm={type: draft, last_steps: 2}",
                "sampling.window=null",
                "train.group_size=1",
                'rewards=[{name: "colour:target", options: {rgb: [60, 95, 235]}}]',
            ],
        ),
    ],
)
def test_every_kind_of_objective_runs_in_the_one_loop(name, overrides):
    run = make(*overrides, "optim.ema_decay=0.9")
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    rows = [step(run, n)[0] for n in range(2)]
    assert any(not torch.equal(before[k], p) for k, p in run.policy.trainable.items())
    for row in rows:
        assert all(torch.isfinite(torch.tensor(v)) for v in row.values())
        assert all(describe(key) for key in row), [key for key in row if not describe(key)]
        if "grpo" in name or name in ("flow_dppo", "awm"):
            assert row["policy/first_ratio_max_dev"] <= 1e-5
    assert any(not torch.equal(before[k], v) for k, v in run.policy.copies["ema"].items())


def test_dgpo_draws_with_the_average_once_it_has_gone_over():
    run = make("algorithm={type: dgpo, noise_levels: 1, average_samples_after: 1, average_decay_rate: 0.3}", *FORWARD)
    sample, drawn, after = run.pipeline.sample, [], []

    def weights():
        return torch.cat([p.detach().flatten() for p in run.policy.trainable.values()])

    def watched(*given, **named):
        drawn.append((run.policy.active, weights()))
        return sample(*given, **named)

    run.pipeline.sample = watched
    for n in range(3):
        step(run, n)
        after.append(weights())
    assert [name for name, _ in drawn] == ["current"] * 4 + ["average"] * 2
    assert torch.equal(drawn[3][1], after[0])
    torch.testing.assert_close(drawn[4][1], 0.3 * after[0] + 0.7 * after[1])
    assert not torch.allclose(drawn[4][1], after[1], rtol=1e-5, atol=1e-6)


def test_a_step_is_a_function_of_the_weights_and_its_number():
    a, b = make(), make()
    step(b, 5)  # what was sampled before must not matter, but for the weights
    b.policy.load_state(*a.policy.state())
    row_a, row_b = step(a, 1)[0], step(b, 1)[0]
    assert row_a == row_b


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm={type: crd, noise_levels: 1, sampling_decay_after: 0, sampling_decay_rate: 0.2}", *FORWARD],
        ["algorithm={type: v_grpo, noise_levels: 2, old_kl_coef: 0.1}", "train.updates_per_step=2", *FORWARD],
        ["algorithm={type: stepwise_flow_grpo, kl_coef: 0.01}", "model.lora=null"],
    ],
    ids=["crd", "v_grpo", "stepwise_flow_grpo"],
)
def test_steps_after_a_load_are_those_that_would_have_come(overrides):
    """The copies of the weights are in the state."""
    run = make(*overrides)
    step(run, 0)
    step(run, 1)
    state = copy.deepcopy(run.policy.state())
    then = [step(run, n)[0] for n in (2, 3)]
    again = make(*overrides)
    again.policy.load_state(*state)
    assert [step(again, n)[0] for n in (2, 3)] == then


def test_sampling_and_replay_that_disagree_stop_the_run():
    run = make()
    velocity = run.pipeline.velocity
    run.pipeline.velocity = lambda *a: velocity(*a) * (1 + 1e-3 * torch.is_grad_enabled())
    with pytest.raises(UserError, match="before the first update the largest"):
        step(run)


BAD = """
import math

def nan(samples, *, context):
    return [math.nan if s.id.sample == 1 else float(s.id.sample) for s in samples]

def raises(samples, *, context):
    raise RuntimeError("the model fell over")

def same(samples, *, context):
    return [0.5] * len(samples)

def short(samples, *, context):
    return [1.0]
"""


def bad(tmp_path, name, policy):
    (tmp_path / "bad.py").write_text(BAD)
    return f"rewards=[{{name: '{tmp_path}/bad.py:{name}', on_failure: {policy}, weight: 1}}]"


def test_a_dropped_sample_is_named_and_left_out(tmp_path):
    run = make(bad(tmp_path, "nan", "drop"))
    row, failures = step(run)
    assert row["reward/dropped"] == 2
    assert [(f.sample.slot, f.sample.sample) for f in failures] == [(0, 1), (1, 1)]
    assert row["reward/mean"] == pytest.approx((0 + 2 + 3) / 3)


def test_a_step_whose_samples_were_all_dropped_is_no_step_and_changes_nothing(tmp_path):
    run = make(bad(tmp_path, "raises", "drop"), "scoring={max_failed: 1.0, patience: 0}")
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    with pytest.raises(UnscoredError, match=r"step 1 was not trained: 8 of 8 samples failed .*the model fell over"):
        step(run)
    assert run.policy.updates == 0
    assert all(torch.equal(before[k], p) for k, p in run.policy.trainable.items())


@pytest.mark.parametrize(("name", "says"), [("raises", "the model fell over"), ("short", "1"), ("nan", "nan")])
def test_a_reward_that_fails_stops_the_run_by_name(tmp_path, name, says):
    with pytest.raises(UserError, match=name) as error:
        step(make(bad(tmp_path, name, "fail")))
    assert says in str(error.value)


def test_no_difference_in_reward_means_no_gradient(tmp_path):
    run = make(bad(tmp_path, "same", "fail"), "scoring.max_failed=0")
    gradient, row = update_gradient(run)
    assert row["advantage/zero_std_groups"] == 1
    assert gradient.abs().max() == 0


def test_a_reward_without_gradient_is_refused_before_a_model_is_loaded():
    with pytest.raises(UserError, match="differentiable"):
        make(
            "algorithm={type: draft}",
            "sampling.window=null",
            "train.group_size=1",
        )


@pytest.mark.slow
def test_pathwise_learning_moves_the_reward():
    """Twelve DRaFT steps on the colour of the picture: a rise no seed shows by accident."""
    run = make(
        "algorithm={type: draft, last_steps: 2}",
        "sampling.window=null",
        "train.group_size=1",
        "train.prompts_per_step=8",
        "train.micro_batch_size=8",
        "optim.lr=3e-3",
        'rewards=[{name: "colour:target", options: {rgb: [60, 95, 235]}}]',
    )
    rewards = [step(run, n)[0]["reward/mean"] for n in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.02, rewards


def test_tally_averages_over_updates():
    metrics = StepMetrics()
    metrics.set({"optim/grad_norm": 1.0})
    metrics.set({"optim/grad_norm": 3.0})
    assert metrics.means() == {"optim/grad_norm": 2.0}
