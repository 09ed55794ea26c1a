"""``mmrl export --push-to-hub``: huggingface_hub's own client against a hub on loopback."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from mmrl.app import export as module
from mmrl.app.hub_upload import Upload
from mmrl.core.errors import UserError
from tests.support.cli import mmrl

TOKEN = "hf_a_token_of_the_test"


class Hub(ThreadingHTTPServer):
    """What the client asks of a hub: who am I, create, pre-upload, commit. ``private``: of repositories by name."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.private, self.files, self.asked, self.fails = {}, {}, [], {}
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer("")

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

    def answer(self, body):
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(path)
        if status := next((s for part, s in hub.fails.items() if part in path), None):
            return self.say(status, {"error": "no"})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.say(401, {"error": "Invalid credentials"})
        if path == "/api/whoami-v2":
            return self.say(200, {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.private:
                return self.say(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
            hub.private[name] = asked.get("private", False) or asked.get("visibility") == "private"
            return self.say(200, {"url": f"{hub.url}/{name}"})
        if path == "/api/validate-yaml":
            return self.say(200, {"errors": [], "warnings": []})
        name, _, what = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/|$)(.*)", path).groups()
        if what == "preupload/main":
            files = json.loads(body)["files"]
            return self.say(
                200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        if what == "commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.say(200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1", "pullRequestUrl": None})
        return self.say(200, {"id": name, "private": hub.private[name], "siblings": [], "tags": []})

    def say(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "mine"
    (made / "transformer").mkdir(parents=True)
    (made / "README.md").write_text("---\nlicense: apache-2.0\n---\n# mine\n")
    (made / "transformer" / "model.safetensors").write_bytes(bytes(range(256)))
    return made


def test_an_export_is_uploaded_whole_and_private(hub, folder):
    assert Upload("org/mine").send(folder, "first") == f"{hub.url}/org/mine"
    assert hub.private == {"org/mine": True}
    assert hub.files == {
        "README.md": (folder / "README.md").read_bytes(),
        "transformer/model.safetensors": bytes(range(256)),
    }
    Upload("org/mine").send(folder, "again")  # there already, and private
    Upload("org/open", public=True).send(folder, "first")
    assert hub.private["org/open"] is False


def test_nothing_private_goes_into_a_public_repository(hub, folder):
    hub.private["org/open"] = False
    with pytest.raises(UserError, match=r"org/open is there and public.*add --public"):
        Upload("org/open").send(folder, "first")
    assert not hub.files
    Upload("org/open", public=True).send(folder, "first")
    assert len(hub.files) == 2


def test_what_cannot_work_is_refused_before_a_model_is_loaded(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "restored", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.json").write_text("{}")

    def said(*arguments, name="org/mine"):
        command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
        assert mmrl(*command, *(["--push-to-hub", name] if name else []), *arguments) == 2
        return capsys.readouterr().err

    assert "write ORG/NAME" in said(name="mine")
    assert "write ORG/NAME" in said(name="org/a b")
    assert "--public is for --push-to-hub" in said("--public", name=None)
    hub.fails["whoami"] = 401
    assert "refuses the token; give HF_TOKEN a token with write access" in said()
    hub.fails["whoami"] = 503
    assert "answered 503; try again. nothing was exported" in said()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, so the hub is not asked; unset it" in said()
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "there is no token; set HF_TOKEN, or run hf auth login" in said()
    assert not (tmp_path / "out").exists()


def test_where_the_upload_fails_the_export_stays_and_the_message_has_the_command(hub, folder):
    hub.fails["commit"] = 403
    with pytest.raises(UserError, match=rf"does not let this token write there.*hf upload org/mine {folder} \."):
        Upload("org/mine").send(folder, "first")
    assert (folder / "README.md").is_file()
    assert not hub.files


def test_the_token_is_no_option(capsys):
    mmrl("export", "--help")
    assert "token" not in [word.strip("-") for word in capsys.readouterr().out.split() if word.startswith("--")]
