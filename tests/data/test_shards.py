"""Tar shards: built, indexed and read in place; what is hostile or broken is left out and named."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mmrl
import mmrl.core.media
from mmrl import cli
from mmrl.controller import Controller
from mmrl.core.errors import UserError
from mmrl.core.media import open_clip, open_image
from mmrl.core.randomness import permutation
from mmrl.core.trajectory import Prompt
from mmrl.data import index as indexing
from mmrl.data.index import build_index, load_index
from mmrl.data.records import BadRecord, Records, checked, in_split
from mmrl.data.tar import read_members

prompts = mmrl.load("datasets", "shards:prompts")
COLOURS = [(225, 45, 45), (40, 175, 70), (60, 95, 235)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(colour=(225, 45, 45), size=(16, 12), kind="PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", **fields) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def write_tar(path: Path, *members: Member, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def sample(
    key: str, record: object = None, media: dict[str, bytes] | None = None
) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The members of a good sample, which says its key."""
    record = {"prompt": f"What colour is {key}?", "answer": key} if record is None else record
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    media = {"png": png()} if media is None else media
    return [member(f"{key}.json", text), *(member(f"{key}.{s}", d) for s, d in media.items())]


def shard_of(tmp_path: Path, *samples, name: str = "s.tar", form: int = tarfile.PAX_FORMAT) -> Path:
    return write_tar(tmp_path / name, *(m for s in samples for m in s), form=form)


def film() -> bytes:
    pytest.importorskip("av")
    return mmrl.load("datasets", "clips:encode")([Image.new("RGB", (32, 32), c) for c in COLOURS])


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_read_in_place_from_every_tar_format(tmp_path, form):
    deep = "/".join(["folder" * 5] * 4) + "/0007" if form != tarfile.USTAR_FORMAT else "deep/0007"
    several = {"10.png": png(COLOURS[2]), "2.jpg": png(COLOURS[1], kind="JPEG"), "0.webp": png(COLOURS[0], kind="WEBP")}
    shard = shard_of(tmp_path, sample("a"), sample(deep, None, several), sample("t", None, {}), form=form)
    found = prompts("train", path=str(tmp_path), heldout=0)
    assert len(found) == 3
    assert found.bad == []
    assert [p.id for p in found] == ["s/a", f"s/{deep}", "s/t"]
    assert (found[0].text, found[0].meta) == ("What colour is a?", {"answer": "a"})
    assert found[2].media == ()
    assert [m.kind for m in found[1].media] == ["image"] * 3
    for medium, colour in zip(found[1].media, COLOURS, strict=True):  # 0, 2, 10: by number
        assert max(abs(a - b) for a, b in zip(open_image(medium).getpixel((3, 3)), colour, strict=True)) < 12
        assert medium.path == str(shard)
        assert medium.data is None


def test_text_comes_from_json_or_txt_and_placeholders_order_the_media(tmp_path):
    media = {"0.png": png(), "1.png": png(COLOURS[1])}
    shard_of(
        tmp_path,
        [member("a.txt", "only täxt".encode()), member("a.png", png())],
        [*sample("b", {"meta": {"x": [1]}, "system": "Be brief."}), member("b.txt", b"from the text")],
        sample("c", {"prompt": "<image> or <image>?"}, media),
        sample("d", {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]}),
    )
    a, b, c, d = prompts("train", path=str(tmp_path), heldout=0)
    assert a.text == "only täxt"
    assert (b.text, b.meta, b.system) == ("from the text", {"x": [1]}, "Be brief.")
    assert len(c.media) == 2
    assert d.text == "<image>?"


def test_clips_keep_their_frames_and_mix_with_pictures(tmp_path):
    record = {"prompt": "<video> then <image>", "frames": {"1.mp4": [2, 0]}}
    shard_of(tmp_path, sample("a", record, {"0.png": png(), "1.mp4": film()}), sample("b", None, {"mp4": film()}))
    a, b = prompts("train", path=str(tmp_path), heldout=0)
    assert [m.kind for m in a.media] == ["video", "image"]
    assert list(open_clip(a.media[0]).indices) == [2, 0]
    for frame, colour in zip(open_clip(b.media[0]).frames, COLOURS, strict=True):
        assert frame.getpixel((9, 9)) == pytest.approx(colour, abs=6)
    (entry, _) = load_index(tmp_path / "s.tar", "decode").entries
    assert [(p.suffix, p.width, p.height, p.frames) for p in entry.media] == [
        ("0.png", 16, 12, None),
        ("1.mp4", 32, 32, 3),
    ]


