"""The Python interface leaves the process that calls it as it was, and its errors speak of Python."""

import ast
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from importlib import resources
from pathlib import Path

import pytest
import torch

import mmrl
from mmrl.api.entry import in_python_words
from mmrl.core.quiet import QUIET
from tests.support import tiny
from tests.support.sweep import RECIPE, REWARDS

LEVELS = {"transformers": "TRANSFORMERS_VERBOSITY", "diffusers": "DIFFUSERS_VERBOSITY"}


def of_process():
    """What a program of somebody else would notice."""
    loggers = {name: of for name, of in logging.root.manager.loggerDict.items() if isinstance(of, logging.Logger)}
    return {
        "environment": dict(os.environ),
        "filters": warnings.filters[:],
        "shown by": warnings.showwarning,
        "levels": {name: (of.level, of.disabled, of.propagate) for name, of in loggers.items()},
        "printed": [[type(of), of.filters] for name in LEVELS for of in logging.getLogger(name).handlers],
        "root": (logging.root.level, logging.root.handlers[:], logging.root.manager.disable),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "two.py").write_text(REWARDS)
    (folder / "recipe.yaml").write_text(RECIPE.replace("steps: 4", "steps: 1").replace("every: 4", "every: 1"))
    return folder


def calls(root, out):
    """Every entry point, in an order in which they work; and calls that fail."""
    recipe, loud = root / "recipe.yaml", {"threads": 2}

    def raises(samples, *, context):
        raise KeyError("oops")

    def step_by_step():
        with mmrl.start(recipe, loud, out=out / "b") as run:
            run.step()

    def left():
        with mmrl.start(recipe, loud, out=out / "c") as run:
            run.step()
            raise KeyError("oops")

    yield "plan", lambda: mmrl.plan(recipe)
    yield "plan for a GPU", lambda: mmrl.plan(recipe, gpu="h100-80g")
    yield "train", lambda: mmrl.train(recipe, loud, out=out / "a")
    yield "start", step_by_step
    yield "start, left", left
    yield "continue_run", lambda: mmrl.continue_run(out / "a", {"train.steps": 2})
    yield "load_run", lambda: repr(mmrl.load_run(out / "a"))
    yield "evaluate", lambda: mmrl.load_run(out / "a").evaluate(2)
    yield "report", lambda: mmrl.load_run(out / "a").report()
    yield "curve", lambda: mmrl.load_run(out / "a").curve()
    yield "export", lambda: mmrl.load_run(out / "a").export(out / "exported")
    yield "compare", lambda: mmrl.compare(out / "a", out / "b")
    yield "score", lambda: mmrl.score(f"{root}/two.py:short", ["a text"])
    yield "train refused", lambda: mmrl.train(recipe, out=out / "a")
    yield "train that fails", lambda: mmrl.train(recipe, loud, rewards=[raises], out=out / "d")
    yield "plan of nothing", lambda: mmrl.plan("no-such-recipe")
    yield "compare nothing", lambda: mmrl.compare(out)
    yield "continue nothing", lambda: mmrl.continue_run(out)
    yield "load nothing", lambda: mmrl.load_run(out)
    yield "export again", lambda: mmrl.load_run(out / "a").export(out / "exported")
    yield "score that fails", lambda: mmrl.score(raises, ["a text"])


@pytest.mark.slow
@pytest.mark.sweep("entry points of Python that leave the process as it was")
def test_every_entry_point_leaves_the_process_as_it_was(root, tmp_path, monkeypatch, sweep):
    for name in (*QUIET, *LEVELS.values()):
        monkeypatch.delenv(name, raising=False)
    failed = set()
    for name, call in calls(root, tmp_path):
        before = of_process()
        try:
            call()
        except (mmrl.UserError, KeyError) as error:
            failed.add(name)
            said = re.sub(r"mmrl [a-z]+ .*", "", str(error))
            sweep.check(not re.search(r"(?<!\S)--[a-z]", said), (name, said))
        after = of_process()
        after["levels"] = {logger: of for logger, of in after["levels"].items() if logger in before["levels"]}
        sweep.check(after == before, (name, {key for key in before if before[key] != after[key]}))
    assert {"train refused", "train that fails", "load nothing", "start, left"} <= failed
    assert not {"train", "start", "continue_run", "export", "compare", "score", "evaluate"} & failed
    sweep.done()


SCRIPT = """
import logging, os, warnings
import mmrl
before = dict(os.environ), warnings.filters[:], logging.root.level
mmrl.plan("sums")
assert (dict(os.environ), warnings.filters[:], logging.root.level) == before, sorted(set(os.environ) - set(before[0]))
import huggingface_hub.utils, transformers
assert not huggingface_hub.utils.are_progress_bars_disabled()
assert transformers.utils.logging.get_verbosity() == logging.WARNING
"""


@pytest.mark.slow
def test_a_fresh_process_shows_downloads_and_warnings_of_libraries_afterwards():
    environment = {name: value for name, value in os.environ.items() if name not in (*QUIET, *LEVELS.values())}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("continue it with --resume, replace it with --overwrite, or use --out other", None),
        ("leave out --resume, or name the run with --out", "leave out resume=True, or name the run with out"),
        ("--checkpoint best: none was kept; give latest", "checkpoint='best': none was kept; give latest"),
        ("give --checkpoint base", "give checkpoint='base'"),
        ("--hold keeps 0.1; --extend stretches", "hold=True keeps 0.1; extend=True stretches"),
        ("--try optim.lr is given twice", "tried optim.lr is given twice"),
        ("continue with: mmrl train a.yaml --out x --resume", "continue with: mmrl train a.yaml --out x --resume"),
        ("it is a--b and --", "it is a--b and --"),
    ],
)
def test_errors_name_the_arguments_of_python(said, wanted):
    if wanted is None:
        wanted = "continue it with resume=True, replace it with overwrite=True, or use out='other'"
    assert in_python_words(said) == wanted


@pytest.mark.sweep("messages with options of the shell, in words of Python")
def test_no_message_of_ours_keeps_an_option_outside_a_command(sweep):
    option = re.compile(r"(?<!\S)--(out|resume|overwrite|checkpoint|extend|hold|try|factor|seeds)\b")
    for file in sorted(Path(mmrl.__file__).parent.rglob("*.py")):
        if "cli" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and option.search(node.value):
                left = option.search(re.sub(r"mmrl [a-z][^;()\n]*", "", in_python_words(node.value)))
                sweep.check(left is None, f"{file.name}:{node.lineno} {node.value}")
    sweep.done()


def test_the_package_says_that_it_has_types():
    assert (resources.files("mmrl") / "py.typed").is_file()
    stub = {line.rpartition(" as ")[2] for line in Path(mmrl.__file__).with_suffix(".pyi").read_text().splitlines()}
    assert stub == {*mmrl._LAZY, "before_loading", "load", "reward"}
