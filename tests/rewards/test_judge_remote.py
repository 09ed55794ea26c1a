"""Judges behind endpoints: a real server whose answers weights write, hostile ones, and a vLLM of our own."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging import remote
from mmrl.rewards.judging.server import VllmServer
from mmrl.rewards.scoring import RewardError, RewardSet
from tests.support import judging

REPO = Path(__file__).resolve().parents[2]
NUMBER = {"type": "number", "min": 0, "max": 10}


@pytest.fixture(scope="module")
def unsure(tmp_path_factory):
    """A model that says yes to some questions more often than to others, and never always."""
    shares = {"a": 4, "b b": 2, "a longer c": 1}
    pairs = [(q, "yes" if i < yes else "no") for q, yes in shares.items() for i in range(5)]
    return judging.taught(tmp_path_factory.mktemp("unsure"), pairs, 120, within=0.5)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return judging.taught(
        tmp_path_factory.mktemp("taught"), [("good", "7"), ("bad", "2"), ("prose", "I like it.")], 300
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_BACKOFF_S", 0.01)


def judge(url, rubric="{{ response }}", **options):
    model = {**({"url": url, "name": "tiny"} if url else {}), **options.pop("model", {})}
    return mmrl.load("rewards", "judge:score")(model=model, rubric=rubric, **options)


def sample(text="good", k=0, **more):
    return Sample(Prompt("p", "what"), SampleId(3, 1, 0, k), text=text, **more)


def ask(one, *texts, **more):
    return asyncio.run(one.score([sample(t, k) for k, t in enumerate(texts)], context=Context(**more)))["score"]


@pytest.mark.slow
def test_the_endpoint_and_the_model_in_process_agree(unsure):
    texts = ("a", "b b", "a longer c")
    with judging.Served(unsure) as server:
        there = ask(judge(server.url), *texts)
        body = server.requests[0]
    assert (body["max_tokens"], body["top_logprobs"], body["temperature"]) == (1, 20, 1.0)
    local = mmrl.load("rewards", "judge:score")(model=unsure, rubric="{{ response }}")
    here = local.score([sample(t) for t in texts], context=Context())["score"]
    assert there == pytest.approx(here, abs=1e-4)
    assert here == pytest.approx([0.8, 0.4, 0.2], abs=0.1)  # graded, as it was taught


@pytest.mark.slow
def test_neither_word_among_the_likeliest_tokens_is_a_failure(learned):
    with judging.Served(learned) as server:
        (failed,) = ask(judge(server.url, answer={"type": "yes_no", "yes": "\u00e9", "no": "\u00fc"}), "good")
    assert "begins with neither" in failed.reason


def test_written_verdicts_and_prose(learned):
    with judging.Served(learned) as server:
        one = judge(server.url, answer=NUMBER, max_tokens=16, reasks=1)
        good, bad, prose = ask(one, "good", "bad", "prose")
        seeds = [b["seed"] for b in server.requests if b["messages"][0]["content"] == "prose"]
        temperatures = [b["temperature"] for b in server.requests if b["messages"][0]["content"] == "prose"]
    assert [good, bad] == [pytest.approx(0.7), pytest.approx(0.2)]
    assert "is no number (2 times): 'I like it.'" in prose.reason
    assert len(set(seeds)) == 2
    assert temperatures == [0.0, 0.7]


def test_an_answer_that_was_cut_says_so(learned):
    with judging.Served(learned) as server:
        (prose,) = ask(judge(server.url, answer=NUMBER, max_tokens=4, reasks=0), "prose")
    assert "cut at max_tokens 4" in prose.reason


def test_requests_run_at_once_up_to_the_limit_also_over_micro_batches(learned):
    together = threading.Barrier(3, timeout=60)

    def slow(handler, body):
        if body is not None:
            if len(handler.server.requests) <= 3:
                together.wait()
            time.sleep(0.15)
        return False

    with judging.Served(learned, before=slow) as server:
        options = {"model": {"url": server.url, "name": "tiny"}, "rubric": "{{ response }}", "concurrency": 3}
        options |= {"answer": NUMBER, "max_tokens": 4, "cache": False}
        rewards = RewardSet([Reward(name="judge", timeout=0.2, on_failure="drop", options=options)])
        scoring = rewards.start(1)
        for k in range(4):  # 0.45 s in all: longer than the recipe's timeout, which is not a judge's
            scoring.add([sample("good", 2 * k), sample("bad", 2 * k + 1)])
        scores = scoring.finish([list(range(8))])
        rewards.close()
        assert server.most == 3
    assert scores.total.tolist() == pytest.approx([0.7, 0.2] * 4)


def test_requests_are_timed_without_their_wait_for_a_turn(learned):
    def slow(handler, body):
        time.sleep(0.1 if body is not None else 0.0)
        return False

    with judging.Served(learned, before=slow) as server:
        options = {"model": {"url": server.url, "name": "tiny"}, "rubric": "{{ response }}", "concurrency": 2}
        options |= {"answer": NUMBER, "max_tokens": 4, "cache": False}
        rewards = RewardSet([Reward(name="judge", options=options)])
        answer = rewards.answer("judge", [sample("good", k) for k in range(6)], 1)
        rewards.close()
    asked, wall = answer.asked, answer.ended - answer.began
    assert (asked.requests, asked.at_once) == (6, 2)
    assert 0.6 <= asked.seconds <= 2 * wall  # with their waits it would be 0.1 + 0.1 + 0.2 + 0.2 + 0.3 + 0.3 at least


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reply(status, text, kind="application/json", **headers):
    def before(handler, body):
        if body is None:
            return False
        handler.say(status, text, kind, **headers)
        return True

    return before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "reason", "asked"),
    [
        (reply(200, "<html>log in</html>", "text/html"), "answered text/html that is no chat completion.*log in", 1),
        (reply(200, '{"choices": [{"message"'), "that is no chat completion", 1),
        (reply(200, "[" * 100_000), "that is no chat completion", 1),
        (reply(200, '{"choices": {}}'), "that is no chat completion", 1),
        (reply(200, '{"choices": []}'), r"answered 200 with no choice \(after 3 attempts\)", 3),
        (reply(200, ""), r"answered 200 with an empty body \(after 3 attempts\)", 3),
        (reply(200, '{"choices": [{"message": {"content": null}}]}'), r"with an empty text \(after 3 attempts\)", 3),
        (reply(200, '{"choices": [{"message": {"content": " "}}]}'), r"with an empty text \(after 3 attempts\)", 3),
        (reply(200, '{"choices": [{"message": {"content": null, "refusal": "no"}}]}'), "a choice without text", 1),
        (reply(200, b"\xff\xfe\x00", "application/json"), "that is no chat completion", 1),
        (reply(400, '{"error": "too long"}'), "answered 400: .*too long", 1),
        (reply(404, "<html>nginx</html>", "text/html"), "answered 404", 1),
        (reply(502, "<html>bad gateway</html>", "text/html"), r"answered 502.*bad gateway.*\(after 3 attempts\)", 3),
        (reply(503, "busy"), r"answered 503: 'busy' \(after 3 attempts\)", 3),
        (judging.hang, r"no answer within 0.6 s.*\(after 3 attempts\)", 3),
        (reply(200, "x" * (9 << 20)), "more than 8,388,608 bytes", 1),
    ],
)
def test_what_goes_wrong_is_a_named_failure_of_the_sample(before, reason, asked):
    with judging.Served(before=before) as server:
        one = judge(server.url, answer=NUMBER, retries=2, timeout=0.6 if before is judging.hang else 60)
        (failed,) = ask(one, "a")
        assert isinstance(failed, Failed)
        assert re.search(reason, failed.reason), failed.reason
        assert server.url in failed.reason
        until(lambda: len(server.requests) == asked)


def test_a_connection_that_breaks_is_tried_again():
    def cut(handler, body):
        if body is None:
            return False
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        handler.connection.shutdown(socket.SHUT_RDWR)
        return True

    with judging.Served(before=cut) as server:
        (failed,) = ask(judge(server.url, answer=NUMBER, retries=1), "a")
        assert "the connection failed" in failed.reason
        assert len(server.requests) == 2


def test_a_slow_drip_is_cut_at_the_deadline():
    def drip(handler, body):
        if body is None:
            return False
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(400):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
        return True

    with judging.Served(before=drip) as server:
        began = time.perf_counter()
        (failed,) = ask(judge(server.url, answer=NUMBER, retries=0, timeout=0.3), "a")
        assert "no answer within 0.3 s" in failed.reason
        assert time.perf_counter() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_429_waits_as_long_as_it_is_told(learned, form):
    def once(handler, body):
        if body is None or len(handler.server.requests) > 1:
            return False
        after = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
        handler.say(429, '{"error": "slow down"}', Retry_After=after)
        return True

    with judging.Served(learned, before=once) as server:
        began = time.perf_counter()
        assert ask(judge(server.url, answer=NUMBER, max_tokens=8), "good") == [pytest.approx(0.7)]
        assert time.perf_counter() - began >= 0.9
        assert len(server.requests) == 2


def test_no_wait_is_longer_than_the_limit_and_nonsense_is_none():
    after = remote._retry_after
    assert [after(v) for v in (None, "3", "-3", "soon", "nan", "inf", "1e9")] == [0, 3, 0, 0, 0, 0, 1e9]
    dates = [
        f"Fri, 31 Dec {'9' * n} 23:59:59 {zone}"
        for n in (1, 4, 5, 20, 5000)
        for zone in ("GMT", "-2359", "+" + "9" * 30)
    ]
    assert all(after(date) >= 0 for date in [*dates, "Mon, 01 Jan 0001 00:00:00 -0000", "1 Jan 2026 25:61:61", ",,"])
    assert remote.MAX_BACKOFF_S == 60


def test_an_endpoint_without_log_probs_says_what_to_do(learned):
    with judging.Served(learned, log_probs=False) as server:
        (failed,) = ask(judge(server.url), "good")
    assert "gives no log-probs" in failed.reason
    assert "number or json" in failed.reason


def test_a_failing_judge_stops_the_run_or_drops_and_is_no_0(learned):
    with judging.Served(before=reply(200, "<html>", "text/html")) as server:
        options = {"model": {"url": server.url, "name": "tiny"}, "rubric": "{{ response }}", "answer": NUMBER}
        with pytest.raises(RewardError, match=r"reward 'judge' \(judge\).*no chat completion[\s\S]*on_failure: drop"):
            RewardSet([Reward(name="judge", options=options)]).score([sample()], [[0]], step=2)
        dropped = RewardSet([Reward(name="judge", on_failure="drop", options=options)]).score([sample()], [[0]])
    assert torch.isnan(dropped.total).all()
    assert "no chat completion" in dropped.failures[0].reason


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (reply(200, "x"), None),  # /models answers as it should
        (
            lambda h, b: h.say(200, "<html>hello</html>", "text/html") or True,
            "answered 200 text/html, not a list of models",
        ),
        (lambda h, b: h.say(500, "{}") or True, "answered 500"),
        (lambda h, b: h.say(401, "{}") or True, "refuses the token"),
        (lambda h, b: h.say(200, '{"data": [{"id": "other"}]}') or True, "has no 'tiny'; it has other"),
        (lambda h, b: h.say(404, "{}") or True, None),  # a gateway without a list
    ],
)
def test_a_wrong_address_is_known_before_training(before, reason):
    with judging.Served(before=before) as server:
        if reason is None:
            judge(server.url)
        else:
            with pytest.raises(UserError, match=reason):
                judge(server.url)


def test_an_endpoint_that_is_down_is_known_before_training():
    with pytest.raises(UserError, match="cannot be reached"):
        judge("http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"url": "http://judge.example/v1"}, "plain HTTP to another machine"),
        ({"url": "ftp://judge.example"}, "is no address"),
        ({"url": "https://user:secret@judge.example/v1"}, "keep the password out"),
        ({"token": "sk-123"}, r"name an environment variable \(\$NAME\)"),
        ({"token": "$NOT_SET_HERE"}, "NOT_SET_HERE is not set"),
    ],
)
def test_addresses_and_tokens_that_would_leak_are_refused(model, reason):
    with pytest.raises(UserError, match=reason) as refused:
        judge("http://127.0.0.1:9/v1", model=model)
    assert "sk-123" not in str(refused.value)
    assert "secret@" not in str(refused.value)


def test_the_token_is_sent_and_never_told(learned, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-hidden")
    with judging.Served(learned, key="sk-hidden") as server:
        one = judge(server.url, model={"token": "$JUDGE_KEY"}, answer=NUMBER, max_tokens=8)
        assert ask(one, "good", folder=tmp_path, label="j") == [pytest.approx(0.7)]
        (failed,) = ask(judge(server.url, answer=NUMBER), "good")
        assert "answered 401" in failed.reason
    assert all("sk-hidden" not in file.read_text() for file in tmp_path.iterdir())


def test_extra_fields_are_sent_and_null_removes_one(learned):
    with judging.Served(learned) as server:
        extra = {"chat_template_kwargs": {"enable_thinking": False}, "seed": None}
        ask(judge(server.url, model={"extra": extra}, answer=NUMBER, max_tokens=8, system="Be strict."), "good")
        body = server.requests[0]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "seed" not in body
    assert body["messages"][0] == {"role": "system", "content": "Be strict."}


def test_pictures_and_frames_travel_in_their_places(learned, monkeypatch):
    def png(colour):
        import io

        buffer = io.BytesIO()
        Image.new("RGB", (5, 4), colour).save(buffer, "PNG")
        return Media("image", data=buffer.getvalue())

    prompt = Prompt("p", "Is <image> so?", media=(png("red"),))
    made = Sample(prompt, SampleId(0, 0, 0, 0), Image.new("RGB", (3, 2), "blue"), text="yes")
    with judging.Served(learned) as server:
        one = judge(server.url, rubric="{{ prompt }} {{ image }} {{ response }}", answer=NUMBER, reasks=0, max_tokens=1)
        asyncio.run(one.score([made], context=Context()))
        (body,) = server.requests
    content = body["messages"][0]["content"]
    assert [part.get("text", "picture") for part in content] == ["Is ", "picture", " so? ", "picture", " yes"]
    assert [(p.size, p.getpixel((0, 0))) for p in judging.picture_of(body)] == [
        ((5, 4), (255, 0, 0)),
        ((3, 2), (0, 0, 255)),
    ]


def test_frames_of_a_clip_are_pictures_in_order(learned):
    av = pytest.importorskip("av")
    import io

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as clip:
        stream = clip.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for shade in range(0, 240, 20):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (shade,) * 3))
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())
    prompt = Prompt("p", "Does <video> grow brighter?", media=(Media("video", data=buffer.getvalue()),))
    with judging.Served(learned) as server:
        one = judge(server.url, rubric="{{ prompt }} {{ response }}", frames=4, answer=NUMBER, reasks=0, max_tokens=1)
        asyncio.run(one.score([Sample(prompt, SampleId(0, 0, 0, 0), text="yes")], context=Context()))
        shades = [p.convert("L").getpixel((16, 16)) for p in judging.picture_of(server.requests[0])]
    assert len(shades) == 4
    assert shades == sorted(shades)
    assert shades[-1] - shades[0] > 100


def test_a_second_event_loop_gets_a_client_of_its_own(learned):
    with judging.Served(learned) as server:
        one = judge(server.url, answer=NUMBER, max_tokens=8, cache=False)
        results = [ask(one, "good")]
        thread = threading.Thread(target=lambda: results.append(ask(one, "bad")))
        thread.start()
        thread.join()
    assert results == [[pytest.approx(0.7)], [pytest.approx(0.2)]]


def test_a_vllm_that_is_not_there_or_does_not_start_is_a_clear_message(tmp_path):
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(UserError, match="vLLM is not installed"):
            judge(None, model={"vllm": "x"})
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"judge x did not start: it ended[\s\S]*no such model"):
        VllmServer("x", python=str(program))


SERVER = """#!{python}
import json, os, socketserver, sys, time
from http.server import BaseHTTPRequestHandler

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"data": [{{"id": "judge"}}]}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        if question == "bad" and first:
            print("thinking", flush=True)
            time.sleep(600)
        said = str((body["seed"] + len(question)) % 10)
        self.reply({{"choices": [{{"message": {{"content": said}}, "finish_reason": "stop"}}]}})

    def reply(self, what):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def address_string(self):
        return "us"