def test_members_of_other_sorts_are_counted_and_never_opened(tmp_path):
    evil = b"cos\nsystem\n(S'touch " + str(tmp_path / "touched").encode() + b"'\ntR."
    shard_of(tmp_path, [*sample("a"), member("a.pyd", evil), member("a.pth", evil), member("a.cls", b"3")])
    assert len(prompts("train", path=str(tmp_path), heldout=0)) == 1
    assert load_index(tmp_path / "s.tar", "decode").ignored == {"pyd": 1, "pth": 1, "cls": 1}
    assert not (tmp_path / "touched").exists()


def test_named_shards_are_the_splits_and_others_are_split_by_content(tmp_path):
    named = tmp_path / "named"
    named.mkdir()
    for split in ("train", "heldout"):
        shard_of(named, *(sample(f"{split}{i}") for i in range(5)), name=f"{split}-000.tar")
    for split in ("train", "heldout"):
        assert {p.meta["answer"] for p in prompts(split, path=str(named))} == {f"{split}{i}" for i in range(5)}
    (named / "heldout-000.tar").unlink()
    with pytest.raises(UserError, match=r"none named heldout-\*.tar"):
        prompts("heldout", path=str(named))
    plain = tmp_path / "plain"
    plain.mkdir()
    twice = {"prompt": "the same", "answer": "same"}
    shard_of(plain, *(sample(f"{i}") for i in range(30)), *(sample(f"x{i}", twice) for i in range(10)))
    train, held = (list(prompts(s, path=str(plain), heldout=0.25)) for s in ("train", "heldout"))
    assert len(train) + len(held) == 40
    assert {p.text for p in train}.isdisjoint(p.text for p in held)
    assert len({p.text for p in held}) == 8  # a quarter of 31, rounded up


# --- hostile archives -----------------------------------------------------------------------------------------------


