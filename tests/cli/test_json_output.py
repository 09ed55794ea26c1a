"""``--json``: one document on stdout, whatever else prints there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.commands.arguments import json_alone, plain
from mmrl.core.secrets import remember
from mmrl.planner.plan_json import as_json
from tests.support.cli import mmrl
from tests.support.planning import LEFT_OUT, planned, without_the_step
from tests.support.tiny_diffusion import two_blocks

REWARD = """
import os
import mmrl

print("loaded")

def score(samples, *, context):
    print("noise")
    os.write(1, b"noise of a library\\n")
    return {"score": [float("nan") if s.prompt.id == "b.png" else 0.25 for s in samples], "part": [2] * len(samples)}
"""


def strictly(text: str) -> Any:
    """JSON as the standard has it: without NaN."""

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


def test_numbers_that_json_lacks_are_null_and_secrets_are_masked() -> None:
    remember({"api_key": "hush-hush-123"})
    given = {"a": float("nan"), "b": [float("inf"), 1, True, None, 0.5], "c": {"said": "with hush-hush-123"}}
    assert plain(given) == {"a": None, "b": [None, 1, True, None, 0.5], "c": {"said": "with <secret>"}}


def test_stdout_has_the_document_alone_and_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with json_alone() as write:
        print("notice")
        subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
        write({"x": 1})
    print("after")
    out, err = capfd.readouterr()
    assert out == '{\n  "x": 1\n}\nafter\n'
    assert "notice" in err
    assert "of a child" in err


def test_after_an_error_stdout_is_empty_and_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    def breaks() -> None:
        with json_alone() as write:
            write({"x": 1})
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        breaks()
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_score(tmp_path: Path) -> None:
    """In a process of its own, where descriptor 1 is really stdout."""
    (tmp_path / "mine.py").write_text(REWARD)
    for name in "abc":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "d.png").write_text("no picture")
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli", "score", "mine.py", "--images", ".", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = strictly(done.stdout)
    assert done.returncode == 1
    assert (found["scored"], found["mean"], found["skipped"], found["failed"]) == (2, 0.25, ["d.png"], ["b.png"])
    assert [(row["file"], row["score"]) for row in found["rows"]] == [
        ("a.png", 0.25),
        ("b.png", None),
        ("c.png", 0.25),
        ("d.png", None),
    ]
    assert found["rows"][0]["parts"] == {"part": 2.0}
    assert found["seconds_per_picture"] > 0
    assert "noise of a library" in done.stderr


def test_plan_as_data_has_what_the_tables_have() -> None:
    less = ["device=cpu", "train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=4"]
    made = planned("shapes-lora", f"model.path={two_blocks()}", *less, "sampling.steps=3", "sampling.window=null")
    found = strictly(json.dumps(plain(as_json(made))))
    assert (found["possible"], found["problems"]) == (True, [])
    assert found["step"]["samples"] == 8
    assert made.peak is not None
    assert found["peak"]["bytes"] == made.peak.total == sum(found["peak"]["parts"].values())
    assert {phase["name"] for phase in found["phases"]} == {"encode", "sample", "decode", "train", "optimizer"}
    assert found["algorithm"]["type"] == "flow_grpo"
    assert found["placement"]["devices"] == [{"device": "0", "generate": "sample", "train": "train"}]
    low, high = found["seconds"]["step_interval"]
    assert low < found["seconds"]["step"] < high


def test_a_plan_with_a_problem_is_a_document_with_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    with without_the_step():
        assert mmrl("plan", "shapes-lora", "--json") == 1
    found = strictly(capfd.readouterr().out)
    assert found["possible"] is False
    assert found["problems"] == [LEFT_OUT]
    assert found["peak"] is None
    assert mmrl("plan", "shapes-lora", "optim.lrr=1", "--json") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "optim.lrr" in err
