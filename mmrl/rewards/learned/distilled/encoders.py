"""What students get of prompts and answers: their words and pixels, or what a frozen model has read of them.

The LoRA adapter of a language model that reads may be trained, so that its states say what the judge would. It learns
from the judge's lists and single verdicts, as the interaction student does, through a small head on its last states and
the log-probability of the answer. The head is thrown away: the students read the states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, pad

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject, as_number, as_object, as_text
from mmrl.logging.progress import Progress
from mmrl.rewards.encoders.described import described, digest
from mmrl.rewards.encoders.pictures import PictureReader, Views
from mmrl.rewards.encoders.texts import Asked, Question, States, TextReader
from mmrl.rewards.judging.statistics import rows_of
from mmrl.rewards.learned.descent import descend, passes
from mmrl.rewards.learned.distilled.comparing import Comparing
from mmrl.rewards.learned.distilled.read_students import Features, ReadShape, ReadStudents
from mmrl.rewards.learned.distilled.sides import Pairs, unique
from mmrl.rewards.learned.distilled.students import Inputs, Shape, Side, Students, inputs_of
from mmrl.rewards.learned.formulas import losses

_AT_ONCE = 64
_MORE, _LEAST = 10, 2e-4
"""An adapter's learning rate: that of the recipe for an adapter, ten times the one for all weights, and no less."""
_SIDE = 8
"""A picture has a token for each place of a grid of this side."""
_TOKENS = 32
"""The most tokens of an answer, and those of a prompt for a picture: of more, neighbours are averaged."""
_BETAS = 0.9, 0.99


class Words:
    """Words and pixels, read by students that begin from nothing. ``places``: of pictures in a prompt and in an answer;
    None: as many as there are."""

    def __init__(self, shape: Shape, places: tuple[int, int] | None = None) -> None:
        self.shape, self.places = shape, places

    def at(self, device: torch.device | str) -> None:
        """It has no model."""

    def read(self, prompts: Sequence[Side], of_prompt: Sequence[int], answers: Sequence[Side]) -> tuple[Inputs, Inputs]:
        most = (max(len(side.pictures) for side in of) for of in (prompts, answers))
        places = self.places or [min(self.shape.pictures, count) for count in most]
        return inputs_of(prompts, self.shape, places[0]), inputs_of(answers, self.shape, places[1])


class Backbone:
    """The model of a recipe, frozen: it reads each answer together with its prompt.

    ``said`` is what ``backbone_of`` made of the recipe. Raises ``UserError`` where the model is not there, has other
    weights, or cannot read.
    """

    def __init__(self, said: JsonObject) -> None:
        model = as_object(said["model"])
        path = as_text(as_object(model["model"])["path"])
        what, again = "reads for the students", "mmrl distill"
        self.makes = as_text(said["makes"])
        kind = TextReader if self.makes == "text" else PictureReader
        try:
            self.reader = kind(model, what, again)
        except UserError as error:
            raise UserError(f"{error}; or distil with --backbone none") from error
        if digest(path) != said["sha256"]:
            raise UserError(
                f"the model at {path} is not the one with which the students were trained: its files have changed; put "
                "those of then there, or run mmrl distill again"
            )
        self.modules = self.reader.modules
        self.lr = float(as_number(said["lr"]))
        self.first = {name: of.detach().clone() for name, of in self.adapter.items()}

    def at(self, device: torch.device | str) -> None:
        """Read on ``device`` from now on, where ``modules`` are."""
        self.reader.at(device)

    @property
    def adapter(self) -> dict[str, Tensor]:
        """The weights that may be trained for the students; none of a diffusion model."""
        return dict(self.reader.adapter) if isinstance(self.reader, TextReader) else {}

    def tune(self, pairs: Pairs, groups: Sequence[int], seed: int) -> None:
        """Train the adapter anew on these groups of ``pairs``; a diffusion model has none."""
        if not isinstance(self.reader, TextReader):
            return
        self.load(self.first)
        rows, of_prompt = unique(pairs.prompts)
        asked = self.reader.asked(
            [Question(side.text, side.pictures) for side in rows], of_prompt, [side.text for side in pairs.answers]
        )
        every = rows_of(pairs.groups)
        tune(self.reader, asked, torch.tensor(pairs.verdicts), [every[n] for n in groups], Tuning(self.lr, seed=seed))

    def load(self, adapter: Mapping[str, Tensor]) -> None:
        """Take other weights of the adapter. Raises ``ValueError`` where they are not those of this model."""
        own = self.adapter
        if own.keys() != adapter.keys() or any(own[name].shape != adapter[name].shape for name in own):
            raise ValueError("it has not the adapter of its backbone")
        for name, of in own.items():
            of.data.copy_(adapter[name])

    def read(
        self, prompts: Sequence[Side], of_prompt: Sequence[int], answers: Sequence[Side]
    ) -> tuple[Features, Features]:
        """The tokens of ``prompts``, and those of ``answers``, each read with ``prompts[of_prompt[n]]``; on the CPU."""
        if isinstance(self.reader, TextReader):
            return _texts(self.reader, prompts, of_prompt, answers)
        return _pictures(self.reader, prompts, of_prompt, answers)


Encoder = Words | Backbone


def backbone_of(recipe: Recipe) -> JsonObject:
    """The model of ``recipe`` as a folder of students keeps it, with its hash, and the learning rate of its adapter."""
    model = described(recipe)
    rate = recipe.optim.lr if recipe.model.lora else _MORE * recipe.optim.lr
    lr = max(rate, _LEAST)
    return {
        "makes": recipe.makes,
        "lr": lr,
        "sha256": digest(as_text(as_object(model["model"])["path"])),
        "model": model,
    }