def test_hostile_members_are_left_out_and_named(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png())
    link = {"type": tarfile.SYMTYPE, "linkname": str(secret)}
    write_tar(
        tmp_path / "s.tar",
        *sample("good"),
        *sample("link", media={}),
        member("link.png", **link),
        member("hard.json", type=tarfile.LNKTYPE, linkname="good.json"),
        member("device.png", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("pipe.json", type=tarfile.FIFOTYPE),
        *sample("../../outside"),
        *sample("/etc/absolute"),
        *sample("a\\b"),
        member("folder/", type=tarfile.DIRTYPE),
        *sample("twice"),
        *sample("twice"),
        member("lonely.png", png()),
        *sample("fine"),
    )
    found = prompts("train", path=str(tmp_path), heldout=0)
    assert [p.meta["answer"] for p in found] == ["good", "fine"]
    why = {b.where.removeprefix("s.tar/"): b.why for b in found.bad}
    expected = {
        "link": "symbolic link",
        "hard": "hard link",
        "device": "character device",
        "pipe": "is a pipe",
        "../../outside": "leaves the archive",
        "/etc/absolute": "leaves the archive",
        "a\\b": "leaves the archive",
        "twice": "is there twice",
        "lonely": "no .json and no .txt",
    }
    assert set(why) == set(expected)
    for key, text in expected.items():
        assert text in why[key]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.tar", "s.tar.index.json", "secret.png"]


def test_broken_samples_are_left_out_and_named(tmp_path):
    cut = png(size=(64, 64))
    cases = {
        "json": (b"{not json", None, "is not JSON"),
        "list": ([1], None, "a JSON list"),
        "deep": (b"[" * 100_000, None, "nested too deeply"),
        "latin": (b'{"prompt": "caf\xe9"}', None, "not UTF-8"),
        "empty": ({"prompt": " "}, None, "the prompt is empty"),
        "none": ({"answer": 1}, None, "has no text"),
        "nan": (b'{"prompt": "x", "answer": NaN}', None, "is not JSON"),
        "meta": ({"prompt": "x", "meta": 3}, None, '"meta" is not an object'),
        "marks": ({"prompt": "<image> and <image>"}, None, "the prompt has 2 <image> and the record 1"),
        "paths": ({"prompt": "x", "image": "/etc/passwd"}, None, "names media in its JSON"),
        "frames": ({"prompt": "x", "frames": {"png": ["a"]}}, None, "no list of frame numbers"),
        "text": (None, {"png": b"I am text"}, ".png: not a readable picture"),
        "cut": (None, {"png": cut[: len(cut) // 2]}, ".png: not a readable picture"),
        "void": (None, {"png": b""}, ".png: is empty"),
    }
    shard_of(tmp_path, sample("good"), *(sample(key, record, media) for key, (record, media, _) in cases.items()))
    found = prompts("train", path=str(tmp_path), heldout=0)
    assert [p.id for p in found] == ["s/good"]
    why = {b.where.removeprefix("s.tar/"): b.why for b in found.bad}
    for key, (_, _, text) in cases.items():
        assert text in why.pop(key), key
    assert not why
    with pytest.raises(UserError, match="14 of 15 records cannot be used, more than 10%"):
        checked(found, 0.1)
    assert len(checked(found, 0.95)) == 14


def test_broken_clips_are_left_out_and_named(tmp_path):
    data = film()
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    bad = {"cut": data[: len(data) // 2], "text": b"no film" * 30, "playlist": playlist}
    shard_of(tmp_path, sample("good", None, {"mp4": data}), *(sample(k, None, {"mp4": d}) for k, d in bad.items()))
    found = prompts("train", path=str(tmp_path), heldout=0)
    assert [p.id for p in found] == ["s/good"]
    assert {b.where for b in found.bad} == {f"s.tar/{k}" for k in bad}
    record = {"prompt": "x", "frames": {"mp4": [3]}}
    shard_of(tmp_path, sample("good"), sample("frame", record, {"mp4": data}))
    (bad_frame,) = prompts("train", path=str(tmp_path), heldout=0).bad
    assert "names frame 3 of 3" in bad_frame.why


def test_what_is_left_of_a_shard_that_is_cut_or_damaged_is_read_and_the_rest_is_named(tmp_path):
    whole = shard_of(tmp_path, *(sample(str(i)) for i in range(6))).read_bytes()
    path = tmp_path / "s.tar"
    third = whole.find(b"3.json")
    fourth = whole.find(b"4.json")
    cases = [
        (whole[: third + 512], "012", "is cut off: '3.json'"),
        (whole[: third + 100], "01", "is damaged"),
        (whole[:third], "01", "without an end mark"),
        (whole[:third] + os.urandom(512) + whole[third + 512 :], "0145", "is damaged: the bytes at"),
        (whole[:third] + os.urandom(fourth - third) + whole[fourth:], "015", f"read on from byte {fourth:,}"),
        (whole[:third] + bytes(1024) + whole[third:], "0145", "is damaged: the bytes at"),
        (os.urandom(512) + whole[512:], "12345", "is no tar file"),
        (whole + whole.replace(b"5.", b"6."), "6", "is damaged: the bytes at"),  # all others are there twice
        (b"I am no archive" * 100, "", "is no tar file"),
        (b"", "", "is no tar file"),
    ]
    for data, good, why in cases:
        path.write_bytes(data)
        index = build_index(path, "decode")
        assert any(b.where == "s.tar" and why in b.why for b in index.bad), (why, index.bad)
        if good != "6":
            assert "".join(e.key for e in index.entries) == good, why
    path.write_bytes(whole)
    assert build_index(path, "decode").bad == []


def test_a_sample_beside_damage_is_not_taken_for_one_without_pictures(tmp_path):
    whole = bytearray(shard_of(tmp_path, *(sample(str(i)) for i in range(4))).read_bytes())
    at = whole.find(b"1.png")
    whole[at + 120] ^= 0xFF
    (tmp_path / "s.tar").write_bytes(whole)
    found = prompts("train", path=str(tmp_path), heldout=0)
    assert [(p.id, len(p.media)) for p in found] == [("s/0", 1), ("s/3", 1)]
    assert {b.where for b in found.bad} == {"s.tar", "s.tar/1", "s.tar/2"}


def test_an_archive_of_nothing_but_faults_is_given_up(tmp_path):
    path = tmp_path / "s.tar"
    good = shard_of(tmp_path, [member("a.txt", b"x")]).read_bytes()[:1024]
    path.write_bytes(b"".join((good + b"garbage!" * 64) for _ in range(5000)))
    start = time.process_time()
    members, bad = read_members(path)
    assert time.process_time() - start < 60
    assert len(members) == len(bad) - 1 == 1000
    assert all("next to damage" in (m.why or "") for m in members)
    assert "the rest of it was not read" in bad[-1].why


def test_absurd_sizes_cost_nothing(tmp_path):
    """A member that claims terabytes, one that claims less than nothing, and headers that want memory."""
    path = tmp_path / "s.tar"
    good = shard_of(tmp_path, sample("good"), sample("last")).read_bytes().rstrip(b"\0")
    good += bytes(-len(good) % 512)

    def header(name: str, size: int, kind: bytes = b"0") -> bytes:
        info = tarfile.TarInfo(name)
        info.size, info.type = size, kind
        return info.tobuf(tarfile.GNU_FORMAT)

    backwards = bytearray(header("back.png", 1))
    backwards[124:136] = b"\xff" * 4 + (-2048 % 2**64).to_bytes(8, "big")  # a negative size in base 256
    backwards[148:156] = b" " * 8
    backwards[148:156] = f"{sum(backwards):06o}\0 ".encode()
    pax = b"30 size=-100000000000000000000\n"
    hostile = {
        "terabytes": header("huge.png", 1 << 42),
        "long name": header("././@LongLink", 1 << 40, b"L") + b"x" * 512,
        "pax": header("pax", 1 << 33, b"x") + b"1 path=x\n" * 60,
        "pax size": header("pax", len(pax), b"x") + pax.ljust(512, b"\0") + header("p.png", 0),
        "backwards": bytes(backwards),
        "many pax": header("pax", 0, b"g") * 5000,
    }
    for name, data in hostile.items():
        path.write_bytes(good + data + bytes(1024))
        start = time.process_time()
        members, bad = read_members(path)
        assert time.process_time() - start < 30, name
        usable = [m.name for m in members if m.why is None]
        assert usable[:2] == ["good.json", "good.png"], name
        assert set(usable[2:]) <= {"last.json", "last.png"}, name
        assert bad or any(m.why for m in members) or name == "many pax", name


def test_a_member_larger_than_the_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.data.tar.LIMITS", mmrl.core.media.Limits(bytes=400))
    shard_of(tmp_path, sample("a"), sample("b", None, {"png": png() + bytes(400)}))
    (bad,) = prompts("train", path=str(tmp_path), heldout=0).bad
    assert "at most 400 are read" in bad.why


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_damage_is_never_more_than_bad_records(tmp_path_factory, seed):
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("d") / "s.tar"
    form = rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    data = bytearray(shard_of(path.parent, *(sample(f"{i}") for i in range(4)), form=form).read_bytes())
    for _ in range(rng.choice([1, 4, 30])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data[: rng.randrange(512, len(data))] if rng.random() < 0.3 else data)
    index = build_index(path, "decode")
    for i in range(len(index.entries)):
        assert index.prompt(i).text


# --- the index ------------------------------------------------------------------------------------------------------


def test_the_index_is_built_once_and_again_when_the_shard_changes(tmp_path, capsys, monkeypatch):
    shard = shard_of(tmp_path, sample("a"), sample("b", b"broken"))
    built: list[str] = []
    real = indexing.read_members
    monkeypatch.setattr(indexing, "read_members", lambda path: built.append(path.name) or real(path))

    def read() -> list[str]:
        found = prompts("train", path=str(tmp_path), heldout=0)
        assert len(found.bad) == 1
        return [p.meta["answer"] for p in found]

    assert read() == read() == ["a"]
    assert built == ["s.tar"]
    assert capsys.readouterr().err.count("indexing shards: ") == 1
    shard_of(tmp_path, sample("a"), sample("b", b"broken"), sample("c"))
    assert read() == ["a", "c"]
    os.utime(shard, ns=(1, 1))
    assert read() == ["a", "c"]
    assert built == ["s.tar"] * 3
    kept = tmp_path / "s.tar.index.json"
    for broken in ("", "[]", '{"stamp": 1}', kept.read_text().replace('"samples"', '"simples"')):
        kept.write_text(broken)
        assert read() == ["a", "c"]
    assert len(built) == 7


def test_an_index_that_only_read_headers_does_not_pass_for_one_that_decoded(tmp_path):
    cut = png(size=(64, 64))[:-60]
    shard = shard_of(tmp_path, sample("a"), sample("b", None, {"png": cut}))
    assert len(prompts("train", path=str(tmp_path), heldout=0, verify="headers")) == 2
    assert load_index(shard, "decode") is None
    assert len(prompts("train", path=str(tmp_path), heldout=0)) == 1
    assert len(prompts("train", path=str(tmp_path), heldout=0, verify="headers")) == 1  # what is known is used
    with pytest.raises(UserError, match="give decode or headers"):
        prompts("train", path=str(tmp_path), heldout=0, verify="none")


def test_beside_read_only_shards_the_index_goes_to_the_cache(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    shard = shard_of(folder, sample("a"), sample("b"))
    before = {p.name for p in folder.iterdir()}
    real = indexing.store.tempfile.mkstemp

    def only_elsewhere(dir: Path, **options):
        if Path(dir) == folder:
            raise PermissionError(13, "Permission denied", str(dir))  # what root would never see
        return real(dir=dir, **options)

    monkeypatch.setattr(indexing.store.tempfile, "mkstemp", only_elsewhere)
    assert len(prompts("train", path=str(folder), heldout=0)) == 2
    assert {p.name for p in folder.iterdir()} == before
    assert len(list((tmp_path / "cache" / "mmrl" / "index").iterdir())) == 1
    assert load_index(shard, "decode") is not None
    monkeypatch.setattr(indexing.store.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError("full")))
    os.utime(shard, ns=(5, 5))
    assert len(prompts("train", path=str(folder), heldout=0)) == 2  # without any place to keep it, it is built anew


def test_a_shard_that_changes_in_use_is_noticed(tmp_path):
    shard = shard_of(tmp_path, sample("a"), sample("b"))
    found = prompts("train", path=str(tmp_path), heldout=0)
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match="was changed while it was in use"):
        found[1]


def test_a_folder_without_shards_is_refused_with_the_edit(tmp_path):
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "a.tar.gz").touch()
    for path, why in [
        ("nowhere", "is no folder"),
        (".", "has no .tar file"),
        ("packed", "gunzip"),
        ("x.tar", "cannot be"),
    ]:
        with pytest.raises(UserError, match=why):
            prompts("train", path=str(tmp_path / path))
    shard_of(tmp_path, sample("a", b"x"))
    with pytest.raises(UserError, match=r"has no sample that can be used: s.tar/a: is not JSON"):
        prompts("train", path=str(tmp_path))


# --- order, shards of controllers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_controllers_cover_an_epoch_without_overlap_or_loss(tmp_path, size):
    """Every controller takes every ``size``-th place of one permutation, as ``Controller.slots`` does."""
    shard_of(tmp_path, *(sample(f"a{i}") for i in range(11)), name="a.tar")
    shard_of(tmp_path, *(sample(f"b{i}") for i in range(6)), name="b.tar")
    each = [prompts("train", path=str(tmp_path), heldout=0) for _ in range(size)]
    for epoch in range(2):
        shares = [permutation(7, epoch, 17)[rank::size] for rank in range(size)]
        taken = [each[rank][i].id for rank, share in enumerate(shares) for i in share]
        assert len(taken) == len(set(taken)) == 17
    steps = [s.prompt.id for step in range(17) for s in Controller(seed=7).slots(step, each[0], per_step=1)]
    assert steps == [each[0][i].id for i in permutation(7, 0, 17)]
    assert steps[9:] == [s.prompt.id for t in range(9, 17) for s in Controller(seed=7).slots(t, each[-1], 1)]  # resumed


@given(n=st.integers(2, 60), heldout=st.one_of(st.integers(0, 20), st.floats(0, 0.9)))
def test_splits_are_disjoint_cover_everything_and_do_not_depend_on_the_order(n, heldout):
    digests = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(n)]
    try:
        train, held = (in_split(digests, s, heldout, "d") for s in ("train", "heldout"))
    except UserError:
        assert heldout >= n or heldout > (n - 1) / n
        return
    if heldout == 0:
        assert train == held == list(range(n))
        return
    assert sorted(train + held) == list(range(n))
    again = in_split(digests[::-1], "heldout", heldout, "d")
    assert {digests[i] for i in held} == {digests[::-1][i] for i in again}


def test_records_are_made_when_asked_for():
    asked: list[int] = []
    records = Records(5, lambda i: asked.append(i) or Prompt(str(i), "x"), [BadRecord("f:1", "is bad")])
    assert (len(records), asked) == (5, [])
    assert (records[-1].id, [p.id for p in records[1:3]], asked) == ("4", ["1", "2"], [4, 1, 2])
    with pytest.raises(IndexError):
        records[5]
    assert checked(records, 0.2) == [BadRecord("f:1", "is bad")]
    with pytest.raises(UserError, match=r"1 of 6 records cannot be used, more than 10% \(f:1: is bad\)"):
        checked(records, 0.1)
    assert checked([Prompt("a", "b")], 0.0) == []


# --- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> int:
    before = sys.argv
    sys.argv = ["mmrl", "data", *arguments]
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    finally:
        sys.argv = before
    return 0


def test_shards_of_pictures_and_clips_are_built_indexed_and_read(tmp_path, capsys):
    pytest.importorskip("webdataset")
    pytest.importorskip("av")
    out = tmp_path / "out"
    command = ["build", "scenes", "clips", "--samples", "24", "--heldout", "6", "--shards", "2", "--seed", "3"]
    assert run(*command, "--out", str(out)) == 0
    assert "30 samples in 4 shards" in capsys.readouterr().out
    assert run("index", str(out)) == 0
    table = capsys.readouterr().out
    assert "train-00001.tar" in table
    assert "bad " not in table.splitlines()[-1]
    train, held = (prompts(s, path=str(out)) for s in ("train", "heldout"))
    assert (len(train), len(held)) == (24, 6)
    kinds = {m.kind for p in train for m in p.media}
    assert kinds == {"image", "video"}
    members = [m for p in sorted(out.glob("train-*.tar")) for m in read_members(p)[0]]
    names = {m.name.rpartition(".")[2] for m in members}
    assert names == {"json", "png", "jpg", "mp4"}
    for prompt in train:
        assert prompt.meta["answer"]
        for medium in prompt.media:
            assert open_image(medium).width >= 32 if medium.kind == "image" else len(open_clip(medium).frames) == 8
    assert run(*command, "--out", str(tmp_path / "again")) == 0
    for path in out.glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert run(*command, "--out", str(out)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(*command, "--out", str(out), "--overwrite") == 0


def test_webdataset_itself_reads_what_is_built(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    pytest.importorskip("av")
    assert run("build", "clips", "--samples", "5", "--out", str(tmp_path / "out")) == 0
    read = list(webdataset.WebDataset(str(tmp_path / "out" / "train-00000.tar"), shardshuffle=False))
    ours = prompts("train", path=str(tmp_path / "out"))
    assert [json.loads(s["json"])["prompt"] for s in read] == [p.text for p in ours]
    assert [s["mp4"] for s in read] == [mmrl.core.media.read_bytes(p.media[0]) for p in ours]


def test_bad_records_are_named_by_the_command_and_cost_the_exit_code(tmp_path, capsys):
    shard_of(tmp_path, sample("a"), sample("b", b"broken"))
    assert run("index", str(tmp_path)) == 1
    assert "bad  s.tar/b: is not JSON" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["build", "clisp", "--samples", "3", "--out", "o"], "did you mean 'clips'"),
        (["build", "shapes", "--samples", "3", "--out", "o"], "shapes has no pictures or clips"),
        (["build", "shapes", "--samples", "99999", "--out", "o"], "ask for fewer than 99999"),
        (["build", "clips", "--samples", "3", "--shards", "4", "--out", "o"], "4 shards are more than the samples"),
        (["build", "clips", "--samples", "3", "--out", "o", "--options", "sizes=64"], "change --options"),
        (["index", "nowhere"], "has no .tar file"),
    ],
)
def test_mistakes_are_refused_with_the_edit(tmp_path, monkeypatch, capsys, arguments, why):
    if arguments[0] == "build":
        pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_without_webdataset_the_error_names_the_extra(tmp_path, monkeypatch, capsys):
    from mmrl.core.media import decoding

    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: None)
    assert run("build", "clips", "--samples", "3", "--out", str(tmp_path / "o")) == 2
    assert "[vlm]'" in capsys.readouterr().err


def test_the_data_commands_import_no_torch_to_show_their_help():
    code = "import sys, mmrl.cli.data; assert not {'torch', 'av', 'webdataset', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
