"""Rewards in the form of TRL's ``reward_funcs`` and verl's ``compute_score``, called as they are.

TRL calls a function of ``GRPOTrainer`` once for a batch: ``f(prompts=[...], completions=[...], COLUMN=[...], ...)``,
with every column of the data set (``trl/trainer/grpo_trainer.py``, ``_calculate_rewards``). verl calls
``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for one response; a dict that it returns has
the reward as ``score`` (``verl/workers/reward_manager``). ``adapted`` makes a reward of mmrl's of either. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import source_of
from mmrl.core.reward_contract import Context, reward
from mmrl.core.trajectory import Prompt, Sample

Function = Callable[..., Any]
_ANSWERS = ("answer", "solution", "ground_truth")
"""What TRL's rewards and verl's call the true answer, which is ``meta["answer"]`` here."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
TALKS = "conversational"
"""The option of a function of TRL's that says whether it gets messages; else its source tells."""


def peer_of(function: object) -> str | None:
    """``TRL`` or ``verl`` where ``function`` is a reward in their form, by its parameters; else None."""
    if inspect.isclass(function) or not callable(function):
        return None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if "context" in parameters:
        return None
    return "TRL" if "completions" in parameters else "verl" if "solution_str" in parameters else None


def adapted(function: Function) -> Function | None:
    """A reward of mmrl's that calls ``function`` of TRL or verl; None where it is in neither form.

    Its options are the function's parameters that neither library gives and that have a default; those of a function of
    TRL's without one are columns of the data, ``sample.prompt.meta``. ``None`` in TRL's answer means that the reward
    does not apply, and counts 0, as in TRL's sum.
    """
    peer = peer_of(function)
    if peer is None:
        return None
    call = _of_trl(function) if peer == "TRL" else _of_verl(function)
    call.__name__, call.__doc__ = getattr(function, "__name__", "reward"), function.__doc__
    call.__module__ = function.__module__
    call.__wrapped__ = function  # type: ignore[attr-defined]  # where it is defined, for messages
    call.__signature__ = _signature(function, peer)  # type: ignore[attr-defined]
    return reward(inputs=("text",))(call)


def _signature(function: Function, peer: str) -> inspect.Signature:
    """That of a reward of mmrl's. What TRL's function needs is a column of the data; what verl's needs, an option."""
    named = [p for p in inspect.signature(function).parameters.values() if p.kind in _BY_NAME]
    if peer == "TRL":
        own = [p for p in named if p.name not in _TRL and p.default is not p.empty]
        own.append(inspect.Parameter(TALKS, inspect.Parameter.KEYWORD_ONLY, default=None))
    else:
        own = [p for p in named if p.name not in _VERL]
    first = inspect.Parameter("samples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY)
    return inspect.Signature([first, context, *(p.replace(kind=p.KEYWORD_ONLY) for p in own)])


def _of_trl(function: Function) -> Function:
    parameters = inspect.signature(function).parameters.values()
    wide = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    talks = re.search("""[\\[(]["']content["']""", source_of(function)) is not None

    def arguments(
        samples: Sequence[Sample], context: Context, options: dict[str, Any], logged: dict[str, float]
    ) -> dict[str, Any]:
        chats = talks if (asked := options.pop(TALKS, None)) is None else bool(asked)
        written = [s.transcript for s in samples]
        every: dict[str, object] = {
            "prompts": [_messages(s.prompt) if chats else s.prompt.text for s in samples],
            "completions": [[{"role": "assistant", "content": text}] if chats else text for text in written],
            "trainer_state": SimpleNamespace(global_step=max(context.step, 0)),
            "log_extra": lambda column, values: None,  # mmrl keeps samples by itself
            "log_metric": logged.__setitem__,
        }
        columns = {name for s in samples for name in s.prompt.meta} if wide else set[str]()
        for name in (columns | needed) - every.keys() - options.keys():
            every[name] = [column(s.prompt, name) for s in samples]
        return {name: value for name, value in every.items() if wide or name in named} | options

    def read(returned: Sequence[float | None], logged: dict[str, float]) -> object:
        total = [0.0 if value is None else value for value in returned]
        parts = {name: [value] * len(total) for name, value in logged.items()}
        return {"score": total, **parts} if parts else total

    async def later(samples: Sequence[Sample], *, context: Context, **options: Any) -> object:
        logged: dict[str, float] = {}
        return read(await function(**arguments(samples, context, options, logged)), logged)

    def now(samples: Sequence[Sample], *, context: Context, **options: Any) -> object:
        logged: dict[str, float] = {}
        return read(function(**arguments(samples, context, options, logged)), logged)

    return later if inspect.iscoroutinefunction(function) else now


def _of_verl(function: Function) -> Function:
    parameters = inspect.signature(function).parameters.values()
    wide = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    truth = any(p.name == "ground_truth" and p.default is p.empty for p in parameters)

    def calls(samples: Sequence[Sample], options: dict[str, Any]) -> Iterator[Any]:
        for s in samples:
            meta = s.prompt.meta
            given = {
                "data_source": meta.get("data_source"),
                "solution_str": s.transcript,
                "ground_truth": column(s.prompt, "ground_truth") if truth else meta.get("answer"),
                "extra_info": meta.get("extra_info") or dict(meta),
            }
            yield function(**{name: value for name, value in given.items() if wide or name in named}, **options)

    async def later(samples: Sequence[Sample], *, context: Context, **options: Any) -> object:
        return _transposed(await asyncio.gather(*(_awaited(call) for call in calls(samples, options))))

    def now(samples: Sequence[Sample], *, context: Context, **options: Any) -> object:
        return _transposed([*calls(samples, options)])

    return later if inspect.iscoroutinefunction(function) else now


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call


def _transposed(returned: Sequence[Any]) -> object:
    """A list of numbers, or of dicts with a ``score`` (or ``reward``): then their numbers by name."""
    if not any(isinstance(one, Mapping) for one in returned):
        return returned
    dicts = [one if isinstance(one, Mapping) else {"score": one} for one in returned]
    dicts = [{**one, "score": one.get("score", one.get("reward"))} for one in dicts]
    count = Counter(name for one in dicts for name, value in one.items() if isinstance(value, (int, float)))
    names = {"score": None} | {name: None for name, n in count.items() if n == len(dicts) and name != "spans"}
    return {str(name): [one[name] for one in dicts] for name in names}


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    turns = [{"role": turn.role, "content": turn.text} for turn in prompt.turns]
    return [*system, *turns, {"role": "user", "content": prompt.text}]


def column(prompt: Prompt, name: str) -> object:
    """What the data have of ``name`` for a prompt; the answer goes by any name that the libraries have for it.

    Raises ``UserError`` where they have nothing.
    """
    if name in prompt.meta:
        return prompt.meta[name]
    if name in _ANSWERS and "answer" in prompt.meta:
        return prompt.meta["answer"]
    if name == "completion_ids":
        raise UserError("a reward gets no 'completion_ids' here; tokenize the completions in it, or leave it out")
    edit = "name the column of your data set that has it: answer: COLUMN" if name in _ANSWERS else f"set meta: [{name}]"
    has = ", ".join(sorted(prompt.meta)) or "nothing"
    raise UserError(f"the prompt {prompt.id} has no {name!r} (it has {has}); {edit} in data.train and data.heldout")
