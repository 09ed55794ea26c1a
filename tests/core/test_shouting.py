"""What libraries warn of while a run loads, samples, trains and is exported is said to the user, each line once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import shouting, tiny, tiny_diffusion
from tests.support.plan_text import RECIPE, REWARD

allow_cpu_only()

PICTURES = """
name: tiny
device: cpu
pipeline: diffusion/sd
model: {path: model}
data: {name: prompts, train: {path: prompts.txt}, heldout: {path: prompts.txt}}
sampling: {steps: 3, batch_size: 4, height: 32, width: 32}
rewards: [{name: reward.py}]
algorithm: {type: flow_grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
"""


def language(folder: Path) -> None:
    tiny.language_model(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(40)))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)


def pictures(folder: Path) -> None:
    tiny_diffusion.save("sd", folder / "model")
    (folder / "prompts.txt").write_text("a cat\na dog\na cow\n")
    (folder / "recipe.yaml").write_text(PICTURES)
    (folder / "reward.py").write_text(
        REWARD.replace('("text",)', '("image",)').replace("len(s.text) % 3", "s.image.getpixel((0, 0))[0]")
    )


def mmrl(folder, *arguments):
    """The lines that a command prints to stderr, and the phases that were."""
    script = Path(shouting.__file__)
    free = {name: value for name, value in os.environ.items() if not name.endswith("_VERBOSITY")}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**free, "PYTHONPATH": str(script.parents[1])},
    )
    *lines, last = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    return lines, last.removeprefix("phases:").split()


@pytest.mark.slow
@pytest.mark.sweep("warnings of libraries that nobody listed")
def test_what_a_library_warns_of_is_said_once(sweep, tmp_path):
    for make in (language, pictures)[: sweep.size(1, 2)]:
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder)
        met = set()
        for command in ("plan recipe.yaml", "train recipe.yaml --out run", "export run --out whole"):
            lines, phases = mmrl(folder, *command.split())
            met |= set(phases)
            for phase in phases:
                for library, way, _ in shouting.spoken():
                    said = [line for line in lines if f"{phase} {library} {way}" in line]
                    level = "error" if way == "error" else "warning"
                    sweep.check(said == [f"{level}: {library}: {phase} {library} {way}"], (command, phase, said))
            if phases:
                resized = [line for line in lines if "one or more elements was resized" in line]
                sweep.check(len(resized) == 1 and resized[0].startswith("warning: torch: "), resized)
        assert met == {"load", "sample", "train", "export"}
    sweep.done()
