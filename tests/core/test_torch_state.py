"""A reward changes no setting of torch for training: not at import, not when it is built, not when it is called."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from safetensors.torch import load_file

from mmrl.core import torch_state
from mmrl.core.reward_contract import Context
from mmrl.rewards import last_words
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find

OF_PROCESS = {
    "dtype": "torch.set_default_dtype(torch.float64)",
    "tensor type": "torch.set_default_tensor_type(torch.DoubleTensor)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "debug mode": "torch.set_deterministic_debug_mode('warn')",
    "matmul precision": "torch.set_float32_matmul_precision('medium')",
    "any precision": "torch.backends.fp32_precision = 'tf32'",
    "mkldnn precision": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = True",
    "cudnn": "torch.backends.cudnn.benchmark = True",
    "cudnn tf32": "torch.backends.cudnn.allow_tf32 = False",
    "reduced": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "flash": "torch.backends.cuda.enable_flash_sdp(False)",
    "efficient": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "math": "torch.backends.cuda.enable_math_sdp(False)",
    "order": (
        "global held; from torch.nn.attention import SDPBackend as s, sdpa_kernel; "
        "held = sdpa_kernel([s.MATH, s.FLASH_ATTENTION], set_priority=True); held.__enter__()"
    ),
    "mkldnn": "torch.backends.mkldnn.set_flags(False)",
    "nnpack": "torch.backends.nnpack.set_flags(False)",
    "encoders": "torch.backends.mha.set_fastpath_enabled(False)",
    "anomaly": "torch.autograd.set_detect_anomaly(True)",
    "folder": "import os; os.chdir('/')",
    "recursion": "import sys; sys.setrecursionlimit(4000)",
    "pixels": "from PIL import Image; Image.MAX_IMAGE_PIXELS = 1",
    "no limit of pixels": "from PIL import Image; Image.MAX_IMAGE_PIXELS = None",
    "torn pictures": "from PIL import ImageFile; ImageFile.LOAD_TRUNCATED_IMAGES = True",
    "path": "import sys; sys.path.clear()",
    "another path": "import sys; sys.path = sys.path[:1]",
    "alarm": "import signal; signal.alarm(9)",
    "timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 9, 9)",
    "patience of sockets": "import socket; socket.setdefaulttimeout(0.001)",
    "hook": "torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2 if torch.is_tensor(o) else o)",
}
OF_THREAD = {
    "handler": "import signal; signal.signal(signal.SIGALRM, lambda *_: None)",
    "device": "torch.set_default_device('meta')",
    "gradients": "torch.set_grad_enabled(False)",
    "inference": "global guard; guard = torch.inference_mode(); guard.__enter__()",
    "autocast": "torch.autocast('cpu', dtype=torch.bfloat16).__enter__()",
    "autocast cache": "torch.set_autocast_cache_enabled(False)",
    "tiny numbers": "torch.set_flush_denormal(True)",
    "threads": "torch.set_num_threads(3)",
    "numpy": "import numpy; numpy.seterr(all='raise')",
    "saved tensors": "torch.autograd.graph.saved_tensors_hooks(lambda x: x * 0, lambda x: x).__enter__()",
    "operators": (
        "from torch.utils._python_dispatch import TorchDispatchMode as T; M = type('M', (T,), "
        "{'__torch_dispatch__': lambda s, f, t, a=(), k=None: f(*a, **(k or {}))}); M().__enter__()"
    ),
    "mode": "from torch.utils._device import DeviceContext; DeviceContext('meta').__enter__()",
}
ALL = {**OF_PROCESS, **OF_THREAD}


def state():
    tables = torch_state._table("process", torch_state._of_process) + torch_state._table(
        "thread", torch_state._of_thread
    )
    older = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    return {
        "older names": older,
        "python": (os.getcwd(), sys.getrecursionlimit(), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES),
        "path": [*sys.path],
        "signals": (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL), socket.getdefaulttimeout()),
        **{one.name: one.get() for one in tables},
    }


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    with last_words.watched("nothing"):  # from now on alarms are heard
        pass
    monkeypatch.setattr(torch_state, "_told", set())
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("setter", ALL.values(), ids=ALL)
def test_what_a_reward_sets_is_set_back_and_named_once(setter, capfd):
    before = state()
    names = {"torch": torch}
    for _ in range(2):
        with torch_state.kept("mine.py"):
            exec(setter, names)
    assert state() == before
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if "the reward mine.py changed" in line]
    assert lines
    assert len(lines) == len(set(lines))
    assert (torch.ones(2, requires_grad=True) * 0.5).sum().requires_grad
    assert torch.zeros(1).dtype == torch.float32
    assert np.geterr()["over"] != "raise"


@pytest.mark.parametrize("setter", OF_PROCESS.values(), ids=OF_PROCESS)
def test_a_call_in_its_thread_is_watched_too(setter, tmp_path, capfd):
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef score(samples, *, context):\n    {setter}\n    return [1.0] * len(samples)\n")
    before = state()
    caller = Caller(build(find(str(file)), {}), timeout=60)
    try:
        assert caller.submit([], Context(0)).result().error is None
        assert state() == before
        assert torch_state.changes_settings(str(file))
        assert caller.submit([], Context(0)).done()  # nothing else computes during its later calls
    finally:
        caller.close()
    assert str(file) in capfd.readouterr().err


@pytest.mark.slow
def test_a_reward_that_is_imported_before_torch_leaves_the_folder(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os, torch\nos.chdir('/')\ndef score(samples, *, context):\n    return []\n")
    code = "import os, sys; from mmrl.rewards.loading import find; find(sys.argv[1]); print(os.getcwd(), end='')"
    done = subprocess.run([sys.executable, "-c", code, file], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == os.path.realpath(tmp_path)
    assert "changed the working folder" in done.stderr


def test_a_reward_may_add_to_the_path_of_imports(monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with torch_state.kept("mine.py"):
        sys.path.insert(0, "mine")
        sys.path.append("yours")
    assert (sys.path[0], sys.path[-1]) == ("mine", "yours")
    assert not capfd.readouterr().err


LEAVES = {
    "path": ("sys.path.clear()", "changed the folders of imports"),
    "alarm": ("signal.alarm(1)", "changed the alarm"),
    "pixels": ("Image.MAX_IMAGE_PIXELS = 1", "changed the limit of pixels"),
    "thread": (
        "threading.Thread(target=threading.Event().wait, name='mine').start()",
        "the reward {file} left the thread mine running",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("line", "why"), LEAVES.values(), ids=LEAVES)
def test_a_command_goes_on_and_ends_whatever_a_reward_leaves_at_import(line, why, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import signal, sys, threading\nfrom PIL import Image\n{line}\n"
        "def score(samples, *, context):\n    return [1.0] * len(samples)\n"
    )
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / "a.png")
    words = ["score", str(file), "--images", str(tmp_path / "pictures")]
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert why.format(file=file) in done.stderr
    assert "Traceback" not in done.stderr


def test_an_autocast_that_a_reward_leaves_open_keeps_no_old_weights():
    layer, x = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)

    def product():
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).item()

    with torch_state.kept("mine.py"):
        torch.autocast("cpu", torch.bfloat16).__enter__()
        product()
    for weight in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(layer.weight, weight)
        assert product() == weight


def test_of_calls_at_once_both_are_named_and_a_moment_counts_as_none(capfd):
    before, inside, leave = state(), threading.Event(), threading.Event()

    def first():
        with torch_state.kept("a", here=False):
            torch.set_default_dtype(torch.float64)
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(60)
    with torch_state.kept("b", here=False):
        leave.set()
        thread.join()
    assert state() == before
    assert "the reward a or b changed the default dtype" in capfd.readouterr().err
    with torch_state.kept("c"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
    assert not capfd.readouterr().err


HANGS = """
import os, time

