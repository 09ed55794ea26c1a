"""The weights of a judge that was never downloaded are counted from the headers of its files on the hub."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from mmrl.core.hub_files import numbers_on_hub
from mmrl.core.reward_contract import Weights
from mmrl.planner.judges import _stored as stored

WHOLE = {"a": torch.zeros(300, 100), "b": torch.zeros(7, dtype=torch.float16)}
FILES = {
    "org/whole": {"model.safetensors": save(WHOLE)},
    "org/words": {"config.json": b"{}"},
    "org/broken": {"model.safetensors": b"\xff" * 100},
    "org/parts": {
        "model.safetensors.index.json": b'{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
        "1.safetensors": save({"a": WHOLE["a"]}),
        "2.safetensors": save({"b": WHOLE["b"]}),
    },
}


class Answer(BaseHTTPRequestHandler):
    """The hub's answers for a file: its head, a part of it, or that it is not there."""

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, *, head):
        name, _, file = self.path.strip("/").partition("/resolve/main/")
        data = FILES.get(name, {}).get(file) if name else b""
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        self.send_response(200 if data is not None else 404)
        if data is None:
            self.send_header("X-Error-Code", "EntryNotFound" if name in FILES else "RepoNotFound")
            data = b""
        sent = data[int(first) : int(last) + 1 if last else None]
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if not head:
            self.wfile.write(sent)
            self.server.sent += len(sent)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.sent = 0
        at = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", at)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", at + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("name", ["org/whole", "org/parts"])
def test_the_heads_of_the_files_are_enough(hub, name):
    assert numbers_on_hub(name) == {"F32": 30_000, "F16": 7}
    assert sorted(stored(Weights(name, "auto"))) == [("F16", 7), ("F32", 30_000)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("org/words", "the hub has no model.safetensors of it"),
        ("org/broken", "safetensors"),
        ("org/nowhere", "the hub has no model.safetensors of it"),
        ("no name", "Repo id"),
    ],
)
def test_what_the_hub_does_not_show_is_said(hub, name, why):
    with pytest.raises((OSError, ValueError), match=why):
        list(stored(Weights(name, "auto")))


def test_a_hub_that_cannot_be_reached_costs_seconds(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        numbers_on_hub("org/whole")
