"""The sums data set: its arithmetic, its splits, and the truth about the steps of a response."""

from __future__ import annotations

import json
import random
import re
import string
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.rubric import split_steps
from tools.make_models import sums

data = mmrl.load("datasets", "sums")
EXAMPLE = Prompt("x", "Compute 47+86-25+9", {"answer": "117", "steps": ["47+86=133", "133-25=108", "108+9=117"]})


@pytest.mark.parametrize("operations", [1, 2, 3, 5])
def test_answers_and_steps_are_true(operations):
    """Python's own arithmetic is the reference."""
    for prompt in data.prompts("all", count=300, operations=operations):
        expression = prompt.text.removeprefix("Compute ")
        assert re.fullmatch(r"\d+([-+]\d+)+", expression)
        assert prompt.meta["answer"] == str(eval(expression))
        assert len(prompt.meta["steps"]) == operations
        value = re.match(r"\d+", expression)[0]  # type: ignore[index]
        for step in prompt.meta["steps"]:
            left, result = step.split("=")
            assert eval(left) == int(result)
            assert re.match(r"\d+", left)[0] == value  # type: ignore[index]
            assert int(result) >= 0
            value = result


def test_splits_share_no_chain_and_are_as_large_as_asked():
    train, held_out = data.prompts("train", count=4000), data.prompts("heldout", count=2000)
    texts = {p.text for p in train}, {p.text for p in held_out}
    assert [len(t) for t in texts] == [4000, 2000]
    assert not texts[0] & texts[1]
    assert len({p.id for p in [*train, *held_out]}) == 6000
    everything = data.prompts("all", count=2000)
    assert 0.17 < sum(data.is_held_out(p.text) for p in everything) / 2000 < 0.23


def test_more_chains_begin_with_the_same_ones():
    assert data.prompts("train", count=50) == data.prompts("train", count=200)[:50]
    assert data.prompts("train", count=50, seed=1) != data.prompts("train", count=50)


def test_the_same_chains_in_another_process():
    code = "import mmrl; print(''.join(p.text for p in mmrl.load('datasets', 'sums').prompts('heldout', count=200)))"
    env = {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}
    outputs = {subprocess.run([sys.executable, "-c", code], env=e, capture_output=True, text=True).stdout for e in env}
    assert outputs == {"".join(p.text for p in data.prompts("heldout", count=200)) + "\n"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"split": "test"}, "split"),
        ({"operations": 0}, "operations"),
        ({"count": 0}, "count"),
        ({"count": 10**7}, "count"),
    ],
)
def test_wrong_arguments_say_which(arguments, word):
    with pytest.raises(UserError, match=word):
        data.prompts(**arguments)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("47+86=133\n\n133-25=108\n\n108+9=117\n\nanswer: 117", []),
        ("47+86=123\n\n123-25=98\n\n98+9=107\n\nanswer: 107", [1]),  # what follows from a slip is right in itself
        ("47+86=123\n\n133-25=108\n\n108+9=117\n\nanswer: 117", [1, 2]),  # it does not go on from what is written
        ("47+86=133\n\n133-25=108\n\n108+9=118\n\nanswer: 117", [3, 4]),
        ("47+86=133\n\n133-26=107\n\n107+9=116\n\nanswer: 116", [2]),  # true, but not what was asked
        ("47+86=133\n\n133-25=108\n\nanswer: 108", [3]),  # an operation left out
        ("47+86=133\n\n133-25=108\n\nanswer: 117", []),  # the answer does it
        ("answer: 117", []),
        ("47+86-25=108\n\n108+9=117\n\nanswer: 117", []),  # two at once
        ("47+86-25+9=117\n\nanswer: 117", []),
        ("47+86-25+9=107\n\nanswer: 107", [1]),
        ("47+86-25+9+0=117\n\nanswer: 117", [1]),
        ("47+86=133\n\n133-25=108\n\n108+9=117\n\n117+0=117\n\nanswer: 117", [4]),  # one too many
        ("47+86=133\n\n133-25=108\n\n108+9=117", [3]),  # no answer
        ("answer: 118", [1]),
        ("47+86=133\n133-25=108\n\n108+9=117\n\nanswer: 117", [1, 2, 3]),
        ("47+86=133 133-25=108\n\n108+9=117\n\nanswer: 117", [1, 2, 3]),
        ("", [1]),
        ("\n\n\n\n", [1]),
        ("47+86=133\n \n\n133-25=108\n\n108+9=117\n\nanswer: 117\n\n", []),  # blank lines are not steps
        ("47+86=0133\n\n0133-25=108\n\n108+9=117\n\nanswer: 117", [1, 2, 3]),
    ],
)
def test_wrong_steps(text, wrong):
    assert data.wrong_steps(EXAMPLE, text) == wrong


