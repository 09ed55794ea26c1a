"""``mmrl check``: what mmrl ships keeps the contract of its kind, what is broken fails with what to change."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from mmrl.algorithms import grpo
from mmrl.app.conformance import algorithms, datasets, rewards
from mmrl.app.conformance.algorithms import Case
from mmrl.app.conformance.finding import kind_of
from mmrl.app.conformance.running import results
from mmrl.cli import app
from mmrl.config.algorithms import algorithm_names, find_algorithm
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import place_of, short_path

REWARDS = [
    ("colour:brightness", {}, None),
    ("colour:target", {"rgb": [10, 200, 30]}, None),
    ("jpeg:compressibility", {}, None),
    ("answer:number", {"after": "answer:"}, "sums"),
    ("motion", {}, "motions"),
]
DATASETS = ["shapes", "sums", "motions", "scenes"]


def outcomes(checks):
    return {result.name: (result.outcome, result.said) for result in results(checks, None)}


def failed(checks):
    return {name: said for name, (outcome, said) in outcomes(checks).items() if outcome != "ok"}


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_keeps_its_contract(name):
    assert not failed(algorithms.checks(algorithms.opened(name, {})))


@pytest.mark.parametrize(("name", "options", "data"), REWARDS)
def test_rewards_keep_their_contract(name, options, data):
    assert not failed(rewards.checks(rewards.opened(name, options, data)))


def test_a_reward_that_reads_the_record_is_sent_to_a_data_set_that_has_it(tmp_path):
    (tmp_path / "right.py").write_text(
        "import mmrl\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(len(s.prompt.meta['steps']) * (s.prompt.meta['answer'] in s.text)) for s in samples]\n"
        "def theirs(completions, steps, **kwargs):\n    return [float(len(one)) for one in steps]\n"
    )
    for function, why in (("score", "KeyError: 'steps'"), ("theirs", "has no 'steps' (it has answer)")):
        name = f"{tmp_path}/right.py:{function}"
        said = failed(rewards.checks(rewards.opened(name, {})))["every sample gets a score"]
        assert why in said
        assert "name a data set that has it with --data" in said
        assert not failed(rewards.checks(rewards.opened(name, {}, "sums")))


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_keep_their_contract(name):
    assert not failed(datasets.checks(datasets.opened(name, {})))


class Detached(grpo.GRPO):
    def loss(self, new, old, total):
        return super().loss({**new, "log_probs": new["log_probs"].detach() + 0 * new["log_probs"]}, old, total)


class Half(grpo.GRPO):
    def loss(self, new, old, total):
        return super().loss({**new, "log_probs": (new["log_probs"] + new["log_probs"].data) / 2}, old, total)


class Upside(grpo.GRPO):
    def surrogate(self, log_probs, log_ratio, advantages, mask):
        return super().surrogate(log_probs, log_ratio, -advantages, mask)


class OwnSize(grpo.GRPO):
    def loss(self, new, old, total):
        return super().loss(new, old, float(old["weights"].sum()))


class Writes(grpo.GRPO):
    def loss(self, new, old, total):
        old["log_probs"].sub_(0.1)
        return super().loss(new, old, total)


class Unmasked(grpo.GRPO):
    def loss(self, new, old, total):
        made = super().loss(new, old, total)
        return type(made)(made.value + new["log_probs"].mean(), made.sums, made.maxima)


@pytest.mark.parametrize(
    ("broken", "check", "said"),
    [
        (Detached, "ratio 1 on fresh samples", "its sign is wrong somewhere"),
        (Half, "its gradient is the slope", "something detaches what should have a graph"),
        (Upside, "ratio 1 on fresh samples", "a better sample must become likelier"),
        (OwnSize, "slices add up", "divide by the given total"),
        (Writes, "the loss is a function", "loss"),
        (Unmasked, "dropped rows are left out", "multiply its loss by weights"),
    ],
)
def test_a_broken_algorithm_fails_where_it_is_broken(broken, check, said):
    found = find_algorithm("grpo")
    case = Case(type(found)("broken", broken, found.settings, found.module), found.settings(type="grpo"))
    assert said in failed(algorithms.checks(case))[check]


def test_an_error_inside_a_library_names_the_line_of_the_users_file(tmp_path, monkeypatch):
    """A relative path too, and through another file of the user's."""
    (tmp_path / "helper.py").write_text("import numpy\ndef stacked(rows):\n    return numpy.stack(rows)\n")
    (tmp_path / "stacks.py").write_text("from helper import stacked\n\nstacked([[1.0], [1.0, 2.0]])\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for file in ("stacks.py", tmp_path / "stacks.py"):
        with pytest.raises(UserError, match=r"raised ValueError: .* at stacks\.py:3; mend that line"):
            kind_of(f"{file}:score")


@pytest.mark.parametrize("call", [lambda: numpy.stack([numpy.ones(1), numpy.ones(2)]), lambda: json.loads("{")])
def test_of_a_function_of_python_the_line_is_the_users_too(call):
    with pytest.raises(ValueError) as failure:  # noqa: PT011
        call()
    place, line = place_of(failure.value, None), call.__code__.co_firstlineno
    assert place == f"{short_path(__file__)}:{line}"


BROKEN = """
def of_one(image):
    return 1.0
import random
import mmrl
from mmrl.core.trajectory import Prompt

@mmrl.reward(inputs=("text",))
def drawn(samples, *, context, **options):
    return [random.random() for _ in samples]

@mmrl.reward(inputs=("text",))
def ranked(samples, *, context):
    return [float(i) for i, _ in enumerate(samples)]

@mmrl.reward(inputs=("text",))
def short(samples, *, context):
    return [1.0]

@mmrl.reward(inputs=("text",))
def picky(samples, *, context):
    return [None for _ in samples]

def prompts(split, **options):
    return [Prompt("same", f"prompt {n}", {"place": (n, 1)}) for n in range(3)]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = tmp_path_factory.mktemp("check") / "broken.py"
    made.write_text(BROKEN)
    return made


def run(capsys, *arguments):
    code = app(["check", *map(str, arguments)], standalone_mode=False)
    return code, capsys.readouterr().out


def test_broken_rewards_and_data_sets_say_what_to_change(file, capsys):
    code, said = run(capsys, f"{file}:drawn")
    assert code == 1
    assert "FAILED  the same samples, the same scores" in said
    assert "FAILED  an unknown option is refused" in said
    assert all(len(line) <= 80 for line in said.splitlines()[1:])
    assert "FAILED  a sample's neighbours do not matter" in run(capsys, f"{file}:ranked")[1]
    assert "FAILED  every sample gets a score" in run(capsys, f"{file}:short")[1]
    code, said = run(capsys, f"{file}:picky")
    assert "not run every sample gets a score: it scored none of the made-up samples" in said
    code, said = run(capsys, f"{file}:prompts")
    assert code == 1
    refused = "unknown options and splits are refused"
    for broken in ("ids are unique", "held-out prompts do not train", "meta is JSON", refused):
        assert f"FAILED  {broken}" in said


def test_the_kind_is_found_from_what_it_is(file):
    examples = Path(__file__).resolve().parents[2] / "examples"
    assert kind_of("grpo") == "algorithm"
    assert kind_of("judge") == "judge"
    assert kind_of("jpeg:compressibility") == "reward"
    assert kind_of("diffusion/sd3") == kind_of("shapes-lora") == "pipeline"
    assert kind_of(f"{file}:drawn") == "reward"
    assert kind_of(str(file)) == kind_of(f"{file}:prompts") == "dataset"
    assert kind_of(f"{examples / 'engine.py'}:OwnCopy") == "engine"
    for name, said in [
        ("shapes", "the name of a reward and of a data set; say which with --kind"),
        ("nothing", "no telling what nothing is"),
        ("no.py:Mine", "there is no file no.py"),
        (f"{file}:of_one", r"of_one takes \(image\); a reward takes \(samples, \*, context\), a data set \(split\)"),
        (f"{file}:none", "has no 'none'"),
    ]:
        with pytest.raises(UserError, match=said):
            kind_of(name)


def test_the_command_passes_options_and_refuses_those_of_other_kinds(capsys):
    code, said = run(capsys, "grpo", "--options", "clip_low=0.1")
    assert code == 0
    assert said.splitlines()[-1] == "9 passed"
    with pytest.raises(UserError, match="clip_lo"):
        run(capsys, "grpo", "--options", "clip_lo=0.1")
    with pytest.raises(UserError, match="--data: grpo is of kind algorithm"):
        run(capsys, "grpo", "--data", "sums")
    with pytest.raises(UserError, match=r"llm/chat is a text .* write mmrl check FILE\.py:CLASS for a rollout"):
        run(capsys, "llm/chat")
    with pytest.raises(UserError, match="takes a small checkpoint of its family; give its folder with --model"):
        run(capsys, "diffusion/flux")
    assert torch.get_default_dtype() == torch.float32
