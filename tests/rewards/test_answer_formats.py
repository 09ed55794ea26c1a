"""Answers in the forms that models and data write them: tags, thoughts, letters with text, one spelling."""

import itertools
import json
import random
import unicodedata

import pytest
import torch

import mmrl
from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.logging.rundir import RunDir
from mmrl.rewards.ocr import likeness
from mmrl.rewards.spelling import spelled
from mmrl.rewards.wire import decode_request, encode_request
from mmrl.training.evaluation import alike, constant
from tests.support import text as texts
from tests.support import tiny
from tests.support.tiny_diffusion import two_blocks

answer = mmrl.load("rewards", "answer")
ocr = mmrl.load("rewards", "ocr")
PLAIN = ("exact", "boxed")
"""Rewards that need no extra package and read words."""


def correct(reward, text, truth, part="correct", begun=""):
    sample = Sample(Prompt("p/1", "?", {"answer": truth}), SampleId(0, 0, 0, 0), text=text, begun=begun)
    return reward.score([sample], context=Context())[part][0]


@pytest.fixture(scope="module")
def rewards():
    return {name: getattr(answer, name)() for name in ("exact", "boxed", "number")}


WRAPPED = (
    "<think>{thought}</think><answer>{said}</answer>",
    "<think>\n{thought}\n</think>\n<answer>\n{said}\n</answer>",
    "{thought}</think>\n\n<answer> {said} </answer>",
    "<reasoning>{thought}</reasoning>\n<answer>{said}</answer>\n",
    "<THINK>{thought}</THINK> <Answer>{said}</Answer>",
    "<answer>{said}</answer>",
    "<think>{thought} <answer>{other}</answer></think><answer>{said}</answer>",
    "<answer>{other}</answer> no: <answer>{said}</answer>",
    "<answer>{said}</answer> and that is all",
    "<think>{thought}</think> So: <answer>{said}",
    "<think>{thought}</think>The answer is <|begin_of_box|>{said}<|end_of_box|>.",
    "<think>{thought}</think>\n<answer><|begin_of_box|>{said}<|end_of_box|></answer>",
)


@pytest.mark.sweep("answers in tags behind thoughts")
def test_an_answer_in_tags_is_read_by_every_verifier(rewards, sweep):
    draw = random.Random(0)
    words = ["B", "yes", "12", "-3", "Paris", "3/4", "1,234", "x+1", "left"]
    for _ in range(sweep.size(400, 20_000)):
        said, other = draw.sample(words, 2)
        thought = draw.choice(["t", "It is " + other, f"\\boxed{{{other}}}", "a\nb\n", f"{other}?"])
        text = draw.choice(WRAPPED).format(thought=thought, said=said, other=other)
        truth = draw.choice([said, f"<answer> {said} </answer>", f"<think>{other}</think><answer>{said}</answer>"])
        asked = PLAIN if not said.strip("-").replace("/", "").replace(",", "").isdigit() else (*PLAIN, "number")
        wrong = f"<answer>{other}</answer>"
        for name in asked:
            good = correct(rewards[name], text, truth) == 1.0
            bad = other.strip("-")[0].isdigit() or name != "number"
            sweep.check(good and not (bad and correct(rewards[name], text, wrong) == 1.0), (name, text, truth))
    sweep.done()


@pytest.mark.parametrize(
    ("options", "text", "right"),
    [
        ({"after": "<answer>"}, "<answer>B</answer>", True),
        ({"after": "<final>"}, "so <final> B </final>.", True),
        ({"after": "<final>"}, "so <final> B </final>, or <final>C</final>", False),
        ({"after": "[[", "before": "]]"}, "I choose [[B]] gladly", True),
        ({"after": "[[", "before": "]]"}, "I choose [[C]], not [B]", False),
        ({"before": "Explanation"}, "B\nExplanation: A is wrong", True),
        ({"after": "<answer>"}, "B", False),
        ({}, "<think>B", False),
    ],
)
@pytest.mark.parametrize("name", ["exact", "boxed"])
def test_marks_around_an_answer(name, options, text, right):
    if name == "boxed" and "<" not in options.get("after", ""):
        text = text.replace("B", "\\boxed{B}")
    assert correct(getattr(answer, name)(**options), text, "B") == (float(right) if options != {} else 0.0)


