"""Run the notebooks of examples/ in full and keep what they print, or check that what is kept belongs to their code.

python tools/notebooks.py [NAME ...]     # minutes; needs the extra dev, and vlm for pictures in prompts
python tools/notebooks.py --check        # exit code 1, and what is wrong with outputs that the code did not print

The cell with the tag ``parameters`` sets how long a notebook trains; the tests put a cell with smaller values after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
Notebook = dict[str, Any]
"""A notebook as its file has it (nbformat 4)."""


def read(path: Path) -> Notebook:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_hash(notebook: Notebook) -> str:
    """SHA-256 of the sources of all code cells, in order."""
    digest = hashlib.sha256()
    for cell in code_cells(notebook):
        digest.update("".join(cell["source"]).encode() + b"\0")
    return digest.hexdigest()


def stale(notebook: Notebook) -> list[str]:
    """What says that the kept outputs are not those of the code; empty where they are."""
    found = []
    cells = code_cells(notebook)
    if notebook["metadata"].get("mmrl", {}).get("code_sha256") != code_hash(notebook):
        found.append("the code has changed since its outputs were kept")
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("the cells were not run once each, from the first to the last")
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    if "error" in kinds:
        found.append("a cell ended with an error")
    if not kinds:
        found.append("no output is kept")
    return found


def with_parameters(notebook: Notebook, values: Mapping[str, object]) -> Notebook:
    """A copy with a cell after the one tagged ``parameters`` that sets ``values``. Raises ``SystemExit`` for a name
    that the tagged cell does not set."""
    copy: Notebook = json.loads(json.dumps(notebook))
    tagged = [n for n, cell in enumerate(copy["cells"]) if "parameters" in cell["metadata"].get("tags", ())]
    if len(tagged) != 1:
        raise SystemExit(f"a notebook has one cell with the tag parameters, and this one {len(tagged)}")
    source = "".join(copy["cells"][tagged[0]]["source"])
    for name in values:
        if f"{name} =" not in source:
            raise SystemExit(f"the cell with the tag parameters sets no {name}")
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    cell = {
        "cell_type": "code",
        "id": "smaller",
        "metadata": {},
        "execution_count": None,
        "outputs": [],
        "source": lines,
    }
    copy["cells"].insert(tagged[0] + 1, cell)
    return copy


def execute(notebook: Notebook, folder: Path, timeout: float = 3600.0) -> Notebook:
    """Run all cells in ``folder`` in a new kernel; returns the notebook with its outputs.

    Raises ``nbclient.exceptions.CellExecutionError`` where a cell does, with the cell and the traceback.
    """
    import nbformat
    from nbclient import NotebookClient

    node = nbformat.reads(json.dumps(notebook), as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(node, timeout=timeout, resources=resources).execute()
    return json.loads(nbformat.writes(node))


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same outputs, with those of one stream that follow each other as one."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and output["output_type"] == "stream" and output["name"] == joined[-1].get("name"):
            joined[-1]["text"] = [*joined[-1]["text"], *output["text"]]
        else:
            joined.append(output)
    return joined


def keep(path: Path) -> None:
    """Run a notebook in a temporary folder and write it back with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        done = execute(read(path), Path(folder))
    for cell in done["cells"]:
        cell["metadata"].pop("execution", None)  # when each cell began and ended
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("image/jpeg", None)  # a picture is there as PNG
        if cell["cell_type"] == "code":
            cell["outputs"] = _joined(cell["outputs"])
    done["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "mmrl": {"code_sha256": code_hash(done)},
    }
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the notebooks of examples/ and keep their outputs.")
    parser.add_argument("names", nargs="*", help="such as own_reward; all where none is given")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit 1 where outputs are not those of the code"
    )
    arguments = parser.parse_args()
    paths = [NOTEBOOKS / f"{name}.ipynb" for name in arguments.names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    if arguments.check:
        problems = [f"{path.name}: {problem}" for path in paths for problem in stale(read(path))]
        raise SystemExit("\n".join(problems) or 0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in paths:
        keep(path)
        print(f"{path.relative_to(NOTEBOOKS.parents[1])}: run, outputs kept", flush=True)


if __name__ == "__main__":
    main()
