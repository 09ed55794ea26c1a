"""The contract of a reward: a function or a class, in any file.

    def score(samples, *, context):                 # or async def
        return [1.0 for s in samples]               # or {"part": [...], ...}, or a tensor with a graph

A class is built once with the recipe's ``options`` and has a method ``score`` of the same form; a function gets the
options as keyword arguments. ``@mmrl.reward(...)`` declares what differs from the defaults.

Of named parts, ``score`` is the total where it is given, else their mean. A sample that cannot be scored gets ``None``,
or ``Failed("why")``: never a number in its place. A part called ``spans`` is no part: where it was declared, it holds
rewards of pieces of the response (``Spans``), and ``None`` for a sample without. Nor is one called ``feedback``: it
holds a text about each sample, or ``None``, which the environment ``revise`` tells the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

from mmrl.core.errors import did_you_mean
from mmrl.core.json_types import JsonObject

if TYPE_CHECKING:
    import torch

    from mmrl.core.trajectory import Sample

Input = Literal["image", "video", "tensor", "text", "audio", "tokens"]
"""Fields of a sample. ``sample.prompt`` with its text, meta and media is always there."""
Per = Literal["sample", "group"]
SpansOf: TypeAlias = Literal["episode", "token"] | bool


@dataclass(frozen=True)
class Failed:
    """Takes the place of a number in a reward's list where a sample could not be scored; ``reason`` says why."""

    reason: str


class Span(NamedTuple):
    """``value`` for the characters ``start`` to ``end`` (exclusive) of a response: of ``sample.text``, or of
    ``sample.transcript``; or for its written tokens (see ``Declaration.spans``)."""

    start: int
    end: int
    value: float


@dataclass(frozen=True)
class Spans:
    """Rewards of pieces of one response: ``Spans([(start, end, value), ...])``; every token of a piece gets its value.

    They are per-token rewards beside the total: they count with the reward's ``weight``, and are not normalised. Where
    pieces overlap they add up; characters in none get 0. Raises ``ValueError`` for a piece that ends before it starts
    and for a value that is not finite.
    """

    spans: Sequence[tuple[int, int, float]] = ()

    def __post_init__(self) -> None:
        spans = tuple(Span(int(start), int(end), float(value)) for start, end, value in self.spans)
        for span in spans:
            if not 0 <= span.start <= span.end or not math.isfinite(span.value):
                raise ValueError(f"{tuple(span)} is no piece of a text with a finite value")
        object.__setattr__(self, "spans", spans)


@dataclass(frozen=True)
class Asks:
    """How a judge is asked, for the plan's estimate of its time: ``question`` makes text and pictures of a sample, in
    the order in which the judge reads them; an answer has at most ``tokens`` tokens; it answers ``batch`` questions at
    once. ``template``: the arguments of its chat template."""

    question: Callable[[Sample], Sequence[object]]
    tokens: int
    batch: int
    template: JsonObject


HALF = "half"
"""Of ``Weights.dtype``: bfloat16 where the device has instructions for it, float32 elsewhere."""


@dataclass(frozen=True)
class Weights:
    """A model that a reward computes with: a directory or hub name, and the dtype it is loaded in (``auto``: as it is
    stored; or ``HALF``). ``share``: of a GPU's memory that its server takes, weights among it; ``beside``: bytes it
    takes beside the weights without a GPU; ``devices``: over how many it is spread; ``asks``: of a judge in the
    process, its questions; ``quantize``: the bits that it keeps its linear layers in (as ``model.quantize``)."""

    path: str
    dtype: str = "auto"
    share: float = 0.0
    beside: int = 0
    devices: int = 1
    asks: Asks | None = None
    quantize: str = ""


def weights_at(default: str) -> Callable[[Mapping[str, object]], list[Weights]]:
    """The ``models`` of a reward with one model in float32: that of the option ``path``, or ``default``."""
    return lambda options: [Weights(str(options.get("path", default)), "float32")]


def weights_in_half(options: Mapping[str, object]) -> list[Weights]:
    """The ``models`` of a reward with one model, at the option ``path``, whose ``dtype`` ``auto`` is ``HALF``."""
    return [Weights(str(options["path"]), str(options.get("dtype", "auto")).replace("auto", HALF))]


