"""``profile: true``: two steps are traced, and nothing else is changed by it."""

import gzip
import json

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.logging.profile import Traces
from mmrl.runtime import start
from tests.support.recipes import metrics
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

SMALL = [
    "device=cpu",
    "train.prompts_per_step=1",
    "train.group_size=2",
    "train.micro_batch_size=2",
    "sampling.steps=2",
    "sampling.window=null",
    "eval.every=null",
    "rewards=[{name: 'jpeg:incompressibility'}]",
    "train.steps=4",
    "optim.schedule=constant",
]


def trained(out, *overrides, resume=False):
    loaded = load_recipe(["shapes-lora"], [*SMALL, f"model.path={two_blocks()}", *overrides])
    return start.train(loaded, out, resume=resume)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("profile") / "run", "profile=true")


@pytest.mark.slow
def test_the_second_and_third_step_are_traced_with_their_phases(traced):
    folder = traced / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000002.json.gz", "step_000003.json.gz"]
    for path in folder.iterdir():
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        names = {event["name"] for event in events if event.get("ph") == "X"}
        assert {"encode", "sample", "decode", "reward", "train"} <= names
        assert any("mm" in name for name in names), "operators"
        assert any("Backward" in name for name in names)


@pytest.mark.slow
def test_the_steps_are_what_they_are_without(traced, tmp_path):
    plain = trained(tmp_path / "plain")
    assert metrics(plain) == metrics(traced)
    assert not (plain / "profile").exists()


@pytest.mark.slow
def test_a_run_may_be_resumed_with_it(tmp_path, traced):
    trained(tmp_path / "run", "train.steps=1")
    out = trained(tmp_path / "run", "train.steps=3", "profile=true", resume=True)
    assert [path.name for path in (out / "profile").iterdir()] == ["step_000003.json.gz"]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file is in the way")
    traces = Traces(tmp_path)
    for n in range(1, 4):
        with traces.step(n):
            pass
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 2
    assert "training goes on" in said
