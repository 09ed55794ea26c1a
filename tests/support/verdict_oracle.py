"""An independent reader of judges' answers, after the rules of docs/judges.md. It shares no code with mmrl.

Every function returns the verdict, or None where the answer cannot be read.

- A cut answer is no verdict. A thought that does not end is no verdict.
- The last outermost object decides. JSON is strict: a key that stands twice and a number that is not finite do not
  parse. If one outermost ``{`` does not parse, or a ``}`` closes nothing, there is no verdict.
- An object that is quoted is text: in a line that begins with >, beside a quotation mark, with words on both sides in
  its line, or with words and backticks. Of several others the last one decides if no word stands behind it, and none
  before it in its line where an earlier one has no words beside it.
- The number is on the last line, alone or after a label of the recipe. Lines of other labels below it are passed over.
"""

import itertools
import json
import math
import re

ENDS = re.compile(r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|◁/think▷", re.I)
BEGINS = re.compile(r"(?m)^[ \t]*(?:<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|◁think▷)", re.I)
LABELS = ("score", "rating", "grade", "mark", "points", "verdict", "answer")
WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0x3000: 0x20,
    0xFE55: 58,
    0x2236: 58,
    0xA789: 58,
    0x2212: 45,
}
INVISIBLE = dict.fromkeys([0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF])
NUMBER = r"[-+]?\d+(?:[.,]\d+)?"
QUOTES = set("\"'\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d\u300e\u300f\u2018\u2019")
AROUND = ("[[ ]]", "[ ]", "( )", "< >", "$$ $$", "$ $", r"\( \)", r"\[ \]", "\u3010 \u3011", "\\boxed{ }")
UNITS = ("points", "point", "pts", "stars", "star", "\u5206", "\u70b9", "\uc810")


def strict(text):
    def pairs(found):
        if len(dict(found)) < len(found):
            raise ValueError
        return dict(found)

    def finite(digits):
        if not math.isfinite(float(digits)):
            raise ValueError
        return float(digits)

    return json.loads(text, object_pairs_hook=pairs, parse_float=finite, parse_constant=lambda _: 1 / 0)


def outermost(text):
    """The outermost objects with their places; None where a brace outside them belongs to none."""
    found, at = [], 0
    while (brace := re.compile("[{}]").search(text, at)) is not None:
        for end in [i + 1 for i in range(brace.start(), len(text)) if text[i] == "}"]:
            try:
                found.append((brace.start(), end, strict(text[brace.start() : end])))
                break
            except (ValueError, ArithmeticError, RecursionError):
                continue
        else:
            return None
        at = end
    return found


def last_object(text, cut=False):
    text, end = text.strip(), ENDS.search(text.strip())
    objects = None if BEGINS.match(text) else outermost(text)
    if objects is None and end is not None and not text.startswith(("{", "```")):
        text = text[end.end() :]
        objects = outermost(text)
    marks = [m for m in ENDS.finditer(text) if not any(a < m.start() < b for a, b, _ in objects or [])]
    after = marks[-1].end() if marks else 0
    counted = [found for found in objects or [] if found[0] >= after]
    return None if cut or BEGINS.search(text, after) else own(text, after, counted)


def own(text, after, objects):
    """The object that is the judge's own, from the places of all."""
    flat, at = "", after
    for start, end, _ in objects:
        flat, at = flat + text[at:start].replace("\0", " ") + "\0", end
    flat += text[at:].replace("\0", " ")
    found = []
    for line in flat.split("\n"):
        parts = line.split("\0")
        for left, right in itertools.pairwise(parts):
            words = [any(map(str.isalnum, part)) for part in (left, right)]
            marks = {left.rstrip()[-1:], right.lstrip()[:1]}
            code = [re.search(r"`*$", left.rstrip())[0], re.match(r"`*", right.lstrip())[0]]
            quoted = marks & QUOTES or (any(words) and any(0 < len(ticks) < 3 for ticks in code))
            found.append(None if quoted or all(words) or line.lstrip().startswith(">") else words)
    mine = [(value, *words) for (_, _, value), words in zip(objects, found, strict=True) if words is not None]
    alone = [not (before or behind) for _, before, behind in mine]
    last = next((end for (_, end, _), words in [*zip(objects, found, strict=True)][::-1] if words is not None), 0)
    if len(mine) > 1 and (any(map(str.isalnum, text[last:])) or (mine[-1][1] and any(alone[:-1]))):
        return None
    return mine[-1][0] if mine else None


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def scaled(value, low, high):
    return (value - low) / (high - low) if low <= value <= high else None


def field(text, low, high, name="score", cut=False):
    """The number in a field of the object."""
    value = (last_object(text, cut) or {}).get(name)
    return scaled(value, low, high) if is_number(value) else None


