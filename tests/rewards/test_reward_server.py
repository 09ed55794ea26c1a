"""A reward behind HTTP, over real sockets: round trips, hostile requests, what the client says, other interpreters."""

import base64
import dataclasses
import gzip
import http.client
import io
import json
import re
import socket
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

import mmrl
import mmrl.rewards.http
from mmrl.config.schema import Reward
from mmrl.core.addresses import is_loopback
from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import subprocess_server, wire
from mmrl.rewards.scoring import RewardError, RewardSet
from mmrl.rewards.serve import RewardServer
from mmrl.rewards.subprocess_server import started_elsewhere
from tests.support import judging

REPO = Path(__file__).resolve().parents[2]

PARTS = """
import mmrl
from mmrl.core.reward_contract import Failed
def score(samples, *, context, factor=1):
    if any(s.prompt.text == "boom" for s in samples):
        raise ValueError("exploded")
    return {
        "score": [Failed("too dark") if s.image.getpixel((0, 0)) == (0, 0, 0) else
                  factor * s.image.getpixel((0, 0))[0] + s.prompt.meta["add"] for s in samples],
        "step": [context.step for s in samples],
    }
@mmrl.reward(per="group")
def rank(samples, *, context):
    reds = [s.image.getpixel((0, 0))[0] for s in samples]
    return [sorted(reds).index(r) for r in reds]
@mmrl.reward(inputs=("tensor",), differentiable=True)
def mean(samples, *, context):
    import torch
    return torch.stack([s.tensor.mean() for s in samples])
@mmrl.reward(inputs=("text",))
def length(samples, *, context):
    return [len(s.text) for s in samples]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PARTS)
    return path


@contextmanager
def serving(name, **settings):
    with RewardServer(str(name), port=0, **settings) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def samples(reds, prompt="p"):
    return [
        Sample(Prompt(f"id{i}", prompt, {"add": 0.5}), SampleId(4, i, 0, 0), Image.new("RGB", (4, 4), (red, 0, 0)))
        for i, red in enumerate(reds)
    ]


def remote(url, on_failure="drop", **options):
    return RewardSet([Reward(name="http:score", on_failure=on_failure, options={"url": url, **options})])


def post(server, body, path="/score", token=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {}), **headers}
    with closing(connection):
        connection.request("POST", path, body, sent)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def png(image, **save):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **save)
    return base64.b64encode(buffer.getvalue()).decode()


def body_of(*items, **more):
    return json.dumps({"version": 1, "samples": list(items), **more})


def test_a_remote_reward_scores_as_the_local_one(file):
    made = samples([100, 0, 200])
    local = RewardSet([Reward(name=str(file), label="http", on_failure="drop", options={"factor": 2})])
    here = local.score(made, [[0, 1, 2]], step=9)
    with serving(file, token="secret", options={"factor": 2}) as server:
        there = remote(server.url, token="secret", reward=str(file)).score(made, [[0, 1, 2]], step=9)
    assert there.total.tolist()[::2] == here.total.tolist()[::2] == [200.5, 400.5]
    assert there.total.isnan().tolist() == [False, True, False]
    assert there.parts["http/step"].tolist() == [9, 9, 9]
    assert (
        [(f.sample, f.reason) for f in there.failures]
        == [(made[1].id, "too dark")]
        == [(f.sample, f.reason) for f in here.failures]
    )


CLIPS = """
import mmrl

@mmrl.reward(inputs=("video",))
def score(samples, *, context):
    return [sum((i + 1) * f.getpixel((0, 0))[0] for i, f in enumerate(s.video)) for s in samples]

@mmrl.reward(inputs=("video", "tensor"))
def tensors(samples, *, context):
    return [float(s.tensor.sum()) + 100 * s.tensor.shape[0] for s in samples]
