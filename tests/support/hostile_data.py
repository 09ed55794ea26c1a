"""Hostile folders and tables, made from a seed, and a process that reads many of them and says what became of each.

    python tests/support/hostile_data.py FIRST LAST FOLDER     # a line of JSON for each number from FIRST to LAST - 1

Each is read in a process of its own, which ends when it has computed for ``COMPUTED_S``, or waited for ``PATIENCE_S``.
What counts is how it ended (``read``, ``refused`` by a ``UserError``, ``traceback``, ``hang``, ``crash``) and how much
memory it took beyond what the program had before. A secret lies outside each folder: a prompt that contains it was
read from there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECRET = "the secret of another folder"
COMPUTED_S, PATIENCE_S = 60, 300
MIB = 1 << 20
Case = tuple[str, dict[str, Any]]
"""The name of a data set (or ``labels``), and its options."""


def _picture(colour: int = 0) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8), (colour % 256, 30, 60)).save(out, "PNG")
    return out.getvalue()


def _escape(rng: random.Random, home: Path, place: Path) -> str:
    """Put something at ``place`` that no one may follow or wait for; returns what."""
    kind = rng.choice(("secret", "zero", "pipe", "loop", "chain", "socket", "folder", "urandom", "far"))
    outside = home.parent / "secret.txt"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(place.parent):
            one.bind(place.name)
    elif kind == "chain":
        (place.parent / ".next").symlink_to(outside)
        place.symlink_to(".next")
    else:
        targets = {"secret": outside, "zero": "/dev/zero", "loop": place.name, "urandom": "/dev/urandom"}
        place.symlink_to(targets.get(kind, "/etc/passwd"))
    return kind


def pictures(rng: random.Random, home: Path) -> Case:
    """Captions, metadata and folders that leave the folder or hang."""
    names = [f"{n}.png" for n in range(4)]
    for n, name in enumerate(names):
        (home / name).write_bytes(_picture(n))
        (home / name).with_suffix(".txt").write_text(f"a caption {n}")
    for _ in range(rng.randint(1, 3)):
        what = rng.choice(("caption", "json", "metadata", "csv", "picture", "split", "checked", "name", "deep", "long"))
        new = f"x{rng.randrange(1000)}"
        if what in ("caption", "json"):
            (home / f"{new}.png").write_bytes(_picture())
            _escape(rng, home, home / f"{new}.{rng.choice(('txt', 'caption')) if what == 'caption' else 'json'}")
        elif what == "metadata" and not (home / "metadata.jsonl").exists():
            if rng.random() < 0.5:
                with contextlib.suppress(FileExistsError):
                    _escape(rng, home, home / "metadata.jsonl")
            else:
                files = [
                    "../secret.txt",
                    "/etc/passwd",
                    "0.png",
                    "a\0b.png",
                    "../" * 30 + "etc/x.png",
                    "x" * 4000 + ".png",
                ]
                rows = [{"file_name": rng.choice(files), "prompt": f"p{n}"} for n in range(5)]
                (home / "metadata.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        elif what == "csv" and not (home / "metadata.csv").exists():
            with contextlib.suppress(FileExistsError):
                _escape(rng, home, home / "metadata.csv")
        elif what == "picture":
            _escape(rng, home, home / f"{new}.png")
        elif what == "split" and not (home / "train").exists():
            (home / "train").symlink_to(rng.choice((home.parent, Path("/etc"), home)))
        elif what == "checked":
            with contextlib.suppress(FileExistsError):
                _escape(rng, home, home / ".mmrl-checked.json")
        elif what == "name":
            odd = rng.choice(
                (b"\xff\xfe.png", b"a\nb.png", b"\x1b[2J.png", b" lead.png", b"q\"'.png", "é.png".encode())
            )
            Path(os.fsdecode(os.path.join(os.fsencode(home), odd))).write_bytes(_picture(7))
            Path(os.fsdecode(os.path.join(os.fsencode(home), odd[:-4] + b".txt"))).write_text("odd")
        elif what == "deep":
            (home / f"{new}.png").write_bytes(_picture())
            (home / f"{new}.json").write_text('{"prompt": ' + "[" * 20_000 + "]" * 20_000 + "}")
        elif what == "long":
            (home / f"{new}.png").write_bytes(_picture())
            (home / f"{new}.txt").write_bytes(b"y" * rng.choice((2, 15, 40)) * MIB)
    return "folder:prompts", {"path": str(home)}


def lines(rng: random.Random, home: Path) -> Case:
    """JSONL, JSON lists and lists of prompts with records that are too large, too deep or broken."""
    good = [json.dumps({"prompt": f"p{n}", "answer": n}) for n in range(5)]
    odd = {
        "deep": lambda: "[" * 100_000 + "]" * 100_000,
        "deep object": lambda: '{"a":' * 900 + "1" + "}" * 900,
        "deep meta": lambda: '{"prompt": "p", "meta": {"a": ' + "[" * 900 + "]" * 900 + "}}",
        "long prompt": lambda: json.dumps({"prompt": "z" * (rng.choice((2, 20, 60)) * MIB)}),
        "emoji": lambda: json.dumps({"prompt": "\U0001f600" * (7 * MIB), "a": "a" * (3 * MIB)}, ensure_ascii=False),
        "lists": lambda: '{"prompt": "p", "x": [' + "[]," * (10 * MIB) + "[]]}",
        "keys": lambda: "{" + ",".join(f'"k{n}": 1' for n in range(200_000)) + ', "prompt": "p"}',
        "number": lambda: '{"prompt": ' + "9" * 100_000 + "}",
        "surrogate": lambda: '{"prompt": "\\ud800"}',
        "nan": lambda: '{"prompt": "p", "answer": NaN}',
        "invisible": lambda: json.dumps({"prompt": "\u200b\u2060\ufeff"}),
        "null": lambda: "null",
        "data url": lambda: json.dumps({"prompt": "p", "image": "data:image/png;base64," + "A" * (20 * MIB)}),
        "path": lambda: json.dumps(
            {"prompt": "p", "image": rng.choice(("/dev/zero", "../secret.txt", "\0", "a" * 9999))}
        ),
        "id": lambda: json.dumps({"prompt": "p", "id": "\x1b[2J" * 100_000}),
        "many": lambda: "\n".join(["{}"] * rng.choice((200_000, 2_000_000))),
        "binary": lambda: "\udcff\udcfe" * 1000,
    }
    rows = [*good, *(odd[rng.choice(list(odd))]() for _ in range(rng.randint(1, 2)))]
    rng.shuffle(rows)
    form = rng.choice(("jsonl", "json", "prompts", "cr", "txt"))
    body = {"json": "[" + ",".join(rows) + "]", "cr": "\r".join(rows)}.get(form, "\n".join(rows))
    file = home / f"data.{'txt' if form == 'txt' else 'json' if form == 'json' else 'jsonl'}"
    file.write_bytes(body.encode("utf-8", "surrogateescape"))
    return ("prompts:prompts" if form in ("prompts", "txt") else "jsonl:prompts"), {"path": str(file)}


def columns(rng: random.Random, home: Path) -> Case:
    """CSV and TSV with too much of something."""
    header, row = "prompt,answer\n", "p,1\n"
    kind = rng.choice(("columns", "row", "quote", "cell", "twice", "nul", "cr", "lines", "commas", "one line"))
    body = {
        "columns": lambda: ",".join(f"c{n}" for n in range(100_000)) + "\n" + "1," * 99_999 + "1\n",
        "row": lambda: header + row + "1," * 10_000_000 + "\n" + row,
        "quote": lambda: header + row + '"never closed\n' + row * 5_000_000,
        "cell": lambda: header + row + "z" * (60 * MIB) + ",1\n" + row,
        "twice": lambda: "prompt,prompt\np,q\n",
        "nul": lambda: header + "a\0b,1\n" * 5 + row,
        "cr": lambda: (header + row * 5).replace("\n", "\r"),
        "lines": lambda: header + '"a\n' * 100_000 + '",1\n' + row,
        "commas": lambda: header + "," * (20 * MIB),
        "one line": lambda: "x" * (100 * MIB),
    }[kind]()
    file = home / f"data.{'csv' if rng.random() < 0.8 else 'tsv'}"
    file.write_text(body, encoding="utf-8", newline="")
    return "jsonl:prompts", {"path": str(file)}


def packed(rng: random.Random, home: Path) -> Case:
    """Parquet that unpacks to far more than it is, or is broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = rng.choice(("equal", "plain", "wide", "nested", "nulls", "cell", "broken", "cut", "deep", "list", "types"))
    file = home / "data.parquet"
    options: dict[str, Any] = {"compression": rng.choice(("zstd", "snappy", "gzip"))}
    if kind == "equal":  # made as a dictionary: making it must not take what reading it would
        text = pa.DictionaryArray.from_arrays(pa.array([0] * 300_000), pa.array(["x" * 2000]))
        table = pa.table({"prompt": text})
    elif kind == "plain":
        table = pa.table({"prompt": ["x" * (MIB // 4)] * 400 if rng.random() < 0.5 else ["x" * 1000] * 300_000})
        options["use_dictionary"] = False
    elif kind == "wide":
        table = pa.table({f"c{n}": [1] for n in range(20_000)} | {"prompt": ["p"]})
    elif kind == "nested":
        table = pa.table({"prompt": ["p"], "meta": [{"a": [["y" * 1000] * 200_000]}]})
    elif kind == "nulls":
        table = pa.table({"prompt": pa.nulls(6_000_000, pa.string())})
    elif kind == "cell":
        table = pa.table({"prompt": ["z" * (60 * MIB), "p", "q"]})
    elif kind == "deep":
        value: Any = 1
        for _ in range(100):
            value = [value]
        table = pa.table({"prompt": ["p"], "meta": [value]})
    elif kind == "list":
        table = pa.table({"prompt": ["p"] * 3, "meta": pa.array([[0] * 3_000_000] * 3, pa.list_(pa.int32()))})
    elif kind == "types":
        table = pa.table({"prompt": [b"\xff", None, b"ok"], "answer": pa.array([0, 1, 2], pa.timestamp("ns"))})
    else:
        table = pa.table({"prompt": [f"p{n}" for n in range(1000)]})
    pq.write_table(table, file, **options)
    if kind in ("broken", "cut"):
        data = bytearray(file.read_bytes())
        for _ in range(20):
            data[rng.randrange(4, len(data))] = rng.randrange(256)
        file.write_bytes(data if kind == "broken" else data[: rng.randrange(len(data))])
    if rng.random() < 0.2:
        return "jsonl:prompts", {"path": str(home)}
    return "jsonl:prompts", {"path": str(file)}


def saved(rng: random.Random, home: Path) -> Case:
    """Folders of save_to_disk whose files name others, are packed or are broken."""
    import pyarrow as pa

    def write(folder: Path, texts: list[str], compression: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table({"prompt": texts})
        with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as out:
            how = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(out, table.schema, options=how) as writer:
                writer.write_table(table)
        state = {
            "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
            "_fingerprint": f"{rng.random()}",
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "state.json").write_text(json.dumps(state))
        feature = {"prompt": {"dtype": "string", "_type": "Value"}}
        (folder / "dataset_info.json").write_text(json.dumps({"features": feature}))

    write(home, [f"p{n}" for n in range(5)])
    state = json.loads((home / "state.json").read_text())
    kind = rng.choice(
        ("outside", "absolute", "zero", "pipe", "split", "packed", "broken", "deep", "info", "wrong", "link")
    )
    if kind in ("outside", "absolute", "link"):
        write(home.parent / "other", [SECRET] * 5)
        other = home.parent / "other" / "data-00000-of-00001.arrow"
        name = {"outside": "../other/data-00000-of-00001.arrow", "absolute": str(other)}.get(kind, "linked.arrow")
        if kind == "link":
            (home / name).symlink_to(other)
        (home / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
    elif kind in ("zero", "pipe"):
        name = rng.choice(("state.json", "dataset_info.json", "data-00000-of-00001.arrow", "more.json"))
        (home / name).unlink(missing_ok=True)
        os.mkfifo(home / name) if kind == "pipe" else (home / name).symlink_to("/dev/zero")
    elif kind == "split":
        write(home.parent / "other", [SECRET] * 5)
        (home / "state.json").unlink()
        (home / "dataset_dict.json").write_text(json.dumps({"splits": rng.choice((["../other"], ["/etc"], "x", None))}))
    elif kind == "packed":
        write(home, ["x" * 1_000_000] * 800, "zstd")
    elif kind == "broken":
        file = home / "data-00000-of-00001.arrow"
        data = bytearray(file.read_bytes())
        for _ in range(rng.randint(1, 30)):
            data[rng.randrange(8, len(data))] = rng.randrange(256)
        file.write_bytes(data)
    elif kind == "deep":
        (home / rng.choice(("state.json", "dataset_info.json"))).write_text("[" * 100_000 + "]" * 100_000)
    elif kind == "info":
        (home / "dataset_info.json").write_text(
            rng.choice(("[]", "null", "{}", '{"features": 3}', '{"features": {"a": 1}}'))
        )
    else:
        wrong = rng.choice(
            ({}, [], None, {"_data_files": 3}, {"_data_files": [{}]}, {"_data_files": [{"filename": 3}]})
        )
        (home / "state.json").write_text(json.dumps(wrong))
    return "jsonl:prompts", {"path": str(home)}


def laid_out(rng: random.Random, home: Path) -> Case:
    """A folder like one of the hub's, whose card or files lead elsewhere or are packed."""
    import gzip

    kind = rng.choice(("card", "absolute", "remote", "zero", "pipe", "gzip", "csv", "good", "deep"))
    row = json.dumps({"prompt": "p"}) + "\n"
    (home / "train.jsonl").write_text(row * 5)
    (home.parent / "other.jsonl").write_text(json.dumps({"prompt": SECRET}) + "\n")
    named = {
        "card": "../other.jsonl",
        "absolute": str(home.parent / "other.jsonl"),
        "remote": "https://localhost:9/x.jsonl",
    }
    if kind in named:
        (home / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named[kind]}\n---\n")
    elif kind == "zero":
        (home / rng.choice(("README.md", "more.jsonl", "dataset_infos.json"))).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(home / rng.choice(("README.md", "more.jsonl")))
    elif kind == "gzip":
        name = "train.jsonl" if rng.random() < 0.5 else "train.jsonl.gz"
        (home / "train.jsonl").unlink()
        (home / name).write_bytes(gzip.compress((json.dumps({"prompt": "z" * MIB}) + "\n").encode() * 300))
    elif kind == "csv":
        (home / "train.jsonl").unlink()
        (home / "train.csv").write_text(",".join(f"c{n}" for n in range(50_000)) + "\n" + "1," * 49_999 + "1\n")
    elif kind == "deep":
        (home / "train.jsonl").write_text(row + "[" * 100_000 + "]" * 100_000 + "\n" + row)
    return "jsonl:prompts", {"path": str(home)}


def shards(rng: random.Random, home: Path) -> Case:
    """Tar shards that are links, are broken, or have strange members or a strange index."""
    import tarfile

    def member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))

    with tarfile.open(home / "a.tar", "w") as tar:
        for n in range(4):
            member(tar, f"{n}.json", json.dumps({"prompt": f"p{n}"}).encode())
            member(tar, f"{n}.png", _picture(n))
        member(tar, "x.json", rng.choice((b"[" * 100_000, b"\xff", b'{"prompt": "' + b"z" * (20 * MIB) + b'"}')))
        member(tar, "x.png", _picture())
        link = tarfile.TarInfo("y.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    kind = rng.choice(("link", "zero", "pipe", "index", "index zero", "broken", "cut", "good"))
    if kind in ("link", "zero", "pipe"):
        place = home / "b.tar"
        shutil.copy(home / "a.tar", home.parent / "outside.tar")
        os.mkfifo(place) if kind == "pipe" else place.symlink_to(
            "/dev/zero" if kind == "zero" else home.parent / "outside.tar"
        )
    elif kind == "index zero":
        (home / "a.tar.index.json").symlink_to("/dev/zero")
    elif kind == "index":
        (home / "a.tar.index.json").write_text("[" * 100_000)
    elif kind != "good":
        data = bytearray((home / "a.tar").read_bytes())
        for _ in range(50):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (home / "a.tar").write_bytes(data if kind == "broken" else data[: rng.randrange(len(data))])
    return "shards:prompts", {"path": str(home)}


def labelled(rng: random.Random, home: Path) -> Case:
    """A folder for ``mmrl label``: texts that lead outside, and tables of labels with strange names and lines."""
    names = [" lead.png", "trail .png", "a,b.png", 'q"q.png', "n\nl.png", "é.png", "e\u0301.png", "\u200b.png", "x.png"]
    for n, name in enumerate(names):
        (home / name).write_bytes(_picture(n))
    for _ in range(rng.randint(1, 3)):
        with contextlib.suppress(FileExistsError):
            _escape(rng, home, home / rng.choice(("x.txt", "é.txt", "samples.jsonl", "y.png", "labels.csv")))
    if not os.path.lexists(home / "labels.csv"):
        rows = [
            " lead.png,1",
            "gone.png,1",
            "x.png,2",
            '"open',
            "x.png",
            ",",
            "a,b,c,d",
            "\0,1",
            '"n\nl.png",0',
            "z" * MIB,
        ]
        body = "file,label\n" + "\n".join(rng.choices(rows, k=6)) + "\n"
        (home / "labels.csv").write_bytes(body.encode("utf-8", "surrogateescape"))
    return "labels", {"path": str(home)}


KINDS: tuple[Callable[[random.Random, Path], Case], ...] = (
    pictures,
    lines,
    columns,
    packed,
    saved,
    laid_out,
    shards,
    labelled,
)


def make(number: int, folder: Path) -> Case:
    """Input ``number`` in ``folder``, which is new."""
    rng = random.Random(number)
    home = folder / "data"
    home.mkdir(parents=True)
    (folder / "secret.txt").write_text(SECRET)
    return KINDS[number % len(KINDS)](rng, home)


def read(name: str, options: dict[str, Any]) -> list[str]:
    """Every text that mmrl reads of an input, as its commands do."""
    if name == "labels":
        from mmrl.rewards.learned.labels.items import items_of
        from mmrl.studies.labels.server import LabelServer

        home = Path(options["path"])
        items = items_of(home)
        with LabelServer(items, home, home / "labels.csv") as server:
            json.dumps(server.listed())
        return [text for item in items for text in (item.prompt, item.text)]
    import mmrl

    prompts = mmrl.load("datasets", name)("train", heldout=0, **options)
    for bad in getattr(prompts, "bad", ()):
        str(bad).encode()
    texts = []
    for i in range(min(len(prompts), 1000)):
        prompt = prompts[i]
        texts.append(prompt.text)
        json.dumps([prompt.id, prompt.text, prompt.meta], ensure_ascii=False).encode()
    return texts


def _judge(number: int, case: Case, out: Any) -> None:
    """Read an input in this process, which ends here."""
    from mmrl.core.errors import UserError

    signal.alarm(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPUTED_S, COMPUTED_S + 5))
    out.write(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss).encode() + b"\n")
    out.flush()
    how = "read"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            texts = read(*case)
        if any(SECRET in text or "root:" in text for text in texts):
            how = "secret"
    except UserError as error:
        how = "refused" if len(str(error)) < 4000 and str(error).encode("utf-8", "replace") else "long message"
    except BaseException:
        how = "traceback " + traceback.format_exc()[-400:]
    out.write(json.dumps(how).encode())
    out.flush()


def try_one(number: int, folder: Path) -> dict[str, Any]:
    """How input ``number`` ended, and the memory in MiB that it took."""
    shutil.rmtree(folder, ignore_errors=True)
    maker = os.fork()
    if maker == 0:
        try:
            (folder / "case.json").write_text(json.dumps(make(number, folder)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(maker, 0)[1]:
        raise SystemExit(f"input {number} could not be made")
    case = json.loads((folder / "case.json").read_text())
    (folder / "case.json").unlink()
    reader, writer = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
        with os.fdopen(writer, "wb") as out:
            _judge(number, (case[0], case[1]), out)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        before, said = int(pipe.readline()), pipe.read()
    _, status, used = os.wait4(child, 0)
    hang = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU)
    how = "hang" if hang else "crash" if os.WIFSIGNALED(status) or not said else json.loads(said)
    shutil.rmtree(folder, ignore_errors=True)
    kind = KINDS[number % len(KINDS)].__name__
    seconds = round(time.monotonic() - begun, 1)
    return {"number": number, "kind": kind, "how": how, "mib": (used.ru_maxrss - before) >> 10, "seconds": seconds}


def main(first: int, last: int, folder: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["HF_HOME"] = str(folder / "hf")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import pyarrow.parquet  # noqa: F401

    import mmrl
    from mmrl.studies.labels import server  # noqa: F401

    for name in ("folder", "jsonl", "prompts", "shards"):
        mmrl.load("datasets", f"{name}:prompts")
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    for number in range(first, last):
        print(json.dumps(try_one(number, folder / "case")), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
