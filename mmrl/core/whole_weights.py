"""Refuse checkpoints that lack weights: transformers and diffusers fill these with random numbers and only warn."""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

from mmrl.core.errors import UserError

_LIBRARIES = ("transformers", "diffusers")
_REPORT = "LOAD REPORT"
_ROW = re.compile(r"^\s*(\S.*?)\s*\|\s*(?:\x1b\[[\d;]*m)?(MISSING|UNEXPECTED|MISMATCH)", re.MULTILINE)
"""A row of transformers' report: ``model.layers.{0, 1}.mlp.weight | MISSING``."""
_LISTED = re.compile(r"newly initialized[^\[]*(\[[^\]]*\])")
_COMPUTED = ("position_ids", "inv_freq", "masked_bias")
"""Ends of names that older checkpoints hold and models compute today."""
_SHOWN = 3


class _Reports(logging.Handler):
    """Keeps the names that the libraries' warnings report, by what is said of them. Hands every record on as before,
    but for transformers' report, which is a table of such names."""

    def __init__(self, handlers: dict[str, tuple[int, list[logging.Handler]]]) -> None:
        super().__init__()
        self.before, self.names = handlers, defaultdict[str, list[str]](list)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        for name, status in _ROW.findall(said):
            self.names[status].append(name)
        for listed in _LISTED.findall(said):
            self.names["MISSING"] += re.findall(r"'([^']+)'", listed)
        level, handlers = self.before[record.name.partition(".")[0]]
        for handler in handlers if record.levelno >= level and _REPORT not in said else ():
            handler.handle(record)

    def some(self, status: str, without: tuple[str, ...]) -> str:
        """The first names of which this was said; empty for none. Those that begin with ``without`` do not count."""
        found = sorted({name for name in self.names[status] if not without or not name.startswith(without)})
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"{', '.join(found[:_SHOWN])}{more}"


@contextmanager
def whole_weights(path: str, unused: tuple[str, ...] = ()) -> Generator[None]:
    """Inside the block models are loaded from ``path``, each with all of its weights.

    ``unused``: beginnings of names that the caller does not compute with (the pooler of an encoder, say). Raises
    ``UserError`` with the names that the checkpoint lacks.
    """
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    reports = _Reports({logger.name: (logger.getEffectiveLevel(), logger.handlers[:]) for logger in loggers})
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.handlers[:] = [reports]
        logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING))
    try:
        yield
    except RuntimeError as error:
        if not (other := reports.some("MISMATCH", ())):
            raise
        raise UserError(
            f"{path}: the weights {other} have other shapes than its config.json says; download or save it anew"
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.handlers[:] = reports.before[logger.name][1]
            logger.setLevel(level)
    if lacking := reports.some("MISSING", unused):
        raise UserError(
            f"{path} lacks the weights {lacking}, which would be random numbers; the "
            "checkpoint is not whole, or of another model: download or save it anew"
        )
    reports.names["UNEXPECTED"] = [name for name in reports.names["UNEXPECTED"] if not name.endswith(_COMPUTED)]
    if more := reports.some("UNEXPECTED", unused):
        print(f"warning: {path} holds weights that this model does not have: {more}", file=sys.stderr)
