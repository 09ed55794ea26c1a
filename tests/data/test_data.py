"""Data sets from files: JSONL, JSON, Parquet, folders; and the drawn clips."""

import base64
import collections
import io
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmrl
from mmrl.config.drop_ins import entries
from mmrl.core.errors import UserError
from mmrl.core.media import open_clip, open_image, read_bytes
from mmrl.data.fields import Columns, read_fields
from mmrl.data.records import checked

jsonl = mmrl.load("datasets", "jsonl:prompts")
folder = mmrl.load("datasets", "folder:prompts")
clips = mmrl.load("datasets", "clips")
RED, BLUE = (225, 45, 45), (60, 95, 235)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache" / "hf"))


def png(colour=RED, size=(16, 12)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def lines(path: Path, *records) -> str:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records))
    return str(path)


# --- JSONL ----------------------------------------------------------------------------------------------------------


def test_records_become_prompts_with_answers_and_media(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(BLUE))
    url = "data:image/png;base64," + base64.b64encode(png(BLUE)).decode()
    path = lines(
        tmp_path / "q.jsonl",
        {"prompt": "2 + 2?", "answer": 4, "meta": {"level": 1}},
        {"question": "which?", "solution": "a", "image": "pictures/a.png", "system": "Be brief."},
        {"text": "<image> <image>", "images": ["b.png", str(tmp_path / "pictures" / "a.png")]},
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}],
                },
                {"role": "assistant", "content": "blue"},
            ]
        },
    )
    found = jsonl("train", path=path, heldout=0)
    assert found.bad == []
    a, b, c, d = found
    assert (a.id, a.text, a.meta, a.media) == ("q:1", "2 + 2?", {"level": 1, "answer": 4}, ())
    assert (b.meta, b.system, open_image(b.media[0]).getpixel((2, 2))) == ({"answer": "a"}, "Be brief.", RED)
    assert [open_image(m).getpixel((2, 2)) for m in c.media] == [BLUE, RED]
    assert (d.text, d.system, d.meta) == ("<image>?", "Be kind.", {"answer": "blue", "completion": "blue"})
    assert open_image(d.media[0]).getpixel((2, 2)) == BLUE


