"""Notes on a replay beside its numbers: recorded verdicts, questions asked, and differences of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mmrl.app.resume import flatten
from mmrl.app.verify.replay import Rows
from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Recipe
from mmrl.core.checkpoint_manifest import entries
from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.secrets import hidden
from mmrl.core.stored import BadFileError
from mmrl.episodes.journal import Journal
from mmrl.logging.environment import environment, read_environment
from mmrl.logging.rundir import RunDir
from mmrl.report.verified import Part
from mmrl.rewards.judging.replay import Recorded


def of_judges(recorded: Recorded) -> list[str]:
    """What the replay took from the run's records, and what it computed or asked again."""
    taken, missing = (dict(sorted(counts.items())) for counts in (recorded.taken, recorded.missing))
    notes = [f"{n} verdicts of {label} were taken from the run's records." for label, n in taken.items() if n]
    asked = [
        f"{label} was asked again: {n} questions are not in the run's records." for label, n in missing.items() if n
    ]
    return notes + asked


def of_episodes(journal: Journal | None) -> list[str]:
    """How many answers of its environment the replay took from the run's records, and how many it asked for again."""
    if journal is None:
        return []
    notes = [f"{journal.taken} answers of the environment were taken from the run's records."]
    if journal.missing:
        notes.append(f"The environment was called again {journal.missing} times: these are not in the run's records.")
    return notes


def of_servers(recipe: Recipe, *, evaluated: bool) -> list[str]:
    """The rewards that a server computed again; the server may have changed since the run."""
    rewards = [*recipe.rewards, *(recipe.eval.rewards if evaluated else ())]
    asked = {
        label_of(r.name, r.label): r.options["url"]
        for r in rewards
        if Path(r.name.partition(":")[0]).stem == "http" and "url" in r.options
    }
    return [f"The reward {label} was asked again, at {hidden(str(url))}." for label, url in asked.items()]


def of_environment(directory: RunDir) -> list[str]:
    """The differences between this machine and the one on which the run was last started."""
    try:
        before = read_environment(directory.env)
    except (OSError, BadFileError):
        return [f"What the run was made with is not known: {directory.env.name} cannot be read."]
    before, now = (flatten(_that_counts(env)) for env in (before, environment()))
    changed = [
        f"{key} {_word(before.get(key))}, now {_word(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if not changed:
        return ["Versions, processor, devices and threads are those of the run."]
    return [f"Not as in the run, which may change numbers: {'; '.join(changed)}."]


def _that_counts(env: JsonObject) -> JsonObject:
    """The entries of env.json that may change the last bits of a number."""
    kept = {key: env.get(key) for key in ("python", "devices", "versions", "threads", "git")}
    return kept | {"cpu": {"name": as_object(env.get("cpu") or {}).get("name")}}


def _word(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def of_weights(directory: RunDir, rows: Rows, verified: int, step: int | None) -> list[str]:
    """If no step was named: a later step whose weights can be compared too."""
    kept = [e.step for e in entries(directory.checkpoints) if e.usable and e.step in rows and e.step >= verified]
    if step is not None or not kept or verified in kept:
        return []
    return [f"No checkpoint of step {verified} is kept. With --step {kept[0]} weights are compared too."]


def hints(recipe: Recipe, parts: list[Part]) -> list[str]:
    """If numbers differ: the known reasons."""
    if all(part.equal for part in parts):
        return []
    differ = dict.fromkeys(one.name for part in parts for one in part.found if not one.same)
    found = []
    labels = [label_of(r.name, r.label) for r in (*recipe.rewards, *recipe.eval.rewards)]
    if named := [label for label in dict.fromkeys(labels) if f"reward/{label}" in differ]:
        found.append(
            f"Of {', '.join(named)}: a reward that draws at random, or depends on the time or on another machine, "
            "cannot be repeated."
        )
    if torch.cuda.is_available() and recipe.device != "cpu":
        found.append("On a GPU equal work need not give equal bits: kernels may add in another order.")
    return [*found, "A run that was resumed with other settings has only the last of them on record."]
