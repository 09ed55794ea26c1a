"""The calls below a function, and those of them that climb: an example that was counted by hand."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LAYERS = {"low": "mmrl low", "middle": "middle rewards", "high": "high cli"}
LOW = """
from typing import Protocol

class Tool(Protocol):
    def use(self, times: int) -> str: ...

class Other(Protocol):
    def use(self, times: int, twice: bool) -> str: ...

def called(tool: Tool, then):
    then(tool.use(3))              # climb 1 to high.Hammer.use; rewards.Saw.use is climb 2; then: climb 3, to high.show

def plain():
    return 1
"""
MIDDLE = """
from functools import partial
from mmrl.low import Tool, called, plain

class Box:
    def __init__(self, tools: list[Tool]) -> None:
        self.tools = tools
        plain()                    # return 1

    @property
    def first(self) -> Tool:
        return self.tools[0]

def all_of(box: Box, say):
    for tool in box.tools:
        tool.use(1)                # climb 4 to high.Hammer.use; Saw.use is in this layer
    called(box.first, partial(say, 1))  # return 2; the property is in this layer
    sorted(box.tools, key=say)     # of a library, and say is not known here
"""
HIGH = """
from mmrl import low
from mmrl.middle import Box, all_of

class Hammer:
    def use(self, times: int) -> str:
        return str(low.plain())    # return 3

def show(text):
    return text

def start():
    box = Box([Hammer()])          # return 4, to Box.__init__
    all_of(box, show)              # return 5; all_of calls show: climb 5
    low.called(box.first, show)    # return 6; called calls show: climb 3; the property: return 7

def unreached():
    low.plain()
"""
SAW = """
class Saw:
    def use(self, times: int) -> str:
        return ""

class Wrong:
    def use(self, times: int, twice: bool) -> str:
        return start()
"""


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module("walk")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def tree(tmp_path):
    texts = {
        "mmrl/__init__": "",
        "mmrl/low": LOW,
        "mmrl/middle": MIDDLE,
        "mmrl/high": HIGH,
        "mmrl/cli": "",
        "rewards/saw": SAW,
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_an_example_counted_by_hand(tool, tree):
    house = tool.house_of(tree)
    up, down = tool.counted(tool.walk(house, tool.Name("mmrl.high", "start")), tool.placed(house.trees, LAYERS))
    assert [f"{a} {b}".replace("mmrl.", "") for a, b in up] == [
        "low:called high:Hammer.use",
        "low:called high:show",
        "low:called rewards.saw:Saw.use",
        "middle:all_of high:Hammer.use",
        "middle:all_of high:show",
    ]
    assert len(down) == 7


def test_an_unknown_function_is_named(tool, tree):
    with pytest.raises(ValueError, match=r"no function mmrl\.low:gone; write MODULE:FUNCTION"):
        tool.walk(tool.house_of(tree), tool.Name("mmrl.low", "gone"))


def test_the_functions_that_it_starts_from_exist(tool):
    for start in tool.STARTS:
        module, name = start.split(":")
        tree = ast.parse(tool.modules(tool.ROOT)[module].read_text())
        assert tool.Name(module, name) in tool.House({module: tree}).functions


def test_layers_of_a_commit_have_what_came_later_where_it_lies_now(tool):
    now = tool.LAYERS
    old = {name: words.replace("http_server ", "") for name, words in now.items() if name not in ("episodes", "cli")}
    found = tool.with_later(old)
    assert list(found) == list(now)
    assert {name: {*words.split()} for name, words in found.items()} == {n: {*w.split()} for n, w in now.items()}


def test_layers_of_a_commit_lose_the_modules_that_are_gone(tool):
    old = {"low": "mmrl errors packages gone", "high": "report.gone report.rundir"}
    there = ["mmrl", "mmrl.errors", "mmrl.packages.table", "mmrl.report.rundir"]
    assert tool.still_there(old, there) == {"low": "mmrl errors packages", "high": "report.rundir"}