"""


def test_clips_are_sent_frame_by_frame(tmp_path):
    (tmp_path / "clips.py").write_text(CLIPS)
    made = [
        dataclasses.replace(s, image=None, video=tuple(Image.new("RGB", (2, 2), (n, 0, 0)) for n in levels))
        for s, levels in zip(samples([0, 0]), ([1, 2, 3], [3, 2, 1]), strict=True)
    ]
    with serving(f"{tmp_path}/clips.py") as server:
        asked = remote(server.url, inputs=["video"])
        assert asked.score(made, [[0, 1]], step=0).total.tolist() == [14, 10]
    with serving(f"{tmp_path}/clips.py:tensors") as server:
        told = remote(server.url, inputs=["video"]).score(made[:1], [[0]], step=0).total.tolist()
        assert told == [pytest.approx(300 + 4 * 6 / 255)]
    frame, other = png(Image.new("RGB", (9, 9))), png(Image.new("RGB", (8, 8)))
    with serving(f"{tmp_path}/clips.py", max_pixels=200) as server:
        clips = {"3 of 81 pixels": [frame] * 3, "different sizes": [frame, other], "none": []}
        status, answer = post(server, body_of(*({"video": clip} for clip in clips.values())))
        assert status == 200
        assert answer["scores"] == [None] * 3
        assert "at most 38 are read" in answer["errors"][0]
        assert "different sizes" in answer["errors"][1]
        assert "without frames" in answer["errors"][2]
        assert post(server, body_of({"video": "x"}))[0] == 400


def test_group_text_and_tensor_rewards_are_served_too(file):
    with serving(f"{file}:rank") as server:
        made = samples([50, 20, 90, 10, 60])
        scores = remote(server.url, per="group").score(made, [[0, 1, 2], [3, 4]], step=0)
        assert scores.total.tolist() == [1, 0, 2, 0, 1]
        with pytest.raises(RewardError, match=r"scores per group; set options\.per to group"):
            remote(server.url, "fail").score(made, [[0, 1, 2, 3, 4]], step=0)
    with serving(f"{file}:mean") as server:
        assert remote(server.url).score(samples([255]), [[0]], step=0).total.tolist() == [pytest.approx(1 / 3)]
    with serving(f"{file}:length") as server:
        words = [Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), text="seven c")]
        assert remote(server.url, inputs=["text"]).score(words, [[0]], step=0).total.tolist() == [7]
        with pytest.raises(RewardError, match=r"reads \['text'\]; set options.inputs"):
            remote(server.url, "fail").score(samples([1]), [[0]], step=0)


WHOLE = """
import hashlib, mmrl
from mmrl.core.media import open_image, read_bytes
from mmrl.core.reward_contract import Failed, Spans
seen = []
@mmrl.reward(inputs=("text",), spans=True)
def pieces(samples, *, context):
    for s in samples:
        media = [(m.kind, hashlib.md5(read_bytes(m)).hexdigest(), m.frames) for m in s.prompt.media]
        seen.append((s.prompt.system, media, s.id, s.truncated))
    cut = [s.truncated for s in samples]
    return {
        "score": [Failed("cut") if c else float(len(s.text)) for s, c in zip(samples, cut)],
        "red": [float(open_image(s.prompt.media[0]).getpixel((0, 0))[0]) for s in samples],
        "spans": [None if c else Spans([(0, 1, -1.0), (1, len(s.text), 0.5)]) for s, c in zip(samples, cut)],
    }
