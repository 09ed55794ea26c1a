"""Tasks of verifiers that one answer solves: their prompts, their rewards, and what is refused of them."""

import asyncio
import json

import pytest

import mmrl
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Sample, SampleId, Turn
from mmrl.rewards.scoring import RewardSet
from tests.support.episodes import SMALL

vf = pytest.importorskip("verifiers.v1")

TASKS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, task, trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no luck")
        return 1.0 / (1 + len(trace.last_reply))

    @vf.metric
    async def asked(self, trace) -> float:
        return float(len(trace.messages))
#EXTRA

class Config(vf.TasksetConfig):
    count: int = 5

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(self.config.count):
            yield Sum(Data(prompt=#PROMPT, answer=2 * n), self.config.task)
"""
CONVERSATION = """[
    vf.SystemMessage(content="Be short."), vf.UserMessage(content="1+1"), vf.AssistantMessage(content="2"),
    vf.UserMessage(content=f"{n}+{n}")]"""


@pytest.fixture
def taskset(tmp_path):
    def write(extra="", prompt='f"{n}+{n}"'):
        path = tmp_path / "sums.py"
        path.write_text(TASKS.replace("#EXTRA", extra).replace("#PROMPT", prompt))
        mmrl.load("datasets", "verifiers")._tasks.cache_clear()
        return str(path)

    return write


def prompts(*arguments, **options):
    return mmrl.load("datasets", "verifiers").prompts(*arguments, **options)


def scored(prompt, answer):
    return asyncio.run(mmrl.load("datasets", "verifiers").score(prompt, answer))


def test_tasks_are_prompts_and_their_rewards_are_weighed(taskset):
    made = prompts(taskset=taskset(), size=3, skip=2)
    assert [prompt.text for prompt in made] == ["2+2", "3+3", "4+4"]
    assert scored(made[0], "4") == (2 * 1 + 0.5 / 2, {"right": 1.0, "short": 0.5, "asked": 2.0})
    assert scored(made[0], " 40 ") == (0.5 / 3, {"right": 0.0, "short": 1 / 3, "asked": 2.0})


def test_a_conversation_keeps_its_messages(taskset):
    made = prompts(taskset=taskset(prompt=CONVERSATION), size=2)
    assert (made[1].system, made[1].turns, made[1].text) == (
        "Be short.",
        (Turn("user", "1+1"), Turn("assistant", "2")),
        "1+1",
    )
    assert scored(made[1], "2")[1]["asked"] == 5


def test_the_reward_shows_its_parts_and_what_raises_fails_alone(taskset):
    made = prompts(taskset=taskset(), size=2)
    samples = [
        Sample(prompt, SampleId(0, n, 0, 0), text=text)
        for n, (prompt, text) in enumerate(zip(made, ("0", "raise"), strict=True))
    ]
    rewards = RewardSet([Reward(name="verifiers", on_failure="drop")])
    scores = rewards.score(samples, [[0], [1]], step=0)
    rewards.close()
    assert scores.parts["verifiers"].tolist()[0] == 2.25
    assert {name: of.tolist()[0] for name, of in scores.parts.items() if "/" in name} == {
        "verifiers/right": 1.0,
        "verifiers/short": 0.5,
        "verifiers/asked": 2.0,
    }
    (failure,) = scores.failures
    assert "no luck" in str(failure)


@pytest.mark.slow
def test_a_run_trains_on_tasks(taskset, tmp_path):
    parts = {"train": {"size": 4}, "heldout": {"skip": 4, "size": 1}}
    data = [f"data.{split}={json.dumps({'taskset': taskset(), **of})}" for split, of in parts.items()]
    kept = [change for change in SMALL if not change.startswith("data.")]
    changes = [*kept, "data.name=verifiers", *data, "eval.samples=1"]
    mmrl.train("sums", changes=changes, rewards=["verifiers"], out=tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < row["reward/verifiers/short"] <= 1


@pytest.mark.parametrize(
    ("extra", "prompt", "why"),
    [
        ("    NEEDS_CONTAINER = True", '"x"', "needs a container, and one answer of text is to solve its tasks"),
        ("    async def setup(self, trace, runtime):\n        pass", '"x"', "prepares a runtime"),
        (
            "    @vf.reward\n    async def ran(self, runtime) -> float:\n        return 1.0",
            '"x"',
            "has ran, which needs",
        ),
        ("", "None", "has no prompt, so its user speaks first"),
        ("", '[vf.AssistantMessage(content="x")]', "do not end with one of the user"),
    ],
)
def test_what_one_answer_does_not_solve_is_refused(taskset, extra, prompt, why):
    with pytest.raises(UserError, match=why):
        prompts(taskset=taskset(extra, prompt), size=2)[0]


def test_what_is_not_there_is_named(taskset, tmp_path):
    for options, why in (
        ({"taskset": taskset(), "size": 9}, "has 5 tasks behind the first 0, not 9; lower size or skip"),
        ({"taskset": str(tmp_path / "no.py")}, "there is no taskset .*no.py; correct the path"),
        ({"taskset": "no-such-tasks"}, "no-such-tasks of verifiers cannot be made.*not found"),
        ({"taskset": taskset(), "config": {"counts": 3}}, r"cannot be made[\s\S]*counts"),
        ({"taskset": taskset(), "size": 0}, "size is 0"),
    ):
        with pytest.raises(UserError, match=why):
            prompts(**options)
    with pytest.raises(UserError, match=r"take it as data\.name"):
        scored(Prompt("p", "p"), "x")
