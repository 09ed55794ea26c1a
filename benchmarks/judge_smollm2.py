"""SmolLM2-135M-Instruct as a generative judge: of which questions are its verdicts better than chance?

    mmrl fetch smollm2-135m-instruct
    python benchmarks/judge_smollm2.py

It writes a sentence about each of some subjects. Then it is asked four questions about each sentence, half of them
with the answer no, whose truth a program knows: whether the sentence is about a subject, contains a word, has at most
so many words, and contains no comma. It is asked as a chat, and as plain text that continues four worked examples.
Its score is ``P(yes) / (P(yes) + P(no))`` of its next token. The table has the area under the ROC curve (chance: 0.5)
with a 95 % interval, and the agreement at the score that splits the cases in equal halves, which takes a bias to yes
or no away. A question is worth training on where the interval lies above 0.7.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import mmrl
from mmrl.core.packages.places import found, lacking
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.calling import Caller
from mmrl.rewards.judging.statistics import auc, auc_interval
from mmrl.rewards.loading import build, find

MODEL = "package:smollm2-135m-instruct"
WORTH = 0.7
"""Of the lower end of an interval: below it, most of what a policy would follow is noise."""


@dataclass(frozen=True)
class Case:
    """A sentence, what the judge is asked about it, and whether yes is right."""

    text: str
    asked: str
    """The question of a chat."""
    line: str
    """What the question is about, and the question, below the sentence of a worked example."""
    right: bool


Task = Callable[[Sequence[tuple[str, str]], random.Random], list[Case]]
"""Makes the cases from subjects and the sentences about them."""


def about(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """Another subject of the list is the wrong one; sentences that name it are left out."""
    cases: list[Case] = []
    for subject, text in pairs:
        others = [other for other, _ in pairs if other[:-1] not in text.lower() and other != subject]
        if subject[:-1] in text.lower():
            for name, right in ((subject, True), (rng.choice(others), False)):
                cases.append(Case(text, f"Is it about {name}?", f"Subject: {name}\n{ABOUT}", right))
    return cases


def contains(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """A word of the sentence, and one of another sentence that is not in this one."""
    words = [sorted({w.strip(".,!?'\"").lower() for w in text.split()} - {""}) for _, text in pairs]
    cases: list[Case] = []
    for (_, text), own in zip(pairs, words, strict=True):
        foreign = [w for other in words for w in other if w not in own and len(w) > 3]
        mine = [w for w in own if len(w) > 3]
        if mine and foreign:
            for word, right in ((rng.choice(mine), True), (rng.choice(foreign), False)):
                cases.append(Case(text, f'Does it contain the word "{word}"?', f"Word: {word}\n{CONTAINS}", right))
    return cases


def short(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """A limit three to five words above the length, and one three to five below it."""
    cases: list[Case] = []
    for _, text in pairs:
        n, away = len(text.split()), rng.randint(3, 5)
        for most, right in ((n + away, True), (max(1, n - away), False)):
            cases.append(Case(text, f"Does it have at most {most} words?", f"Has it at most {most} words?", right))
    return cases


def comma(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """The sentence without its commas, and with one after its second word."""
    cases: list[Case] = []
    for _, text in pairs:
        words = text.replace(",", "").split()
        for made, right in ((words, True), ([words[0], words[1] + ",", *words[2:]], False)):
            cases.append(Case(" ".join(made), "Is it without a comma?", "Is it without a comma?", right))
    return cases


ABOUT, CONTAINS = "Is the sentence about the subject?", "Is the word in the sentence?"
VIOLIN, SNOW = "The violin sang through the hall.", "Snow covered the quiet roofs, and nobody was awake."
TASKS: dict[str, tuple[Task, list[tuple[str, str, str]]]] = {
    "about a subject": (
        about,
        [
            (VIOLIN, f"Subject: music\n{ABOUT}", "yes"),
            (VIOLIN, f"Subject: potatoes\n{ABOUT}", "no"),
            (SNOW, f"Subject: horses\n{ABOUT}", "no"),
            (SNOW, f"Subject: winter\n{ABOUT}", "yes"),
        ],
    ),
    "contains a word": (
        contains,
        [
            (VIOLIN, f"Word: violin\n{CONTAINS}", "yes"),
            (VIOLIN, f"Word: potato\n{CONTAINS}", "no"),
            (SNOW, f"Word: hurry\n{CONTAINS}", "no"),
            (SNOW, f"Word: roofs\n{CONTAINS}", "yes"),
        ],
    ),
    "at most n words": (
        short,
        [
            (VIOLIN, "Has it at most 10 words?", "yes"),
            (VIOLIN, "Has it at most 3 words?", "no"),
            (SNOW, "Has it at most 5 words?", "no"),
            (SNOW, "Has it at most 12 words?", "yes"),
        ],
    ),
    "without a comma": (
        comma,
        [
            (VIOLIN, "Is it without a comma?", "yes"),
            (SNOW, "Is it without a comma?", "no"),
            ("Rain, and wind.", "Is it without a comma?", "no"),
            ("Rain and wind.", "Is it without a comma?", "yes"),
        ],
    ),
}
"""The cases of each question, and its worked examples: sentence, line and answer."""


def sentences(path: str, subjects: Sequence[str]) -> list[tuple[str, str]]:
    """What the model itself writes about each subject, up to the first full stop."""
    allow_cpu_only()  # before transformers imports torchvision
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    made: list[tuple[str, str]] = []
    for start in range(0, len(subjects), 25):
        part = subjects[start : start + 25]
        chats = [[{"role": "user", "content": f"Write one sentence about {subject}."}] for subject in part]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        out = model.generate(**inputs, max_new_tokens=40, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        for subject, text in zip(part, tokenizer.batch_decode(out, skip_special_tokens=True), strict=True):
            first = text.strip().split(".")[0].strip().strip('"') + "."
            if len(first.split()) >= 4:
                made.append((subject, first))
    return made


def verdicts(path: str, cases: Sequence[Case], examples: Sequence[tuple[str, str, str]] | None) -> list[float]:
    """The judge's score of each case: as a chat, or after worked ``examples``."""
    model: dict[str, str] = {"path": path, "dtype": "float32"}
    rubric = "Sentence: {{ response }}\n{{ prompt }} Answer yes or no."
    if examples is not None:
        model["chat_template"] = "{{ messages[-1].content }}"
        shown = "".join(f"Sentence: {text}\n{line} {answer}\n\n" for text, line, answer in examples)
        rubric = shown + "Sentence: {{ response }}\n{{ prompt }}"
    answer = {"type": "yes_no", "floor": 0}  # every case has a score, also where another word is likelier than both
    judge = build(find("judge"), {"model": model, "rubric": rubric, "answer": answer, "cache": False})
    asked = [case.asked if examples is None else case.line for case in cases]
    samples = [
        Sample(Prompt(str(i), question), SampleId(0, i, 0, 0), text=case.text)
        for i, (case, question) in enumerate(zip(cases, asked, strict=True))
    ]
    return [float(value) for value in Caller(judge, 600).one(samples, Context()).total]


