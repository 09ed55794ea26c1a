"""The small vision-language model and its judge: how they are made, and that what is shipped is what the logs say."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()
pytest.importorskip("torchvision")

from tools.make_models import judges, scenes_vl, vlm_training  # noqa: E402

scenes = mmrl.load("datasets", "scenes")
shapes = mmrl.load("datasets", "shapes")
MODELS = Path(__file__).resolve().parents[2] / "pipelines" / "vlm" / "models"


@pytest.fixture(scope="module")
def examples():
    drawn = scenes.prompts("train", questions=scenes_vl.QUESTIONS, size=60)
    clips = scenes_vl.from_clips(6, random.Random(0), described=True)
    return [*scenes_vl.from_scenes(drawn, described=True, untold=0.5), *clips]


@pytest.fixture(scope="module")
def small(examples):
    torch.manual_seed(0)
    return vlm_training.build(scenes_vl.texts_of(examples))


def test_a_slip_is_an_answer_of_its_kind_and_never_the_truth():
    for p in scenes.prompts("train", questions=scenes_vl.QUESTIONS, size=500):
        slipped = scenes_vl.slip(p.meta["answer"], p)
        answers = {c.answer for c in scenes.compositions(p.meta["kind"])}
        assert slipped != p.meta["answer"]
        assert slipped in answers
        if p.meta["kind"] == "colour":
            others = {colour for colour, *_ in p.meta["objects"][0]} - {p.meta["answer"]}
            assert not others or slipped in others
    assert {scenes_vl.slip(way, None) for way in ("up", "down", "left", "right")} == {"up", "down", "left", "right"}


def test_careless_answers_slip_as_often_as_asked():
    prompts = scenes.prompts("train", questions=scenes_vl.QUESTIONS, size=400)
    made = scenes_vl.careless(prompts, 40, 0.55, random.Random(0))
    assert len(made) == 440
    wrong = np.mean([e.turns[0][1] != p.meta["answer"] for e, p in zip(made, prompts, strict=False)])
    assert abs(wrong - 0.55) < 0.1
    assert sum(bool(e.frames) for e in made) == 40


def test_a_batch_learns_answers_and_their_ends_alone(small, examples):
    _, processor = small
    some = [examples[1], examples[0], examples[-1]]
    inputs, labels = vlm_training.batch(processor, some)
    for row, e in zip(labels, some, strict=True):
        text = processor.tokenizer.decode(row[row >= 0])
        assert text == "".join(f"{answer}<|im_end|>" for _, answer in e.turns)
    asked = vlm_training.prompt_inputs(processor, some)["input_ids"]
    assert processor.tokenizer.decode(asked[0]).endswith("<|im_start|>assistant\n")
    assert set(inputs) >= {"pixel_values", "pixel_values_videos"}


def test_answers_to_judge_are_labelled_by_the_truth():
    prompts = scenes.prompts("train", questions=scenes_vl.QUESTIONS, size=200)
    made = judges.about_answers(prompts, random.Random(0))
    verdicts = []
    for p, e in zip([p for p in prompts for _ in range(2)], made, strict=True):
        ((asked, written),) = e.turns
        claim = asked.removesuffix(f". {p.text.replace('<image>', '')}")
        verdict = claim == p.meta["answer"]
        assert written == f"{p.meta['answer']} {claim}\n{int(verdict)}"
        verdicts.append(verdict)
    assert 0.4 < np.mean(verdicts) < 0.6


def test_captions_to_judge_are_labelled_by_the_pixels():
    captions = judges.Captions(shapes.prompts("train", 0, 0))
    rng = random.Random(0)
    drawn = [(p, shapes.draw(shapes.scene(p, rng))) for p in (captions.any(rng) for _ in range(60))]
    made = judges.about_captions(drawn, captions, rng)
    first, others = [], []
    for (p, image), e in zip(drawn, made, strict=True):
        *asked, (describe, seen) = e.turns
        own = f"Does the picture show {p.text}?"
        said = dict(asked)
        assert e.images == [image]
        assert len(said) == len(asked)
        assert said.pop(own) == "yes"  # its own caption is true of what is drawn
        others += said.values()
        first.append(asked[0][0] == own)
        words = seen.split()
        assert (describe, words[0] in shapes.COLOURS, words[1] in shapes.KINDS) == (scenes_vl.DESCRIBE, True, True)
    assert len(others) > 2.5 * len(made)
    assert 0.8 < np.mean([word == "no" for word in others]) < 1  # an object at the left may also be at the top
    assert 0.6 < np.mean(first) < 1


def test_captions_near_to_one_differ_in_a_single_thing():
    captions, rng = judges.Captions(shapes.prompts("train", 0, 0)), random.Random(0)
    for p in [*captions.by_task["count"], *captions.by_task["side"]]:
        for near in captions.near(p, rng):
            (mine,), (other,) = p.meta["objects"], near.meta["objects"]
            differs = [mine[key] != other[key] for key in ("colour", "kind", "count")]
            assert sum(differs) + (p.meta.get("side") != near.meta.get("side")) == 1
            assert near.meta["task"] == p.meta["task"]


def test_the_verdict_is_found_in_every_answer():
    wanted = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 1, 1]]).bool()
    first = [[0, 1, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 1, 0]]
    before_end = [[0, 1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1, 0]]
    third = [[0, 0, 0, 0, 0, 0, 0, 1], [0] * 8]
    for which, there in ((0, first), (-2, before_end), (2, third)):
        assert vlm_training.token_of_answers(wanted, which).int().tolist() == there


def test_training_lowers_the_loss_and_vision_learns_what_tokens_show(small, examples):
    model, processor = small
    rows = []
    torch.manual_seed(0)
    scenes_vl.train_vision(model, processor, 0.12, lambda **row: rows.append(row), every=5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    losses = []
    vlm_training.train(
        model, processor, examples * 6, 0.4, 2e-3, lambda **row: losses.append(row["loss"]), dict, every=5
    )
    assert losses[-1] < losses[0] - 0.5


def shipped(name):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = MODELS / name
    assert sum(f.stat().st_size for f in folder.iterdir()) < 8e6
    assert [f.suffix for f in folder.iterdir() if f.stat().st_size > 1e5] == [".safetensors"]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder), log


def near(measured, logged, n):
    """Within four standard deviations of a share measured on ``n``."""
    return abs(measured - logged) <= 4 * (logged * (1 - logged) / n) ** 0.5 + 1e-9


def test_the_shipped_model_answers_as_its_log_says():
    model, processor, log = shipped("scenes-vl")
    assert log[0]["command"].startswith("python -m mmrl.pipelines.vlm.pretrain")
    asked = list(scenes_vl.from_scenes(scenes.prompts("heldout", questions=scenes_vl.QUESTIONS, size=200)))
    chances, greedy = scenes_vl.accuracy(model, processor, asked)
    assert near(chances.mean(), log[-1]["sampled"], 200)
    assert near(greedy.mean(), log[-1]["greedy"], 200)
    clips, _ = scenes_vl.accuracy(model, processor, list(scenes_vl.from_clips(40, random.Random(2), "heldout")))
    assert near(clips.mean(), log[-1]["clips"], 40)


def test_the_shipped_judge_of_answers_agrees_with_the_truth_as_its_log_says():
    answerer, processor, _ = shipped("scenes-vl")
    judge, _, log = shipped("scenes-judge")
    assert log[0]["command"].startswith("python -m mmrl.pipelines.vlm.pretrain_judge")
    torch.manual_seed(0)
    asked = scenes.prompts("heldout", questions=scenes_vl.QUESTIONS, size=200)
    found = judges.agreement(judge, processor, judges.answered(answerer, processor, asked))
    logged = np.mean([log[-1][f"{kind}/agreement"] for kind in scenes_vl.QUESTIONS])
    assert near(found["agreement"], logged, 200)


def test_the_shipped_judge_of_captions_tells_true_from_false_on_drawn_pictures():
    judge, processor, log = shipped("shapes-judge")
    assert log[0]["command"].startswith("python -m mmrl.pipelines.vlm.pretrain_judge")
    captions = judges.Captions(shapes.prompts("heldout", 0, 0))
    rng = random.Random(0)
    for task in captions.by_task:
        drawn = [(p, shapes.draw(shapes.scene(p, rng))) for p in rng.choices(captions.by_task[task], k=60)]
        made = judges.about_captions(drawn, captions, rng)
        asked = [vlm_training.Example([turn], e.images) for e in made for turn in e.turns[:-1]]
        assert judges.agreement(judge, processor, asked)["auc"] > 0.8, task