def test_an_empty_closing_mark_is_refused():
    with pytest.raises(UserError, match=r"options\.before"):
        answer.exact(before="")


LETTERS = (
    *("{L}. Paris", "({L}) Paris", "{L}) Paris", "({L})", "{L}", "{L}.", "{L}: Paris", "({L})Paris", "{L}. x = 5"),
    *("\\text{{{L}}}", "\\text{{({L}) Paris}}", "\\textbf{{({L})}}\\ 12", "\\mathrm{{{L}}}", "\\textbf{{{L}. }} 3/4"),
    *(
        "\\text{{Option {L}}}",
        "{L} \\text{{ (Paris)}}",
        "{L} - Paris",
        "{L} \u2013 Paris",
        "\\text{{choice }}({L})",
        "({L})\\ $5$",
    ),
)


@pytest.mark.sweep("letters of options with text")
def test_a_letter_with_its_text_is_the_letter(rewards, sweep):
    for form, letter in itertools.product(LETTERS, "ABCDEFGH"):
        box = ("\\boxed{", "\\boxed {", "\\fbox{", "\\framebox{")[ord(letter) % 4]
        text = box + form.format(L=letter) + "}"
        for truth in (letter, f"({letter})", f"\\text{{{letter}}}"):
            sweep.check(correct(rewards["boxed"], text, truth) == 1.0, (text, truth))
        other = chr(ord(letter) + 1)
        sweep.check(correct(rewards["boxed"], text, other) == 0.0, (text, other))
    for text in (
        "A. Paris, B. London",
        "A or B",
        "A, B",
        "(A) and (B)",
        "A:B",
        "A. B",
        "A: B = 3:4",
        "A = 3",
        "A - B",
        "A - 3",
        "A - x",
        "A (x)",
        "(A)x",
        "(A)(B)",
        "(A) = 5",
        "A 5",
        "A Paris",
        "options A",
        "A. or C.",
        "ABC",
    ):
        sweep.check(correct(rewards["boxed"], f"\\boxed{{{text}}}", "A") == 0.0, text)
    sweep.done()


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("\\text{No solution}", "No solution", True),
        ("\\text{No solution}", "no solution", True),
        ("\\text{no real solutions}", "No real solutions", True),
        ("True", "True", True),
        ("True", True, True),
        ("\\text{TRUE}", "true", True),
        ("False", "True", False),
        ("\\text{yes}", "Yes", True),
        ("ABC", "abc", False),
        ("X", "x", False),
        ("\\text{No solution}", "solution", False),
        ("Ab", "aB", False),
    ],
)
def test_words_in_a_box(rewards, text, truth, right):
    assert correct(rewards["boxed"], f"\\boxed{{{text}}}", truth) == float(right)


def test_format_sees_what_the_template_wrote():
    pattern = r"<think>\n.+</think>\s*<answer>.+</answer>"
    reward = answer.exact(pattern=pattern, pattern_weight=0.5)
    assert correct(reward, "t</think><answer>B</answer>", "B", "score", begun="<think>\n") == 1.0
    assert correct(reward, "t</think><answer>B</answer>", "B", "format") == 0.0


def test_what_a_template_writes_before_an_answer_is_part_of_a_sample(tmp_path):
    path = tiny.language_model(tmp_path, "qwen3")
    thinks = tiny.CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for template, begun in ((thinks, "<think>\n"), (tiny.CHATML, "")):
        recipe = texts.recipe(path, model={"path": str(path), "chat_template": template})
        pipeline = texts.chat.build(recipe, str(path), torch.device("cpu"))
        made = pipeline.samples(texts.sampled(pipeline, size=1), frozenset({"text"}))
        assert {sample.begun for sample in made} == {begun}
        sent = decode_request(encode_request(made, [[i] for i in range(len(made))], 0)[0]).samples
        assert {sample.begun for sample in sent} == {begun}


