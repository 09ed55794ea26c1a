"""What rollout engines share: budgets, checks of what came back, weights as files, and servers that die with us."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.errors import LostServerError, UserError
from mmrl.core.notices import listen
from mmrl.core.rollout_engine import Request, Settings
from mmrl.inference import engine_weights
from mmrl.inference.engine_weights import Allowance, Counted, allowances, completion, values_of, write_adapter
from mmrl.inference.lazy_engine import RESTARTS, LazyEngine, unfailing
from mmrl.inference.server_process import Client, Process, flags
from mmrl.inference.vllm import engine_arguments, sampling_parameters
from mmrl.inference.weight_files import write_weights
from tests.support.ranks import free_port


def ask(prompt=5, partial=(), seed=7, **extra):
    return Request(list(range(prompt)), "What is 2 + 3?", seed=seed, partial=partial, **extra)


def test_how_much_a_call_may_draw():
    def tokens(request, **settings):
        (made,) = allowances([request], Settings(10, **settings), max_model_len=20)
        return made.tokens, made.at_end

    assert tokens(ask()) == (10, "length")
    assert tokens(ask(partial=[1] * 4)) == (6, "length")
    assert tokens(ask(partial=[1] * 10)) == (0, "length")
    assert tokens(ask(partial=[1] * 12)) == (0, "length")
    assert tokens(ask(prompt=15)) == (5, "length")  # the context ends first
    assert tokens(ask(), cut_after=4) == (4, "cut")
    assert tokens(ask(partial=[1] * 7), cut_after=4) == (3, "length")
    assert tokens(ask(partial=[1] * 6), cut_after=4) == (4, "length")


def test_what_goes_on_is_drawn_with_other_numbers():
    seeds = [allowances([ask(partial=[1] * n)], Settings(10), 64)[0].seed for n in (0, 3, 4, 3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert seeds[1] == seeds[3]


def test_prompts_that_do_not_fit_are_counted_and_the_first_is_named():
    requests = [ask(), ask(prompt=20), ask(prompt=30, name="sums/8")]
    with pytest.raises(UserError, match=r"2 of 3 prompts .* context of 20 tokens; .* 1 \('What is 2 \+ 3\?'\) with 20"):
        allowances(requests, Settings(10), 20)


def test_an_answer_is_checked():
    allowance = Allowance(8, "cut", 0)

    def answer(tokens, log_probs, finish):
        return completion(ask(partial=[9]), allowance, tokens, log_probs, finish, 6, "the engine")

    cut = answer([1, 2], [-0.5, -1.0], "length")
    assert (cut.finish, cut.prompt_tokens, cut.token_ids) == ("cut", 5, [1, 2])
    assert answer([1], [-0.5], "stop").finish == "stop"
    with pytest.raises(UserError, match=r"ended sample .* with 'abort'"):
        answer([1], [-0.5], "abort")
    with pytest.raises(UserError, match="2 tokens and 1 log-probs"):
        answer([1, 2], [-0.5], "stop")
    for broken in (float("nan"), float("-inf"), -9999.0):
        with pytest.raises(UserError, match="the weights it was sent are not finite"):
            answer([1], [broken], "stop")


def test_a_prompt_that_was_read_otherwise_is_named_with_both_counts():
    engine_weights.check_prompt(ask(partial=[9]), [0, 1, 2, 3, 4, 9], "it")
    with pytest.raises(UserError, match=r"it made 6 tokens .* sample scenes/1 .* processor 5 \(they part at token 3\)"):
        engine_weights.check_prompt(ask(partial=[9], name="scenes/1"), [0, 1, 2, 2, 3, 4, 9], "it")
    with pytest.raises(UserError, match=r"it made 4 tokens .* processor 5"):
        engine_weights.check_count(ask(), 4, "it")


def test_an_update_must_bring_every_weight(tmp_path):
    weights = {"model.embed": torch.randn(40, 50), "lm_head.weight": torch.randn(40, 50), "norm": torch.randn(50)}
    write_weights(tmp_path / "m", weights.items())
    for tied, expected in ((False, 4050), (True, 2050)):
        (tmp_path / "m" / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": tied}}))
        assert values_of(tmp_path / "m") == expected
    counted = Counted((k, v) for k, v in weights.items() if k != "norm")
    assert len(dict(counted)) == 2
    counted.check(4000, "it")
    with pytest.raises(UserError, match=r"brought 4,000 values in 2 tensors for it, and its model has 4,050"):
        counted.check(4050, "it")


def test_an_adapter_is_what_peft_reads(tmp_path):
    peft = pytest.importorskip("peft")
    write_adapter(tmp_path / "a", {"x.lora_A.weight": torch.ones(4, 8)}, 4, 8.0, ["q_proj"])
    config = peft.LoraConfig.from_pretrained(str(tmp_path / "a"))
    assert (config.r, config.lora_alpha, config.target_modules) == (4, 8.0, {"q_proj"})
    assert list(load_file(tmp_path / "a" / "adapter_model.safetensors")) == ["x.lora_A.weight"]


def test_vllm_is_asked_for_what_the_recipe_says():
    made = engine_arguments(
        "m",
        cpu=True,
        max_model_len=64,
        dtype="auto",
        images=2,
        clips=0,
        lora_rank=24,
        options={"max_num_seqs": 8, "enforce_eager": False},
    )
    assert made["dtype"] == "float32"
    assert made["logprobs_mode"] == "processed_logprobs"
    assert made["limit_mm_per_prompt"] == {"image": 2, "video": 0}
    assert (made["enable_lora"], made["max_lora_rank"], made["max_num_seqs"]) == (True, 32, 8)
    assert (made["enforce_eager"], made["enable_chunked_prefill"]) == (False, False)
    gpu = engine_arguments(
        "m", cpu=False, max_model_len=64, dtype="bfloat16", images=0, clips=0, lora_rank=None, options={}
    )
    assert not {"enable_lora", "limit_mm_per_prompt", "enforce_eager", "enable_chunked_prefill"} & gpu.keys()
    with pytest.raises(UserError, match="rank 512 at most, not 600"):
        engine_arguments("m", cpu=True, max_model_len=64, dtype="auto", images=0, clips=0, lora_rank=600, options={})
    with pytest.raises(UserError, match="engine options: max_model_len, model: set by the recipe's other keys"):
        engine_arguments(
            "m",
            cpu=True,
            max_model_len=64,
            dtype="auto",
            images=0,
            clips=0,
            lora_rank=None,
            options={"model": 1, "max_model_len": 3},
        )
    said = sampling_parameters(Allowance(8, "cut", 3), Settings(20, temperature=0.5, stop_token_ids=(4, 5)))
    assert (said["max_tokens"], said["seed"], said["temperature"], said["top_k"]) == (8, 3, 0.5, 0)
    assert (said["ignore_eos"], said["stop_token_ids"], said["logprobs"]) == (True, [4, 5], 0)


def test_flags():
    made = flags({"max_model_len": 64, "eager": True, "cache": False, "limit": {"image": 1}}, off="no-")
    assert made == ["--max-model-len", "64", "--eager", "--no-cache", "--limit", '{"image": 1}']
    assert flags({"cache": False}, off=None) == []


def running(group):
    """Processes of a group that run; one whose parent has not noticed its end does not."""
    listed = subprocess.run(["ps", "-o", "stat=,pid=", "-g", str(group)], capture_output=True, text=True).stdout
    return [line.split()[1] for line in listed.splitlines() if not line.startswith("Z")]


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


TREE = "import subprocess, sys, time; subprocess.Popen(['sleep', '100']); print('up', flush=True); time.sleep(100)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
)
STARTER = """
import sys, time
from pathlib import Path
from mmrl.inference.server_process import Process
folder = Path(sys.argv[1])
process = Process("it", [sys.executable, "-c", sys.argv[2]], {}, folder, folder.parent / "log")
process.wait_until(lambda: "up" in process.last_lines(), 60)
print(process._process.pid, flush=True)
time.sleep(100)
"""


def started(code, folder):
    folder.mkdir()
    process = Process("it", [sys.executable, "-c", code], {}, folder, folder.parent / "log")
    process.wait_until(lambda: "up" in process.last_lines(), 60)
    return process


def test_a_process_ends_with_all_its_children_and_its_folder(tmp_path):
    process = started(TREE, tmp_path / "private")
    group = process._process.pid
    assert len(running(group)) == 4
    process.close()
    process.close()
    until(lambda: not running(group))  # one that was killed may need a moment of a busy machine to end
    assert not (tmp_path / "private").exists()


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("child_too", [False, True])  # Ray kills both
def test_a_process_ends_when_its_starter_is_killed(tmp_path, death, child_too):
    (tmp_path / "private").mkdir()
    command = [sys.executable, "-c", STARTER, str(tmp_path / "private"), TREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        group = int(starter.stdout.readline())
        assert len(running(group)) == 4
        if child_too:
            os.kill(group, signal.SIGKILL)
        os.kill(starter.pid, death)
    until(lambda: not running(group))
    assert not (tmp_path / "private").exists()


def test_a_process_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.inference.server_process._CLOSE_S", 0.5)
    process = started(STUBBORN, tmp_path / "private")
    process.close()
    until(lambda: not running(process._process.pid))


def test_a_process_that_does_not_start_shows_its_last_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.inference.server_process.PROGRESS_EVERY_S", 0.1)
    monkeypatch.setattr("mmrl.inference.server_process._CLOSE_S", 0.5)
    folder = tmp_path / "private"
    folder.mkdir()
    code = (
        "import os, sys, time; print('loading')\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "print('no memory left'); raise SystemExit(3)"
    )
    said, go_on = "", tmp_path / "go on"
    process = Process("the server", [sys.executable, "-u", "-c", code, str(go_on)], {}, folder, folder / "log")

    def ready():
        nonlocal said
        said += capsys.readouterr().err
        if re.search(r"the server is starting, \d+ s: loading", said):
            go_on.touch()
        return False

    with pytest.raises(UserError, match=r"the server did not start: it ended\.(.|\n)*no memory left\n.*with status 3"):
        process.wait_until(ready, 60)
    assert go_on.exists(), said
    process = started(STUBBORN, tmp_path / "other")
    with pytest.raises(UserError, match=r"not ready after 0 s \(raise start_timeout_s\)"):
        process.wait_until(lambda: False, 0)
    assert process.ended()


class Answers(BaseHTTPRequestHandler):
    """Says what ``replies`` holds for a path; a float there is how long it stays silent."""

    replies: dict = {}  # noqa: RUF012 (one server per test)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = self.replies[self.path]
        if isinstance(reply, float):
            time.sleep(reply)
            reply = (200, b"{}")
        with contextlib.suppress(BrokenPipeError):
            self.send_response(reply[0])
            self.end_headers()
            self.wfile.write(reply[1])

    def log_message(self, *_):
        pass


def replies(client, path, bodies):
    """The answers to requests that are under way together, in order."""
    names, found = [f"{path} {n}" for n in range(len(bodies))], {}
    for name, body in zip(names, bodies, strict=True):
        client.begin(name, path, body)
    while len(found) < len(names):
        found |= dict(client.answers(names, None))
    return [found[name] for name in names]


def test_what_a_server_answers_is_never_taken_for_something_else(tmp_path):
    Answers.replies = {
        "/ok": (200, b'{"a": 1}'),
        "/empty": (200, b""),
        "/html": (502, b"<html><body>Bad\n gateway</body></html>"),
        "/error": (400, b'{"error": {"message": "too long", "code": 400}}'),
        "/slow": 2.0,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    client, hasty = Client("the server", url), Client("the server", url, timeout_s=0.3)
    try:
        assert replies(client, "/ok", [{}] * 5) == [{"a": 1}] * 5
        assert client.answers([], 0.01) == []
        assert client.post("/empty") is None
        with pytest.raises(UserError, match="refused /html with status 502: <html><body>Bad gateway</body></html>"):
            client.post("/html")
        with pytest.raises(UserError, match="refused /error with status 400: too long"):
            replies(client, "/error", [{}, {}])
        with pytest.raises(UserError, match=r"did not answer /slow within 0 s; raise request_timeout_s"):
            hasty.post("/slow")
        with pytest.raises(UserError, match=r"did not answer /slow within 0 s; raise request_timeout_s"):
            replies(hasty, "/slow", [{}])
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(UserError, match=r"could not be asked .* the right server, and is it up"):
        client.post("/ok")
    assert not client.healthy()
    log = tmp_path / "log"
    (tmp_path / "private").mkdir()
    process = Process("it", [sys.executable, "-c", "print('out of memory')"], {}, tmp_path / "private", log)
    until(process.ended)
    client = Client("it", "http://vllm", socket_path=Path(tmp_path / "none"), process=process)
    with pytest.raises(LostServerError, match=r"it ended with status 0\. The end of .*\n.*out of memory"):
        client.post("/ok")
    process.close()


SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("slow"):
            print("drawing", flush=True)
            time.sleep(600)
        self.reply({"seed": body.get("seed")})

    def reply(self, what):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

subprocess.Popen(["sleep", "100"])
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


class Served:
    """An engine in a process of its own; slow at what is asked of the first one."""

    sleeps, max_model_len, alive = False, 64, 0

    def __init__(self, folder):
        folder = folder / f"{Served.alive}"
        folder.mkdir()
        port, Served.alive = free_port(), Served.alive + 1
        self.slow, self.weights, self.log = Served.alive == 1, None, folder.parent / f"{folder.name}.log"
        self.process = Process("it", [sys.executable, "-c", SERVER, str(port)], {**os.environ}, folder, self.log)
        self.client = Client("it", f"http://127.0.0.1:{port}", process=self.process)
        self.process.wait_until(self.client.healthy, 60)

    def generate(self, requests, settings):
        bodies = [{"seed": r.seed, "slow": self.slow and r.seed == 2} for r in requests]
        return [(said["seed"], self.weights) for said in replies(self.client, "/generate", bodies)]

    def update(self, weights):
        self.weights = dict(weights)["w"].item()

    def close(self):
        self.client.close()
        self.process.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "which", "why"),
    [
        (signal.SIGKILL, 2, r"it ended with status -9 \(SIGKILL\)"),  # the server
        (signal.SIGKILL, 1, "it was killed, and what kept it"),  # its keeper
        (signal.SIGSTOP, 2, r"its process \d+ was stopped"),
        (signal.SIGSTOP, 3, r"its process \d+ was stopped"),  # a process of the server's
    ],
)
def test_a_server_that_dies_or_freezes_is_named_started_again_and_asked_for_the_same(
    tmp_path, capfd, monkeypatch, how, which, why
):
    monkeypatch.setattr(Served, "alive", 0)
    engine = LazyEngine(lambda: Served(tmp_path), to_sleep=False)
    engine.wake()
    first = engine._engine
    members = first.process.members()
    assert len(members) == 4
    weights = {"w": torch.tensor(3.0)}
    unfailing(engine, lambda: None, lambda: engine.update(iter(weights.items())))
    lost = {}

    def lose():
        until(lambda: "drawing" in first.process.last_lines())
        os.kill(members[which].pid, how)
        lost["at"] = time.monotonic()

    Thread(target=lose).start()
    requests = [Request([1], "", seed=n) for n in range(4)]
    answered = unfailing(
        engine, lambda: engine.update(iter(weights.items())), lambda: engine.generate(requests, Settings(4))
    )
    try:
        assert answered == [(n, 3.0) for n in range(4)]
        assert time.monotonic() - lost["at"] < 500
        assert Served.alive == 2
        until(lambda: not running(first.process._process.pid))
        assert re.search(rf"it is lost: {why}.*The end of (.|\n)*drawing", capfd.readouterr().err)
    finally:
        engine.close()


def test_a_server_that_is_lost_time_and_again_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Served, "alive", 0)
    engine = LazyEngine(lambda: Served(tmp_path), to_sleep=False)

    def killed():
        engine.wake()
        os.kill(engine._engine.process.members()[2].pid, signal.SIGKILL)
        engine.generate([Request([1], "", seed=2)], Settings(4))

    with pytest.raises(LostServerError, match="ended with status -9"):
        unfailing(engine, lambda: None, killed)
    assert Served.alive == 1 + RESTARTS
    engine.close()


def test_a_server_that_is_stopped_while_it_starts_is_not_waited_for(tmp_path):
    (tmp_path / "private").mkdir()
    process = Process("it", [sys.executable, "-c", TREE], {}, tmp_path / "private", tmp_path / "log")
    until(lambda: "up" in process.last_lines())
    process.members()[2].send_signal(signal.SIGSTOP)
    with pytest.raises(LostServerError, match=r"its process \d+ was stopped"):
        process.wait_until(lambda: False, 60)
    until(lambda: not running(process._process.pid))


def test_who_watches_hears_of_a_server_that_dies_while_nobody_asks(tmp_path):
    heard = []
    listen(heard.append)
    try:
        process = started(TREE, tmp_path / "private")
        os.kill(process.members()[2].pid, signal.SIGKILL)
        until(lambda: heard)
    finally:
        listen(None)
    assert "it is lost: it ended with status -9" in heard[0]
    process.close()
