"""Where checkpoints exist and none is whole nothing is thrown away, and every fault is named."""

import json
import shutil
from types import SimpleNamespace

import pytest

from mmrl import cli
from mmrl.app.build import evaluate, restored
from mmrl.checkpoint import writer
from mmrl.config.loader import load_recipe
from mmrl.core import checkpoint_manifest as manifest
from mmrl.core import checkpoint_reader as reader
from mmrl.core.errors import UserError
from mmrl.logging.rundir import RunDir
from mmrl.runtime.start import train
from tests.support import damage
from tests.support.checkpoint import make
from tests.support.divergence import PICTURES

SETTINGS = [
    *(*PICTURES, "train.steps=2", "eval.every=2", "eval.samples=1", "eval.grid=1"),
    "rewards=[{name: 'jpeg:compressibility'}]",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(["shapes-lora"], SETTINGS), out)
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def contents(folder):
    """Every file but what a start writes anew, which says nothing of what was learned."""
    left_out = {"run.lock", "env.json"}
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in left_out]
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(files)}


def ruin(run):
    """All checkpoints, each in another way; what is then said of them."""
    first, second = run / "checkpoints" / "step_000001", run / "checkpoints" / "step_000002"
    return [damage.flipped(first, first / "weights.safetensors"), damage.torn_manifest(second, None)]


def main(monkeypatch, capsys, *words):
    """The exit code of ``mmrl`` and what it printed to stderr."""
    monkeypatch.setattr("sys.argv", ["mmrl", *map(str, words)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    return SimpleNamespace(code=code, said=capsys.readouterr().err)


def test_resume_stops_names_every_fault_and_cuts_nothing(run, monkeypatch, capsys):
    faults = ruin(run)
    before = contents(run)
    done = main(monkeypatch, capsys, "train", "shapes-lora", *SETTINGS, "--out", run, "--resume")
    assert done.code == 2
    assert all(fault in done.said for fault in faults)
    assert all(name in done.said for name in ("step_000001", "step_000002"))
    assert "nothing was changed; put the files back from a copy, or start anew with --overwrite" in done.said
    assert "Traceback" not in done.said
    assert contents(run) == before


def test_the_session_cuts_nothing_either(run):
    """As where a controller is started again, which nobody has looked for."""
    from mmrl.app.trainer import Trainer

    ruin(run)
    before = contents(run)
    with RunDir.create(run, resume=True) as directory, pytest.raises(UserError, match="no checkpoint in"):
        Trainer(load_recipe(["shapes-lora"], SETTINGS), directory).restore()
    assert contents(run) == before


def test_a_run_that_was_killed_before_its_first_save_begins_at_0(run, capsys):
    for left in (run / "checkpoints").iterdir():
        shutil.rmtree(left)
    half = run / "checkpoints" / ".tmp-step_000001"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"half")
    train(load_recipe(["shapes-lora"], [*SETTINGS, "train.steps=1", "optim.schedule=constant"]), run, resume=True)
    assert "no checkpoint yet: starting from step 0" in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]


@pytest.mark.parametrize("command", ["eval", "export"])
def test_looking_at_such_a_run_is_a_message(run, tmp_path, monkeypatch, capsys, command):
    faults = ruin(run)
    out = ["--out", tmp_path / "model"] if command == "export" else []
    done = main(monkeypatch, capsys, command, run, *out)
    assert done.code == 2
    assert all(fault in done.said for fault in faults)
    assert "or give --checkpoint base" in done.said
    assert "Traceback" not in done.said
    assert main(monkeypatch, capsys, command, run, *out, "--checkpoint", "base").code == 0


def test_its_report_is_written(run, monkeypatch, capsys):
    ruin(run)
    assert main(monkeypatch, capsys, "report", run).code == 0


def test_a_step_that_has_no_checkpoint_is_named(trained):
    with pytest.raises(UserError, match=r"no checkpoint of step 7 in .*; the steps there: 1, 2"):
        evaluate(trained, 1, "7")


