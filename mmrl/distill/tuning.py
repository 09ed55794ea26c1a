"""Train the LoRA adapter of a language model that reads for students, so that its states say what the judge would.

It learns from the judge's lists and single verdicts, as the interaction student does, through a small head on its last
states and the log-probability of the answer. The head is thrown away: the students read the states.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmrl.distill.formulas import losses
from mmrl.readers.texts import Asked, States, TextReader
from mmrl.report.progress import Progress

_BETAS = 0.9, 0.99


@dataclass(frozen=True)
class Tuning:
    """``lr``: of the adapter; ``groups``: that make a step."""

    lr: float = 3e-3
    passes: int = 4
    groups: int = 8
    temperature: float = 1.0
    seed: int = 0


class _Head(nn.Module):
    """Begins with the log-probability of the answer as its logit."""

    def __init__(self, width: int, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, hidden), nn.GELU())
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, states: States, width: int) -> Tensor:
        """Logits ``[B]``, from the last layer's states at the end of the prompt and at the end of the answer."""
        last = states.mask.sum(1).long() - 1
        end = states.answers[torch.arange(len(last), device=last.device), last]
        seen = torch.cat([states.before[:, -width:], end[:, -width:]], 1)
        return self.out(self.net(seen)).squeeze(-1) + states.log_probs.sum(1)


def tune(
    reader: TextReader, asked: Sequence[Asked], verdicts: Tensor, groups: Sequence[Sequence[int]], settings: Tuning
) -> None:
    """Train the adapter of ``reader`` on the verdicts ``[N]`` of ``groups``, the rows of ``asked`` of each.

    The global generator of torch is left as it was.
    """
    cards = [reader.device] if reader.device.type == "cuda" else []
    adapter = list(reader.adapter.values())
    width = int(reader.model.config.get_text_config().hidden_size)
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(settings.seed)
        head = _Head(width).to(reader.device)
    given = [{"params": adapter, "lr": settings.lr}, {"params": list(head.parameters()), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(given, betas=_BETAS, weight_decay=0.0)
    order, draw = list(range(len(groups))), random.Random(settings.seed)
    steps = settings.passes * math.ceil(len(order) / settings.groups)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * max(0.0, 1 - n / steps))
    for weight in adapter:
        weight.requires_grad_(True)
    with Progress(steps, "tune the model that reads", "steps") as progress:
        for _ in range(settings.passes):
            draw.shuffle(order)
            for first in range(0, len(order), settings.groups):
                of = [groups[n] for n in order[first : first + settings.groups]]
                loss = _loss(reader, head, width, asked, verdicts, of, settings.temperature)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(adapter, 1.0)
                optimizer.step()
                rates.step()
                progress.advance(1, f"loss {float(loss.detach()):.3f}")
    for weight in adapter:
        weight.requires_grad_(False)


def _loss(
    reader: TextReader,
    head: _Head,
    width: int,
    asked: Sequence[Asked],
    verdicts: Tensor,
    groups: Sequence[Sequence[int]],
    temperature: float,
) -> Tensor:
    rows = [row for group in groups for row in group]
    logits = head(reader.forward([asked[row] for row in rows]), width)
    own = torch.zeros(len(groups), len(rows), device=logits.device)
    first = 0
    for n, group in enumerate(groups):
        own[n, first : first + len(group)] = 1
        first += len(group)
    wide = logits.expand(own.shape)
    found = losses(wide, wide, verdicts[rows].to(logits.device).expand(own.shape), own, temperature)
    return found.interaction_list + found.interaction
