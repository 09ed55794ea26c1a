"""What may become of a checkpoint's directory, for tests of what is then said and taken."""

import json

from mmrl.core import checkpoint_reader as reader


def truncated(directory, file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    return f"{file.name} has {len(data) // 2} bytes, not {len(data)}"


def flipped(directory, file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return f"{file.name} does not match its checksum"


def deleted(directory, file):
    file.unlink()
    return f"{file.name} is missing"


def emptied(directory, file):
    """As a deletion that was interrupted may leave it."""
    for path in directory.iterdir():
        if path.name != "manifest.json":
            path.unlink()
    return "is missing"


def without_manifest(directory, file):
    (directory / "manifest.json").unlink()
    return "manifest.json is missing"


def torn_manifest(directory, file):
    (directory / "manifest.json").write_text('{"files": ')
    return "manifest.json cannot be read: it is not JSON"


def torn_state(directory, file):
    path = directory / "state.json"
    path.write_bytes(path.read_bytes()[:-1])
    return "state.json has"


def another_state(directory, file):
    path = directory / "state.json"
    path.write_text(json.dumps({"policy": {"updates": 99}}))
    return "state.json"


ALL = [truncated, flipped, deleted, emptied, without_manifest, torn_manifest, torn_state, another_state]


def passed_over(folder, good, bad):
    """The line on the checkpoint ``bad``, which is the only one newer than ``good``; that one is taken."""
    found, skipped = reader.load_latest(folder)
    assert found is not None
    assert found.step == good
    assert len(skipped) == 1
    assert skipped[0].startswith(f"checkpoint step_{bad:06d} is not whole: ")
    return skipped[0]
