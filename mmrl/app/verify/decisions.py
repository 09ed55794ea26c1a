"""Replay the decisions of a run's schedulers and of its placement policy from the log that the run kept."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.app.build import open_run
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.logging.metrics import read
from mmrl.placement.scheduler_log import Replay, replay
from mmrl.report.verified import WIDTH


@dataclass(frozen=True)
class Decisions:
    """What the replay of each controller found, by its rank."""

    replays: Mapping[int, Replay]

    @property
    def equal(self) -> bool:
        return all(one.differs is None for one in self.replays.values())

    def __str__(self) -> str:
        lines = []
        for rank, one in sorted(self.replays.items()):
            same = f"{one.handed} tasks on their devices"
            if one.settings.follows:
                same += f" and {one.decided} decision{'s' * (one.decided != 1)} between steps"
            end = f", until step {one.step}"
            if one.differs is not None:
                end = f"; in step {one.step} it DIFFERS: {one.differs}"
            lines.append(f"controller {rank}: {same} are the same{end}")
        lines.append(f"the replayed decisions are {'the same' if self.equal else 'NOT the same'}")
        return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  "))


def verify_decisions(path: Path) -> Decisions:
    """Replay what the log of the run in ``path`` has, of all controllers.

    Raises ``UserError`` where the run kept no log, and where the log cannot be read.
    """
    recipe, directory = open_run(path)
    rows = read(directory.placement)
    if not any("heard" in row for row in rows):
        raise UserError(f"{path} has no log of its scheduler; {_edit(recipe)}")
    try:
        return Decisions(replay(rows, recipe.placement))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{directory.placement} cannot be replayed ({error!r}): it was changed, or another version wrote it; "
            "train the run anew"
        ) from error


def _edit(recipe: Recipe) -> str:
    """What makes a run keep a log."""
    if recipe.devices_per_controller == 1:
        return "its controllers have one device each, so that nothing is to be decided"
    return "train it with placement.log=true"
