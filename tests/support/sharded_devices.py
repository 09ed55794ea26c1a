"""Shared by the tests of sharded devices and others."""

import pytest

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.runs import run

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("ray")
pytest.importorskip("torchvision")
SEEN = """
import hashlib
import mmrl

@mmrl.reward(inputs=("{what}",))
def score(samples, *, context):
    found = [s.text.encode() if "{what}" == "text" else s.tensor.numpy().tobytes() for s in samples]
    names = [f"{{s.id.step}} {{s.id.slot}} {{s.id.sample}}" for s in samples]
    with open("{file}", "a") as file:
        file.write("".join(f"{{n}} {{hashlib.sha256(f).hexdigest()}}\\n" for n, f in zip(names, found, strict=True)))
    return [0.0] * len(samples)
"""
"""Has no weight; writes down what was sampled, to the bit."""
SMALL = ["train.group_size=4", "train.micro_batch_size=4", "sampling.batch_size=4", "model.dtype=float32"]
SMALL += ["train.prompts_per_step=5", "optim.schedule=constant", "eval.every=1", "eval.samples=8", "checkpoint.every=1"]
RECIPES = {
    "sums": ("text", '{name: "answer:number", options: {after: "answer:"}}', ["algorithm.kl_coef=0.01"]),
    "shapes-lora": (
        "tensor",
        "{name: shapes}",
        ["algorithm.kl_coef=0.01", "optim.ema_decay=0.9", "sampling.steps=4", "sampling.window={size: 2}"],
    ),
}


def sampled(recipe, out, *overrides):
    """Train into ``out``; returns what was sampled, by step, slot and sample."""
    what, reward, small = RECIPES[recipe]
    file, written = out.parent / "seen.py", out.parent / "seen.txt"
    file.write_text(SEEN.format(what=what, file=written))
    both = f'rewards=[{reward}, {{name: "{file}:score", label: seen, weight: 0}}]'
    run(recipe, out, *SMALL, *small, both, *overrides)
    found = dict(line.rsplit(" ", 1) for line in written.read_text().splitlines() if not line.startswith("-1"))
    written.unlink()
    return found


def same_beginning(one, other):
    """Whether both sampled the same in the first step, to the bit."""
    firsts = [{name: value for name, value in found.items() if name.startswith("0 ")} for found in (one, other)]
    assert firsts[0] == firsts[1]
    assert len(firsts[0]) == 20
