"""``mmrl plan`` refuses what training refuses before it loads anything: constructors of rewards, and this machine."""

import inspect
import math
import random
import socket
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.drop_ins import entries
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import CheckedError, Context, Failed, before_loading, only_checks
from mmrl.data.loading import load_prompts
from mmrl.planner.judge_work import sample_like
from mmrl.planner.plan import plan
from mmrl.planner.prompt_check import unscored
from mmrl.rewards.loading import build, find, refused
from tests.support.planning import planned_in_short

SHOWN = "rewards=[{{name: {name}, options: {options}}}]"
ASKS = "rubric: 'Is {{ response }} good?'"
WRONG = {
    "http to another machine": ("judge", f"{{model: {{url: 'http://10.0.0.8:8000/v1', name: x}}, {ASKS}}}", "insecure"),
    "no address": ("judge", f"{{model: {{url: '10.0.0.8', name: x}}, {ASKS}}}", "is no address"),
    "a token in clear": (
        "judge",
        f"{{model: {{url: 'https://h/v1', name: x, token: abc}}, {ASKS}}}",
        "environment variable",
    ),
    "a token that is not set": (
        "judge",
        f"{{model: {{url: 'https://h/v1', name: x, token: $NOT_SET_HERE}}, {ASKS}}}",
        "export it first",
    ),
    "an answer of no type": ("judge", f"{{model: m, {ASKS}, answer: {{type: stars}}}}", "stars"),
    "votes that are equal": (
        "judge",
        f"{{model: m, {ASKS}, votes: 3, answer: {{type: number, min: 0, max: 1}}}}",
        "at temperature 0",
    ),
    "no cache folder": ("judge", f"{{model: m, {ASKS}, cache: no/such/folder}}", "is no folder"),
    "an address of a served reward": ("http", "{url: 'ftp://x', inputs: [text]}", "is no address"),
    "a deadline": ("answer:math", "{deadline: 0}", "options.deadline is 0"),
    "a tolerance": ("answer:number", "{tolerance: 2}", "options.tolerance is 2"),
    "a cosine": ("relevance", "{enough: 7}", "options.enough is 7"),
    "a batch of nothing": ("reward_model", "{path: m, batch_size: 0}", "options.batch_size is 0"),
    "no folder of knowledge": ("knowledge", "{path: no/such, pattern: '(?P<head>a)(?P<tail>b)'}", "no/such"),
}
"""Options that a reward's constructor refuses: a name, the options, and what the message says."""


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_what_a_constructor_refuses_is_refused_in_plan(case):
    name, options, said = WRONG[case]
    made = planned_in_short("sums", SHOWN.format(name=name, options=options))
    assert any(said in problem for problem in made.problems), made.problems


def test_no_constructor_loads_or_connects_in_plan(monkeypatch):
    """Every shipped class that declares ``checks`` ends at its mark, or does neither."""

    def connect(*_):
        raise AssertionError("plan connects")

    monkeypatch.setattr(socket.socket, "connect", connect)
    classes = {entry.name for entry in entries("rewards") if inspect.isclass(find(entry.name).target)}
    assert {name for name in classes if not find(name).declaration.checks} == set()
    given = {
        "judge": {"model": {"url": "http://localhost:1/v1", "name": "x"}, "rubric": "{{ response }}"},
        "http": {"url": "http://localhost:1"},
        "frames": {"name": "clip"},
    }
    needs_a_folder = {"distilled", "knowledge", "labels", "likeness", "aesthetic"}
    for name in sorted(name for name in classes if name.partition(":")[0] not in needs_a_folder):
        found = find(name)
        wants = [p for p in inspect.signature(found.target).parameters.values() if p.default is p.empty]
        options = given.get(name.partition(":")[0], {p.name: "no/such/model" for p in wants})
        assert [said for said in refused(found, options) if "is not set up on this machine" not in said] == [], name


def test_a_reward_of_ones_own_is_run_up_to_its_mark(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import mmrl\n"
        "@mmrl.reward(inputs=('text',), checks=True)\n"
        "class Mine:\n"
        "    def __init__(self, least: int = 0):\n"
        "        if least < 0:\n"
        "            raise mmrl.UserError('options.least is below 0')\n"
        "        mmrl.before_loading()\n"
        "        raise RuntimeError('it loads')\n"
        "    def score(self, samples, *, context):\n"
        "        return [0.0 for _ in samples]\n"
    )
    mine = find(f"{tmp_path}/mine.py:Mine")
    assert refused(mine, {"least": -1}) == ["options.least is below 0"]
    assert refused(mine, {}) == []
    with pytest.raises(UserError, match="it loads"):
        build(mine, {})


def test_outside_of_a_plan_the_mark_does_nothing():
    assert before_loading() is None
    with only_checks(), pytest.raises(CheckedError):
        before_loading()
    assert mmrl.before_loading() is None


ONE_FRAME = ["sampling.frames=1"]
SMALL = ["sampling.height=16", "sampling.width=16"]
NEEDS = {
    "pixels": ("shapes-lora", SMALL, "rewards[0]: shapes cannot score what this recipe makes", "at least 24 pixels"),
    "pixels at evaluations": (
        "shapes-lora",
        [*SMALL, "rewards=[{name: jpeg:incompressibility}]", "eval.rewards=[{name: shapes}]"],
        "eval.rewards[0]",
    ),
    "frames": ("moving-shapes", ONE_FRAME, "a clip of two frames or more", "more sampling.frames"),
    "frames of a function of parts": ("moving-shapes", [*ONE_FRAME, SHOWN.format(name="vbench:flicker", options="{}")]),
    "a share": ("shapes-lora", [SHOWN.format(name="shapes", options="{success_weight: 3}")], "must be in [0, 1]"),
    "three numbers": ("shapes-lora", [SHOWN.format(name="colour:share", options="{rgb: [1, 2]}")], "colour:share"),
    "tensors": ("shapes-lora", [SHOWN.format(name="colour:target", options="{rgb: [1, 2]}")], "colour:target"),
    "other prompts": ("sums", [SHOWN.format(name="constraints", options="{}")], "no constraint of a known kind"),
    "a share of text": ("sums", [SHOWN.format(name="constraints", options="{close_weight: -1}")], "close_weight is -1"),
}
"""What the functions that are rewards need of a recipe: its name, the changes, and what the refusal says."""


