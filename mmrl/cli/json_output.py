"""One JSON document on stdout and nothing else there: what ``--json`` promises to a script (docs/json.md)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Annotated

import typer

from mmrl.json_types import Json, JsonObject
from mmrl.secrets import hidden

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/json.md), and nothing else.")]


@contextmanager
def json_alone() -> Generator[Callable[[JsonObject], None]]:
    """Inside, what anything prints goes to stderr, also what a library or a child process writes to descriptor 1.

    Yields the function that prints the document on the real stdout, once the block is left.
    """
    documents: list[JsonObject] = []
    sys.stdout.flush()
    real = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield documents.append
    finally:
        os.dup2(real, 1)
        os.close(real)
    for document in documents:
        print(json.dumps(plain(document), indent=2, allow_nan=False))


def plain(value: Json) -> Json:
    """The same data without secrets, and with null for numbers that JSON lacks (nan and the infinities)."""
    if isinstance(value, str):
        return hidden(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return [plain(inner) for inner in value]
