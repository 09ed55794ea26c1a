"""The notebooks of examples/ run, in a shorter form, and their rewards rise; the outputs kept are those of the code."""

import importlib.util
import json

import pytest

from tools import notebooks

SHORT = {
    "own_reward": ({"steps": 4}, "own", "close"),
    "pictures": ({"steps": 10}, "red", "red"),
    "vision_language": ({"steps": 6}, "judged", "judge"),
}
"""Per notebook: the parameters of the short form, the run that it makes, and the reward that must rise."""
FILES = sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))


def test_there_is_a_notebook_for_each_kind_of_user():
    assert [path.stem for path in FILES] == sorted(SHORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_kept_outputs_are_those_of_the_code(path):
    notebook = notebooks.read(path)
    assert notebooks.stale(notebook) == []
    assert str(notebooks.NOTEBOOKS.parents[1]) not in path.read_text(), "a path of the machine that ran it"
    outputs = [output for cell in notebooks.code_cells(notebook) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_outputs_that_are_not_those_of_the_code_are_named():
    notebook = notebooks.read(FILES[0])
    changed = json.loads(json.dumps(notebook))
    notebooks.code_cells(changed)[-1]["source"] += "\n1 + 1"
    assert notebooks.stale(changed) == ["the code has changed since its outputs were kept"]
    again = json.loads(json.dumps(notebook))
    notebooks.code_cells(again)[0]["execution_count"] = 7
    notebooks.code_cells(again)[1]["outputs"] = [{"output_type": "error", "ename": "KeyError"}]
    assert len(notebooks.stale(again)) == 2
    with pytest.raises(SystemExit, match="sets no stepz"):
        notebooks.with_parameters(notebook, {"stepz": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pictures", "vision_language", pytest.param("own_reward", marks=pytest.mark.long)])
def test_a_notebook_runs_and_its_reward_rises(name, tmp_path):
    if name == "vision_language" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    values, run, reward = SHORT[name]
    notebook = notebooks.read(notebooks.NOTEBOOKS / f"{name}.ipynb")
    notebooks.execute(notebooks.with_parameters(notebook, values), tmp_path, timeout=900)
    rows = [json.loads(line) for line in (tmp_path / "runs" / run / "heldout.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == values["steps"]
    assert rows[-1][f"reward/{reward}"] > rows[0][f"reward/{reward}"] + 0.02
    assert (tmp_path / "runs" / run / "report.html").is_file()
