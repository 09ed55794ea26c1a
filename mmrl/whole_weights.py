"""Refuse checkpoints that lack weights: transformers and diffusers fill these with random numbers and only warn."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager

from mmrl.errors import UserError

_LIBRARIES = ("transformers", "diffusers")
_ROW = re.compile(r"^\s*(\S+)\s*\|\s*(?:\x1b\[[\d;]*m)?MISSING", re.MULTILINE)
_LISTED = re.compile(r"newly initialized[^\[]*(\[[^\]]*\])")
_SHOWN = 3


class _Reports(logging.Handler):
    """Keeps the names that the libraries' warnings report as missing, and hands every record on as before."""

    def __init__(self, handlers: dict[str, tuple[int, list[logging.Handler]]]) -> None:
        super().__init__()
        self.before, self.missing = handlers, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        self.missing += _ROW.findall(said)
        for listed in _LISTED.findall(said):
            self.missing += re.findall(r"'([^']+)'", listed)
        level, handlers = self.before[record.name.partition(".")[0]]
        for handler in handlers if record.levelno >= level else ():
            handler.handle(record)


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
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.handlers[:] = reports.before[logger.name][1]
            logger.setLevel(level)
    lacking = sorted(
        {name for name in reports.missing if not name.startswith(unused)} if unused else {*reports.missing}
    )
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise UserError(
            f"{path} lacks the weights {', '.join(lacking[:_SHOWN])}{more}, which would be random numbers; the "
            "checkpoint is not whole, or of another model: download or save it anew"
        )
