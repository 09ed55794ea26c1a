"""Booleans are passed by name; constructors and functions stay small; pyright is strict everywhere."""

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 10
LINES_OF_A_FUNCTION = 60
MOST_ANY = 10
"""Uses of ``Any`` in 1,000 lines of mmrl/, imports and comments counted."""
FOLDERS = ("mmrl", "pipelines", "rewards", "datasets", "environments")
BY_PLACE = {
    "mmrl/placement/device_tasks.py": "arguments of a task travel in their order to the device's process",
    "mmrl/training/loop.py": "so do those of the task `backward`",
    **dict.fromkeys(
        (
            "mmrl/cli/compare.py",
            "mmrl/cli/data.py",
            "mmrl/studies/distill/commands.py",
            "mmrl/cli/fetch.py",
            "mmrl/cli/judge.py",
            "mmrl/studies/labels/commands.py",
            "mmrl/cli/runs.py",
            "mmrl/cli/simulate.py",
            "mmrl/studies/soup/commands.py",
            "mmrl/studies/sweep/commands.py",
        ),
        "typer calls",
    ),
}
"""Files whose public functions may take booleans by place, and why."""
LARGE = {
    "Judge": "its parameters are the options that a recipe writes",
    "Counts": "numbers of a step that a plan shows",
    "Measured": "numbers of a step that was run without data",
    "Plan": "what a plan shows",
    "Sample": "what a reward may read, a field for each input",
    "Timeline": "what the page of a run shows",
}
"""Constructors with more parameters, and why. But for the first they are records."""


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_bytes())) for path in paths]


def is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The public functions and methods, constructors among them, each with the name of its class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body, node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(node.name):
            yield owner, node


def booleans_by_place(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = [*function.args.posonlyargs, *function.args.args]
    defaults = [None] * (len(given) - len(function.args.defaults)) + list(function.args.defaults)
    kinds = [ast.unparse(a.annotation) if isinstance(a.annotation, ast.Name | ast.BinOp) else "" for a in given]
    return [
        a.arg
        for a, kind, default in zip(given, kinds, defaults, strict=True)
        if kind in ("bool", "bool | None") or (isinstance(default, ast.Constant) and isinstance(default.value, bool))
    ]


def test_public_functions_take_booleans_by_name():
    found = [
        f"{path}:{f.lineno} {f.name}({name})"
        for path, tree in trees()
        for _, f in functions(tree.body)
        for name in booleans_by_place(f)
        if path not in BY_PLACE
    ]
    assert found == []


def constructors() -> Iterator[tuple[str, int]]:
    """Each class and the number of parameters of its constructor; sections of a recipe are not among them."""
    for _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                fields = [ast.unparse(s) for s in node.body if isinstance(s, ast.AnnAssign)]
                yield node.name, sum("ClassVar" not in s and "init=False" not in s for s in fields)
            for f in node.body:
                if isinstance(f, ast.FunctionDef) and f.name == "__init__":
                    yield node.name, len(f.args.posonlyargs) + len(f.args.args) + len(f.args.kwonlyargs) - 1


def test_a_constructor_has_at_most_ten_parameters():
    large = {name: number for name, number in constructors() if number > MOST}
    assert sorted(large) == sorted(LARGE)


def test_a_function_has_at_most_sixty_lines():
    long = [
        f"{path}:{node.lineno} {node.name}: {lines}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LINES_OF_A_FUNCTION
    ]
    assert long == []


def test_pyright_is_strict_for_every_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "strict"
    assert set(FOLDERS) <= set(settings["include"])
    assert not {"exclude", "ignore"} & settings.keys()
    weaker = ("# pyright: basic", "# pyright: standard", "# type: ignore\n")
    texts = {path: (ROOT / path).read_text() for path, _ in trees()}
    assert [path for path, text in texts.items() if any(word in text for word in weaker)] == []


def test_any_is_rare():
    texts = {path: path.read_text() for path in (ROOT / "mmrl").rglob("*.py")}
    uses = {str(path.relative_to(ROOT)): len(re.findall(r"\bAny\b", text)) for path, text in texts.items()}
    lines = sum(len(text.splitlines()) for text in texts.values())
    most = sorted(uses.items(), key=lambda item: -item[1])[:10]
    assert 1000 * sum(uses.values()) / lines <= MOST_ANY, f"{sum(uses.values())} in {lines} lines; the most: {most}"
