"""Verdicts outlive the process that asked: after kill -9, and for other controllers; damaged ones are asked again."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core import lines
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.asking import Outcome
from mmrl.rewards.judging.store import CACHE, Cache
from mmrl.runtime.start import train
from tests.support import judging

ROOT = Path(__file__).resolve().parents[2]
ANSWER = {"type": "number", "min": 0, "max": 10}
SCRIPT = """
import asyncio, sys
from pathlib import Path
import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId

url, folder = sys.argv[1:]
model = {"url": url, "name": "tiny"}
judge = mmrl.load("rewards", "judge:score")(
    model=model, rubric="{{ response }}", answer={"type": "number", "min": 0, "max": 10}, concurrency=1
)
group = [Sample(Prompt("p", "what"), SampleId(0, 0, 0, k), text=f"case {k}") for k in range(6)]
print(asyncio.run(judge.score(group, context=Context(0, "cpu", Path(folder), "judge")))["score"])
"""


class Counting(judging.Served):
    """An endpoint that answers with the last digit it reads, and counts what it was asked; from the question number
    ``hangs`` on it says nothing."""

    def __init__(self, hangs=None):
        self.asked, self.hangs, self.hung = Counter(), hangs, threading.Event()
        super().__init__(before=self.answer)

    def answer(self, handler, body):
        if body is None:
            return False
        text = body["messages"][-1]["content"]
        with self.lock:
            self.asked[text] += 1
            hangs = self.hangs is not None and self.asked.total() > self.hangs
        if hangs:
            self.hung.set()
            return True
        said = (re.findall(r"\d", text) or ["5"])[-1]
        handler.say(200, json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}))
        return True


def judge(url, **options):
    model = {"url": url, "name": "tiny"}
    return mmrl.load("rewards", "judge:score")(model=model, rubric="{{ response }}", answer=ANSWER, **options)


def score(one, folder, *texts):
    group = [Sample(Prompt("p", "what"), SampleId(0, 0, 0, k), text=t) for k, t in enumerate(texts)]
    return asyncio.run(one.score(group, context=Context(0, "cpu", folder, "judge")))["score"]


@pytest.mark.slow
def test_after_kill_9_in_the_middle_of_a_batch_nothing_answered_is_asked_again(tmp_path):
    with Counting(hangs=3) as server:
        command = [sys.executable, "-c", SCRIPT, server.url, str(tmp_path)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert server.hung.wait(60)
        process.kill()
        process.communicate()
        assert server.asked == {f"case {k}": 1 for k in range(4)}
        server.hangs = None
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == pytest.approx([k / 10 for k in range(6)])
        assert server.asked == {f"case {k}": 1 + (k == 3) for k in range(6)}  # of the fourth no answer came
        assert done.stderr == ""


def test_a_changed_verdict_is_named_and_asked_again(tmp_path, capsys):
    texts = [f"case {k}" for k in range(4)]
    with Counting() as server:
        before = score(judge(server.url), tmp_path, *texts)
        rows = (tmp_path / CACHE).read_bytes().splitlines(keepends=True)
        rows.sort(key=lambda line: json.loads(line)["verdict"])  # they are kept in the order of the answers
        assert json.loads(rows[1])["verdict"] == 0.1
        rows[1] = rows[1].replace(b'"verdict": 0.1', b'"verdict": 0.9')  # still JSON, still a verdict
        rows[2] = b"\x00" * len(rows[2].rstrip()) + b"\n"
        (tmp_path / CACHE).write_bytes(b"".join(rows))
        lines._OPEN.clear()  # as in another process
        assert score(judge(server.url), tmp_path, *texts) == before
        assert server.asked == {"case 0": 1, "case 1": 2, "case 2": 2, "case 3": 1}
    said = capsys.readouterr().err
    assert f"{tmp_path / CACHE}: 2 verdicts of 4 cannot be trusted and will be asked again (lines 2, 3)" in said


def test_another_judge_is_asked_itself(tmp_path):
    with Counting() as server, Counting() as other:
        score(judge(server.url), tmp_path, "case 1")
        score(judge(server.url, system="Be strict."), tmp_path, "case 1")
        score(judge(other.url), tmp_path, "case 1")
        score(judge(server.url), tmp_path, "case 1")
        assert (server.asked.total(), other.asked.total()) == (2, 1)


def test_a_verdict_that_was_read_by_other_rules_is_asked_for_again(tmp_path, monkeypatch):
    with Counting() as server:
        rules = type(judge(server.url)).__init__.__globals__
        for reading in (rules["READING"] - 1, rules["READING"]):
            monkeypatch.setitem(rules, "READING", reading)
            for _ in range(2):
                score(judge(server.url), tmp_path, "case 1")
        assert server.asked.total() == 2


def test_verdicts_of_other_controllers_are_known_and_rows_without_a_checksum_too(tmp_path):
    (tmp_path / "controllers" / "1").mkdir(parents=True)
    Cache(tmp_path / "controllers" / "1").put({"a": Outcome(0.25, ["\ud800 half"]), "c": Outcome([1, 2])})
    with (tmp_path / CACHE).open("w") as file:
        file.write('{"key": "b", "verdict": 0.5, "raw": []}\n{"key": "d", "verdict": 7, "raw": []}\n')
    for folder in (tmp_path, tmp_path / "controllers" / "1", tmp_path / "controllers" / "2"):
        found = Cache(folder)
        assert [found.get(key) and found.get(key).verdict for key in "abcd"] == [0.25, 0.5, [1, 2], None]


def test_runs_can_share_a_store(tmp_path):
    (tmp_path / "verdicts").mkdir()
    with Counting() as server:
        for run in ("one", "two"):
            (tmp_path / run).mkdir()
            score(judge(server.url, cache=str(tmp_path / "verdicts")), tmp_path / run, "case 1")
            assert not (tmp_path / run / CACHE).exists()
        assert server.asked.total() == 1
        with pytest.raises(UserError, match=r"options\.cache: .*gone is no folder; make it"):
            judge(server.url, cache=str(tmp_path / "gone"))


def test_a_cache_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / CACHE).mkdir()
    with pytest.raises(UserError, match=r"judge-cache\.jsonl"):
        Cache(tmp_path)


RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: policy}
data: {name: jsonl, train: {path: data.jsonl, heldout: 4}, heldout: {path: data.jsonl, heldout: 4}}
sampling: {max_new_tokens: 8}
rewards: [{name: judge, options: {rubric: "{{ prompt }} {{ response }}", answer: {type: number, min: 0, max: 10}}}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
eval: {every: null}
checkpoint: {every: 1}
"""


def test_a_resumed_run_asks_only_what_it_has_not_asked(tmp_path):
    """Its checkpoint of the second step is gone, as after kill -9 in that step: the step is repeated."""
    judging.text_model(tmp_path / "policy")
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(10)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with Counting() as server:
        model = f"rewards[0].options.model={{url: '{server.url}', name: tiny}}"
        out = train(load_recipe([tmp_path / "recipe.yaml"], [model]), tmp_path / "run")
        asked = Counter(server.asked)
        assert len(asked) > 8
        shutil.rmtree(out / "checkpoints" / "step_000002")
        lines._OPEN.clear()
        train(load_recipe([tmp_path / "recipe.yaml"], [model, "train.steps=3"]), out, resume=True)
        repeated = [text for text, n in server.asked.items() if n > asked[text] > 0]
        assert not repeated
        assert server.asked.total() > asked.total()  # the third step was asked
