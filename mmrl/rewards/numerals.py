r"""Parse written numbers: ``1\frac{1}{2}``, ``3 1/2``, ``6 \times 10^3``, ``12%``, ``0.(3)``, ``5 cm``.

They are read as exact fractions, and nothing is evaluated. A number that is a part of something larger (``x^2``,
``3i``, ``1 or 2``, ``50-8``) is not read: it is not what the text says.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

LONGEST = 400
"""Characters of an answer that is read: beyond it, arithmetic on what a model wrote could take for ever."""

BOX = "\\boxed{"

_BRACES = re.compile(r"\\[{}]|[{}]")
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "-"),
        **dict.fromkeys("\N{FRACTION SLASH}\N{DIVISION SLASH}\N{DIVISION SIGN}", "/"),
        **dict.fromkeys("\N{MIDDLE DOT}\N{DOT OPERATOR}", "\\cdot "),
        "\N{MULTIPLICATION SIGN}": "\\times ",
        "\N{GREEK SMALL LETTER PI}": "\\pi ",
        "\N{SQUARE ROOT}": "\\sqrt",
        "\N{INFINITY}": "\\infty ",
        "\N{LESS-THAN OR EQUAL TO}": "\\le ",
        "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
        "\N{NOT EQUAL TO}": "\\ne ",
        "\N{PLUS-MINUS SIGN}": "\\pm ",
        "\N{DEGREE SIGN}": "^\\circ ",
        "\N{UNION}": "\\cup ",
        "\N{ELEMENT OF}": "\\in ",
        "\N{ZERO WIDTH SPACE}": None,
        "\N{WORD JOINER}": None,
        "\N{ZERO WIDTH NO-BREAK SPACE}": None,
    }
)
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_LATEX = [
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|,?\s*\\!\s*|\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-z])|\\!"), ""),
    (re.compile(r"\\varnothing(?![a-z])"), r"\\emptyset"),
    (re.compile(r"\\(le|ge|ne)q(?![a-z])"), r"\\\1"),
    (re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)|\\degrees?(?![a-z])"), " degrees "),
    (re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\%|\b(?:percent(?:age)?|pct)\b"), "%"),
    (re.compile(r"(?<!\\)\\[,;: ()\[\]]|\\\$|[$~]|\\q?quad"), " "),
    (re.compile(r">=|\\ge(?:qslant)(?![a-z])"), r"\\ge "),
    (re.compile(r"<=|\\le(?:qslant)(?![a-z])"), r"\\le "),
    (re.compile(r"(?<=[\sA-Za-z0-9)])\s*!=(?!=)"), r"\\ne "),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
]
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:\x20[0-9]{3})+(?![0-9]|\s?/)|[0-9]+)"
_BELOW = r"[0-9]*[1-9][0-9]*"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+])?(?:
        (?P<whole>[0-9]+)\s*\\frac\{{(?P<a>[0-9]+)\}}\{{(?P<b>{_BELOW})\}}
      | (?P<whole2>[0-9]+)\x20+(?:and\x20+)?(?P<a2>[0-9]+)\s?/\s?(?P<b2>{_BELOW})
      | \\frac\{{\s*(?P<a3>-?\s*{_INTEGER})\s*\}}\{{\s*(?P<b3>{_BELOW})\s*\}}
      | (?P<fixed>[0-9]+\.[0-9]*)(?:\\(?:overline|bar|dot)\s*\{{(?P<again>[0-9]+)\}}|\((?P<again2>[0-9]+)\))
      | (?:(?P<by>{_INTEGER}(?:\.[0-9]+)?)\s*(?:\\times|\\cdot|[x*])\s*)?10\s?\^\s?
            (?:\{{\s*(?P<ten>[-+]?[0-9]{{1,3}})\s*\}}|(?P<ten2>[-+]?[0-9]{{1,3}}))
      | (?P<top>{_INTEGER}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)(?:\s?/\s?(?P<bottom>{_BELOW}))?
      | (?<![0-9A-Za-z.])(?P<point>\.[0-9]+)
    )(?P<percent>\s?%)?""",
    re.VERBOSE,
)
_UNITS = {
    word: line.split()[0]
    for line in """mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|ft foot feet
    yd yard|mi mile|inch inches|mg milligram|g gram|kg kilogram|lb lbs pound|oz ounce|ml mL milliliter millilitre
    l L liter litre|ms millisecond|s sec second|min minute|h hr hrs hour|day|week|month|year|N newton|J joule|kJ|W watt
    kW|V volt|A ampere|Hz hertz|Pa pascal|kelvin|C|F|mol|degree deg|rad radian|mph|dollar USD|euro EUR|cent|unit
    """.replace("\n", "|").split("|")
    if line.split()
    for word in line.split()
}
_OTHERWISE = re.compile(
    r"(?i:to|except|between|than|plus|minus|times|over|cubed|squared|root|sqrt|pi|mod|modulo|base|hundred|thousand"
    r"|million|billion|trillion|dozen|half|third|quarter|repeating|recurring|factorial|infinity|undefined)"
)
_PROSE = re.compile(r"(?i:or|and|of|per|no|not|wrong|right|isn|maybe|but)")
"""Words that are no units; with those of the first kind, the number before them is not what the text says."""
_UNIT = re.compile(r"(?:\x20*(?:(?:/|per\b)\x20*)?(?:[A-Za-z]+|\u00b0)(?:\s?\^\s?\{?[23]\}?|\b)){1,4}")
_POWER = re.compile(r"(?<=[\x20/])((?:mm|cm|m|km|ft|yd|mi|inch|inches|feet|units?)\b)\s?\^\s?(?:\{([23])\}|([23]))")

