"""Samples of the same prompts and seeds over the steps of a run, as one picture: a strip, or a picture that moves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.media import evenly
from mmrl.logging.grids import grid, rgb
from mmrl.logging.pictures import SLIDER_STEPS, Evaluation, read_evaluations

PROMPTS = 4
"""How many prompts are shown where none are named."""
FRAME_MS, LAST_MS = 700, 2500
"""How long a frame is shown, and the last one."""
MOVING, STRIP = (".gif", ".webp"), ".png"


def write_over_steps(run: Path, file: Path, numbers: Sequence[int] = ()) -> Path:
    """Draw held-out samples of ``run`` at up to 12 evaluations into ``file``; returns it.

    A ``.png`` has a row for each prompt and a column for each evaluation; a ``.gif`` or ``.webp`` shows one evaluation
    after the other. ``numbers``: which samples of the grid, from 0; the first 4 by default. Raises ``UserError`` for
    another ending, fewer than two evaluations with pictures, and a number that the grid does not have.
    """
    if file.suffix.lower() not in (*MOVING, STRIP):
        raise UserError(f"{file.name} is no kind of picture that is drawn; end its name in .gif, .webp or .png")
    found = [one for one in read_evaluations(run / "samples") if one.samples and not one.texts]
    chosen = evenly(found, SLIDER_STEPS)
    shared = [key for key in (chosen[0].samples if chosen else ()) if all(key in one.samples for one in chosen)]
    if len(chosen) < 2 or not shared:
        raise UserError(
            f"{run} has pictures of {len(chosen)} evaluations; a picture over steps needs two with the same prompts: "
            "wait for the next evaluation"
        )
    if wrong := [number for number in numbers if not 0 <= number < len(shared)]:
        raise UserError(f"--sample: the grid has samples 0 to {len(shared) - 1}, and no {wrong[0]}")
    keys = [shared[number] for number in numbers] if numbers else shared[:PROMPTS]
    rows = [[_open(one, key) for one in chosen] for key in keys]
    steps = [one.step for one in chosen]
    if file.suffix.lower() == STRIP:
        captions = [f"step {step}\n{key[0]}" for key in keys for step in steps]
        grid([picture for row in rows for picture in row], captions, len(steps)).save(file)
        return file
    frames = []
    for place, step in enumerate(steps):
        captions = [f"{key[0]}\nstep {step}" for key in keys]
        frames.append(grid([row[place] for row in rows], captions, len(keys)))
    shown = [FRAME_MS] * (len(frames) - 1) + [LAST_MS]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=shown, loop=0)
    return file


def _open(evaluation: Evaluation, key: tuple[str, int]) -> Image.Image:
    path = evaluation.samples[key].path
    try:
        assert path is not None  # evaluations of texts were left out
        with Image.open(path) as image:
            return rgb(image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read ({error}); leave its sample out with --sample") from error
