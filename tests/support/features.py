"""Shared by the tests of features and others."""

import torch


def features(n, seed=0):
    """Some tensors of every kind that pipelines make: ``14 n + 9`` bytes."""
    made = torch.Generator().manual_seed(seed)
    return {
        "embeds": torch.randn(n, generator=made),
        "half": torch.randn(n, generator=made).bfloat16(),
        "ids": torch.randint(9, (n,), generator=made),
        "mask": torch.rand(3, 3, generator=made) > 0.5,
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(x.view(torch.uint8), b[k].view(torch.uint8)) and x.dtype == b[k].dtype and x.shape == b[k].shape
        for k, x in a.items()
    )