def _texts(
    reader: TextReader, prompts: Sequence[Side], of_prompt: Sequence[int], answers: Sequence[Side]
) -> tuple[Features, Features]:
    questions = [Question(side.text, side.pictures) for side in prompts]
    found = reader.states(reader.asked(questions, of_prompt, [side.text for side in answers]))
    firsts = torch.tensor([list(of_prompt).index(n) for n in range(len(prompts))])
    asked = found.before[firsts].unsqueeze(1)
    tokens = torch.cat([found.answers, found.log_probs.unsqueeze(-1)], -1)
    return Features(asked, torch.ones(asked.shape[:2])), fewer(Features(tokens, found.mask), _TOKENS)


def fewer(inputs: Features, most: int) -> Features:
    """At most ``most`` tokens of a row: of a longer one, the means of parts of about equal length."""
    counts = inputs.mask.sum(1).long()
    length = min(most, int(counts.max()))
    tokens, mask = (
        inputs.tokens.new_zeros(len(counts), length, inputs.tokens.shape[2]),
        inputs.mask.new_zeros(len(counts), length),
    )
    for n, count in enumerate(counts.tolist()):
        parts = min(count, length)
        part = torch.arange(count) * parts // max(1, count)
        tokens[n].index_add_(0, part, inputs.tokens[n, :count])
        tokens[n, :parts] /= part.bincount(minlength=parts).unsqueeze(1)
        mask[n, :parts] = 1
    return Features(tokens, mask)


def _pictures(
    reader: PictureReader, prompts: Sequence[Side], of_prompt: Sequence[int], answers: Sequence[Side]
) -> tuple[Features, Features]:
    texts = [side.text for side in prompts]
    asked = torch.stack([_of_features(of) for of in reader.prompts(texts)])
    tokens = []
    for first in range(0, len(answers), _AT_ONCE):
        pictures = [side.pictures[0] for side in answers[first : first + _AT_ONCE]]
        own = [texts[n] for n in of_prompt[first : first + _AT_ONCE]]
        tokens.append(tokens_of(reader.views(pictures, own)).cpu())
    given = torch.cat(tokens)
    return Features(asked, torch.ones(asked.shape[:2])), Features(given, torch.ones(given.shape[:2]))


def _of_features(features: Mapping[str, Tensor]) -> Tensor:
    """Tokens ``[T, F]`` of what a diffusion model is given of a prompt: of each tensor its rows, at most 32 of them;
    narrow ones are padded with zeros."""
    parts = []
    for name in sorted(features):
        one = features[name]
        if one.is_floating_point() and one.ndim in (1, 2):
            rows = one.float().view(-1, one.shape[-1])
            parts.append(fewer(Features(rows.unsqueeze(0), torch.ones(1, len(rows))), _TOKENS).tokens[0])
    if not parts:
        return torch.zeros(1, 1)
    widest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[1])) for part in parts])


def tokens_of(views: Views) -> Tensor:
    """Tokens ``[B, places, F]``: of each place its latent, and for each level its error and state."""
    height, width = views.latents.shape[-2:]
    size = min(_SIDE, height), min(_SIDE, width)
    maps = [views.latents, *views.errors, *(error.square().mean(1, keepdim=True) for error in views.errors)]
    maps += [_as_map(state, height, width) for state in views.states]
    return torch.cat([adaptive_avg_pool2d(one, size).flatten(2) for one in maps], 1).transpose(1, 2)


def _as_map(states: Tensor, height: int, width: int) -> Tensor:
    """States ``[B, places, D]`` as a map ``[B, D, h, w]``; where the places are no grid, their mean."""
    if states.ndim == 4:
        return states
    patch = round((height * width / states.shape[1]) ** 0.5)
    if patch and (height // patch) * (width // patch) == states.shape[1]:
        return states.transpose(1, 2).unflatten(2, (height // patch, width // patch))
    return states.mean(1)[..., None, None]


def students_of(encoder: Encoder, prompts: Inputs | Features, answers: Inputs | Features) -> Comparing:
    """New students, for what the encoder has read for training."""
    if isinstance(encoder, Words):
        return Students(encoder.shape)
    assert isinstance(prompts, Features)
    assert isinstance(answers, Features)
    most = _TOKENS if encoder.makes == "text" else answers.tokens.shape[1]
    shape = ReadShape(prompts.tokens.shape[2], answers.tokens.shape[2], prompts.tokens.shape[1], most)
    return ReadStudents(shape).standardize(prompts, answers)


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
    steps = settings.passes * math.ceil(len(groups) / settings.groups)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10) * max(0.0, 1 - n / steps))
    for weight in adapter:
        weight.requires_grad_(True)
    with Progress(steps, "tune the model that reads", "steps") as progress:
        for batches in passes(len(groups), settings.groups, settings.passes, settings.seed):
            for numbers in batches:
                of = [groups[n] for n in numbers]
                loss = _loss(reader, head, width, asked, verdicts, of, settings.temperature)
                descend(optimizer, loss, rates, adapter)
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
    own = torch.block_diag(*(torch.ones(1, len(group)) for group in groups)).to(logits.device)
    wide = logits.expand(own.shape)
    found = losses(wide, wide, verdicts[rows].to(logits.device).expand(own.shape), own, temperature)
    return found.interaction_list + found.interaction