Value: TypeAlias = float | Failed | None
Parts: TypeAlias = Mapping[str, Sequence[Value] | Sequence[Spans | None] | Sequence[str | None]]
Returned: TypeAlias = "Sequence[Value] | Parts | torch.Tensor"


@dataclass(frozen=True)
class Declaration:
    """The declaration of a reward.

    ``inputs``: which fields of a sample it reads (the core makes no others); ``reads``, where its options decide that:
    a function of the options that returns them, asked before anything is built. ``per``: ``"sample"``, or ``"group"``
    to be called with the whole group of a prompt, never split. ``differentiable``: it reads ``tensor`` and returns a
    tensor ``[B]`` whose graph reaches it. ``spans``: it returns a part ``spans`` beside ``score``, of the characters of
    ``sample.text``, the last turn of an episode; ``"episode"``: of ``sample.transcript``, all turns; ``"token"``: of
    the tokens that the policy wrote, counted from 0 without what it was told between (``sample.tokens``).
    ``own_deadline``: it gives up by itself what takes too long, so the recipe's ``timeout`` is not applied. ``device``:
    it computes with a model on ``context.device``; where a controller has several devices, the one that judges calls
    it, in its own process (such a class may be a ``Sleeper``, to free its memory meanwhile). ``paths``: its options
    that may name files (``"model"``, or ``"model.path"`` inside a mapping); the core looks them up from the recipe's
    folder. Spell them out in the decorator: a recipe's paths are resolved without importing its rewards. ``checks``:
    the constructor of a class calls ``before_loading`` between the checks of its options and the loading of a model or
    a connection, or does neither; ``mmrl plan`` then runs it up to there. A function that declares it is called in a
    plan with an empty sample of the recipe's size. Raises ``ValueError`` for ``inputs`` and ``per`` that do not exist.
    """

    inputs: tuple[Input, ...] = ("image",)
    per: Per = "sample"
    differentiable: bool = False
    spans: SpansOf = False
    own_deadline: bool = False
    device: bool = False
    paths: tuple[str, ...] = ()
    models: Callable[[JsonObject], Sequence[Weights]] | None = None
    reads: Callable[[JsonObject], Sequence[Input]] | None = None
    checks: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str):
            raise ValueError(f"inputs={self.inputs!r} is text; write inputs=({self.inputs!r},)")
        object.__setattr__(self, "inputs", tuple(self.inputs))
        for name in self.inputs:
            _check_word("inputs", name, get_args(Input), "a sample has no such field")
        _check_word("per", self.per, get_args(Per), "a reward scores single samples or whole groups")

    @property
    def has_gradient(self) -> bool:
        """Whether an update can follow the gradient of a sample's reward."""
        return self.differentiable and self.per == "sample"


class CheckedError(BaseException):
    """The options of a reward are checked, and no more is wanted. Not an ``Exception``, so that no constructor takes it
    for a failure of its own."""


_ONLY_CHECKS: ContextVar[bool] = ContextVar("only_checks", default=False)


@contextmanager
def only_checks() -> Generator[None]:
    """Inside the block a constructor ends where it calls ``before_loading``, by ``CheckedError``."""
    token = _ONLY_CHECKS.set(True)
    try:
        yield
    finally:
        _ONLY_CHECKS.reset(token)


def before_loading() -> None:
    """Mark the place in a reward's constructor where its options are checked, and loading or connecting begins.

    ``mmrl plan`` runs the constructor of a reward that declares ``checks=True`` up to this place, so that it refuses
    the options that training would refuse.
    """
    if _ONLY_CHECKS.get():
        raise CheckedError


def _check_word(key: str, word: object, known: tuple[str, ...], why: str) -> None:
    """Raise ``ValueError`` unless ``word`` is one of ``known``."""
    if word not in known:
        meant = did_you_mean(str(word), known)
        raise ValueError(f"{key}: {word!r}: {why}{meant} (write {', '.join(map(repr, known))})")


