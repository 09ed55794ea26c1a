"""Shared by the tests of report and others."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from mmrl.logging.grids import write_samples
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir

HOSTILE = (
    "<script>alert('x')</script><img src=http://evil.example/x.png onerror=alert(1)>\n\"quoted\" & 'more' </script>"
)


RECIPE = """name: shapes-lora
rewards:
  - {name: "shapes:verify", label: shapes}
  - {name: "jpeg:compressibility", label: jpeg, weight: 0.1}
train: {steps: 40}
"""


class Page(HTMLParser):
    """Tags, attributes and visible text of a page, as a browser would part them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def recorded(path: Path, shapes, steps: int = 20, prompts: list[str] | None = None, told: int = 0) -> RunDir:
    """A run with everything in it, as the loop leaves it: drawn pictures, rewards, failures. ``told``: the steps of its
    recipe, where it has not trained all."""
    source = path.parent / "given.yaml"
    source.write_text(RECIPE)
    resolved = {
        "name": "shapes-lora",
        "seed": 0,
        "rewards": [
            {"name": "shapes:verify", "label": "shapes", "weight": 1.0},
            {"name": "jpeg:compressibility", "label": "jpeg", "weight": 0.1},
        ],
        "train": {"steps": told or steps, "max_cpu_seconds": None},
        "optim": {"lr": 3e-4},
    }
    scenes = shapes.prompts("heldout")[:6]
    texts = prompts or [p.text for p in scenes]
    with RunDir.create(path) as run, MetricsLog(run.metrics) as metrics, MetricsLog(run.heldout) as heldout:
        run.write_recipe([source], ["optim.lr=3e-4"], resolved)
        for step in range(steps + 1):
            if step:
                row = {"reward/mean": step / 40, "reward/std": 0.2, "reward/dropped": 0.0, "reward/shapes": step / 40}
                row |= {"policy/kl": step * 1e-3, "policy/ratio_max_dev": 1e-3, "policy/first_ratio_max_dev": 0.0}
                row |= {"time/sample": 1.0, "time/train": 2.0, "time/step": 3.1, "perf/cpu_seconds": step * 3.0}
                metrics.write(step, row)
            if step % 10 == 0:
                heldout.write(step, {"samples": 6, "reward/shapes": 0.4 + step / 100, "reward/shapes/colour": 0.9})
                images = [shapes.picture(p, step) for p in scenes]
                scores = [{"shapes": float(i % 2), "shapes/colour": 1.0, "jpeg": i / 10} for i in range(6)]
                write_samples(run, step, images, texts, scores)
    return run
