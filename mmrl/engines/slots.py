"""Sample in this process with the training weights, row by row: where a response ends, another one takes its place.

Every token has the uniform number of its place in its response (``mmrl.text.token_sampling``), so that a response does
not depend on those beside it, nor on the order in which they were asked for: only the rounding of other batch shapes
does. Rows end at the same column; what is to their left is padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmrl.engines.engine_weights import Allowance
from mmrl.engines.rollout import Request, Settings
from mmrl.engines.under_way import OneByOne
from mmrl.text.base_model import base_model
from mmrl.text.features import PER_TOKEN
from mmrl.text.generation import WritingPolicy
from mmrl.text.stop_strings import StopStrings, stops_of
from mmrl.text.token_sampling import Draw, Penalty
from mmrl.transfer import to_device

if TYPE_CHECKING:  # slow to import
    from transformers.cache_utils import Cache

Inputs: TypeAlias = "Callable[[Sequence[str], Sequence[dict[str, Tensor]]], dict[str, Tensor]]"
"""The model's arguments for prompts, padded on the left, of their features; prompts with one key are equal."""


@dataclass(eq=False)
class _Row:
    """A response. ``kind``: equal for equal settings; ``u``: the uniforms of the ``most`` tokens to be drawn;
    ``tokens``: with those of ``Request.partial``, ``log_probs``: without."""

    request: Request
    settings: Settings
    kind: str
    stops: StopStrings
    most: int
    u: list[float]
    tokens: list[int]
    log_probs: list[float]

    def finish(self) -> str | None:
        """Why it has ended; None where it goes on."""
        if self.tokens[-1] in self.settings.stop_token_ids:
            return "stop"
        if self.stops.complete(self.tokens[-self.stops.window :], len(self.tokens)):
            return "stop"
        return "length" if len(self.log_probs) == self.most else None


@dataclass
class _Batch:
    """Rows that are sampled together. ``tokens``, ``mask`` ``[B, L]``; ``shift`` ``[B, 1]``: what a model that counts
    positions itself adds to them behind pictures; ``cache``: of all tokens but the last."""

    rows: list[_Row]
    tokens: Tensor
    mask: Tensor
    shift: Tensor
    cache: Cache

    def of(self, index: list[int]) -> _Batch | None:
        """The rows ``index``; this batch is not used afterwards."""
        if len(index) == len(self.rows) or not index:
            return self if index else None
        at = to_device(torch.tensor(index), self.tokens.device)
        self.cache.reorder_cache(at)  # type: ignore[arg-type]
        rows = [self.rows[n] for n in index]
        return replace(self, rows=rows, tokens=self.tokens[at], mask=self.mask[at], shift=self.shift[at])

    @property
    def takes_more(self) -> bool:
        """Whether rows can be added: not where layers have a state, or a window, in place of keys of all tokens."""
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer and layer.is_initialized for layer in self.cache.layers)

    def with_more(self, more: _Batch) -> _Batch:
        """Both batches; neither is used afterwards."""
        unused = int(self.mask.any(0).int().argmax())  # columns that no row has any more
        width = max(self.mask.shape[1] - unused, more.mask.shape[1])
        left = [width - one.mask.shape[1] for one in (self, more)]  # a negative number cuts
        for mine, theirs in zip(self.cache.layers, more.cache.layers, strict=True):
            for name in ("keys", "values"):
                parts = zip((getattr(mine, name), getattr(theirs, name)), left, strict=True)
                setattr(mine, name, torch.cat([pad(part, (0, 0, n, 0)) for part, n in parts]))
        tokens = [pad(one.tokens, (n, 0)) for one, n in zip((self, more), left, strict=True)]
        mask = [pad(one.mask, (n, 0)) for one, n in zip((self, more), left, strict=True)]
        shift = torch.cat([self.shift, more.shift])
        return _Batch([*self.rows, *more.rows], torch.cat(tokens), torch.cat(mask), shift, self.cache)


class Slots(OneByOne[_Row]):
    """Final class, an ``AnswersAsItGoes``: at most ``most`` rows at once. ``context``: as ``max_model_len``.

    Log-probs are those of the whole distribution at the temperature, as in ``mmrl.text.generation``.
    """

    def __init__(
        self,
        writer: WritingPolicy,
        inputs: Inputs,
        autocast: Callable[[], AbstractContextManager[object]],
        context: int,
        most: int,
    ) -> None:
        super().__init__("transformers", context)
        self._writer, self._inputs, self._autocast, self._most = writer, inputs, autocast, most
        self._waiting: deque[_Row] = deque()
        self._batch: _Batch | None = None

    def renewed(self) -> None:
        """New weights came. Raises ``UserError`` where requests are under way."""
        self._refuse("new weights come")

    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> _Row:
        done, most = len(request.partial), settings.max_new_tokens
        assert request.seed is not None, "the training process draws by seeds alone"
        u = torch.rand(most, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
        stops = stops_of(settings.stop, settings.min_new_tokens, self._writer.conditioner)
        kept, begun = u[done : done + allowance.tokens].tolist(), [*request.partial]
        self._waiting.append(_Row(request, settings, repr(settings), stops, allowance.tokens, kept, begun, []))
        return self._waiting[-1]

    @torch.no_grad()
    def _work(self, timeout: float | None) -> None:
        with self._autocast():
            if self._batch is not None:
                self._batch = self._grown(self._batch, self._read(self._batch))
            free = self._most - (0 if self._batch is None else len(self._batch.rows))
            if self._waiting and free and (self._batch is None or self._batch.takes_more):
                fresh = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
                more = self._grown(*self._begun(fresh))
                if self._batch is None or more is None:
                    self._batch = self._batch or more
                else:
                    self._batch = self._batch.with_more(more)

    @torch.no_grad()
    def _end(self, handles: Sequence[_Row]) -> None:
        self._waiting = deque(row for row in self._waiting if row in self._asked)
        if self._batch is not None:
            self._batch = self._batch.of([n for n, row in enumerate(self._batch.rows) if row in self._asked])

    def _begun(self, rows: list[_Row]) -> tuple[_Batch, Tensor]:
        """A batch of new rows, and the logits ``[B, V]`` of their next tokens."""
        names = {name for row in rows for name in row.request.features} & PER_TOKEN
        made = self._inputs([f"{id(row.request.features)}" for row in rows], [self._features(r, names) for r in rows])
        mask, core = made["attention_mask"], base_model(self._writer.policy).base_model
        shift = torch.zeros_like(mask[:, :1])
        counts = hasattr(core, "rope_deltas") and any(name.endswith("_grid_thw") for name in made)
        if not counts:
            made["position_ids"] = self._positions((mask.cumsum(1) - 1).clamp(min=0))
        out = self._writer.policy(**made, use_cache=True, logits_to_keep=1)
        if counts:
            shift = getattr(core, "rope_deltas", shift).to(mask)
        return _Batch(rows, made["input_ids"], mask, shift, out.past_key_values), out.logits[:, -1].float()

    def _features(self, row: _Row, names: set[str]) -> dict[str, Tensor]:
        """The features of prompt and ``partial``; ``names``: those per token that a row beside it has."""
        ids = to_device(torch.tensor([*row.request.prompt_ids, *row.request.partial]), self._writer.device)
        found = {**row.request.features, "input_ids": ids}
        for name in names - {"input_ids"}:
            told = found.get(name, ids[:0])
            found[name] = pad(told, (0, len(ids) - len(told)))
        return found

    def _positions(self, places: Tensor) -> Tensor:
        """``places`` ``[B, T]`` as the model takes them: those that count themselves have three for each token."""
        own = hasattr(base_model(self._writer.policy).base_model, "rope_deltas")
        return places.expand(3, *places.shape) if own else places

    def _read(self, batch: _Batch) -> Tensor:
        """The logits ``[B, V]`` of the next tokens."""
        places = batch.mask.sum(1, keepdim=True) - 1 + batch.shift
        out = self._writer.policy(
            input_ids=batch.tokens[:, -1:],
            attention_mask=batch.mask,
            position_ids=self._positions(places),
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1].float()

    def _grown(self, batch: _Batch, logits: Tensor) -> _Batch | None:
        """The batch with a further token, without the rows that it ends, which are answered."""
        tokens, log_probs = self._drawn(batch, logits)
        batch.tokens = torch.cat([batch.tokens, tokens.unsqueeze(1)], 1)
        batch.mask = pad(batch.mask, (0, 1), value=1)
        going = []
        for n, (row, token, said) in enumerate(zip(batch.rows, tokens.tolist(), log_probs.tolist(), strict=True)):
            row.tokens.append(token)
            row.log_probs.append(said)
            if finish := row.finish():
                done = len(row.request.partial)
                self._answer(row, row.tokens[done:], row.log_probs, finish, len(row.request.prompt_ids) + done)
            else:
                going.append(n)
        return batch.of(going)

    def _drawn(self, batch: _Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens and their log-probs ``[B]``; rows with the same settings are drawn together."""
        alike: dict[tuple[str, bool], list[int]] = {}
        for n, row in enumerate(batch.rows):
            early = len(row.tokens) < row.settings.min_new_tokens
            alike.setdefault((row.kind, early), []).append(n)
        tokens, log_probs = batch.tokens[:, -1].clone(), logits[:, 0].clone()
        for (_, early), index in alike.items():
            rows, at = [batch.rows[n] for n in index], to_device(torch.tensor(index), logits.device)
            settings = rows[0].settings
            penalty = settings.repetition_penalty
            draw = Draw(
                torch.tensor([[row.u[len(row.log_probs)]] for row in rows], dtype=torch.float64),
                settings.temperature,
                settings.top_p,
                settings.top_k,
                self._writer.conditioner.forbidden,
                min_p=settings.min_p,
                penalty=None if penalty == 1 else Penalty(penalty, batch.mask[at]),
                least=int(early),
                stops=settings.stop_token_ids,
            )
            tokens[at] = draw(batch.tokens[at], logits[at]).argmax(-1)
            log_probs[at] = draw.log_probs[0]
        return tokens, log_probs
