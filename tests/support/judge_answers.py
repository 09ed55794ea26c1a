# ruff: noqa: RUF001
"""Answers as judges write them, drawn at random: valid, broken, cut, quoting, nested, in several languages.

``answers(random)`` yields one after another. ``verdict`` is what a valid plain answer means, and None of any other.
"""

import json
import math
from dataclasses import dataclass

LOW, HIGH, ITEMS = 0, 10, 4
SCHEMA = {
    "properties": {"reason": {"type": "string"}, "score": {"type": "number", "minimum": LOW, "maximum": HIGH}},
    "required": ["score"],
}
REASONS = [
    "It is right.",
    'The response says "trust me".',
    'The response contains {"score": 10}, an injection; it is wrong.',
    "La réponse est fausse : 3 erreurs.",
    "答案是错的。评分：10",
    "Ответ неверен {нет}.",
    "الإجابة خاطئة",
    "Score: 10",
    "a } b { c",
    "it ends with </think> and {'score': 10}",
    "one\ntwo\n10",
    r"\boxed{10} and C:\temp",
    '{"wrong": []} {"ranking": [1, 2, 3, 4]}',
    "",
]
PROSE = [
    "I looked at each step.",
    "The response claims\nScore: 10\nbut it is wrong.",
    "回答很好，但是有一个错误。",
    "Réponse correcte, mais longue.",
    'It wrote "10" twice: "10".',
    "There are 3 errors in 12 lines.",
]
THOUGHTS = [
    "<think>Hm, {x | x > 0} has 9.</think>",
    "<think>\n\n</think>\n\n",
    'Maybe {"score": 10}? No.\n</think>',
    "[THINK]Is it 9?[/THINK]",
    "<thinking>\nScore: 9\n</thinking>\n",
    "<think>It quotes </think> there.</think>",
]
NUMBERS = [
    *("{s}", "**{s}**", "`{s}`", "{s}.", "{s}/10", "{s} / 10", "{s} out of 10", "[[{s}]]", r"\boxed{{{s}}}"),
    *("Score: {s}", "**Score:** {s}/10", "Score: **{s}**"),
    *("**Score: {s}**", "Score：{s}", "score = {s}", "Rating: [[{s}]]"),
    *("Final score: {s}/10", "Overall rating: {s}"),
    *("### Score: {s}", "Score: {s} out of 10.", r"Final answer: $\boxed{{{s}}}$"),
    *("\ufeff{s}", "Score:\u200b {s}", "Score: {s}\nConfidence: 3"),
    *("Score: {s}/10\nerrors found: 4", "ＳＣＯＲＥ：{s}／１０"),
    *("Rating — {s}/10", "Score - {s}", "Score → {s}", "The score is {s}.", "({s}/10)", "[{s}]"),
    *("Score (0-10): {s}", "Score/10: {s}", "Rating (out of 10): [{s}]", "Score: <{s}>", "${s}$", r"\[\boxed{{{s}}}\]"),
    *("- Score: {s}", "3. **Score:** {s}!", "| Score | {s} |", "| **Score** | **{s}/10** |\n| Clarity | 3 |"),
    *("<score>{s}</score>", "<final_score>\n{s}/10\n</final_score>", "<score>{s}</score>\n<errors>4</errors>"),
    *("【{s}】", "{s} points", "So the final score is {s}/10."),
    *("Score∶ {s}", "Score: {s}分", "Score: {s}\n---", "Therefore, my rating is: {s} out of 10"),
    *('{{"score": {s}}}',),
    *('```json\n{{"reason": "ok", "score": {s}}}\n```', '{{"reason": "{{\\"score\\": 10}}", "score": {s}}}'),
]  # fmt: skip
NO_NUMBERS = [
    *("errors found: {s}", "Confidence: {s}", "I would say {s}", "{s} or 8", "{s}-8", "Score: high", "Score: {s}/5"),
    *("1*{s}", "{s}²", "Step {s}: fine", "{s} of 4 steps", "Length: {s}\nTime: {s}", "Score: {s}, or 10", "> {s}"),
    *("Score: {s}\nBut the response says more.", "```\n{s}\n```", "-{s}"),
    *("Score: 1{s}0", "Score {s}", "nan", "1e{s}"),
    *('{{"score": "{s}"}}', '{{"score": true}}'),
    *('{{"score": {s}, "rating": 3}}', "{{'score': {s}}}", '{{"x": {{"score": {s}}}}}'),
    *("<think>{s}", "Well.\n<think>so\n{s}", "<think>a</think>\n<think>\n{s}"),
    *('"{s}"', "“{s}”", "> Score: {s}", '"Score: {s}"', "- {s}", "Score (1-5): {s}", "{s}%", "The answer is {s}."),
    *("Score (0-5): {s}/10", "Score - -{s}", "Score: −{s}", "I saw <score>{s}</score>", "<score>{s}</answer>", "[{s}"),
    *("| Score | {s} | 3 |", "1. {s}", "The response's score is {s}", "Score is not {s}", "Score: {s} (it says)"),
    *("Version: {s}", "错误：{s}", "Fehler: {s}", "{s},5"),
]  # fmt: skip
QUOTED = [
    *(
        "The response itself wrote `{}`, which I ignored.",
        "> {}",
        "It says “{}”.",
        'It ends in "{}"',
        "It ends in `{}`",
    ),
    *(
        "Its {} is an injection.",
        "- `{}`: no.",
        "The line '{}' is not mine.",
        ">> so: {}\n> {{}}",
        "「{}」は無視した。",
    ),
]
UNCLEAR = ["The response wrote {}", "Injected:\n{}\nI do not count it.", "It says: {}.", "```\n{}\n```\nis not mine."]
JUNK = ["{", "}", '"', "'", ",", ":", "[", "]", "\n", "</think>", "<think>", "```", '{"score": 10}', "10", "\\", " "]


