"""The scenes data set: answers are true of the pixels, splits are disjoint, a question is the same when asked again."""

import collections
import io
import itertools

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

import mmrl
from mmrl.core.errors import UserError

scenes = mmrl.load("datasets", "scenes")
shapes = mmrl.load("datasets", "shapes")
verifier = mmrl.load("rewards", "shapes")


def pictures(prompt):
    return [Image.open(io.BytesIO(m.data)).convert("RGB") for m in prompt.media]


def seen(image):
    """Objects in the pixels alone, ``(colour, kind, x, y)``: cut out and named by the verifier of the shapes reward."""
    shown = np.abs(np.asarray(image, float) - shapes.BACKGROUND).sum(-1) > 12
    found = []
    for rows, columns in ndimage.find_objects(ndimage.label(shown, np.ones((3, 3)))[0]):
        alone = Image.new("RGB", (verifier.SIZE, verifier.SIZE), shapes.BACKGROUND)
        alone.paste(image.crop((columns.start, rows.start, columns.stop, rows.stop)), (8, 8))
        ((f,), _, _) = verifier.objects_in(alone, shapes.COLOURS, shapes.BACKGROUND)
        colour = min(shapes.COLOURS, key=lambda c, f=f: np.linalg.norm(f.rgb - shapes.COLOURS[c]))
        kind = max(f.overlaps, key=f.overlaps.__getitem__)
        found.append((colour, kind, (columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2))
    return found


def answer(prompt):
    """The answer, worked out from the pixels and the words of the question."""
    objects = [seen(image) for image in pictures(prompt)]
    words = prompt.text.replace("<image>", "").strip("?").replace(",", "").split()
    match prompt.meta["kind"]:
        case "colour":
            return next(c for c, k, *_ in objects[0] if k == words[-1])
        case "shape":
            return next(k for c, k, *_ in objects[0] if c == words[-2])
        case "count":
            return scenes.NUMBERS[sum(words[2].startswith(k) for _, k, *_ in objects[0])]
        case "side":
            ((_, _, x, y),) = objects[0]
            dx, dy = x - pictures(prompt)[0].width / 2, y - pictures(prompt)[0].height / 2
            return ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else "top" if dy < 0 else "bottom"
        case "relation":
            (a,) = [o for o in objects[0] if [o[0], o[1]] == words[3:5]]
            (b,) = [o for o in objects[0] if [o[0], o[1]] == words[-2:]]
            return towards(a, b)
        case "thing":
            (middle,) = [o for o in objects[0] if [o[0], o[1]] == words[-2:]]
            (found,) = [o for o in objects[0] if o is not middle and towards(o, middle) == words[2]]
            return " ".join(found[:2])
        case "more":
            first, second = (sum(words[-1].startswith(k) for _, k, *_ in o) for o in objects)
            assert first != second
            return "first" if first > second else "second"


def towards(a, b):
    dx, dy = a[2] - b[2], a[3] - b[3]
    return ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else "above" if dy < 0 else "below"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("question", scenes.QUESTIONS)
def test_answers_are_true_of_the_pixels(question, split):
    for prompt in scenes.prompts(split, questions=[question])[:30]:
        assert prompt.meta["kind"] == question
        assert answer(prompt) == prompt.meta["answer"], prompt


def test_objects_in_meta_are_those_in_the_pixels():
    for prompt in scenes.prompts("train")[:70]:
        for image, told in zip(pictures(prompt), prompt.meta["objects"], strict=True):
            found = sorted(seen(image))
            assert [f[:2] for f in found] == sorted((c, k) for c, k, *_ in told)
            assert all(0 < x < 1 and 0 < y < 1 for *_, x, y in told)
        assert prompt.text.count("<image>") == len(prompt.media)


def test_a_question_is_the_same_whenever_it_is_asked():
    a, b, other = scenes.prompts("train"), scenes.prompts("train", size=200_000), scenes.prompts("train", seed=1)
    assert a[123] == b[123] == a[123 - len(a)] == a[100:130][23]
    assert a[123].text == other[123].text
    assert a[123].media != other[123].media
    assert len({p.media for p in a[:140]}) == 140
    assert len(b) == 200_000
    with pytest.raises(IndexError):
        a[len(a)]


def test_splits_share_no_composition_and_every_answer_occurs_in_both():
    for question in scenes.QUESTIONS:
        split = {s: scenes._of_split(question, s == "heldout") for s in ("train", "heldout")}
        keys = {s: {c.key for c in found} for s, found in split.items()}
        assert not keys["train"] & keys["heldout"]
        assert len(keys["train"]) + len(keys["heldout"]) == len(scenes.compositions(question))
        assert 0.12 < len(keys["heldout"]) / len(scenes.compositions(question)) < 0.28
        assert {c.answer for c in split["train"]} == {c.answer for c in split["heldout"]}


def test_no_answer_can_be_had_without_looking():
    """The commonest answer to a kind of question is far from always right."""
    most = {"colour": 0.35, "shape": 0.4, "count": 0.5, "side": 0.45, "relation": 0.4, "thing": 0.15, "more": 0.6}
    for question in scenes.QUESTIONS:
        asked = list(itertools.islice(itertools.cycle(scenes._of_split(question, True)), 200))
        ((_, times),) = collections.Counter(c.answer for c in asked).most_common(1)
        assert times / 200 <= most[question]
        for c, prompt in zip(asked, scenes.prompts("heldout", questions=[question])[:3], strict=False):
            assert prompt.meta["answer"] == c.answer


def test_pictures_come_in_several_sizes_and_several_to_a_prompt():
    prompts = scenes.prompts("train")[:140]
    sizes = {image.size for p in prompts for image in pictures(p)}
    assert sizes == set(scenes.SIZES)
    assert {len(p.media) for p in prompts} == {1, 2}


def test_a_picture_put_together_of_tiles_is_the_picture():
    """A shape that lies across a seam is drawn as ``shapes.draw`` draws it: one component, of the same area."""
    alone = shapes.draw([shapes.Shape("red", "circle", 16.0, 16.0, 6.0)])
    across = scenes.render([shapes.Shape("red", "circle", 32.0, 20.0, 6.0)], (72, 40))
    assert across.size == (72, 40)
    away = np.abs(np.asarray(across, float) - shapes.BACKGROUND).sum(-1)
    assert ndimage.label(away > 60)[1] == 1
    assert np.asarray(across, float)[14:26, 26:38].sum() == np.asarray(alone, float)[10:22, 10:22].sum()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "test"}, "'train' and 'heldout'"),
        ({"questions": ["colours"]}, "colour, shape"),
        ({"questions": "colour"}, "a list"),
        ({"questions": []}, "a list"),
        ({"size": 0}, "1 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        scenes.prompts(**options)
