"""Hostile run folders: files of a real run, changed by a seed as somebody who means harm may change them.

``change`` alters one file of a copy of a run and writes its checkpoint's manifest anew, so that sizes and checksums
fit. ``attempt`` calls a command in this process and says what came of it.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
from pathlib import Path

from mmrl.core.errors import UserError

DEEP = "[" * 100_000 + "]" * 100_000
VALUES = [
    10**30,
    -(10**30),
    10**400,
    -1,
    0,
    2**63,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 200_000,
    "\ud800",
    "../../../etc/passwd",
    "\x00",
    None,
    True,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
    [None] * 1000,
    "DEEP",
    "LEVELS",
]
WHOLE = [
    "empty",
    "torn",
    "binary",
    "deep",
    "digits",
    "null",
    "list",
    "text",
    "pipe",
    "device",
    "folder",
    "dangling",
    "twice",
]
FILES = {
    "state.json": ("resume", "eval", "export", "verify", "sample", "continue"),
    "manifest.json": ("resume", "eval", "export", "verify", "report"),
    "diverged.json": ("resume", "eval", "report"),
    "tensors": ("resume", "eval", "export", "verify", "sample"),
    "resolved.json": ("report", "compare", "eval", "resume", "export", "verify", "simulate", "read", "continue"),
    "env.json": ("report", "verify", "export", "compare"),
    "recipe.yaml": ("report", "compare", "resume"),
    "run.lock": ("report", "resume"),
    "metrics.jsonl": ("report", "compare", "verify", "resume", "simulate", "read", "decisions", "continue"),
    "heldout.jsonl": ("report", "compare", "verify", "resume", "export", "read"),
    "heldout_samples.jsonl": ("report", "compare", "resume"),
    "failures.jsonl": ("report", "resume"),
    "placement.jsonl": ("report", "simulate", "resume", "decisions"),
    "samples": ("report", "compare", "read", "label"),
    "strength/sweep.json": ("report",),
    "ended.json": ("report", "compare", "resume", "read"),
    "continued.jsonl": ("report", "compare", "continue", "read", "resume"),
    "calling.json": ("resume", "report"),
    "judge-transcripts.jsonl": ("report", "resume", "decisions", "compare"),
    "judge-usage.jsonl": ("report", "resume", "compare"),
    "judge-cache.jsonl": ("resume", "report", "continue"),
}
"""The kinds of files in a run, and the commands that read them."""


def changed_value(rng, value):
    """``value`` with one place of it changed, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        made = dict(value)
        if rng.random() < 0.15:
            del made[key]
        else:
            made[key] = changed_value(rng, value[key])
        return made
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def dumped(value):
    """JSON text, also of what is no JSON."""
    text = json.dumps(value)
    levels = '{"a":' * 80 + "1" + "}" * 80
    return text.replace('"DEEP"', DEEP).replace('"LEVELS"', levels)


def spoil(rng, path, how):
    """Change a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.is_file() else b"{}"
    if path.exists() or path.is_symlink():
        path.unlink()
    contents = {
        "empty": b"",
        "torn": before[: max(len(before) // 2, 1)],
        "binary": rng.randbytes(300),
        "deep": DEEP.encode(),
        "digits": b"1" * 6000,
        "null": b"null",
        "list": b"[1, 2]",
        "text": b'"step"',
        "twice": before.replace(b"{", b'{"step": 1, "step": "x", ', 1),
    }
    if how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(contents[how])


def spoil_line(rng, path):
    """Change one line of a table."""
    rows = path.read_bytes().splitlines()
    at = rng.randrange(len(rows))
    if rng.random() < 0.3:
        rows[at] = rng.choice([DEEP.encode(), b"1" * 6000, b"[1]", b"\xff\xfe", b'{"step": 1, "step": "x"}', b"null"])
    else:
        row = json.loads(rows[at])
        if rng.random() < 0.4:
            key = rng.choice(["step", *row])
            row = {**row, key: rng.choice(VALUES)}
        else:
            row = changed_value(rng, row)
        rows[at] = dumped(row).encode("utf-8", "replace")
    path.write_bytes(b"\n".join(rows) + b"\n")


def spoil_tensors(rng, path):
    """Change the header of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    how = rng.randrange(14)
    size: int | None = None
    if how == 0:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif how == 1:
        header[one]["data_offsets"] = [-8, 8]
    elif how == 2:
        header[one]["data_offsets"] = [0, 10**30]
    elif how == 3:
        header[one]["shape"] = [10**9, 10**9]
    elif how == 4:
        header[one]["shape"] = [*header[one]["shape"][::-1], 1]
    elif how == 5:
        del header[one]
    elif how == 6:
        header["other"] = header.pop(one)
    elif how == 7:
        header[one]["dtype"] = rng.choice(["I64", "X9", "BOOL", "F8_E5M2", 3])
    elif how == 8:
        size = rng.choice([2**63, 2**64 - 1, 0, 99_000_000, len(data)])
    elif how == 9:
        offset = rng.choice([[-1], [10**12] * len(header[one]["shape"]), "x", 10**30, [0] * 40])
        header.setdefault("__metadata__", {})["DCP_SHARDING_INFO"] = json.dumps(
            {n: {"saved_offsets": offset} for n in names}
        )
    elif how == 10:
        header.setdefault("__metadata__", {})["DCP_SHARDING_INFO"] = rng.choice([DEEP, "{}", "null", "[]", "x"])
    elif how == 11:
        header = rng.choice([[], None, {"a": 1}, {one: {}}, {"__metadata__": 3}])
    elif how == 12:
        header[one] = changed_value(rng, header[one])
    else:
        header[one]["shape"] = [0]
        header[one]["data_offsets"] = [0, 0]
    text = rng.choice([DEEP, "1" * 6000]).encode() if how == 13 else dumped(header).encode("utf-8", "replace")
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


