"""Export a run to files that other libraries load: a complete directory or none, with a model card."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

from safetensors import SafetensorError

from mmrl.app.build import open_run, restored
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.logging.card import What, write_card
from mmrl.logging.rundir import RunDir
from mmrl.step.step_context import StepContext


def export(run: Path, out: Path, what: str = "merged", checkpoint: str = "latest") -> Path:
    """Write the policy of the run directory ``run`` to the new directory ``out`` and return it.

    ``what`` is ``merged`` (the whole model in the libraries' format, in ``model.dtype``), ``lora`` (the adapter alone)
    or ``lora-file`` (the adapter in one file, as ComfyUI and A1111 read it); ``checkpoint`` is ``latest``, ``best``,
    ``base`` or a step. The weights are those that evaluation uses. Raises ``UserError`` where ``run`` is no run,
    ``out`` is taken, there is no adapter to write, its family has no such file, or the disk is full.
    """
    recipe, _ = open_run(run)
    check(recipe, out, what)
    restored_run, directory, step = restored(run, checkpoint)
    with new_directory(out, "the export") as aside:
        write_model(restored_run, directory, step, aside, out.name, cast(What, what))
    return out


@contextmanager
def new_directory(out: Path, what: str) -> Generator[Path]:
    """A folder for ``what``, which becomes ``out`` once all is there. Raises ``UserError`` for a full disk."""
    aside = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _as_umask(aside)
        os.replace(aside, out)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise UserError(_not_written(out, what, error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _as_umask(folder: Path) -> None:
    """Give the files in ``folder`` the mode of a new file; safetensors writes files that only their owner reads."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def check(recipe: Recipe, out: Path, what: str) -> None:
    """Everything that can be refused before a model is loaded. Raises ``UserError``."""
    if what not in get_args(What):
        raise UserError(f"--what {what}: there is {', '.join(get_args(What))}")
    if what != "merged" and recipe.model.lora is None:
        raise UserError(
            f"--what {what}: this run trained all weights (its recipe has no model.lora), so there is no adapter to "
            "write; use --what merged"
        )
    if what == "merged" and recipe.model.quantize is not None:
        raise UserError(
            f"--what merged: the base of this run is in {recipe.model.quantize}, and nothing is merged into that; use "
            "--what lora, which names the base it is for (merged into the plain base it draws or writes a little "
            "differently)"
        )
    if what == "lora-file" and recipe.sampling.type == "text":
        raise UserError("--what lora-file: is for programs that draw pictures; use --what lora for a language model")
    refuse_taken(out)


def refuse_taken(out: Path) -> None:
    """Raise ``UserError`` where ``out`` is no directory that can be made anew."""
    if out.name in ("", ".."):
        raise UserError(f"--out {out}: name a new directory, as in {out / 'my-model'}")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out} is {'a link' if out.is_symlink() else 'a file'}, and a new directory is needed")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty, and nothing in it is overwritten; name another directory with --out")


def write_model(
    context: StepContext, directory: RunDir, step: int, folder: Path, name: str, what: What, made: str = ""
) -> None:
    """Write the evaluated weights of ``context`` and a card called ``name`` into ``folder``.

    The card has the figures of ``directory`` up to ``step``; ``made``: a section of it on how the weights were made.
    """
    with context.policy.for_evaluation():
        context.pipeline.write(folder, what)
    usage = context.pipeline.usage(name, what, context.prompts[0])
    if not write_card(folder, name, context.recipe, directory, step, what, usage, made) and not made:
        print(f"note: {directory.path} has no held-out evaluation up to step {step} for the card", file=sys.stderr)


def _not_written(out: Path, what: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or error
    existing = next(p for p in (out.parent, *out.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**20
    return (
        f"{what} could not be written to {out}: {reason}. Nothing is left there. {free:,.0f} MiB are free on that "
        "disk; free more, or name another place with --out"
    )
