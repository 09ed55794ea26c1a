"""Pipeline parallelism: layers in stages on successive ranks, by Megatron-Core's own schedules.

One stage of layers a rank: one forward, one backward (PipeDream-flush, Narayanan et al. 2021, arXiv 2006.09503).
Several stages a rank, in turn: interleaved (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mmrl.engines.weights import Passed

P = TypeVar("P")
R = TypeVar("R")


class Pipeline:
    """Final class; see ``mmrl.engines.weights.Stages``. ``chunks``: this rank's parts of the model, in their order."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._chunks = list(chunks)
        self._now: GPTModel | Callable[..., None] | None = None
        self.multiple = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        self.shape: tuple[int, int] | None = None
        """Rows and columns to which all slices are padded if a rank has several stages. Such a rank waits for both
        neighbours at once in Megatron-Core, and would wait for ever if neighbours sent shapes first."""

    @property
    def now(self) -> GPTModel:
        """The part of the model that a call computes now. Raises ``RuntimeError`` outside of ``through``."""
        if self._now is None:
            raise RuntimeError("call a model in stages inside Policy.each or Policy.accumulate, once per slice")
        return self._now

    def through(self, pieces: Sequence[P], work: Callable[[P], R], *, graph: bool) -> list[R]:
        made: list[R] = []

        def step(left: Iterator[P], chunk: GPTModel) -> tuple[Tensor, Callable[..., object] | None]:
            piece, self._now = next(left), chunk
            try:
                found = work(piece)
            except Passed as passed:
                return passed.hidden, None
            finally:
                self._now = None
            if graph:
                assert isinstance(found, Tensor)
                return found, _loss
            made.append(found)
            return torch.zeros(()), _nothing

        if pieces:
            self.shape = self._largest(pieces, work) if len(self._chunks) > 1 else None
            rows, columns = self.shape or (1, 1)  # otherwise stages send the shapes (``variable_seq_lengths``)
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

    def _largest(self, pieces: Sequence[P], work: Callable[[P], R]) -> tuple[int, int]:
        """The most rows and columns with which ``work`` calls the model."""
        found = []

        def look(rows: Tensor, *_: object, **__: object) -> None:
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


def _loss(value: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss unchanged, because it has the update's denominator. The schedule does not divide a loss of three values
    (``calculate_per_token_loss``)."""
    return value, torch.ones((), dtype=torch.int), {}


def _nothing(_: Tensor, non_loss_data: bool) -> None:
    """Results are collected here and not by the schedule."""
