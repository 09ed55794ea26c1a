"""``mmrl.search``: find settings of a recipe by successive halving, from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.api.data import AnyData
from mmrl.api.entry import entry_point, in_python_words
from mmrl.api.recipes import AnyAlgorithm, AnyEnvironment, AnyRecipe, AnyReward, Changes, Objects, read
from mmrl.api.run import Run, load_run
from mmrl.core.errors import UserError
from mmrl.core.garbage import rarely_collected
from mmrl.core.json_types import Json
from mmrl.studies.sweep.searching import Search


@dataclass(frozen=True)
class Found:
    """What ``mmrl.search`` found: ``print`` shows its sentences.

    ``best``: the settings that are ahead of all others; empty where no setting is ahead beyond chance. ``left``: those
    that were trained to the end, and ``run`` their run (with the first seed).
    """

    best: tuple[str, ...]
    left: tuple[str, ...]
    run: Run
    table: dict[str, list[str | float | None]]
    """A column by name, a row per round, setting and seed: ``pandas.DataFrame(found.table)``."""
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(map(in_python_words, self.sentences))

    __repr__ = __str__


@entry_point
def search(
    recipe: AnyRecipe,
    tried: Mapping[str, Sequence[Json]] | Sequence[str],
    changes: Changes | None = None,
    *,
    rewards: Sequence[AnyReward] | None = None,
    eval_rewards: Sequence[AnyReward] | None = None,
    data: AnyData | None = None,
    heldout: AnyData | None = None,
    algorithm: AnyAlgorithm | None = None,
    environment: AnyEnvironment | None = None,
    seeds: int = 1,
    factor: int = 2,
    out: str | Path | None = None,
    resume: bool = False,
) -> Found | None:
    """Find settings of a recipe, as ``mmrl sweep`` does: short trainings first, the best of them longer.

    ``tried``: values of settings, ``{"optim.lr": [1e-5, 3e-5]}``: all combinations. ``seeds``: how many each is trained
    with. ``factor``: after each round one of so many goes on. ``out``: the folder of the search, ``sweeps/<name>`` by
    default; ``resume`` continues the search there. The other arguments are those of ``mmrl.train``. Returns None where
    Ctrl-C stopped it. Raises ``mmrl.UserError``.
    """
    texts = [_tried(key, values) for key, values in tried.items()] if isinstance(tried, Mapping) else list(tried)
    objects = Objects(rewards, eval_rewards, data, heldout, algorithm, environment)
    with rarely_collected(), read(recipe, changes, objects) as loaded:
        folder = Path(out) if out is not None else Path("sweeps") / loaded.recipe.name
        made = Search(loaded, folder, texts, factor, seeds, resume=resume)
        number = made.run()
        if number is None:
            return None
        left = made.sweep.trials[number - 1]
        ahead = all(lead.ahead for lead in made.leads(number).values())
        run = load_run(made.run_of(number, len(made.rounds)))
        return Found(left if ahead else (), left, run, _table(made), tuple(made.verdict(number)))


def _tried(key: str, values: object) -> str:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UserError(f"tried: {key}: give a list of values, {{'optim.lr': [1e-5, 3e-5]}}")
    try:
        return f"{key}={','.join(json.dumps(value, allow_nan=False) for value in values)}"
    except (TypeError, ValueError) as error:
        raise UserError(f"tried: {key}: {error}; a recipe holds texts, numbers, lists and mappings") from None


def _table(made: Search) -> dict[str, list[str | float | None]]:
    rows = [
        {"round": n, "setting": " ".join(made.sweep.trials[trial - 1]), "seed": seed, "value": of.value}
        for (n, trial, seed), of in sorted(made.sweep.results.items())
    ]
    return {name: [row[name] for row in rows] for name in ("round", "setting", "seed", "value")}
