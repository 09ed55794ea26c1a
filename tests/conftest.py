"""One thread per process, set before torch is imported; no hub, no chatter."""

import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.support.carried_table import BY_HAND, CARRIED  # noqa: E402
from tests.support.hangs import Watch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
LAST_BEGIN = pytest.StashKey[float]()
"""With ``--begin-within``: when the last test may begin, by the monotonic clock."""
PRETENDED = pytest.StashKey[str]()
"""With ``--pretend-cuda``: why there is no pretended device; empty where there is one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pretend-cuda", action="store_true", help="run the tests of a CUDA device that is pretended")
    parser.addoption(
        "--few",
        type=int,
        metavar="N",
        help="of a slow test run N of its cases at most: the first, the last, some between",
    )
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="SECONDS",
        help="skip tests that would begin later than this, so that a slow machine keeps to a limit of its own",
    )
    parser.addoption(
        "--long-sweeps", action="store_true", help="sweeps try many inputs, for minutes (tests/support/sweeps.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (seconds := config.getoption("begin_within")) is not None:
        config.stash[LAST_BEGIN] = time.monotonic() + seconds
    config.pluginmanager.register(Watch(distributed=hasattr(config, "workerinput")))
    if config.getoption("pretend_cuda"):
        from tests.support import pretend

        if not (why := pretend.missing()):
            pretend.load()  # before a test imports torch
        config.stash[PRETENDED] = why


def only_pretended(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--pretend-cuda`` leave out all other tests; without it, or a compiler, skip these."""
    marked = [item for item in items if item.get_closest_marker("pretend_cuda")]
    why = config.stash.get(PRETENDED, "runs with pytest --pretend-cuda")
    if PRETENDED in config.stash:
        config.hook.pytest_deselected(items=[item for item in items if item not in marked])
        items[:] = marked
    for item in marked if why else ():
        item.add_marker(pytest.mark.skip(reason=why))


def beyond(most: int, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The slow tests that are further cases of their function than ``most``, which are spread evenly over all."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("long"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of in cases.values():
        kept = {round(n * (len(of) - 1) / max(1, most - 1)) for n in range(most)}
        yield from (item for n, item in enumerate(of) if n not in kept)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late, by name."""
    if time.monotonic() > item.config.stash.get(LAST_BEGIN, math.inf):
        pytest.skip("NOT RUN: the time of --begin-within is over")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long is slow. Leave out what passed in another environment, where ``MMRL_TESTS_PASSED`` names the report
    of ``pytest -rp``. Tests of torchvision's own effects run in both."""
    only_pretended(config, items)
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long") or config.getoption("long_sweeps"):
            item.add_marker(pytest.mark.timeout(0))  # none: these take as long as they take
    if most := config.getoption("few"):
        left_out = set(beyond(most, items))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if report := os.environ.get("MMRL_TESTS_PASSED"):
        lines = Path(report).read_text(encoding="utf-8", errors="replace").splitlines()
        passed = {line.removeprefix("PASSED ").strip() for line in lines if line.startswith("PASSED ")}
        again = [item for item in items if item.nodeid not in passed or "torchvision" in item.nodeid]
        config.hook.pytest_deselected(items=[item for item in items if item not in again])
        items[:] = again


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported is no garbage: to look for some among it takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: to go through its half a million objects again takes 0.3 s each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000, 10, 10
    )  # a model is thousands of objects, which 700 at a time would be gone through again and again


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    """A listener that a test leaves is not there for the tests after it, whichever they are in this process."""
    yield
    if (notices := sys.modules.get("mmrl.core.notices")) is not None:
        notices.listen(None)


class Said:
    """The messages of ``UserError`` that the test at work has made, and the calls that ended with them."""

    texts: list[str]
    calls: list

    def __init__(self) -> None:
        from mmrl.core.errors import UserError

        self.begin("")
        made = super(UserError, UserError).__init__

        def says(error: UserError, *arguments: object) -> None:
            for text in arguments[:1]:
                if isinstance(text, str):
                    self.texts.append(text)
                    self.note(text)
            made(error, *arguments)

        UserError.__init__ = says  # type: ignore[method-assign]

    def begin(self, node: str) -> None:
        """The test ``node`` begins."""
        self.texts, self.calls, self.node = [], [], node
        self.edits = [name for name, where in CARRIED.items() if where == node]
        self.by_hand = [name for name, where in BY_HAND.items() if where == node]
        self.wanted = bool(self.edits or os.environ.get("MMRL_CARRIED"))

    def note(self, text: str) -> None:
        """Keep the call that made this message, where the test carries out edits."""
        if self.wanted:
            from tests.support.carried import calls_of

            if found := calls_of(text, sys._getframe(2)):
                self.calls.append(found)

    def left(self) -> list[str]:
        """What is wrong with the edits that the test carries out."""
        from tests.support.carried import after, said_by

        caused = {name for text in self.texts if self.by_hand for name in said_by(text, self.by_hand)}
        wrong = [f"{name}: the test does not cause it" for name in self.by_hand if name not in caused]
        if not self.wanted:
            return wrong
        self.wanted = False  # what is called again is not kept
        return wrong + after(self.edits, self.calls, self.node)


@cache
def said() -> Said:
    """Made by the first test: ``tests/faults`` runs this file before mmrl may be imported."""
    return Said()


@pytest.fixture
def says() -> Callable[[str], object]:
    """Counts a text as a message of the test, where no ``UserError`` has it."""
    return lambda text: said().texts.append(text)


@pytest.fixture(autouse=True)
def a_message_tells_what_can_be_done(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keys, values, commands and options that a message of the test tells a user to set or to run exist."""
    said().begin(request.node.nodeid)
    yield
    if texts := said().texts:
        from tests.support.messages import faults

        wrong = {text: found for text in dict.fromkeys(texts) if (found := faults(text))}
        assert not wrong, f"messages tell what cannot be done: {wrong}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """The edit of a message that the test is to carry out (``tests/support/carried.py``) mends what it complains of."""
    yield
    assert not (left := said().left()), f"edits that messages name are not carried out: {left}"


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Iterator[object]:
    """A ``tests.support.sweeps.Sweep`` whose kind is what the marker ``sweep`` names; the table at the end counts
    it."""
    from tests.support.sweeps import Sweep

    marker = request.node.get_closest_marker("sweep")
    assert marker, "a test that takes `sweep` is marked with @pytest.mark.sweep('what it tries')"
    counted = Sweep(marker.args[0], long=request.config.getoption("long_sweeps"))
    yield counted
    request.node.user_properties.append(("sweep", [counted.kind, counted.tried, len(counted.failed)]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of sweeps, where some ran."""
    from tests.support.sweeps import table

    reports = terminalreporter.stats.get("", ())  # of set-ups and teardowns; a sweep is counted in its teardown
    last = {report.nodeid: value for report in reports for name, value in report.user_properties if name == "sweep"}
    if last:
        terminalreporter.section("sweeps")
        for line in table((kind, tried, failed) for kind, tried, failed in last.values()):
            terminalreporter.line(line)


settings.register_profile("unhurried", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("unhurried")


@pytest.fixture(scope="module")
def tools() -> Iterator[list[ModuleType]]:
    """``tools/freeze.py``, its comparison and what runs recipes, imported as the command imports them."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield [importlib.import_module(name) for name in ("freeze", "freeze_compare", "freeze_record")]
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[object]:
    """A tab of Chromium (``tests/support/browser.py``); the test is skipped where there is none."""
    from tests.support.browser import opened

    with opened(tmp_path) as tab:
        yield tab
