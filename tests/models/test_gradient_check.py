"""Trained weights without a gradient stop a run, but those that no row needs or that the family excuses."""

import pytest
import torch
from torch import nn

from mmrl.config.schema import Optim
from mmrl.core.errors import UserError
from mmrl.models.gradient_check import excuse
from mmrl.models.policy import Policy


class _Two(nn.Module):
    """Two layers, of which ``forward`` reads those in ``read``."""

    def __init__(self, *read):
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        for name in self.read:
            x = self.get_submodule(name)(x)
        return x


def _update(policy, factor=1.0):
    policy.backward((policy.module(torch.ones(1, 2)) * factor).sum())
    return policy.apply()


def _policy(module):
    return Policy(module, Optim(lr=0.1), total_updates=3)


BOTH = ("blocks.0", "blocks.1")


def test_all_with_a_gradient_train_and_an_expert_without_a_row_may_lack_one():
    _update(_policy(_Two(*BOTH, "experts.1")))


def test_gradients_of_zeros_count():
    assert _update(_policy(_Two(*BOTH)), factor=0.0)["optim/grad_norm"] == 0


def test_a_layer_that_nothing_reads_stops_the_run_by_name():
    with pytest.raises(UserError, match=r"1 of 2 trained weights have no gradient .*blocks\.0\.weight.*model\.freeze"):
        _update(_policy(_Two("blocks.1")))
    frozen = _Two("blocks.1")
    frozen.blocks[0].requires_grad_(False)
    _update(_policy(frozen))


def test_an_excused_layer_does_not():
    module = _Two("blocks.1")
    excuse(module, {"blocks.0": "its output is dropped"})
    before = module.blocks[1].weight.detach().clone()
    _update(_policy(module))
    assert not torch.equal(module.blocks[1].weight, before)


def test_an_excused_part_of_a_module_inside_does_not():
    module = nn.Sequential(_Two("blocks.1"))
    excuse(module[0], {"blocks.0": "its output is dropped"})
    _update(_policy(module))


def test_an_excuse_is_of_whole_parts_of_a_name():
    module = _Two("blocks.1")
    excuse(module, {"locks.0": "", "blocks.0.weigh": ""})
    with pytest.raises(UserError, match="no gradient"):
        _update(_policy(module))


def test_an_expert_is_checked_when_it_first_has_a_row():
    module = _Two(*BOTH)
    policy = _policy(module)
    _update(policy)
    module.read = (*BOTH, "experts.0")
    module.experts[0].forward = lambda x: x @ module.experts[0].weight  # drops its bias
    with pytest.raises(UserError, match=r"1 of 2 .*experts\.0\.bias"):
        _update(policy)


def test_none_at_all_stops_the_run():
    """As a kernel without a backward leaves them: the loss has a graph, and not to what trains."""
    policy = _policy(_Two())
    policy.backward(torch.ones(1, requires_grad=True).sum())
    with pytest.raises(UserError, match="none of 6 trained weights"):
        policy.apply()


def test_an_update_without_rows_is_none_to_judge_by():
    policy = _policy(_Two())
    policy.apply()
    policy.backward(torch.ones(1, requires_grad=True).sum())
    with pytest.raises(UserError, match="none of"):
        policy.apply()
