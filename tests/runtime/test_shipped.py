"""What controllers on other hosts get of the recipe: its files and its environment variables."""

import shutil

import pytest

from mmrl.config.loader import find_recipe, load_recipe
from mmrl.core.errors import UserError
from mmrl.runtime import shipped

REWARD = (
    "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n    return [0.0] * len(samples)\n"
)


@pytest.fixture
def mine(tmp_path):
    folder = tmp_path / "mine"
    (folder / "code").mkdir(parents=True)
    shutil.copy(find_recipe("sums"), folder / "mine.yaml")
    (folder / "code" / "own.py").write_text(REWARD)
    (tmp_path / "other.py").write_text(REWARD)
    return folder


def load(mine, *overrides):
    return load_recipe([mine / "mine.yaml"], list(overrides))


def test_the_users_files_are_found_and_moved(mine, tmp_path):
    loaded = load(mine, f"rewards=[{{name: code/own.py:score}}, {{name: {mine}/code/own.py:score, label: b}}]")
    named = shipped.named_files(loaded)
    assert set(named.values()) == {mine / "code" / "own.py"}  # what mmrl ships lies on every node
    given = shipped.bundle(loaded, named, "n2")
    moved = shipped.moved(loaded, given)
    shutil.rmtree(mine)
    for reward in moved.recipe.rewards:
        assert reward.name == f"{moved.root}/code/own.py:score"
    assert (moved.root / "code" / "own.py").read_text() == REWARD
    assert moved.recipe.model_copy(update={"rewards": []}) == loaded.recipe.model_copy(update={"rewards": []})
    shipped.removed(moved)
    assert not moved.root.exists()


def test_a_file_that_cannot_be_shipped_is_refused_with_the_edit(mine, tmp_path, monkeypatch):
    loaded = load(mine, f"rewards=[{{name: {tmp_path}/other.py:score}}]")
    named = shipped.named_files(loaded)
    with pytest.raises(UserError, match=r"rewards\[0\].name: node 'n2' does not see .*outside of .*; move it there"):
        shipped.bundle(loaded, named, "n2")
    loaded = load(mine, "rewards=[{name: code/own.py:score}]")
    monkeypatch.setattr(shipped, "MOST", 10)
    with pytest.raises(UserError, match="at most 10 B are shipped; put it where all nodes see it"):
        shipped.bundle(loaded, shipped.named_files(loaded), "n2")


def test_variables_are_named_and_secrets_are_told_apart(mine, monkeypatch):
    recipe = load(mine, "env=[HF_TOKEN, MY_SETTING]").recipe
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("MY_SETTING", "as it is")
    with pytest.raises(UserError, match=r"env: HF_TOKEN is not set here.*export HF_TOKEN=.*or remove the name"):
        shipped.variables(recipe)
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    given = shipped.variables(recipe)
    assert shipped.settings_and_secrets(given) == ({"MY_SETTING": "as it is"}, {"HF_TOKEN": "hf_0123456789abcdef"})


def test_a_name_that_is_none_is_refused(mine):
    with pytest.raises(UserError, match="env"):
        load(mine, "env=[HF-TOKEN=x]")
