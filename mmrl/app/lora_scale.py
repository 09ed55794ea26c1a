"""How strong an adapter should be: held-out samples of a LoRA run with the adapter scaled, from the same noise."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from torch import nn

from mmrl.app.build import open_run, restored
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.media.images import png_bytes
from mmrl.core.trajectory import Sample
from mmrl.data.loading import load_prompts
from mmrl.logging.grids import film_strip, grid, score_line
from mmrl.logging.rundir import RunDir
from mmrl.training.evaluation import Evaluator, Made, guarded

MOST = 20
SHOWN = 8
"""Prompts in the grid."""
Row = Mapping[str, float]


def parse_strengths(text: str) -> list[float]:
    """``0,0.4,1`` in rising order. Raises ``UserError``."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or len(found) > MOST or not all(math.isfinite(s) for s in found):
        raise UserError(
            f"--lora-strength {text}: give 1 to {MOST} numbers with commas between, 0,0.4,0.8,1.0,1.2, say; 0 is the "
            "base model, 1 the adapter as it was trained"
        )
    return found


def sweep(path: Path, strengths: Sequence[float], samples: int | None = None, which: str = "latest") -> list[Row]:
    """Evaluate a checkpoint of the run at ``path`` with its adapter multiplied by each of ``strengths`` (rising).

    Returns a row each: ``strength``, the held-out rewards, diversity, and where 0 is among them what is relative to
    the base model (``guard/``, docs/reward_hacking.md). They are kept in the run's folder ``strength/`` with a grid of
    the pictures, for the report. Raises ``UserError`` where there is no adapter to scale.
    """
    recipe, directory = open_run(path)
    if recipe.model.lora is None:
        raise UserError(
            f"--lora-strength: {path} trains all weights, and no adapter could be scaled; leave it out, or train with "
            "model.lora={rank: 32}"
        )
    if recipe.sampling.type == "text" and not recipe.rollout.in_process:
        raise UserError(
            f"--lora-strength: {recipe.rollout.engine_name} has merged weights of its own; export the adapter (mmrl "
            "export --what lora) and scale it there"
        )
    run, _, step = restored(path, which)
    heldout = Evaluator(run, load_prompts(run.recipe, "heldout"))
    rows, makes = list[Row](), list[Made]()
    for strength in strengths:
        with scaled(run.policy.module, strength):
            row, made, _ = heldout.score(samples or run.recipe.eval.samples)
            row |= guarded(heldout.guards, row, made, base=strength == 0)
        rows.append({"strength": strength} | {k: v for k, v in row.items() if math.isfinite(v)})
        makes.append(made)
    _keep(directory, step, rows, makes)
    return rows


@contextmanager
def scaled(module: nn.Module, strength: float) -> Generator[None]:
    """Compute with the adapter of ``module`` times ``strength``."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    try:
        for layer in layers:
            layer.set_scale("default", strength)
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1.0)


def _keep(directory: RunDir, step: int, rows: Sequence[Row], makes: Sequence[Made]) -> None:
    """Write the rows, and of the first prompts a grid with a row each, or their texts."""
    folder = directory.path / "strength"
    folder.mkdir(exist_ok=True)
    (folder / "grid.png").unlink(missing_ok=True)
    shown = range(min(SHOWN, *(len(made.samples) for made in makes)))
    cells = [(row, made.samples[i], made.scores[i]) for i in shown for row, made in zip(rows, makes, strict=True)]
    pictures = [picture for _, sample, _ in cells if (picture := _picture(sample)) is not None]
    if pictures:
        captions = [f"strength {r['strength']:g}: {s.prompt.text}\n{score_line(score)}" for r, s, score in cells]
        write_atomic(folder / "grid.png", png_bytes(grid(pictures, captions, len(rows))))
    texts = [
        {"strength": row["strength"], "prompt": sample.prompt.text, "text": sample.text}
        for row, sample, _ in cells
        if sample.text is not None
    ]
    content = {"step": step, "rows": rows, "texts": texts}
    write_atomic(folder / "sweep.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _picture(sample: Sample) -> Image.Image | None:
    return sample.image if sample.video is None else film_strip(sample.video)
