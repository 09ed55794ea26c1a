"""Warnings on the command line."""

import logging
import os
import re
import subprocess
import sys

import pytest

from mmrl.app.build import build
from mmrl.config.loader import load_recipe, shipped_recipes
from mmrl.core.errors import UserError
from mmrl.core.quiet import Dropped, Plain, be_quiet
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.messages import content

allow_cpu_only()  # before transformers imports torchvision

SCRIPT = """
import warnings
from mmrl.data.fields import UnreadColumns
from mmrl.core.quiet import warn_plainly
warn_plainly()
for _ in range(2):
    with warnings.catch_warnings():  # makes Python forget what it has printed, as libraries do
        warnings.simplefilter("default")
        warnings.warn("t.csv: the columns shop are not used", UnreadColumns)
        warnings.warn("of a library")
"""


def test_a_warning_of_ours_is_printed_once_and_without_a_line_of_code():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [line for line in lines if "shop" in line] == ["warning: t.csv: the columns shop are not used"]
    assert sum("UserWarning: of a library" in line for line in lines) == 2


LIBRARY = """
import os
from mmrl.core.quiet import be_quiet
be_quiet()
from LIBRARY.utils import logging
logger = logging.get_logger("LIBRARY.models")
listed = "The config attributes {'architectures': ['A']} were passed to A, but are not expected and will be ignored."
for text in ("the field x\\n  is not read", "the field x\\n  is not read", listed):
    logger.warning(text)
for n in range(9):
    logger.warning(f"the following part of your input was truncated: {n}")
logger.error("broken")
logger.info("in passing")
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_library_warns_once_and_in_one_line_unless_the_user_set_its_level(library):
    script = LIBRARY.replace("LIBRARY", library)
    variable = f"{library.upper()}_VERBOSITY"
    free = {name: value for name, value in os.environ.items() if name != variable}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=free)
    cut = f"warning: {library}: the following part of your input was truncated: "
    assert [line for line in done.stderr.splitlines() if f"{library}:" in line] == [
        f"warning: {library}: the field x is not read",
        *(f"{cut}{n}" for n in range(2)),
        f"{cut}2 (more of this kind is not shown)",
        f"error: {library}: broken",
    ]
    assert "\n[" not in done.stderr  # the library's own handler

    theirs = {**free, variable: "info"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=theirs)
    assert "in passing" in done.stderr
    assert "architectures" in done.stderr
    assert "warning: " not in done.stderr


@pytest.fixture
def heard():
    """What libraries log is printed as on the command line."""
    loggers = {name: logging.getLogger(name) for name in ("transformers", "diffusers")}
    levels = {name: logger.level for name, logger in loggers.items()}
    handlers = [Plain(name) for name in loggers]
    for logger in loggers.values():
        logger.setLevel(logging.WARNING)
    yield
    for handler in handlers:
        handler.close()
    for name, logger in loggers.items():
        logger.setLevel(levels[name])


LOCAL = [name for name in shipped_recipes() if "architecture:" not in content(name)[0].read_text()]


@pytest.mark.slow
@pytest.mark.sweep("shipped recipes that are loaded without a warning of a library")
def test_a_shipped_recipe_is_loaded_without_a_warning(sweep, heard, capsys):
    for name in LOCAL[: sweep.size(8, len(LOCAL))]:
        loaded = load_recipe([name], ["device=cpu"])
        try:
            build(loaded.recipe)
        except UserError as error:
            if not re.search("needs? torchvision|is not installed", str(error)):  # of an extra that is not here
                raise
            continue
        said = [line for line in capsys.readouterr().err.splitlines() if re.match(r"(warning|error): \w+: ", line)]
        sweep.check(not said, f"{name}: {said}")
    sweep.done()


def test_a_processor_that_only_an_import_names_is_not_warned_of(capsys):
    log = logging.getLogger("transformers")
    kept = Plain("transformers")
    try:
        log.warning(
            "`CLIPImageProcessor` requires torchvision (not installed); falling back to `CLIPImageProcessorPil`."
        )
        log.error("`CLIPModel` requires torchvision (not installed).")
    finally:
        kept.close()
    assert capsys.readouterr().err.splitlines() == [
        "error: transformers: `CLIPModel` requires torchvision (not installed)."
    ]


def test_what_torchao_makes_torch_say_is_dropped_until_it_is_closed(caplog, monkeypatch):
    log = logging.getLogger("torch.utils._pytree")
    monkeypatch.setattr(log, "filters", [])  # of a command of an earlier test in this process
    texts = (
        "<enum 'X'> is an Enum subclass and is now natively supported by torch.compile as an opaque value.",
        "Other.",
    )
    log.addHandler(caplog.handler)  # torch's loggers may hand nothing on
    made = be_quiet()
    assert sum(isinstance(one, Dropped) for one in made) == 1
    assert not any(isinstance(one, Dropped) for one in be_quiet()), "each is there once"
    for text in texts:
        log.warning(text)
    for one in made:
        one.close()
    log.warning(texts[0])
    log.removeHandler(caplog.handler)
    assert caplog.records[0].getMessage() == texts[1]
