"""Describe this machine and what it lacks, for an issue report. Never uses the network and shows no secret."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.core.installing import DISTRIBUTION, declared, extra_of, install, version_of
from mmrl.core.json_types import as_list, as_object
from mmrl.logging.environment import environment

LEAST_DISK_GIB = 5.0
"""Below this, checkpoints of all but the smallest models do not fit."""
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


@dataclass
class Examination:
    """Rows of (what, how it is), and the problems among them with the edit that mends each."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{name:<{width}}  {value}" for name, value in self.rows]
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


def examine() -> Examination:
    """Look at versions, accelerators, threads, write access and disk. Imports torch."""
    found = Examination()
    _packages(found)
    _machine(found)
    _folders(found)
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    token = "set" if os.environ.get("HF_TOKEN") or (_hub_home() / "token").is_file() else "not set"
    found.rows.append(
        ("hub", f"{'offline (HF_HUB_OFFLINE)' if offline else 'online when a recipe needs it'}; token {token}")
    )
    return found


def _packages(found: Examination) -> None:
    found.rows += [
        ("python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
        ("mmrl", version_of(DISTRIBUTION) or "not installed, imported from a folder"),
    ]
    if (other := version_of("mmrl")) is not None:
        found.problems.append(
            f"mmrl {other} is installed beside {DISTRIBUTION}: another project, or an older checkout of this one, "
            f"in the same folder; pip uninstall mmrl, then {install()}"
        )
    for name, extra in _requirements():
        version = version_of(name)
        if extra is None or version is not None:
            found.rows.append((name, version or "missing"))
        if extra is None and version is None:
            found.problems.append(f"{name} is missing: pip install {name}")


def _requirements() -> list[tuple[str, str | None]]:
    """Names of the packages that mmrl declares, each with the extra that asks for it (None: always needed)."""
    found: dict[str, str | None] = {}
    for text in declared():
        name, extra = re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0], extra_of(text)
        if extra != "dev":
            found.setdefault(name, extra)
    return list(found.items())


def _machine(found: Examination) -> None:
    try:
        import torch

        known = environment()
    except Exception as error:  # a broken native library can raise anything; saying so is what this command is for
        found.problems.append(f"torch cannot be used: {type(error).__name__}: {error}")
        return
    build = torch.__version__  # its metadata may leave out for what it was built: 2.13.0 is 2.13.0+cu130
    found.rows = [(name, build if name == "torch" else value) for name, value in found.rows]
    cpu, limit = as_object(known["cpu"]), _cpu_limit()
    limited = "" if limit is None else f", limited to {limit:g} by the container"
    devices = [
        f"{d['name']}" + (f" ({d['memory_gib']} GiB)" if "memory_gib" in d else "")
        for d in map(as_object, as_list(known["devices"]))
    ]
    threads = torch.get_num_threads()
    settings = [f"{name}={os.environ[name]}" for name in _THREADS if name in os.environ]
    found.rows += [
        ("cpu", f"{cpu['name']}: {cpu['usable']} of {cpu['count']} usable{limited}"),
        ("memory", f"{cpu['memory_gib']} GiB"),
        ("accelerators", ", ".join(devices) or "none (recipes run on the CPU)"),
        ("threads", f"torch takes {threads}" + (f" ({', '.join(settings)})" if settings else "")),
    ]
    if limit is not None and threads > max(1, limit):
        found.problems.append(
            f"torch would take {threads} threads where the container grants {limit:g} CPUs; "
            f"export OMP_NUM_THREADS={max(1, int(limit))} (recipes with `threads` do so themselves)"
        )


def _cpu_limit() -> float | None:
    """CPUs that a container's quota grants; None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _folders(found: Examination) -> None:
    places = {
        "current folder": (Path.cwd(), "change to a folder elsewhere, or give runs a place with --out"),
        "temporary": (Path(tempfile.gettempdir()), "set TMPDIR to a folder elsewhere"),
        "model cache": (_hub_home(), "set HF_HOME to a folder elsewhere"),
    }
    for name, (folder, edit) in places.items():
        existing = next(parent for parent in [folder, *folder.parents] if parent.is_dir())
        free = shutil.disk_usage(existing).free / 2**30
        writable = _writable(existing)
        found.rows.append((name, f"{'writable' if writable else 'not writable'}, {free:.1f} GiB free"))
        if not writable:
            found.problems.append(f"the {name} {folder} cannot be written to; {edit}")
        elif free < LEAST_DISK_GIB:
            found.problems.append(f"the {name} {folder} has {free:.1f} GiB free; make room, or {edit}")


def _writable(folder: Path) -> bool:
    """Whether a file can be made there: permissions alone do not know of read-only mounts and full disks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError:
        return False
    return True


def _hub_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()
