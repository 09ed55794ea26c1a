"""Sample tokens with one random number per (sample, position), inside Hugging Face's ``generate``.

``generate`` draws from one global generator, so that a sample would depend on its neighbours. Here every
``(sample, position)`` has one uniform number of its own, and the token is the one whose share of the distribution it
falls into (inverse transform sampling). ``generate`` then runs greedily over what was chosen: caches, positions of
vision-language models and stopping stay the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.config.sampling import TextSampling
from mmrl.core.randomness import generator
from mmrl.core.trajectory import SampleId
from mmrl.core.transfer import to_device
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.likelihood import Vocabulary

BLOCK = 128
"""Tokens of a block in ``choose``."""


def uniforms(seed: int, ids: Sequence[SampleId], n: int) -> Tensor:
    """One uniform number in [0, 1) per (sample, position), ``[B, n]`` float64, whoever else is in the batch."""
    rows = [
        torch.rand(n, generator=generator(seed, i.step, i.slot, i.attempt, i.sample, "tokens"), dtype=torch.float64)
        for i in ids
    ]
    return torch.stack(rows)


class Penalty:
    """Final class: the repetition penalty of CTRL (Keskar et al. 2019, arXiv 1909.05858), as transformers and vLLM have
    it: logits of tokens that prompt or response contain are divided by ``penalty`` where positive, else multiplied.

    ``mask`` ``[B, P]``: 1 on the prompts' tokens, 0 on padding, which is no token of theirs.
    """

    def __init__(self, penalty: float, mask: Tensor) -> None:
        self.penalty, self.mask = penalty, mask.bool()

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Logits ``[B, V]`` for the token behind ``input_ids`` ``[B, P + t]``."""
        prompt = self.mask.shape[1]
        first = input_ids.gather(1, self.mask.int().argmax(1, keepdim=True))  # in the place of padding
        said = torch.where(self.mask, input_ids[:, :prompt], first)
        said = torch.cat([said, input_ids[:, prompt:]], 1)
        found = logits.gather(1, said)
        return logits.scatter(1, said, torch.where(found < 0, found * self.penalty, found / self.penalty))