"""


def test_prompts_go_whole_and_spans_come_back(tmp_path):
    """System messages, media (a file once per request), the sample's place, and rewards of pieces of a response."""
    (tmp_path / "whole.py").write_text(WHOLE)
    Image.new("RGB", (4, 4), (9, 0, 0)).save(tmp_path / "red.png")
    shared = Media("image", path=str(tmp_path / "red.png"))
    clip = Media("video", data=b"no clip, only bytes", frames=(0, 7))
    prompt = Prompt("p", "<image><video>?", {}, (shared, clip), "Be brief.")
    texts = [("an é and more", False), ("cut", True), ("x", False)]
    made = [Sample(prompt, SampleId(4, 2, 1, k), text=t, truncated=c) for k, (t, c) in enumerate(texts)]
    made.append(Sample(Prompt("q", "?", {}, (shared,)), SampleId(4, 3, 0, 0), text="plain"))
    groups, name = [[0, 1, 2], [3]], f"{tmp_path / 'whole.py'}:pieces"
    here = RewardSet([Reward(name=name, label="http", on_failure="drop")]).score(made, groups, step=4)
    seen = mmrl.load("rewards", name.removesuffix(":pieces")).seen
    locally, seen[:] = list(seen), []
    with serving(name) as server:
        there = remote(server.url, inputs=["text"], spans=True).score(made, groups, step=4)
        with pytest.raises(RewardError, match=r"returns spans, .*; set options\.spans to true"):
            remote(server.url, "fail", inputs=["text"]).score(made, groups, step=4)
    assert seen == locally
    assert here.spans["http"][0] == [(0, 1, -1.0), (1, 13, 0.5)]
    assert there.spans == here.spans
    assert there.total.tolist()[::2] == here.total.tolist()[::2] == [13, 1]
    assert there.parts["http/red"].tolist() == [9] * 4
    assert [f.reason for f in there.failures] == ["cut"]
    sent = json.loads(wire.encode_request(made, groups, 4)[0])
    assert len(sent["files"]) == 2


def test_media_that_cannot_be_read_are_named_before_anything_is_sent(tmp_path):
    gone = Prompt("p", "?", {}, (Media("image", path=str(tmp_path / "gone.png")),))
    (tmp_path / "whole.py").write_text(WHOLE)
    with (
        serving(f"{tmp_path / 'whole.py'}:pieces") as server,
        pytest.raises(RewardError, match=r"the prompt's image cannot be sent: .*gone.png cannot be read"),
    ):
        remote(server.url, "fail", inputs=["text"], spans=True).score(
            [Sample(gone, SampleId(0, 0, 0, 0), text="t")], [[0]], step=0
        )


@pytest.mark.parametrize("spans", [None, [], [[[0, 1]]], [["abc"]], [[[2, 1, 0.0]]], [3], {}])
def test_spans_that_are_none_are_an_error(spans):
    body = json.dumps({"version": 1, "scores": [0.5], "spans": spans})
    with pytest.raises(wire.WireError, match="spans: "):
        wire.decode_reply(body.encode(), 1, spans=True)


def test_many_clients_at_once_get_their_own_answers(file):
    with serving(file) as server, ThreadPoolExecutor(20) as pool:

        def ask(i):
            return remote(server.url).score(samples([i + 1]), [[0]], step=0).total.tolist()

        got = list(pool.map(ask, range(20)))
    assert got == [[i + 1.5] for i in range(20)]


def test_a_reward_that_raises_is_an_error_of_the_request_and_the_server_lives_on(file):
    with serving(file) as server:
        with pytest.raises(RewardError, match=r"answered 500: .* raised ValueError: exploded at .*mine.py:6"):
            remote(server.url, "fail").score(samples([1], "boom"), [[0]], step=0)
        assert remote(server.url).score(samples([1]), [[0]], step=0).total.tolist() == [1.5]


@pytest.mark.parametrize("token", [None, "wrong", "ünsafe"])
def test_a_wrong_token_is_refused(file, token):
    with serving(file, token="secret") as server:
        given = token.encode() if token else None
        headers = {"Authorization": b"Bearer " + given} if given else {}
        status, answer = post(server, body_of(), **headers)
        assert (status, "token" in answer["error"]) == (401, True)
        assert post(server, body_of(), token="secret")[0] == 200


def test_the_client_tells_a_wrong_token_and_reads_the_right_one_from_the_environment(file, monkeypatch):
    with serving(file, token="secret") as server:
        with pytest.raises(RewardError, match=r"answered 401: .*; set options.token"):
            remote(server.url, "fail", token="wrong").score(samples([1]), [[0]], step=0)
        with pytest.raises(UserError, match="environment variable MY_TOKEN is not set"):
            remote(server.url, token="$MY_TOKEN")
        monkeypatch.setenv("MY_TOKEN", "secret")
        assert remote(server.url, token="$MY_TOKEN").score(samples([1]), [[0]], step=0).total.tolist() == [1.5]


