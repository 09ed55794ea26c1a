"""Is the final answer of a response right? For any text task whose prompts carry the truth in ``meta["answer"]``.

    - name: answer:number          # the last number; or answer:exact, answer:boxed
      options: {after: "answer:", pattern: '(.+\\n\\n)+answer: \\d+', pattern_weight: 0.1}

The truth may be a list: any of its entries is right. Every reward here returns the parts ``correct`` (0 or 1), with a
``pattern`` also ``format`` (1 where the whole response, without white space around it, matches that regular
expression), and ``score``: ``pattern_weight * format`` plus the rest times ``correct``.

A response cut at the length limit is not right, for its answer may be cut too. A prompt without a truth cannot be
judged, and its samples fail. Responses are data: they are compared as text and numbers, and never evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mmrl
from mmrl.errors import UserError
from mmrl.rewards.contract import Context, Failed, Value
from mmrl.trajectory import Sample

_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?(?:\s?/\s?[1-9][0-9]*)?(?:\s?\\?%)?"
    r"|[-+]?\.[0-9]+"
)
_LONGEST = 400
"""Characters of a number that is read as one: beyond it, arithmetic on what a model wrote could take for ever."""
_FRACTION = re.compile(r"\\frac\{?([0-9]+)\}?\{?([0-9]+)\}?")
_LATEX = re.compile(r"\\(?:text|mathrm|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\s+|\$")

Rows = dict[str, Sequence[Value]]


@mmrl.reward(inputs=("text",))
class Exact:
    """The answer is the truth, word for word: the whole response, or what follows the last ``after`` in it.

    White space is one space; Unicode is normalised (NFKC); quotes and full stops around the answer do not count, nor
    does case unless ``ignore_case`` is false.
    """

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        ignore_case: bool = True,
    ) -> None:
        self._verifier = _Verifier(after, key, pattern, pattern_weight)
        self._ignore_case = ignore_case

    def score(self, samples: Sequence[Sample], *, context: Context) -> Rows:
        """``correct``, ``format`` where there is a pattern, and ``score``: one number per sample, in [0, 1]."""
        return self._verifier.rows(samples, self._right)

    def _right(self, response: str, truth: str) -> bool:
        return plain(response, self._ignore_case) == plain(truth, self._ignore_case)


@mmrl.reward(inputs=("text",))
class Number:
    """The last number of the response (of what follows the last ``after``) equals the truth.

    ``1,234``, ``-2``, ``.5``, ``6e3``, ``3/4`` and ``12%`` are numbers. Equal means exactly, as fractions; or with
    ``tolerance`` set, within that relative distance of the truth.
    """

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        tolerance: float = 0.0,
    ) -> None:
        if not 0 <= tolerance < 1:
            raise UserError(f"options.tolerance is {tolerance}; give a relative distance from 0 up to 1, as 0.001")
        self._verifier = _Verifier(after, key, pattern, pattern_weight)
        self._tolerance = Fraction(tolerance)

    def score(self, samples: Sequence[Sample], *, context: Context) -> Rows:
        """``correct``, ``format`` where there is a pattern, and ``score``: one number per sample, in [0, 1]."""
        return self._verifier.rows(samples, self._right)

    def _right(self, response: str, truth: str) -> bool:
        wanted = last_number(truth)
        if wanted is None:
            raise ValueError(f"the truth {truth[:40]!r} has no number")
        found = last_number(response)
        return found is not None and abs(found - wanted) <= self._tolerance * abs(wanted)


@mmrl.reward(inputs=("text",))
class Boxed:
    r"""The last ``\boxed{...}`` of the response holds the truth, as mathematics: as text without LaTeX's spacing and
    text commands, or as a number where both are one (``\frac{1}{2}``, ``0.5`` and ``1/2`` are equal). No algebra."""

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
    ) -> None:
        self._verifier = _Verifier(after, key, pattern, pattern_weight)

    def score(self, samples: Sequence[Sample], *, context: Context) -> Rows:
        """``correct``, ``format`` where there is a pattern, and ``score``: one number per sample, in [0, 1]."""
        return self._verifier.rows(samples, self._right)

    def _right(self, response: str, truth: str) -> bool:
        found = last_boxed(response)
        if found is None:
            return False
        wanted = last_boxed(truth)
        found, wanted = _without_latex(found), _without_latex(truth if wanted is None else wanted)
        if found == wanted:
            return True
        numbers = whole_number(found), whole_number(wanted)
        return numbers[0] is not None and numbers[0] == numbers[1]


exact = Exact
number = Number
boxed = Boxed
score = Exact


class _Verifier:
    """What the rewards of this module share: where the answer stands, what the truth is, and the form."""

    def __init__(self, after: str | None, key: str, pattern: str | None, pattern_weight: float) -> None:
        if not 0 <= pattern_weight <= 1:
            raise UserError(f"options.pattern_weight is {pattern_weight}; it is a share, from 0 to 1")
        if pattern_weight and pattern is None:
            raise UserError("options.pattern_weight needs options.pattern, the form it rewards; add it, or remove both")
        if after == "":
            raise UserError("options.after is empty; name the words before the answer ('answer:'), or leave it out")
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise UserError(f"options.pattern is no regular expression: {error}; correct it") from error
        self._after, self._key, self._weight = after, key, pattern_weight

    def rows(self, samples: Sequence[Sample], right: Callable[[str, str], bool]) -> Rows:
        correct = [self._correct(sample, right) for sample in samples]
        if self._pattern is None:
            return {"score": correct, "correct": correct}
        form = [float(self._pattern.fullmatch((s.text or "").strip()) is not None) for s in samples]
        total = [
            c if not isinstance(c, float) else self._weight * f + (1 - self._weight) * c
            for c, f in zip(correct, form, strict=True)
        ]
        return {"score": total, "correct": correct, "format": form}

    def _correct(self, sample: Sample, right: Callable[[str, str], bool]) -> float | Failed:
        if sample.text is None:
            return Failed("the sample has no text; this reward judges language models")
        truths = _truths(sample.prompt.meta.get(self._key))
        if not truths:
            return Failed(f"prompt {sample.prompt.id!r} has no truth under meta[{self._key!r}]")
        response = self._answer(sample.text)
        if sample.truncated or response is None:
            return 0.0
        try:
            return float(any(right(response, truth) for truth in truths))
        except ValueError as error:
            return Failed(f"prompt {sample.prompt.id!r}: {error}")

    def _answer(self, text: str) -> str | None:
        if self._after is None:
            return text
        _, marker, answer = text.rpartition(self._after)
        return answer if marker else None


def plain(text: str, ignore_case: bool = True) -> str:
    """``text`` normalised (NFKC), with single spaces, without quotes and full stops around it; casefolded if asked."""
    text = " ".join(unicodedata.normalize("NFKC", text).split()).strip(" \"'`.")
    return text.casefold() if ignore_case else text


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, None where there is none (or one too long to be meant as such)."""
    found = None
    for match in _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        found = match
    if found is None:
        return None
    written = found[0]
    before = found.string[: found.start()][-1:]
    if written[0] in "-+" and (before.isalnum() or before in (")", "]")):
        written = written[1:]  # the sign in "50-8" is an operation
    return whole_number(written)


def whole_number(text: str) -> Fraction | None:
    """The number that ``text`` is, all of it; None where it is none."""
    text = text.replace("\N{MINUS SIGN}", "-").strip()
    if len(text) > _LONGEST or not _NUMBER.fullmatch(text):
        return None
    percent = text.endswith("%")
    top, _, bottom = text.rstrip("%").rstrip("\\").replace(",", "").replace(" ", "").partition("/")
    value = Fraction(top) / (int(bottom) if bottom else 1)
    return value / 100 if percent else value


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` of ``text`` holds, braces balanced; None where none is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 7 : place]
    return None


def _without_latex(text: str) -> str:
    text = _LATEX.sub(r"\1", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _NOISE.sub("", _FRACTION.sub(r"\1/\2", text)).rstrip(".")


def _truths(truth: Any) -> list[str]:
    return [str(t) for t in (truth if isinstance(truth, list | tuple) else [truth]) if t is not None and str(t).strip()]
