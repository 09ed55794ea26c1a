"""One large thing in the middle."""

import torch

import mmrl


@mmrl.reward(inputs=("tensor",), differentiable=True)
def centred(samples, *, context):
    """How far the pixels of the middle are from those of the edge, mean over both."""
    pictures = torch.stack([sample.tensor for sample in samples])
    size = pictures.shape[-1] // 4
    middle = pictures[..., size:-size, size:-size].mean((2, 3))
    edge = torch.cat([pictures[..., :2, :].flatten(2), pictures[..., -2:, :].flatten(2)], 2).mean(2)
    return (middle - edge).abs().mean(1)