_GLUED = re.compile(r"(\.[0-9]+)(?=(?:mm|cm|m|km|ft)\s?\^)")


class Quantity(NamedTuple):
    """``value``, its ``unit`` and the ``variable`` that has it (``x = 5``); these two are empty where there is none."""

    value: Fraction
    unit: str = ""
    variable: str = ""

    def agrees(self, other: Quantity) -> bool:
        """Whether unit and variable are the same, as far as both have one."""
        return all(a == b or not a or not b for a, b in zip(self[1:], other[1:], strict=True))


def plain_symbols(text: str) -> str:
    """``text`` with one form of each sign: ASCII digits, ``-``, ``^{2}``, LaTeX's names of mathematical symbols."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = "".join(_plain_character(c) for c in text.translate(_SYMBOLS))
    return text.translate(_SYMBOLS)


def _plain_character(character: str) -> str:
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    whole = unicodedata.normalize("NFKC", character)
    return f" {whole} " if "\N{FRACTION SLASH}" in whole else whole  # a space: 3½ is no 31/2


def clean(text: str) -> str:
    r"""``plain_symbols`` without LaTeX's spacing, ``\left``, ``\text`` and dollar signs; one form of ``\frac``."""
    text = _once(plain_symbols(text))
    for pattern, new in _LATEX:
        text = pattern.sub(new, text)
    return text


def _once(text: str) -> str:
    r"""``text`` with one backslash where data that were escaped twice have two, before every command: ``\\\\frac``."""
    runs = re.findall(r"\\+", text)
    doubled = all(len(run) % 2 == 0 for run in runs) and re.search(r"\\[A-Za-z]{2}", text)
    return text.replace("\\\\", "\\") if doubled else text


def unfinished(text: str) -> bool:
    r"""Whether the last ``\boxed{`` of ``text`` is never closed."""
    start = text.rfind(BOX)
    return start >= 0 and closing(text, start) is None


