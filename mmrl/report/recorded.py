"""A run directory as reports read it: in progress or finished, also if files are missing."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mmrl.config.algorithms import algorithm_names
from mmrl.config.evaluation_checks import label_of
from mmrl.config.layers import parse_value
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, elements
from mmrl.core.stored import BadFileError, read_object, read_text
from mmrl.logging.environment import read_environment
from mmrl.logging.metrics import of_pairs, of_repeated, of_source, read, read_numbers
from mmrl.logging.pictures import Evaluation, read_evaluations
from mmrl.logging.rundir import Ended, RunDir, looks_like_run, read_ended

_RESERVED = ("mean", "std", "dropped")
"""Metrics of the sum of all rewards; anything else after ``reward/`` is a label."""
Row = dict[str, Any]


@dataclass
class RecordedRun:
    """The content of a run directory; missing files are empty."""

    path: Path
    metrics: list[Row]
    heldout: list[Row]
    failures: list[Row]
    resolved: dict[str, Any]
    given: set[str]
    overrides: list[str]
    env: JsonObject
    owner: JsonObject | None
    evaluations: list[Evaluation]

    @cached_property
    def ended(self) -> Ended | None:
        return read_ended(self.path)

    @property
    def continued(self) -> list[Row]:
        """What ``mmrl continue`` changed, each time."""
        return read(RunDir(self.path).continued)

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped early at step 40: why``, ... as reports say it."""
        if self.ended is not None:
            return str(self.ended)
        steps, budget = self.setting("train.steps"), self.setting("train.max_cpu_seconds")
        last = self.metrics[-1] if self.metrics else {}
        step, cpu = last.get("step", 0), last.get("perf/cpu_seconds")
        if isinstance(steps, int) and step >= steps:  # also while the run still holds its lock, to write this
            return "finished"
        if isinstance(budget, int | float) and cpu and cpu >= budget:
            return "finished (CPU budget spent)"
        if self.owner:
            return "running"
        return f"stopped at step {step}" if self.metrics else "not started"

    @property
    def overridden(self) -> set[str]:
        """The keys that the command line set."""
        return {text.partition("=")[0].strip() for text in self.overrides}

    @property
    def trained(self) -> dict[str, float]:
        """Weight by label of the rewards that are trained on."""
        rewards = elements(self.resolved.get("rewards"))
        weights = {_label(r): r.get("weight", 1.0) for r in rewards if isinstance(r, dict)}
        if any(not isinstance(weight, int | float) for weight in weights.values()):
            raise BadFileError(f"{RunDir(self.path).resolved}: a reward's weight is no number; put it back from a copy")
        return weights

    @property
    def figures(self) -> Collection[str]:
        """The names of what evaluations measured, in their order."""
        return dict.fromkeys(key for row in self.heldout for key in row)

    @property
    def watches_others(self) -> bool:
        """Whether a reward was measured that training does not use; also where that is not known."""
        return not self.resolved or any(label not in self.trained for label in self.labels)

    @property
    def labels(self) -> list[str]:
        """Every reward seen, those trained on first."""
        seen = [
            k.split("/")[1] for row in [*self.heldout[-1:], *self.metrics[-1:]] for k in row if k.startswith("reward/")
        ]
        known = [label for label in [*self.trained, *seen] if label in seen]
        return [label for label in dict.fromkeys(known) if label not in _RESERVED]

    @property
    def measured(self) -> list[tuple[str, str, str]]:
        """(key, name, remark) of each figure of an evaluation: those of given pairs, and every reward."""
        seen = dict.fromkeys(key for row in [*self.heldout[-1:], *self.metrics[-1:]] for key in row)
        watched = "not trained on" if self.resolved else ""
        rewards = [(f"reward/{x}", x, "" if x in self.trained else watched) for x in self.labels]
        apart = [(key, f"{parts[1]}: {parts[-1]}", "one source") for key in seen if len(parts := of_source(key)) == 4]
        repeated = [(key, key, "held-out") for key in of_repeated(seen)]
        return [*((key, key, "") for key in of_pairs(seen)), *rewards, *repeated, *apart]

    def reward(self, label: str) -> tuple[Json, Json] | None:
        """Name and options of the reward ``label``, trained on or only measured; None where the recipe has none."""
        lists = [self.resolved.get("rewards"), self.setting("eval.rewards")]
        both = [r for found in lists for r in elements(found) if isinstance(r, dict)]
        return next(((r.get("name"), r.get("options") or {}) for r in both if _label(r) == label), None)

    def setting(self, key: str) -> Json:
        """The value of a dotted key (``optim.lr``); None where the recipe has none."""
        found: Json = self.resolved
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def over_plan(self, key: str = "time/step", planned: str = "plan/step_seconds") -> float | None:
        """How many times what the plan expected a step took: the median, without the first step, whose one-time work is
        not planned. None without a plan. For memory: ``perf/peak_memory_mib`` and ``plan/peak``."""
        pairs = [(row.get(key), row.get(planned)) for row in self.metrics if row.get("step", 0) > 1]
        found = [took / said for took, said in pairs if took and said]
        return statistics.median(found) if found else None

    def column(self, key: str) -> list[tuple[float, float | None]]:
        """(step, value) of a metric in training."""
        return [(row["step"], row.get(key)) for row in self.metrics]