def test_bad_lines_are_left_out_and_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "in" / "text.png").write_bytes(b"I am text")
    (tmp_path / "in" / "cut.png").write_bytes(png(size=(64, 64))[:-60])
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    good = [{"prompt": f"p{i}"} for i in range(4)]
    bad = [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        ([1], "a JSON list"),
        ({"prompt": 3}, "has no text or messages"),
        ({"prompt": "a\u0001"}, "control characters"),
        ({"prompt": "x", "meta": [1]}, '"meta" is not an object'),
        ({"prompt": "x", "image": "../secret.png"}, "is outside"),
        ({"prompt": "x", "image": "/etc/passwd"}, "is outside"),
        ({"prompt": "x", "image": "link.png"}, "is outside"),
        ({"prompt": "x", "image": "gone.png"}, "No such file"),
        ({"prompt": "x", "image": "text.png"}, "not a readable picture"),
        ({"prompt": "x", "image": "cut.png"}, "not a readable picture"),
        ({"prompt": "x", "image": "http://127.0.0.1/x.png"}, "download it"),
        ({"prompt": "x", "image": "data:image/png;base64,@@"}, "is not base64"),
        ({"prompt": "x", "image": "a.mp4"}, "has the name of a video"),
        ({"prompt": "x", "image": 7}, "neither bytes nor a path"),
        ({"prompt": "<image><image>", "images": ["text.png"]}, "has 2 <image> and the record 1"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "has the messages user, user"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "none of system, user and assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "no text, image or video"),
        ({"messages": []}, "has no text or messages|has the messages"),
    ]
    path = lines(tmp_path / "in" / "q.jsonl", *good[:2], *(b for b, _ in bad), b"", *good[2:])
    found = jsonl("train", path=path, heldout=0)
    assert [p.text for p in found] == ["p0", "p1", "p2", "p3"]
    assert [b.where for b in found.bad] == [f"q.jsonl:{n}" for n in range(3, 3 + len(bad))]
    for record, (_, why) in zip(found.bad, bad, strict=True):
        assert any(w in record.why for w in why.split("|")), (record, why)
    with pytest.raises(UserError, match=r"21 of 25 records cannot be used.*q.jsonl:3: is not JSON"):
        checked(found, 0.1)


def test_columns_have_the_names_that_are_given(tmp_path):
    record = {"problem": "1 + 1?", "reward_model": {"ground_truth": "2"}, "photo": [], "level": 3, "prompt": "not me"}
    path = lines(tmp_path / "q.jsonl", *[record] * 3, {"problem": "no truth"})
    options = {"prompt": "problem", "answer": "reward_model.ground_truth", "images": "photo", "meta": ["level"]}
    found = jsonl("train", path=path, heldout=0, **options)
    assert (found[0].text, found[0].meta) == ("1 + 1?", {"answer": "2", "level": 3})
    assert "has nothing under 'photo'" in found.bad[0].why
    as_messages = read_fields({"prompt": [{"role": "user", "content": "hi"}]}, Columns())
    assert as_messages.text == "hi"


def test_equal_records_stand_on_one_side_of_the_split(tmp_path):
    path = lines(tmp_path / "q.jsonl", *({"prompt": f"p{i % 20}", "answer": i % 20} for i in range(60)))
    train, held = (jsonl(s, path=path, heldout=5) for s in ("train", "heldout"))
    assert len(train) + len(held) == 60
    assert len({p.text for p in held}) == 5
    assert {p.text for p in held}.isdisjoint(p.text for p in train)
    for heldout in (20, -1, 1.5, True, float("nan"), "3"):
        with pytest.raises(UserError, match="heldout is"):
            jsonl("train", path=path, heldout=heldout)


def test_a_large_file_is_read_line_by_line_when_asked(tmp_path):
    path = lines(tmp_path / "q.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(20_000)))
    start = time.process_time()
    found = jsonl("train", path=path, heldout=0)
    assert time.process_time() - start < 10
    assert (len(found), found[19_999].text, found[12_345].meta) == (20_000, "p19999", {"answer": 12_345})
    Path(path).write_bytes(b"x" * Path(path).stat().st_size)
    with pytest.raises(UserError, match="was changed while it was in use"):
        found[5]


def test_media_are_looked_at_once(tmp_path, monkeypatch):
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png())
    path = lines(tmp_path / "q.jsonl", *({"prompt": f"p{i}", "image": f"{i}.png"} for i in range(3)))
    looked = []
    monkeypatch.setattr("mmrl.data.checks.look", lambda media, verify: looked.append(media.path))
    for _ in range(2):
        assert len(jsonl("train", path=path, heldout=0)) == 3
    assert len(looked) == 3
    (tmp_path / "1.png").write_bytes(png(size=(20, 20)))
    jsonl("train", path=path, heldout=0)
    assert looked[3:] == [str(tmp_path / "1.png")]


# --- tables ---------------------------------------------------------------------------------------------------------


def test_parquet_gives_its_pictures_as_they_are_stored(tmp_path):
    import datasets

    rows = {
        "question": ["a?", "b?", " "],
        "answer": ["1", "2", "3"],
        "image": [{"bytes": png(), "path": None}, {"bytes": png(BLUE), "path": None}, {"bytes": png(), "path": None}],
    }
    features = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    table = datasets.Dataset.from_dict(rows, features=features)
    table.to_parquet(tmp_path / "t.parquet")
    found = jsonl("train", path=str(tmp_path / "t.parquet"), heldout=0)
    assert [(p.id, p.text, p.meta["answer"]) for p in found] == [("t:0", "a?", "1"), ("t:1", "b?", "2")]
    assert read_bytes(found[1].media[0]) == png(BLUE)
    assert [str(b) for b in found.bad] == ["t.parquet row 2: the prompt is empty"]
    (tmp_path / "parts").mkdir()
    for i in range(2):
        table.select([i]).to_parquet(tmp_path / "parts" / f"{i}.parquet")
    assert [p.text for p in jsonl("train", path=str(tmp_path / "parts"), heldout=0)] == ["a?", "b?"]


def test_bad_pictures_in_a_table_are_found_when_it_is_asked_for(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": [png(), b"I am text"]})
    table.to_parquet(tmp_path / "t.parquet")
    assert len(jsonl("train", path=str(tmp_path / "t.parquet"), heldout=0)) == 2
    for _ in range(2):  # the second time from what was kept
        found = jsonl("train", path=str(tmp_path / "t.parquet"), heldout=0, verify="decode")
        assert [p.text for p in found] == ["a"]
        assert "row 1: inline image of 9 bytes: not a readable picture" in str(found.bad[0])


def test_json_is_a_list_or_an_object_a_line(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]))
    (tmp_path / "lines.json").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": "two"}\n')
    for name, answers in (("list.json", ["1", "2"]), ("lines.json", [1, "two"])):
        found = jsonl("train", path=str(tmp_path / name), heldout=0)
        assert [(p.text, p.meta["answer"]) for p in found] == list(zip("ab", answers, strict=True))


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("q.csv", b"a,b", "has no record that can be used: it is empty"),
        ("q.xlsx", b"a,b", "no .jsonl, .json, .csv, .tsv or .parquet file"),
        ("q.parquet", b"I am no table", "cannot be read as Parquet"),
        ("q.json", b"[1, 2", "record 2 is cut off"),
        ("q.jsonl", b"\n\n", "has no record that can be used: it is empty"),
        ("q.jsonl", b"x\ny", "has no record that can be used: q.jsonl:1: is not JSON"),
        ("q.pkl", b"\x80\x04.", "no .jsonl, .json, .csv, .tsv or .parquet file"),
    ],
)
def test_what_is_no_data_set_is_refused_with_the_edit(tmp_path, name, data, why):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=why):
        jsonl("train", path=str(tmp_path / name))