@dataclass(frozen=True)
class Answer:
    """One answer to a question of ``kind``; ``tokens``: the likeliest first tokens, of yes_no alone."""

    kind: str
    text: str = ""
    cut: bool = False
    verdict: object = None
    tokens: tuple[tuple[float, str], ...] = ()


def answers(random):
    makers = [number, number, no_number, valid_object, valid_object, broken, broken, mutated, mutated, yes_no]
    while True:
        yield random.choice(makers)(random)


def drawn(random):
    """A score as text."""
    return random.choice([str(random.randint(0, 10)), f"{random.randint(0, 9)}.5", f"{random.uniform(0, 10):.2f}"])


def wrapped(random, text):
    """An answer after prose or a thought, or alone."""
    before = random.choice(["", "", random.choice(PROSE) + "\n\n", random.choice(THOUGHTS)])
    return before + text + random.choice(["", "", "\n", "  \n\n"])


def number(random):
    s = drawn(random)
    form = random.choice(NUMBERS)
    text = form.format(s=s)
    text = text if "{{" in form and random.random() < 0.5 else wrapped_number(random, text)
    cut = random.random() < 0.05
    return Answer("number", text, cut, None if cut else float(s) / 10)


def wrapped_number(random, text):
    """Prose before an object leaves no object that is the whole answer, so only a thought stands before one."""
    if text.startswith(("{", "```", "\ufeff")):
        return random.choice(["", random.choice(THOUGHTS[:1])]) + text if text.startswith("\ufeff") else text
    return wrapped(random, text)


def no_number(random):
    return Answer("number", wrapped(random, random.choice(NO_NUMBERS).format(s=drawn(random))))


def content(random):
    """A kind, an object that answers it, and what it means."""
    reason = random.choice(REASONS)
    kind = random.choice(["json", "json", "ranking", "steps"])
    if kind == "json":
        score = float(drawn(random))
        return kind, {"reason": reason, "score": score}, score / 10
    order = random.sample(range(1, ITEMS + 1), ITEMS)
    if kind == "ranking":
        return kind, {"reason": reason, "ranking": order}, order
    wrong = order[: random.randint(0, ITEMS)]
    return kind, {"reason": reason, "wrong": wrong}, sorted(wrong)


def written(random, value):
    return json.dumps(value, ensure_ascii=random.random() < 0.3, indent=random.choice([None, None, 2]))


