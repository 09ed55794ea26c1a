"""Pipeline parallelism: layers in stages on successive ranks, by Megatron-Core's own schedules.

One stage of layers a rank: one forward, one backward (PipeDream-flush, Narayanan et al. 2021, arXiv 2006.09503).
Several stages a rank, in turn: interleaved (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mmrl.engines.weights import Passed


class Pipeline:
    """Final class; see ``mmrl.engines.weights.Stages``. ``chunks``: this rank's parts of the model, in their order."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = list(chunks)
        self._now: Any = None
        self.multiple = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        self.shape: tuple[int, int] | None = None
        """Rows and columns that all slices are padded to where a rank has several stages: Megatron-Core waits there for
        what comes from both sides at once, and would wait for ever if each said its shape first."""

    @property
    def now(self) -> Any:
        """The part that a call of the model goes through. Raises ``RuntimeError`` outside of ``through``."""
        if self._now is None:
            raise RuntimeError("a model in stages is called inside Policy.each or Policy.accumulate, once a slice")
        return self._now

    def through(self, pieces: Sequence[Any], work: Callable[[Any], Any], *, graph: bool) -> list[Any]:
        made: list[Any] = []

        def step(left: Any, chunk: Any) -> tuple[Tensor, Any]:
            piece, self._now = next(left), chunk
            try:
                found = work(piece)
            except Passed as passed:
                return passed.hidden, None
            finally:
                self._now = None
            if graph:
                return found, _loss
            made.append(found)
            return torch.zeros(()), _nothing

        if pieces:
            self.shape = self._largest(pieces, work) if len(self._chunks) > 1 else None
            rows, columns = self.shape or (1, 1)  # else each says its own (``variable_seq_lengths``)
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(pieces) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(pieces),
                seq_length=columns,
                micro_batch_size=rows,
                forward_only=not graph,
                collect_non_loss_data=not graph,
            )
        return made

    def _largest(self, pieces: Sequence[Any], work: Callable[[Any], Any]) -> tuple[int, int]:
        """Rows and columns that have room for what ``work`` gives the model of any piece."""
        found = []

        def look(rows: Tensor, *_: Any, **__: Any) -> None:
            found.append(tuple(rows.shape))
            raise Passed(rows)

        self.shape, self._now = None, look
        try:
            for piece in pieces:
                with contextlib.suppress(Passed):
                    work(piece)
        finally:
            self._now = None
        rows, columns = zip(*found, strict=True)
        return max(rows), max(columns)


def _loss(value: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """As it is: its denominator is the update's. Of three the schedule divides none (``calculate_per_token_loss``)."""
    return value, torch.ones((), dtype=torch.int), {}


def _nothing(_: Tensor, non_loss_data: bool) -> None:
    """The schedule's own collection of results holds nothing."""
