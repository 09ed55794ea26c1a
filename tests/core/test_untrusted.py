"""Files of other people are opened by one function: regular, inside their folder, of a bounded size."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from mmrl.core.untrusted import (
    MAX_DEPTH,
    MAX_VALUES,
    check_folder,
    open_file,
    parse_json,
    printable,
    read_file,
    read_json,
    resolved,
    walk,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "in").mkdir(parents=True)
    (tmp_path / "root" / "a.txt").write_text("inside")
    (tmp_path / "b.txt").write_text("outside")
    return tmp_path / "root"


def _strange(root: Path) -> dict[str, str]:
    """Files that must not be read, by name, with a part of the reason."""
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        here = os.getcwd()
        os.chdir(root)  # the name of a socket is short
        one.bind("socket")
        os.chdir(here)
    links = {
        "out": "../b.txt",
        "zero": "/dev/zero",
        "far": "/etc/passwd",
        "loop": "loop",
        "up": "..",
        "gone": "nothing",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (root / "chain").symlink_to("out")
    (root / "through").symlink_to("in/../../b.txt")
    reasons = {"pipe": "a pipe", "socket": "a socket", "in": "a folder", "loop": "link", "gone": "No such file"}
    reasons |= dict.fromkeys(("out", "zero", "far", "up", "chain", "through"), "a link that leads out of")
    return reasons | {
        "../b.txt": "a path that leads out of",
        "/etc/passwd": "a path that leads out of",
        "a\0": "its name",
    }


def test_only_regular_files_inside_the_folder_are_read(root: Path) -> None:
    assert read_file(root / "a.txt", most=6, root=root) == b"inside"
    for name, why in _strange(root).items():
        with pytest.raises(OSError, match=why):
            read_file(root / name, most=100, root=root)


def test_a_link_inside_the_folder_is_read_and_so_is_a_folder_that_is_a_link(root: Path) -> None:
    (root / "in" / "link").symlink_to("../a.txt")
    other = root.parent / "other"
    other.symlink_to(root)
    assert read_file(root / "in" / "link", most=100, root=root) == b"inside"
    assert read_file(other / "a.txt", most=100, root=other) == b"inside"
    assert read_file(other / "a.txt", most=100, root=root) == b"inside"


def test_a_path_of_the_user_may_be_a_link_but_not_a_pipe_or_a_device(root: Path) -> None:
    (root / "out").symlink_to("../b.txt")
    assert read_file(root / "out", most=100) == b"outside"
    os.mkfifo(root / "pipe")
    for path in (root / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            open_file(path)


def test_a_file_that_is_larger_than_allowed_is_refused(root: Path) -> None:
    with pytest.raises(OSError, match="6 bytes; at most 5"):
        read_file(root / "a.txt", most=5)
    grows = Path("/proc/self/maps")  # has no size until it is read
    if grows.exists():
        with pytest.raises(OSError, match="more than 10 bytes"):
            read_file(grows, most=10)


def test_a_snapshot_of_the_hub_has_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "1"
    blobs = tmp_path / "datasets--a--b" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "12ab").write_text("kept")
    (snapshot / "a.jsonl").symlink_to("../../blobs/12ab")
    assert read_file(snapshot / "a.jsonl", most=10, root=snapshot) == b"kept"
    (blobs / "12ab").unlink()
    (blobs / "12ab").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="out of"):
        resolved(snapshot / "a.jsonl", snapshot)


def test_all_files_of_a_folder_are_checked_before_a_library_reads_it(root: Path) -> None:
    (root / "in" / "up").symlink_to("../a.txt")
    check_folder(root)
    assert [p.name for p in walk(root)] == ["a.txt", "up"]
    (root / "in" / "out").symlink_to("/etc")
    with pytest.raises(OSError, match="out of"):
        check_folder(root)
    with pytest.raises(OSError, match="more than 2 files"):
        walk(root, 2)


def test_a_folder_of_a_thousand_folders_inside_one_another_is_walked(tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("a.txt").touch()
    finally:
        os.chdir(here)
    found = walk(tmp_path)
    assert [p.name for p in found] == ["a.txt"]
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # rmtree is recursive


def test_names_of_strangers_are_one_printable_line() -> None:
    assert printable("a b.png") == "a b.png"
    assert printable("a\x1b[2J\n\udcff") == "a\\x1b[2J\\n\\udcff"
    assert printable("a" * 400) == "a" * 300 + "..."


def test_json_of_strangers_has_a_depth_and_a_number_of_values(tmp_path: Path) -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep) is not None
    assert parse_json(b"\xef\xbb\xbf{}") == {}
    mixed = [{"a": n, "b": [n, "x", None]} for n in range(MAX_DEPTH)]
    assert parse_json(json.dumps(mixed)) == mixed
    wrong = {
        f"[{deep}]": "nested too deeply",
        "[" * 100_000: "nested too deeply|is not JSON",
        "[" * 100_000 + "]" * 100_000: "nested too deeply",
        "1" * 5000: "cannot|can be read",
        "[" + "1," * MAX_VALUES + "1]": "more than",
        "{": "is not JSON",
        b"\xff": "is not UTF-8",
    }
    for text, why in wrong.items():
        with pytest.raises(ValueError, match=why):
            parse_json(text)
    (tmp_path / "a.json").write_text(json.dumps({"a": [1]}))
    assert read_json(tmp_path / "a.json", most=100) == {"a": [1]}