def test_the_right_response_has_no_wrong_step_and_the_verifier_agrees():
    number = mmrl.load("rewards", "answer:number")(after="answer:")
    prompts = data.prompts("heldout", count=200)
    samples = [Sample(p, SampleId(0, i, 0, 0), text=data.response(p)) for i, p in enumerate(prompts)]
    assert number.score(samples, context=Context())["score"] == [1.0] * 200
    for sizes in (None, *SIZES):
        assert all(data.wrong_steps(p, data.response(p, sizes)) == [] for p in prompts)
    assert data.response(EXAMPLE, [1, 2]) == "47+86=133\n\n133-25+9=117\n\nanswer: 117"
    for sizes in ([1, 1], [4], [0, 3], [-1, 4]):
        with pytest.raises(ValueError, match="sizes"):
            data.response(EXAMPLE, sizes)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 199), st.integers(0, 10**6), st.sampled_from("0123456789+-=\n: answer"))
def test_a_response_without_wrong_steps_is_right(which, place, character):
    """One character put elsewhere: whatever the change, no wrong step means that the answer is the truth."""
    prompt = PROMPTS[which]
    text = data.response(prompt, SIZES[which % len(SIZES)])
    place %= len(text)
    changed = text[:place] + character + text[place + 1 :]
    wrong = data.wrong_steps(prompt, changed)
    assert wrong == sorted(set(wrong))
    assert (wrong == []) == ([s.text for s in split_steps(changed)] == text.split("\n\n"))


PROMPTS = data.prompts("train", count=200)
SIZES = ([1, 1, 1], [1, 2], [2, 1], [3])


@given(st.text("1=+ \n\t\r", max_size=12))
def test_steps_are_numbered_as_a_judge_of_steps_numbers_them(text):
    nothing = Prompt("x", "Compute 1", {})
    assert data.wrong_steps(nothing, text)[:-1] == list(range(1, max(len(split_steps(text)), 1)))


def test_random_text_is_judged_without_an_error():
    rng = random.Random(0)
    for prompt in PROMPTS:
        text = "".join(rng.choice("0123456789+-=\n\n\n: ansé") for _ in range(40))
        assert data.wrong_steps(prompt, text)


# --- the small models ---------------------------------------------------------------------------------------------

MODELS = Path(__file__).resolve().parents[2] / "pipelines" / "llm" / "models"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    made = sums.make_tokenizer([data.PREFIX, data.ANSWER, data.BREAK, "user", "assistant"])
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_tokenizer_loses_nothing_and_keeps_digits_apart(tokenizer):
    for text in (string.printable, "Compute 47+86\n\nanswer: 133", "héé 漢字 😀", "\r\n\t  x\n\n\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Compute 4786\n\nanswer: 133").input_ids)
    assert pieces == ["Compute", "Ġ", "4", "7", "8", "6", "ĊĊ", "answer", ":", "Ġ", "1", "3", "3"]


def test_an_example_learns_the_reply_and_its_end_alone(tokenizer):
    ids, given = sums.example(tokenizer, "Compute 1+2", "1+2=3")
    assert tokenizer.decode(ids[:given]) == "<|im_start|>user\nCompute 1+2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids[given:]) == "1+2=3<|im_end|>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Compute 1+2"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True) == tokenizer.decode(
        ids[:given]
    )


