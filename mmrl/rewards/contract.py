"""What a reward is (DESIGN 7): a function or a class, in any file.

    def score(samples, *, context):                 # or async def
        return [1.0 for s in samples]               # or {"part": [...], ...}, or a tensor with a graph

A class is built once with the recipe's ``options`` and has a method ``score`` of the same form; a function gets the
options as keyword arguments. ``@mmrl.reward(...)`` declares what differs from the defaults.

Of named parts, ``score`` is the total where it is given, else their mean. A sample that cannot be scored gets ``None``,
or ``Failed("why")``: never a number in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

Input = Literal["image", "tensor", "text"]


@dataclass(frozen=True)
class Failed:
    """Stands in a reward's list for the number of a sample that could not be scored, and says why."""

    reason: str


Value: TypeAlias = float | Failed | None
Returned: TypeAlias = "Sequence[Value] | Mapping[str, Sequence[Value]] | torch.Tensor"


@dataclass(frozen=True)
class Declaration:
    """What a reward declares of itself.

    ``inputs``: which fields of a sample it reads (the core makes no others). ``per``: ``"sample"``, or ``"group"`` to
    be called with the whole group of a prompt, never split. ``differentiable``: it reads ``tensor`` and returns a
    tensor ``[B]`` whose graph reaches it.
    """

    inputs: tuple[Input, ...] = ("image",)
    per: Literal["sample", "group"] = "sample"
    differentiable: bool = False


@dataclass(frozen=True)
class Context:
    """What a call may know beyond its samples: the training step (-1 outside training) and the device to compute on."""

    step: int = -1
    device: torch.device | str = "cpu"


R = TypeVar("R", bound=Callable[..., Any])


def reward(
    *,
    inputs: tuple[Input, ...] = ("image",),
    per: Literal["sample", "group"] = "sample",
    differentiable: bool = False,
) -> Callable[[R], R]:
    """Declare a function or class as a reward that differs from the defaults (see ``Declaration``)."""
    if differentiable and "tensor" not in inputs:
        inputs = (*inputs, "tensor")

    def mark(target: R) -> R:
        target.__mmrl_reward__ = Declaration(inputs, per, differentiable)  # type: ignore[attr-defined]
        return target

    return mark


def declaration_of(target: Any) -> Declaration:
    """The declaration of a reward, the defaults where it made none.

    An instance may hold its own as ``self.__mmrl_reward__``, where its options decide.
    """
    return getattr(target, "__mmrl_reward__", None) or Declaration()