def test_the_step_in_the_manifest_decides(run, capsys):
    folder = run / "checkpoints"
    (folder / "step_000001").rename(folder / "step_000009")
    assert reader.steps(folder) == [1, 2]
    assert restored(run, "latest")[2] == 2
    assert "warning: checkpoint step_000009 is of step 1, as its manifest.json says\n" in capsys.readouterr().err
    assert reader.load(folder, 1).directory.name == "step_000009"
    with pytest.raises(UserError, match="no checkpoint of step 9"):
        reader.load(folder, 9)


def test_a_copy_is_named_and_the_one_that_is_called_so_is_taken(tmp_path, capsys):
    writer.save(tmp_path, make(1), keep=3)
    good = writer.save(tmp_path, make(2, 2.0), keep=3)
    shutil.copytree(good, tmp_path / "a copy")
    shutil.copytree(good, tmp_path / "step_000001", dirs_exist_ok=True)  # the older one has another's files
    found = reader.newest(tmp_path, "mend it")
    assert found is not None
    assert found.directory == good
    said = capsys.readouterr().err
    assert "checkpoint step_000001 is of step 2, as its manifest.json says; step_000002 is of the same step" in said
    assert "checkpoint a copy is of step 2, as its manifest.json says; step_000002 is of the same step" in said
    damage.flipped(good, good / "weights.safetensors")
    found, skipped = reader.load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.directory.name) == (2, "a copy")
    assert "step_000002 is not whole" in skipped[0]


def test_renamed_directories_are_rotated_by_their_steps(tmp_path):
    for step in (1, 2):
        writer.save(tmp_path, make(step), keep=2)
    (tmp_path / "step_000001").rename(tmp_path / "step_000050")
    writer.save(tmp_path, make(3), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000003"]


FILE = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"step": 2, "files": ["weights.safetensors"]}, "files: Input should be a valid dictionary"),
        (
            {"step": 2, "files": {"weights.safetensors": {"sha256": "0" * 64}}},
            "weights.safetensors.bytes: Field required",
        ),
        ({"step": 2, "files": {"weights.safetensors": [1, 2]}}, "files.weights.safetensors: "),
        ({"step": 2, "files": {"state.json": FILE | {"bytes": "1"}}}, "state.json.bytes: "),
        ({"step": 2, "files": {"state.json": FILE | {"sha256": None}}}, "state.json.sha256: "),
        ({"step": 2, "files": {"../state.json": FILE}}, "../state.json"),
        ({"step": -1, "files": {}}, "step: "),
        ({"files": {}}, "step: Field required"),
        ({"step": 2, "files": {}}, "state.json is missing"),
        ([], "where mmrl writes a mapping"),
        (None, "where mmrl writes a mapping"),
    ],
    ids=str,
)
def test_the_manifest_is_checked_as_a_schema(tmp_path, content, says):
    writer.save(tmp_path, make(1), keep=3)
    directory = writer.save(tmp_path, make(2), keep=3)
    (directory / "manifest.json").write_text(json.dumps(content))
    if isinstance(content, dict) and "state.json is missing" in says:
        for path in directory.glob("*.safetensors"):
            path.unlink()
    assert says in damage.passed_over(tmp_path, 1, 2)
    with pytest.raises(UserError, match="step_000002 is not whole"):
        reader.load(tmp_path, 2)


def test_tensors_that_the_manifest_does_not_know_are_not_read(tmp_path):
    writer.save(tmp_path, make(1), keep=3)
    directory = writer.save(tmp_path, make(2), keep=3)
    shutil.copy(directory / "weights.safetensors", directory / "stray.safetensors")
    assert "stray.safetensors is not in its manifest.json" in damage.passed_over(tmp_path, 1, 2)
    (directory / "stray.safetensors").unlink()
    (directory / "notes.txt").write_text("of somebody's own, which nothing reads")
    assert reader.load(tmp_path, 2).step == 2


def test_what_is_no_checkpoint_is_no_fault(tmp_path):
    writer.save(tmp_path, make(1), keep=3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_000002").write_text("a file")
    assert [entry.step for entry in manifest.entries(tmp_path)] == [1]
    assert reader.load_latest(tmp_path)[1] == []
