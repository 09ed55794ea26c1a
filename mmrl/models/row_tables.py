"""Rows of text that are sampled together: in a cache that grows, as transformers has it, or at fixed places.

Both read prompts, take the tokens that were drawn and give the logits of the next ones; which tokens are drawn, and
when a row ends, is ``mmrl.inference.slots``'s.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.core.notices import tell
from mmrl.core.rollout_engine import Request, Settings
from mmrl.core.transfer import to_device
from mmrl.models.text.base_model import base_model
from mmrl.models.text.features import PER_TOKEN
from mmrl.models.text.generation import WritingPolicy
from mmrl.models.text.stop_strings import StopStrings

if TYPE_CHECKING:  # slow to import
    from transformers.cache_utils import Cache

    from mmrl.models.fixed_cache import FixedCache

Inputs: TypeAlias = "Callable[[Sequence[str], Sequence[dict[str, Tensor]]], dict[str, Tensor]]"
"""The model's arguments for prompts, padded on the left, of their features; prompts with one key are equal."""

COLUMNS = 64
"""Columns are made, and looked at, in such numbers."""
WIDER = 16
"""Prompts that are read together are as long but for so many tokens."""
TOGETHER = 8
"""Prompts of text that a GPU reads in one forward, always so many, with copies of the first in the place of those that
lack; a CPU reads one at a time. So the shape does not depend on who waits."""

FEWEST = 16
"""A CPU reads the slots up to the last one in use, in such numbers: with fewer rows it sums products in another order,
with more the bits of a row are the same. A GPU reads all, so that one recorded step serves."""


@dataclass(eq=False)
class Row:
    """A response. ``kind``: equal for equal settings; ``u``: the uniforms of the ``most`` tokens to be drawn;
    ``tokens``: with those of ``Request.partial``, ``log_probs``: without; ``drawn``: how many were drawn, also of those
    that the host has not seen."""

    request: Request
    settings: Settings
    kind: str
    stops: StopStrings
    most: int
    u: list[float]
    tokens: list[int]
    log_probs: list[float]
    drawn: int = 0

    def __post_init__(self) -> None:
        ids = array("q", [*self.request.prompt_ids, *self.request.partial])
        media = f" {id(self.request.features)}" if self.request.features.keys() - PER_TOKEN else ""
        self.key, self.prompt = blake2b(ids.tobytes(), digest_size=16).hexdigest() + media, len(ids)
        """Equal for rows that begin with the same tokens and pictures; and how many tokens that are."""
        self.reads_alone = bool(media)

    def finish(self) -> str | None:
        """Why it has ended; None where it goes on."""
        if self.tokens[-1] in self.settings.stop_token_ids:
            return "stop"
        if self.stops.complete(self.tokens[-self.stops.window :], len(self.tokens)):
            return "stop"
        return "length" if len(self.log_probs) == self.most else None

    @property
    def early(self) -> bool:
        """Whether nothing may end it yet."""
        return len(self.request.partial) + self.drawn < self.settings.min_new_tokens

    @property
    def next_u(self) -> float:
        return self.u[min(self.drawn, self.most - 1)]


@dataclass
class Begun:
    """Prompts that were read, padded on the left. ``tokens``, ``mask`` ``[B, L]``; ``shift`` ``[B, 1]``: what a model
    that counts positions itself adds to them behind pictures; ``logits`` ``[B, V]``: of the next tokens."""

    tokens: Tensor
    mask: Tensor
    shift: Tensor
    cache: Cache
    logits: Tensor


class Reader:
    """Final class. What reads tokens: the policy of ``writer``."""

    def __init__(self, writer: WritingPolicy, inputs: Inputs) -> None:
        self.writer, self._inputs = writer, inputs
        self.records = True
        """Whether no step has failed to be recorded."""

    @property
    def _core(self) -> Any:
        return base_model(self.writer.policy).base_model

    def begin(self, rows: Sequence[Row], width: int = 0) -> Begun:
        """``width``: the fewest columns, those of padding."""
        names = {name for row in rows for name in row.request.features} & PER_TOKEN
        made = self._inputs([f"{id(row.request.features)}" for row in rows], [self._features(r, names) for r in rows])
        if (more := width - made["input_ids"].shape[1]) > 0:
            fill = {"input_ids": self.writer.conditioner.pad_token}
            made = {name: pad(of, (more, 0), value=fill.get(name, 0)) for name, of in made.items()}
        mask, core = made["attention_mask"], self._core
        shift = torch.zeros_like(mask[:, :1])
        counts = hasattr(core, "rope_deltas") and any(name.endswith("_grid_thw") for name in made)
        if not counts:
            made["position_ids"] = self.positions((mask.cumsum(1) - 1).clamp(min=0))
        out = self.writer.policy(**made, use_cache=True, logits_to_keep=1)
        if counts:
            shift = getattr(core, "rope_deltas", shift).to(mask)
        return Begun(made["input_ids"], mask, shift, out.past_key_values, out.logits[:, -1].float())

    def _features(self, row: Row, names: set[str]) -> dict[str, Tensor]:
        """The features of prompt and ``partial``; ``names``: those per token that a row beside it has."""
        ids = to_device(torch.tensor([*row.request.prompt_ids, *row.request.partial]), self.writer.device)
        found = {**row.request.features, "input_ids": ids}
        for name in names - {"input_ids"}:
            told = found.get(name, ids[:0])
            found[name] = pad(told, (0, len(ids) - len(told)))
        return found

    def positions(self, places: Tensor) -> Tensor:
        """``places`` ``[B, T]`` as the model takes them: those that count themselves have three for each token."""
        return places.expand(3, *places.shape) if hasattr(self._core, "rope_deltas") else places


