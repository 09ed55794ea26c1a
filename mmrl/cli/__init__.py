"""The command line, a module per group of commands.

Commands import what they run when they run it, so that ``--help`` answers at once and no mistake in a recipe waits for
torch. What a user can mend (``UserError``) is printed without a traceback and exits with 2, a run that waited in vain
for its rewards with 3; docs/design.md has all exit codes.
"""

from __future__ import annotations

import errno
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

import typer

from mmrl import studies
from mmrl.cli import (
    check,
    compare,
    data,
    fetch,
    init,
    judge,
    launch,
    recipes,
    rewards,
    runs,
    sample,
    simulate,
)
from mmrl.cli.grouped import Grouped
from mmrl.core.errors import UserError
from mmrl.core.installing import DISTRIBUTION, version_of
from mmrl.core.quiet import be_quiet, warn_plainly
from mmrl.core.secrets import hidden
from mmrl.rewards.last_words import end_without_threads

app = typer.Typer(
    name="mmrl",
    cls=Grouped,
    help="Reinforcement learning from feedback on text, vision-language and diffusion models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_NAMES: Mapping[object, str] = {runs.evaluate: "eval", runs.continue_: "continue"}
"""Commands whose functions cannot have their names."""


def _add(*commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(_NAMES.get(command))(command)


_add(
    runs.train,
    runs.continue_,
    runs.plan,
    launch.launch,
    simulate.simulate,
    rewards.score,
    runs.evaluate,
    sample.sample,
    runs.report,
    compare.compare,
    runs.export,
    runs.verify,
    check.check,
    rewards.serve,
    judge.judge,
)
for _study in pkgutil.iter_modules(studies.__path__, f"{studies.__name__}."):
    if _study.ispkg and find_spec(f"{_study.name}.commands") is not None:
        import_module(f"{_study.name}.commands").register(app)
_add(
    recipes.ls,
    recipes.cp,
    init.init,
    fetch.fetch,
)
app.add_typer(data.app)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"mmrl {version_of(DISTRIBUTION) or '(not installed, imported from a folder)'}")
        raise typer.Exit


@app.command()
def doctor(
    *,
    calibrate: bool = typer.Option(
        False, "--calibrate", help="Measure this machine's device, for the times of mmrl plan: half a minute."
    ),
) -> None:
    """Examine this machine, to paste into an issue; uses no network."""
    if calibrate:
        from mmrl.planner.calibration_file import calibrated

        print(calibrated())
        return
    from mmrl.planner.doctor import examine

    examination = examine()
    print(examination)
    if examination.problems:
        raise typer.Exit(1)


_WRITING = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG, errno.EIO, errno.ELOOP, errno.ESTALE),
    *(errno.EISDIR, errno.ENOTDIR, errno.EMFILE, errno.ENFILE),
)
"""What the place of a file is the reason of."""


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Onto the stderr of the moment, which a progress bar may have wrapped."""
        print(f"{record.levelname.lower()}: {hidden(record.getMessage())}", file=sys.stderr)


def show_log(level: str) -> None:
    """Print the log messages of ``mmrl``'s modules from ``level`` on; the root logger is not changed.

    Raises ``UserError`` for a level that is none.
    """
    log = logging.getLogger("mmrl")
    try:
        log.setLevel(level.upper())
    except ValueError:
        raise UserError(f"MMRL_LOG={level} is no level; write debug, info, warning or error") from None
    if not any(isinstance(handler, _Stderr) for handler in log.handlers):
        log.addHandler(_Stderr())


def command() -> None:
    """Entry point of ``mmrl`` and ``python -m mmrl``: ends this process, whatever threads rewards left in it."""
    try:
        main()
    finally:
        end_without_threads(sys.exc_info()[1])


def main() -> None:
    """Run the command that ``sys.argv`` says, in this process, which goes on after it."""
    be_quiet()
    warn_plainly()
    try:
        show_log(os.environ.get("MMRL_LOG", "warning"))
        app(prog_name="mmrl")
    except UserError as error:
        print(f"error: {hidden(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if (why := of_system(error)) is None:
            raise
        print(f"error: {hidden(why)}", file=sys.stderr)
        sys.exit(2)


def of_system(error: OSError) -> str | None:
    """What to tell of an error that the file system or its limits made; None for another, which is ours."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'the disk'} is full; free space there, then --resume"
    if error.errno in _WRITING:
        place = f"{error.filename!r}" if error.filename else "a file"
        return f"cannot read or write {place}: {error.strerror}; make it writable, or name another place (--out)"
    return None