class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

first = not os.path.exists({mark!r})
open({mark!r}, "a").write(f"{{os.getpid()}} ")
Server(sys.argv[sys.argv.index("--uds") + 1], Answers).serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_of_our_own_that_is_lost_is_started_again_and_says_the_same(tmp_path, capfd, how):
    program, mark = tmp_path / "python", tmp_path / "mark"
    program.write_text(SERVER.format(python=sys.executable, mark=str(mark)))
    program.chmod(0o755)
    model = {"vllm": "x", "python": str(program)}
    one = judge(None, model=model, answer=NUMBER, votes=3, vote="mean", temperature=1.0, cache=False)
    calm = judge(None, model=model, answer=NUMBER, votes=3, vote="mean", temperature=1.0, cache=False)
    try:
        one.wake("cpu")
        first = one.served.server
        asking = ThreadPoolExecutor(2)
        found = [asking.submit(ask, one, *texts) for texts in (("good", "bad"), ("fair", "bad", "worse"))]
        until(lambda: "thinking" in first._process.last_lines())
        began = time.monotonic()
        os.kill(int(mark.read_text()), how)
        answers = [answer.result(500) for answer in found]
        assert time.monotonic() - began < 500  # and no answer takes 600 s
        assert len(mark.read_text().split()) == 2  # one other was started, for all who asked
        said = capfd.readouterr().err
        assert "the vLLM server of the judge x is lost" in said
        assert ("was stopped (SIGSTOP)" in said) == (how == signal.SIGSTOP)
        assert answers == [ask(calm, "good", "bad"), ask(calm, "fair", "bad", "worse")]
        assert len({value for row in answers for value in row}) > 1
    finally:
        one.close()
        calm.close()


