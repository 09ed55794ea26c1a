"""Folders of stored models and records from strangers: each is read as its schema says, or refused with a message."""

import hashlib
import json
import random
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from mmrl.rewards.learned.distilled import folder as distilled
from mmrl.rewards.learned.distilled.students import Shape, Students
from mmrl.rewards.learned.knowledge import folder as knowledge
from mmrl.rewards.learned.knowledge.graph import of_rows
from mmrl.rewards.learned.labels import folder as labels
from mmrl.studies.knowledge.towns import towns
from mmrl.studies.knowledge.training import Settings, train
from mmrl.studies.knowledge.training import write as write_knowledge
from mmrl.studies.soup.record import Soup, read_soup
from mmrl.studies.sweep.searching import Result, Sweep, read_sweep
from tests.support import hostile


def _distilled(path):
    shape = Shape(width=8, token_width=4, layers=1, heads=2, buckets=16, words=4, side=8)
    lines = dict.fromkeys(distilled.STUDENTS, (1.0, 0.0))
    record = distilled.Record(shape, "image", (1, 1), lines, "dual", {"name": "judge", "options": {}}, {"auc": 0.7})
    distilled.write(path, record, Students(shape))


def _knowledge(path):
    graph, settings = of_rows(towns(people=10)), Settings(kind="transe", size=4, steps=1, batch=8, negatives=2)
    write_knowledge(path, train(graph, settings), settings, graph)


def _labels(path):
    tensors = {
        "centre": torch.zeros(4),
        "mean": torch.zeros(4),
        "axes": torch.eye(4)[:, :2].contiguous(),
        "head": torch.zeros(3),
    }
    save_file(tensors, path / labels.WEIGHTS)
    said = {
        "format": labels.FORMAT,
        "by": "supervised head",
        "encoders": {"kind": "image", "samples": "pixels", "prompts": "", "model": None},
        "widths": [4],
        "shape": {"features": 2, "hidden": 4, "heads": 2, "layers": 1, "dropout": 0.1},
        "settings": {"neighbours": 3},
        "models": 1,
        "calibration": [1.0, 0.0],
        "weights": hashlib.sha256((path / labels.WEIGHTS).read_bytes()).hexdigest(),
        "figures": {"auc": 0.6},
    }
    (path / labels.NAME).write_text(json.dumps(said))


def _soup(path):
    Soup(path, ("a", "b"), (1.0, 2.0), 0.7, ("shapes-lora",), ("train.steps=2",), (1,), ((0.6, 1.5),)).write()


def _sweep(path):
    Sweep(
        path, ("shapes-lora",), (), (("optim.lr=1",), ("optim.lr=2",)), 2, (0,), {(1, 1, 0): Result(0.5, 1.0, "")}
    ).write()


KINDS = {
    "distilled": (_distilled, distilled.NAME, lambda path: distilled.load_students(path)),
    "knowledge": (_knowledge, knowledge.NAME, lambda path: knowledge.read(path)),
    "labels": (_labels, labels.NAME, lambda path: labels.load_known(path)),
    "soup": (_soup, "soup.json", lambda path: (read_soup(path).matrix, read_soup(path).command)),
    "sweep": (
        _sweep,
        "sweep.json",
        lambda path: (read_sweep(path).asks(), read_sweep(path).rows(), read_sweep(path).train(1)),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind, (write, _, read) in KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        write(made[kind])
        read(made[kind])
    return made


@pytest.mark.sweep("hostile folders of stored models, soups and sweeps")
def test_no_folder_is_a_traceback(folders, tmp_path, sweep):
    for seed in range(sweep.size(100, 1500)):
        rng, kind = random.Random(seed), list(KINDS)[seed % len(KINDS)]
        _, name, read = KINDS[kind]
        path = tmp_path / "it"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folders[kind], path)
        weights, how = path / "model.safetensors", "value"
        if weights.exists() and rng.random() < 0.35:
            how = "header"
            hostile.spoil_tensors(rng, weights)
            said = json.loads((path / name).read_text())
            if "weights" in said:
                said["weights"] = hashlib.sha256(weights.read_bytes()).hexdigest()
                (path / name).write_text(json.dumps(said))
        elif rng.random() < 0.7:
            said = hostile.changed_value(rng, json.loads((path / name).read_text()))
            (path / name).write_bytes(hostile.dumped(said).encode("utf-8", "replace"))
        else:
            how = rng.choice(hostile.WHOLE)
            hostile.spoil(rng, path / rng.choice([name, *([weights.name] if weights.exists() else [])]), how)
        wrong = hostile.attempt(partial(read, path), seconds=20)
        sweep.check(not wrong, f"seed {seed}: {kind} ({how}): {wrong}")
    sweep.done()
