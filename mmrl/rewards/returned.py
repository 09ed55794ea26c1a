"""What a reward returned for a batch: one number for each sample, checked. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, SupportsIndex, runtime_checkable

from mmrl.core.errors import plain
from mmrl.core.reward_contract import Asked, Failed, Span, Spans

NAN = float("nan")
_NO_PARTS = ("spans", "feedback")


class BatchError(Exception):
    """A call gave no usable answer for any of its samples. ``mend`` is the edit that helps."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(reason, mend)
        self.reason, self.mend = reason, mend

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Answer:
    """The answer of a reward for ``n`` samples.

    ``total``: ``n`` numbers, NaN where a sample failed; ``reasons``: why, None where it did not. ``parts``: ``n``
    numbers per named part, NaN where a sample has none. ``spans``: the rewards of pieces of each response, or None.
    ``error``: set when the whole call failed. ``began`` and ``ended``: ``time.perf_counter``, retries included.
    ``sent``: bytes given to other processes (``Context.sent``), of an answer that a device made. ``asked``: what took
    that time outside of the devices. ``feedback``: a text about each sample, or None; empty where there are none.
    """

    total: list[float]
    reasons: list[str | None]
    parts: dict[str, list[float]] = field(default_factory=dict)
    spans: list[list[Span] | None] = field(default_factory=list)
    error: BatchError | None = None
    began: float = 0.0
    ended: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    asked: Asked = field(default_factory=Asked)
    feedback: list[str | None] = field(default_factory=list)


def read_answer(returned: object, n: int, place: str, *, spans: bool = False) -> Answer:
    """Check what a reward returned for ``n`` samples; ``spans``: it declared that it returns some.

    Raises ``BatchError`` when it is not one value per sample.
    """
    nothing: list[list[Span] | None] = [None] * n
    if not isinstance(returned, Mapping):
        return Answer(*_numbers(returned, n, "", place), spans=nothing)
    named = {str(name): values for name, values in returned.items() if name not in _NO_PARTS}
    if not named:
        what = f"{next(iter(returned))} alone" if returned else "an empty dict"
        raise BatchError(f"returned {what}", f"return at least one named part, such as score, from {place}")
    pieces = _pieces(returned["spans"], n, place, spans) if "spans" in returned else nothing
    texts = _texts(returned["feedback"], n, place) if "feedback" in returned else []
    read = {name: _numbers(values, n, f" for the part {name!r}", place) for name, values in named.items()}
    parts = {name: numbers for name, (numbers, _) in read.items()}
    if "score" in parts:
        total, reasons = read["score"]
        return Answer(total, reasons, {k: v for k, v in parts.items() if k != "score"}, pieces, feedback=texts)
    total = [math.fsum(row) / len(row) for row in zip(*parts.values(), strict=True)]
    reasons = [
        next((f"part {name!r} {why[i]}" for name, (_, why) in read.items() if why[i] is not None), None)
        for i in range(n)
    ]
    return Answer(total, reasons, parts, pieces, feedback=texts)


@runtime_checkable
class _Tensor(Protocol):
    def detach(self) -> _Tensor: ...

    def cpu(self) -> _Tensor: ...


@runtime_checkable
class _Array(Protocol):
    def tolist(self) -> object: ...


@runtime_checkable
class _Scalar(Protocol):
    def item(self) -> object: ...


def _numbers(values: object, n: int, what: str, place: str) -> tuple[list[float], list[str | None]]:
    mend = f"return one number per sample from {place}"
    kind = type(values).__name__
    if isinstance(values, _Tensor):
        values = values.detach().cpu()
    if isinstance(values, _Array):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise BatchError(f"returned a {kind}{what} in place of {n} numbers", mend)
    if len(values) != n:
        raise BatchError(f"returned {len(values)} values{what} for {n} samples", mend)
    pairs = [_number(value, i, what, mend) for i, value in enumerate(values)]
    return [number for number, _ in pairs], [reason for _, reason in pairs]


def _pieces(values: object, n: int, place: str, declared: bool) -> list[list[Span] | None]:
    if not declared:
        raise BatchError("returned spans, which it did not declare", f"add @mmrl.reward(spans=True) at {place}")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or len(values) != n:
        raise BatchError(
            f"returned no list of {n} spans", f"return Spans([(start, end, value), ...]) or None at {place}"
        )
    wrong = next((v for v in values if v is not None and not isinstance(v, Spans)), None)
    if wrong is not None:
        raise BatchError(f"returned a {type(wrong).__name__} as spans", f"wrap it at {place}: Spans(...)")
    return [None if v is None else [Span(*span) for span in v.spans] for v in values]


def _texts(values: object, n: int, place: str) -> list[str | None]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or len(values) != n:
        raise BatchError(f"returned no list of {n} texts as feedback", f"return a text or None for each at {place}")
    return [None if value is None else str(value) for value in values]


def _number(value: object, index: int, what: str, mend: str) -> tuple[float, str | None]:
    if value is None:
        return NAN, "returned None"
    if isinstance(value, Failed):
        return NAN, plain(str(value.reason))
    try:
        plain_value = value.item() if isinstance(value, _Scalar) else value
        if not isinstance(plain_value, SupportsFloat | SupportsIndex):
            raise TypeError
        number = float(plain_value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(f"returned a {type(value).__name__} as value {index}{what}", mend) from None
    return (number, None) if math.isfinite(number) else (NAN, f"returned {number}")
