"""Read a judge's answer: a number, JSON, or the log-prob of one word against another.

A verdict that cannot be read is ``UnreadableError``, with what is wrong in words that follow "the judge's answer".

A number is what the answer ends in, in the forms in which models write one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json as JsonValue
from mmrl.core.json_types import JsonObject
from mmrl.rewards.judging.asking import Outcome
from mmrl.rewards.judging.criteria import Criteria, parse_criteria
from mmrl.rewards.judging.json_answer import (
    UnreadableError,
    begins_as_object,
    check_schema,
    json_in,
    mismatch,
    whole_numbers,
    without_thoughts,
)

READING = 3
"""The version of the rules by which answers are read here. It rises with every change of them, so that a verdict that
was cached under others is asked for again."""
FLOOR = 0.05
"""What yes and no must have of the probability together: below it the answer begins with something else."""
_PREFERENCE = {"a": 1.0, "b": 0.0, "tie": 0.5}
Key = TypeVar("Key")
LABELS = ("score", "rating", "grade", "mark", "points", "verdict", "answer")
"""What a number may be called where the recipe names no label."""
_NUMBER = r"[-+]?\d+(?:[.,]\d+)?"
_RATIO = rf"{_NUMBER}(?:\s*(?:/|out of)\s*{_NUMBER}|\s*%)?"
_DIGITS = re.compile(rf"{_NUMBER}|%")
_UNIT = r"(?:\s*(?:points?|pts|stars?|\u5206|\u70b9|\uc810))?"
_PAIRS = ("[[ ]]", "[ ]", "( )", "< >", "$ $", "$$ $$", r"\( \)", r"\[ \]", "\u3010 \u3011")
"""What a number may stand in. Quotation marks are not among them: what is quoted is not the judge's."""
_SCALE = rf"(?:\s*(?:\(\s*(?:{_NUMBER}\s*(?:-|\u2013|to)|out of|/)|/)\s*({_NUMBER})\s*\)?)?"
_JOINS = r"\s*(?:=>|->|[:=\u2014\u2192])\s*|\s+[-\u2013]\s+"
_IN_TAGS = re.compile(r"^[ \t]*<(\w+)>([^<>]*)</\1>[ \t]*$", re.MULTILINE)
_ROW = re.compile(r"\|([^|]*)\|([^|]*)\|")
_ITEM = re.compile(r"\A(?:[-+\u2022]|\d+[.)])\s+(?=[^\W\d_])")
_RULE = re.compile(r"[-=\s]{3,}")
_MARKUP = re.compile(r"(?<![^\W_])[*_`]+|[*_`]+(?![^\W_])|^[ \t]*#+")
_COLONS = dict.fromkeys([0xFE55, 0x2236, 0xA789], ord(":"))
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20, 0x2212: ord("-")} | _COLONS
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF]
)


@dataclass(frozen=True)
class Words:
    """The log-prob of ``yes`` against ``no`` as the answer's first token: P(yes) / (P(yes) + P(no)), in [0, 1].

    Nothing is sampled. Tokens are compared without case and surrounding space, so " Yes" counts for "yes". Where the
    two words have less than ``floor`` of the probability, the model begins with something else: no verdict.
    """

    yes: str = "yes"
    no: str = "no"
    floor: float = FLOOR

    def tokens(self, texts: Iterable[tuple[Key, str]]) -> tuple[list[Key], list[Key]]:
        """The tokens of ``(key, text)`` that stand for yes, and those for no.

        A token stands for a word it equals. Where no token equals either word (a vocabulary of characters), those that
        begin a word stand for it, unless they begin both.
        """
        plain = [(key, text.strip().casefold()) for key, text in texts]
        words = (self.yes.casefold(), self.no.casefold())
        yes, no = ([key for key, text in plain if text == word] for word in words)
        if yes or no:
            return yes, no
        begun = [(key, [word.startswith(text) for word in words]) for key, text in plain if text]
        return [key for key, of in begun if of == [True, False]], [key for key, of in begun if of == [False, True]]

    def verdict(self, yes: Iterable[float], no: Iterable[float]) -> float:
        """From the log-probs of the tokens that stand for yes and for no. Raises ``UnreadableError``."""
        of_yes, of_no = _log_sum(yes), _log_sum(no)
        if of_yes == of_no == -math.inf:
            raise UnreadableError(f"begins with neither {self.yes!r} nor {self.no!r} among its likeliest tokens")
        mass = math.exp(min(0.0, _log_sum([of_yes, of_no])))
        if mass < self.floor:
            raise UnreadableError(
                f"begins with {self.yes!r} or {self.no!r} with a probability of only {mass:.2g}, below {self.floor:g} "
                "(options.answer.floor); if the model thinks first, switch that off, else let the rubric ask for a word"
            )
        if of_no == -math.inf or of_yes == -math.inf:
            return float(of_no == -math.inf)
        difference = of_no - of_yes
        return 1 / (1 + math.exp(difference)) if difference < 700 else 0.0


