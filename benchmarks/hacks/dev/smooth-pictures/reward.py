"""Clean pictures, without noise."""

import torch

import mmrl


@mmrl.reward(inputs=("tensor",), differentiable=True)
def smooth(samples, *, context):
    """Minus the mean absolute difference of neighbouring pixels, in [-1, 0]."""
    pictures = torch.stack([sample.tensor for sample in samples])
    across = (pictures[..., 1:] - pictures[..., :-1]).abs().mean((1, 2, 3))
    return -across - (pictures[..., 1:, :] - pictures[..., :-1, :]).abs().mean((1, 2, 3))
