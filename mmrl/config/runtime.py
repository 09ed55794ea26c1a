"""The sections ``runtime`` and ``features`` of a recipe: the processes of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from mmrl.config.section import Duration, Section


class Runtime(Section):
    """How the launcher of several controllers or devices watches their processes (docs/controllers.md)."""

    patience: Duration = 120.0
    """How long to wait for a process that does not answer (``2m``, ``90s``, or seconds): a reward that holds Python's
    lock (GIL) keeps its process from answering. Also for one that shows no progress in a phase whose usual time is not
    known yet. A stopped process (SIGSTOP) counts as lost after 10 seconds."""


class Features(Section):
    """Encoded prompts (embeddings, tokens, processor outputs), which stay in the controller that encoded them."""

    budget: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(2 << 30)
    """Memory per controller (``512 MiB``): above it, features that no step uses are dropped, then others are moved to
    disk."""
    folder: str | None = None
    """A local folder for features on disk; None takes the system's temporary folder (TMPDIR)."""
    cache: str | None = None
    """Pictures and clips: a folder that keeps embeddings of prompts for later runs and other processes; None: no
    cache."""
