"""Pictures that a language model writes token by token: where which token may stand, guidance, and their pixels.

A picture is a frame of tokens: rows of ``width`` codes of the VQ model, each with a token that ends it, and the tokens
that end the picture. Emu3's authors let ``generate`` draw among the codes where a code stands, and force the
others (``Emu3PrefixConstrainedLogitsHelper``); so does this. Forced tokens are told, not written: no loss counts them.

Classifier-free guidance takes two forwards, of the prompt and of the negative prompt, with the same picture behind
them; its logits are ``negative + scale * (prompt - negative)``, as Emu3's authors have them. Tokens are drawn from that
distribution over the codes, and log-probs are of it, in sampling and in training: the importance ratio is that of what
was drawn, as for the denoisers here. The field differs: the code of Janus-Pro-R1 (arXiv 2506.01480) combines both
forwards in its log-probs, too (divided by the scale); that of GCPO (arXiv 2509.22485) draws from the guided
distribution and takes the log-probs of the prompt's forward alone, which is not what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.trajectory import Segment
from mmrl.core.transfer import to_device

if TYPE_CHECKING:  # slow to import
    from transformers import Emu3ForConditionalGeneration


@dataclass
class Frame:
    """Final class: ``height`` rows of ``width`` codes of a picture. ``codes``: the tokens that stand for codes;
    ``end_of_row``: the token behind each row; ``ends``: the tokens behind the last. ``scale``: of guidance, 1 without.
    ``mean``, ``std``: of the pixels that the VQ model reads and makes, by channel, as its processor has them."""

    height: int
    width: int
    codes: Sequence[int]
    end_of_row: int
    ends: Sequence[int]
    scale: float = 1.0
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)
    _made: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """How many tokens a picture is."""
        return self.height * (self.width + 1) + len(self.ends)

    @property
    def guided(self) -> bool:
        """Whether there are two forwards."""
        return self.scale != 1

    @property
    def free(self) -> Tensor:
        """``[T]`` bool: where a code stands; elsewhere there is one token to choose from."""
        row = torch.arange(self.tokens) % (self.width + 1) < self.width
        return row & (torch.arange(self.tokens) < self.height * (self.width + 1))

    def logits(self, said: Tensor, first: int = 0) -> Tensor:
        """Logits ``[B, T, V]`` of the places from ``first`` on, of what may stand there; ``said``: those of the model,
        ``[2B, T, V]`` under guidance, the negative prompts' behind the others."""
        if self.guided:
            asked, negative = said.float().chunk(2)
            said = negative + self.scale * (asked - negative)
        places = slice(first, first + said.shape[1])
        free, only, code = self._places(said.shape[-1], said.device)
        kept = said.masked_fill(~(code & free[places].unsqueeze(1)), -torch.inf)
        index = only[places].view(1, -1, 1).expand(len(said), -1, 1)
        forced = torch.where(free[places].unsqueeze(1), kept.gather(-1, index), 0.0)
        return kept.scatter(-1, index, forced)

    def _places(self, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``free`` ``[T]``; a token that may stand at each place, the only one where none is free, ``[T]``; and which
        tokens are codes, ``[V]`` bool."""
        key = vocabulary, device
        if key not in self._made:
            free = self.free
            only = torch.where(free, self.codes[0], self.end_of_row)
            only[len(only) - len(self.ends) :] = torch.tensor(self.ends)
            code = torch.zeros(vocabulary, dtype=torch.bool)
            code[torch.tensor(self.codes)] = True
            self._made[key] = to_device(free, device), to_device(only, device), to_device(code, device)
        return self._made[key]

    def segments(self, prompt: int, tokens: int) -> list[Segment]:
        """The spans of ``tokens`` behind a prompt of ``prompt`` tokens: codes are written, the rest is told."""
        ends = [self.width if n % 2 == 0 else 1 for n in range(2 * self.height)]
        at = [0, *accumulate(ends)]
        at[-1] = self.tokens
        return [
            Segment(prompt + first, prompt + min(last, tokens), "told" if n % 2 else "written")
            for n, (first, last) in enumerate(pairwise(at))
            if first < tokens
        ]

    @torch.no_grad()
    def pixels(self, model: Emu3ForConditionalGeneration, tokens: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]`` float32 in [0, 1] of whole frames ``[B, T]``."""
        made = model.decode_image_tokens(image_tokens=tokens, height=self.height, width=self.width).float()
        mean, std = (to_device(torch.tensor(of).view(-1, 1, 1), made.device) for of in (self.mean, self.std))
        return (made * std + mean).clamp(0, 1)
