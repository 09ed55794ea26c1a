"""A run that an older mmrl began goes on: keys that it did not know have their defaults, and are named."""

import json

import pytest

from mmrl.app.resume import same_run
from mmrl.config.loader import load_recipe
from mmrl.config.shipped_paths import moved
from mmrl.core.errors import UserError
from mmrl.logging.rundir import RunDir

NEW = ("overlong", "guidance", "last_level")
"""Keys that an older version did not have; of ``data`` and of ``algorithm``."""
WORDS = ["algorithm.last_level=true"]
"""The recipe sets the key; here it has its default."""


@pytest.fixture
def older(tmp_path):
    """The directory of a run of shapes-nft, without the new keys."""
    resolved = load_recipe(["shapes-nft"], WORDS).resolved()
    for section in ("data", "algorithm"):
        resolved[section] = {key: value for key, value in resolved[section].items() if key not in NEW}
    with RunDir.create(tmp_path / "run") as directory:
        directory.resolved.write_text(json.dumps(resolved))
        yield directory


def test_keys_it_did_not_know_have_their_defaults_and_are_named(older, capsys):
    loaded = load_recipe(["shapes-nft"], WORDS)
    same_run(older, loaded)
    assert capsys.readouterr().err.startswith("the run is older than these settings and continues with algorithm.")


def test_where_a_new_key_has_another_value_it_says_how_the_run_began(older):
    with pytest.raises(UserError, match=r"last_level differ from .*; it started with algorithm\.last_level="):
        same_run(older, load_recipe(["shapes-nft"]))


@pytest.mark.parametrize("change", ["data.overlong=cut", "algorithm.guidance=2.5", "optim.lr=1"])
def test_another_value_is_another_recipe(older, change):
    with pytest.raises(UserError, match=rf"--resume: .*{change.split('=')[0]}.* differ"):
        same_run(older, load_recipe(["shapes-nft"], [*WORDS, change]))


def test_how_long_a_reward_may_take_may_change(older):
    same_run(older, load_recipe(["shapes-nft"], [*WORDS, "rewards=[{name: shapes, timeout: 5, retries: 2}]"]))
    with pytest.raises(UserError, match="--resume: rewards differ"):  # what an option means is the reward's own affair
        same_run(older, load_recipe(["shapes-nft"], [*WORDS, "rewards=[{name: shapes, options: {timeout: 5}}]"]))
    with pytest.raises(UserError, match="--resume: rewards differ"):
        same_run(older, load_recipe(["shapes-nft"], [*WORDS, "rewards=[{name: shapes, timeout: 5, weight: 2}]"]))


def test_a_run_of_a_shipped_model_goes_on_with_another_installation(older):
    loaded = load_recipe(["shapes-nft"], WORDS)
    stored, resolved = json.loads(older.resolved.read_text()), loaded.recipe.model.path
    before = resolved[resolved.rindex("/pipelines/") :]
    stored["model"]["path"] = f"/home/them/mmrl{before}"
    older.resolved.write_text(json.dumps(stored))
    same_run(older, loaded)
    assert moved(stored)["model"]["path"] == moved(stored, missing_only=True)["model"]["path"] == resolved

    stored["model"]["path"] = f"/home/them/mmrl{before}-of-mine"  # nothing that is shipped
    older.resolved.write_text(json.dumps(stored))
    assert moved(stored) == stored
    with pytest.raises(UserError, match=r"--resume: .*model\.path.* differ"):
        same_run(older, loaded)


def test_a_path_that_still_exists_stays_where_it_is_asked_to(tmp_path):
    model = tmp_path / "pipelines" / "diffusion" / "models" / "shapes-sd3"
    model.mkdir(parents=True)
    settings = {"rewards": [{"options": {"model": {"path": str(model)}}}]}
    assert moved(settings, missing_only=True) == settings
    assert moved(settings) != settings
