"""Is the final answer of a response right? For any text task whose prompts have the truth in ``meta["answer"]``.

    - name: answer:number          # the last number; or answer:exact, answer:boxed, answer:math
      options: {after: "answer:", pattern: '(.+\\n\\n)+answer: \\d+', pattern_weight: 0.1}

The answer is in the response, where it has an ``<answer>`` in the last one, up to its ``</answer>``; GLM's
``<|begin_of_box|>`` and ``<|end_of_box|>`` are the same. A thought before ``</think>`` counts for nothing. ``after``
and ``before`` name other marks: the answer follows the last ``after`` and ends at the next ``before``. The truth may
be a list: any of its entries is right.

Every reward here returns the parts ``correct`` (0 or 1), with a ``pattern`` also ``format`` (1 where the whole
response, without white space around it, matches that regular expression; a ``<think>`` that the chat template wrote is
part of it), and ``score``: ``pattern_weight * format`` plus the rest times ``correct``.

A response cut at the length limit is not right, for its answer may be cut too. A prompt without a truth cannot be
judged, and its samples fail. Responses are data: they are compared as text and numbers, and never evaluated.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed, Value
from mmrl.core.trajectory import Sample
from mmrl.rewards.answers import boxed as last_boxed
from mmrl.rewards.answers import comparable, same, squeezed, stated
from mmrl.rewards.judging.json_answer import without_thoughts
from mmrl.rewards.mathverify import MathVerify
from mmrl.rewards.numerals import BOX, Quantity, last_quantity, unfinished
from mmrl.rewards.spelling import spelled

_ANSWER = re.compile(r"<answer>|<\|begin_of_box\|>", re.IGNORECASE)
_ANSWER_ENDS = re.compile(r"</answer>|<\|end_of_box\|>", re.IGNORECASE)
_FRAME = re.compile(r"\\(?:boxed\s+|f(?:rame)?box\s*)\{")
_TAG = re.compile(r"<([A-Za-z][\w-]*)>\s*\Z")


class _Verifier(ABC):
    """What the rewards of this module share: where the answer stands, what the truth is, and the form."""

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        before: str | None = None,
    ) -> None:
        if not 0 <= pattern_weight <= 1:
            raise UserError(f"options.pattern_weight is {pattern_weight}; it is a share, from 0 to 1")
        if pattern_weight and pattern is None:
            raise UserError("options.pattern_weight needs options.pattern, the form it rewards; add it, or remove both")
        for name, mark, words in (("after", after, "before the answer ('answer:')"), ("before", before, "behind it")):
            if mark == "":
                raise UserError(f"options.{name} is empty; name the words {words}, or leave it out")
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise UserError(f"options.pattern is no regular expression: {error}; correct it") from error
        self._after, self._key, self._weight = after, key, pattern_weight
        self._before = _closing_tag(after) if before is None and after is not None else before

    @abstractmethod
    def _right(self, response: str, truth: str) -> bool:
        """Whether ``response``, where the answer stands, gives ``truth``. Raises ``ValueError`` for no truth."""

    @abstractmethod
    def _said(self, response: str) -> str | None:
        """What ``response`` says, as it is compared."""

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        """``correct``, ``format`` where there is a pattern, and ``score``: one number per sample, in [0, 1]."""
        correct = [self._correct(sample) for sample in samples]
        if self._pattern is None:
            return {"score": correct, "correct": correct}
        form = [float(self._pattern.fullmatch((s.begun + (s.text or "")).strip()) is not None) for s in samples]
        total = [
            c if not isinstance(c, float) else self._weight * f + (1 - self._weight) * c
            for c, f in zip(correct, form, strict=True)
        ]
        return {"score": total, "correct": correct, "format": form}

    def _correct(self, sample: Sample) -> float | Failed:
        if sample.text is None:
            return Failed("the sample has no text; this reward judges language models")
        truths = _truths(sample.prompt.meta.get(self._key))
        if not truths:
            return Failed(f"prompt {sample.prompt.id!r} has no truth under meta[{self._key!r}]")
        response = self._answer(sample.text)
        if sample.truncated or response is None:
            return 0.0
        try:
            return float(any(self._right(response, truth) for truth in truths))
        except ValueError as error:
            return Failed(f"prompt {sample.prompt.id!r}: {error}")

    def answer_of(self, sample: Sample) -> str | None:
        """What the response says, as it is compared: equal answers vote together. None where it is cut or has none."""
        response = None if sample.text is None or sample.truncated else self._answer(sample.text)
        return (self._said(response) or None) if response is not None else None

    def _answer(self, text: str) -> str | None:
        """Where the answer stands in ``text``; None where the mark before it is not there, or a thought never ends."""
        text = _FRAME.sub(lambda _: BOX, text)
        if self._after is None and self._before is None:
            return _outside_thoughts(text)
        mark, answer = True, text
        if self._after is not None:
            _, mark, answer = text.rpartition(self._after)
        if self._before is not None:
            answer = answer.partition(self._before)[0]
        if self._before is not None and _closing_tag(self._after or "") == self._before:
            answer = _Tagged(answer)
        return answer if mark else None


@mmrl.reward(inputs=("text",), checks=True)
class Exact(_Verifier):
    """The answer is the truth, word for word: the whole response, or what follows the last ``after`` in it.

    White space is one space; Unicode is normalised (NFKC), and there is one apostrophe, quotation mark and dash. Quotes
    and full stops around the answer do not count, nor does case unless ``ignore_case`` is false.
    """

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        before: str | None = None,
        *,
        ignore_case: bool = True,
    ) -> None:
        super().__init__(after, key, pattern, pattern_weight, before)
        self._ignore_case = ignore_case

    def _said(self, response: str) -> str:
        return plain(response, ignore_case=self._ignore_case)

    def _right(self, response: str, truth: str) -> bool:
        return self._said(response) == self._said(truth)


@mmrl.reward(inputs=("text",), checks=True)
class Number(_Verifier):
    r"""The last number of the response (of what follows the last ``after``) equals the truth.

    ``1,234``, ``-2``, ``.5``, ``6e3``, ``3/4``, ``3 1/2``, ``1\frac{1}{2}``, ``6 \times 10^3`` and ``12%`` are numbers.
    One that is a part of something larger (``x^2``, ``3i``, ``1 or 2``, ``50-8``) is not the answer, and a unit that is
    not the truth's makes another answer of it. Equal means exactly, as fractions; or with ``tolerance`` set, within
    that relative distance of the truth.
    """

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        before: str | None = None,
        tolerance: float = 0.0,
    ) -> None:
        if not 0 <= tolerance < 1:
            raise UserError(f"options.tolerance is {tolerance}; give a relative distance from 0 up to 1, as 0.001")
        super().__init__(after, key, pattern, pattern_weight, before)
        self._tolerance = Fraction(tolerance)

    def _said(self, response: str) -> str | None:
        return _voted_number(response)

    def _right(self, response: str, truth: str) -> bool:
        return _same_number(response, _number(truth), self._tolerance)


@mmrl.reward(inputs=("text",), checks=True)
class Boxed(_Verifier):
    r"""The last ``\boxed{...}`` of the response holds the truth: the same text, number, or list of such. No algebra.
    ``\fbox`` is a box too.

    Numbers are read as by ``answer:number``; a name before an equals sign, LaTeX's spacing and a unit that only one of
    the two has do not count. Boxes joined by ``and``, ``or`` or a comma are one answer, a list.
    """

    def _said(self, response: str) -> str | None:
        return _voted(_in_a_box(response))

    def _right(self, response: str, truth: str) -> bool:
        found = _in_a_box(response)
        return found is not None and same(found, _held(truth))


@mmrl.reward(inputs=("text",), own_deadline=True, checks=True)
class Math(_Verifier):
    r"""The answer equals the truth as mathematics: by ``answer:boxed``'s rules, else by math-verify's algebra.

    The answer is in the last ``\boxed{...}``, else behind ``the answer is`` at the end, else the last number.
    ``deadline``: seconds of processor time for one answer, past which ``answer:boxed``'s rules decide alone. Needs
    the extra ``math``.
    """

    def __init__(
        self,
        after: str | None = None,
        key: str = "answer",
        pattern: str | None = None,
        pattern_weight: float = 0.0,
        before: str | None = None,
        deadline: float = 2.0,
    ) -> None:
        if not 0 < deadline <= 600:
            raise UserError(f"options.deadline is {deadline}; give seconds for one answer, from above 0 up to 600")
        super().__init__(after, key, pattern, pattern_weight, before)
        self._verify = MathVerify(deadline)
        self._known: dict[tuple[str, str], bool] = {}

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        """``correct``, ``format`` where there is a pattern, and ``score``: one number per sample, in [0, 1]."""
        self._known = {}  # a group often says the same
        return super().score(samples, context=context)

    def _said(self, response: str) -> str | None:
        """The answer without algebra: ``1/2`` and ``0.5`` vote together, but not ``x+1`` and ``1+x``."""
        return None if unfinished(response) else _voted(stated(response))

    def close(self) -> None:
        """End math-verify's process."""
        self._verify.close()

    def _right(self, response: str, truth: str) -> bool:
        if unfinished(response):
            return False
        found, wanted = stated(response), stated(truth)
        late = self._verify.late
        if same(found, wanted, lambda one, other: self._verify.late == late and self._equal(one, other)):
            return True
        if last_boxed(response) is None:
            number = last_quantity(wanted)
            if number is not None and _same_number(response, number):
                return True
        return self._equal(found, wanted)

    def _equal(self, found: str, wanted: str) -> bool:
        pair = comparable(found, wanted)
        if pair is None:
            return False
        if pair not in self._known:
            self._known[pair] = self._verify.same(*pair) is True
        return self._known[pair]