def read_run(path: Path) -> RecordedRun:
    run = RunDir(path)
    if not (looks_like_run(path) or run.metrics.is_file() or run.heldout.is_file()):
        raise UserError(f"there is no run in {path}; name a directory that mmrl train made (it holds metrics.jsonl)")
    run.check()
    return RecordedRun(
        path=path,
        metrics=_rows(run.metrics),
        heldout=_rows(run.heldout),
        failures=read(run.failures),
        resolved=_settings(run.resolved),
        given=_given(run.recipe),
        overrides=run.overrides(),
        env=read_environment(run.env) if run.env.exists() else {},
        owner=run.owner(),
        evaluations=read_evaluations(run.samples),
    )


def _rows(path: Path) -> list[Row]:
    """The rows by step, the last one of each step, numbers only (others and non-finite ones are None)."""
    by_step = {row["step"]: row for row in read_numbers(path)}
    return [by_step[step] for step in sorted(by_step)]


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a run, whose types are those of a recipe. Raises ``UserError``.

    An algorithm in a file is not looked at: to show a run of somebody else's runs no code of theirs.
    """
    if not path.exists():
        return {}
    found = read_object(path)
    section = found.get("algorithm")
    name = section.get("type") if isinstance(section, Mapping) else None
    own = isinstance(name, str) and name not in algorithm_names()
    try:
        Recipe.model_validate({key: of for key, of in found.items() if not own or key != "algorithm"})
    except ValidationError as error:  # of other versions keys may be missing, unknown, or out of today's limits
        wrong = [one for one in error.errors(include_url=False) if one["type"].endswith("_type")]
        if wrong:
            key = ".".join(map(str, wrong[0]["loc"]))
            raise BadFileError(f"{path}, {key}: {wrong[0]['msg']}; put it back from a copy") from None
    except (ValueError, OSError):
        pass
    return found


def _given(recipe: Path) -> set[str]:
    """The keys that the recipe itself sets, dotted."""
    try:
        documents = [parse_value(text) for text in read_text(recipe).split("\n---\n")]
    except (OSError, ValueError):
        return set()
    return {key for document in documents if isinstance(document, dict) for key, _ in flat(document)}


def flat(tree: Json, prefix: str = "") -> list[tuple[str, Json]]:
    """Leaves of nested mappings and lists of mappings as (``a.b[0].c``, value)."""
    if isinstance(tree, Mapping) and tree:
        return [leaf for key, value in tree.items() for leaf in flat(value, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        return [leaf for i, value in enumerate(tree) for leaf in flat(value, f"{prefix}[{i}]")]
    return [(prefix, tree)]


def _label(reward: Mapping[str, Any]) -> str:
    return label_of(str(reward.get("name", "")), reward.get("label"))
