"""Sample tokens with the training weights, in Hugging Face's ``generate``: whole responses, or in two parts.

In two parts (``midway``) the first tokens of a response are drawn, and later those behind them. Every token has the
uniform number of its place in the response, so that the two parts are the response that is drawn at once, within the
rounding of another batch shape. An engine with weights of its own draws the second part with another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from mmrl.config.sampling import TextSampling
from mmrl.core.trajectory import SampleId, TextRows
from mmrl.core.transfer import to_device
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.stop_strings import Ends, StopStrings
from mmrl.models.text.token_sampling import draw_of, uniforms

GENERATE = "generate"
"""The method of transformers' models that samples; ``mmrl plan`` replaces it."""


class WritingPolicy(Protocol):
    """What ``generate`` asks of its pipeline."""

    policy: nn.Module
    conditioner: Conditioner
    settings: TextSampling
    stops: StopStrings
    device: torch.device


def generate(
    writer: WritingPolicy,
    inputs: dict[str, Tensor],
    ids: Sequence[SampleId],
    limits: Sequence[int | None],
    seed: int,
    temperature: float,
    until: int | None = None,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, log-probs and mask ``[B, T]``, truncated ``[B]`` of responses.

    ``inputs``: the prompts, and under the guidance of a frame as many negative ones, with the tokens that were already
    drawn behind them; ``before`` ``[B, T']`` are the log-probs of those. ``limits``: the tokens that each row may have,
    if its prompt has a limit. ``until``: draw only so many tokens of each response.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    settings, most = writer.settings, writer.settings.max_new_tokens
    first = 0 if before is None else before.shape[1]
    u = to_device(uniforms(seed, ids, most)[:, first:], writer.device)
    inputs.pop("position_ids", None)  # generate counts them itself, from the mask
    prompt = inputs["input_ids"].shape[1] - first
    draw = draw_of(settings, u, temperature, writer.conditioner, inputs["attention_mask"][:, :prompt], first)
    ends = Ends(writer.stops, [min(limit or most, most) for limit in limits], prompt)
    further = {"stopping_criteria": StoppingCriteriaList([ends])} if writer.stops.strings or any(limits) else {}  # type: ignore[list-item]
    model: Callable[..., Tensor] = getattr(writer.policy, GENERATE)
    out = model(
        **inputs,
        logits_processor=LogitsProcessorList([draw]),  # type: ignore[list-item]
        do_sample=False,
        max_new_tokens=(until or most) - first,
        eos_token_id=draw.stops,
        pad_token_id=writer.conditioner.pad_token,
        synced_gpus=False,  # with sharded weights generate would wait for other ranks
        **further,
    )
    tokens = out[: len(ids), prompt:]
    inside, stopped = ends.inside(tokens)
    stops = torch.isin(tokens, to_device(torch.tensor(draw.stops), tokens.device)) & inside
    mask = ((stops.long().cumsum(1) - stops.long() == 0) & inside).float()
    log_probs = torch.cat([*([] if before is None else [before]), torch.stack(draw.log_probs, 1)], 1)
    return tokens, log_probs, mask, ~(stops.any(1) | stopped)


def begun(drawn: TextRows, until: int, most: int) -> TextRows:
    """Responses of which ``until`` tokens were drawn at most, with ``under_way`` for those to be gone on with;
    ``most``: the tokens that a response may have."""
    room = [min(slot.prompt.max_new_tokens or most, most) > until for slot in drawn.slots]
    going = [n == until and more for n, more in zip(drawn.responses, room, strict=True)]
    return replace(drawn, under_way=to_device(torch.tensor(going), drawn.tokens.device) & drawn.truncated)


def finished(begun: TextRows, go_on: Callable[[TextRows], TextRows]) -> TextRows:
    """The whole responses; ``go_on`` draws the rest of those under way."""
    assert begun.under_way is not None
    going = torch.nonzero(begun.under_way).flatten().tolist()
    if not going:
        return replace(begun, under_way=None)
    both = TextRows.join([begun, replace(go_on(begun.rows(going)), under_way=begun.under_way[begun.under_way])])
    place = {row: len(begun) + n for n, row in enumerate(going)}
    return replace(both.rows([place.get(row, row) for row in range(len(begun))]), under_way=None)
