"""Sample tokens with one random number per (sample, position), inside Hugging Face's ``generate``.

``generate`` draws from one global generator, so that a sample would depend on its neighbours. Here every
``(sample, position)`` has one uniform number of its own, and the token is the one whose share of the distribution it
falls into (inverse transform sampling). ``generate`` then runs greedily over what was chosen: caches, positions of
vision-language models and stopping stay the library's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.controller.randomness import generator
from mmrl.text.likelihood import Vocabulary
from mmrl.trajectory import SampleId
from mmrl.transfer import to_device

BLOCK = 128
"""Tokens of a block in ``choose``."""


def uniforms(seed: int, ids: Sequence[SampleId], n: int) -> Tensor:
    """One uniform number in [0, 1) per (sample, position), ``[B, n]`` float64, whoever else is in the batch."""
    rows = [
        torch.rand(n, generator=generator(seed, i.step, i.slot, i.attempt, i.sample, "tokens"), dtype=torch.float64)
        for i in ids
    ]
    return torch.stack(rows)


class Draw:
    """Final class: a logits processor that chooses, and remembers the log-probs of what it chose.

    ``u`` ``[B, T]``: the uniforms; ``temperature`` 0 takes the likeliest. ``top_k`` and ``top_p`` (Holtzman et al.
    2019, arXiv 1904.09751) narrow the choice; log-probs are always of the whole distribution at ``temperature``, which
    is what the update recomputes. ``forbidden`` tokens are not in it.
    """

    def __init__(
        self,
        u: Tensor,
        temperature: float,
        top_p: float = 1.0,
        top_k: int | None = None,
        forbidden: Sequence[int] = (),
    ) -> None:
        self.u, self.temperature, self.top_p, self.top_k = u, temperature, top_p, top_k
        self.forbidden = list(forbidden)
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, V]`` whose maximum is the token chosen; ``scores`` itself is written to."""
        scaled = without(scores, self.forbidden)
        scaled = scaled if self.temperature in (0, 1) else scaled / self.temperature
        log_probs = torch.log_softmax(scaled, -1, dtype=torch.float32)
        if self.temperature == 0:
            token = log_probs.argmax(-1, keepdim=True)
        else:
            token = choose(log_probs, self.u[:, len(self.log_probs)].to(scores.device), self.top_p, self.top_k)
        self.log_probs.append(log_probs.gather(-1, token).squeeze(-1))
        return scores.scatter_(-1, token, torch.inf)  # generate gives a copy of its own


def without(logits: Tensor, forbidden: list[int], vocabulary: Vocabulary | None = None) -> Tensor:
    """``logits`` ``[..., V]`` with the ``forbidden`` tokens made impossible; ``vocabulary``: those of this rank's part
    of it."""
    first = 0 if vocabulary is None else vocabulary.first
    if vocabulary is not None:
        forbidden = [token for token in forbidden if first <= token < first + logits.shape[-1]]
    if not forbidden:
        return logits
    return logits.index_fill(-1, to_device(torch.tensor(forbidden) - first, logits.device), -torch.inf)


def choose(log_probs: Tensor, u: Tensor, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """The token ``[B, 1]`` into whose share of ``log_probs`` ``[B, V]`` the uniform ``u`` ``[B]`` falls.

    Found in two steps, the block of tokens and then the token in it, so that running sums are of few numbers. Where the
    distribution is not finite the token is any, and no index is outside the vocabulary: the log-probs tell afterwards.
    """
    probs = narrowed(log_probs.exp(), top_p, top_k)
    lacking = -probs.shape[-1] % BLOCK
    blocks = (pad(probs, (0, lacking)) if lacking else probs).unflatten(-1, (-1, BLOCK))
    ends = blocks.sum(-1).double().cumsum(-1)
    place = below(u.double().unsqueeze(-1) * ends[:, -1:], ends)
    block = torch.searchsorted(ends, place, right=True)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    block = block.clamp(max=blocks.shape[1] - 1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(-1)].double().cumsum(-1)
    token = block * BLOCK + torch.searchsorted(inside, below(place - before, inside), right=True)
    return token.clamp(max=probs.shape[-1] - 1)


def below(place: Tensor, ends: Tensor) -> Tensor:
    """``place`` ``[B, 1]``, where rounding put it at the last of ``ends`` or past it a little before.

    A token that cannot be drawn is then not drawn, even where it is the last.
    """
    return torch.minimum(place, ends[:, -1:] * (1 - 2**-52))


def narrowed(probs: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """``probs`` ``[B, V]`` with 0 for what ``top_k`` and ``top_p`` leave out."""
    if top_k is not None and top_k < probs.shape[-1]:
        probs = torch.where(probs < probs.topk(top_k, -1).values[:, -1:], 0.0, probs)
    if top_p < 1:
        falling, order = probs.double().sort(-1, descending=True)
        before = falling.cumsum(-1) - falling  # what is likelier: a token stays while that is below top_p of the rest
        falling = torch.where(before < top_p * falling.sum(-1, keepdim=True), falling, 0.0)
        probs = torch.zeros_like(falling).scatter_(-1, order, falling)
    return probs
