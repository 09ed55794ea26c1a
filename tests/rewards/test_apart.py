"""A reward in a process of its own: the same scores, and what fails there fails here."""

import os
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image

from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet, check

CODE = """
import os, sys, time
import mmrl

def where(samples, *, context):
    print("a line on stdout")
    return {"score": [float(context.step)] * len(samples), "pid": [float(os.getpid())] * len(samples)}

async def later(samples, *, context, bonus=0.0):
    return [s.image.getpixel((0, 0))[0] / 255 + bonus for s in samples]

@mmrl.reward(inputs=("text",))
def words(samples, *, context):
    return [float(len(s.text.split())) if s.text != "none" else None for s in samples]

@mmrl.reward(inputs=("tensor",))
def first(samples, *, context):
    import torch
    return torch.stack([s.tensor[0, 0, 0] for s in samples])

def raises(samples, *, context):
    return [1 / (s.image.width - 8) for s in samples]

def ends(samples, *, context):
    os._exit(7)

class Built:
    def __init__(self, path):
        self.calls = 0
        if path == "wrong":
            raise ValueError("no such path")
    def score(self, samples, *, context):
        self.calls += 1
        return [float(self.calls)] * len(samples)

def hangs_once(samples, *, context, mark):
    if not os.path.exists(mark):
        open(mark, "w").write(str(os.getpid()))
        time.sleep(600)
    return [1.0] * len(samples)

@mmrl.reward(differentiable=True)
def slope(samples, *, context):
    return None

@mmrl.reward(device=True)
def model(samples, *, context):
    return None
"""
PICTURES = [
    Sample(Prompt("p", "red"), SampleId(0, 0, 0, n), image=Image.new("RGB", (8, 8), (n * 51, 0, 0))) for n in range(3)
]


@pytest.fixture
def made(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    opened = []

    def make(name, **settings):
        given = Reward(name=f"{tmp_path}/own.py:{name}", process=True, **settings)
        opened.append(RewardSet([given], folder=tmp_path))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def answers(rewards, samples=PICTURES, step=3):
    (caller,) = rewards._here.values()
    return caller.one(samples, Context(step=step, label="own"))


@pytest.mark.slow
def test_it_is_computed_elsewhere_and_keeps_its_process(made, capfd):
    rewards = made("where")
    first, second = answers(rewards), answers(rewards, step=4)
    assert first.total == [3.0] * 3
    assert second.total == [4.0] * 3
    assert first.parts["pid"] == second.parts["pid"] != [float(os.getpid())] * 3
    assert "a line on stdout" not in capfd.readouterr().out
    built = made("Built", options={"path": "right"})
    assert [answers(built).total[0] for _ in range(2)] == [1.0, 2.0]


@pytest.mark.slow
def test_pictures_texts_options_and_samples_without_a_score_come_through(made):
    assert answers(made("later", options={"bonus": 1.0})).total == pytest.approx([1.0, 1.2, 1.4])
    texts = [replace(one, image=None, text=text) for one, text in zip(PICTURES, ["a b", "none", "c"], strict=True)]
    tensors = [replace(one, tensor=torch.full((3, 2, 2), n / 4)) for n, one in enumerate(PICTURES)]
    assert answers(made("first"), tensors).total == [0.0, 0.25, 0.5]
    answer = answers(made("words"), texts)
    assert (answer.total[0], answer.total[2]) == (2.0, 1.0)
    assert answer.reasons == [None, "returned None", None]


@pytest.mark.slow
def test_what_fails_there_is_told_here(made):
    assert "raised ZeroDivisionError" in (said := str(answers(made("raises")).error))
    assert "own.py:" in said
    ends = made("ends")
    for _ in range(2):  # it starts anew
        assert "ended with status 7" in str(answers(ends).error)
    assert "no such path" in str(answers(made("Built", options={"path": "wrong"})).error)


@pytest.mark.slow
def test_a_call_that_hangs_is_given_up_and_the_next_has_a_new_process(made, tmp_path):
    mark = tmp_path / "mark"
    rewards = made("hangs_once", options={"mark": str(mark)}, timeout=20.0)
    assert "20" in str(answers(rewards).error)
    first = int(mark.read_text())
    assert answers(rewards).total == [1.0] * 3
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{first}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{first}")


@pytest.mark.parametrize(
    ("name", "why"), [("slope", "a gradient, which does not leave"), ("model", "a model on the device")]
)
def test_what_cannot_leave_its_process_is_refused(tmp_path, name, why):
    (tmp_path / "own.py").write_text(CODE)
    with pytest.raises(UserError, match=f"process: .*{why}.* remove process"):
        check([Reward(name=f"{tmp_path}/own.py:{name}", process=True)])
