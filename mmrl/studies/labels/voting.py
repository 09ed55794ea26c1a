"""Train a run beside the page on which people vote for its samples (``mmrl label --train``)."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mmrl.app.continuing import continued
from mmrl.commands.arguments import layers_of, preparing, read_recipe
from mmrl.config.loader import LoadedRecipe
from mmrl.core.errors import UserError, refuse
from mmrl.logging.rundir import looks_like_run, refuse_directory
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from mmrl.studies.labels.live import VoteServer

REWARD = "votes"
_LEAST_SAMPLES = 20


def to_train(source: str, changes: Sequence[str], out: Path | None, *, pairs: bool) -> tuple[LoadedRecipe, Path, bool]:
    """What trains: the recipe, the directory of its run, and whether that goes on. A recipe without the reward
    ``votes`` gets it in place of its rewards, which are then only measured. Raises ``UserError``."""
    run = Path(source)
    if resume := looks_like_run(run):
        if out is not None or pairs:
            raise UserError(f"{source} is a run, which goes on as it began; leave out --out and --pairs")
        overlays, overrides = layers_of(changes)
        loaded, out = continued(run, overlays, overrides, None, preparing()), run
    else:
        if run.is_dir():
            raise UserError(
                f"{source} is a folder; --train trains a recipe's model and asks for votes on its samples: mmrl label "
                f"RECIPE --train. To label the samples of the folder: mmrl label {source}"
            )
        loaded = read_recipe(source, changes)
        if not any(reward.name == REWARD for reward in loaded.recipe.rewards):
            loaded = read_recipe(source, [*changes, _rewards(loaded, source, pairs=pairs)])
        elif pairs:
            raise UserError("the recipe has the reward votes; set votes: pairs in its options, without --pairs")
        out = out or Path("runs") / loaded.recipe.name
        refuse_directory(out, overwrite=False, resume=False)
    recipe = loaded.recipe
    if all(reward.name != REWARD for reward in recipe.rewards):
        raise UserError(f"{source} does not train on votes; start a run with: mmrl label RECIPE --train")
    if recipe.controllers * recipe.devices_per_controller > 1:
        raise UserError("votes train a run of one process; set controllers=1 devices_per_controller=1")
    if (size := recipe.train.prompts_per_step * recipe.train.group_size) < _LEAST_SAMPLES:
        raise UserError(
            f"a step has {size} samples, and the first votes need {_LEAST_SAMPLES}; raise train.prompts_per_step or "
            "train.group_size"
        )
    return loaded, out, resume


def _rewards(loaded: LoadedRecipe, source: str, *, pairs: bool) -> str:
    """The setting that makes votes the reward."""
    model = source if Path(source).name == source else str(Path(source).resolve())
    options = {"model": model, **({"votes": "pairs"} if pairs else {})}
    votes = {"name": REWARD, "on_failure": "drop", "options": options}
    watched = [{**reward.model_dump(mode="json"), "weight": 0} for reward in loaded.recipe.rewards]
    return f"rewards={json.dumps([votes, *watched])}"


class Voting(VoteServer):
    """The page of the run in ``folder``, which ``train`` trains in this thread."""

    def train(self, loaded: LoadedRecipe, *, resume: bool) -> None:
        """Plan and train; the page says how it ended. Raises ``UserError``."""
        why, path = "it failed; see the terminal", self.log.folder.parent
        try:
            planned = plan(loaded.for_resume(path) if resume else loaded)
            refuse(planned.problems, "this recipe cannot run here")
            loaded = replace(loaded, recipe=planned.recipe, planned=planned.of_a_step)
            train(loaded, path, resume=resume)
            why = "training is done, or was stopped"
        finally:
            self.ended = why


@contextmanager
def served(folder: Path, port: int) -> Generator[Voting]:
    """The page of the run in ``folder``, served by a thread inside the block. Raises ``UserError``."""
    with Voting(folder, port) as server, server.in_thread():
        yield server
