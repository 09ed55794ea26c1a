"""Train the students on a judge's verdicts: the interaction student and the dual one together, on the fly."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.core.grouping import grouped
from mmrl.logging.progress import Progress
from mmrl.rewards.judging.statistics import rows_of
from mmrl.rewards.learned.descent import best, descend, passes
from mmrl.rewards.learned.distilled.comparing import Comparing, Encoded, Rows
from mmrl.rewards.learned.distilled.encoders import Encoder, students_of
from mmrl.rewards.learned.distilled.read_students import Features
from mmrl.rewards.learned.distilled.sides import unique
from mmrl.rewards.learned.distilled.students import Inputs, Side
from mmrl.rewards.learned.formulas import losses

_CHUNK = 512
"""Sides that are encoded at once where nothing is trained."""


@dataclass(frozen=True)
class Table:
    """Pairs of a prompt and an answer with verdicts ``[N]`` in [0, 1].

    ``prompts`` has a row for each prompt and ``of_prompt`` ``[N]`` says which; ``answers`` has a row for each pair.
    ``groups``: the rows of each group, which were drawn together for one prompt.
    """

    prompts: Inputs | Features
    answers: Inputs | Features
    of_prompt: Tensor
    verdicts: Tensor
    groups: list[list[int]]

    def part(self, groups: Sequence[int]) -> Table:
        """Only these of its groups."""
        kept = [row for group in groups for row in self.groups[group]]
        place = {row: n for n, row in enumerate(kept)}
        index = torch.tensor(kept, dtype=torch.int64)
        return replace(
            self,
            answers=self.answers.rows(index),
            of_prompt=self.of_prompt[index],
            verdicts=self.verdicts[index],
            groups=[[place[row] for row in self.groups[group]] for group in groups],
        )


@dataclass(frozen=True)
class Settings:
    """``epochs``: most passes over the groups; ``patience``: passes without a better validation loss that end it, and
    the best pass counts; None: all passes are made, and the last counts.
    ``others``: the weight of lists in which the answers to other prompts stand too, as ones that the judge would
    reject: right for pictures, wrong where one answer fits many prompts."""

    epochs: int = 40
    patience: int | None = 12
    groups: int = 8
    lr: float = 3e-3
    weight_decay: float = 0.05
    temperature: float = 1.0
    others: float = 0.0
    seed: int = 0


def table_of(
    prompts: Sequence[Side],
    answers: Sequence[Side],
    verdicts: Sequence[float],
    groups: Sequence[int],
    encoder: Encoder,
) -> Table:
    """The table of pairs, in the order of ``groups``, the number of each pair's group."""
    rows, of_prompt = unique(prompts)
    asked, given = encoder.read(rows, of_prompt, answers)
    return Table(asked, given, torch.tensor(of_prompt), torch.tensor(verdicts, dtype=torch.float32), rows_of(groups))


def split(
    of_prompt: Sequence[int], groups: Sequence[Sequence[int]], seed: int, shares: tuple[float, float] = (0.15, 0.2)
) -> tuple[list[int], list[int], list[int]]:
    """The groups for training, validation and the held-out test, of these ``shares`` each: by prompt, so that the
    groups of one prompt are in one part. ``of_prompt``: of each row; ``groups``: the rows of each."""
    by_prompt = grouped((of_prompt[group[0]], n) for n, group in enumerate(groups))
    order = sorted(by_prompt)
    random.Random(seed).shuffle(order)
    sizes = [max(1, round(share * len(order))) for share in shares]
    parts = order[sum(sizes) :], order[: sizes[0]], order[sizes[0] : sum(sizes)]
    train, validation, test = ([n for prompt in part for n in by_prompt[prompt]] for part in parts)
    return train, validation, test


def train(
    table: Table, validation: Table, encoder: Encoder, settings: Settings, device: torch.device | str
) -> Comparing:
    """Train new students on the groups of ``table``; returned are those of the pass with the smallest validation loss,
    or of the last one (``Settings.patience``).

    The global generator of torch is left as it was.
    """
    cards = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(settings.seed)
        students = students_of(encoder, table.prompts, table.answers).to(device)
        weights = _passes(students, table, validation, settings, device)
    students.load_state_dict(weights)
    return students.eval().requires_grad_(False)


