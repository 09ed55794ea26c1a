"""Serve a reward from another interpreter or from an environment made for it (``mmrl serve --python``).

A reward whose packages cannot live beside ours runs in a process of its own. That process needs Pillow and this
package's sources, which are copied for it: nothing of our environment leaks into its own. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import mmrl
import mmrl.rewards
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.notices import note

TOKEN = "MMRL_SERVE_TOKEN"
READY = "mmrl-serving "
_ENTRY = "from mmrl.rewards.serve_child import child\nraise SystemExit(child())\n"


def serve_elsewhere(
    name: str,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    options: JsonObject | None = None,
    python: Path | None = None,
    requirements: Path | None = None,
    *,
    device: str = "cpu",
) -> None:
    """Serve the reward ``name`` from ``python`` until interrupted; prints the address once it is healthy.

    With ``requirements`` an environment holding them is made first (once, in the cache folder). Raises ``UserError``.
    """
    with started_elsewhere(name, host, port, token, options, python, requirements, device=device) as (process, line):
        try:
            print(line, flush=True)
            status = process.wait()
        except KeyboardInterrupt:
            return
        raise UserError(f"the server of {name} ended with status {status}; its own message stands above")


@contextmanager
def started_elsewhere(
    name: str,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    options: JsonObject | None = None,
    python: Path | None = None,
    requirements: Path | None = None,
    *,
    device: str = "cpu",
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Start the server as a child that answers ``/health``; it ends with the block, or with this process."""
    interpreter = python or Path(sys.executable)
    if requirements is not None:
        interpreter = _environment(interpreter, requirements)
    asked = json.dumps({"name": name, "host": host, "port": port, "options": dict(options or {}), "device": device})
    variables = {k: v for k, v in os.environ.items() if k != TOKEN}
    command = [str(interpreter), str(_staged() / "run.py"), asked]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**variables, TOKEN: token} if token else variables,
        )
    except OSError as error:
        raise UserError(f"cannot run {interpreter}: {error.strerror}; give --python a Python 3.11 or later") from error
    try:
        line = _until_ready(process, name, interpreter)
        threading.Thread(target=_forward, args=(process,), daemon=True).start()
        yield process, line
    finally:
        _end(process)


def _until_ready(process: subprocess.Popen[str], name: str, interpreter: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith(READY):
            print(line, end="", flush=True)
            continue
        said = line.removeprefix(READY).strip()
        url = said.removeprefix(f"{name} at ").partition(" ")[0]
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{url.replace('//0.0.0.0', '//127.0.0.1').replace('//[::]', '//[::1]')}/health", timeout=30):
            return said
    process.stdout.close()
    raise UserError(
        f"{interpreter} did not serve {name} (status {process.wait()}); its own message stands above. "
        "It needs Python 3.11 or later, Pillow, and what the reward imports; --requirements FILE makes an environment"
    )


def _forward(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()  # the child watches it
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cache(*parts: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("mmrl", *parts)


def _staged() -> Path:
    """A folder with this package's sources and nothing else, named by their content."""
    package = Path(mmrl.__file__).parent
    sources = {f"mmrl/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    for folder in map(Path, mmrl.rewards.__path__):
        sources.update({f"mmrl/rewards/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*.py")})
    contents = {name: path.read_bytes() for name, path in sorted(sources.items())}
    contents["run.py"] = _ENTRY.encode()
    digest = hashlib.blake2b(repr(sorted(contents.items())).encode(), digest_size=8).hexdigest()
    stage = _cache("serve", digest)
    if stage.is_dir():
        return stage
    stage.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".", dir=stage.parent))
    for name, content in contents.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).write_bytes(content)
    try:
        draft.rename(stage)
    except OSError:  # another process was first
        shutil.rmtree(draft)
    return stage


def _environment(python: Path, requirements: Path) -> Path:
    """The interpreter of an environment with ``requirements`` and Pillow, made if it is not there yet."""
    try:
        wanted = requirements.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {requirements}: {error.strerror}") from error
    key = f"{python}|{requirements.resolve().parent}|".encode() + wanted
    folder = _cache("envs", hashlib.blake2b(key, digest_size=8).hexdigest())
    interpreter, complete = folder / "bin" / "python", folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second server waits for the first to have made it
        if not complete.exists():
            note(f"making an environment for {requirements} in {folder} (once)")
            install = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "pillow>=10"]
            for command in (
                [str(python), "-m", "venv", "--clear", str(folder)],
                [*install, "-r", str(requirements.resolve())],
            ):
                done = subprocess.run(command, check=False, stdout=sys.stderr, cwd=requirements.resolve().parent)
                if done.returncode:
                    raise UserError(f"{' '.join(command)} failed; its own message stands above. Mend {requirements}")
            complete.touch()
    return interpreter
