"""A folder of a stored reward holds data: no key of its recipe runs code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.rewards.encoders.described import described, opened, stored
from mmrl.rewards.learned.distilled.encoders import Backbone
from tests.support.sweeps import Sweep

EVIL = 'from pathlib import Path\nPath(__file__).with_suffix(".ran").touch()\n\n\ndef build(*given, **options): ...\n'
KEYS: tuple[tuple[str | int, ...], ...] = (
    ("pipeline",),
    ("algorithm", "type"),
    ("data", "name"),
    ("data", "sampler"),
    ("data", "sampler", "name"),
    ("data", "mixture", 0, "name"),
    ("rewards", 0, "name"),
    ("eval", "rewards", 0, "name"),
    ("rollout", "engine"),
    ("architecture",),
    ("model", "path"),
    ("placement", "policy"),
)
"""Keys of a recipe whose value may be code."""


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a stored recipe."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from _paths(inner, (*path, n))
    yield path


def _put(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``; what is missing on the way is made."""
    if not path:
        return new
    first, *rest = path
    if isinstance(first, int):
        found = list(value) if isinstance(value, list) else []
        found += [{}] * (first + 1 - len(found))
        found[first] = _put(found[first], tuple(rest), new)
        return found
    found = dict(value) if isinstance(value, dict) else {}
    return {**found, first: _put(found.get(first), tuple(rest), new)}


@pytest.fixture(scope="module")
def models() -> list[dict[str, Any]]:
    """Stored recipes of a model that draws and of one that writes."""
    found = []
    for name in ("shapes-lora", "sums"):
        loaded = load_recipe([name], [])
        found.append(json.loads(json.dumps(described(loaded.recipe))))
    return found


def test_what_mmrl_stores_is_read_again(models: list[dict[str, Any]]) -> None:
    assert [stored(model).makes for model in models] == ["image", "text"]


@pytest.mark.sweep("keys of a stored recipe that could name code")
def test_no_key_of_a_stored_recipe_runs_a_file(models: list[dict[str, Any]], tmp_path: Path, sweep: Sweep) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(EVIL)
    for model in models:
        places = dict.fromkeys((*KEYS, *(path for path in _paths(model) if path)))
        for path in places:
            if path[-1] == "system":  # text that is no name
                continue
            for name in (str(evil), f"{evil}:build", "python:build"):
                given = _put(model, path, name)
                try:
                    opened(given, "reads", "mmrl distill")
                    refused = False
                except UserError as error:
                    refused = "a stored model names parts of mmrl only" in str(error)
                sweep.check(refused and not evil.with_suffix(".ran").exists(), (path, name))
    sweep.done()


def test_a_distilled_folder_whose_recipe_names_a_file_is_refused_before_it_is_imported(
    models: list[dict[str, Any]], tmp_path: Path
) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(EVIL)
    for key in ("pipeline", "algorithm"):
        model = {**models[1], key: f"{evil}:build" if key == "pipeline" else {"type": f"{evil}:build"}}
        with pytest.raises(UserError, match="names parts of mmrl only"):
            Backbone({"makes": "text", "lr": 1.0, "sha256": "0", "model": model})
        assert not evil.with_suffix(".ran").exists()


def test_a_recipe_of_own_files_is_stored_without_what_the_model_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def prompts(split):\n    return []\n\n\ndef score(context):\n    return []\n")
    changes = [f"data.name={tmp_path}/mine.py:prompts", f'rewards=[{{name: "{tmp_path}/mine.py:score"}}]']
    for name in ("shapes-lora", "sums"):
        loaded = load_recipe([name], changes)
        assert "mine.py" not in json.dumps(described(loaded.recipe))