def score(samples, *, context):
    open({free!r} + "-waits", "w").close()
    while not os.path.exists({free!r}):
        time.sleep(0.01)
    return [1.0] * len(samples)
"""


@pytest.mark.parametrize("given_up", ["by its deadline", "as it closes"])
def test_a_call_that_nobody_waits_for_sets_nothing_back_when_it_ends(given_up, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    file, free, before = tmp_path / "hangs.py", tmp_path / "free", {*threading.enumerate()}
    file.write_text(HANGS.format(free=str(free)))
    caller = Caller(build(find(str(file)), {}), timeout=0.1 if given_up == "by its deadline" else 600)
    future = caller.submit([], Context(0))
    if given_up == "by its deadline":
        assert "did not return within 0.1 s" in str(future.result().error)
    while not Path(f"{free}-waits").exists():
        time.sleep(0.01)
    caller.close()
    (tmp_path / "further").mkdir()
    monkeypatch.chdir(tmp_path / "further")  # what the process does meanwhile stays
    with torch_state.kept("other.py", here=False):  # what another reward changes does not
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32
    free.touch()
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    assert os.getcwd() == os.path.realpath(tmp_path / "further")
    assert "the reward other.py changed the default dtype" in capfd.readouterr().err


GOES = """
import contextlib, os, threading, time
import mmrl

