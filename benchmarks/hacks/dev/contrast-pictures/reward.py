"""Shapes that stand out."""

import torch

import mmrl


@mmrl.reward(inputs=("tensor",), differentiable=True)
def contrast(samples, *, context):
    """The standard deviation of a picture's pixels over its places, mean over the colours."""
    pictures = torch.stack([sample.tensor for sample in samples])
    return pictures.flatten(2).std(2).mean(1)
