"""The licence is stated once, and every weight that ships is accounted for."""

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("mmrl", "pipelines", "rewards", "datasets", "environments")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npy", ".npz", ".pkl"}
PAGE = (ROOT / "docs" / "weights.md").read_text()
LOGS = sorted(ROOT.glob("pipelines/*/models/*/log.jsonl"))


def test_every_shipped_weight_is_listed_as_it_is():
    shipped = (path for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.suffix in WEIGHTS)
    rows = set()
    for path in shipped:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        rows.add(f"| `{path.relative_to(ROOT).as_posix()}` | {len(content)} | `{digest}` |")
    listed = {line for line in PAGE.splitlines() if re.fullmatch(r"\| `\S+` \| \d+ \| `[0-9a-f]{64}` \|", line)}
    assert rows, "no weights found"
    assert rows - listed == set(), "write these lines into docs/weights.md, and there what made the model"
    assert listed - rows == set(), "these lines of docs/weights.md are of files that changed or are gone"


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.parent.name)
def test_every_shipped_model_says_what_made_it(log):
    assert f"| `{log.parent.name}` |" in PAGE
    commands = [row["command"] for row in map(json.loads, log.read_text().splitlines()) if "command" in row]
    assert commands
    now = dict(re.findall(r"^\| `(mmrl\.\S+)` \| `(tools\.\S+)` \|$", PAGE, re.MULTILINE))
    for command in commands:
        python, flag, script, *arguments = command.split(" ")
        assert "\n" + " ".join([python, flag, now.get(script, script), *arguments]) + "\n" in PAGE
        assert (ROOT / now.get(script, script).replace(".", "/")).with_suffix(".py").is_file()


def test_every_shipped_model_has_a_log():
    models = {path.parent for path in ROOT.glob("pipelines/*/models/*/*.json")}
    assert models == {log.parent for log in LOGS}


def test_the_package_states_its_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert set(project["license-files"]) == {"LICENSE", "docs/weights.md"}
    text = (ROOT / "LICENSE").read_text()
    assert "Copyright 2026 The mmrl authors" in text
    original = text.replace("2026 The mmrl authors", "[yyyy] [name of copyright owner]")
    digest = hashlib.sha256(original.encode()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30", "not the text of Apache-2.0"
