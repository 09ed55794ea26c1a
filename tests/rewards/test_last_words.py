"""A reward that ends the process is named: by the process itself, or by the next one of the run."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mmrl import cli
from mmrl.rewards import last_words
from tests.support.recipes import train

ENDS = {
    "exit": ("os._exit(7)", 7, "ended the process by os._exit(7)"),
    "kill": ("os.kill(os.getpid(), 9)", -9, ""),
    "crash": ("ctypes.string_at(0)", -11, ""),
    "abort": ("os.abort()", -6, ""),
}
REWARD = """
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def score(samples, *, context):
    if context.step >= 0 and not os.path.exists({mended!r}):
        {how}
    return [0.0] * len(samples)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_reward_that_ends_the_process_is_named(how, tmp_path):
    code, status, said = ENDS[how]
    file, mended = tmp_path / "mine.py", tmp_path / "mended"
    file.write_text(REWARD.format(how=code, mended=str(mended)))
    words = ["train.steps=1", "eval.every=null", f"rewards=[{{name: shapes}}, {{name: '{file}', weight: 0}}]"]
    ended = train(tmp_path / "run", *words)
    assert ended.returncode == status
    assert said in ended.stderr
    if said:
        assert f"the reward {file.name} ended" in ended.stderr
    mended.touch()
    again = train(tmp_path / "run", *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert "the last process of this run ended in a call of the reward" in again.stderr
    assert file.name in again.stderr.partition("ended in a call")[2].splitlines()[0]
    assert not (tmp_path / "run" / last_words.CALLING).exists()
    assert "ended in a call" not in train(tmp_path / "run", *words, "--resume").stderr


def test_a_child_of_a_reward_ends_in_silence():
    code = (
        "import os\nfrom mmrl.rewards.last_words import watched\nwith watched('mine'):\n"
        "    child = os.fork()\n    if not child:\n        os._exit(0)\n    os.waitpid(child, 0)\n"
        "    print('alive', flush=True)\n    os._exit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "alive\n")
    assert ended.stderr.count("the reward mine ended the process") == 1


def test_what_is_no_note_says_nothing(tmp_path):
    file = tmp_path / last_words.CALLING
    for content in (b"", b"[" * 10**6, b"\xff", b"{}", b"3", b" " * 1024):
        file.write_bytes(content)
        assert last_words.left_by_last(tmp_path) == []
    os.mkfifo(tmp_path / "pipe")
    file.unlink(missing_ok=True)
    file.symlink_to(tmp_path / "pipe")
    assert last_words.left_by_last(tmp_path) == []


def test_a_command_in_a_process_that_goes_on_ends_no_process(monkeypatch, capsys):
    ends = threading.Event()
    with last_words.watched("mine"):
        thread = threading.Thread(target=ends.wait)
        thread.start()
    monkeypatch.setattr("sys.argv", ["mmrl", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert thread.is_alive()
    ends.set()
    thread.join()
    assert "left the thread" not in capsys.readouterr().err


ALARMS = {
    "alarm": "signal.alarm(1); time.sleep(1.3)",
    "timer": "signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(0.3)",
    "loop": "signal.setitimer(signal.ITIMER_REAL, 0.1)\n    while signal.getitimer(0)[0]: sum(range(9999))",
    "child": "signal.setitimer(signal.ITIMER_REAL, 0.2); subprocess.run(['sleep', '0.5'])",
    "async": "signal.setitimer(signal.ITIMER_REAL, 0.1); await asyncio.sleep(0.3)",
    "kill": "os.kill(os.getpid(), signal.SIGALRM); time.sleep(0.1)",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ALARMS)
def test_an_alarm_that_rings_in_a_call_is_that_calls_failure(how, tmp_path):
    begins = "import asyncio, os, signal, subprocess, time\nimport mmrl\n@mmrl.reward(inputs=('text',))\n"
    body = "def score(samples, *, context):\n    {}\n    return [1.0] * len(samples)\n"
    (tmp_path / "rings.py").write_text(begins + "async " * (how == "async") + body.format(ALARMS[how]))
    (tmp_path / "plain.py").write_text(begins + body.format("time.sleep(0.5)"))
    code = (
        "from mmrl.rewards.scoring import RewardSet\nfrom mmrl.config.schema import Reward\n"
        "from tests.support.scoring import sample\nimport signal, sys\n"
        "made = RewardSet([Reward(name=name, on_failure='drop') for name in sys.argv[1:]])\n"
        "found = made.score([sample(0, 0)], [[0]])\nprint([f.reason for f in found.failures])\nmade.close()\n"
        "sys.stdout.flush()\nsignal.alarm(1)\nsignal.pause()\n"
    )
    names = [str(tmp_path / "rings.py"), *([str(tmp_path / "plain.py")] if how != "kill" else [])]
    ended = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert ended.stdout.count("set an alarm (SIGALRM) that rang before it returned") == 1, ended.stderr
    assert ended.returncode == -signal.SIGALRM  # outside of rewards an alarm is what it was