MAP = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    "kind", [MAP, pa.list_(MAP), pa.struct({"of": MAP}), pa.map_(pa.string(), pa.list_(MAP))], ids=str
)
def test_a_column_of_maps_is_refused_by_name(tmp_path, kind):
    pq.write_table(pa.table({"prompt": ["a"], "tags": pa.nulls(1, kind)}), tmp_path / "q.parquet")
    with pytest.raises(UserError, match=r"q\.parquet has the column tags of type map<.*: leave the column out"):
        jsonl("train", path=str(tmp_path / "q.parquet"))


def test_what_the_hub_does_not_have_is_refused_with_the_edit(tmp_path):
    for path in ("nobody/no-such-data-set", str(tmp_path / "gone.jsonl")):
        with pytest.raises(UserError, match="cannot be read"):
            jsonl("train", path=path)


# --- folders --------------------------------------------------------------------------------------------------------


def test_metadata_names_the_files_of_a_folder(tmp_path):
    for name, colour in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / name).write_bytes(png(colour))
    lines(
        tmp_path / "metadata.jsonl",
        {"file_name": "a.png", "text": "a red one", "answer": "red"},
        {"file_names": ["b.png", "a.png"], "prompt": "which is red?"},
        {"file_name": "gone.png", "text": "x"},
        {"file_name": "../a.png", "text": "x"},
        {"text": "no file"},
        {"file_name": "metadata.jsonl", "text": "x"},
        {"file_name": "a.png"},
    )
    found = folder("train", path=str(tmp_path), heldout=0)
    assert [(p.text, len(p.media)) for p in found] == [("a red one", 1), ("which is red?", 2)]
    assert found[0].meta == {"answer": "red"}
    assert open_image(found[1].media[0]).getpixel((1, 1)) == BLUE
    whys = ["No such file", "is outside", "no file under", "neither a picture nor a clip", "no text or messages"]
    assert [b.where for b in found.bad] == [f"metadata.jsonl:{n}" for n in range(3, 8)]
    for bad, why in zip(found.bad, whys, strict=True):
        assert why in bad.why


