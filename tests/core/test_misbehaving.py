"""Every recipe that runs on a CPU, two steps of it, with a reward that changes all it can reach, one that dies, and a
judge that babbles. CI runs a recipe of each kind; ``pytest -m long tests/core/test_misbehaving.py`` the others.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml

from mmrl import cli
from tests.support import judging
from tests.support.reward_views import VANDAL
from tests.support.tiny_diffusion import SHAPES, two_blocks

ROOT = Path(__file__).resolve().parents[2]
IN_CI = {"shapes-lora", "sums", "scenes-judge"}
"""A picture, a text and a vision-language recipe."""
FOLDERS = {"diffusion": 'READS = ("image", "tensor")', "llm": 'READS = ("text",)', "vlm": 'READS = ("text",)'}
DIES = """
import mmrl

@mmrl.reward(inputs=INPUTS, differentiable=GRADIENT)
def score(samples, *, context):
    raise RuntimeError("the reward is \\x1b[31mdead")
"""
BABBLE = "The quick brown fox. As a language model I cannot say. {{ }} <verdict> maybe 7, or 8? ```json {"


def recipes(*but):
    """The names of all recipes that run on a CPU; those that CI leaves out are marked."""
    for path in sorted(ROOT.glob("pipelines/*/recipes/*.yaml")):
        recipe = yaml.safe_load(path.read_text())
        if str(recipe.get("device")).startswith("cuda") or path.stem in but:
            continue
        marks = [pytest.mark.slow] if path.stem in IN_CI else [pytest.mark.slow, pytest.mark.long]
        yield pytest.param(path, id=path.stem, marks=marks)


class Small:
    """A recipe of ours at a small size, two steps, with its rewards where it has them."""

    def __init__(self, path, tools, monkeypatch):
        if path.parents[1].name == "vlm":
            pytest.importorskip("torchvision")
            pytest.importorskip("decord" if path.stem == "clips" else "torchvision")
        if path.stem == "words-ocr":
            pytest.importorskip("rapidocr")
        self.path, self.kind, self.monkeypatch = path, path.parents[1].name, monkeypatch
        recipe = yaml.safe_load(path.read_text())
        self.algorithm, self.trains = recipe["algorithm"]["type"], "rewards" in recipe
        self.on_failure = "fail" if self.algorithm == "draft" else "drop"  # whose gradient is taken already
        self.key = "rewards" if self.trains else "eval.rewards"
        self.rewards = recipe["rewards"] if self.trains else recipe["eval"].get("rewards", [])
        self.reads = 'READS = ("video", "tensor")' if path.stem.startswith("moving") else FOLDERS[self.kind]
        ((_, words),) = list(tools[0].variants("x", recipe, str))
        self.words = [word for word in words if not word.startswith(("train.steps", "eval.every", "rewards["))]
        self.words += ["train.steps=2", "eval.every=2", "threads=1", "eval.grid=2"]
        if Path(str(recipe["model"]["path"])).name == SHAPES.name:
            self.words.append(f"model.path={two_blocks()}")

    def given(self, rewards, *words):
        return [*self.words, f"{self.key}={json.dumps(rewards)}", *words]

    def train(self, out, *words):
        """The exit code of ``mmrl train``."""
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["mmrl", "train", str(self.path), *words, "--out", str(out)])
            try:
                cli.main()
            except SystemExit as ended:
                return ended.code or 0
        return 0


@pytest.fixture
def small(request, tools, monkeypatch):
    return Small(request.param, tools, monkeypatch)


of_all = pytest.mark.parametrize("small", [*recipes("sums-reward")], indirect=True)  # which has no reward


@of_all
def test_a_reward_that_changes_everything_changes_no_number(small, tools, tmp_path):
    (tmp_path / "vandal.py").write_text(VANDAL.replace('READS = ("image", "video", "tensor", "text")', small.reads))
    names = ["with_a_graph"] if small.algorithm == "draft" else ["per_sample", "per_group"]
    ruins = [{"name": f"{tmp_path}/vandal.py:{name}", "weight": 0} for name in names]
    found = []
    for n, rewards in enumerate((small.rewards, [*ruins, *small.rewards])):
        (log := tmp_path / f"{n}.txt").touch()
        out = tmp_path / f"run{n}"
        found.append(tools[2].run(str(small.path), small.given(rewards), ROOT, out, log))
        assert "error" not in found[-1], log.read_text()
    alone, beside = found
    assert beside["tensors"] == alone["tensors"]
    for section in ("metrics", "heldout"):
        measured = tools[1].MEASURED["metrics"]
        expected = {k: v for k, v in alone[section].items() if not any(Path(k).match(m) for m in measured)}
        assert len(expected) > 4
        assert {k: beside[section].get(k) for k in expected} == expected
        assert (section == "metrics" and not small.trains) or any(names[0] in key for key in beside[section])


@of_all
def test_a_reward_that_dies_never_looks_like_training(small, tmp_path, capfd):
    reads = small.reads.removeprefix("READS = ")
    gradient = str(small.algorithm == "draft")
    (tmp_path / "dies.py").write_text(DIES.replace("INPUTS", reads).replace("GRADIENT", gradient))
    words = small.given([{"name": f"{tmp_path}/dies.py", "on_failure": small.on_failure}], "scoring.patience=0")
    stopped_untrained(small, tmp_path / "run", words, "the reward is dead", capfd)


@of_all
def test_a_judge_that_babbles_never_looks_like_training(small, tmp_path, capfd):
    def babble(handler, body):
        if body is None:  # which models it has
            return False
        said = {"choices": [{"message": {"content": BABBLE}, "finish_reason": "stop"}]}
        handler.say(200, json.dumps(said))
        return True

    with judging.Served(before=babble) as server:
        options = {"model": {"url": server.url, "name": "tiny"}, "answer": {"type": "number", "min": 0, "max": 10}}
        options["rubric"] = "Is this right?" + (" {{ response }}" if small.kind != "diffusion" else " {{ image }}")
        judge = {"name": "judge", "options": options | {"cache": False}}
        if "video" in small.reads:
            judge = {"name": "frames", "options": judge | {"count": 2}}
        judge["on_failure"] = small.on_failure
        why = "follows the reward's gradient" if small.algorithm == "draft" else "the judge"
        stopped_untrained(small, tmp_path / "run", small.given([judge], "scoring.patience=0"), why, capfd)


def stopped_untrained(small, out, words, why, capfd):
    """Where rewards train, the run stops before its first step, with 3 where samples were left out. Where they only
    measure, it trains, and says what failed."""
    code = small.train(out, *words)
    said = capfd.readouterr().err
    assert why in said
    assert "\x1b[31m" not in said
    assert " nan " not in said
    assert "done:" not in said or not small.trains
    metrics = out / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []  # none where it was refused in the plan
    if not small.trains:
        assert (code, len(rows)) == (0, 2)
        return
    assert (code, rows) == (3 if small.on_failure == "drop" else 2, [])
    assert code == 2 or "step 1 was not trained" in said
    assert not [*(out / "checkpoints").glob("step_*")]
