"""A run of somebody else: no command that loads its model or scores with its rewards runs code that came with it."""

import json
from functools import partial

import pytest

from mmrl.app.build import evaluate, open_run
from mmrl.app.continuing import continued
from mmrl.app.export import export
from mmrl.app.sample import draw
from mmrl.app.verify import verify
from mmrl.app.verify.decisions import verify_decisions
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.logging.rundir import RunDir

allow_cpu_only()  # before transformers imports torchvision

CODE = {
    "algorithm": lambda name: {"type": name},
    "pipeline": lambda name: name,
    "data": lambda name: {"name": name},
    "rewards": lambda name: [{"name": name}],
    "eval": lambda name: {"rewards": [{"name": name}]},
    "environment": lambda name: {"options": {"tools": [name]}},
}
USED = {
    "eval": partial(evaluate, samples=1),
    "export": lambda run: export(run, run.parent / "exported"),
    "sample": lambda run: draw(run, [Prompt("a", "a")], run.parent / "drawn"),
    "verify": verify,
    "verify --decisions": verify_decisions,
    "continue": continued,
    "merge": lambda run: open_run(run),
}


def stored(folder):
    loaded = load_recipe(["shapes-lora"])
    with RunDir.create(folder) as run:
        run.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        return run


@pytest.mark.parametrize("where", ["inside", "relative to the run", "relative to here", "linked into it"])
def test_a_run_of_somebody_else_is_not_used_with_code_that_came_with_it(where, tmp_path, monkeypatch):
    run = stored(tmp_path / "run")
    evil = run.path / "evil.py"
    evil.write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    (tmp_path / "link").symlink_to(run.path)
    monkeypatch.chdir(tmp_path)
    names = {
        "inside": str(evil),
        "relative to the run": "evil.py",
        "relative to here": "run/evil.py",
        "linked into it": str(tmp_path / "link" / "evil.py"),
    }
    resolved = json.loads(run.resolved.read_text())
    open_run(run.path)  # as it was made
    for key, made in CODE.items():
        for name in (names[where], f"{names[where]}:Mine"):
            run.resolved.write_text(json.dumps({**resolved, key: made(name)}))
            for use in USED.values():
                with pytest.raises(UserError, match="lies in the run and may be anybody's"):
                    use(run.path)
    assert not evil.with_suffix(".ran").exists()