def test_texts_stand_beside_the_files_they_belong_to(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("a.png", "inner/b.png", "c.png", "broken.png", "latin.png", "lonely.png"):
        (tmp_path / name).write_bytes(png() if name != "broken.png" else b"text")
        if name != "lonely.png":
            (tmp_path / name).with_suffix(".txt").write_bytes(b"caf\xe9" if name == "latin.png" else name.encode())
    (tmp_path / "c.json").write_text('{"prompt": "from json", "answer": 1}')
    found = folder("train", path=str(tmp_path), heldout=0)
    assert [p.text for p in found] == ["a.png", "from json", "inner/b.png"]
    why = {b.where: b.why for b in found.bad}
    assert set(why) == {"broken.png", "latin.png", "lonely.png"}
    assert "not a readable picture" in why["broken.png"]
    assert "latin.txt is not UTF-8" in why["latin.png"]
    assert "no lonely.txt" in why["lonely.png"]
    assert (tmp_path / ".mmrl-checked.json").exists()
    assert [p.text for p in folder("train", path=str(tmp_path), heldout=0)] == [p.text for p in found]


def test_folders_named_after_the_splits_are_the_splits(tmp_path):
    for split in ("train", "heldout"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.png").write_bytes(png())
        (tmp_path / split / "a.txt").write_text(f"of {split}")
    assert [folder(s, path=str(tmp_path))[0].text for s in ("train", "heldout")] == ["of train", "of heldout"]
    assert folder("train", path=str(tmp_path))[0].id == "train/a.png"
    for path, why in ((tmp_path / "gone", "is no folder"), (tmp_path / "cache", "is no folder|no record")):
        with pytest.raises(UserError, match=why):
            folder("train", path=str(path))


def test_a_folder_may_hold_clips(tmp_path):
    pytest.importorskip("av")
    frames = [Image.new("RGB", (32, 32), c) for c in (RED, BLUE)]
    (tmp_path / "a.mp4").write_bytes(clips.encode(frames))
    (tmp_path / "b.mp4").write_bytes(clips.encode(frames)[:200])
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("what happens?")
    found = folder("train", path=str(tmp_path), heldout=0)
    assert [(p.id, p.media[0].kind) for p in found] == [(f"{tmp_path.name}/a.mp4", "video")]
    assert "cannot be decoded" in found.bad[0].why


# --- clips ----------------------------------------------------------------------------------------------------------


def middle(frame: Image.Image, colour: str) -> np.ndarray:
    """Centre of mass (x, y) of the pixels of a colour."""
    pixels = np.asarray(frame, int)
    ys, xs = np.nonzero(np.abs(pixels - clips.COLOURS[colour]).max(-1) < 40)
    assert len(xs) > 20
    return np.array([xs.mean(), ys.mean()])


def test_the_shape_moves_the_way_the_answer_says():
    pytest.importorskip("av")
    for split in ("train", "heldout"):
        found = clips.prompts(split, samples=80, seed=5)
        for prompt in found:
            clip = open_clip(prompt.media[0])
            colour = prompt.meta["colour"]
            assert prompt.text == f"Which way does the {colour} {prompt.meta['kind']} move?"
            assert (len(clip.frames), clip.frames[0].size, clip.fps) == (8, (32, 32), 8.0)
            path = np.stack([middle(f, colour) for f in clip.frames])
            ahead = np.array(clips.DIRECTIONS[prompt.meta["answer"]])
            steps = np.diff(path, axis=0)
            assert (steps @ ahead > 0.5).all()
            assert np.abs(steps @ ahead[::-1]).max() < 0.5
            assert path[-1] @ ahead - path[0] @ ahead > 8


def test_clips_keep_their_colours_through_the_codec():
    pytest.importorskip("av")
    for colour, rgb in clips.COLOURS.items():
        frames = clips.clip(colour, "square", "left", random.Random(1))
        (prompt_media,) = [mmrl.core.media.Media("video", data=clips.encode(frames))]
        decoded = open_clip(prompt_media).frames
        for drawn, shown in zip(frames, decoded, strict=True):
            assert np.abs(np.asarray(drawn, int) - np.asarray(shown, int)).max() <= 16
            x, y = middle(shown, colour).round().astype(int)
            assert shown.getpixel((int(x), int(y))) == pytest.approx(rgb, abs=6)


def test_the_splits_share_no_pair_and_neither_favours_an_answer():
    pytest.importorskip("av")
    metas = {s: [p.meta for p in clips.prompts(s, samples=60)] for s in ("train", "heldout")}
    pairs = {s: {(m["colour"], m["kind"]) for m in found} for s, found in metas.items()}
    assert pairs["train"].isdisjoint(pairs["heldout"])
    assert len(pairs["train"] | pairs["heldout"]) == 20
    for i, everything in enumerate((clips.COLOURS, clips.KINDS)):
        assert {p[i] for p in pairs["train"]} == set(everything)
    for split, found in metas.items():
        counts = collections.Counter(m["answer"] for m in found)
        assert set(counts.values()) == {15}, split


def test_clips_are_the_same_bytes_again_and_a_longer_set_begins_with_the_shorter():
    pytest.importorskip("av")
    a, b = clips.prompts(samples=5, seed=1), clips.prompts(samples=50, seed=1)
    assert [(p.id, p.text, p.media[0].data) for p in a] == [(p.id, p.text, p.media[0].data) for p in b[:5]]
    assert a[0].media[0].data != clips.prompts(samples=5, seed=2)[0].media[0].data
    asked = collections.Counter(
        p.meta["task"] for p in clips.prompts(samples=180, questions=("direction", "colour", "kind"))
    )
    assert set(asked.values()) == {60}


def test_clips_may_be_larger_and_cost_milliseconds():
    pytest.importorskip("av")
    found = clips.prompts(samples=10**6, size=96)
    start = time.process_time()
    assert all(found[i * 9973].media for i in range(50))
    assert time.process_time() - start < 5
    assert open_clip(found[999_999].media[0]).frames[0].size == (96, 96)


@pytest.mark.parametrize(
    "options", [{"split": "all"}, {"size": 40}, {"size": 16}, {"questions": ["why"]}, {"samples": 0}]
)
def test_clips_that_cannot_be_are_refused(options):
    with pytest.raises(UserError, match="|".join(("split is", "size is", "questions are", "samples is"))):
        clips.prompts(**options)


def test_clips_without_pyav_name_the_extra(monkeypatch):
    monkeypatch.setattr("mmrl.core.media.decoding.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .*\[vlm\]'"):
        clips.prompts()


# --- all of them ----------------------------------------------------------------------------------------------------


def test_the_data_sets_are_on_the_shelf_with_a_line_each():
    found = {entry.name: entry.summary for entry in entries("datasets")}
    assert {"jsonl", "folder", "shards", "clips"} <= set(found)
    assert all(found[name] for name in ("jsonl", "folder", "shards", "clips"))


def test_our_folder_never_hides_hugging_face_from_jsonl():
    code = "import mmrl; m = mmrl.load('datasets', 'jsonl'); import datasets; assert datasets.load_dataset"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], check=True)


@pytest.mark.parametrize("name", ["jsonl", "folder"])
def test_what_is_held_out_does_not_depend_on_where_the_folder_lies(tmp_path, name):
    first, second = tmp_path / "a", tmp_path / "elsewhere" / "b"
    first.mkdir()
    rows = []
    for i in range(30):
        Image.new("RGB", (32, 32), (8 * i, 0, 0)).save(first / f"{i}.png")
        rows.append({"prompt": "Which?", "image" if name == "jsonl" else "file_name": f"{i}.png"})
    (first / ("data.jsonl" if name == "jsonl" else "metadata.jsonl")).write_text("\n".join(map(json.dumps, rows)))
    shutil.copytree(first, second)
    held = []
    for folder in (first, second):
        path = folder / "data.jsonl" if name == "jsonl" else folder
        made = mmrl.load("datasets", f"{name}:prompts")("heldout", path=str(path), heldout=8)
        held.append([m.path and m.path.rpartition("/")[2] for p in made for m in p.media])
    assert len(held[0]) == 8
    assert held[0] == held[1]