def test_no_server_leaves_loopback_without_a_token(file):
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(UserError, match="give a token"):
            RewardServer(str(file), host=host, port=0)
    with serving(file, host="0.0.0.0", token="t") as server:
        assert post(server, body_of(), token="t")[0] == 200


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_page_of_another_site_cannot_ask_by_a_name_that_points_here(file, token):
    """A browser sends the name in the address that the page asked for."""
    hosts = {
        **dict.fromkeys(["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example"], 403),
        **dict.fromkeys(["", "0x7f.1", "[::1", "a@127.0.0.1.x", "10.0.0.1", "127.0.0.1@evil.example"], 403),
        **dict.fromkeys(["localhost", "LOCALHOST:9000", "127.0.0.1:1", "127.1.2.3", "[::1]:5"], 200),
    }
    with serving(file, token=token) as server:
        for host, status in hosts.items():
            with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
                connection.putrequest("GET", "/health", skip_host=True)
                connection.putheader("Host", host)
                connection.endheaders()
                assert connection.getresponse().status == (200 if token else status), host


def test_a_taken_port_is_a_clear_message(file):
    with serving(file) as server, pytest.raises(UserError, match="choose another --port"):
        RewardServer(str(file), port=server.server_port)


GARBAGE = {
    "not JSON": (b"\xff\xfe{", "not JSON"),
    "a list": (b"[]", "expected dict, got list"),
    "NaN": (b'{"version": NaN}', "NaN is no JSON number"),
    "a tower": (b"[" * 200_000, "not JSON"),
    "no version": (b"{}", "version: None"),
    "another version": (b'{"version": 2}', "speaks version 1"),
    "no samples": (b'{"version": 1}', "samples: expected list"),
    "a sample that is none": (body_of(3), "samples\\[0\\]: expected dict"),
    "a prompt of numbers": (body_of({"prompt": 3}), "samples\\[0\\].prompt: expected str"),
    "an image of numbers": (body_of({"image": 3}), "samples\\[0\\].image: expected str"),
    "a group beyond": (body_of({}, groups=[[1]]), "1 is no index of 1 samples"),
    "a group below": (body_of({}, groups=[[-1]]), "-1 is no index"),
    "a group of truths": (body_of({}, groups=[[True]]), "expected int, got bool"),
    "a sample twice": (body_of({}, groups=[[0, 0]]), "more than one place"),
    "a system message of numbers": (body_of({"system": 3}), "samples\\[0\\].system: expected str"),
    "a truth that is none": (body_of({"truncated": 1}), "samples\\[0\\].truncated: expected true"),
    "half a place": (body_of({"place": [1, 2]}), "samples\\[0\\].place: 2 numbers"),
    "a path of ours": (
        body_of({"media": [{"kind": "image", "path": "/etc/passwd"}]}),
        "media\\[0\\].file: expected int",
    ),
    "media of another kind": (body_of({"media": [{"kind": "tar", "file": 0}]}, files=[""]), "kind: 'tar'"),
    "a file beyond": (body_of({"media": [{"kind": "image", "file": 1}]}, files=[""]), "1 is no index of 1 files"),
    "a file of noise": (body_of({}, files=["%"]), "files\\[0\\]: not base64"),
    "frames of words": (body_of({"media": [{"kind": "video", "file": 0, "frames": ["a"]}]}, files=[""]), "frames"),
    "too many": (body_of(*[{}] * 5000), "at most 4096"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_refused_and_named(case, file):
    body, why = GARBAGE[case]
    with serving(file) as server:
        status, answer = post(server, body)
        assert status == 400
        assert re.search(why, answer["error"])
        assert post(server, body_of())[0] == 200


def bomb(width, height):
    """A PNG of a few bytes that claims to be huge."""
    small = io.BytesIO()
    Image.new("RGB", (1, 1)).save(small, "PNG")
    data = bytearray(small.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = __import__("zlib").crc32(bytes(data[12:29])).to_bytes(4, "big")
    return base64.b64encode(bytes(data)).decode()


def test_a_picture_that_cannot_be_read_fails_alone(file):
    good = Image.new("RGB", (4, 4), (7, 0, 0))
    jpeg = io.BytesIO()
    good.save(jpeg, "JPEG")
    text_bomb = PngImagePlugin.PngInfo()
    text_bomb.add_text("a", "x" * 80_000_000, zip=True)
    images = {
        "good": png(good),
        "not base64": "%%%",
        "not ASCII": "é",
        "a JPEG": base64.b64encode(jpeg.getvalue()).decode(),
        "torn": base64.b64encode(base64.b64decode(png(Image.effect_noise((40, 40), 90)))[:100]).decode(),
        "claims to be huge": bomb(60_000, 60_000),
        "more than allowed": png(Image.new("RGB", (200, 60))),
        "text bomb": png(good, pnginfo=text_bomb),
        "empty": "",
        "none": None,
        "16-bit": png(Image.fromarray(np.full((4, 4), 0x0A00, np.uint16))),
    }
    with serving(file, max_pixels=10_000) as server:
        status, answer = post(server, body_of(*({"meta": {"add": 0}, "image": i} for i in images.values())))
    assert status == 200
    scores = dict(zip(images, answer["scores"], strict=True))
    errors = dict(zip(images, answer["errors"], strict=True))
    assert scores.pop("good") == 7
    assert scores.pop("16-bit") == 10
    assert set(scores.values()) == {None}
    assert errors["good"] is None
    assert "3600000000 pixels" in errors["claims to be huge"]
    assert "at most 10,000" in errors["more than allowed"]
    assert "has no image" in errors["none"]
    assert all(errors[name] for name in scores)


def test_many_small_bombs_are_bounded_together(file, monkeypatch):
    monkeypatch.setattr(wire, "MAX_TOTAL_PIXELS", 25_000)
    with serving(file) as server:
        item = {"meta": {"add": 0}, "image": png(Image.new("RGB", (100, 100), (1, 0, 0)))}
        assert post(server, body_of(item, item))[0] == 200
        status, answer = post(server, body_of(item, item, item))
        assert (status, "lower batch_size" in answer["error"]) == (400, True)


def test_a_group_with_an_unreadable_picture_fails_as_one(file):
    good = png(Image.new("RGB", (4, 4), (7, 0, 0)))
    with serving(f"{file}:rank") as server:
        items = [{"image": good}, {"image": "%"}, {"image": good}, {"image": good}, {"image": good}]
        status, answer = post(server, body_of(*items, groups=[[0, 1], [2, 3]]))
    assert status == 200
    assert answer["scores"] == [None, None, 0, 0, None]
    assert re.search("sample 1 of its group .* not base64", answer["errors"][0])
    assert "stands in none" in answer["errors"][4]


def test_sizes_types_and_addresses_are_checked_before_the_body_is_read(file):
    with serving(file, max_bytes=1000) as server:
        assert post(server, b"x" * 3_000_000)[0] == 413
        assert post(server, b"", **{"Content-Length": "9" * 30})[0] == 413
        assert post(server, b"", **{"Content-Length": "-1"})[0] == 411
        assert post(server, iter([b"ab", b"cd"]))[0] == 411
        assert post(server, body_of(), **{"Content-Type": "text/plain"})[0] == 415
        assert post(server, body_of(), path="/other")[0] == 404
        with socket.create_connection(("127.0.0.1", server.server_port), 60) as torn:
            torn.sendall(b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{}")
            torn.shutdown(socket.SHUT_WR)
            assert b" 400 " in torn.recv(65536).split(b"\r\n")[0]
        with socket.create_connection(("127.0.0.1", server.server_port), 60) as noise:
            noise.sendall(b"\x16\x03\x01\x00\xff\r\n\r\n")
            assert b"400" in noise.recv(65536)
        assert post(server, body_of())[0] == 200
        with pytest.raises(RewardError, match=r"takes 1,000; lower this reward's batch_size"):
            remote(server.url, "fail").score(samples([1] * 20), [list(range(20))], step=0)


@contextmanager
def strange_server(status, kind, body):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def health(**changes):
    known = {"mmrl": 1, "reward": "mine", "inputs": ["image"], "per": "sample", "max_bytes": 9}
    return json.dumps({**known, **changes}).encode()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            (200, "text/html; charset=utf-8", b"<html><h1>Welcome</h1>"),
            "with text/html, not JSON: '<html>.*options.url",
        ),
        ((502, "text/html", b"<html>bad gateway"), "answered 502 with text/html"),
        ((200, "application/json", b'{"status": "ok"}'), "is not an mmrl reward server's"),
        ((200, "application/json", health(mmrl=2)), "speaks version 2, this side 1; install the same mmrl"),
        ((200, "application/json", health(reward="other")), "serves 'other', not 'mine'"),
    ],
)
def test_the_client_says_what_answers_in_place_of_a_reward(answer, why):
    with strange_server(*answer) as url, pytest.raises(RewardError, match=why):
        remote(url, "fail", reward="mine").score(samples([1]), [[0]], step=0)


def test_a_refused_connection_and_a_bad_address_are_clear_messages():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RewardError, match=r"cannot reach .*start the server \(mmrl serve NAME\)"):
            remote(url, "fail").score(samples([1]), [[0]], step=0)
    for bad in ("localhost:8765", "ftp://x", "http://", "http://x:99999"):
        with pytest.raises(UserError, match="is no address"):
            remote(bad)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"scores": [1, 2]}, "score: 2 values for 1 samples"),
        ({"scores": ["1"]}, "score: expected numbers and null"),
        ({"scores": [1], "parts": {"a": [1, 2]}}, "a: 2 values"),
        ({"scores": [10**400]}, "too large"),
        ({"scores": [1], "errors": []}, "errors: 0 for 1"),
        ({}, "score: expected list"),
    ],
)
def test_a_reply_that_breaks_the_format_is_refused(reply, why):
    with pytest.raises(wire.WireError, match=why):
        wire.decode_reply(json.dumps({"version": 1, **reply}).encode(), 1)