class Growing:
    """Final class. Rows that end at the same column; what is to their left is padding. None is added before all have
    ended: layers may have a state, or a window, in place of keys of all tokens."""

    logits: Tensor
    """``[B, V]``: of the next token of each row."""

    def __init__(self, reader: Reader, most: int) -> None:
        self.rows: list[Row | None] = []
        """One for each of ``logits``, or None where nobody is."""
        self._reader, self._most = reader, most

    @property
    def takes_more(self) -> bool:
        """Whether rows can be added now."""
        return not self.rows

    def add(self, waiting: deque[Row]) -> None:
        """Take rows from ``waiting``, and read their prompts."""
        rows = [waiting.popleft() for _ in range(min(self._most, len(waiting)))]
        self._begun = self._reader.begin(rows)
        self.rows, self.logits = [*rows], self._begun.logits

    def write(self, tokens: Tensor) -> None:
        """Put a token behind each row, ``[B]``."""
        self._begun.tokens = torch.cat([self._begun.tokens, tokens.unsqueeze(1)], 1)
        self._begun.mask = pad(self._begun.mask, (0, 1), value=1)

    def read(self) -> None:
        """Read those tokens."""
        of = self._begun
        out = self._reader.writer.policy(
            input_ids=of.tokens[:, -1:],
            attention_mask=of.mask,
            position_ids=self._reader.positions(of.mask.sum(1, keepdim=True) - 1 + of.shift),
            past_key_values=of.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = out.logits[:, -1].float()

    def said(self) -> tuple[Tensor, Tensor]:
        """The tokens of each row, and which of them are its own, ``[B, L]``."""
        return self._begun.tokens, self._begun.mask

    def keep(self, index: list[int]) -> None:
        """Drop all other rows."""
        if len(index) < len(self.rows):
            self.rows = [self.rows[n] for n in index]
        else:
            return
        if index:
            of, at = self._begun, to_device(torch.tensor(index), self._begun.tokens.device)
            of.cache.reorder_cache(at)  # type: ignore[arg-type]
            self._begun = Begun(of.tokens[at], of.mask[at], of.shift[at], of.cache, of.logits)
            self.logits = self.logits[at]


class Fixed:
    """Final class; its methods are those of ``Growing``. ``most`` slots; each token of a row is in a column of its own,
    see ``FixedCache``. ``record``: a step is recorded as a CUDA graph for each width, and replayed. ``half``: what
    autocast computes products in."""

    def __init__(self, reader: Reader, most: int, half: torch.dtype | None, *, record: bool) -> None:
        self._of, self._reader = _fixed_cache(), reader
        self._record = record and reader.records and self._of.can_be_recorded(reader.writer.policy)
        self._dtype, self._halves = half, {} if half is None else self._of.halves(reader.writer.policy, half)
        self.rows: list[Row | None] = [None] * most
        self._cache: FixedCache | None = None
        self._begun: dict[str, tuple[Begun, int]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._columns = COLUMNS * (4 if self._record else 1)

    @property
    def takes_more(self) -> bool:
        return None in self.rows

    def add(self, waiting: deque[Row]) -> None:
        placed: dict[str, list[int]] = {}
        for slot in [n for n, row in enumerate(self.rows) if row is None]:
            if not waiting:
                break
            if waiting[0].key not in self._begun:
                self._read_ahead(waiting)
            row = waiting.popleft()
            placed.setdefault(row.key, []).append(slot)
            self.rows[slot] = row
        self._make_room(waiting)
        for key, slots in placed.items():
            self._put(slots, *self._begun[key])
        wanted = {row.key for row in waiting}
        self._begun = {key: of for key, of in self._begun.items() if key in wanted}

    def _read_ahead(self, waiting: deque[Row]) -> None:
        """Read the prompt of the first row, and on a GPU of others that come soon and are about as long."""
        first, rows = waiting[0], dict[str, Row]()
        alone = first.reads_alone or self._reader.writer.device.type == "cpu"
        together, width = (1, 0) if alone else (min(TOGETHER, len(self.rows)), _rounded(first.prompt, WIDER))
        for row in waiting:
            if row is first or (
                row.key not in self._begun and not row.reads_alone and _rounded(row.prompt, WIDER) == width
            ):
                rows[row.key] = row
            if len(rows) == together:
                break
        read = [*rows.values()] + [first] * (together - len(rows))
        begun = self._reader.begin(read, width)
        self._begun |= {key: (begun, n) for n, key in enumerate(rows)}

    def _make_room(self, waiting: deque[Row]) -> None:
        """For the longest that its rows may become, and those that wait."""
        needed = max(row.prompt + row.most + 1 for row in (*self.rows, *waiting) if row is not None)
        length = _rounded(needed, self._columns)
        if self._cache is None:
            begun, _ = next(iter(self._begun.values()))
            slots, device = len(self.rows), begun.tokens.device
            self._cache = self._of.FixedCache(begun.cache, slots, length, self._dtype)
            self.logits = begun.logits.new_zeros(slots, begun.logits.shape[1])
            self._tokens = torch.zeros(slots, length, dtype=torch.long, device=device)
            self._shift = torch.zeros(slots, 1, dtype=torch.long, device=device)
        elif length > self._cache.length:
            self._tokens = pad(self._tokens, (0, length - self._cache.length))
            self._cache.grow(length)
            self._graphs = {}  # they know the places of the smaller one

    @property
    def _made(self) -> FixedCache:
        """The cache, which the first rows bring."""
        assert self._cache is not None
        return self._cache

    def _put(self, slots: list[int], begun: Begun, n: int) -> None:
        cache, row = self._made, self.rows[slots[0]]
        assert row is not None
        at = to_device(torch.tensor(slots), begun.tokens.device)
        cache.put(at, begun.cache, n, row.prompt)
        cache.places[at] = row.prompt - 1
        self._tokens[at, : row.prompt] = begun.tokens[n, -row.prompt :]
        self._shift[at], self.logits[at] = begun.shift[n], begun.logits[n]

    def write(self, tokens: Tensor) -> None:
        cache = self._made
        cache.places.add_(1).clamp_(max=cache.length - 1)  # where nobody is they go on
        self._tokens[cache.slots, cache.places] = tokens

    def read(self) -> None:
        cache = self._made
        width = max(row.prompt + row.drawn for row in self.rows if row is not None)
        cache.width = min(_rounded(width, self._columns), cache.length)
        if self._tokens.device.type == "cpu":
            last = max(n for n, row in enumerate(self.rows) if row is not None)
            cache.rows = min(_rounded(last + 1, FEWEST), len(self.rows))
        if not self._record:
            self._step()
        elif cache.width in self._graphs:
            self._graphs[cache.width].replay()
        else:
            self._step()  # libraries make what they need
            self._record_step(cache.width)

    def _record_step(self, width: int) -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            tell(f"steps of sampling are not recorded as CUDA graphs, and take longer: {said}")
            self._record, self._reader.records, self._graphs = False, False, {}
            self._step()
        else:
            self._graphs[width] = graph

    def _step(self) -> None:
        cache, policy = self._made, self._reader.writer.policy
        places = cache.places[: cache.rows].unsqueeze(1)
        columns = torch.arange(cache.width, device=places.device)
        given = {
            "input_ids": self._tokens[: cache.rows].gather(1, places),
            "attention_mask": (columns <= places)[:, None, None],
            "position_ids": self._reader.positions(places + self._shift[: cache.rows]),
        }
        of = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        with self._of.attending(policy):
            if self._halves:
                out = torch.func.functional_call(policy, self._halves, (), {**given, **of}, tie_weights=False)
            else:
                out = policy(**given, **of)
        self.logits[: cache.rows].copy_(out.logits[:, -1])

    def said(self) -> tuple[Tensor, Tensor]:
        columns = torch.arange(self._tokens.shape[1], device=self._tokens.device)
        return self._tokens, columns <= self._made.places.unsqueeze(1)

    def keep(self, index: list[int]) -> None:
        kept = set(index)
        self.rows = [row if n in kept else None for n, row in enumerate(self.rows)]


Table = Growing | Fixed


def _fixed_cache() -> ModuleType:
    from mmrl.models import fixed_cache

    return fixed_cache


def fixed_refusal(policy: nn.Module) -> str:
    """Why rows of this model cannot be at fixed places; empty where they can."""
    return _fixed_cache().refusal(policy)


def recordable(policy: nn.Module) -> bool:
    """Whether rows of this model can be at fixed places, and a step of them asks nothing of the host."""
    return not fixed_refusal(policy) and _fixed_cache().can_be_recorded(policy)


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step