def closing(text: str, start: int) -> int | None:
    r"""Where the brace closes that the ``\boxed{`` at ``start`` opens; None where it does not."""
    depth = 0
    for match in _BRACES.finditer(text, start + len(BOX) - 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def quantity(text: str) -> Quantity | None:
    """The number that all of a cleaned ``text`` is, perhaps with a unit; None where it is something else."""
    text = re.sub(r"^([-+])\s+", r"\1", re.sub(r"(?<!\.)\.\Z", "", text.strip()))
    found = _NUMBER.match(text) if len(text) <= LONGEST else None
    if found is None:
        return None
    tail = text[found.end() :]
    unit = _unit(tail)
    return None if unit is None else Quantity(_value(found), unit)


def _unit(tail: str) -> str | None:
    """The name of the unit that all of ``tail`` is; empty for an empty one, None where it is none."""
    if not tail.strip():
        return ""
    if not _UNIT.fullmatch(tail.rstrip()):
        return None
    words = re.findall(r"[A-Za-z]+|/|[23]", tail)
    names = [_name(word) for word in words]
    if None in names or (not tail[0].isspace() and words[0] not in _UNITS):
        return None
    if names[0] == "degree" and names[1:] in (["C"], ["F"]):
        del names[0]
    return " ".join(name for name in names if name)


def _name(word: str) -> str | None:
    if word in "/23":
        return word
    if word == "per":
        return "/"
    known = _UNITS.get(word) or _UNITS.get(word.lower() if len(word) > 2 else word)
    known = known or (_UNITS.get(word.lower().removesuffix("s")) if len(word) > 3 else None)
    if known is not None:
        return known
    short = len(word) < 3 or not re.search("[aeiouy]", word.lower())  # a product of variables
    return None if short or _OTHERWISE.fullmatch(word) or _PROSE.fullmatch(word) else word.lower().removesuffix("s")


def _value(found: re.Match[str]) -> Fraction:
    part = {name: text for name, text in found.groupdict().items() if text is not None}

    def number(*names: str) -> Fraction:
        text = next((part[name] for name in names if name in part), "0")
        return Fraction(text.replace(",", "").replace(" ", ""))

    if "whole" in part or "whole2" in part:
        value = number("whole", "whole2") + number("a", "a2") / number("b", "b2")
    elif "a3" in part:
        value = number("a3") / number("b3")
    elif "fixed" in part:
        again = part.get("again") or part["again2"]
        digits = len(part["fixed"].partition(".")[2])
        value = Fraction(part["fixed"] + "0") + Fraction(int(again), 10**digits * (10 ** len(again) - 1))
    elif "ten" in part or "ten2" in part:
        value = (number("by") if "by" in part else 1) * Fraction(10) ** int(number("ten", "ten2"))
    else:
        value = number("top", "point") / (number("bottom") if "bottom" in part else 1)
    value = -value if part.get("sign") == "-" else value
    return value / 100 if "percent" in part else value


# What may not stand beside the last number of a text.
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9_-]*/?>")
_SIGNED = re.compile(r"\b(?:negative|minus)\x20+(?=[0-9.\\])|(?<=[:={(\[])\s*-\s+(?=[0-9.\\])")
_POWER_SIGN = re.compile(r"(?<=[0-9A-Za-z)])\*\*(?=[0-9(-])")
_OPENERS = re.compile(r"(?:\\f?box(?:ed)?\s*\{|[\s({\[])*\Z")
_JOINS = re.compile(
    r"""(?: [\^_/\u20ac\u00a3] | [0-9]\.
      | \\(?!therefore|Rightarrow|rightarrow|implies|approx|item|to\b)[A-Za-z]+
      | [0-9]\s*[)}\]]*\s*(?:\\*[,;:&|](?:\s*(?:and|or)\b)?|\\+|\bor\b|\band\b|\bto\b|\bout\x20of\b|\bof\b)
      | [(\[][^()\[\]]*[,;] | (?<![A-Za-z])[A-Za-z]\s*=[^,;=]+?(?:[,;]|\bor\b|\band\b)\s*[A-Za-z]\s*=
      | [0-9A-Za-z)}\]]\s*[-+*<>] | (?<![A-Za-z'\\])[b-zB-HJ-Z]
      | \b(?:base|mod|modulo|than|least|most|not|except|sqrt|root|log|sin|cos|tan|plus|minus|negative|times|over)
      | [0-9]\s*(?:mm|cm|m|km|ft|foot|feet|yd|yards?|h|hours?|min|minutes?|lbs?|pounds?|weeks?|days?|years?)(?:\sand)?
    )\s*\Z""",
    re.VERBOSE,
)
_NEXT = re.compile(
    r"""\s*[)}\]]*\s*(?: [*/+^_<>]\s*[0-9A-Za-z\\({.-] | -\s*(?:[0-9\\(]|[A-Za-z]\b) | ![^\s]
      | \\(?!\\|boxed|end)[A-Za-z]+ | (?:or|to)\b | and\s(?:a|one|two|three)\b | [b-zB-HJ-Z]\b(?!\.\s*[A-Z]) )
      | \.\.\.(?=[\s)}\]]*\Z)""",
    re.VERBOSE,
)
_ALGEBRA = re.compile(r"(?<![A-Za-z\\])[A-Za-z]\s*[\^+*/-]|[0-9)^+*/-]\s*[A-WYZa-wyz](?![A-Za-z])|[0-9]x\b(?!\s*[0-9])")
_VARIABLE = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*=\s*\Z")
_ENDS = ("st", "nd", "rd", "th")
_NEAR = 80