def test_meta_that_is_not_json_is_named():
    made = Sample(Prompt("p", "p", {"x": float("nan")}), SampleId(0, 0, 0, 0))
    with pytest.raises(wire.WireError, match="meta cannot be written as JSON"):
        wire.encode_request([made], [], 0)


def test_serving_and_scoring_a_folder_import_no_torch(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    program = (
        "import sys, threading, urllib.request, json; from pathlib import Path\n"
        "from mmrl.rewards.serve import RewardServer; from mmrl.rewards.bench import measure, pictures, show\n"
        "from mmrl.rewards import wire; from PIL import Image; from mmrl.core.trajectory import *\n"
        "s = RewardServer('jpeg:compressibility', port=0)\n"
        "threading.Thread(target=s.serve_forever, daemon=True).start()\n"
        "a = Sample(Prompt('a', 'a'), SampleId(0, 0, 0, 0), Image.new('RGB', (8, 8)))\n"
        "body = wire.encode_request([a], [], 0)[0]\n"
        "r = urllib.request.Request(s.url + '/score', body, {'Content-Type': 'application/json'})\n"
        "assert json.load(urllib.request.urlopen(r))['scores'][0] < 0\n"
        "assert show(measure('jpeg:compressibility', pictures(Path(sys.argv[1])))) == 0\n"
        "print(sorted({'torch', 'pydantic', 'httpx', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_another_interpreter_serves_with_this_packages_sources_alone(file, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = Path(sys.executable)
    with started_elsewhere(str(file), port=0, token="t", options={"factor": 3}, python=python) as (process, line):
        url = re.search(r"http://\S+", line)[0]
        assert remote(url, token="t").score(samples([2]), [[0]], step=0).total.tolist() == [6.5]
        command = Path(f"/proc/{process.pid}/cmdline")
        assert not command.exists() or b'"t"' not in command.read_bytes()  # the token is no argument
    assert process.returncode is not None
    with pytest.raises(RewardError, match="cannot reach"):
        remote(url, "fail", token="t").score(samples([2]), [[0]], step=0)
    (stage,) = (tmp_path / "cache" / "mmrl" / "serve").iterdir()
    assert {p.name for p in stage.iterdir()} <= {"mmrl", "run.py", "__pycache__"}


def test_a_server_elsewhere_that_cannot_start_says_so(file, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"did not serve .* \(status 2\)"), started_elsewhere(f"{file}:none", port=0):
        pass
    assert "has no 'none'" in capfd.readouterr().err
    with pytest.raises(UserError, match="cannot run"), started_elsewhere(str(file), python=tmp_path / "no-python"):
        pass
    with (
        pytest.raises(UserError, match="cannot read"),
        started_elsewhere(str(file), requirements=tmp_path / "none.txt"),
    ):
        pass


def test_a_server_elsewhere_ends_with_its_parent(file, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = (
        "import os, sys; from mmrl.rewards.subprocess_server import started_elsewhere\n"
        "with started_elsewhere(sys.argv[1], port=0) as (process, line):\n"
        "    print(line, flush=True); os._exit(9)"
    )
    run = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 9, run.stderr
    address = ("127.0.0.1", int(re.search(r":(\d+) \(", run.stdout)[1]))
    for _ in range(600):
        try:
            socket.create_connection(address, 5).close()
        except OSError:
            return
        threading.Event().wait(0.1)
    pytest.fail("the child still serves a minute after its parent has gone")


@pytest.mark.slow
def test_requirements_make_an_environment_of_its_own(monkeypatch, tmp_path):
    """Needs a package index for Pillow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "only_there-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("only_there.py", "VALUE = 42\n")
        z.writestr("only_there-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: only-there\nVersion: 1.0\n")
        z.writestr("only_there-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("only_there-1.0.dist-info/RECORD", "")
    (tmp_path / "requirements.txt").write_text(f"./{wheel.name}\n")
    (tmp_path / "mine.py").write_text(
        "import importlib.util\nimport only_there\ndef score(samples, *, context):\n"
        "    assert importlib.util.find_spec('torch') is None\n    return [only_there.VALUE for s in samples]\n"
    )
    for attempt in range(2):
        with started_elsewhere(str(tmp_path / "mine.py"), port=0, requirements=tmp_path / "requirements.txt") as (
            _,
            line,
        ):
            url = re.search(r"http://\S+", line)[0]
            assert remote(url, "fail").score(samples([2]), [[0]], step=0).total.tolist() == [42], attempt
    made = [p for p in (tmp_path / "cache" / "mmrl" / "envs").iterdir() if p.is_dir()]
    assert len(made) == 1
    (tmp_path / "requirements.txt").write_text("no-such-package-here @ file:///nowhere.whl\n")
    with (
        pytest.raises(UserError, match=r"failed; its own message stands above. Mend .*requirements.txt"),
        started_elsewhere(str(tmp_path / "mine.py"), port=0, requirements=tmp_path / "requirements.txt"),
    ):
        pass
    assert subprocess_server._cache("envs").is_dir()


def test_a_packed_reply_is_unpacked_up_to_the_limit(monkeypatch):
    def before(handler, body):
        handler.say(200, gzip.compress(bytes(32 << 20)), Content_Encoding="gzip")
        return True

    monkeypatch.setattr(mmrl.rewards.http, "MAX_REPLY", 1 << 20)
    with judging.Served(before=before) as server:
        reward = mmrl.load("rewards", "http:score")(server.url)
        with pytest.raises(UserError, match="sent a reply of more than 1,048,576 bytes"):
            reward.score([Sample(Prompt("p", "what"), SampleId(0, 0, 0, 0), text="a")], context=Context())
