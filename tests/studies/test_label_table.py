"""Whatever name a file has, its label is read again; a bad line costs only itself."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.rewards.learned.labels.items import items_of
from mmrl.studies.labels import table
from mmrl.studies.labels.server import LabelServer
from tests.support.sweeps import Sweep

PIECES = [
    *" \t\n\r\"',;#=\\:|",
    "\u2028",
    "\x85",
    "\xa0",
    "\ufeff",
    "\u200b",
    "é",
    "e\u0301",
    "ß",
    "\U0001f600",
    "\x1b",
    "\x7f",
]


def names(count: int) -> list[str]:
    """File names that differ, of odd characters, some of which are no UTF-8."""
    rng = random.Random(7)
    found = {
        " lead.png",
        "trail.png ",
        '"quoted"',
        "a,b",
        "\r",
        "file",
        "label",
        "1",
        "é",
        "e\u0301",
        os.fsdecode(b"\xff\xfe"),
    }
    while len(found) < count:
        made = "".join(rng.choice([*PIECES, "a", "b", os.fsdecode(b"\xe9")]) for _ in range(rng.randint(1, 8)))
        if made.strip():
            found.add(made)
    return sorted(found)


@pytest.mark.sweep("labels of files with odd names are read again")
def test_every_name_that_is_written_is_read_again(tmp_path: Path, sweep: Sweep) -> None:
    known = names(sweep.size(200, 5000))
    path = tmp_path / table.NAME
    wanted = {}
    for n, name in enumerate(known):
        label = ("0", "0.25", "1")[n % 3]
        table.append(path, name, label)
        wanted[name] = float(label)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = table.read(path, known).of
    for name in known:
        sweep.check(found.get(name) == wanted[name], repr(name))
    sweep.done()


@pytest.mark.sweep("one bad line of a table of labels costs only itself")
def test_a_bad_line_is_left_out_and_named(tmp_path: Path, sweep: Sweep) -> None:
    bad = ['"open', "gone.png,1", "a.png,2", "a.png,nan", "a.png,maybe", '"a"b,1', "a.png,yes", "\x00,1", "a.png,1e999"]
    bad += [os.fsdecode(b"\xff,1"), "x" * 200_000 + ",1", '5" disk.png,1', "b.png.png,", "'a.png',1"]
    good = ["b.png,1", "c.png,0", "d.png,0.5", '" e\nf.png",1', "g.png,1,more,of,it"]
    for line in bad:
        for place in range(len(good) + 1):
            path = tmp_path / table.NAME
            rows = ["file,label", *good[:place], line, *good[place:]]
            path.write_bytes("".join(f"{row}\n" for row in rows).encode("utf-8", "surrogateescape"))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = table.read(path, ["a.png", "b.png", "c.png", "d.png", " e\nf.png", "g.png"])
            right = dict(found.of) == {"b.png": 1.0, "c.png": 0.0, "d.png": 0.5, " e\nf.png": 1.0, "g.png": 1.0}
            named = len(said) == 1 and "1 lines are left out (line " in str(said[0].message)
            sweep.check(right and named, (line[:40], place, dict(found.of), [str(one.message)[:200] for one in said]))
    sweep.done()


def test_a_name_is_found_with_or_without_white_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / table.NAME
    path.write_text("file,label\n a.png ,1\nb.png,0\n  c.png,1\n")
    assert dict(table.read(path, ["a.png", "b.png", " b.png", "  c.png", "c.png"]).of) == {
        "a.png": 1,
        "b.png": 0,
        "  c.png": 1,
    }


def test_the_page_starts_again_after_labels_of_odd_names(tmp_path: Path) -> None:
    odd = [" lead.png", 'q"q.png', "a,b.png", "n\nl.png", "é.png", "e\u0301.png", os.fsdecode(b"\xff.png")]
    for n, name in enumerate(odd):
        Image.new("RGB", (4, 4), (n, 0, 0)).save(tmp_path / "made.png")
        (tmp_path / "made.png").rename(tmp_path / name)
    items = items_of(tmp_path)
    assert {item.name for item in items} == {*odd}
    with LabelServer(items, tmp_path, tmp_path / table.NAME) as server:
        for number in range(len(items)):
            assert server.give({"number": number, "label": "1"}) == ""
    with LabelServer(items_of(tmp_path), tmp_path, tmp_path / table.NAME) as server:
        assert server.labels == dict.fromkeys(odd, "1")


def test_labels_are_not_read_or_written_through_a_link_that_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    outside = tmp_path / "outside.csv"
    outside.write_text("file,label\na.png,1\n")
    (folder / table.NAME).symlink_to(outside)
    with pytest.raises(UserError, match="a link that leads out of"):
        table.read(folder / table.NAME, ["a.png"])
    with pytest.raises(OSError, match="a link that leads out of"):
        table.append(folder / table.NAME, "a.png", "0")
    assert outside.read_text() == "file,label\na.png,1\n"
    (folder / table.NAME).unlink()
    os.mkfifo(folder / table.NAME)
    with pytest.raises(UserError, match="a pipe"):
        table.read(folder / table.NAME, ["a.png"])
    with pytest.raises(OSError, match="no regular file"):
        table.append(folder / table.NAME, "a.png", "0")


def test_texts_that_lead_out_of_a_folder_are_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    for n, suffix in enumerate(("txt", "caption")):
        Image.new("RGB", (4, 4)).save(folder / f"{n}.png")
        (folder / f"{n}.{suffix}").symlink_to("../secret.txt")
    Image.new("RGB", (4, 4)).save(folder / "2.png")
    os.mkfifo(folder / "2.txt")
    Image.new("RGB", (4, 4)).save(folder / "3.png")
    (folder / "3.caption").write_text("mine")
    with pytest.warns(UserWarning, match=r"3 texts are not read; the first: 0\.txt: it is a link that leads out of"):
        items = items_of(folder)
    assert [item.prompt for item in items] == ["", "", "", "mine"]
    for item in folder.glob("*.png"):
        item.unlink()
    (folder / "4.txt").symlink_to("/dev/zero")
    (folder / "5.txt").write_text("a text")
    (folder / "6.txt").write_bytes(b"z" * (2 << 20))
    with pytest.warns(UserWarning, match="1 texts are not read"):
        items = items_of(folder)
    assert [item.text for item in items] == ["a text", ""]
