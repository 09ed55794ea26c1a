"""A run, as a Python user holds it: its figures and samples, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from PIL import Image

from mmrl.api.entry import entry_point, step_of_run
from mmrl.api.recipes import AnyRecipe, Changes, Objects, read
from mmrl.app.build import evaluate, open_run
from mmrl.app.export import export
from mmrl.app.trainer import Trainer
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import elements
from mmrl.core.notices import silenced
from mmrl.core.quiet import as_before
from mmrl.core.stored import blamed, read_as
from mmrl.core.untrusted import inside, printable
from mmrl.logging.metrics import read_numbers as read_rows
from mmrl.logging.pictures import Listing
from mmrl.logging.rundir import read_ended, refuse_directory
from mmrl.report.curve import curve_picture
from mmrl.report.html import write_report
from mmrl.report.plots import Plot, plot_of
from mmrl.report.recorded import read_run
from mmrl.runtime.start import OpenRun, opened
from mmrl.training.callbacks import AnyCallback


@dataclass(frozen=True)
class RunSample:
    """A held-out sample of an evaluation: the prompt, what the model made of it, and its scores by reward.

    ``image`` is a PIL picture, ``frames`` are those of a clip, ``text`` is a response. ``shown`` are the
    pictures of the prompt, as the model saw them.
    """

    prompt: str
    scores: dict[str, float | None]
    image: Image.Image | None = None
    frames: tuple[Image.Image, ...] = ()
    text: str | None = None
    shown: tuple[Image.Image, ...] = ()


class Run:
    """A run in a directory, made by ``mmrl.train``, ``mmrl.start`` or ``mmrl.load_run``.

    With ``mmrl.start`` it is open: ``step`` trains, and ``close`` (or the end of a ``with``) saves. Otherwise it is
    read, while or after another process trains it.
    """

    def __init__(self, path: Path, recipe: Recipe | None = None, training: Stepper | None = None) -> None:
        self.path, self._recipe, self._training = path, recipe, training

    def __repr__(self) -> str:
        ended = read_ended(self.path)
        how = "" if ended is None else f", {ended}"
        return f"Run({str(self.path)!r}, {self.steps} of {read_run(self.path).setting('train.steps')} steps{how})"

    @property
    def recipe(self) -> Recipe:
        """The settings. Of a run that is only read, an algorithm in a file is imported here. Raises ``UserError``."""
        if self._recipe is None:
            self._recipe = open_run(self.path)[0]
        return self._recipe

    @property
    def steps(self) -> int:
        """How many training steps are recorded."""
        rows = read_rows(self.path / "metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0

    @property
    def finished(self) -> bool:
        """Whether training has come to its end: the last step, or the end that early stopping or a guard chose."""
        if self._training is not None:
            return self._training.trainer.finished
        ended = read_ended(self.path)
        return read_run(self.path).status == "finished" if ended is None else ended.how in ("finished", "early")

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped early at step 40: ...``, ``stopped at step 7: Ctrl-C``, as the report
        says it."""
        return read_run(self.path).status

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """The metrics of training steps by name, one value a step: ``pandas.DataFrame(run.metrics)``.

        None where a step has no such number, or one that is not finite.
        """
        return _columns(self.path / "metrics.jsonl")

    @property
    def heldout(self) -> dict[str, list[float | None]]:
        """The metrics of evaluations on held-out prompts by name, one value an evaluation."""
        return _columns(self.path / "heldout.jsonl")

    def samples(self, step: int | None = None) -> list[RunSample]:
        """The samples of the evaluation after ``step``; None is the last one. Raises ``UserError``."""
        found = sorted(int(file.stem.removeprefix("step_")) for file in (self.path / "samples").glob("step_*.json"))
        if not found or (step is not None and step not in found):
            raise UserError(
                f"{self.path} has no samples of {'an evaluation' if step is None else f'step {step}'}; "
                + (f"give one of {', '.join(map(str, found))}" if found else "set eval.every, or wait for one")
            )
        folder = self.path / "samples"
        file = folder / f"step_{found[-1] if step is None else step:06d}.json"
        try:
            listing = read_as(Listing, file)
        except FileNotFoundError:  # a link that leads nowhere
            raise UserError(f"{file} is missing; put it back from a copy") from None
        with blamed(file):
            return [_sample(folder, one) for one in listing.samples]

    @step_of_run
    def step(self) -> dict[str, float]:
        """Train one step, with the evaluation and the checkpoint that are due after it; returns its metrics.

        Raises ``UserError`` where the run is not open or has ended, and where the step fails.
        """
        if self._training is None:
            raise UserError("this run is not open for training; open it with mmrl.start(..., resume=True)")
        return self._training.step()

    @entry_point
    def evaluate(self, samples: int | None = None, checkpoint: str = "latest") -> dict[str, float | None]:
        """Measure a checkpoint on ``samples`` held-out samples (None: ``eval.samples`` of the recipe).

        ``checkpoint``: ``latest``, ``best``, ``base`` or a step. Loads the model. Raises ``UserError``.
        """
        return evaluate(self.path, samples, checkpoint)

    @entry_point
    def curve(self, reward: str | None = None) -> Image.Image:
        """A picture of a held-out reward over the steps of training; ``reward`` None is the first one.

        Raises ``UserError`` where no evaluation has measured it.
        """
        return curve_picture(self.path, reward)

    @entry_point
    def plot(self, *metrics: str) -> Plot:
        """Charts of ``metrics`` over the steps, in training and on held-out prompts, which a notebook shows by itself.

        ``"policy/kl"`` is one metric, ``"policy"`` all that begin so; none: the mean reward and what evaluations
        measure. ``.save(path)`` writes the charts as an HTML file. Raises ``UserError`` for a metric that is not there.
        """
        return plot_of(self.path, metrics)

    def _repr_html_(self) -> str:
        """The main figures and charts, for a notebook."""
        return plot_of(self.path, tiles=True).frame

    @entry_point
    def report(self) -> Path:
        """Write the report, one HTML file; returns its path."""
        return write_report(self.path)

    @entry_point
    def export(self, out: str | Path, what: str = "merged", checkpoint: str = "latest") -> Path:
        """Write the weights to the new directory ``out``, in the format of transformers or diffusers; returns it.

        ``what``: ``merged``, the whole model, or ``lora``, the adapter alone. Raises ``UserError``.
        """
        return export(self.path, Path(out), what, checkpoint)

    @step_of_run
    def close(self) -> None:
        """Save what is not saved, and free the model and the directory. The run can still be read."""
        if self._training is not None:
            self._training.close()
            self._training = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass
class Stepper:
    """Training that goes on one step at a call, of a run that is open."""

    run: OpenRun
    trainer: Trainer
    _held: ExitStack
    _steps: Generator[dict[str, float]] = field(init=False)
    _over: bool = False

    def __post_init__(self) -> None:
        self._steps = self.trainer.steps(self.run.stop)

    def step(self) -> dict[str, float]:
        if self._over:
            raise UserError(
                f"the run has ended after step {self.trainer.done}; raise train.steps with mmrl.continue_run"
            )
        try:
            row = next(self._steps)
        except StopIteration:
            self._conclude()
            raise UserError(f"the run has ended after step {self.trainer.done}") from None
        except UserError as error:
            self._over = True
            self.run.conclude(self.trainer.failed(error))
            raise
        if self.trainer.finished:
            for _ in self._steps:  # nothing but the last checkpoint
                pass
            self._conclude()
        return row

    def close(self) -> None:
        try:
            if not self._over:
                self._steps.close()
                self._conclude()
        finally:
            self._held.close()

    def _conclude(self) -> None:
        self._over = True
        self.run.conclude(self.trainer.outcome())


def placed(out: str | Path | None, *, resume: bool, overwrite: bool) -> Callable[[str], Path]:
    """By a recipe's name, the directory of its run, which is ``out`` if given. Raises ``UserError`` where no run may be
    made or continued there."""

    def directory(name: str) -> Path:
        path = Path("runs") / name if out is None else Path(out)
        refuse_directory(path, overwrite=overwrite, resume=resume)
        return path

    return directory


def start(
    recipe: AnyRecipe,
    changes: Changes | None,
    objects: Objects,
    out: Path | None,
    callbacks: Sequence[AnyCallback],
    *,
    resume: bool,
    overwrite: bool,
    quiet: bool,
) -> Run:
    """Open a run to train it step by step: see ``mmrl.start``."""
    directory = placed(out, resume=resume, overwrite=overwrite)
    with ExitStack() as held:
        held.enter_context(as_before())  # until the run is closed
        held.enter_context(silenced(quiet=quiet))
        loaded = held.enter_context(read(recipe, changes, objects, named=directory))
        if loaded.recipe.controllers * loaded.recipe.devices_per_controller > 1:
            raise UserError(
                "mmrl.start trains in this process; set controllers and devices_per_controller to 1, or use mmrl.train"
            )
        if loaded.recipe.warm_start is not None:
            raise UserError("mmrl.start opens one run, and warm_start asks for another before it; use mmrl.train")
        path = directory(loaded.recipe.name)
        run = held.enter_context(opened(loaded, path, resume=resume, overwrite=overwrite))
        trainer = run.trainer(callbacks)
        if resume:
            trainer.restore(run.found)
        return Run(path, run.recipe, Stepper(run, trainer, held.pop_all()))


@entry_point
def load_run(path: str | Path) -> Run:
    """The run in the directory ``path``, to read. Raises ``UserError`` where there is none."""
    return Run(read_run(Path(path)).path)


def _columns(file: Path) -> dict[str, list[float | None]]:
    rows = [{k: v for k, v in row.items() if k != "nonfinite"} for row in read_rows(file)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _sample(folder: Path, one: dict[str, object]) -> RunSample:
    scores = one.get("scores")
    known = scores if isinstance(scores, dict) else {}
    if "file" not in one:
        shown = tuple(_pictures(folder, name)[0] for name in elements(one.get("pictures")))
        return RunSample(str(one["prompt"]), known, text=str(one.get("text", "")), shown=shown)
    frames = tuple(_pictures(folder, one["file"]))
    return RunSample(
        str(one["prompt"]), known, frames[0] if len(frames) == 1 else None, frames if len(frames) > 1 else ()
    )


def _pictures(folder: Path, name: object) -> list[Image.Image]:
    """The picture, or the frames of the clip, that ``folder`` has under ``name``. Raises ``ValueError``."""
    path = inside(folder, name)
    if path is None:
        raise ValueError(f"there is no file {printable(str(name))} in {folder}")
    try:
        with Image.open(path) as image:
            return list(_frames(image))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _frames(image: Image.Image) -> Iterator[Image.Image]:
    for i in range(getattr(image, "n_frames", 1)):
        image.seek(i)
        yield image.convert("RGB")
