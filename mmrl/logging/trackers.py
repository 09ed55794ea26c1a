"""Trackers in addition to metrics.jsonl: TensorBoard, Weights & Biases, trackio. Imported only on demand."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.installing import install
from mmrl.core.json_types import JsonObject
from mmrl.logging.metrics import Tracker
from mmrl.logging.rundir import RunDir

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

NAMES = ("tensorboard", "wandb", "trackio")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``UserError`` for every tracker that is unknown or not installed. Imports none of them."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UserError(f"log: {', '.join(unknown)}: no such tracker; there are {', '.join(NAMES)}")
    missing = [name for name in names if not _installed(name)]
    if missing:
        raise UserError(
            f"log: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; "
            f"{install(*missing)}, or take {'it' if len(missing) == 1 else 'them'} out of log"
        )


def open_trackers(names: Sequence[str], run: RunDir, run_name: str) -> list[Tracker]:
    """Start the trackers of a run, with the settings of its resolved.json.

    A resumed run goes on in the same place: what an earlier process sent for a step written again is replaced
    (TensorBoard) or left as it is (wandb, trackio). Raises ``UserError`` as ``check_trackers`` does.
    """
    check_trackers(names)
    config = run.settings() if run.resolved.exists() else {}
    makers = {"tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio}
    return [makers[name](run, run_name, config) for name in names]


def _identity(run: RunDir, tracker: str) -> str:
    """The tracker's id of this run directory, stored there so that a resumed run continues the same page."""
    kept = run.path / tracker / "run_id"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        write_atomic(kept, uuid.uuid4().hex[:12])
    return kept.read_text().strip()


def _installed(name: str) -> bool:
    """Whether the package is there. A mere folder of that name (wandb leaves one where it runs) is not it."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class _TensorBoard:
    """Event files in ``<run>/tensorboard``. The writer starts at the first step written, and hides from there on what
    an earlier process of the same run wrote."""

    def __init__(self, run: RunDir, run_name: str, config: JsonObject) -> None:
        self.path = run.path / "tensorboard"
        self.writer: SummaryWriter | None = None

    def _writer(self, step: int) -> SummaryWriter:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.path), purge_step=step)
        return self.writer

    def scalars(self, step: int, row: Mapping[str, float]) -> None:
        writer = self._writer(step)
        for key, value in row.items():
            writer.add_scalar(key, value, step)

    def picture(self, step: int, name: str, image: Image) -> None:
        import numpy

        writer = self._writer(step)
        writer.add_image(name, numpy.asarray(image.convert("RGB")), step, dataformats="HWC")
        writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class _Wandb:
    def __init__(self, run: RunDir, run_name: str, config: JsonObject) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._library: Any = wandb
        self._to: Any = wandb.init(
            project="mmrl",
            name=run_name,
            id=_identity(run, "wandb"),
            dir=str(run.path),
            config=dict(config),
            resume="allow",
        )

    def scalars(self, step: int, row: Mapping[str, float]) -> None:
        self._to.log(dict(row), step=step)

    def picture(self, step: int, name: str, image: Image) -> None:
        self._to.log({name: self._library.Image(image)}, step=step)

    def close(self) -> None:
        self._to.finish()


class _Trackio(_Wandb):
    """trackio has the interface of wandb, as functions of the module."""

    def __init__(self, run: RunDir, run_name: str, config: JsonObject) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._library = self._to = trackio
        name = f"{run_name}-{_identity(run, 'trackio')[:6]}"
        trackio.init(project="mmrl", name=name, config=dict(config), resume="allow")