def last_quantity(text: str) -> Quantity | None:
    """The last number in ``text`` and its unit; None where there is none, or where it is a part of something larger."""
    if unfinished(text):
        return None
    text = clean(_TAG.sub(" ", text))
    text = _GLUED.sub(r"\1 ", text)
    text = _POWER.sub(lambda m: m[1] + ("\u00b2" if "2" in (m[2], m[3]) else "\u00b3"), text)
    text = _SIGNED.sub(" -", _POWER_SIGN.sub("^", text)).replace("**", " ").replace("__", " ")
    found = None
    for match in _NUMBER.finditer(text):
        found = match
    if found is None or len(found[0]) > LONGEST:
        return None
    before, after = text[max(found.start() - _NEAR, 0) : found.start()], text[found.end() : found.end() + _NEAR]
    if _goes_on_before(found, before):
        return None
    if re.match(r"\s*[,;]", after) and re.search(r"[(\[]\s*\Z", before):
        return None  # [0, \infty)
    unit = _unit_beside(after, bare=not before.strip())
    variable = _VARIABLE.search(before)
    return None if unit is None else Quantity(_value(found), unit, variable[1] if variable else "")


def _goes_on_before(found: re.Match[str], before: str) -> bool:
    """Whether the number is the end of something larger, of which ``before`` ends with the beginning."""
    openers = _OPENERS.search(before)
    outer = before[: openers.start()] if openers else before
    between = before[len(outer) :]
    if before[-1:].isalnum() or before[-1:] == "|":
        return True  # x2, |2|
    if (outer[-1:].isalnum() and between[:1] == "(") or (outer[-1:].strip() and between[:1] == "{"):
        return True  # f(2), \sqrt{2}
    if "box" in between and re.search(r"[0-9]\s*\}[\s$]*\Z", outer):
        return True  # \boxed{1} \boxed{2}
    if "\n" in between and BOX not in before:
        return False
    line = outer.rpartition("\n")[2]
    if (line[-1:] == "-" and line != "-") or (found["sign"] and re.search(r"[A-Za-z)}\]]\Z", before)):
        return True  # -(2); the sign in (1)-2
    if line[-1:].isdigit() or _JOINS.search(line):
        return True  # 1 2; 1 or 2
    left, equals, right = line.rpartition("=")
    if not equals or right.strip():
        return False
    left = re.split(r"[,;:={(\[]|\.\s", left.rstrip())[-1]
    said = quantity(left)
    return bool(_ALGEBRA.search(left)) or (said is not None and said.value != _value(found))


def _unit_beside(after: str, bare: bool) -> str | None:
    """The unit that ``after`` begins with, empty for other text; None where the number goes on in ``after``."""
    word = re.match(r"(\x20*)([A-Za-z]+)([\u00b2\u00b3]?)(?:\s?(?:/|per\b)\s?([A-Za-z]+))?", after)
    if word:
        name = _name(word[2]) if word[2] in _UNITS or len(word[2]) > 2 else None
        if name in _UNITS.values():
            power = {"\u00b2": " 2", "\u00b3": " 3"}.get(word[3], "")
            return f"{name}{power}" + (f" / {_name(word[4])}" if word[4] else "")
        if (not word[1] and word[2] not in _ENDS) or _OTHERWISE.fullmatch(word[2]):
            return None  # 5x, 3i, 2 million
    if bare and after.lstrip().startswith("!"):
        return None
    return None if _NEXT.match(after) else ""