exact = Exact
number = Number
boxed = Boxed
math = Math
score = Exact


class _Tagged(str):
    """What stands between ``<answer>`` and ``</answer>``: an answer, even without a box."""


def _outside_thoughts(text: str) -> str | None:
    """What ``text`` says behind its last thought, or in the last ``<answer>`` there; None for a thought without end."""
    try:
        said = without_thoughts(text)
    except ValueError:
        return None
    opened = list(_ANSWER.finditer(said))
    return _Tagged(_ANSWER_ENDS.split(said[opened[-1].end() :])[0]) if opened else said


def _closing_tag(mark: str) -> str | None:
    """``</answer>`` for ``<answer>``; None for a mark that ends in no tag."""
    tag = _TAG.search(mark)
    return None if tag is None else f"</{tag[1]}>"


def _in_a_box(response: str) -> str | None:
    """What the last box holds; all of an answer that stands in tags and has no box."""
    found = last_boxed(response)
    return str(response) if found is None and isinstance(response, _Tagged) and not unfinished(response) else found


def plain(text: str, *, ignore_case: bool = True) -> str:
    """``text`` in one spelling, with single spaces, without quotes and full stops around it; casefolded if asked."""
    return " ".join(spelled(text, ignore_case=ignore_case).split()).strip(" \"'.")


