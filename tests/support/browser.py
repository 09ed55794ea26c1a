"""A real browser for tests of pages: a tab of Chromium, told what to do through its own protocol."""

import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from urllib.parse import urlsplit

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A tab of Chromium, told what to do through its own protocol (DevTools) over a WebSocket."""

    def __init__(self, port, path):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self.socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        while self.file.readline().strip():
            pass
        self.numbers = itertools.count(1)

    def tell(self, method, **parameters):
        number = next(self.numbers)
        data = json.dumps({"id": number, "method": method, "params": parameters}).encode()
        mask = os.urandom(4)
        head = b"\x81" + (bytes([128 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data)))
        self.socket.sendall(head + mask + bytes(b ^ mask[n % 4] for n, b in enumerate(data)))
        while True:
            said = json.loads(self._frame())
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]

    def _frame(self):
        _, length = self.file.read(2)
        if length == 126:
            (length,) = struct.unpack(">H", self.file.read(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self.file.read(8))
        return self.file.read(length)

    def value(self, expression):
        return self.tell("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression, wanted):
        deadline = time.monotonic() + 60
        while (found := self.value(expression)) != wanted:
            assert time.monotonic() < deadline, (expression, found)
            time.sleep(0.05)

    def press(self, key):
        more = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def point(self, x, y):
        """Move the pointer there."""
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shown_at(self, width, scheme="light"):
        """Make the window so many pixels wide, of a person who prefers ``light`` or ``dark``."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tell("Emulation.setEmulatedMedia", features=preferred)

    def picture(self, path):
        """Write what is seen to ``path``, a PNG."""
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def opened(tmp_path):
    """A browser with a new profile; the test is skipped where there is none."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    settings = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    folder = tmp_path / "profile"
    process = subprocess.Popen(
        [BROWSER, *settings, f"--user-data-dir={folder}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = next((line for line in process.stderr if "DevTools listening" in line), "")
        if not line:
            pytest.skip("Chromium does not start here")
        port = int(re.search(r"127\.0\.0\.1:(\d+)", line)[1])
        threading.Thread(target=process.stderr.read, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/json/list")
        tabs = json.loads(connection.getresponse().read())
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        yield Browser(port, urlsplit(address).path)
    finally:
        process.terminate()
        process.wait(30)