@dataclass
class Asked:
    """The ``requests`` of a call to another process: ``seconds`` of all of them together, without their wait for a
    turn, of which there are ``at_once`` at the same time."""

    requests: int = 0
    seconds: float = 0.0
    at_once: int = 1


@dataclass(frozen=True)
class Context:
    """The circumstances of a call, beside its samples.

    ``step`` is the training step (-1 outside training), ``device`` where to compute, ``folder`` the directory of the
    run for caches and transcripts (None outside a run), ``label`` the reward's name in the recipe. A reward that asks
    another process counts in ``sent`` the bytes it sends: ``media`` (encoded pictures and clips) and ``questions`` (all
    else); the step's metrics show them. A judge also counts there its requests and tokens
    (``mmrl.rewards.judging.usage``).
    ``round``: the round of dynamic sampling; 0 is the first. ``asked``: of this call; a reward that makes several
    requests at once counts them there, so that ``mmrl simulate`` knows them. ``patience``: seconds that the run waits
    for rewards (``scoring.patience``): a reward whose server asks for a longer wait fails at once. ``feedback``:
    whether the part of that name is read.
    """

    step: int = -1
    device: torch.device | str = "cpu"
    folder: Path | None = None
    label: str = ""
    sent: Counter[str] = field(default_factory=Counter, compare=False)
    round: int = 0
    asked: Asked = field(default_factory=Asked, compare=False)
    patience: float = math.inf
    feedback: bool = False


class RewardFunction(Protocol):
    """A reward that is a function. What its recipe's ``options`` name are further keyword arguments."""

    def __call__(self, samples: Sequence[Sample], /, *, context: Context) -> Returned | Awaitable[Returned]:
        """A value for each sample, in order; see ``Returned``."""
        ...


class RewardClass(Protocol):
    """A reward that is a class, which is built with its recipe's ``options``."""

    def score(self, samples: Sequence[Sample], /, *, context: Context) -> Returned | Awaitable[Returned]:
        """A value for each sample, in order; see ``Returned``."""
        ...


class Sleeper(Protocol):
    """A reward, or its model, that frees its device's memory while the device does other work.

    ``device`` is the ``context.device`` of its calls. Either method may be called first, and twice. ``score`` must also
    work without a call of ``wake``. ``mmrl.rewards.sleeping.Sleeping`` is a ``Sleeper`` for models of torch.
    """

    def sleep(self, device: torch.device | str, /) -> None:
        """Free the memory of ``device``."""
        ...

    def wake(self, device: torch.device | str, /) -> bool | None:
        """Load everything onto ``device`` before it returns: the placement measures its time.

        Returns true where part of the work is done only once, so that later calls are faster.
        """
        ...


R = TypeVar("R", bound=Callable[..., object])


def reward(
    *,
    inputs: tuple[Input, ...] = ("image",),
    per: Per = "sample",
    differentiable: bool = False,
    spans: SpansOf = False,
    own_deadline: bool = False,
    device: bool = False,
    paths: tuple[str, ...] = (),
    models: Callable[[JsonObject], Sequence[Weights]] | None = None,
    reads: Callable[[JsonObject], Sequence[Input]] | None = None,
    checks: bool = False,
) -> Callable[[R], R]:
    """Declare a function or class as a reward that differs from the defaults (see ``Declaration``).

    Raises ``ValueError`` for ``inputs`` and ``per`` that do not exist.
    """
    declaration = Declaration(inputs, per, differentiable, spans, own_deadline, device, paths, models, reads, checks)
    if differentiable and "tensor" not in inputs:
        declaration = replace(declaration, inputs=(*declaration.inputs, "tensor"))
    if spans == "token" and "tokens" not in inputs:
        declaration = replace(declaration, inputs=(*declaration.inputs, "tokens"))

    def mark(target: R) -> R:
        target.__mmrl_reward__ = declaration  # type: ignore[attr-defined]
        return target

    return mark


def declaration_of(target: object) -> Declaration:
    """The declaration of a reward, the defaults where it made none.

    An instance may hold its own as ``self.__mmrl_reward__``, where its options decide.
    """
    return getattr(target, "__mmrl_reward__", None) or Declaration()
