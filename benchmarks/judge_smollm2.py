"""SmolLM2-135M-Instruct as a generative judge: of which questions are its verdicts better than chance?

    mmrl fetch smollm2-135m-instruct
    python benchmarks/judge_smollm2.py

It writes a sentence about each of a hundred subjects. Then it is asked four questions about each sentence, half of them
with the answer no, whose truth a program knows: whether the sentence is about a subject, contains a word, has at most
so many words, and contains no comma. Its score is ``P(yes) / (P(yes) + P(no))`` of its next token. The table has the
area under the ROC curve (chance: 0.5) with a 95 % interval, and the agreement at the score that splits the cases in
equal halves, which takes a bias to yes or no away. A question is worth training on where the interval lies above 0.7.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

import mmrl
from mmrl.judge.statistics import auc, auc_interval
from mmrl.packages.places import found
from mmrl.rewards.calling import Caller
from mmrl.rewards.contract import Context
from mmrl.rewards.loading import build, find
from mmrl.trajectory import Prompt, Sample, SampleId

MODEL = "package:smollm2-135m-instruct"
WORTH = 0.7
"""Of the lower end of an interval: below it, most of what a policy would follow is noise."""


@dataclass(frozen=True)
class Case:
    """A sentence, what the judge is asked about it, and whether yes is right."""

    text: str
    asked: str
    right: bool


Task = Callable[[Sequence[tuple[str, str]], random.Random], list[Case]]
"""Makes the cases from subjects and the sentences about them."""


def about(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """Another subject of the list is the wrong one; sentences that name it are left out."""
    cases: list[Case] = []
    for subject, text in pairs:
        others = [other for other, _ in pairs if other[:-1] not in text.lower() and other != subject]
        if subject[:-1] in text.lower():
            cases += [
                Case(text, f"Is it about {subject}?", True),
                Case(text, f"Is it about {rng.choice(others)}?", False),
            ]
    return cases


def contains(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """A word of the sentence, and one of another sentence that is not in this one."""
    words = [sorted({w.strip(".,!?'\"").lower() for w in text.split()} - {""}) for _, text in pairs]
    cases: list[Case] = []
    for (_, text), own in zip(pairs, words, strict=True):
        foreign = [w for other in words for w in other if w not in own and len(w) > 3]
        mine = [w for w in own if len(w) > 3]
        if mine and foreign:
            cases.append(Case(text, f'Does it contain the word "{rng.choice(mine)}"?', True))
            cases.append(Case(text, f'Does it contain the word "{rng.choice(foreign)}"?', False))
    return cases


def short(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """A limit three to five words above the length, and one three to five below it."""
    cases: list[Case] = []
    for _, text in pairs:
        n, away = len(text.split()), rng.randint(3, 5)
        cases.append(Case(text, f"Does it have at most {n + away} words?", True))
        cases.append(Case(text, f"Does it have at most {max(1, n - away)} words?", False))
    return cases


def comma(pairs: Sequence[tuple[str, str]], rng: random.Random) -> list[Case]:
    """The sentence without its commas, and with one after its second word."""
    cases: list[Case] = []
    for _, text in pairs:
        words = text.replace(",", "").split()
        cases.append(Case(" ".join(words), "Is it without a comma?", True))
        cases.append(Case(" ".join([*words[:1], words[1] + ",", *words[2:]]), "Is it without a comma?", False))
    return cases


TASKS: dict[str, Task] = {"about a subject": about, "contains a word": contains, "at most n words": short}
TASKS["without a comma"] = comma


def sentences(path: str, subjects: Sequence[str]) -> list[tuple[str, str]]:
    """What the model itself writes about each subject, up to the first full stop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
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


def verdicts(path: str, cases: Sequence[Case]) -> list[float]:
    """The judge's score of each case."""
    rubric = "Sentence: {{ response }}\n{{ prompt }} Answer yes or no."
    judge = build(find("judge"), {"model": path, "rubric": rubric, "answer": {"type": "yes_no"}, "cache": False})
    samples = [Sample(Prompt(str(i), case.asked), SampleId(0, i, 0, 0), text=case.text) for i, case in enumerate(cases)]
    return [float(value) for value in Caller(judge, 600).one(samples, Context()).total]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = found(MODEL)
    subjects = mmrl.load("datasets", "instructions").SUBJECTS[: given.subjects]
    pairs = sentences(path, subjects)
    print(f"{len(pairs)} sentences of {len(subjects)}; the first: {pairs[0][1]}", flush=True)
    print("| question | cases | AUC | 95 % interval | agreement | mean score | worth training on |")
    print("|---|---|---|---|---|---|---|")
    for name, task in TASKS.items():
        cases = task(pairs, random.Random(0))
        scores, right = verdicts(path, cases), [case.right for case in cases]
        area = auc(scores, right)
        low, high = auc_interval(area, sum(right), len(right) - sum(right))
        middle = median(scores)
        agreed = sum((score > middle) == truth for score, truth in zip(scores, right, strict=True)) / len(cases)
        worth = "yes" if low > WORTH else "no"
        shown = f"{area:.2f} | {low:.2f} to {high:.2f} | {agreed:.2f} | {sum(scores) / len(scores):.2f} | {worth}"
        print(f"| {name} | {len(cases)} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