elsewhere = os.path.join(os.path.dirname(__file__), "elsewhere")

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    with contextlib.chdir(elsewhere):
        time.sleep(0.3)  # a checkpoint is written meanwhile
    return [-len(s.text) / 50 for s in samples]
"""


@pytest.mark.slow
def test_a_reward_that_works_in_another_folder_for_a_while_takes_no_file_of_the_run_there(tmp_path, monkeypatch, capfd):
    from mmrl.cli import app
    from tests.support import tiny
    from tests.support.sweep import RECIPE

    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tiny.language_model(tmp_path / "tinylm", sharp=0.3)
    (tmp_path / "goes.py").write_text(GOES)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("two.py:short", "goes.py"))
    rewards = "rewards=[{name: goes.py}, {name: goes.py, label: again}, {name: goes.py, label: third}]"
    app(["train", "recipe.yaml", rewards, "--out", "out"], standalone_mode=False)
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())[-1] == "step_000004"
    assert "report: out/report.html" in capfd.readouterr().err


REWARD = """
import torch
SETS = {setter!r}
def switch(place):
    if place == {place!r}:
        exec(SETS, globals())
switch("import")
class Switch:
    def __init__(self):
        switch("construction")
    def score(self, samples, *, context):
        switch("call")
        return [0.0] * len(samples)
"""


@pytest.mark.slow
@pytest.mark.sweep("rewards that change torch's settings, the weights after training")
def test_the_weights_are_those_without_the_reward(tmp_path, sweep):
    from mmrl.cli import app
    from tests.support.hostile_runs import RECIPE

    def weights(name, *more):
        out = tmp_path / name
        rewards = ", ".join(["{name: shapes}", *more])
        app(
            ["train", *RECIPE, "train.steps=2", "eval.every=2", f"rewards=[{rewards}]", "--out", str(out)],
            standalone_mode=False,
        )
        return load_file(out / "checkpoints" / "step_000002" / "weights.safetensors")

    plain = weights("plain")
    cases = [*itertools.product(ALL, ("import", "construction", "call"))]
    cases.remove(("handler", "call"))  # Python takes handlers of signals in the main thread alone
    every = max(1, len(cases) // sweep.size(3, len(cases)))
    for number, (name, place) in enumerate(cases[::every]):
        file = tmp_path / f"reward_{number}.py"
        file.write_text(REWARD.format(setter=ALL[name], place=place))
        found = weights(f"run{number}", f"{{name: '{file}:Switch', label: switch, weight: 0}}")
        same = found.keys() == plain.keys() and all(torch.equal(found[key], plain[key]) for key in plain)
        sweep.check(same, f"{name} at {place}")
    sweep.done()
