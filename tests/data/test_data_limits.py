"""Tables and texts keep to the limits that docs/data.md states; each message names the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import mmrl
from mmrl.core.errors import UserError
from mmrl.data.fields import clean_text
from mmrl.data.limits import LIMITS, MIB
from mmrl.data.split_lines import split_lines
from tests.support.sweeps import Sweep

folder = mmrl.load("datasets", "folder:prompts")
jsonl = mmrl.load("datasets", "jsonl:prompts")
prompts = mmrl.load("datasets", "prompts:prompts")
INVISIBLE = [
    *"\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\u061c\u115f\u1160\u17b4\u180e\u2028\u2063\u2800\u3164\uffa0",
    "\ufe0f",
    "\U000e0020",
    "\U000e0100",
    "\u3000",
    "\xa0",
    "\u202e\u202c",
    "\x85",
]


@pytest.mark.sweep("prompts of characters that do not show")
def test_a_prompt_of_invisible_characters_is_empty(tmp_path: Path, sweep: Sweep) -> None:
    for one in INVISIBLE:
        for text in (one, one * 50, f" {one}\n{one} "):
            with pytest.raises(ValueError, match="the prompt is empty"):
                clean_text(text)
            sweep.check(one in clean_text(f"a{one}b"), ascii(one))  # inside a prompt they stay
    for seen in ("a", "你", "🙂", "\u0301", "0", "ㅤa", "_"):
        sweep.check(clean_text(seen) == seen, ascii(seen))
    (tmp_path / "p.txt").write_text("".join(f"p{n}\n" for n in range(20)) + "\u200b\n")
    with pytest.warns(UserWarning, match="skipped 1 of 21 lines .line 21: the prompt is empty"):
        sweep.check(len(prompts("train", path=str(tmp_path / "p.txt"), heldout=0)) == 20, "a file")
    sweep.done()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_files_of_every_line_end_are_read(tmp_path: Path, end: str) -> None:
    rows = [json.dumps({"prompt": f"p{n}", "answer": n}) for n in range(4)]
    (tmp_path / "a.jsonl").write_bytes(end.join(rows).encode())
    (tmp_path / "a.csv").write_bytes(end.join(["prompt,answer", *(f"p{n},{n}" for n in range(4))]).encode())
    (tmp_path / "a.txt").write_bytes(end.join(f"p{n}" for n in range(4)).encode())
    (tmp_path / "q.csv").write_bytes(f'prompt,answer{end}"a{end}b",1{end}c,2'.encode())
    texts = [f"p{n}" for n in range(4)]
    for name, read in (("a.jsonl", jsonl), ("a.csv", jsonl), ("a.txt", prompts), ("a.jsonl", prompts)):
        assert [p.text for p in read("train", path=str(tmp_path / name), heldout=0)] == texts
    assert [p.text for p in jsonl("train", path=str(tmp_path / "q.csv"), heldout=0)] == ["a\nb", "c"]
    picture = tmp_path / "folder" / "a.png"
    picture.parent.mkdir()
    Image.new("RGB", (4, 4)).save(picture)
    (tmp_path / "folder" / "a.txt").write_bytes(f"two{end}lines".encode())
    assert [p.text for p in folder("train", path=str(picture.parent), heldout=0)] == ["two\nlines"]


def test_lines_are_split_alike_however_they_lie_in_the_pieces_that_are_read(tmp_path: Path) -> None:
    body = b"".join(bytes([97 + n % 26]) * (n * 131 % 3000) + (b"\n", b"\r\n", b"\r")[n % 3] for n in range(2500))
    (tmp_path / "a").write_bytes(body)
    with (tmp_path / "a").open("rb") as file:
        found = list(split_lines(file, MIB))
    assert b"".join(line for line, _ in found) == body
    assert [len(line) for line, _ in found] == [size for _, size in found]
    assert [line.rstrip(b"\r\n") for line, _ in found] == body.decode().replace("\r\n", "\n").replace(
        "\r", "\n"
    ).encode().split(b"\n")[:-1]


def test_lines_that_hold_nothing_are_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.data.limits.LIMITS.blank", 100)
    monkeypatch.setattr("mmrl.data.limits.LIMITS.records", 200)
    row = '{"prompt": "a"}\n{"prompt": "b"}'
    for name, first, rows in (("a.jsonl", "", row), ("a.csv", "prompt\n", "a\nb"), ("a.txt", "", "a\nb")):
        read, options = prompts if name.endswith("txt") else jsonl, {"path": str(tmp_path / name), "heldout": 0}
        (tmp_path / name).write_text(first + "\n" * 100 + rows)
        assert len(read("train", **options)) == 2
        for blank in ("\n", " \r\n", "\t\n"):
            (tmp_path / name).write_bytes((first + blank * 101 + rows).encode())
            with pytest.raises(UserError, match="more than 100 blank lines behind one another; take them out"):
                read("train", **options)
    (tmp_path / "b.txt").write_text("a\n" * 201)
    with pytest.raises(UserError, match="more than 200 lines; take a part of it"):
        prompts("train", path=str(tmp_path / "b.txt"), heldout=0)


def test_captions_are_read_from_files_and_columns(tmp_path: Path) -> None:
    for n, name in enumerate(("a.txt", "b.caption", "c.json", "d.TXT", "e.JSON")):
        Image.new("RGB", (4, 4), (n, 0, 0)).save((tmp_path / name).with_suffix(".png"))
        (tmp_path / name).write_text('{"caption": "third"}' if "json" in name.lower() else f"text {n}")
    found = folder("train", path=str(tmp_path), heldout=0)
    assert [p.text for p in found] == ["text 0", "text 1", "third", "text 3", "third"]
    (tmp_path / "d.csv").write_text("caption,other\na cat,1\n")
    with pytest.warns(UserWarning, match="other"):
        assert [p.text for p in jsonl("train", path=str(tmp_path / "d.csv"), heldout=0)] == ["a cat"]
    (tmp_path / "e.jsonl").write_text('{"caption": "a dog"}\n')
    for read in (jsonl, prompts):
        assert [p.text for p in read("train", path=str(tmp_path / "e.jsonl"), heldout=0)] == ["a dog"]


def test_records_over_a_limit_are_left_out_and_name_it(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "p"})
    long = json.dumps({"prompt": "z" * (LIMITS.text + 1)})
    huge = json.dumps({"prompt": "p", "a": "z" * LIMITS.record})
    keys = json.dumps({"prompt": "p"} | {f"k{n}": 0 for n in range(LIMITS.columns)})
    many = '{"prompt": "p", "a": [' + "0," * 1_000_001 + "0]}"
    for name, body in (("a.jsonl", "\n".join([good, long, huge, keys, many])), ("b.json", f"[{good},{long},{keys}]")):
        (tmp_path / name).write_text(body)
        found = jsonl("train", path=str(tmp_path / name), heldout=0)
        reasons = ["1,048,577 characters; at most 1,048,576", "10,001 keys; at most 10,000"]
        if name == "a.jsonl":
            reasons[1:1] = ["bytes; at most 33,554,432 are read"]
            reasons.append("more than 1,000,000 values")
        assert [p.text for p in found] == ["p"]
        assert [reason in bad.why for reason, bad in zip(reasons, found.bad, strict=True)] == [True] * len(reasons)


def test_a_json_list_is_read_element_by_element(tmp_path: Path) -> None:
    rows = [{"prompt": f'p{n} ]}},{{["\\" é 你', "meta": {"a": [[n]]}, "answer": n} for n in range(3000)]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(
            "\ufeff" * bool(indent) + json.dumps(rows, indent=indent, ensure_ascii=bool(indent))
        )
        found = jsonl("train", path=str(tmp_path / "a.json"), heldout=0)
        assert [(p.text, p.meta["answer"]) for p in found] == [(row["prompt"], row["answer"]) for row in rows]
    wrong = {
        "[": "is cut off",
        '[{"a": 1}': "is cut off",
        '[{"a": 1} {"a": 1}]': "follow a comma",
        "[nope]": "not JSON",
    }
    for body, why in {**wrong, "3": r"follow a \[", '["a': "not JSON"}.items():
        (tmp_path / "b.json").write_text(body)
        with pytest.raises(UserError, match=f"no list of records that can be read: .*{why}"):
            jsonl("train", path=str(tmp_path / "b.json"), heldout=0)
