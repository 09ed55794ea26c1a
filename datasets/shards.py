"""Pictures, clips and questions in webdataset tar shards, read in place by an index.

``prompts(split, path=...)``: ``path`` is a folder of ``*.tar`` files, or one of them. Where the folder has shards named
after the split (``train-*.tar``, ``heldout-*.tar``) those are taken; else ``heldout`` says how many are held out.

The JSON member of a sample holds ``prompt`` (or ``question``, ``text``, ``messages``), ``answer``, ``meta``,
``system``, and ``frames``: {"mp4": [0, 4]} where only some frames of a clip are to be shown. Nothing is ever extracted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import resolved
from mmrl.data.checks import Verify
from mmrl.data.index import ShardIndex, build_index, load_index
from mmrl.data.records import Records, in_split
from mmrl.logging.progress import Progress

_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def prompts(
    split: Literal["train", "heldout"] = "train", *, path: str, heldout: float = 0.1, verify: Verify = "decode"
) -> Records:
    """The prompts of ``split``, by shard and then in the order of the members.

    ``heldout``: how many records (an integer), or what share of them (a fraction below 1, rounded up), are held out;
    it has no meaning where shards are named after the splits. ``verify``: whether the index decodes the media
    (``decode``) or believes their headers (``headers``). ``.bad`` names what was left out. Raises ``UserError`` for a
    folder without shards and a split that leaves nothing.
    """
    shards, named = _shards(Path(path), split)
    indexes = open_shards(shards, verify)
    places = [(index, i) for index in indexes for i in range(len(index.entries))]
    bad = [b for index in indexes for b in index.bad]
    digests = [index.entries[i].digest for index, i in places]
    if not places:
        raise UserError(f"path: {path} has no sample that can be used: {'; '.join(map(str, bad[:5])) or 'none at all'}")
    chosen = [places[k] for k in in_split(digests, split, 0 if named else heldout, path)]

    def get(k: int) -> Prompt:
        index, i = chosen[k]
        try:
            return index.prompt(i)
        except ValueError as error:
            raise UserError(f"{index.path} was changed while it was in use ({error}); start again") from error

    return Records(len(chosen), get, bad, len(places) + len(bad))


def open_shards(paths: list[Path], verify: Verify = "decode") -> list[ShardIndex]:
    """The indexes of the shards at ``paths``; those that are missing or stale are built, with progress on stderr.

    Raises ``UserError`` for a shard that cannot be read.
    """
    if verify not in ("decode", "headers"):
        raise UserError(f"verify is {verify!r}; give decode or headers")
    try:
        found = {path: load_index(path, verify) for path in paths}
        stale = [path for path, index in found.items() if index is None]
        if stale:
            total = sum(path.stat().st_size for path in stale)
            with Progress(-(-total // 1_000_000), "indexing shards", "MB") as progress:
                done = 0
                for path in stale:
                    before, done = done, done + path.stat().st_size
                    found[path] = build_index(path, verify)
                    progress.advance(-(-done // 1_000_000) - -(-before // 1_000_000), path.name)
    except OSError as error:
        raise UserError(f"path: {error.filename} cannot be read ({error.strerror}); correct the path") from error
    return [index for index in found.values() if index is not None]


def _shards(path: Path, split: str) -> tuple[list[Path], bool]:
    """The shards to read, and whether they are named after the split. Raises ``UserError``."""
    if path.suffix == ".tar":
        return [path], False
    every = sorted(path.glob("*.tar"))
    for file in every:
        try:
            resolved(file, path)
        except OSError as error:
            raise UserError(f"path: {file} is not read: {error.strerror}; remove it, or put a copy there") from error
    if not every:
        packed = [p.name for p in path.glob("*") if p.name.endswith(_PACKED)] if path.is_dir() else []
        why = f"has only packed shards ({packed[0]}): unpack them, gunzip -k" if packed else "has no .tar file"
        raise UserError(f"path: {path} {why if path.is_dir() else 'is no folder'}; name a folder of tar shards")
    named = [p for p in every if p.name.startswith(f"{split}-")]
    others = [p for p in every if p.name.startswith(("train-", "heldout-"))]
    if others and not named and split in ("train", "heldout"):
        raise UserError(f"path: {path} has shards such as {others[0].name} and none named {split}-*.tar; add them")
    return (named, True) if named else (every, False)
