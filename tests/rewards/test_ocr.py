"""The words in a picture: the score's formula, where the words come from, and GOT-OCR2 with random weights."""

import functools
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find
from mmrl.rewards.ocr import edit_distance, likeness
from tests.support import asleep, tiny

allow_cpu_only()  # before transformers imports torchvision


@pytest.fixture(scope="module")
def got(tmp_path_factory):
    """GOT-OCR2 on 256 x 256 pixels, so that its patches are as many as the processor counts (256)."""
    from transformers import (
        GotOcr2Config,
        GotOcr2ForConditionalGeneration,
        GotOcr2ImageProcessor,
        GotOcr2Processor,
    )

    folder = tmp_path_factory.mktemp("got")
    words = tiny.tokenizer(special=["<img>", "</img>", "<imgpad>"])
    images = GotOcr2ImageProcessor(size={"height": 256, "width": 256})
    processor = GotOcr2Processor(images, words)
    torch.manual_seed(0)
    config = GotOcr2Config(
        vision_config={
            "hidden_size": 8,
            "output_channels": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 256,
            "patch_size": 4,
            "window_size": 8,
            "global_attn_indexes": [],
            "mlp_dim": 8,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(words),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        image_token_index=words.convert_tokens_to_ids("<imgpad>"),
        image_seq_length=256,
    )
    model = GotOcr2ForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.6)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def pictures(n):
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(60 * (i % 4), 60 * (i % 4) + 40, (40 + i, 60, 3), dtype=np.uint8))
        for i in range(n)
    ]


def asked(texts, metas=None):
    images = pictures(len(texts))
    metas = metas or [{}] * len(texts)
    return [
        Sample(Prompt(str(i), text, meta), SampleId(0, i, 0, 0), image)
        for i, (text, meta, image) in enumerate(zip(texts, metas, images, strict=True))
    ]


def test_the_edit_distance_is_levenshteins():
    @functools.cache
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    rng = np.random.default_rng(0)
    for _ in range(300):
        a, b = ("".join(rng.choice(list("abc"), rng.integers(0, 7))) for _ in range(2))
        assert edit_distance(a, b) == slow(a, b)


@pytest.mark.parametrize(
    ("read", "words", "value"),
    [
        ("Hello World", "Hello World", 1),
        ("hello\nworld", "Hello World", 1),
        ("so it says HELLO WORLD twice", "Hello World", 1),  # found anywhere
        ("Hellp", "Hello", 0.8),
        ("Hel", "Hello", 0.6),
        ("", "Hello", 0),
        ("quite other and long", "Hello", 0),  # never below
    ],
)
def test_the_score_is_flow_grpos(read, words, value):
    assert likeness(read, words) == pytest.approx(value)


def test_words_come_from_meta_or_from_quotes_and_none_fails(got):
    reward = build(find("ocr"), {"path": got, "max_tokens": 3}).call.__self__
    texts = ['a "Big Sign"', "a “Sale” sign", 'a "first" and "second"', 'a "quote"', "no words", 'an empty " " one']
    metas = [{}, {}, {}, {"text": "told"}, {}, {}]
    words = [reward._words(s) for s in asked(texts, metas)]
    assert words[:4] == ["Big Sign", "Sale", "first", "told"]
    answer = Caller(build(find("ocr"), {"path": got, "max_tokens": 3}), 60).one(asked(texts, metas), Context())
    assert np.isfinite(answer.total[:4]).all()
    assert np.isnan(answer.total[4:]).all()
    assert all('put them in double quotes, or in its meta as "text"' in answer.reasons[i] for i in (4, 5))


