"""Put one fault at a time into the code, in memory, and see whether the tests that should notice it do.

No file is changed. Every fault has a process of its own, forked from one that has imported the large libraries and
nothing of mmrl; there the module with the fault is compiled from its changed syntax tree whenever it is imported.
A program that a test starts anew does not see the fault: choose tests that do their work in the process.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
"""Seconds that the tests of a fault may take, on a busy machine too; one that makes them hang is not caught."""
LIBRARIES = (
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
    "peft",
)
_kept = dict[str, Any]()
"""What ``mmrl/core/torchvision_on_cpu.py`` defines: torch forgets the schemas of torchvision when nobody holds them."""


class GoneError(Exception):
    """A fault no longer fits the code: its line in ``faults.py`` must follow the code."""


@dataclass(frozen=True)
class Fault:
    """In the function or class ``at`` (``package.module:Class.method``) the one expression or statement ``old`` becomes
    ``new``; how they are laid out does not matter. ``tests``: the fast tests of which at least one must fail."""

    name: str
    at: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass
class Result:
    """What pytest said. ``failed``: what each test that failed raised, the name of the exception first. ``loaded``:
    whether the module with the fault was imported. ``problem``: why there is no answer."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    loaded: bool = False
    seconds: float = 0.0
    problem: str = ""


def file_of(module: str) -> Path:
    """The source file of a module; drop-in folders beside ``mmrl`` are part of the package at run time."""
    parts = module.split(".")
    for place in (ROOT.joinpath(*parts), ROOT.joinpath(*parts[1:])):
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    raise GoneError(f"there is no module {module}")


def mutated(fault: Fault) -> tuple[Path, ast.Module]:
    """The file with the fault and its changed syntax tree. Raises ``GoneError``."""
    module, _, symbol = fault.at.partition(":")
    file = file_of(module)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    where: Any = tree
    for name in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        where = next((node for node in where.body if isinstance(node, kinds) and node.name == name), None)
        if where is None:
            raise GoneError(f"{module} has no {symbol}")
    swap = _Swap(_pattern(fault.old), _pattern(fault.new))
    swap.visit(where)
    if swap.times != 1 or fault.old == fault.new:
        raise GoneError(f"{fault.at} holds `{fault.old}` {swap.times} times; once is needed")
    return file, ast.fix_missing_locations(tree)


def _pattern(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.kind, self.old, self.new, self.times = type(old), ast.dump(old), new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, self.kind) and ast.dump(node) == self.old:
            self.times += 1
            return ast.copy_location(copy.deepcopy(self.new), node)
        return self.generic_visit(node)


def put_in(fault: Fault, result: Result) -> None:
    """Have every import of the module from now on give the one with the fault; ``result`` says that there was one."""
    file, tree = mutated(fault)
    changed, original = compile(tree, str(file), "exec", dont_inherit=True), SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> Any:
        if Path(self.path).resolve() != file:
            return original(self, fullname)
        result.loaded = True
        return changed

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


class _Watch:
    """A plugin of pytest that fills in a ``Result``."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.result.passed.append(report.nodeid)

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        self.result.failed[node.nodeid] = f"{call.excinfo.typename}: {call.excinfo.value}"


def _work(fault: Fault | None, tests: Sequence[str], said: Connection) -> None:
    """What a forked process does: run ``tests`` with the fault in the code, or without one."""
    os.setpgid(0, 0)
    signal.alarm(LIMIT_S)  # ends this process
    result, began = Result(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as shown:
        os.dup2(shown.fileno(), 1)
        os.dup2(shown.fileno(), 2)
        if fault is not None:
            put_in(fault, result)
        first = ["--maxfail=1"] if fault is not None else []
        pytest.main([*first, "-m", "not slow", "-p", "no:cacheprovider", *tests], plugins=[_Watch(result)])
    result.seconds = time.perf_counter() - began
    said.send(result)


def warm() -> None:
    """Import what takes long and is never changed."""
    for name in ("PYTEST_ADDOPTS", "MMRL_TESTS_PASSED"):  # which choose among tests
        os.environ.pop(name, None)
    runpy.run_path(str(ROOT / "tests" / "conftest.py"))  # threads and the hub, before torch is imported
    _kept.update(runpy.run_path(str(ROOT / "mmrl" / "core" / "torchvision_on_cpu.py")))
    _kept["allow_cpu_only"]()
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "mmrl" for name in sys.modules), "mmrl must be imported with the fault"


def results(tasks: Sequence[tuple[Fault | None, Sequence[str]]], jobs: int) -> Iterator[tuple[Fault | None, Result]]:
    """Each task's result as it ends, ``jobs`` of them at a time."""
    context, waiting = multiprocessing.get_context("fork"), list(tasks)
    running: dict[Any, tuple[Fault | None, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                fault, tests = waiting.pop(0)
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(fault, tests, there))
                process.start()
                there.close()
                running[here] = fault, process
            for here in wait(list(running)):
                fault, process = running.pop(here)
                try:
                    result = here.recv()
                except EOFError:
                    result = Result(problem=f"its tests end the process, or hang for {LIMIT_S} s")
                _end(process)
                yield fault, result
    finally:
        for _, process in running.values():
            _end(process)


def _end(process: BaseProcess) -> None:
    """With all that its tests have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started
    process.join()