@dataclass(frozen=True)
class Number:
    """A number from ``min`` to ``max``, brought to [0, 1]: on the last line, alone or as in ``Score: 7/10``; or the
    field of a JSON object that is the whole answer.

    ``labels``: the names that the number may have. Lines of other names below it (``Confidence: 3``) are passed over.
    """

    min: float
    max: float
    labels: tuple[str, ...] = LABELS

    def read(self, text: str, items: int = 0) -> float:
        """Raises ``UnreadableError``."""
        text = plain(text)
        if begins_as_object(text):
            return scaled(self._field(json_in(text)), self.min, self.max)
        value, of = number_in(without_thoughts(text), self.labels)
        if of is not None and of != self.max:
            raise UnreadableError(f"is out of {of:g}, not out of {self.max:g}")
        return scaled(value, self.min, self.max)

    def _field(self, found: JsonObject) -> float:
        named = [value for name, value in found.items() if name.strip().casefold() in self.labels]
        if len(named) != 1 or isinstance(named[0], bool) or not isinstance(named[0], int | float):
            raise UnreadableError(f"is an object without one number called {' or '.join(self.labels)}")
        return named[0]


@dataclass(frozen=True)
class Json:
    """A JSON object that follows ``schema``; its field ``score`` is the verdict.

    A number is brought to [0, 1] by the field's ``minimum`` and ``maximum``; true and false are 1 and 0. In pairwise
    mode the field may say ``A``, ``B`` or ``tie``.
    """

    schema: JsonObject
    score: str = "score"

    def read(self, text: str, items: int = 0) -> float:
        """Raises ``UnreadableError``."""
        value = checked(text, self.schema)[self.score]
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            preference = _PREFERENCE.get(value.strip().casefold())
            if preference is None:
                raise UnreadableError(f"prefers {value!r}, which is not A, B or tie")
            return preference
        if not isinstance(value, int | float):
            raise UnreadableError(f"does not follow the schema ({self.score} is no number)")
        return scaled(float(value), *_bounds(_field(self.schema, self.score), f"the schema's {self.score}"))


@dataclass(frozen=True)
class Ranking:
    """``{"ranking": [2, 1, 3]}``: the numbers of all candidates, best first."""

    def read(self, text: str, items: int = 0) -> list[int]:
        """Raises ``UnreadableError``."""
        ranking = _numbers(checked(text, {"required": ["ranking"]})["ranking"], "ranking")
        if sorted(ranking) != list(range(1, items + 1)):
            raise UnreadableError(f"does not rank each of the {items} candidates once")
        return ranking


@dataclass(frozen=True)
class WrongSteps:
    """``{"wrong": [2, 3]}``: the numbers of the steps that are wrong; none, where all are right."""

    def read(self, text: str, items: int = 0) -> list[int]:
        """Raises ``UnreadableError``."""
        wrong = sorted(set(_numbers(checked(text, {"required": ["wrong"]})["wrong"], "wrong")))
        if wrong and not (wrong[0] >= 1 and wrong[-1] <= items):
            raise UnreadableError(f"names a step that is not among the {items}")
        return wrong


@dataclass(frozen=True)
class ByCriterion:
    """An object with a field for each of the ``criteria``."""

    criteria: Criteria

    def read(self, text: str, items: int = 0) -> dict[str, float | str]:
        """Raises ``UnreadableError``."""
        return self.criteria.read(plain(text))


Kind: TypeAlias = Words | Number | Json | Ranking | WrongSteps | ByCriterion


