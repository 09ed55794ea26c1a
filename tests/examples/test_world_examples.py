"""The example recipes of worlds: their files are found from anywhere, and they train where their packages are."""

import importlib.util
import json
import os
import socket
import subprocess
import time

import pytest

from mmrl.cli import app
from mmrl.config.loader import load_recipe
from tests.support.example_recipes import RECIPES
from tests.support.openenv_world import PYTHON

WORLDS = RECIPES.parent / "worlds"
SMALL = ["train.steps=2", "train.prompts_per_step=4", "train.group_size=8", "eval.samples=32", "eval.every=2"]


def trained(name, folder, *changes):
    app(["train", str(WORLDS / name), *SMALL, *changes, "--out", str(folder)], standalone_mode=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(row["optim/grad_norm"] > 0 for row in rows)
    return rows


def test_the_files_beside_a_recipe_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe([WORLDS / "verifiers.yaml"]).recipe
    assert {data["taskset"] for data in (recipe.data.train, recipe.data.heldout)} == {str(WORLDS / "sum_tasks.py")}
    (tmp_path / "my-tasks").mkdir()
    packaged = load_recipe([WORLDS / "verifiers.yaml"], ["data.train.taskset=my-tasks"]).recipe
    assert packaged.data.train["taskset"] == "my-tasks"  # a package, whatever lies here


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs verifiers")
def test_tasks_of_verifiers_train(tmp_path):
    assert all("reward/verifiers/right" in row for row in trained("verifiers.yaml", tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(PYTHON not in os.environ, reason=f"{PYTHON} names no Python with openenv")
def test_a_world_of_an_openenv_server_trains(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([os.environ[PYTHON], str(WORLDS / "sum_server.py"), "--port", str(port)])
    try:
        while not answers(port):
            assert server.poll() is None
            time.sleep(0.2)
        rows = trained("openenv.yaml", tmp_path, f"environment.name=openenv:http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()
    assert all(1 <= row["episode/turns"] <= 2 for row in rows)


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
