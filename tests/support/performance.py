"""Shared by the tests of performance and others."""

import torch
from torch import nn

from mmrl.config.performance import Performance
from mmrl.config.schema import Optim
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.policy import Policy

allow_cpu_only()  # before transformers imports torchvision


def policy(optimizer="adamw"):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return Policy(module, Optim(lr=0.01), 20, performance=Performance(optimizer=optimizer))


def updates(made, first, last):
    for n in range(first, last):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(n))
        made.backward((made.module(x) - 1).square().mean())
        made.apply()