def test_pretraining_texts_are_right_and_of_every_cut(tokenizer):
    prompts = data.prompts("all", count=400)
    texts = [tokenizer.decode(ids[given:-1]) for ids, given in sums.solved(tokenizer, prompts, 0, ends=0.5)]
    assert all(data.wrong_steps(p, t) == [] for p, t in zip(prompts, texts, strict=True))
    cuts = Counter(tuple(step.count("+") + step.count("-") for step in t.split("\n\n")[:-1]) for t in texts)
    assert set(cuts) == {(1, 1, 1), (1, 2), (2, 1), (3,)}
    assert min(cuts.values()) > 60


def test_a_critique_numbers_the_steps_and_says_which_are_wrong():
    text, truth = sums.critique(EXAMPLE, "47+86=123\n\n123-25=98\n\n98+9=108\n\nanswer: 108")
    steps = "Step 1: 47+86=123\nStep 2: 123-25=98\nStep 3: 98+9=108\nStep 4: answer: 108"
    assert text == f"{EXAMPLE.text}\n\n{steps}\n\nWhich steps are wrong?"
    assert truth == '{"wrong": [1, 3]}'


def test_agreement_counts_responses_and_steps():
    text = sums.critique(EXAMPLE, data.response(EXAMPLE))[0]  # four steps
    truths = [(text, json.dumps({"wrong": w})) for w in ([], [1], [1, 2], [3])]
    written = ['{"wrong": []}', '{"wrong": [1, 2]}', "no idea", '{"wrong": [3]}']
    assert sums.agreement(truths, written) == {
        "responses": 4,
        "same": 0.5,
        "json": 0.75,
        "steps_alike": 13 / 16,
        "precision": 2 / 3,
        "recall": 0.5,
    }


def test_a_few_steps_of_training_learn(tokenizer):
    torch.manual_seed(0)
    model = sums.build(tokenizer)
    examples = sums.solved(tokenizer, data.prompts("all", count=100), 0)
    losses = []
    sums.fit(model, examples, 12, 5e-2, lambda **row: losses.append(row["loss"]), dict, every=3, batch=8)
    assert losses[-1] < losses[0] - 0.5


def shipped(name: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = MODELS / name
    assert sum(f.stat().st_size for f in folder.iterdir()) < 8e6
    assert [f.suffix for f in folder.iterdir() if f.stat().st_size > 1e5] == [".safetensors"]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder), log


def near(measured: float, logged: float, n: int) -> bool:
    """Within four standard deviations of a share measured on ``n``."""
    return abs(measured - logged) <= 4 * (logged * (1 - logged) / n) ** 0.5 + 1e-9


def test_the_shipped_solver_is_as_good_as_its_log_says():
    model, tokenizer, log = shipped("sums-qwen3")
    assert log[0]["command"].startswith("python -m mmrl.pipelines.llm.pretrain solver")
    torch.manual_seed(0)
    found = sums.accuracy(model, tokenizer, data.prompts("heldout", count=128))
    for name in ("greedy", "sampled", "one_a_step"):
        assert near(found[name], log[-1][name], 128), name
    longest = max(data.prompts("train", count=500), key=lambda p: len(data.response(p)))
    assert len(tokenizer(data.response(longest)).input_ids) + 1 <= 40  # the recipe's max_new_tokens


@pytest.mark.parametrize("n", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_the_shipped_critic_finds_wrong_steps_as_its_log_says(n):
    critic, tokenizer, log = shipped("sums-critic")
    assert log[0]["command"].startswith("python -m mmrl.pipelines.llm.pretrain critic")
    assert (MODELS / "sums-critic" / "rubric.txt").read_text() == sums.RUBRIC
    solver, _, _ = shipped("sums-qwen3")
    prompts = data.prompts("heldout", count=n, seed=1)
    torch.manual_seed(0)
    drawn = sums.replies(solver, tokenizer, [p.text for p in prompts], 1.0)
    truths = [sums.critique(p, d) for p, d in zip(prompts, drawn, strict=True)]
    found = sums.agreement(truths, sums.replies(critic, tokenizer, [text for text, _ in truths], 0.0, 16))
    assert near(found["same"], log[-1]["same"], n)
    assert found["json"] > 0.99
    assert found["steps_alike"] > 0.85
