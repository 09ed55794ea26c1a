"""Read files that other people made: regular files only, inside their folder, of a bounded size.

Every file of a data folder, a table, a run or a stored model is opened here. A pipe, a socket or a device is refused
before it is opened (a pipe would be waited for without end), as are a link that leaves the folder and a file that is
larger than its reader allows. What is refused is an ``OSError`` with its reason in ``strerror``, as those of the system
are, so a caller has one case to handle. A path that the user gave may be a link itself: it is read without ``root``.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from mmrl.core.json_types import Json, MutableJson

MAX_DEPTH = 64
"""Lists and objects inside one another, of a JSON text."""
MAX_VALUES = 1_000_000
"""Values of a JSON text, roughly: its commas and opening brackets."""
_INTEGER = 1 << 64
_SUSPICIOUS = re.compile("[0-9]{16}|[eE][+]?[0-9]{3}")
"""Digits that may be an integer beyond 64 bits, or a number beyond all floats; most texts have none."""
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
"""A surrogate, which may lack its other half."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RefusedFileError(OSError):
    """A file that must not be read; ``strerror`` says why, ``filename`` which."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EPERM, why, os.fspath(path))


def open_file(
    path: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None, most: int | None = None
) -> io.BufferedReader:
    """Open a regular file for reading. ``root``: the folder that it must be in, after all links are followed; ``most``:
    its largest size in bytes. Raises ``OSError``."""
    place = resolved(path, root) if root is not None else os.fspath(path)
    link = os.O_NOFOLLOW if root is not None else 0
    try:
        _check(path, os.stat(place), most)  # a device is not even opened
        handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | link)
    except ValueError as error:  # a null byte or half of a surrogate pair in the name
        raise RefusedFileError(path, f"its name is no name of a file: {error}") from None
    try:
        _check(path, os.fstat(handle), most)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | os.PathLike[str], *, most: int, root: str | os.PathLike[str] | None = None) -> bytes:
    """The content of a regular file of at most ``most`` bytes. ``root`` as in ``open_file``. Raises ``OSError``."""
    with open_file(path, root=root, most=most) as file:
        data = file.read(most + 1)
    if len(data) > most:  # it has grown, or its size is not known before it is read
        raise RefusedFileError(path, f"it has more than {most:,} bytes")
    return data


def read_json(
    path: str | os.PathLike[str],
    *,
    most: int,
    root: str | os.PathLike[str] | None = None,
    values: int = MAX_VALUES,
) -> Json:
    """The value of a JSON file in UTF-8. ``most`` and ``root`` as in ``read_file``. Raises ``OSError`` for the file,
    ``ValueError`` for its content (``parse_json``)."""
    return parse_json(read_file(path, most=most, root=root), values)


def parse_json(text: str | bytes, values: int = MAX_VALUES, *, strict: bool = False) -> MutableJson:
    """The value of a JSON text, of bounded depth and at most about ``values`` values.

    ``strict``: its numbers are finite, its integers fit 64 bits, its texts are text, and no key stands twice in a
    mapping. Raises ``ValueError``, which says why ``text`` cannot be read; the sentence begins with its verb.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None
    opening = text.count("[") + text.count("{")
    if opening + text.count(",") > values:  # commas inside texts count too; nothing honest has so many
        raise ValueError(f"has more than {values:,} values")
    deep = f"is not JSON that can be read (nested too deeply, over {MAX_DEPTH} levels)"
    hooks: dict[str, Any] = {"parse_constant": no_constant, "object_pairs_hook": _mapping} if strict else {}
    if strict and _SUSPICIOUS.search(text):
        hooks |= {"parse_int": _integer, "parse_float": _number}
    try:
        value: MutableJson = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError(deep) from None
    except ValueError as error:  # a number of thousands of digits; and what is not strict
        raise ValueError(f"is not JSON that can be read ({str(error).partition(';')[0]})") from None
    if opening > MAX_DEPTH and not shallow(value):
        raise ValueError(deep)
    if strict and _HALVES.search(text) and not is_text(json.dumps(value, ensure_ascii=False)):
        raise ValueError("is not JSON that can be read (it has half of a surrogate pair, which is no text)")
    return value


def shallow(value: object, depth: int = MAX_DEPTH) -> bool:
    """Whether lists and objects lie at most ``depth`` deep inside one another."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(depth):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, list | dict)]
    return not level


def resolved(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> str:
    """The real path of ``path``, after all links. Raises ``OSError`` where it is outside the folder ``root``."""
    try:
        home, place = os.path.realpath(root), os.path.realpath(path)
    except ValueError as error:
        raise RefusedFileError(path, f"its name is no name of a file: {error}") from None
    if not any(os.path.commonpath([allowed, place]) == allowed for allowed in (home, *_blobs(home))):
        how = "a link that leads" if os.path.lexists(path) and _has_link(path, root) else "a path that leads"
        raise RefusedFileError(path, f"it is {how} out of {os.fspath(root)}; put a copy of the file there")
    return place


def inside(root: Path, name: object) -> Path | None:
    """The regular file ``name`` of the folder ``root``; None where it is none, or lies outside after all links."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    path = root / name
    try:
        return path if os.path.isfile(resolved(path, root)) else None
    except OSError:
        return None


def walk(root: str | os.PathLike[str], most: int = 10_000_000) -> list[Path]:
    """Everything below ``root`` that is no folder, by name; a link to a folder is not followed, but listed. Raises
    ``OSError`` for more than ``most``, counting folders."""
    found: list[Path] = []
    folders, seen = [os.fspath(root)], 0
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > most:
                    raise RefusedFileError(root, f"it has more than {most:,} files")
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    found.append(Path(entry.path))
    return sorted(found)


def check_folder(root: str | os.PathLike[str]) -> None:
    """For a folder that a library reads as a whole: raise ``OSError`` for the first file that is no regular one or
    leads out of ``root``, files that begin with a dot left out."""
    for path in walk(root):
        if not path.name.startswith("."):
            real = resolved(path, root)
            if not os.path.isdir(real):
                _check(path, os.stat(real), None)


def printable(text: str, most: int = 300) -> str:
    """``text`` from a stranger for one line of a message: control characters and bytes that are no text as escapes,
    and cut after ``most`` characters."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def is_text(text: str) -> bool:
    """Whether ``text`` can be written in UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _integer(text: str) -> int:
    value = int(text) if len(text) < 24 else _INTEGER
    if not -_INTEGER < value < _INTEGER:
        raise ValueError(f"the integer {text[:24]} has more than 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"the number {text[:24]} is larger than any float")
    return value


def no_constant(text: str) -> float:
    """Refuses NaN and infinities for ``json.loads(..., parse_constant=no_constant)``: raises ``ValueError``."""
    raise ValueError(f"{text} is no JSON number")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:60]!r} stands twice in one mapping")
    return found


def _check(path: str | os.PathLike[str], status: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise RefusedFileError(path, f"it is {kind}, no regular file")
    if most is not None and status.st_size > most:
        raise RefusedFileError(path, f"it has {status.st_size:,} bytes; at most {most:,} are read")


def _blobs(root: str) -> list[str]:
    """Where the files of a snapshot in the hub's cache are: ``snapshots/REVISION`` has links to them."""
    snapshots, _ = os.path.split(root)
    repository, name = os.path.split(snapshots)
    return [os.path.join(repository, "blobs")] if name == "snapshots" else []


def _has_link(path: str | os.PathLike[str], root: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is inside ``root`` by its name, so that a link takes it out."""
    home = os.path.abspath(root)
    return os.path.commonpath([home, os.path.abspath(path)]) == home
