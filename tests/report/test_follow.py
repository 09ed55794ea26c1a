"""The report as a page that follows a run: what it serves and refuses, and how it ends."""

import contextlib
import http.client
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from typer.testing import CliRunner

import mmrl
from mmrl.cli import app
from mmrl.core.errors import UserError
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import Ended, RunDir
from mmrl.report.follow import FollowServer, follow
from tests.support.browser import opened
from tests.support.report import recorded


@pytest.fixture
def run(tmp_path):
    """A run of 20 steps of 40."""
    return recorded(tmp_path / "run", mmrl.load("datasets", "shapes"), told=40)


def asked(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path, headers={"X-Token": server.token} | headers)
    reply = connection.getresponse()
    content = reply.read().decode()
    connection.close()
    return reply.status, content


def write(run, step):
    with MetricsLog(run.metrics) as log:
        log.write(step, {"reward/mean": 0.9, "time/step": 1.0})


def test_the_page_changes_with_the_run_and_ends_with_it(run):
    with RunDir.create(run.path, resume=True) as training, FollowServer(run.path) as server, server.in_thread():
        first = json.loads(asked(server, "/state")[1])
        status, html = asked(server, "/")
        assert status == 200
        assert "20/40" in html
        assert f'version = "{first["version"]}"' in html
        assert "connect-src 'self'" in html
        assert "<secret>" not in html, "a part of the script was taken for one"
        assert not first["ended"]
        assert json.loads(asked(server, "/state")[1]) == first, "nothing was written"
        write(run, 21)
        assert json.loads(asked(server, "/state")[1])["version"] != first["version"]
        assert "21/40" in asked(server, "/")[1]
        assert not run.report.exists()
        waiting = threading.Thread(target=server.until_end)
        waiting.start()
        training.close()
        while not json.loads(asked(server, "/state")[1])["ended"]:
            time.sleep(0.01)
        assert waiting.is_alive(), "an open page has not taken the last report"
        assert "stopped at step 21" in asked(server, "/")[1]
        asked(server, "/taken")
        waiting.join(60)
        assert not waiting.is_alive()


def test_only_who_has_the_token_reads_the_page(run):
    with RunDir.create(run.path, resume=True), FollowServer(run.path) as server, server.in_thread():
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/", "/state", "/taken", "/report.html", "/../given.yaml"):
            assert asked(server, path, **{"X-Token": "other"})[0] == 403, path
            assert asked(server, path, Host="evil.example")[0] == 403, path
        assert not server.taken.is_set()
        assert asked(server, f"/?token={server.token}")[0] == 200
        assert [asked(server, path)[0] for path in ("/report.html", "/metrics.jsonl")] == [404, 404]
        run.resolved.write_text("{")
        status, why = asked(server, "/")
        assert status == 500
        assert "resolved.json" in why


def test_a_run_that_nothing_trains_is_not_followed(run):
    with pytest.raises(UserError, match=r"stopped at step 20\); its report: mmrl report"):
        follow(run.path)
    refused = CliRunner().invoke(app, ["report", str(run.path), "--port", "8000"])
    assert isinstance(refused.exception, UserError)
    refused = CliRunner().invoke(app, ["report", str(run.path), "--follow", "--pictures", "a.gif"])
    assert "--follow serves a page" in str(refused.exception)


def test_the_terminal_says_where_the_page_is_and_how_the_run_ended(run):
    training, said = RunDir.create(run.path, resume=True), io.StringIO()

    def end():
        while "http" not in said.getvalue():
            time.sleep(0.01)
        Ended("finished", 20).write(run.path)
        training.close()

    ending = threading.Thread(target=end)
    ending.start()
    with contextlib.redirect_stdout(said):
        follow(run.path)
    ending.join()
    what, address, ended = said.getvalue().splitlines()
    assert "refreshes itself" in what
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S{32}", address)
    assert ended == f"the run has ended: finished; its report: {run.report}"
    assert "connect-src" not in run.report.read_text()


def test_the_page_may_be_there_before_its_run(run, tmp_path):
    later, said = tmp_path / "later", io.StringIO()

    def train():
        while "waiting for it to begin" not in said.getvalue():
            time.sleep(0.01)
        training = RunDir.create(later)
        for file in run.path.iterdir():
            if file.is_file() and not (later / file.name).exists():
                shutil.copy(file, later)
        while "http" not in said.getvalue():
            time.sleep(0.01)
        Ended("finished", 20).write(later)
        training.close()

    training = threading.Thread(target=train)
    training.start()
    with contextlib.redirect_stdout(said):
        follow(later)
    training.join()
    assert said.getvalue().splitlines()[-1].startswith("the run has ended: finished")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("none")
    with pytest.raises(UserError, match="there is no run in"):
        follow(tmp_path / "other")


@pytest.mark.slow
def test_ctrl_c_ends_the_page_and_not_the_run(run):
    with RunDir.create(run.path, resume=True) as training:
        command = [sys.executable, "-m", "mmrl", "report", str(run.path), "--follow"]
        heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts behind it does not
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
            assert "refreshes itself" in process.stdout.readline()
            assert "127.0.0.1" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert "the run goes on" in process.stdout.read()
        assert process.returncode == 0
        assert training.owner() is not None
    assert not run.report.exists()


@pytest.mark.slow
def test_a_browser_shows_the_new_steps_and_keeps_what_its_reader_did(run, tmp_path):
    with (
        RunDir.create(run.path, resume=True) as training,
        FollowServer(run.path) as server,
        server.in_thread(),
        opened(tmp_path) as tab,
    ):
        tab.tell("Page.navigate", url=server.url)
        tab.until("document.querySelector('.status')?.textContent", "running")
        tab.value("document.querySelectorAll('details')[1].open = true")
        tab.value("at.value = 1; at.dispatchEvent(new Event('input', {bubbles: true}))")
        assert tab.value("step.textContent") == "10"
        tab.value("showAt(document.querySelector('[data-chart]'), 10)")
        write(run, 21)
        tab.until("document.querySelector('.tile b').textContent", "21/40")
        assert tab.value("document.querySelectorAll('details')[1].open")
        assert tab.value("step.textContent") == "10"
        assert tab.value("document.querySelector('[data-chart] output small').textContent").startswith("step 10")
        waiting = threading.Thread(target=server.until_end)
        waiting.start()
        training.close()
        tab.until("following.textContent", "The run has ended, so this page no longer changes.")
        assert tab.value("document.querySelector('.status').textContent") == "stopped at step 21"
        waiting.join(60)
        assert not waiting.is_alive(), "the page had the last report"
