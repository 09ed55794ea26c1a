r"""Find the final answer of a response, and compare two answers. Text and numbers, no algebra."""

from __future__ import annotations

import re
from collections.abc import Callable

from mmrl.rewards.numerals import BOX, LONGEST, clean, closing, quantity

_JOINED = r"[\s$,;/&]|\\q?quad(?![a-z])|\\text\s*\{[^{}]{0,40}\b(?:and|or)[\s,]*\}|\b(?:and|or)\b|\\[()\[\],;: ]"
_CONNECTED = re.compile(
    rf"(?:{_JOINED})*(?:[A-Za-z](?:_\{{?\w+\}}?)?\s*=\s*)?"
    rf"|\s*(?:(?!\b(?:not|no|is|are|was|so|then|but|hence|thus|wrong|instead)\b)[a-z]+\s+|\([a-z]\)\s+){{1,4}}(?:and|or)\s+"
)
_STATED = re.compile(
    r"(?:.*\b)?(?i:(?:answer|result|solution)\b[^.\n:=]{0,40}?(?:\bis\b:?|:|=))\s*([^\s:][^\n]*?)[\s.*]*"
    r"(?:(?<=[.$\s])I hope it is correct[\s.]*)?\Z",
    re.DOTALL,
)
_FINALLY = re.compile(r"(?i:final answer is):?\s*(\$[^$\n]+\$|\\\(.+?\\\))\.?\s*I hope it is correct")
_SPAN = re.compile(r"\$\$(.+?)\$\$|(?<![\\0-9])\$((?:\\\$|[^$\n])+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,?\s*(?:and|or)|,)?\s*")
_DENIED = re.compile(r"(?i:\b(?:not|n't|never|than|except|least|most|no|nor|neither)\b|n't)[^.\n]{0,12}\Z")
_HUNDREDTHS = re.compile(r"[\s$]*(?:\\?%|(?i:percent(?:age)?|pct)\b)")
_NAMED = re.compile(
    r"((?:[A-Za-z]|\\[a-z]+)(?:_(?:\{\w+\}|\w+))?(?:\([A-Za-z0-9,\s]*\))?"
    r"|\([A-Za-z](?:,\s*[A-Za-z])+\)|\\frac\{[A-Z]+\}\{[A-Z]+\}|[A-Z](?:_(?:\{\w+\}|\w+))?\s*:\s*[A-Z](?:_(?:\{\w+\}|\w+))?|(?:\\angle\s*)?[A-Za-z]{2,}(?:\s[A-Za-z]+){0,3})\s*(?:=|\\in(?![a-z]))\s*([^=]+)"
)
_LISTED = re.compile(r",?\s+(?:and|or)\s+|[,;]")
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_MOSTBOXES = 20
_MOST = 20
"""Entries of a list that algebra compares: each with each."""


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` of ``text`` holds, braces balanced; None where that one is not closed.

    Boxes joined by nothing, a comma, ``and`` or ``or`` are one answer: ``\boxed{1} or \boxed{2}`` is ``1, 2``, and a
    list is not one of its entries. A box inside another belongs to the outer one.
    """
    start = text.rfind(BOX)
    end = closing(text, start) if start >= 0 else None
    if end is None:
        return None
    held = [text[start + len(BOX) : end] + ("\\%" if _HUNDREDTHS.match(text, end + 1) else "")]
    for _ in range(_MOSTBOXES):
        earlier = text.rfind(BOX, 0, start)
        closed = closing(text, earlier) if earlier >= 0 else None
        if closed is None:
            break
        if closed > end:
            held = [text[earlier + len(BOX) : closed]]
            end = closed
        elif _CONNECTED.fullmatch(text[closed + 1 : start]):
            held.insert(0, text[earlier + len(BOX) : closed])
        else:
            break
        start = earlier
    return ", ".join(_unwrapped(box) for box in dict.fromkeys(held))


def stated(text: str) -> str:
    """What ``text`` says is its answer: the last box, else what follows ``answer is`` at its end, else its last
    formula between dollar signs or LaTeX's brackets (with those that a comma, ``and`` or ``or`` joins to it), else all.
    """
    found, concluded = boxed(text), list(_FINALLY.finditer(text, max(0, text.rfind(BOX))))
    if concluded:
        return concluded[-1][1]
    if found is not None:
        return found
    said = _STATED.search(text[-LONGEST:])
    if said:
        return said[1]
    spans = list(_SPAN.finditer(text))
    if not spans or re.search(r"[0-9]", text[spans[-1].end() :]) or _DENIED.search(text[: spans[-1].start()]):
        return text
    first = len(spans) - 1
    while first and _BETWEEN.fullmatch(text, spans[first - 1].end(), spans[first].start()):
        first -= 1
    said = ", ".join(next(held for held in span.groups() if held) for span in spans[first:])
    return said + ("\\%" if _HUNDREDTHS.match(text, spans[-1].end()) else "")


Alike = Callable[[str, str], bool]
"""Whether two answers that are no lists are equal in another way than as texts or numbers."""


def same(found: str, wanted: str, alike: Alike = lambda found, wanted: False) -> bool:
    """Whether two answers are the same text, number or list of such. ``x = 3`` and ``3`` are; so are 5 and 5 cm.

    ``alike`` is asked about entries of lists that are not.
    """
    found, wanted = clean(found).strip(), clean(wanted).strip()
    return _same(found, wanted, alike)


def squeezed(answer: str) -> str:
    """One form of an answer, without white space and signs that say nothing."""
    return _squeezed(_bare(clean(answer).strip()))


def comparable(found: str, wanted: str) -> tuple[str, str] | None:
    """Two answers as algebra may compare them; None where it would misread one, or ``same`` says all there is to say.

    What parsers of LaTeX misread: numbers in a row, other bases, ``1e3``, dots that leave something out, a percentage
    beside a number, the prime of ``f'``, an equation in place of a value, one kind of brackets for another, X for x.
    """
    found, wanted = _bare(clean(found)), _bare(clean(wanted))
    if not found or not wanted or max(len(found), len(wanted)) > LONGEST or any(map(_MISREAD.search, (found, wanted))):
        return None
    if (quantity(found) and quantity(wanted)) or _differ_in_case(found, wanted) or found.lower() == wanted.lower():
        return None
    if "=" in found and "=" in wanted:
        found, wanted = _last_of_chain(found), _last_of_chain(wanted)
    one, other = _NAMED.fullmatch(found), _NAMED.fullmatch(wanted)
    if one and not other and "=" not in wanted:
        found = one[2].strip()
    elif other and not one and "=" not in found:
        wanted = other[2].strip()
    counted = [_BELOW.sub("", text) for text in (found, wanted)]
    if any(counted[0].count(sign) != counted[1].count(sign) for sign in "='"):
        return None
    kinds = [parts[0] if (parts := _parts(text)) else "" for text in (found, wanted)]
    if kinds[0] != kinds[1] and not any(
        kind in _INTERVALS and _RELATION.search(text) and _parts(text) is None
        for kind, text in ((kinds[0], wanted), (kinds[1], found))
    ):
        return None
    return _degrees(found), _degrees(wanted)


_MISREAD = re.compile(
    r"(?<!_)[0-9]\s+[0-9]|(?<![A-Za-z\\])[A-Za-z][0-9]|[0-9]\}?\s*_|[0-9][eE][-+]?[0-9]|\\[lcdv]?dots|\.\.\.|[?!]{2}|\\(?:overline|bar|dot)\b"
    r"|(?i:\bnan\b|\bnot\b|\bor\b.*\bor\b)"
)
_MATRIX = re.compile(r"(?<=[{])[pb]matrix")
_SINGLE = re.compile(r"(\^|_|\\sqrt)\{([A-Za-z0-9])\}")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*degrees?\b")


_BELOW = re.compile(r"_\s*\{[^{}]*\}")
_INTERVALS = ("()", "[]", "[)", "(]")
_RELATION = re.compile(r"[<>]|\\[lg]e(?![a-z])")
_CHAIN = re.compile(
    r"([A-Za-z](?:_(?:\{\w+\}|\w+))?)\s*=((?:[^=,;A-Za-z{}]|\\frac|[{}][0-9])+=)+\s*([^=,;A-Z]+?)\s*(?:\\approx.*)?"
)


def _last_of_chain(text: str) -> str:
    """``x = 11`` for ``x = 5 + 5 + 1 = 11``, and for ``x = 11 \\approx 11.0``."""
    chain = _CHAIN.fullmatch(text)
    return f"{chain[1]} = {chain[3]}" if chain and "\\approx" not in chain[3] else text


def _differ_in_case(found: str, wanted: str) -> bool:
    """Whether one says X where the other says x: a parser of LaTeX takes them for one."""
    letters = [set(_LETTERS.findall(text)) for text in (found, wanted)]
    return any(letter.swapcase() in letters[1] - letters[0] for letter in letters[0] - letters[1])


def _degrees(text: str) -> str:
    return _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)


_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?\(?([A-Z])(?:"
    r"(?:\)[.:]?(?:\s+|(?=[0-9$\\]|[A-Za-z]{2}))|\.\s*)(?![A-Z]\b)([^\s=:].*)"  # (B) Paris; B. x = 5
    r"|(?::\s+(?![A-Z]\b)|\s+-\s+(?=[A-Za-z]{2})|\s+(?=\([A-Za-z]{3}))([^\s=:][^=:]*))",  # B: 5; B - Paris; B (Paris)
    re.DOTALL,
)
_ANOTHER = re.compile(r"(?:[,;/&]|\b(?:and|or)\b)\s*\(?[A-Z](?![A-Za-z])|^(?i:and|or|not)\b")
_WORDS = re.compile(r"[A-Za-z]+(?:[\s-]+[A-Za-z]+)*")
_COMMA = re.compile(r"-?(?:0,[0-9]+|[1-9][0-9]*,(?![0-9]{3}\Z)[0-9]+)")
_SAID = frozenset(["yes", "no", "true", "false", "none"])


def _letter(text: str) -> str:
    """The letter of an option with its text (``B. Paris``, ``(B) Paris``), or a letter alone; else nothing."""
    alone = re.fullmatch(r"(?:(?i:option|choice)\s+)?\(?([A-Z])\)?", text)
    if alone:
        return alone[1]
    found = _CHOICE.fullmatch(text)
    return found[1] if found and not _ANOTHER.search(found[2] or found[3]) else ""


def _same_choice(found: str, wanted: str) -> bool:
    """Whether one is the letter of an option, and the other the same letter with the option's text."""
    return 1 in (len(found), len(wanted)) and _letter(found) != "" and _letter(found) == _letter(wanted)


def _same_words(found: str, wanted: str) -> bool:
    """Whether both are the same words, of which case says nothing: ``No solution``, ``True``, but not ``ABC``."""
    if not (_WORDS.fullmatch(found) and _WORDS.fullmatch(wanted)) or found.lower().split() != wanted.lower().split():
        return False
    said = found.lower() in _SAID
    return said or not any(text.isupper() or len(text) < 3 for text in (found, wanted))


def _same_point(found: str, wanted: str) -> bool:
    """Whether two decimals are the same, one written with a comma; a truth ``1,5`` is a list, and ``0,5`` is not."""
    pairs = ((found, wanted), (wanted, found) if re.match("-?0", wanted) else ("", ""))
    return any(_COMMA.fullmatch(one) and one.replace(",", ".") == other for one, other in pairs)


def _same(found: str, wanted: str, alike: Alike) -> bool:
    found, wanted = _bare(found), _bare(wanted)
    if not found or not wanted:
        return False
    if _squeezed(found) == _squeezed(wanted) or _same_choice(found, wanted) or _same_words(found, wanted):
        return True
    if max(len(found), len(wanted)) > LONGEST:
        return False
    if _same_point(found, wanted):
        return True
    numbers = quantity(found), quantity(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].value == numbers[1].value and numbers[0].agrees(numbers[1])
    one, other = _NAMED.fullmatch(found), _NAMED.fullmatch(wanted)
    if one and other:
        return _squeezed(one[1]) == _squeezed(other[1]) and _same(one[2], other[2], alike)
    if one or other:
        return _same(one[2] if one else found, other[2] if other else wanted, alike)
    return _same_parts(_parts(found), _parts(wanted), alike)


def _same_parts(found: tuple[str, list[str]] | None, wanted: tuple[str, list[str]] | None, alike: Alike) -> bool:
    if not found or not wanted or len(found[1]) != len(wanted[1]):
        return False

    def equal(one: str, other: str) -> bool:
        return _same(one, other, alike) or (len(found[1]) <= _MOST and alike(one, other))

    kinds = {found[0], wanted[0]}
    if len(kinds) == 1 and not kinds <= {"", "{}"}:
        return all(map(equal, found[1], wanted[1]))
    left = list(wanted[1]) if kinds <= {"", "{}"} else []
    for part in found[1]:
        match = next((i for i, other in enumerate(left) if equal(part, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _parts(text: str) -> tuple[str, list[str]] | None:
    r"""The brackets around a list and its entries: ``("[)", ["1", "2"])``; no brackets around ``1, 2``. None: no list.

    A set may have one entry, and none.
    """
    text = text.strip().replace("\\{", "{").replace("\\}", "}")
    kind = ""
    if text[:1] in _PAIRS and text[-1:] in _PAIRS.values() and _one_group(text):
        kind, text = text[0] + text[-1], text[1:-1]
    cuts, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|" + _LISTED.pattern, text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif depth == 0:
            cuts.append(text[start : match.start()])
            start = match.end()
    parts = [*cuts, text[start:]]
    return (kind, parts) if len(parts) > 1 or kind == "{}" else None


def _one_group(text: str) -> bool:
    """Whether the bracket that ``text`` begins with is closed by the one it ends with, of whatever kind."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _unwrapped(box: str) -> str:
    inner = box.strip().removeprefix(BOX)
    return inner.removesuffix("}") if inner != box.strip() and inner.endswith("}") else box


def _bare(text: str) -> str:
    text = re.sub(r"(?<!\.)\.\Z", "", text.strip().strip("*").removeprefix("+")).strip()
    while text.startswith("{") and text.endswith("}") and _one_group(text):
        text = text[1:-1].strip()
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text


def _squeezed(text: str) -> str:
    text = _MATRIX.sub("matrix", _SINGLE.sub(r"\1\2", text))
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)  # 1 1/2 is no 11/2
