"""Tasks of verifiers 0.4 that one answer solves, with their rewards.

    data:
      name: verifiers
      train: {taskset: my-tasks, size: 1000}                # an installed taskset, with its config
      heldout: {taskset: my-tasks, skip: 1000, size: 200}
    rewards:
      - name: verifiers

A taskset is the name of an installed package, as ``--env.taskset.id`` takes it, or ``path/to/file.py``: a module that
exports one. ``config`` are the fields of its config. Tasks with tools, a container, several turns, judges, pictures or
rewards that need a runtime are refused by name: they are played by verifiers' own harness.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt, Turn
from mmrl.data.records import Records

_MOST = 1 << 24


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    taskset: str,
    size: int = 1000,
    skip: int = 0,
    config: JsonObject | None = None,
) -> Records:
    """``size`` tasks of ``taskset`` behind the first ``skip``, for either split: a taskset has none itself. Raises
    ``UserError`` for a taskset that cannot be made or has fewer tasks, and for tasks that one answer does not solve."""
    if not 1 <= size <= _MOST or not 0 <= skip <= _MOST:
        raise UserError(f"size is {size} and skip {skip}; a size is 1 or more, skip 0 or more, at most {_MOST:,}")
    kept = json.dumps(config or {}, sort_keys=True)
    tasks = _tasks(taskset, kept, skip, size)
    if len(tasks) < size:
        raise UserError(
            f"data: the taskset {taskset} has {len(tasks)} tasks behind the first {skip}, not {size}; lower size or "
            "skip"
        )

    def prompt(index: int) -> Prompt:
        of = {"taskset": taskset, "config": kept, "skip": skip, "size": size, "index": index}
        return _prompt(f"verifiers/{taskset}/{skip + index}", tasks[index].data, {"verifiers": of})

    return Records(size, prompt)


async def score(prompt: Prompt, answer: str) -> tuple[float, dict[str, float]]:
    """The weighted sum of a task's rewards for ``answer``, and each of them and of its metrics. Raises ``UserError``
    for a prompt of another data set."""
    of = prompt.meta.get("verifiers")
    if not isinstance(of, dict) or "taskset" not in of:
        raise UserError("rewards: verifiers scores the tasks of the data set verifiers; take it as data.name")
    task = _tasks(of["taskset"], of["config"], of["skip"], of["size"])[of["index"]]
    return await _scored(task, prompt, answer)


async def _scored(task: Any, prompt: Prompt, answer: str) -> tuple[float, dict[str, float]]:
    vf, graph = _package(), importlib.import_module("verifiers.v1.graph")
    trace_of = importlib.import_module("verifiers.v1.trace")
    said = [vf.SystemMessage(content=prompt.system)] if prompt.system is not None else []
    said += [(vf.UserMessage if t.role == "user" else vf.AssistantMessage)(content=t.text) for t in prompt.turns]
    said += [vf.UserMessage(content=prompt.text), vf.AssistantMessage(content=answer)]
    last = len(said) - 1
    nodes = [
        graph.MessageNode(parent=n - 1 if n else None, message=message, sampled=n == last)
        for n, message in enumerate(said)
    ]
    trace = vf.Trace(
        task=trace_of.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=trace_of.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    parts = {name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
    parts |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return float(trace.reward), parts


def _prompt(id: str, data: Any, meta: Mapping[str, Any]) -> Prompt:
    """The messages of a task as a prompt. Raises ``UserError`` where they are not texts that end with the user's."""
    name = f"the task {data.name or data.idx} of verifiers"
    if data.prompt is None:
        raise UserError(f"data: {name} has no prompt, so its user speaks first; take a taskset with prompts")
    if isinstance(data.prompt, str):
        return Prompt(id, data.prompt, meta, system=data.system_prompt)
    if not all(isinstance(message.content, str) for message in data.prompt):
        raise UserError(f"data: {name} shows pictures, or calls of tools; take a taskset of texts")
    said, system = [(message.role, message.content) for message in data.prompt], data.system_prompt
    if said and said[0][0] == "system":
        system = "\n\n".join(text for text in (system, said.pop(0)[1]) if text)
    roles = {role for role, _ in said}
    if not said or said[-1][0] != "user" or not roles <= {"user", "assistant"}:
        raise UserError(f"data: the messages of {name} do not end with one of the user; take another taskset")
    *before, (_, text) = said
    return Prompt(id, text, meta, system=system, turns=tuple(Turn(role, earlier) for role, earlier in before))


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            f"data.name: verifiers needs verifiers 0.4 ({error}), which wants another openai than vLLM does; in an "
            "environment without vLLM: pip install 'verifiers>=0.4,<0.5'"
        ) from error


@lru_cache(maxsize=16)
def _tasks(taskset: str, config: str, skip: int, size: int) -> list[Any]:
    """Those tasks, checked."""
    vf = _package()
    try:
        made = _taskset(vf, taskset, json.loads(config))
        tasks = list(itertools.islice(made, skip, skip + size))
    except UserError:
        raise
    except Exception as error:  # of a package of others
        raise UserError(
            f"data: the taskset {taskset} of verifiers cannot be made: {describe(error)}; correct taskset or config"
        ) from error
    if tasks and (why := _refusal(vf, made, tasks)):
        raise UserError(
            f"data: the taskset {taskset} of verifiers {why}, and one answer of text is to solve its tasks. "
            "Take another taskset, or write its world as an environment (docs/environments.md)"
        )
    return tasks


def _taskset(vf: Any, taskset: str, config: JsonObject) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    if not taskset.endswith(".py"):
        environment = loaders.environment_class(taskset)
        if environment is not vf.SingleAgentEnv:
            raise UserError(
                f"data: the taskset {taskset} of verifiers has an environment of its own, {environment.__name__}, and "
                "one answer of text is to solve its tasks. Take another taskset, or write its world as an environment "
                "(docs/environments.md)"
            )
        return loaders.load_taskset(loaders.taskset_config_type(taskset).model_validate({**config, "id": taskset}))
    path = Path(taskset).resolve()
    name = f"mmrl_taskset_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"data: there is no taskset {taskset}; correct the path")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = [o for o in vars(module).values() if isinstance(o, type) and o.__module__ == name]
    kinds = [kind for kind in kinds if issubclass(kind, vf.Taskset)]
    if len(kinds) != 1:
        raise UserError(f"data: {taskset} defines {len(kinds)} classes of Taskset; define one")
    generic = importlib.import_module("verifiers.v1.utils.generic")
    settings = generic.concrete_type(kinds[0], vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    return kinds[0](settings.model_validate({**config, "id": path.stem}))


def _refusal(vf: Any, taskset: Any, tasks: Sequence[Any]) -> str:
    """Why these tasks cannot be scored here; an empty text where they can."""
    first, kind = tasks[0], type(tasks[0])
    rewards = first.hooks("reward")
    faults = {
        "has tools": type(taskset).toolsets(taskset.config) or kind.toolsets(first.config),
        "needs a container": first.NEEDS_CONTAINER or any(task.data.image for task in tasks),
        "has judges": first.config.judges,
        "prepares a runtime": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
        "has no reward": not rewards,
    }
    for hook in (*rewards, *first.hooks("metric")):
        given = inspect.signature(hook).parameters.get("runtime")
        needs = given is not None and given.default is inspect.Parameter.empty
        faults[f"has {hook.__name__}, which needs a runtime"] = needs
    return next((fault for fault, found in faults.items() if found), "")
