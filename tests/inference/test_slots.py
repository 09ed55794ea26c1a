"""Sampling in the process row by row: what a request gets depends on nothing but itself, and it is what ``sample``
draws."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.rollout_engine import AnswersAsItGoes, Request, Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from tests.support import midway_text, tiny
from tests.support.midway_text import LONGEST, asked
from tests.support.slots import arrived, settings
from tests.support.vlm import picture

allow_cpu_only()

KINDS = {
    "qwen3": {},
    "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}


def text(folder, *changes, **config):
    midway_text.write(folder)
    if config:
        tiny.language_model(folder / "other", "qwen2", sharp=0.1, **config)
        changes = (*changes, f"model.path={folder / 'other'}")
    return midway_text.make(folder, "sampling.batch_size=5", *changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return text(tmp_path_factory.mktemp("slots"))


def same(drawn, answers):
    """Whether answers are the rows that ``sample`` drew."""
    assert [list(answer.token_ids) for answer in answers] == drawn.spoken()
    assert [answer.finish != "stop" for answer in answers] == drawn.truncated.tolist()
    said = torch.tensor([p for answer in answers for p in answer.log_probs])
    torch.testing.assert_close(said, drawn.log_probs[drawn.action_mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_200_requests_in_any_order_get_what_sample_draws(run, tmp_path, kind):
    pipeline = (text(tmp_path, **KINDS[kind]) if KINDS[kind] else run).pipeline
    of = run if kind == "qwen3" else SimpleNamespace(prompts=run.prompts, pipeline=pipeline)
    slots, ids = asked(of, size=40, slots=[Slot(0, n, 0, run.prompts[n]) for n in range(5)])
    requests = pipeline.requests(slots, ids, 5)
    assert len(requests) == 200
    drawn = pipeline.sample(slots, ids, [], 5)
    assert len(set(drawn.responses)) > 3
    for seed in range(2):
        same(drawn, arrived(pipeline, requests, [settings(pipeline)] * 200, seed))
    assert taking(pipeline, requests[:2]) == (
        kind == "qwen3"
    )  # one with a window takes no more rows until all have ended


def taking(pipeline, requests):
    slots = pipeline.answering()
    ids = [slots.submit(request, settings(pipeline, min_new_tokens=LONGEST)) for request in requests]
    slots.ready(0.0)
    takes = slots._table.takes_more
    for id in ids:
        slots.cancel(id)
    assert slots._table is None
    return takes


def test_requests_with_settings_of_their_own_get_what_they_get_alone(run):
    pipeline, draw = run.pipeline, random.Random(3)
    slots, ids = asked(run, size=12)
    requests = pipeline.requests(slots, ids, 9)
    kinds = [
        settings(pipeline, temperature=0.0),
        settings(pipeline, top_p=0.8, top_k=20),
        settings(pipeline, repetition_penalty=1.7, min_p=0.01),
        settings(pipeline, min_new_tokens=6),
        settings(pipeline, stop=["a", "e"]),
        settings(pipeline, max_new_tokens=5, temperature=1.3),
        settings(pipeline, cut_after=3),
    ]
    how = [draw.choice(kinds) for _ in requests]
    among = arrived(pipeline, requests, how, 1)
    apart = set()
    for request, own, answer in zip(requests, how, among, strict=True):
        (alone,) = pipeline.answering().generate([request], own)
        assert (alone.token_ids, alone.finish) == (answer.token_ids, answer.finish)
        assert alone.log_probs == pytest.approx(answer.log_probs, abs=1e-5)
        assert len(answer.token_ids) <= (own.cut_after or own.max_new_tokens)
        apart.add(answer.finish)
    assert apart == {"stop", "length", "cut"}


@pytest.mark.parametrize(
    "changes",
    [["sampling.temperature=0.6"], ["sampling.top_k=9", "sampling.repetition_penalty=1.6"], ["sampling.stop=[a]"]],
)
def test_the_recipes_settings_mean_what_they_mean_to_sample(tmp_path, changes):
    made = text(tmp_path, *changes)
    slots, ids = asked(made)
    requests = made.pipeline.requests(slots, ids, 5)
    answers = made.pipeline.answering().generate(requests, settings(made.pipeline))
    same(made.pipeline.sample(slots, ids, [], 5), answers)


def test_a_response_goes_on_behind_its_first_tokens(run):
    """Each token has the number of its place, so that two parts are the whole."""
    slots, ids = asked(run)
    requests, how = run.pipeline.requests(slots, ids, 4), settings(run.pipeline)
    engine = run.pipeline.answering()
    whole = engine.generate(requests, how)
    first = engine.generate(requests, replace(how, cut_after=4))
    rest = [(n, replace(requests[n], partial=a.token_ids)) for n, a in enumerate(first) if a.finish == "cut"]
    assert len(rest) > 3
    for (n, request), answer in zip(rest, engine.generate([r for _, r in rest], how), strict=True):
        assert [*request.partial, *answer.token_ids] == list(whole[n].token_ids)
        assert answer.prompt_tokens == len(request.prompt_ids)
    (empty,) = engine.generate([replace(requests[0], partial=[5] * LONGEST)], how)
    assert (empty.token_ids, empty.finish) == ([], "length")


def test_what_is_cancelled_is_not_answered_and_changes_nothing(run):
    slots, ids = asked(run)
    requests, how = run.pipeline.requests(slots, ids, 4), settings(run.pipeline)
    engine = run.pipeline.answering()
    whole = engine.generate(requests, how)
    names = [engine.submit(request, how) for request in requests]
    found = dict(engine.ready(0.0))
    dropped = [id for id in names[::2] if id not in found]
    for id in dropped:
        engine.cancel(id)
        with pytest.raises(UserError, match=f"transformers has no request {id} under way: it was answered, cancelled"):
            engine.cancel(id)
    while more := dict(engine.ready(None)):
        found |= more
    assert set(found) == set(names) - set(dropped)
    for n, id in enumerate(names):
        assert id in dropped or found[id].token_ids == whole[n].token_ids
    assert engine.ready(None) == []
    with pytest.raises(UserError, match=f"no request {max(found)} under way"):
        engine.cancel(max(found))
    answered = engine.submit(replace(requests[0], partial=[5] * LONGEST), how)
    engine.cancel(answered)
    assert engine.ready(None) == []


def test_new_weights_do_not_come_to_what_is_under_way(run):
    pipeline = run.pipeline
    engine = pipeline.answering()
    assert isinstance(engine, AnswersAsItGoes)
    (request,) = pipeline.requests(*asked(run, size=1, slots=[Slot(0, 0, 0, run.prompts[0])]), 4)
    pipeline.sync(SimpleNamespace(tag="old"))
    id = engine.submit(request, settings(pipeline))
    pipeline.sync(SimpleNamespace(tag="old"))
    said = r"transformers has 1 requests under way \(step 0, slot 0, .*\): take their answers \(ready\) or cancel them"
    with pytest.raises(UserError, match=said + " before new weights come"):
        pipeline.sync(SimpleNamespace(tag="new"))
    with pytest.raises(UserError, match=said + " before it generates"):
        engine.generate([request], settings(pipeline))
    engine.cancel(id)
    pipeline.sync(SimpleNamespace(tag="new"))


def test_a_request_that_cannot_be_answered_ends_none_and_a_wrong_answer_ends_all(run, monkeypatch):
    engine, how = run.pipeline.answering(), settings(run.pipeline)
    first = engine.submit(Request([5, 6, 7], "", seed=1), how)
    with pytest.raises(UserError, match=r"1 of 1 prompts do not fit the engine's context of 256 tokens"):
        engine.submit(Request([5] * 256, "", seed=1), how)
    assert [id for id, _ in engine.ready(None)] == [first]
    for n in range(4):
        engine.submit(Request([5, 6, 7], "", seed=n, name=f"row {n}"), replace(how, max_new_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(run.pipeline.policy.lm_head, "forward", lambda x: torch.full((len(x), 1, 259), torch.nan))
        with pytest.raises(
            UserError, match=r"the logits that token 1 of a response was drawn from are not finite \(row 0\)"
        ):
            engine.ready(None)
    assert engine.ready(None) == []
    (again,) = engine.generate([Request([5, 6, 7], "", seed=1)], how)
    assert again.token_ids


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_pictures_of_a_request_are_its_own(kind, tmp_path):
    pytest.importorskip("torchvision")
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    path = tiny.vision_model(tmp_path / kind, kind)
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "pipeline": "vlm/chat",
            "model": {"path": str(path)},
            "data": {"name": "scenes"},
            "sampling": {"max_new_tokens": 10, "batch_size": 3},
            "rewards": [{"name": "answer:exact"}],
            "algorithm": {"type": "grpo", "kl_coef": 0.0},
            "train": {"steps": 1, "prompts_per_step": 3, "group_size": 2, "micro_batch_size": 8},
        }
    )
    pipeline = mmrl.load("pipelines", "vlm/chat").build(recipe, str(path), torch.device("cpu"))
    prompts = [
        Prompt("words", "No picture, and a long text so that others are padded."),
        Prompt("two", "<image> or <image>?", media=(picture(40, 40, 1), picture(60, 40, 2))),
        Prompt("turned", "<image> or <image>?", media=(picture(60, 40, 2), picture(40, 40, 1))),
        Prompt("wide", "<image>What colour is it?", media=(picture(90, 40, 2),)),
    ]
    slots = [Slot(0, i, 0, prompt) for i, prompt in enumerate(prompts) for _ in range(4)]
    ids = [SampleId(0, slot.index, 0, n % 4) for n, slot in enumerate(slots)]
    pipeline.encode(slots)
    requests = pipeline.requests(slots, ids, 3)
    how = [settings(pipeline)] * len(requests)
    answers = arrived(pipeline, requests, how, 1)
    for row in range(len(slots)):
        same(pipeline.sample(slots[row : row + 1], ids[row : row + 1], [], 3), [answers[row]])
    part = replace(requests[6], partial=answers[6].token_ids[:4])
    (rest,) = pipeline.answering().generate([part], how[0])
    assert [*part.partial, *rest.token_ids] == list(answers[6].token_ids)


def test_an_engine_that_cannot_is_left_as_it_is(run, monkeypatch):
    monkeypatch.setattr(run.pipeline, "engine", object())
    assert run.pipeline.answering() is None
    assert Settings(3) == Settings(3)