def row(name: str, form: str, scores: Sequence[float], right: Sequence[bool]) -> str:
    """A line of the table."""
    area = auc(scores, right)
    low, high = auc_interval(area, sum(right), len(right) - sum(right))
    middle = median(scores)
    agreed = sum((score > middle) == truth for score, truth in zip(scores, right, strict=True)) / len(right)
    shown = f"{area:.2f} | {low:.2f} to {high:.2f} | {agreed:.2f} | {sum(scores) / len(scores):.2f}"
    return f"| {name} | {form} | {len(right)} | {shown} | {'yes' if low > WORTH else 'no'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if missing := lacking(MODEL):
        sys.exit(missing)
    path = found(MODEL)
    subjects = mmrl.load("datasets", "instructions").SUBJECTS[: given.subjects]
    pairs = sentences(path, subjects)
    print(f"{len(pairs)} sentences of {len(subjects)}; the first: {pairs[0][1]}", flush=True)
    print("| question | asked | cases | AUC | 95 % interval | agreement | mean score | worth training on |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (task, examples) in TASKS.items():
        cases = task(pairs, random.Random(0))
        right = [case.right for case in cases]
        for form, shown in (("as a chat", None), ("worked examples", examples)):
            print(row(name, form, verdicts(path, cases, shown), right), flush=True)


if __name__ == "__main__":
    main()
