"""``mmrl serve`` under load, over real sockets: latency, clients that send half a request, and bounded memory."""

import http.client
import json
import socket
import threading
import time
import tracemalloc
from contextlib import closing, suppress

import pytest

from mmrl.rewards import serve_limits, wire
from mmrl.rewards.serve import RewardServer
from mmrl.rewards.serve_limits import Limits, Turns

LENGTH = "import mmrl\n@mmrl.reward(inputs=('text',))\ndef score(s, *, context):\n    return [len(x.text) for x in s]\n"
BODY = json.dumps({"version": 1, "samples": [{"text": "seven c"}]}).encode()
HALF = b"POST /score HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "length.py").write_text(LENGTH)
    with RewardServer(str(tmp_path / "length.py"), port=0) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield made
        made.shutdown()


def connect(server, data=b""):
    made = socket.create_connection(("127.0.0.1", server.server_port), 60)
    made.sendall(data)
    return made


def ask(server, count=1):
    """Scores of requests on one connection, and the seconds of each."""
    spent, scores = [], []
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
        for _ in range(count):
            began = time.perf_counter()
            connection.request("POST", "/score", BODY, {"Content-Type": "application/json"})
            scores += json.loads(connection.getresponse().read())["scores"]
            spent.append(time.perf_counter() - began)
    return scores, spent


def ends(connection, within):
    """Whether the server closes the connection, whatever it says before."""
    connection.settimeout(within)
    with connection:
        try:
            while connection.recv(65536):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
    return True


def drip(connection, seconds):
    """Send a header every 0.05 s."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        connection.sendall(b"x: y\r\n")
        time.sleep(0.05)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_waits_for_no_acknowledgement(server):
    """Head and body in two writes take 40 ms each time: TCP holds the second back. A busy machine may take as long, but
    not always."""
    for _ in range(20):
        scores, spent = ask(server, 20)
        assert scores == [7] * 20
        if sorted(spent)[5] < 0.03:
            break
    assert sorted(spent)[5] < 0.03


def test_half_sent_requests_delay_nobody(server):
    waiting = [connect(server, HALF) for _ in range(50)]
    began = time.perf_counter()
    assert ask(server, 3)[0] == [7] * 3
    assert time.perf_counter() - began < serve_limits.HEAD_S
    for one in waiting:
        one.close()


def test_a_request_that_never_ends_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(serve_limits, "HEAD_S", 0.3)
    monkeypatch.setattr(serve_limits, "SILENCE_S", 0.3)
    for beginning in (b"POST /sc", HALF):
        assert ends(connect(server, beginning), 60)
    slow = connect(server, b"POST /score HTTP/1.1\r\n")
    with pytest.raises(ConnectionError):  # each piece comes in time, the whole does not
        drip(slow, 20)
    slow.close()
    monkeypatch.setattr(serve_limits, "HEAD_S", 600.0)
    monkeypatch.setattr(serve_limits, "SILENCE_S", 600.0)
    long = connect(server)
    with suppress(ConnectionError):
        long.sendall(b"POST /score HTTP/1.1\r\n" + (b"x: " + b"y" * 60_000 + b"\r\n") * 90)
    assert ends(long, 60)
    assert ask(server)[0] == [7]


def test_the_slowest_client_makes_way_for_a_new_one(server, monkeypatch):
    monkeypatch.setattr(serve_limits, "_GRACE_S", 0.0)
    server.room = Limits(connections=3)
    waiting = [connect(server, HALF) for _ in range(3)]
    until(lambda: len(server.room._open) == 3)
    assert ask(server, 2)[0] == [7, 7]
    assert sum(ends(one, 0.3) for one in waiting) == 1


def test_requests_that_hold_memory_are_bounded_together(server, monkeypatch):
    """Three uploads fill the memory and stop; a good request gets theirs, and what it held comes back."""
    monkeypatch.setattr(serve_limits, "_GRACE_S", 0.2)
    server.room = Limits(held=1_500_000)
    waiting = [connect(server, HALF + b" " * 490_000) for _ in range(3)]
    until(lambda: server.room._held >= 1_470_000)
    scores, spent = ask(server, 3)
    assert scores == [7] * 3
    assert max(spent) < serve_limits.PATIENCE_S / 2
    for one in waiting:
        one.close()
    until(lambda: server.room._held == 0)


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(server):
    with connect(server, HALF[:-1].replace(b"1000000", b"%d" % len(BODY))[:-2] + b"Expect: 100-continue\r\n\r\n") as c:
        assert b"100 Continue" in c.recv(65536)
        c.sendall(BODY)
        assert b"200 OK" in c.recv(65536)


HOSTILE = {
    "a long text with one wide character": lambda n: b'"' + b"a" * n + b'\\ud83d\\ude00"',
    "the same, raw": lambda n: b'"' + b"a" * n + '😀"'.encode(),
    "lists of nothing": lambda n: b"[" + b"[]," * (n // 3) + b"1]",
    "mappings of nothing": lambda n: b"[" + b"{}," * (n // 3) + b"1]",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_would_grow_in_memory_is_refused_before_it_is_read(case, monkeypatch):
    monkeypatch.setattr(wire, "MAX_VALUES", 2**17)  # a 32nd of what they are, like the message
    monkeypatch.setattr(wire, "MAX_WIDE_BYTES", 2**20)
    body = b'{"version": 1, "samples": [], "x": ' + HOSTILE[case](2**22) + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError, match="lower batch_size"):
            wire.decode_request(body)
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


def test_pictures_beside_a_wide_character_are_no_text(monkeypatch):
    monkeypatch.setattr(wire, "MAX_WIDE_BYTES", 2**16)
    files = ["A" * 2**18]
    body = json.dumps({"version": 1, "samples": [{"text": "é😀"}], "files": files}).encode()
    (sample,) = wire.decode_request(body).samples
    assert sample is not None
    assert sample.text == "é😀"


def test_turns_come_in_the_order_of_asking():
    turns, order = Turns(1), []
    assert turns.acquire(1)
    assert not turns.acquire(0.01)

    def wait(number):
        assert turns.acquire(60)
        order.append(number)
        turns.release()

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        while len(turns._line) <= number:
            time.sleep(0.001)
    turns.release()
    for thread in threads:
        thread.join(60)
    assert order == list(range(5))
    assert turns.acquire(0)
