"""A row of five places, to be walked to its end: behind a server of OpenEnv itself, and behind one that speaks what the
former was seen to say.

``python openenv_world.py`` serves the first kind where openenv is installed, and prints its port.
"""

import base64
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

MOVES = ("left", "right", "stay", "hang", "crash", "exit")
SESSIONS = 4
_GOES_ON = threading.Event()
"""What a hanging step waits for."""
PYTHON = "MMRL_OPENENV_PYTHON"
"""The environment variable that names a Python with openenv."""
SCHEMA = {
    "action": {
        "additionalProperties": False,
        "description": "A move.",
        "properties": {
            "metadata": {
                "additionalProperties": True,
                "description": "Additional metadata for the action",
                "title": "Metadata",
                "type": "object",
            },
            "move": {"enum": list(MOVES), "title": "Move", "type": "string"},
        },
        "required": ["move"],
        "title": "Move",
        "type": "object",
    },
    "observation": {
        "properties": {name: {"type": "string"} for name in ("done", "reward", "metadata", "goal", "place", "screen")}
    },
}


class Row:
    """The world itself."""

    def __init__(self):
        self.place = 0

    def reset(self, seed):
        self.place = random.Random(seed).randrange(4)
        return self.seen()

    def step(self, move):
        if move == "hang":
            _GOES_ON.wait(60)
        if move == "crash":
            raise OSError("the floor is gone")
        if move == "exit":
            os._exit(3)
        self.place = max(0, self.place + {"left": -1, "right": 1}.get(move, 0))
        return self.seen()

    def seen(self):
        file = io.BytesIO()
        Image.new("RGB", (5, 1), (50 * self.place, 0, 0)).save(file, "PNG")
        screen = base64.b64encode(file.getvalue()).decode()
        return {"goal": "Walk to 4.", "place": self.place, "screen": screen}

    @property
    def reward(self):
        return float(self.place == 4)


def serve():
    """A server of OpenEnv."""
    from typing import Literal

    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Move(Action):
        """A move."""

        move: Literal[MOVES]

    class Seen(Observation):
        goal: str
        place: int
        screen: str

    class World(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.row = Row()

        def reset(self, seed=None, episode_id=None, **given):
            return Seen(**self.row.reset(seed), reward=None, done=False)

        def step(self, action, timeout_s=None, **given):
            return Seen(**self.row.step(action.move), reward=self.row.reward, done=bool(self.row.reward))

        @property
        def state(self):
            return State()

    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(World, Move, Seen, max_concurrent_envs=SESSIONS)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


@contextmanager
def of_openenv():
    """The address of a server of OpenEnv, in an environment of its own."""
    process = subprocess.Popen([os.environ[PYTHON], str(Path(__file__))], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def of_words(answer, schema=None, status=200):
    """The address of a server that answers a message by ``answer(world, message)``, a text, or None to go away."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response
    from websockets.sync.server import serve

    body = json.dumps(SCHEMA).encode() if schema is None else schema
    free = threading.Semaphore(SESSIONS)

    def plain(connection, request):
        if request.path.endswith("/ws"):
            return None
        headers = Headers({"Content-Length": str(len(body)), "Location": "http://127.0.0.1:9/schema"})
        return Response(status, "", headers, body if request.path == "/schema" else b"")

    def talk(connection):
        if not free.acquire(blocking=False):
            full = f"Server at capacity: {SESSIONS}/{SESSIONS} sessions active. Cannot accept new connections."
            said = {"message": full, "code": "CAPACITY_REACHED", "max_sessions": SESSIONS}
            connection.send(json.dumps({"type": "error", "data": said}))
            return
        world = Row()
        try:
            for message in connection:
                told = answer(world, json.loads(message))
                if told is None:
                    return
                connection.send(told)
        finally:
            free.release()

    with serve(talk, "127.0.0.1", 0, process_request=plain) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            _GOES_ON.set()
            server.shutdown()
            thread.join()
            _GOES_ON.clear()


def as_openenv(world, message):
    """What OpenEnv 0.10 says."""
    data = message["data"]
    if message["type"] == "reset":
        return observed(world.reset(data["seed"]), None, False)
    faults = [] if "move" in data else [{"type": "missing", "loc": ["move"], "msg": "Field required"}]
    if "move" in data and data["move"] not in MOVES:
        expected = f"Input should be {', '.join(map(repr, MOVES[:-1]))} or {MOVES[-1]!r}"
        faults.append({"type": "literal_error", "loc": ["move"], "msg": expected})
    extra = {"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}
    faults += [{**extra, "loc": [name]} for name in data if name not in ("move", "metadata")]
    if faults:
        return error("Invalid message", "VALIDATION_ERROR", errors=faults)
    if data["move"] == "exit":
        return None
    try:
        return observed(world.step(data["move"]), world.reward, bool(world.reward))
    except OSError as why:
        return error(str(why), "EXECUTION_ERROR")


def observed(seen, reward, done):
    seen = {"metadata": {}, **seen}
    return json.dumps({"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}})


def error(message, code, **more):
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


if __name__ == "__main__":
    sys.exit(serve())