def _passes(
    students: Comparing, table: Table, validation: Table, settings: Settings, device: torch.device | str
) -> dict[str, Tensor]:
    """Train, and return the weights of the best pass."""
    optimizer = torch.optim.AdamW(students.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    moves = torch.Generator().manual_seed(settings.seed)
    steps = settings.epochs * math.ceil(len(table.groups) / settings.groups)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))

    def looks(progress: Progress) -> Iterator[float]:
        for batches in passes(len(table.groups), settings.groups, settings.epochs, settings.seed):
            students.train()
            for groups in batches:
                loss = _loss(students, table, groups, settings, device, moves)
                descend(optimizer, loss, rates, students.parameters())
            now = validation_loss(students, validation, settings, device)
            progress.advance(1, f"loss {now:.3f}")
            yield now

    with Progress(settings.epochs, "distil", "passes") as progress:
        return best(looks(progress), lambda: copy.deepcopy(students.state_dict()), settings.patience)


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 50)
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def validation_loss(students: Comparing, table: Table, settings: Settings, device: torch.device | str) -> float:
    students.eval()
    with torch.no_grad():
        total = 0.0
        for first in range(0, len(table.groups), 4 * settings.groups):
            groups = list(range(first, min(first + 4 * settings.groups, len(table.groups))))
            total += float(_loss(students, table, groups, settings, device)) * len(groups)
    return total / len(table.groups)


def moved(pictures: Tensor, draw: torch.Generator) -> Tensor:
    """Pictures ``[..., 3, S, S]``, each moved by up to a sixteenth of its side; its edge is drawn on. Most verdicts do
    not depend on that, and the students cannot learn pixels by heart."""
    most = pictures.shape[-1] // 16
    flat = pictures.flatten(0, -4)
    if not most or not len(flat):
        return pictures
    wide = pad(flat, (most,) * 4, mode="replicate")
    places = torch.randint(0, 2 * most + 1, (len(flat), 2), generator=draw).tolist()
    size = pictures.shape[-1]
    return torch.stack([one[:, y : y + size, x : x + size] for one, (y, x) in zip(wide, places, strict=True)]).view_as(
        pictures
    )


def _loss(
    students: Comparing,
    table: Table,
    groups: list[int],
    settings: Settings,
    device: torch.device | str,
    draw: torch.Generator | None = None,
) -> Tensor:
    """The loss of the lists of these groups, and of these lists with the answers to the other prompts added to each.
    ``draw``: what moves the pictures."""
    of = [table.groups[n] for n in groups]
    rows = torch.tensor([row for group in of for row in group])
    firsts = torch.tensor([group[0] for group in of])
    which = torch.tensor([n for n, group in enumerate(of) for _ in group], device=device)
    asked = students.encode(table.prompts.rows(table.of_prompt[firsts]).to(device), 0).across(1)
    answers = table.answers.rows(rows)
    if draw is not None and isinstance(answers, Inputs):
        answers = replace(answers, pictures=moved(answers.pictures, draw))
    given = students.encode(answers.to(device), 1).across(0)
    both = students.dual(asked, given), students.interaction(asked, given)
    own = which == torch.arange(len(of), device=device).unsqueeze(1)
    verdicts = table.verdicts[rows].to(device).expand(own.shape)
    loss = losses(*both, verdicts, own.float(), settings.temperature).total()
    if not settings.others:
        return loss
    same = table.of_prompt[rows] == table.of_prompt[firsts].unsqueeze(1)  # another group of the same prompt
    there = own | ~same.to(device)
    wide = losses(*both, torch.where(own, verdicts, 0.0), there.float(), settings.temperature)
    return loss + settings.others * (wide.interaction_list + wide.dual_list + wide.between)


@torch.no_grad()
def scores(students: Comparing, table: Table, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The logits ``[N]`` of the dual student and of the interaction one for all pairs, on the CPU."""
    asked = _encoded(students, table.prompts, 0, device)
    dual, interaction = [], []
    for index in torch.arange(len(table.verdicts)).split(_CHUNK):
        pairs = asked.rows(table.of_prompt[index].to(device))
        given = students.encode(table.answers.rows(index).to(device), 1)
        dual.append(students.dual(pairs, given).cpu())
        interaction.append(students.interaction(pairs, given).cpu())
    return torch.cat(dual), torch.cat(interaction)


def _encoded(students: Comparing, inputs: Rows, side: int, device: torch.device | str) -> Encoded:
    chunks = torch.arange(len(inputs)).split(_CHUNK)
    parts = [students.encode(inputs.rows(index).to(device), side) for index in chunks]
    columns = zip(*((one.vectors, one.tokens, one.mask) for one in parts), strict=True)
    return Encoded(*(torch.cat(column) for column in columns))