def with_checksums(directory):
    """Write the manifest of a checkpoint anew, for the files that are there."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in manifest["files"]:
        path = directory / name
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def change(run, seed):
    """Change one file of the run folder ``run``. Returns the name of the kind of file, and what was done."""
    rng = random.Random(seed)
    kind = list(FILES)[seed % len(FILES)]
    directory = run / "checkpoints" / "step_000002"
    if kind in ("state.json", "manifest.json", "diverged.json"):
        path = directory / kind
    elif kind == "tensors":
        path = rng.choice(sorted(directory.glob("*.safetensors")))
    elif kind == "samples":
        path = run / "samples" / "step_000002.json"
    else:
        path = run / kind
    if kind == "tensors" and rng.random() < 0.85:
        spoil_tensors(rng, path)
        how = "header"
    elif kind.endswith(".jsonl") and rng.random() < 0.7 and path.is_file():
        spoil_line(rng, path)
        how = "line"
    elif kind == "recipe.yaml" and rng.random() < 0.7:
        bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
        )
        path.write_text(
            rng.choice([bomb, "a: &a {b: *a}", "[" * 5000, "# override: " + "x" * 10**6, "? [1]\n: 2", "- 1"])
        )
        how = "yaml"
    elif kind.endswith(".json") and path.is_file() and rng.random() < 0.65:
        path.write_bytes(dumped(changed_value(rng, json.loads(path.read_text()))).encode("utf-8", "replace"))
        how = "value"
    else:
        how = rng.choice(WHOLE)
        spoil(rng, path, how)
    if kind in ("state.json", "tensors"):
        with_checksums(directory)
    return kind, how


class _TooLongError(BaseException):
    """A command hangs."""


def _late(*_):
    raise _TooLongError


def attempt(call, seconds=60, mib=600):
    """What came of ``call``: empty where it worked or was refused as a user's mistake, else what went wrong."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old, limits = signal.signal(signal.SIGALRM, _late), resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 20 * mib * 2**20, limits[1]))  # spares the machine a hostile file
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: a busy machine is no fault
    signal.alarm(10 * seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
        wrong = ""
    except (UserError, SystemExit):
        wrong = ""
    except OSError as error:
        from mmrl.cli import of_system

        wrong = "" if of_system(error) else f"{type(error).__name__}: {error}"
    except _TooLongError:
        wrong = f"took more than {seconds} s"
    except BaseException as error:
        wrong = "" if type(error).__name__ == "Exit" else f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return wrong or (f"{grown:.0f} MiB more" if grown > mib else "")


@functools.cache
def mmrl_command():
    """The command line, which typer would make of its functions at each call."""
    import typer.main

    from mmrl.cli import app

    return typer.main.get_command(app)


def command(name, run, recipe, scratch):
    """A call of ``mmrl`` ``name`` on the folder ``run``."""
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    arguments = {
        "resume": ["train", *recipe, "train.steps=2", "--out", str(run), "--resume"],
        "continue": ["continue", str(run), "train.steps=3"],
        "eval": ["eval", str(run), "--samples", "1"],
        "export": ["export", str(run), "--out", str(out), "--what", "lora-file"],
        "report": ["report", str(run)],
        "compare": ["compare", str(run), str(run)],
        "verify": ["verify", str(run)],
        "decisions": ["verify", str(run), "--decisions"],
        "sample": ["sample", str(run), "--out", str(out), "--prompt", "a red circle", "--n", "1"],
        "simulate": ["simulate", *recipe, "--trace", str(run)],
    }
    if name in arguments:
        return lambda: mmrl_command()(arguments[name], standalone_mode=False)
    return {"read": lambda: _read(run), "label": lambda: _label(run)}[name]


def _read(run):
    import mmrl

    found = mmrl.load_run(run)
    _ = found.steps, found.finished, found.metrics, found.heldout, found.samples(2), repr(found)


def _label(run):
    from mmrl.rewards.learned.labels.items import items_of

    items_of(Path(run))