def test_a_reward_that_is_the_same_for_all_is_named():
    found = alike({"a": [0.0, 0.0], "a/format": [0.0, 0.0], "b": [0.0, 1.0], "b/format": [1.0, 1.0, float("nan")]})
    assert found == {"a": 0.0, "b/format": 1.0}
    assert alike({"a": [1.0], "source/x/reward": [0.0, 0.0]}) == {}
    assert "a is 0, b/format is 1 for all 2 held-out samples" in constant(found, 2)
    assert constant({}, 2) == ""


def test_a_run_names_a_constant_reward_once(tmp_path, capsys):
    (tmp_path / "flat.py").write_text("def score(samples, *, context):\n    return [0.5] * len(samples)\n")
    flat = f"eval.rewards=[{{name: {json.dumps(str(tmp_path / 'flat.py'))}, label: flat}}]"
    small = ["sampling.steps=4", "train.prompts_per_step=2", "train.micro_batch_size=2", "train.steps=1"]
    small += ["eval.every=1", "eval.samples=4", "eval.grid=1", f"model.path={two_blocks()}", flat]
    loaded = load_recipe(["shapes-draft"], small)
    with RunDir.create(tmp_path / "run", resume=False) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        Trainer(loaded, directory).begin(Stop(), resume=False)
    said = capsys.readouterr().err
    assert said.count("note: flat is 0.5 for all 4 held-out samples") == 1


SIGNS = ["Don't stop", "CAFÉ", "SALE", "Straße", "Zoë's", 'say "yes"', "2-for-1", "naïve 50%", "ÅNGSTRÖM"]  # fmt: skip
SIGNS += ["1/2 off"]


UNSEEN = [
    "\u200b",
    "\u00ad",
    "\u034f",
    "\u061c",
    "\u180e",
    "\u202a",
    "\u202e",
    "\u2066",
    "\u2069",
    "\u3164",
    "\ufe0f",
    "\U000e0041",
]


def encoded(text, draw):
    """``text`` as another writer or reader may encode it."""
    text = draw.choice([str, str.upper, str.lower, str.casefold])(text)
    text = unicodedata.normalize(draw.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)
    text = text.replace("'", draw.choice("'\u2019\u2018\u02bc\u00b4`\uff07"))
    text = text.replace('"', draw.choice('"\u201c\u201d\u201e\uff02'))
    text = text.replace("-", draw.choice("-\u2010\u2011\u2013\u2014\u2212\uff0d"))
    if draw.random() < 0.3:
        text = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    text = text.replace("/", draw.choice("/\u2044\u2215\uff0f"))
    at = draw.randint(0, len(text))
    return text[:at] + draw.choice(["", *UNSEEN]) + text[at:]


@pytest.mark.sweep("encodings of the words on a sign")
def test_words_are_compared_as_a_reader_sees_them(sweep):
    draw = random.Random(0)
    for _ in range(sweep.size(600, 50_000)):
        sign = draw.choice(SIGNS)
        one, other = encoded(sign, draw), encoded(sign, draw)
        bare = ocr._bare(one) == ocr._bare(other)
        sweep.check(bare and likeness(one, other) == 1.0, (one, other, ocr._bare(one), ocr._bare(other)))
        sweep.check(ocr._bare(one) != ocr._bare(encoded(sign[:-1] + "q", draw)), one)
    sweep.done()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ("Don't", "Don\u2019t"),
        ("CAFE\u0301", "CAFÉ"),
        ("\uff33\uff21\uff2c\uff25", "SALE"),
        ("Straße", "STRASSE"),
        ("\u00bd off", "1/2 off"),
        ("\u2039a\u203a", "'a'"),
        ("\u202aa\u202c", "a"),
    ],
)
def test_words_in_two_encodings(read, words):
    for one, other in ((read, words), (words, read)):
        assert likeness(one, other) == 1.0
        assert ocr._bare(one) == ocr._bare(other)
        assert correct(answer.exact(), one, other) == 1.0
    assert spelled("Ab", ignore_case=False) == "Ab"
