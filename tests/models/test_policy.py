"""The optimizer's side of a policy: schedules, copies, state."""

import pytest
import torch
from torch import nn

from mmrl.config.schema import Optim
from mmrl.core.errors import UserError
from mmrl.models.policy import Policy


def make(total=10, **settings):
    torch.manual_seed(0)
    return Policy(nn.Linear(3, 2), Optim(**{"lr": 0.1, "weight_decay": 0.0, **settings}), total)


def update(policy, scale=1.0):
    policy.backward(scale * policy.module(torch.ones(4, 3)).square().mean())
    return policy.apply()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.1, 0.1, 0.1]),
        ({"warmup_steps": 3}, [0.025, 0.05, 0.075, 0.1]),
        ({"schedule": "linear"}, [0.1, 0.075, 0.05, 0.025]),
        ({"schedule": "linear", "warmup_steps": 1}, [0.05, 0.075, 0.05, 0.025]),
        ({"schedule": "linear", "min_lr_ratio": 0.2}, [0.1, 0.08, 0.06, 0.04]),
    ],
)
def test_learning_rate(settings, expected):
    policy = make(total=4, **settings)
    assert [update(policy)["optim/lr"] for _ in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (3, 0.0), (3, 0.1), (0, 0.25)])
def test_cosine_is_that_of_transformers(warmup, floor):
    from transformers.optimization import (
        get_cosine_schedule_with_warmup,
        get_cosine_with_min_lr_schedule_with_warmup,
    )

    policy = make(total=9, schedule="cosine", warmup_steps=warmup, min_lr_ratio=floor)
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    if floor:
        schedule = get_cosine_with_min_lr_schedule_with_warmup(theirs, warmup, 9, min_lr_rate=floor)
    else:
        schedule = get_cosine_schedule_with_warmup(theirs, warmup, 9)
    expected = []
    for _ in range(11):  # two more than the run has
        expected.append(schedule.get_last_lr()[0])
        theirs.step()
        schedule.step()
    found = [update(policy)["optim/lr"] for _ in range(11)]
    assert found[:10] == pytest.approx(expected[:10], abs=1e-12)
    assert found[9:] == pytest.approx([0.1 * floor] * 2)  # theirs would rise again


def test_gradients_are_clipped_and_cleared():
    policy = make(max_grad_norm=0.5)
    row = update(policy, 100.0)
    assert row["optim/grad_norm"] > 0.5
    assert all(p.grad is None for p in policy.trainable.values())


def test_a_gradient_that_is_not_finite_updates_nothing():
    policy = make()
    before = {k: p.detach().clone() for k, p in policy.trainable.items()}
    policy.backward(policy.module(torch.ones(1, 3)).sum() * float("nan"))
    with pytest.raises(UserError, match="gradient norm of update 0 is nan"):
        policy.apply()
    assert all(torch.equal(before[k], p) for k, p in policy.trainable.items())


def test_ema_is_the_average_it_says():
    policy = make(ema_decay=0.9)
    expected = policy.module.weight.detach().clone()
    for n in range(1, 30):
        update(policy)
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * policy.module.weight.detach()
    assert torch.allclose(policy.copies["ema"]["weight"], expected, atol=1e-6)
    current = policy.module.weight.detach().clone()
    with policy.for_evaluation():
        assert torch.allclose(policy.module.weight, expected, atol=1e-6)
    assert torch.equal(policy.module.weight, current)


def test_copies_come_back_after_an_error():
    policy = make()
    policy.keep("old")
    before = policy.module.weight.detach().clone()
    update(policy)
    after = policy.module.weight.detach().clone()

    def fail():
        with policy.using("old"):
            assert torch.equal(policy.module.weight, before)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(policy.module.weight, after)


def test_a_restored_policy_takes_the_same_next_update():
    a = make(ema_decay=0.9, schedule="linear")
    for _ in range(3):
        update(a)
    tensors, numbers = a.state()
    tensors = {part: {k: v.clone() for k, v in values.items()} for part, values in tensors.items()}
    b = make(ema_decay=0.9, schedule="linear")
    b.load_state(tensors, numbers)
    assert update(a) == update(b)
    assert torch.equal(a.module.weight, b.module.weight)
    assert torch.equal(a.copies["ema"]["weight"], b.copies["ema"]["weight"])


def test_a_checkpoint_of_another_policy_is_refused():
    a, b = make(), Policy(nn.Linear(4, 2), Optim(), 1)
    with pytest.raises(UserError, match="another policy"):
        b.rooms(a.state()[0])