@pytest.mark.slow
def test_a_vllm_of_our_own_answers_as_the_model_in_process(unsure):
    pytest.importorskip("vllm")
    options = {"model": {"vllm": unsure, "args": VLLM_ARGS}, "rubric": "{{ response }}", "retries": 0}
    rewards = RewardSet([Reward(name="judge", on_failure="drop", options=options)])
    server = rewards._entries[0].loaded.call.__self__.served.server
    texts = ["a", "b b", "a longer c"]
    there = rewards.score([sample(t, k) for k, t in enumerate(texts)], [[0, 1, 2]])
    rewards.close()
    assert server.ended()
    local = mmrl.load("rewards", "judge:score")(model=unsure, rubric="{{ response }}")
    here = local.score([sample(t) for t in texts], context=Context())["score"]
    assert not there.failures
    assert there.total.tolist() == pytest.approx(here, abs=1e-3)


@pytest.mark.slow
def test_a_vllm_of_our_own_writes_by_the_schema(tmp_path):
    """A random model, which knows no JSON, gives a verdict."""
    pytest.importorskip("vllm")
    model = judging.text_model(tmp_path / "judge")
    field = {"type": "integer", "minimum": 0, "maximum": 10}
    schema = {"type": "object", "properties": {"score": field}, "required": ["score"], "additionalProperties": False}
    args = {**VLLM_ARGS, "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    one = judge(None, model={"vllm": model, "args": args}, answer={"type": "json", "schema": schema}, reasks=0)
    try:
        scores = ask(one, "a", "b b", "a longer c")
    finally:
        one.close()
    assert all(isinstance(score, float) for score in scores), scores


@pytest.mark.long
@pytest.mark.slow
def test_a_vllm_of_our_own_ends_when_we_are_killed(unsure):
    pytest.importorskip("vllm")
    program = (
        "import json, sys, time; from mmrl.rewards.judging.server import VllmServer\n"
        "server = VllmServer(sys.argv[1], json.loads(sys.argv[2]))\n"
        "print(server._process._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, unsure, json.dumps(VLLM_ARGS)], stdout=subprocess.PIPE, text=True
    )
    group = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: not members(group))


VLLM_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 64 * 2**20,
    "max_num_seqs": 8,
}


def members(group):
    """Processes of a group that live."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry))
    return found


def test_a_judge_with_a_server_of_its_own_ends_it_to_sleep_and_starts_it_to_wake(tmp_path):
    program, mark = tmp_path / "python", tmp_path / "mark"
    mark.write_text("")  # no answer takes long
    program.write_text(SERVER.format(python=sys.executable, mark=str(mark)))
    program.chmod(0o755)
    one = judge(None, model={"vllm": "x", "python": str(program)}, answer=NUMBER, cache=False)
    try:
        one.sleep("cpu")  # before it was started
        assert one.wake("cpu") is False
        first, answers = one.served.server, ask(one, "good", "fair")
        one.sleep("cpu")
        assert one.served.server is None
        assert one.wake("cpu") is False  # it will be ended again, so this is what waking takes
        assert one.served.server is not first
        assert ask(one, "good", "fair") == answers
    finally:
        one.close()