def ranking(text, n, cut=False):
    value = (last_object(text, cut) or {}).get("ranking")
    whole = isinstance(value, list) and all(type(v) is int for v in value)
    return value if whole and sorted(value) == list(range(1, n + 1)) else None


def steps(text, n, cut=False):
    value = (last_object(text, cut) or {}).get("wrong")
    whole = isinstance(value, list) and all(type(v) is int and 1 <= v <= n for v in value)
    return sorted(set(value)) if whole else None


def number(text, low, high, labels=LABELS, cut=False):
    text = text.translate(WIDE).translate(INVISIBLE).strip()
    if text.startswith(("{", "```")):
        named = [v for k, v in (last_object(text, cut) or {}).items() if k.strip().casefold() in labels]
        return scaled(named[0], low, high) if len(named) == 1 and is_number(named[0]) else None
    text = ENDS.split(text)[-1]
    if cut or BEGINS.search(text):
        return None
    text = re.sub(
        r"(?m)^[ \t]*<(\w+)>\s*([^<>\n]*?)\s*</\1>[ \t]*$", lambda m: f"{m[1]}: {m[2]}".replace("_", " "), text
    )
    plain = [re.sub(r"(?<![^\W_])[*_`]+|[*_`]+(?![^\W_])|^[ \t]*#+", "", line) for line in text.splitlines()]
    lines = [
        undecorated(line.strip().casefold()) for line in plain if line.strip() and not re.fullmatch(r"[-=\s]{3,}", line)
    ]
    while lines and after_label(lines[-1], labels) is None and re.fullmatch(OTHER, lines[-1]):
        lines.pop()
    return stated(lines[-1], low, high, labels) if lines else None


OTHER = rf"[^\W\d_][\w ()-]{{0,40}}[:=]\s*(?:{NUMBER}(?:\s*(?:/|out of)\s*{NUMBER})?%?|\w+)\.?"


def undecorated(line):
    """A row of two cells as a name and a value, and an item of a list without its mark."""
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) == 4 and not cells[0] and not cells[3]:
        line = f"{cells[1]}: {cells[2]}"
    mark, _, rest = line.partition(" ")
    item = mark in ("-", "+", "\u2022") or re.fullmatch(r"\d+[.)]", mark)
    return rest.strip() if item and rest.strip()[:1].isalpha() else line


def after_label(line, labels):
    """What follows a label of the recipe in a line, and what its scale says; None without a label."""
    words = re.match(r"(?:(?:so|thus|therefore|hence),?\s+)?(?:(?:the|my|final|overall|total) )*", line)
    for label in sorted((name for name in labels if line.startswith(name, words.end())), key=len, reverse=True):
        rest = line[words.end() + len(label) :]
        scale = re.match(rf"\s*(?:\(\s*(?:{NUMBER}\s*(?:-|\u2013|to)|out of|/)|/)\s*({NUMBER})\s*\)?", rest)
        rest = rest[scale.end() :] if scale else rest
        joins = r"\s*(?:[:=\u2192\u2014]|->|=>)\s*|\s+[-\u2013]\s+" + ("" if label == "answer" else r"|\s+is:?\s+")
        if joined := re.match(r"\s*=>\s*|" + joins, rest):
            return rest[joined.end() :], scale and scale[1]
    return None


def stated(line, low, high, labels):
    value, scale = after_label(line, labels) or (line, None)
    has_label = value is not line
    value = re.sub(r"\\boxed\s+", r"\\boxed", value).removesuffix(".").removesuffix("\u3002").removesuffix("!").strip()
    pairs, peeled = [pair.split() for pair in AROUND], 0
    while peeled < 2 and (around := next((p for p in pairs if value.startswith(p[0]) and value.endswith(p[1])), None)):
        value, peeled = value[len(around[0]) : -len(around[1])].strip(), peeled + 1
    value = next((value.removesuffix(unit).strip() for unit in UNITS if value.endswith(unit)), value)
    found = re.fullmatch(rf"({NUMBER})(?:\s*(?:/|out of)\s*({NUMBER})|\s*(%))?", value)
    if found is None or ("," in found[1] and not (has_label or found[2])):
        return None
    of = [float(n.replace(",", ".")) for n in (scale, found[2], found[3] and "100") if n]
    return scaled(float(found[1].replace(",", ".")), low, high) if all(n == high for n in of) else None


def yes_no(tokens, floor, yes="yes", no="no"):
    """P(yes) / (P(yes) + P(no)) of ``(log-prob, token)``."""
    of = [sum(math.exp(p) for p, t in tokens if t.strip().casefold() == word.casefold()) for word in (yes, no)]
    return of[0] / sum(of) if sum(of) >= floor and sum(of) > 0 else None