class Draw:
    """Final class: a logits processor that chooses, and remembers the log-probs of what it chose.

    ``u`` ``[B, T]``: the uniforms; ``temperature`` 0 takes the likeliest. ``top_k``, ``top_p`` (Holtzman et al. 2019,
    arXiv 1904.09751) and ``min_p`` (Nguyen et al. 2024, arXiv 2407.01082) narrow the choice, ``penalty`` changes it,
    and of the first ``least`` tokens none is of ``stops``. Log-probs are always of the whole distribution at
    ``temperature``, without any of these, which is what the update recomputes. ``forbidden`` tokens are not in it.
    ``frame``: makes logits ``[B, V]`` of those ``[B, V]``, or ``[2B, V]``, of the model at a place of the response.
    """

    def __init__(
        self,
        u: Tensor,
        temperature: float,
        top_p: float = 1.0,
        top_k: int | None = None,
        forbidden: Sequence[int] = (),
        *,
        min_p: float = 0.0,
        penalty: Penalty | None = None,
        least: int = 0,
        stops: Sequence[int] = (),
        frame: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self.frame = frame
        self.min_p, self.penalty, self.least, self.stops = min_p, penalty, least, list(stops)
        self.u, self.temperature, self.top_p, self.top_k = u, temperature, top_p, top_k
        self.forbidden = list(forbidden)
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, V]`` whose maximum is the token chosen; ``scores`` itself is written to."""
        position, said = len(self.log_probs), scores
        if self.frame is not None:
            said = self.frame(scores, position)
        token, log_probs = self.pick(input_ids, said, self.u[:, position], early=position < self.least)
        self.log_probs.append(log_probs)
        token = token.repeat(len(scores) // len(token))
        return scores.scatter_(-1, token.unsqueeze(-1), torch.inf)  # generate gives a copy of its own

    def pick(self, input_ids: Tensor, scores: Tensor, u: Tensor, *, early: bool) -> tuple[Tensor, Tensor]:
        """A token for each row of ``scores`` ``[B, V]``, by its uniform of ``u`` ``[B]``, and its log-prob, ``[B]``;
        ``early``: none of ``stops``."""
        logits = without(scores, self.forbidden)
        log_probs = drawn_from = self._log_probs(logits)
        if self.penalty is not None or early:
            changed = logits if self.penalty is None else self.penalty(input_ids, logits)
            drawn_from = self._log_probs(without(changed, self.stops if early else []))
        if self.temperature == 0:
            token = drawn_from.argmax(-1, keepdim=True)
        else:
            token = choose(drawn_from, u.to(scores.device), self.top_p, self.top_k, self.min_p)
        return token.squeeze(-1), log_probs.gather(-1, token).squeeze(-1)

    def _log_probs(self, logits: Tensor) -> Tensor:
        scaled = logits if self.temperature in (0, 1) else logits / self.temperature
        return torch.log_softmax(scaled, -1, dtype=torch.float32)


def draw_of(
    settings: TextSampling, u: Tensor, temperature: float, conditioner: Conditioner, prompts: Tensor, first: int = 0
) -> Draw:
    """What chooses tokens as a recipe says, for the model of ``conditioner``; ``prompts``: the mask of ``Penalty``;
    ``first``: tokens that the responses have already."""
    penalty, frame = settings.repetition_penalty, conditioner.frame
    return Draw(
        u,
        temperature,
        settings.top_p,
        settings.top_k,
        conditioner.forbidden,
        min_p=settings.min_p,
        penalty=None if penalty == 1 else Penalty(penalty, prompts),
        least=max(0, settings.min_new_tokens - first),
        stops=conditioner.stop_tokens,
        frame=None if frame is None else lambda said, n: frame.logits(said.unsqueeze(1), first + n)[:, 0],
    )


def without(logits: Tensor, forbidden: list[int], vocabulary: Vocabulary | None = None) -> Tensor:
    """``logits`` ``[..., V]`` with the ``forbidden`` tokens made impossible; ``vocabulary``: those of this rank's part
    of it."""
    first = 0 if vocabulary is None else vocabulary.first
    if vocabulary is not None:
        forbidden = [token for token in forbidden if first <= token < first + logits.shape[-1]]
    if not forbidden:
        return logits
    return logits.index_fill(-1, to_device(torch.tensor(forbidden) - first, logits.device), -torch.inf)


def choose(log_probs: Tensor, u: Tensor, top_p: float = 1.0, top_k: int | None = None, min_p: float = 0.0) -> Tensor:
    """The token ``[B, 1]`` into whose share of ``log_probs`` ``[B, V]`` the uniform ``u`` ``[B]`` falls.

    Found in two steps, the block of tokens and then the token in it, so that running sums are of few numbers. Where the
    distribution is not finite the token is any, and no index is outside the vocabulary: the log-probs tell afterwards.
    """
    probs = narrowed(log_probs.exp(), top_p, top_k, min_p)
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


def narrowed(probs: Tensor, top_p: float, top_k: int | None, min_p: float = 0.0) -> Tensor:
    """``probs`` ``[B, V]`` with 0 for what ``top_k``, ``top_p`` and ``min_p`` leave out, in this order."""
    if top_k is not None and top_k < probs.shape[-1]:
        probs = torch.where(probs < probs.topk(top_k, -1).values[:, -1:], 0.0, probs)
    if top_p < 1:
        falling, order = probs.double().sort(-1, descending=True)
        before = falling.cumsum(-1) - falling  # what is likelier: a token stays while that is below top_p of the rest
        falling = torch.where(before < top_p * falling.sum(-1, keepdim=True), falling, 0.0)
        probs = torch.zeros_like(falling).scatter_(-1, order, falling)
    if min_p > 0:
        probs = torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs
