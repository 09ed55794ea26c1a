"""Sample in this process with the training weights, row by row: where a response ends, another one takes its place.

Every token has the uniform number of its place in its response (``mmrl.models.text.token_sampling``), so that a
response does not depend on those beside it, nor on the order in which they were asked for. Where the model's rows can
be at fixed places (``mmrl.models.fixed_cache``) its bits do not, either; elsewhere the rounding of other batch shapes
does, and new rows wait until all have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmrl.core.errors import NotFiniteError
from mmrl.core.grouping import grouped
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.core.transfer import to_device
from mmrl.inference.engine_weights import Allowance
from mmrl.inference.under_way import OneByOne
from mmrl.models.row_tables import Fixed, Growing, Inputs, Reader, Row, Table, fixed_refusal
from mmrl.models.text.generation import WritingPolicy
from mmrl.models.text.stop_strings import stops_of
from mmrl.models.text.token_sampling import Draw, Penalty

UNSEEN = 8
"""Tokens of each row that a GPU draws before the host waits to look at them. What is drawn behind an end is lost."""


class Slots(OneByOne[Row]):
    """Final class, an ``AnswersAsItGoes``: at most ``most`` rows at once. ``context``: as ``max_model_len``;
    ``record``: steps of rows at fixed places are recorded and replayed where the model allows it.

    Log-probs are those of the whole distribution at the temperature, as in ``mmrl.models.text.generation``.
    """

    def __init__(
        self,
        writer: WritingPolicy,
        inputs: Inputs,
        autocast: Callable[[], torch.autocast],
        context: int,
        most: int,
        *,
        record: bool = False,
    ) -> None:
        super().__init__("transformers", context)
        self._writer, self._reader, self._autocast = writer, Reader(writer, inputs), autocast
        self.refusal = fixed_refusal(writer.policy)
        """Why rows are not at fixed places; empty where they are."""
        self._most, self._size, self._record = most, most, record
        self._waiting: deque[Row] = deque()
        self._table: Table | None = None
        self._unseen: list[tuple[Tensor, Tensor, list[Row | None]]] = []
        self.places = self.busy = 0
        """Tokens for which there was a place in all steps, and those that answers have."""

    def renewed(self) -> None:
        """New weights came. Raises ``UserError`` where requests are under way."""
        self._refuse("new weights come")
        self.rest()

    def rest(self) -> None:
        """Free the memory, where nothing is under way."""
        if not self._asked:
            self._table, self._unseen = None, []

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        if self._table is None:  # fewer rows than could be need less memory
            self._size = max(1, min(self._most, len(requests)))
        try:
            return super().generate(requests, settings)
        finally:
            self._size = self._most
            self.rest()

    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> Row:
        done, most = len(request.partial), settings.max_new_tokens
        assert request.seed is not None, "the training process draws by seeds alone"
        u = torch.rand(most, generator=torch.Generator().manual_seed(request.seed), dtype=torch.float64)
        stops = stops_of(settings.stop, settings.min_new_tokens, self._writer.conditioner)
        kept, begun = u[done : done + allowance.tokens].tolist(), [*request.partial]
        self._waiting.append(Row(request, settings, repr(settings), stops, allowance.tokens, kept, begun, []))
        return self._waiting[-1]

    def _new_table(self) -> Table:
        if self.refusal:
            return Growing(self._reader, self._size)
        device = self._writer.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return Fixed(self._reader, self._size, half, record=self._record)

    @torch.no_grad()
    def _work(self, timeout: float | None) -> None:
        with self._autocast():
            table = self._table = self._table or self._new_table()
            if self._waiting and table.takes_more:
                table.add(self._waiting)
            self._draw(table)
            under_way = [row for row in table.rows if row is not None]
            unseen = 1 if self._writer.device.type == "cpu" else UNSEEN
            if len(self._unseen) >= unseen or all(row.drawn >= row.most for row in under_way):
                self._look(table)
            if any(table.rows):
                table.read()
        self._idle()

    @torch.no_grad()
    def _end(self, handles: Sequence[Row]) -> None:
        self._waiting = deque(row for row in self._waiting if row in self._asked)
        if self._table is not None:
            self._table.keep([n for n, row in enumerate(self._table.rows) if row in self._asked])
        self._idle()

    def _idle(self) -> None:
        """Free the memory as soon as nothing is under way, unless it takes long to record the steps again."""
        if not self._record:
            self.rest()

    def _draw(self, table: Table) -> None:
        """The next token of each row; rows with the same settings are drawn together."""
        alike = grouped(((row.kind, row.early), n) for n, row in enumerate(table.rows) if row is not None)
        device, logits = table.logits.device, table.logits
        u = to_device(torch.tensor([0.0 if r is None else r.next_u for r in table.rows], dtype=torch.float64), device)
        if len(alike) == 1:
            ((of, index),) = alike.items()
            tokens, log_probs = self._drawn(table, index[0], slice(None), u, early=of[1])
        else:
            tokens, log_probs = torch.zeros_like(u, dtype=torch.long), torch.zeros_like(u, dtype=torch.float32)
            for (_, early), index in alike.items():
                at = to_device(torch.tensor(index), logits.device)
                tokens[at], log_probs[at] = self._drawn(table, index[0], at, u, early=early)
        self._unseen.append((tokens, log_probs, [*table.rows]))
        for row in table.rows:
            if row is not None:
                row.drawn += 1
        table.write(tokens)

    def _drawn(self, table: Table, first: int, at: Tensor | slice, u: Tensor, *, early: bool) -> tuple[Tensor, Tensor]:
        """The tokens of the rows ``at``, which have the settings of the row ``first``, and their log-probs."""
        row = table.rows[first]
        assert row is not None
        settings, penalty, said = row.settings, None, table.logits
        if settings.repetition_penalty != 1:
            said, own = (of[at] for of in table.said())
            penalty = Penalty(settings.repetition_penalty, own)
        draw = Draw(
            u,
            settings.temperature,
            settings.top_p,
            settings.top_k,
            self._writer.conditioner.forbidden,
            min_p=settings.min_p,
            penalty=penalty,
            stops=settings.stop_token_ids,
        )
        return draw.pick(said, table.logits[at], u[at], early=early)

    def _look(self, table: Table) -> None:
        """Wait for the tokens that were drawn, and answer the rows that they end."""
        numbers = torch.stack([torch.stack([tokens.double(), said.double()]) for tokens, said, _ in self._unseen])
        steps, self._unseen = [rows for _, _, rows in self._unseen], []
        for (tokens, log_probs), rows in zip(numbers.tolist(), steps, strict=True):
            self.places += len(rows)
            for row, token, said in zip(rows, tokens, log_probs, strict=True):
                if row is None or row not in self._asked:
                    continue
                self.busy += 1
                if not math.isfinite(said):
                    raise NotFiniteError(
                        f"the logits that token {len(row.tokens) + 1} of a response was drawn from are not finite "
                        f"({row.request.name})"
                    )
                row.tokens.append(int(token))
                row.log_probs.append(said)
                if finish := row.finish():
                    done = len(row.request.partial)
                    self._answer(row, row.tokens[done:], row.log_probs, finish, row.prompt)
        table.keep([n for n, row in enumerate(table.rows) if row in self._asked])