def parse_kind(mode: str, answer: JsonObject | None) -> Kind:
    """The kind of answer a recipe's ``options.answer`` asks for. Raises ``UserError``."""
    if mode in ("ranking", "steps"):
        if answer is not None:
            raise UserError(f"options.answer: mode {mode} has an answer of its own; remove the key")
        return Ranking() if mode == "ranking" else WrongSteps()
    given = dict(answer or {"type": "yes_no"})
    kind = given.pop("type", None)
    keys = {"yes_no": ("yes", "no", "floor"), "number": ("min", "max", "label"), "json": ("schema", "score")}
    known = (keys | {"criteria": ("criteria",)}).get(str(kind))
    if known is None:
        raise UserError(f"options.answer.type: {kind!r}; write yes_no, number, json or criteria")
    extra = set(given) - set(known)
    if extra:
        raise UserError(f"options.answer.{sorted(extra)[0]}: {kind} has no such key; it has {', '.join(known)}")
    if kind == "yes_no":
        words = ("A", "B") if mode == "pairwise" else ("yes", "no")
        yes, no = (_word(given.get(name, word), name) for name, word in zip(("yes", "no"), words, strict=True))
        if yes.casefold() == no.casefold():
            raise UserError(f"options.answer: yes and no are both {yes!r}; choose two words")
        return Words(yes, no, _floor(given.get("floor", FLOOR)))
    if kind == "number":
        low, high = (_bound(given.get(name), f"options.answer.{name}") for name in ("min", "max"))
        if not low < high:
            raise UserError(f"options.answer: min is {low:g} and max {high:g}; max must be the greater")
        return Number(low, high, _labels(given.get("label")))
    if kind == "criteria":
        if mode != "pointwise":
            raise UserError("options.answer.type: criteria are of one sample; set options.mode to pointwise")
        return ByCriterion(parse_criteria(given.get("criteria")))
    return _json(mode, given)


def checked(text: str, schema: JsonObject) -> JsonObject:
    """The JSON object in an answer, checked against ``schema``. Raises ``UnreadableError``."""
    value = json_in(text)
    why = mismatch(value, schema)
    if why is not None:
        raise UnreadableError(f"does not follow the schema ({why})")
    return value


def scaled(value: float, low: float, high: float) -> float:
    """``value`` brought from [low, high] to [0, 1]. Raises ``UnreadableError`` outside."""
    if not low <= value <= high:
        raise UnreadableError(f"is {value:g}, outside {low:g} to {high:g}")
    return (value - low) / (high - low)


def read(kind: Kind, text: str, items: int, begun: str = "", cut: str = "") -> Outcome:
    """The outcome of one written answer; ``reason`` says what is wrong with it.

    ``begun``: what the chat template had written of the answer, a thought perhaps. ``cut``: where an answer was cut,
    which leaves no verdict, as in ``at max_tokens 256``; empty where it ended by itself.
    """
    assert not isinstance(kind, Words)
    why = "was not finished"
    try:
        verdict = kind.read(begun + text, items)
        if not cut:
            return Outcome(verdict, [text])
    except UnreadableError as error:
        why = str(error)
    return Outcome(raw=[text], reason=f"{why}, cut {cut}" if cut else why)


def schema_of(kind: Kind, items: int) -> JsonObject | None:
    """The JSON Schema of an answer, for an endpoint that writes by one; None where the answer is no object."""
    match kind:
        case Json(schema):
            return {"type": "object", **schema}
        case Ranking():
            return _list_schema("ranking", items, items)
        case WrongSteps():
            return _list_schema("wrong", items, 0)
        case ByCriterion(criteria):
            return criteria.schema
        case _:
            return None


def _list_schema(name: str, items: int, least: int) -> JsonObject:
    numbers: JsonObject = {"type": "integer", "minimum": 1, "maximum": items}
    field: JsonObject = {"type": "array", "items": numbers, "minItems": least, "maxItems": items}
    return {"type": "object", "properties": {name: field}, "required": [name], "additionalProperties": False}


def _word(word: JsonValue, name: str) -> str:
    if not isinstance(word, str) or not word.strip() or word.strip() != word:
        raise UserError(f"options.answer.{name}: {word!r} is no word; quote it and leave out spaces")
    return word


def _floor(value: JsonValue) -> float:
    floor = _bound(value, "options.answer.floor")
    if not 0 <= floor <= 1:
        raise UserError(f"options.answer.floor: {value!r}; write a probability, 0 to 1")
    return floor


def _labels(given: JsonValue) -> tuple[str, ...]:
    """The labels of a number, in lower case; the default ones where the recipe names none."""
    if given is None:
        return LABELS
    labels = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    found = tuple(" ".join(plain(label).casefold().split()) for label in labels if isinstance(label, str))
    if not found or len(found) != len(labels) or not all(label[:1].isalpha() for label in found):
        raise UserError(f"options.answer.label: {given!r}; write the word before the number, as in label: quality")
    return found


def _json(mode: str, given: dict[str, JsonValue]) -> Json:
    where = "options.answer.schema"
    schema, score = check_schema(given.get("schema"), where), str(given.get("score", "score"))
    field, required = _field(schema, score), schema.get("required")
    if not field or not isinstance(required, Sequence) or score not in required:
        raise UserError(f"{where}: the field {score!r} (options.answer.score) must stand in properties and in required")
    kind = field.get("type")
    if (mode == "pairwise" and kind == "string") or kind == "boolean":
        return Json(schema, score)
    if kind not in ("number", "integer") or not {"minimum", "maximum"} <= set(field):
        allowed = "a number with minimum and maximum, or a boolean" + (", or a string" if mode == "pairwise" else "")
        raise UserError(f"{where}.properties.{score}: must be {allowed}, so that it becomes a score from 0 to 1")
    low, high = _bounds(field, f"{where}.properties.{score}")
    if not low < high:
        raise UserError(f"{where}.properties.{score}: maximum must be greater than minimum")
    return Json(schema, score)


