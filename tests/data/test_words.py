"""The words data set: what is held out, what is drawn, and that the reader of the proof reads it."""

import numpy as np
import pytest

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample, SampleId
from mmrl.rewards.ocr import OCR

data = mmrl.load("datasets", "words")


def test_train_and_heldout_share_no_word_and_cover_all():
    train, held_out, every = ([p.meta["text"] for p in data.prompts(s)] for s in ("train", "heldout", "all"))
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(every)
    assert len(set(every)) == 21 * 5 * 21
    assert {len({word[k] for word in held_out}) for k in (0, 2)} == {21}  # each letter at each end


def test_a_caption_has_its_word_in_quotes_and_in_its_meta():
    first = data.prompts("heldout", count=3)[0]
    assert first.text == f'a sign that says "{first.meta["text"]}"'
    assert [p.id for p in data.prompts("heldout", count=3)] == [p.id for p in data.prompts("heldout")[:3]]


def test_one_seed_is_one_picture_and_words_differ():
    cat, cot = data.prompt("CAT"), data.prompt("COT")
    assert data.picture(cat, 1).tobytes() == data.picture(cat, 1).tobytes()
    assert data.picture(cat, 1).tobytes() != data.picture(cat, 2).tobytes()
    assert data.picture(cat, 1).size == data.picture(cot, 1).size == (data.WIDTH, data.HEIGHT)
    pixels = np.asarray(data.picture(data.prompt("WOW"), 3)).astype(int).sum(-1)
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert np.ptp(edge) < 60  # the widest word has room


def test_used_wrongly_it_says_the_edit():
    with pytest.raises(UserError, match=r"split is 'test'; the data set words has 'train', 'heldout' and 'all'"):
        data.prompts("test")
    with pytest.raises(UserError, match=r"count is 500; set it to 1 to 438, or remove it"):
        data.prompts("heldout", count=500)


def test_pp_ocr_reads_drawn_words_and_counts_only_the_word_alone():
    pytest.importorskip("rapidocr")
    pytest.importorskip("onnxruntime")
    reward = OCR(engine="rapidocr", side=96)
    prompts = [data.prompt(word) for word in ("DOD", "XIX", "MOM", "QUZ", "JIL", "TAV")]
    samples = [Sample(p, SampleId(0, i, 0, 0), data.picture(p, i)) for i, p in enumerate(prompts)]
    rows = reward.score(samples, context=Context())
    assert rows["correct"] == rows["score"] == [1.0] * 6
    others = [Sample(data.prompt("OD"), s.id, s.image) for s in samples[:1]]  # within DOD
    assert reward.score(others, context=Context()) == {"score": [1.0], "correct": [0.0]}
