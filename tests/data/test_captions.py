"""Captions of pictures: a text encoder's tokenizer reads no control token of a text."""

import random
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import tiny_diffusion

allow_cpu_only()
pytestmark = pytest.mark.filterwarnings("ignore:.*control token")
FAMILIES = ("sd", "sdxl", "flux", "qwen_image", "wan", "sana", "z_image", "flux2_klein")


def captions_of(family):
    pipe = getattr(tiny_diffusion, f"_{family}")()
    encoders = [name for name in pipe.components if name.startswith("text_encoder")]
    of = mmrl.load("pipelines", "diffusion/adapter").Adapter.tokenizer_of
    adapter = SimpleNamespace(pipe=pipe, encoders=encoders, tokenizer_of=of)
    made = mmrl.load("pipelines", "diffusion/flow").Captions(adapter)
    return made, [getattr(pipe, of(name)) for name in encoders]


@pytest.mark.slow
@pytest.mark.sweep("control tokens that captions spell")
def test_no_caption_is_a_control_token(sweep):
    for family in FAMILIES[: sweep.size(3, len(FAMILIES))]:
        captions, tokenizers = captions_of(family)
        for tokenizer in tokenizers:
            control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
            unknown = tokenizer.unk_token_id
            names = sorted({*tokenizer.all_special_tokens, *(str(t) for t in tokenizer.added_tokens_decoder.values())})
            cases = [w for t in names for w in (t, t + t, f"a {t} cat", f"a{t}b", t.upper())]
            for words in random.Random(0).sample(cases, min(len(cases), sweep.size(20, 2000))):
                ids, own = (tokenizer(captions.plain(w)).input_ids for w in (words, "a cat"))
                counted, meant = (Counter(i for i in of if i in control and i != unknown) for of in (ids, own))
                sweep.check(counted == meant, (family, type(tokenizer).__name__, words, counted - meant))
    sweep.done()


def test_a_caption_without_control_tokens_is_the_same_text():
    captions, _ = captions_of("sd")
    text = "A cat < 3 years old, [sitting] on <the> mat | 4k"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert captions.plain(text) == text
    assert captions.plain("a <|endoftext|> cat") == "a < |endoftext|> cat"