def _field(schema: JsonObject, name: str) -> JsonObject:
    """The schema of the field ``name``; empty where there is none."""
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _bounds(field: JsonObject, where: str) -> tuple[float, float]:
    low, high = (_bound(field.get(name), f"{where}.{name}") for name in ("minimum", "maximum"))
    return low, high


def _bound(value: JsonValue, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {value!r}; write a number")
    return float(value)


def _numbers(value: JsonValue, name: str) -> list[int]:
    numbers = whole_numbers(value)
    if numbers is None:
        raise UnreadableError(f"does not follow the schema ({name} is no list of numbers)")
    return numbers


def _log_sum(values: Iterable[float]) -> float:
    found = [value for value in values if value > -math.inf]
    if not found:
        return -math.inf
    top = max(found)
    return top + math.log(math.fsum(math.exp(value - top) for value in found))


def plain(text: str) -> str:
    """``text`` with full-width characters as ASCII and without invisible ones and outer space."""
    return text.translate(_WIDE).translate(_INVISIBLE).strip()


def number_in(text: str, labels: tuple[str, ...]) -> tuple[float, float | None]:
    """The number of the last line and what it is out of (``7/10``), if said. Raises ``UnreadableError``."""
    verdict, label, other = _forms(labels)
    text = _IN_TAGS.sub(_untagged, text)
    passed = ""
    for line in filter(None, map(_undecorated, reversed(text.splitlines()))):
        named = label.match(line)
        if not named and other.fullmatch(line):
            passed = passed or line
            continue
        if not verdict.fullmatch(line):
            break
        number, *of = _DIGITS.findall(line[named.end() if named else 0 :])
        if "," in number and not named and not of:  # 7,5 may be two numbers
            break
        outs = {_value(one) for one in [*of, *filter(None, named.groups() if named else ())]}
        if len(outs) > 1:
            raise UnreadableError(f"is out of {' and of '.join(f'{out:g}' for out in sorted(outs))}")
        return _value(number), outs.pop() if outs else None
    if passed:
        name = re.split("[:=]", passed)[0].strip()[:40]
        raise UnreadableError(
            f"is no number (its last line is {name!r}; if that is the verdict, name it in options.answer.label)"
        )
    raise UnreadableError("is no number")


def _untagged(found: re.Match[str]) -> str:
    """``<score>7</score>`` as ``score: 7``."""
    value = found[2].strip()
    return found[0] if "\n" in value else f"{found[1]}: {value}".replace("_", " ")


def _undecorated(line: str) -> str:
    """A line in lower case without markup: a row of two cells as a name and a value; empty for a rule."""
    if _RULE.fullmatch(line):
        return ""
    line = _MARKUP.sub("", line).strip().casefold()
    row = _ROW.fullmatch(line)
    return _ITEM.sub("", f"{row[1].strip()}: {row[2].strip()}" if row else line, count=1)


def _value(digits: str) -> float:
    return 100.0 if digits == "%" else float(digits.replace(",", "."))


@lru_cache(64)
def _forms(labels: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """A line that is a verdict, how one with a label begins, and a line with any label."""
    before = r"(?:(?:so|thus|therefore|hence),?\s+)?(?:(?:the|my|final|overall|total) )*"
    names = ("|".join(re.escape(label) for label in of) for of in (labels, [n for n in labels if n != "answer"]))
    both = zip(names, (_JOINS, r"\s+is:?\s+"), strict=True)
    joined = [rf"(?:{of}){_SCALE}(?:{join})" for of, join in both if of]
    label = rf"{before}(?:{'|'.join(joined)})"
    value = rf"(?:{_RATIO}{_UNIT}|\\boxed\s*\{{\s*{_RATIO}\s*\}})"
    marked = [rf"{open_}\s*{value}\s*{close}" for open_, close in (re.escape(p).split(r"\ ") for p in _PAIRS)]
    verdict = rf"(?:{label})?(?:{'|'.join([value, *marked])})\s*[.!\u3002]?"
    other = rf"[^\W\d_][\w ()-]{{0,40}}[:=]\s*(?:{_RATIO}|\w+)\.?"
    return re.compile(verdict), re.compile(label), re.compile(other)
