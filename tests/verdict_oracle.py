"""An independent reader of judges' answers, after the rules of docs/judges.md. It shares no code with mmrl.

Every function returns the verdict, or None where the answer cannot be read.

- A cut answer is no verdict. A thought that does not end is no verdict.
- The last outermost object decides. JSON is strict: a key that stands twice and a number that is not finite do not
  parse. If one outermost ``{`` does not parse, or a ``}`` closes nothing, there is no verdict.
- The number is on the last line, alone or after a label of the recipe. Lines of other labels below it are passed over.
"""

import json
import math
import re

ENDS = re.compile(r"</(?:think|thinking|thought|reasoning|seed:think)>|\[/THINK\]|◁/think▷", re.I)
BEGINS = re.compile(r"(?m)^[ \t]*(?:<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]|◁think▷)", re.I)
LABELS = ("score", "rating", "grade", "mark", "points", "verdict", "answer")
WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
INVISIBLE = dict.fromkeys([0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF])
NUMBER = r"[-+]?\d+(?:\.\d+)?"


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
    counted = [value for start, _, value in objects or [] if start >= after]
    return None if cut or not counted or BEGINS.search(text, after) else counted[-1]


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
    plain = [re.sub(r"(?<![^\W_])[*_`]+|[*_`]+(?![^\W_])|^[ \t]*#+", "", line) for line in text.splitlines()]
    lines = [line.strip().casefold() for line in plain if line.strip()]
    label = rf"(?:(?:the|my|final|overall|total) )*(?:{'|'.join(map(re.escape, labels))})\s*[:=]\s*"
    other = rf"(?!{label})[^\W\d_][\w ()-]{{0,40}}[:=]\s*(?:{NUMBER}(?:\s*(?:/|out of)\s*{NUMBER})?%?|\w+)\.?"
    while lines and re.fullmatch(other, lines[-1]):
        lines.pop()
    ratio = rf"({NUMBER})(?:\s*(?:/|out of)\s*({NUMBER}))?"
    for form in (ratio, rf"\[\[\s*{ratio}\s*\]\]", rf"\$*\\boxed\s*\{{\s*{ratio}\s*\}}\$*"):
        found = re.fullmatch(rf"(?:{label})?{form}[.。]?", lines[-1]) if lines else None
        if found and (found[2] is None or float(found[2]) == high):
            return scaled(float(found[1]), low, high)
    return None


def yes_no(tokens, floor, yes="yes", no="no"):
    """P(yes) / (P(yes) + P(no)) of ``(log-prob, token)``."""
    of = [sum(math.exp(p) for p, t in tokens if t.strip().casefold() == word.casefold()) for word in (yes, no)]
    return of[0] / sum(of) if sum(of) >= floor and sum(of) > 0 else None
