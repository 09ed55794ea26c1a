"""``mmrl plan`` refuses what training refuses before it loads anything: constructors of rewards, and this machine."""

import inspect
import socket

import pytest

import mmrl
from mmrl.config.drop_ins import entries
from mmrl.config.loader import load_recipe
from mmrl.errors import UserError
from mmrl.planner.plan import plan
from mmrl.rewards.contract import CheckedError, before_loading, only_checks
from mmrl.rewards.loading import build, find, refused

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


@pytest.mark.parametrize("case", WRONG)
def test_what_a_constructor_refuses_is_refused_in_plan(case):
    name, options, said = WRONG[case]
    made = plan(load_recipe(["sums"], [SHOWN.format(name=name, options=options)]))
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
    needs_a_folder = {"distilled", "knowledge", "labels", "aesthetic"}
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
    monkeypatch.setattr("mmrl.report.trackers._installed", lambda name: False)
    assert any(said in problem for problem in plan(load_recipe(["sums"], [change])).problems)


def test_a_plan_for_another_machine_does_not_ask_this_one():
    from mmrl.planner.gpus import gpu_of

    loaded = load_recipe(["sums"], ["rollout={engine: sglang}"])
    assert not [problem for problem in plan(loaded, gpu=gpu_of("h100-80g")).problems if "installed" in problem]