def test_what_is_read_is_the_librarys_and_a_batch_reads_as_one_by_one(got):
    from transformers import AutoProcessor, GotOcr2ForConditionalGeneration

    reward = build(find("ocr"), {"path": got, "max_tokens": 12}).call.__self__
    together = reward.read(pictures(3), Context())
    processor = AutoProcessor.from_pretrained(got)
    model = GotOcr2ForConditionalGeneration.from_pretrained(got).eval()
    for image, text in zip(pictures(3), together, strict=True):
        inputs = processor(image, return_tensors="pt")
        written = model.generate(
            **inputs, do_sample=False, tokenizer=processor.tokenizer, stop_strings="<|im_end|>", max_new_tokens=12
        )[0, inputs["input_ids"].shape[1] :]
        assert text == processor.decode(written, skip_special_tokens=True)
    assert len(set(together)) > 1  # it looks at the picture
    told = [{"text": text} for text in together]
    assert all(together)
    assert (
        Caller(build(find("ocr"), {"path": got, "max_tokens": 12}), 60).one(asked([""] * 3, told), Context()).total
        == [1] * 3
    )


def test_used_wrongly_it_says_the_edit(got, tmp_path):
    with pytest.raises(UserError, match=r"options\.max_tokens is 0; set it to 1 or more"):
        build(find("ocr"), {"path": got, "max_tokens": 0})
    with pytest.raises(UserError, match=r"options\.dtype is 'half'; set it to float32, bfloat16 or float16"):
        build(find("ocr"), {"path": got, "dtype": "half"})
    with pytest.raises(UserError, match=r"cannot load GOT-OCR2 from .*; set the reward's options\.path"):
        build(find("ocr"), {"path": str(tmp_path)})


def test_it_sleeps_whole_and_reads_the_same(got, monkeypatch):
    reward = build(find("ocr"), {"path": got, "max_tokens": 4}).sleeper
    asleep.scores_the_same(reward, lambda: reward.read(pictures(2), Context()), monkeypatch)


# -- PP-OCR ----------------------------------------------------------------------------------------------------------


def drawn(word, size):
    """Black on white, at a size that a small model draws."""
    picture = Image.new("RGB", (3 * size, size), "white")
    font = ImageFont.load_default(size=max(10, size // 3))
    ImageDraw.Draw(picture).text((4, size // 4), word, fill="black", font=font)
    return picture


@pytest.fixture(scope="module")
def rapid():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    return build(find("ocr"), {"engine": "rapidocr"})


@pytest.mark.parametrize("size", [32, 64, 192])
def test_rapidocr_reads_words_of_any_size(rapid, size):
    wanted = ["CAT", "Sale now", "hello world"]
    samples = [Sample(Prompt(w, f'a sign "{w}"'), SampleId(0, 0, 0, i), drawn(w, size)) for i, w in enumerate(wanted)]
    assert Caller(rapid, 60).one(samples, Context()).total == [1, 1, 1]
    other = [Sample(Prompt("x", 'a sign "window"'), SampleId(0, 0, 0, 0), drawn("CAT", size))]
    assert Caller(rapid, 60).one(other, Context()).total[0] < 0.4


def test_rapidocr_reads_nothing_in_an_empty_picture_and_red_is_not_blue(rapid):
    empty = Sample(Prompt("x", 'a sign "CAT"'), SampleId(0, 0, 0, 0), Image.new("RGB", (64, 64), "white"))
    assert Caller(rapid, 60).one([empty], Context()).total == [0]
    assert rapid.call.__self__.read([drawn("CAT", 64).convert("L")], Context()) == ["CAT"]


def test_rapidocr_used_wrongly_says_the_edit(monkeypatch):
    with pytest.raises(UserError, match=r"options\.engine is 'tesseract'; set it to got-ocr2 or rapidocr"):
        build(find("ocr"), {"engine": "tesseract"})
    with pytest.raises(UserError, match=r"options\.path: rapidocr has its networks in its package"):
        build(find("ocr"), {"engine": "rapidocr", "path": "somewhere"})
    with pytest.raises(UserError, match=r"options\.side is 8; give pixels"):
        build(find("ocr"), {"engine": "rapidocr", "side": 8})
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(UserError, match="run: mmrl fetch rapidocr"):
        build(find("ocr"), {"engine": "rapidocr"})
