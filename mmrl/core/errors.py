"""Errors that a user can fix. The command line prints them without a traceback and exits with ``exit_code``."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence

MAX_TEXT = 2000
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P_^X].*?(?:\x07|\x1b\\|$)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
    re.DOTALL,
)
"""What a terminal obeys in place of showing it: colours, titles, the cursor, single control characters, the direction
of writing. Not the end of a line and the tab."""


def plain(text: str, most: int = MAX_TEXT) -> str:
    """``text`` of others, as it may be printed and stored: without terminal escapes, ``most`` characters long."""
    shown = _ESCAPES.sub("", text[: 16 * most])
    return shown if len(shown) <= most else f"{shown[: most - 30]} ... ({len(text):,} characters)"


def one_line(text: str) -> str:
    """``text`` so that it stays inside a comment of one line, whatever line breaks it holds."""
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]", lambda found: json.dumps(found[0])[1:-1], text)


def first_of(names: Sequence[object], most: int) -> str:
    """The first names of a list that may be long."""
    return ", ".join(map(str, names[:most])) + ", ..." * (len(names) > most)


def did_you_mean(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """``; did you mean 'x'?`` or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


class UserError(Exception):
    """Something in the user's hands is wrong; the message says what failed, why, and the edit that mends it."""

    exit_code = 2


def refuse(problems: Iterable[str], head: str = "") -> None:
    """Raise ``UserError`` with a line for each of ``problems``, below ``head``; do nothing where there are none."""
    found = list(problems)
    if found:
        raise UserError("\n".join([head, *found] if head else found))


class UnscoredError(UserError):
    """Too many samples of a step have no score, for longer than the recipe waits; the run resumes as it is.

    ``everywhere``: all controllers raise it after the same step.
    """

    exit_code = 3

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class StoppedError(UnscoredError):
    """A stop was asked for while a step waited for its rewards; the run resumes as it is."""


class LostServerError(UserError):
    """A server of ours ended, or stands still and was ended: whoever asked it may start another and ask again."""


class LostProcessError(UserError):
    """A process of a run has ended or stands still; the run goes on from its last checkpoint if it is started again."""

    exit_code = 4


class BadPromptError(UserError):
    """One prompt cannot be used (broken media, say). In training another takes its place and it is named."""

    def __init__(self, prompt: str, reason: str) -> None:
        super().__init__(f"the prompt {prompt}: {reason}")
        self.prompt, self.reason = prompt, reason


class NotFiniteError(UserError):
    """Training met numbers that are not finite (nan or infinity). The message says which, and where they first were."""
