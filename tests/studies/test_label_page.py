"""The page on which labels are given: what it serves and refuses over HTTP, and in a real browser."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli import app
from mmrl.core.errors import UserError
from mmrl.rewards.learned.labels.items import items_of
from mmrl.studies.labels import table
from mmrl.studies.labels.server import STARS, LabelServer, in_order
from tests.support.label_page import HOSTILE, answers, serving  # noqa: F401


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "samples"
    root.mkdir()
    for n, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (8, 8), colour).save(root / f"{n}.png")
        (root / f"{n}.txt").write_text(f"{colour} {HOSTILE}")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return root


def asked(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    given = {"X-Token": server.token, "Content-Type": "application/json"} | headers
    connection.putrequest(method, path, skip_host="Host" in given)
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        connection.putheader("Content-Length", str(len(data)))
    for name, value in given.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(data)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply, content


def test_an_answer_is_in_the_table_when_it_is_confirmed_and_a_new_start_goes_on(folder):
    with serving(folder) as server:
        assert asked(server, "POST", "/label", {"number": 1, "label": "1"})[0].status == 200
        assert (folder / table.NAME).read_text() == "file,label\n1.png,1\n"
        for number, label in ((0, "0"), (1, "0"), (0, "")):
            assert asked(server, "POST", "/label", {"number": number, "label": label})[0].status == 200
    with serving(folder, STARS) as server:
        found = json.loads(asked(server, "GET", "/samples")[1])
        assert found["labels"] == {"1.png": "0"}
        assert [item["name"] for item in found["items"]] == ["0.png", "1.png", "2.png"]
        assert [answer["label"] for answer in found["answers"]] == ["0", "0.25", "0.5", "0.75", "1"]
        assert asked(server, "POST", "/label", {"number": 2, "label": "0.25"})[0].status == 200
    assert dict(table.read(folder / table.NAME, ["0.png", "1.png", "2.png"]).of) == {"1.png": 0.0, "2.png": 0.25}


def test_many_answers_at_once_are_all_kept_whole(folder):
    with serving(folder) as server, ThreadPoolExecutor(24) as pool:

        def give(n):
            return asked(server, "POST", "/label", {"number": n % 3, "label": "01"[n % 2]})[0].status

        assert list(pool.map(give, range(24))) == [200] * 24
    lines = (folder / table.NAME).read_text().splitlines()
    assert len(lines) == 25
    assert all(re.fullmatch(r"[012]\.png,[01]", line) for line in lines[1:])


def test_many_connections_wait_for_a_server_that_is_busy(folder):
    """The kernel turns none away, to try again after a second."""
    with LabelServer(items_of(folder), folder, folder / table.NAME) as server, contextlib.ExitStack() as opened:
        for _ in range(24):
            opened.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=10))


def test_pictures_are_served_by_number_and_nothing_outside_of_the_folder_is(folder):
    with serving(folder) as server:
        reply, data = asked(server, "GET", "/file/0")
        assert (reply.status, reply.headers["Content-Type"]) == (200, "image/png")
        assert data == (folder / "0.png").read_bytes()
        for path in ("/file/3", "/file/-1", "/file/0/../../secret.png", "/../secret.png", "/file/%2e%2e/secret.png"):
            assert asked(server, "GET", path)[0].status == 404, path
        (folder / "0.png").unlink()
        (folder / "0.png").symlink_to(folder.parent / "secret.png")
        reply, data = asked(server, "GET", "/file/0")
        assert reply.status == 404
        assert b"secret" not in data


def test_the_pictures_of_a_texts_prompt_are_served_and_no_others(answers):
    assert items_of(answers)[0].pictures == ("prompts/red.png", "prompts/blue.png")
    with serving(answers) as server:
        for number, colour in enumerate(("red", "blue")):
            reply, data = asked(server, "GET", f"/picture/1/{number}")
            assert (reply.status, data) == (200, (answers / "prompts" / f"{colour}.png").read_bytes())
        for path in ("/picture/1/2", "/picture/2/0", "/picture/1", "/picture/1/-1", "/picture/1/0/0", "/picture/x/0"):
            assert asked(server, "GET", path)[0].status == 404, path
        assert asked(server, "GET", "/picture/0/0", **{"X-Token": b"wrong"})[0].status == 403
        (answers / "prompts" / "red.png").unlink()
        (answers / "prompts" / "red.png").symlink_to(answers.parent / "secret.png")
        assert asked(server, "GET", "/picture/0/0")[0].status == 404


@pytest.mark.parametrize("token", ["", "wrong", "ä"])
def test_without_the_token_nothing_is_shown_and_nothing_is_kept(folder, token):
    with serving(folder) as server:
        for method, path, body in (
            ("GET", "/", None),
            ("GET", f"/?token={'x' * 32}", None),
            ("GET", "/samples", None),
            ("GET", "/file/0", None),
            ("POST", "/label", {"number": 0, "label": "1"}),
            ("POST", f"/label?token={server.token}", {"number": 0, "label": "1"}),
        ):
            assert asked(server, method, path, body, **{"X-Token": token.encode()})[0].status == 403, path
        assert asked(server, "GET", "/samples", Host="attacker.example")[0].status == 403
        assert asked(server, "POST", "/label", {"number": 0, "label": "1"}, Host="localhost")[0].status == 403
        page = asked(server, "GET", urlsplit(server.url).path + "?" + urlsplit(server.url).query)[1]
        assert server.token.encode() not in page
    assert not (folder / table.NAME).exists()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"number": 3, "label": "1"}, 400),
        ({"number": -1, "label": "1"}, 400),
        ({"number": True, "label": "1"}, 400),
        ({"number": "0", "label": "1"}, 400),
        ({"number": 0, "label": "2"}, 400),
        ({"number": 0, "label": "1\n0.png,0"}, 400),
        ({"number": 0}, 400),
        ([], 400),
        ("x" * 5000, 413),
    ],
)
def test_answers_that_mean_nothing_are_refused_and_not_kept(folder, body, status):
    with serving(folder) as server:
        assert asked(server, "POST", "/label", body)[0].status == status
        plain = asked(server, "POST", "/label", {"number": 0, "label": "1"}, **{"Content-Type": "text/plain"})
        assert plain[0].status == 404, "a form of another page may send this type"
    assert not (folder / table.NAME).exists()


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1_0", "\u0661", "1e3", ""])
def test_numbers_that_are_none_are_refused_without_a_traceback(folder, number, capfd):
    with serving(folder) as server:
        path = urllib.parse.quote(number)
        assert {asked(server, "GET", f"/{kind}")[0].status for kind in (f"file/{path}", f"picture/{path}/0")} == {404}
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
            head = f"POST /label HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Length: "
            client.sendall(head.encode() + number.encode("utf-8") + b"\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 413")
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_or_a_lost_folder_is_reported_and_the_answer_is_not_confirmed(folder):
    with serving(folder) as server:
        server.path = folder / "gone" / table.NAME
        reply, said = asked(server, "POST", "/label", {"number": 0, "label": "1"})
        assert reply.status == 500
        assert b"cannot be written" in said
        assert json.loads(asked(server, "GET", "/samples")[1])["labels"] == {}


def test_what_to_label_next_comes_first(folder, tmp_path):
    (tmp_path / "next.csv").write_text("file,score\n2.png,0.5\n")
    assert table.files(tmp_path / "next.csv") == ["2.png"]
    assert [item.name for item in in_order(items_of(folder), ["2.png"])] == ["2.png", "0.png", "1.png"]
    with pytest.raises(UserError, match="which is no sample of this folder"):
        in_order(items_of(folder), ["x"])
    done = CliRunner().invoke(app, ["label", str(folder), "--order", str(folder)])
    assert "make it with mmrl spread" in str(done.exception)


def test_a_table_of_words_is_refused_before_numbers_are_added_to_it(folder):
    (folder / table.NAME).write_text("file,label\n0.png,yes\n")
    done = CliRunner().invoke(app, ["label", str(folder)])
    assert isinstance(done.exception, UserError)
    assert "are words, and the page writes numbers" in str(done.exception)


def test_the_page_needs_no_torch():
    code = "import sys, mmrl.studies.labels.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_in_a_browser_keys_give_labels_and_hostile_text_is_only_text(folder, browser):
    with serving(folder, order=["2.png"]) as server:
        browser.tell("Page.enable")
        browser.tell("Page.navigate", url=server.url)
        browser.until("document.querySelector('#shown img')?.naturalWidth", 8)
        assert browser.value("document.getElementById('name').textContent") == "1: 2.png"
        assert browser.value("document.getElementById('prompt').textContent") == f"blue {HOSTILE}"
        browser.press("1")
        browser.until("document.getElementById('count').textContent", "1 of 3 labelled")
        assert (folder / table.NAME).read_text() == "file,label\n2.png,1\n"
        browser.until("document.getElementById('name').textContent", "2: 0.png")
        browser.press("0")
        browser.until("document.getElementById('count').textContent", "2 of 3 labelled")
        browser.press("ArrowLeft")
        browser.until("document.getElementById('name').textContent", "2: 0.png")
        browser.press("Backspace")
        browser.until("document.getElementById('count').textContent", "1 of 3 labelled")
        browser.tell("Page.navigate", url=server.url)
        browser.until("document.getElementById('name')?.textContent", "2: 0.png")
        assert browser.value("document.title") == "Labels"
        assert browser.value("document.querySelectorAll('#prompt *').length") == 0
    assert (folder / table.NAME).read_text() == "file,label\n2.png,1\n0.png,0\n0.png,\n"


@pytest.mark.slow
def test_in_a_browser_a_text_has_the_pictures_of_its_prompt_beside_it(answers, browser):
    with serving(answers) as server:
        browser.tell("Page.enable")
        browser.tell("Page.navigate", url=server.url)
        loaded = "[...document.querySelectorAll('#pictures img')].map(one => one.naturalWidth).join()"
        browser.until(loaded, "8,8")
        assert browser.value("document.querySelector('#shown pre').textContent") == "first"
        browser.press("1")
        browser.until("document.querySelector('#shown pre').textContent", "second")
        browser.until(loaded, "8,8")
