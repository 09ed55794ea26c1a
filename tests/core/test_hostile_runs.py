"""Run folders and checkpoints of strangers: no traceback, no hang, no gigabytes, whatever their files hold."""

import json
import shutil

import pytest

from tests.support import hostile
from tests.support.hostile_runs import RECIPE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of two steps, with two checkpoints."""
    from mmrl.cli import app

    out = tmp_path_factory.mktemp("trained") / "run"
    app(["train", *RECIPE, "train.steps=2", "--out", str(out)], standalone_mode=False)
    said = {"step": 1, "judge": "judge", "samples": [[0, 0, 0]], "request": "a", "answers": ["8"], "verdict": 0.8}
    rows = {
        "failures": {"step": 1, "kind": "record", "name": "data.train", "error": "line 3 is not JSON"},
        "continued": {"after": 1, "changes": [{"key": "train.steps", "before": 1, "now": 2}], "notes": ["held"]},
        "judge-transcripts": said | {"verdicts": [0.8], "seconds": 0.1, "reason": None, "cached": False, "prompt": "p"},
        "judge-usage": {"step": 1, "judge": "judge", "calls": 3, "prompt_tokens": 20},
        "judge-cache": {"key": "a", "verdict": 0.5, "raw": ["5"]},
    }
    for name, row in rows.items():
        (out / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (out / "calling.json").write_text('["shapes"]')
    spans = [
        {"step": n, "controller": 0, "device": 0, "role": role, "began": n + at, "ended": n + at + 0.1, "rows": 2}
        for n in (1, 2)
        for at, role in ((0.0, "rollout"), (0.2, "judge"), (0.4, "train"))
    ]
    (out / "placement.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    (out / "strength").mkdir()
    curve = {"step": 2, "rows": [{"strength": 0.5, "reward/shapes": 0.3}], "texts": []}
    (out / "strength" / "sweep.json").write_text(json.dumps(curve))
    return out


@pytest.mark.slow
@pytest.mark.sweep("hostile run folders and checkpoints, through the commands that read them")
def test_no_file_of_a_run_is_a_traceback(trained, tmp_path, sweep):
    for seed in range(sweep.size(45, 450)):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        kind, how = hostile.change(run, seed)
        names = hostile.FILES[kind]
        name = names[seed // len(hostile.FILES) % len(names)]
        wrong = hostile.attempt(hostile.command(name, run, RECIPE, tmp_path))
        sweep.check(not wrong, f"seed {seed}: {name} with {kind} ({how}): {wrong}")
    sweep.done()
