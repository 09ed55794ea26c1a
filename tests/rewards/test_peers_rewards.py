"""Rewards of TRL's and verl's are called as they are, and give what these libraries make of them."""

import asyncio
import inspect
import json
from importlib.util import find_spec

import pytest

from mmrl.app.conformance.finding import kind_of
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId, Turn
from mmrl.data.loading import load_prompts
from mmrl.planner.plan import plan
from mmrl.rewards.loading import build
from mmrl.rewards.peers import adapted
from mmrl.rewards.scoring import check
from tests.support.planning import without_the_step

CASES = {
    "TRL's, texts": (
        """
def right(completions, solution, **kwargs):
    return [float(s in c) for c, s in zip(completions, solution)]
""",
        [1.0, 0.0],
    ),
    "TRL's, messages": (
        """
def right(prompts, completions, ground_truth, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    assert all([m["role"] for m in p] == ["system", "user", "assistant", "user"] for p in prompts)
    assert all(prompt[-1]['content'] == "Say 4" for prompt in prompts)
    return [float(truth in text) for text, truth in zip(texts, ground_truth)]
""",
        [1.0, 0.0],
    ),
    "TRL's, called score, a column": (
        """
def score(completions, level, **kwargs):
    return [float(level[0] == 3 and "4" in c) for c in completions]
""",
        [1.0, 0.0],
    ),
    "TRL's, every column": (
        """
def right(completions, **kwargs):
    return [float(a in c) * n for c, a, n in zip(completions, kwargs["answer"], kwargs["level"])]
""",
        [3.0, 0.0],
    ),
    "TRL's, one with a default": (
        """
def right(completions, answer, scale=1.0, **kwargs):
    return [scale * (a in c) for c, a in zip(completions, answer)]
""",
        [1.0, 0.0],
    ),
    "TRL's, where it does not apply": (
        """
def right(completions, **kwargs):
    return [1.0 if "4" in c else None for c in completions]
""",
        [1.0, 0.0],
    ),
    "TRL's, state and logs": (
        """
def right(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("seen", [c[:2] for c in completions])
    log_metric("long", 0.5)
    return [float(trainer_state.global_step)] * len(completions)
""",
        {"score": [7.0, 7.0], "long": [0.5, 0.5]},
    ),
    "TRL's, async": (
        """
async def right(completions, answer, **kwargs):
    return [float(a in c) for c, a in zip(completions, answer)]
""",
        [1.0, 0.0],
    ),
    "verl's": (
        """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["level"] == 3
    return float(ground_truth in solution_str)
""",
        [1.0, 0.0],
    ),
    "verl's, a dict": (
        """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(ground_truth in solution_str), "acc": True, "pred": solution_str}
""",
        {"score": [1.0, 0.0], "acc": [True, True]},
    ),
    "verl's, async": (
        """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
""",
        [1.0, 0.0],
    ),
    "verl's, by name alone": (
        """
def mine(solution_str, ground_truth):
    return len(solution_str) if ground_truth in solution_str else 0
""",
        [7, 0],
    ),
}
PROMPT = Prompt(
    "p",
    "Say 4",
    {"answer": "4", "level": 3, "data_source": "gsm8k"},
    system="Be short.",
    turns=(Turn("user", "Hello"), Turn("assistant", "Hello.")),
)
SAMPLES = [Sample(PROMPT, SampleId(0, 0, 0, n), text=text) for n, text in enumerate(["It is 4", "5"])]


def called(file, name, options=None, samples=SAMPLES):
    (found,) = check([Reward(name=f"{file}:{name}", options=options or {})])
    given = build(found, options or {}).call(samples, context=Context(step=7))
    return asyncio.run(given) if inspect.iscoroutine(given) else given


@pytest.mark.parametrize("kind", sorted(CASES))
def test_it_is_called_as_it_is(tmp_path, kind):
    file, (text, wanted) = tmp_path / "theirs.py", CASES[kind]
    file.write_text(text)
    name = text.split("def ")[1].split("(")[0]
    assert kind_of(f"{file}:{name}") == "reward", "mmrl check says the same as mmrl plan"
    assert called(file, name) == wanted