@pytest.mark.parametrize("case", NEEDS)
def test_what_a_function_cannot_score_is_refused_in_plan(case):
    name, changes, *words = NEEDS[case]
    made = planned_in_short(name, *changes)
    assert any(all(word in problem for word in words) for problem in made.problems), made.problems


def test_a_function_of_ones_own_is_asked_where_it_declares_it(tmp_path):
    for name, declared in (("asked", "checks=True, "), ("unasked", "")):
        (tmp_path / f"{name}.py").write_text(
            f"import mmrl\n@mmrl.reward({declared}inputs=('text',))\ndef score(samples, *, context, least=0):\n"
            "    if least < 0:\n        raise ValueError('least is below 0')\n    return [0.0 for _ in samples]\n"
        )

    def said(name, options):
        made = planned_in_short("sums", SHOWN.format(name=f"{tmp_path}/{name}.py:score", options=options))
        return [problem for problem in made.problems if "cannot score" in problem]

    assert "least is below 0" in said("asked", "{least: -1}")[0]
    assert not said("asked", "{}")
    assert not said("unasked", "{least: -1}")
    assert not planned_in_short(
        "sums", f"rewards=[{{name: '{tmp_path}/asked.py:score', options: {{least: -1}}, on_failure: drop}}]"
    ).problems[1:]  # LEFT_OUT


@pytest.mark.sweep("sizes of pictures, clips and texts that the plan accepts, scored")
def test_what_the_plan_accepts_is_scored(sweep):
    """Noise of every size, by every function that declares ``checks``."""
    draw, functions = random.Random(0), [find(entry.name) for entry in entries("rewards")]
    functions = [one for one in functions if not inspect.isclass(one.target) and one.declaration.checks]
    options = {"colour:share": "{rgb: [9, 99, 200]}", "colour:target": "{rgb: [9, 99, 200]}"}
    kinds = {"image": "shapes-lora", "tensor": "shapes-lora", "video": "moving-shapes", "text": "smollm2-instructions"}
    prompts = {name: load_prompts(load_recipe([name]).recipe, "train")[:9] for name in set(kinds.values())}
    accepted = 0
    for n in range(sweep.size(80, 2000)):
        one = functions[n % len(functions)]
        name = kinds[one.declaration.inputs[0]]
        words = [f"sampling.{side}={8 * draw.randint(1, 9)}" for side in ("height", "width")]
        words += [f"sampling.frames={1 + 4 * draw.randint(0, 2)}"] if name == "moving-shapes" else []
        words = words if name != kinds["text"] else [f"sampling.max_new_tokens={draw.randint(1, 99)}"]
        recipe = load_recipe(
            [name], [*words, "eval.rewards=[]", SHOWN.format(name=one.name, options=options.get(one.name, "{}"))]
        ).recipe
        shown = draw.choice(prompts[name])
        if list(unscored(recipe, [shown], [shown])):
            sweep.check(name != kinds["text"], f"{one.name} {words}: refused")
            continue
        accepted += 1
        sweep.check(scores(one, recipe, noise(sample_like(recipe, shown), draw)), f"{one.name} {words}")
    sweep.done()
    assert accepted > sweep.tried // 2


def noise(sample, draw):
    """The sample with noise in place of what is empty."""

    def picture():
        return Image.frombytes("RGB", sample.image.size, draw.randbytes(3 * sample.image.width * sample.image.height))

    if sample.image is None:
        return replace(
            sample, text=" ".join(draw.choices(["a", "soap", "Is", "it", "3", ".", "{"], k=draw.randint(0, 40)))
        )
    tensor = torch.rand(sample.tensor.shape, generator=torch.Generator().manual_seed(draw.randrange(999)))
    video = None if sample.video is None else tuple(picture() for _ in sample.video)
    return replace(sample, image=picture(), tensor=tensor, video=video)


def scores(found, recipe, sample):
    returned = found.target([sample], context=Context(), **recipe.rewards[0].options)
    value = (returned["score"] if isinstance(returned, Mapping) else returned)[0]
    return not isinstance(value, Failed) and math.isfinite(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("features.folder=no/such/folder", "is no folder here"),
        ("rollout={engine: sglang, options: {url: 'http://10.0.0.8:30000'}}", "must be https"),
        ("rollout={engine: sglang, options: {url: 'http://['}}", "is no address"),
        ("rollout={engine: sglang}", "SGLang is not installed"),
        ("log=[trackio]", "not installed"),
    ],
)
def test_what_this_machine_lacks_is_refused(change, said, monkeypatch):
    monkeypatch.setattr("mmrl.logging.trackers._installed", lambda name: False)
    assert any(said in problem for problem in planned_in_short("sums", change).problems)


def test_a_plan_for_another_machine_does_not_ask_this_one():
    from mmrl.planner.gpus import gpu_of

    loaded = load_recipe(["sums"], ["rollout={engine: sglang}"])
    assert not [problem for problem in plan(loaded, gpu=gpu_of("h100-80g")).problems if "installed" in problem]
