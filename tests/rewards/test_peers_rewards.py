"""Rewards in the form of TRL's and verl's are recognised, and the line that a message gives makes them run."""

import asyncio
import inspect

import pytest

from mmrl.app.conformance.finding import kind_of
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.loading import build
from mmrl.rewards.scoring import check

FUNCTIONS = {
    "TRL's, texts": """
def right(completions, solution, **kwargs):
    return [float(s in c) for c, s in zip(completions, solution)]
""",
    "TRL's, messages": """
def right(prompts, completions, ground_truth, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    assert all(prompt[-1]['content'] == "Say 4" for prompt in prompts)
    return [float(truth in text) for text, truth in zip(texts, ground_truth)]
""",
    "TRL's, called score": """
def score(completions, level, **kwargs):
    return [float(level[0] == 3 and "4" in c) for c in completions]
""",
    "TRL's, one with a default": """
def right(completions, answer, scale=1.0, **kwargs):
    return [scale * (a in c) for c, a in zip(completions, answer)]
""",
    "TRL's, async": """
async def right(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]
""",
    "verl's, async": """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
""",
    "verl's": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
""",
}


@pytest.mark.parametrize("kind", sorted(FUNCTIONS))
def test_the_line_of_the_message_makes_it_a_reward(tmp_path, kind):
    file, text = tmp_path / "theirs.py", FUNCTIONS[kind]
    file.write_text(text)
    name = text.split("def ")[1].split("(")[0]
    assert kind_of(f"{file}:{name}") == "reward", "mmrl check says the same as mmrl plan"
    with pytest.raises(UserError, match=r"is a reward in (TRL|verl)'s form") as caught:
        check([Reward(name=f"{file}:{name}")])
    line = str(caught.value).split(" | ")[1]
    own = line.split("def ")[1].split("(")[0]
    assert f"and name {own} in its place" in str(caught.value)
    assert ("meta: [level]" in str(caught.value)) == ("level" in text)
    (tmp_path / "mended.py").write_text(f"{text}\n\n{line}\n")
    (found,) = check([Reward(name=f"{tmp_path}/mended.py:{own}")])
    prompt = Prompt("p", "Say 4", {"answer": "4", "level": 3})
    samples = [Sample(prompt, SampleId(0, 0, 0, n), text=text) for n, text in enumerate(["It is 4", "5"])]
    given = build(found, {}).call(samples, context=Context())
    assert (asyncio.run(given) if inspect.iscoroutine(given) else given) == [1.0, 0.0]


def test_a_reward_of_ours_with_any_names_stays_one(tmp_path):
    (tmp_path / "ours.py").write_text("def score(completions, *, context):\n    return [0.0 for _ in completions]\n")
    assert len(check([Reward(name=f"{tmp_path}/ours.py")])) == 1
