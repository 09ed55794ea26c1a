"""The sections ``runtime`` and ``features`` of a recipe: the processes of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from mmrl.config.section import Duration, Section


class Runtime(Section):
    """How the launcher of several controllers or devices watches their processes (docs/controllers.md)."""

    patience: Duration = 120.0
    """How long a process that does not answer is waited for (``2m``, ``90s``, or seconds): a reward that does not
    release Python's lock (GIL) keeps its process from answering. A process that is stopped (SIGSTOP) is lost after 10
    seconds."""


class Features(Section):
    """What prompts are encoded to (embeddings, tokens, processor outputs) stays in the controller that encoded them."""

    budget: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(2 << 30)
    """Of a controller's memory (``512 MiB``): past it what no step holds is dropped, then the rest goes to disk."""
    folder: str | None = None
    """A local folder for what goes to disk; None takes the system's temporary files (TMPDIR)."""
    cache: str | None = None
    """Pictures and clips: a folder where embeddings of prompts stay, for later runs and other processes. None keeps
    none."""