def test_options_are_the_arguments_that_the_library_does_not_give(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(CASES["TRL's, one with a default"][0])
    assert called(file, "right", {"scale": 2.0}) == [2.0, 0.0]
    with pytest.raises(UserError, match=r"options.scal: .* did you mean 'scale'"):
        check([Reward(name=f"{file}:right", options={"scal": 2.0})])
    file = tmp_path / "verls.py"
    file.write_text("def compute_score(solution_str, ground_truth, least):\n    return len(solution_str) > least\n")
    assert called(file, "compute_score", {"least": 3}) == [1.0, 0.0]
    with pytest.raises(UserError, match=r"options.least: .* needs it"):
        check([Reward(name=f"{file}:compute_score")])


def test_messages_are_given_where_the_option_says_so(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("def f(completions, **kwargs):\n    return [float(isinstance(c, list)) for c in completions]\n")
    assert called(file, "f") == [0.0, 0.0]
    assert called(file, "f", {"conversational": True}) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "def f(completions, level, **kwargs):\n    return [0.0]\n",
            r"no 'level' \(it has answer\); set meta: \[level\]",
        ),
        ("def f(completions, completion_ids):\n    return [0.0]\n", "no 'completion_ids'"),
    ],
)
def test_a_column_that_the_data_have_not_is_named(tmp_path, text, why):
    (tmp_path / "theirs.py").write_text(text)
    sample = Sample(Prompt("p", "Say 4", {"answer": "4"}), SampleId(0, 0, 0, 0), text="4")
    with pytest.raises(UserError, match=why):
        called(tmp_path / "theirs.py", "f", samples=[sample])


def test_the_answer_goes_by_each_name_unless_the_data_have_that_column(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "def f(completions, solution, ground_truth, answer, **kwargs):\n"
        "    return [float([solution[0], ground_truth[0], answer[0]] == ['<4>', '4', '4'])]\n"
    )
    sample = Sample(Prompt("p", "Say 4", {"answer": "4", "solution": "<4>"}), SampleId(0, 0, 0, 0), text="4")
    assert called(tmp_path / "theirs.py", "f", samples=[sample]) == [1.0]


def test_a_reward_of_ours_with_any_names_stays_one(tmp_path):
    (tmp_path / "ours.py").write_text("def score(completions, *, context):\n    return [0.0 for _ in completions]\n")
    assert len(check([Reward(name=f"{tmp_path}/ours.py")])) == 1


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_rewards_that_trl_ships_run():
    from trl.rewards import think_format_reward

    texts = ["<think>\nTwo and two.\n</think>\n4", "4"]
    samples = [Sample(PROMPT, SampleId(0, 0, 0, n), text=text) for n, text in enumerate(texts)]
    assert adapted(think_format_reward)(samples, context=Context()) == [1.0, 0.0]


def test_verls_records_and_its_reward_run_unchanged(tmp_path):
    (tmp_path / "theirs.py").write_text(CASES["verl's"][0])
    record = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2 ="}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "level": 3},
    }
    for name in ("train", "heldout"):
        rows = [record | {"prompt": [{"role": "user", "content": f"{n} + 2 = ({name})"}]} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data={{name: jsonl, train: {{path: {tmp_path}/train.jsonl}}, heldout: {{path: {tmp_path}/heldout.jsonl}}}}"
    loaded = load_recipe(
        ["sums"], [data, f"rewards=[{{name: '{tmp_path}/theirs.py:compute_score'}}]", "eval.rewards=[]"]
    )
    with without_the_step():
        made = plan(loaded)
    assert [*made.problems] == ["the step is left out"]
    sample = Sample(load_prompts(loaded.recipe, "train")[0], SampleId(0, 0, 0, 0), text="4")
    assert called(tmp_path / "theirs.py", "compute_score", samples=[sample]) == [1.0]