def _number(truth: str) -> Quantity:
    found = last_quantity(truth)
    if found is None:
        raise ValueError(f"the truth {truth[:40]!r} has no number, or one that is a part of something larger")
    return found


def _same_number(response: str, wanted: Quantity, tolerance: Fraction = Fraction(0)) -> bool:
    found = last_quantity(response)
    if found is None or not found.agrees(wanted):
        return False
    return abs(found.value - wanted.value) <= tolerance * abs(wanted.value)


def _voted_number(text: str) -> str | None:
    found = last_quantity(text)
    return None if found is None else f"{found.value} {found.unit}".strip()


def _voted(answer: str | None) -> str | None:
    """One form of ``answer``: of a number its value, else the text without spaces that say nothing."""
    if answer is None:
        return None
    return _voted_number(answer) or squeezed(answer)


def _held(truth: str) -> str:
    r"""The answer in a truth: what its last ``\boxed`` holds, else all of it."""
    found = last_boxed(truth)
    return truth if found is None else found


def _truths(truth: Any) -> list[str]:
    """The truths of a prompt: one, or a list; of a worked solution what stands in its ``<answer>``."""
    said = [str(t) for t in (truth if isinstance(truth, list | tuple) else [truth]) if t is not None and str(t).strip()]
    said = [_FRAME.sub(lambda _: BOX, t) for t in said]
    return [_outside_thoughts(t) or t if _ANSWER.search(t) else t for t in said]
