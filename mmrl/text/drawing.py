"""Draw tokens with randomness that belongs to the sample, inside Hugging Face's own ``generate``.

``generate`` draws from one global generator, so that a sample would depend on its neighbours. Here every
``(sample, position)`` has one uniform number of its own, and the token is the one whose share of the distribution it
falls into (inverse transform sampling). ``generate`` then runs greedily over what was chosen: caches, positions of
vision-language models and stopping stay the library's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.controller.randomness import generator
from mmrl.trajectory import SampleId


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
        log_probs = torch.log_softmax(without(scores.float(), self.forbidden) / (self.temperature or 1.0), -1)
        if self.temperature == 0:
            token = log_probs.argmax(-1, keepdim=True)
        else:
            token = choose(log_probs, self.u[:, len(self.log_probs)].to(scores.device), self.top_p, self.top_k)
        self.log_probs.append(log_probs.gather(-1, token).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter_(-1, token, 0.0)


def without(logits: Tensor, forbidden: list[int]) -> Tensor:
    """``logits`` ``[..., V]`` with the ``forbidden`` tokens made impossible."""
    if not forbidden:
        return logits
    return logits.index_fill(-1, torch.tensor(forbidden, device=logits.device), -torch.inf)


def choose(log_probs: Tensor, u: Tensor, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """The token ``[B, 1]`` into whose share of ``log_probs`` ``[B, V]`` the uniform ``u`` ``[B]`` falls."""
    probs = log_probs.double().exp()
    if top_k is not None and top_k < probs.shape[-1]:
        probs = torch.where(probs < probs.topk(top_k, -1).values[:, -1:], 0.0, probs)
    if top_p < 1:
        falling, order = probs.sort(-1, descending=True)
        before = falling.cumsum(-1) - falling  # what is likelier: a token stays while that is below top_p of the rest
        falling = torch.where(before < top_p * falling.sum(-1, keepdim=True), falling, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, falling)
    shares = probs.cumsum(-1)
    place = u.to(shares.dtype).unsqueeze(-1) * shares[:, -1:]
    return torch.searchsorted(shares, place, right=True).clamp(max=probs.shape[-1] - 1)
