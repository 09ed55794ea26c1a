"""What answers a judge's questions: a model in this process, or an endpoint. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast, get_args

from mmrl.config.model import Quantize
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Sleeper
from mmrl.rewards.judging.answers import Kind
from mmrl.rewards.judging.asking import Ask, Keep, Outcome, Settings

if TYPE_CHECKING:
    import torch


def kind_of(quantize: object) -> Quantize | None:
    """The option ``model.quantize`` of a judge. Raises ``UserError``."""
    kinds = get_args(Quantize)
    if quantize is None or quantize in kinds:
        return cast("Quantize | None", quantize)
    raise UserError(f"options.model.quantize: {quantize!r}; write {', '.join(kinds)}, or remove it")


class Judge(Protocol):
    """A model that answers questions with verdicts."""

    @property
    def identity(self) -> str:
        """A text that differs between models that may answer differently: part of the key of the cache."""
        ...

    @property
    def sees(self) -> bool:
        """Whether it reads pictures."""
        ...

    @property
    def control(self) -> tuple[str, ...]:
        """The control tokens of its tokenizer, which a text must not contain; empty where they are not known."""
        ...


class LocalJudge(Judge, Sleeper, Protocol):
    """A judge in this process, on ``context.device``."""

    def ask(self, asks: Sequence[Ask], kind: Kind, settings: Settings, device: torch.device | str, /) -> list[Outcome]:
        """An outcome for each question, in order. A question that fails has an outcome with a reason."""
        ...


class RemoteJudge(Judge, Protocol):
    """A judge in another process, which is asked concurrently."""

    async def ask(
        self,
        asks: Sequence[Ask],
        kind: Kind,
        settings: Settings,
        sent: Counter[str] | None = None,
        keep: Keep | None = None,
        /,
    ) -> list[Outcome]:
        """An outcome for each question, in order. Bytes and tokens are added to ``sent``
        (``mmrl.rewards.judging.usage``); ``keep`` is called with each outcome as soon as there is one."""
        ...
