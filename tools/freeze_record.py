"""Run small recipes of one revision and record the results: metrics, tensors, state, resolved recipes.

``tools/freeze.py`` starts it, with the revision's folder in ``PYTHONPATH``. It drives the revision through the command
line (``mmrl train``), in this one process, and reads the files of the run, so that it need not know its modules.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINES = 12
"""Of what a run printed before it failed."""


def main() -> None:
    """``freeze_record.py TREE CASES``: a JSON line on stdout for each of CASES, a JSON file; works in this folder.

    What the runs print goes to ``log.txt``. The file ``../turn`` is locked while a case runs that is to run alone.
    """
    tree, cases = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    log = Path("log.txt").resolve()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import mmrl

    if not Path(mmrl.__file__ or "").resolve().is_relative_to(tree):
        raise SystemExit(f"mmrl is imported from {mmrl.__file__} and not from {tree}")
    for case in cases:
        os.truncate(log, 0)
        with Path("../turn").open("w") as turn:
            if case["alone"]:
                fcntl.flock(turn, fcntl.LOCK_EX)
            began = time.perf_counter()
            record = run(case["recipe"], case["overrides"], tree, Path("run").resolve(), log)
        answers.write(json.dumps({"case": case["name"], "record": record, "seconds": time.perf_counter() - began}))
        answers.write("\n")


def run(recipe: str, overrides: list[str], tree: Path, out: Path, log: Path) -> dict[str, dict[str, Any]]:
    """Train ``recipe`` into ``out``, which is removed again; the record, or why there is none."""
    from mmrl.cli import main as mmrl_main

    sys.argv = ["mmrl", "train", recipe, *overrides, "--out", str(out)]
    try:
        mmrl_main()
    except SystemExit as stopped:
        failed = bool(stopped.code)
    except Exception:
        traceback.print_exc()
        failed = True
    else:
        failed = False
    try:
        if not failed:
            return read_run(out, {str(out): "<run>", str(tree): "<tree>"})
    except Exception:
        traceback.print_exc()
    finally:
        shutil.rmtree(out, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    lines = log.read_text(errors="replace").replace(str(tree), "<tree>").strip().splitlines()
    said = next((n for n, line in enumerate(lines) if line.startswith("error:")), max(0, len(lines) - _LINES))
    return {"error": {"why": "\n".join(lines[said : said + _LINES])}}


def read_run(out: Path, places: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The record of the run in ``out``. ``places``: folders of this machine, and what to write for them."""
    newest = max((out / "checkpoints").glob("step_*"))
    settings = (out / "resolved.json").read_text()
    for place, mark in places.items():
        settings = settings.replace(place, mark)
    return {
        "metrics": by_step(out / "metrics.jsonl"),
        "heldout": by_step(out / "heldout.jsonl"),
        "tensors": tensors(newest),
        "state": dict(flat(json.loads((newest / "state.json").read_text()))),
        "recipe": dict(flat(json.loads(settings))),
    }


def by_step(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a JSONL file as ``{metric: {"step 1": value}}``; of two rows of one step the second is called so."""
    found: dict[str, dict[str, Any]] = {}
    labels = set()
    for row in map(json.loads, path.read_text().splitlines()):
        label = f"step {row.get('step')}"
        while label in labels:
            label += " again"
        labels.add(label)
        for name, value in row.items():
            found.setdefault(name, {})[label] = value
    return found


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """``{"a": {"b": [{"c": 1}]}}`` as ``("a.b[0].c", 1)``; lists of plain values stay whole, and what is empty too."""
    if isinstance(tree, dict) and tree:
        parts = [(f"{prefix}.{key}" if prefix else key, sub) for key, sub in tree.items()]
    elif isinstance(tree, list) and any(isinstance(sub, dict | list) for sub in tree):
        parts = [(f"{prefix}[{n}]", sub) for n, sub in enumerate(tree)]
    else:
        return [(prefix, tree)]
    return [pair for key, sub in parts for pair in flat(sub, key)]


def tensors(directory: Path) -> dict[str, str]:
    """Type, shape and SHA-256 of each tensor of a checkpoint, whole or in shards."""
    import torch
    from torch.distributed import checkpoint as dcp

    reader: Any = dcp.HuggingFaceStorageReader(str(directory))
    known = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in known.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    if not found:
        raise ValueError(f"{directory} holds no tensors")
    return {name: digest(tensor) for name, tensor in found.items()}


def digest(tensor: Any) -> str:
    """The digest of a tensor, with its type and shape."""
    import torch

    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:32]}"


if __name__ == "__main__":
    main()
