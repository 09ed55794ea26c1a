"""``mmrl verify RUN --decisions``: real runs of several devices, whose scheduler decides again from the log."""

import json
import signal

import pytest

from mmrl.app.build import possible
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.logging.rundir import RunDir
from mmrl.report.timeline import timeline
from tests.support import runs
from tests.support.cli import mmrl
from tests.support.three_roles import JUDGE

LINES = [
    {"step": 1, "controller": 0, "heard": [[1.0, "begins", {"devices": 2, "judges": [], "judged": False}]]},
    {"step": 1, "controller": 0, "device": 0, "role": "rollout", "began": 0.0, "ended": 1.0},
]
SMALL = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", "sampling.batch_size=4"]


def test_a_log_is_refused_where_nothing_is_decided():
    with pytest.raises(UserError, match=r"placement\.log: with one device .* set devices_per_controller to 2 or more"):
        possible(load_recipe(["sums"], ["placement.log=true"]).recipe)


@pytest.fixture
def written(tmp_path):
    """The directory of a run that was begun, with these lines of placement.jsonl."""
    assert mmrl("train", "sums", *SMALL, "train.steps=1", "eval.every=null", "--out", str(tmp_path / "run")) == 0

    def write(*lines):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "run" / "placement.jsonl").write_text(text)
        return tmp_path / "run"

    return write


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(written, capsys):
    run = written()
    assert mmrl("verify", str(run), "--decisions") == 2
    assert "its controllers have one device each" in capsys.readouterr().err
    assert mmrl("verify", str(run), "--decisions", "--step", "1") == 2
    assert "leave out --step" in capsys.readouterr().err
    for damaged in (LINES[:1], [{**LINES[0], "heard": [[1.0, "idle", 0]]}], [{**LINES[0], "heard": ["idle"]}]):
        assert mmrl("verify", str(written(*damaged)), "--decisions") == 2
        assert "cannot be replayed" in capsys.readouterr().err
    shown = timeline(RunDir(written(*LINES)).placement)
    assert (shown.bad, shown.labels) == (0, ["device 0"])  # the report leaves the log out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controllers", "placement"),
    [
        pytest.param(1, "{type: disaggregated, trainers: 1, split: adaptive, lend: true, log: true}", id="lent"),
        pytest.param(2, "{type: adaptive, log: true}", marks=pytest.mark.long),
    ],
)
def test_a_real_run_decides_as_its_log_says(tmp_path, capsys, controllers, placement):
    pytest.importorskip("ray")
    judge, out = tmp_path / "judge.py", tmp_path / "run"
    judge.write_text(JUDGE)
    words = [*SMALL, "eval.every=null", "checkpoint.every=1", f'rewards=[{{name: "{judge}:score", batch_size: 4}}]']
    words += [f"controllers={controllers}", f"devices_per_controller={3 if controllers == 1 else 2}"]
    words += ["train.steps=4", f"placement={placement}"]
    process = runs.train("sums", out, *words)
    runs.wait_for(process, out, 2)
    process.send_signal(signal.SIGINT)
    runs.ended(process)
    runs.run("sums", out, *words, "--resume")  # another process, and the policy goes on where it was
    assert mmrl("verify", str(out), "--decisions") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("and 4 decisions between steps are the same, until step 4") == controllers
    assert said.endswith("the replayed decisions are the same")
    lines = [json.loads(line) for line in (out / "placement.jsonl").read_text().splitlines()]
    entries = [entry for line in lines for entry in line.get("heard", []) if line["step"] == 4]
    tried = next(entry for entry in entries if entry[1] == "tried")
    tried[2][0] += 1e-9
    (out / "placement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert mmrl("verify", str(out), "--decisions") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "in step 4 it DIFFERS: seconds under each candidate" in said
    assert said.endswith("the replayed decisions are NOT the same")
    kept = [json.dumps(line) for line in lines if "heard" not in line]  # what a run without the log writes
    (out / "placement.jsonl").write_text("\n".join([*kept, ""]))
    assert mmrl("verify", str(out), "--decisions") == 2
    assert "train it with placement.log=true" in " ".join(capsys.readouterr().err.split())