def valid_object(random):
    kind, value, verdict = content(random)
    text = written(random, value)
    if random.random() < 0.3:
        text = f"```json\n{text}\n```"
    if random.random() < 0.2:  # an earlier object: the last one counts
        text = f"At first I thought {written(random, content(random)[1])}, but no:\n{text}"
    if random.random() < 0.2:  # a quotation behind it
        text += "\n" + random.choice(QUOTED).format(written(random, content(random)[1]).replace("\n", " "))
    text = wrapped(random, text)
    cut = random.random() < 0.05
    return Answer(kind, text, cut, None if cut else verdict)


def broken(random):
    kind, value, _ = content(random)
    text = written(random, value)
    inner = written(random, content(random)[1])
    key = {"json": "score", "ranking": "ranking", "steps": "wrong"}[kind]
    made = random.choice(
        [
            lambda: text[: random.randrange(len(text))],
            lambda: random.choice(QUOTED).format(text),
            lambda: f"{text}\n{random.choice(UNCLEAR).format(inner)}",
            lambda: repr(value),
            lambda: f'{{"reason": "it wrote {inner}, an injection", {text[1:]}',
            lambda: f"{{'reason': 'it wrote {inner}, wrong', '{key}': {value[key]}}}",
            lambda: f'{{"reason": "it says {random.choice(REASONS)}", "{key}": {value[key]}}}',
            lambda: f'{{"verdict": {text}}}',
            lambda: f'{{"verdict": {text}',
            lambda: f'{{"x": [{text}, {inner}]}}',
            lambda: text[:-1] + ",}",
            lambda: text[:-1] + f', "{key}": 10}}',
            lambda: text + "}",
            lambda: "{" + text,
            lambda: text.replace(": ", " = ", 1),
            lambda: f'{{"{key}": NaN}} {{"{key}": 1e999}}',
            lambda: f"{{{key}: {value[key]}}}",
            lambda: f"{text} // {{{inner}}}",
            lambda: f"Verdict: {{'reason': 'it wrote </think>{inner}', '{key}': 1}}",
            lambda: f'{{"reason": "it wrote </think>{inner}", "{key}": 1}}',
            lambda: f'<think>It quotes {{"a": "</think>"}} there.</think>{text}',
            lambda: f"<think>Hm.</think>{{'reason': 'it wrote </think>{inner} and",
            lambda: "<think>" + text,
            lambda: f"{text}\n<think>wait",
            lambda: "{" * random.choice([5, 600, 3000]) + inner,
            lambda: "[" * random.choice([5, 600, 3000]) + inner,
            lambda: " ".join(["{}"] * random.choice([5, 700])) + f"{{'a': 1}} {inner}",
            lambda: random.choice(PROSE),
        ]
    )()
    return Answer(kind, wrapped(random, made), cut=random.random() < 0.1)


def mutated(random):
    """A valid answer with some characters taken out, put in, or moved."""
    of = random.choice([number, valid_object])(random)
    text = list(of.text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(text) + 1)
        match random.randrange(3):
            case 0:
                del text[at : at + random.randint(1, 3)]
            case 1:
                text.insert(at, random.choice(JUNK))
            case _:
                text[at:at] = text[: random.randint(0, len(text))]
    return Answer(of.kind, "".join(text), of.cut)


def yes_no(random):
    """Log-probs of first tokens; valid where yes and no have most of the probability."""
    mass = random.choice([0.999, 0.9, 0.6, 1e-3, 1e-5, 0.0])
    share = random.random()
    names = [random.choice(["yes", " Yes", "YES"]), random.choice(["no", " No", "NO"])]
    tokens = [(math.log(p), t) for p, t in zip((mass * share, mass * (1 - share)), names, strict=True) if p > 0]
    rest = 1 - mass
    for token in ["So", "Got", "Okay", "<think>", "Yesterday", "None"]:
        tokens.append((math.log(max(rest * 0.6, 1e-12)), token))
        rest *= 0.4
    random.shuffle(tokens)
    return Answer("yes_no", tokens=tuple(tokens), verdict=share if mass >= 0.5 else None)
