"""Signals: the step is finished and saved, and the exit code says which it was."""

import contextlib
import os
import pty
import signal
import sys
import time

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core import checkpoint_reader as reader
from mmrl.core.signals import stop_on_signal
from mmrl.logging.metrics import read
from mmrl.runtime.start import train
from tests.support.divergence import PICTURES
from tests.support.recipes import ROOT


@pytest.fixture(autouse=True)
def not_under_nohup():
    """Under ``nohup`` SIGHUP is ignored, and mmrl leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)])
def test_a_signal_finishes_the_step_and_saves_it(tmp_path, number, code, capsys):
    (tmp_path / "signals.py").write_text(
        "import os\n"
        "def score(samples, *, context):\n"
        "    if context.step == 1:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    return [float(s.id.sample) for s in samples]\n"
    )
    overrides = [*PICTURES, "checkpoint.every=100", f"rewards=[{{name: '{tmp_path}/signals.py'}}]"]
    loaded, out = load_recipe(["shapes-lora"], overrides), tmp_path / "run"
    if code is None:
        assert train(loaded, out) == out
    else:
        with pytest.raises(SystemExit) as stop:
            train(loaded, out)
        assert stop.value.code == code
    said = capsys.readouterr().err
    assert "stopping after this step" in said
    assert "stopped after step 2; continue with: mmrl train" in said
    assert len(read(out / "metrics.jsonl")) == 2
    assert reader.load(out / "checkpoints", 2).step == 2


def test_a_terminal_that_closes_twice_does_not_interrupt_and_the_second_other_signal_does():
    before = signal.getsignal(signal.SIGHUP)
    with stop_on_signal() as stop:
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert (stop.asked, stop.signal, stop.exit_code) == (True, signal.SIGHUP, 129)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == before


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            send(signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_terminal_that_is_closed_does_not_lose_the_step(tmp_path):
    """In a terminal of its own, which hangs up: each write to it fails from then on."""
    out = tmp_path / "run"
    words = ["train", "shapes-lora", *PICTURES, "train.steps=500", "checkpoint.every=500", "--out", str(out)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "mmrl.cli", *words])
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 600
    while len(read(out / "metrics.jsonl")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    rows = read(out / "metrics.jsonl")
    assert reader.load(out / "checkpoints", rows[-1]["step"]).step == len(rows) < 500
