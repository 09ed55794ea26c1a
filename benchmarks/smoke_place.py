"""Shared code of the checks of ``gpu_smoke.py`` and ``gpu_limits.py``: the device, and how a check ends without
figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SkippedError(Exception):
    """What a check needs is not here; the message says what."""


class MissedError(Exception):
    """What a check measured is not as it must be. ``figures``: what was measured."""

    def __init__(self, why: str, figures: Mapping[str, Any]) -> None:
        super().__init__(why)
        self.figures = dict(figures)


@dataclass(frozen=True)
class Place:
    """Where checks run. ``small``: sizes that a CPU computes in seconds. ``folder``: for what a check writes. ``peer``:
    a checkout of another trainer."""

    device: str
    small: bool
    folder: Path
    peer: Path | None = None

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Figures that count also where the check fails later, or runs too long."""
        whole = self.kept() | dict(figures)
        aside = self.folder / "kept.aside"
        aside.write_text(json.dumps(whole))
        aside.replace(self.folder / "kept.json")

    def kept(self) -> dict[str, Any]:
        file = self.folder / "kept.json"
        return json.loads(file.read_text()) if file.exists() else {}
