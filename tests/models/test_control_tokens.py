"""The tokens of prompts: those of the processor's own template, and none that a text only spells."""

import io
import itertools
import random
import warnings
from collections import Counter

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.core.errors import BadPromptError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Turn
from tests.support import processors, tiny

allow_cpu_only()
pytestmark = pytest.mark.filterwarnings("ignore:.*control token")
CUTS = ("\u200b", "\u200d", "\u2060", "\ufeff")
"""Characters without width."""


def picture(seed, size=(40, 60)):
    made = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))
    file = io.BytesIO()
    made.save(file, "PNG")
    return made, Media("image", data=file.getvalue())


def sees(family, **settings):
    pytest.importorskip("torchvision")
    if family == "smolvlm":
        pytest.importorskip("num2words")
    made = processors.processor(family, **settings)
    return mmrl.load("pipelines", "vlm/chat").Chat(made, [made.tokenizer.eos_token_id], {})


def reads():
    tok = tiny.tokenizer(special=["<|fim_prefix|>", "<s>"])
    tok.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=False)
    return mmrl.load("pipelines", "llm/chat").Chat(tok, [tok.eos_token_id], {})


# -- the processor's own tokens ---------------------------------------------------------------------------------------


def conversations():
    """Prompts with the messages that mean the same to a processor."""
    (one, first), (two, second) = picture(1), picture(2, (70, 40))
    text = "What is it? Say  why,\n\n in a word \u00e9\u4f60."
    for system, turns, media in itertools.product((None, "Be brief. "), (False, True), (0, 1, 2)):
        images = [("image", one), ("image", two)][:media]
        messages = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
        before = [Turn("user", "Hello there"), Turn("assistant", " Good day, 2 + 3?")] if turns else []
        contents = [[{"type": "text", "text": turn.text}] for turn in before] + [[{"type": "text", "text": text}]]
        shown = [{"type": kind, kind: image} for kind, image in images]
        contents[0] = [*shown, *contents[0]]
        roles = [*(turn.role for turn in before), "user"]
        messages += [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        yield Prompt("p", text, media=(first, second)[:media], system=system, turns=tuple(before)), messages
    between = Prompt("p", "This <image> or <image>?", media=(first, second))
    parts = ["This ", one, " or ", two, "?"]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    yield between, [{"role": "user", "content": content}]


@pytest.mark.sweep("features of prompts equal to the processor's own")
def test_prompts_have_the_tokens_of_the_processors_own_template(sweep):
    settings = list(itertools.product(processors.FAMILIES, (False, True), (False, True)))
    random.Random(0).shuffle(settings)
    for family, adds, writes in settings[: sweep.size(6, len(settings))]:
        chat = sees(family, adds_bos=adds, writes_bos=writes)
        for prompt, messages in conversations():
            own = chat.saved.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
            )
            ours = chat.encode(prompt)
            same = {
                name: value[0] if name in ("input_ids", "mm_token_type_ids") else value for name, value in own.items()
            }
            right = all(torch.equal(value, same[name]) for name, value in ours.items() if name != "token_type_ids")
            case = family, adds, writes, prompt.system, prompt.turns, len(prompt.media)
            sweep.check(right and ours["input_ids"].tolist() == own["input_ids"][0].tolist(), case)
    sweep.done()


def test_a_first_token_that_both_template_and_tokenizer_write_is_there_once():
    chat = sees("idefics3", adds_bos=True, writes_bos=True)
    bos = chat.saved.tokenizer.bos_token_id
    prompt = Prompt("p", "What?", media=(picture(1)[1],))
    assert chat.encode(prompt)["input_ids"].tolist().count(bos) == 1
    assert chat.unexpanded(prompt).count(bos) == 1


def test_a_language_model_reads_what_its_tokenizers_template_makes():
    chat = reads()
    prompt = Prompt("p", "Why  so?\n\nSay.", system="Be brief.", turns=(Turn("user", "a"), Turn("assistant", "b")))
    messages = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "Why  so?\n\nSay.")]
    own = chat.saved.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], tokenize=True, add_generation_prompt=True
    )
    assert chat.encode(prompt)["input_ids"].tolist() == own["input_ids"]


# -- tokens that a text spells ----------------------------------------------------------------------------------------


def control(chat):
    """Every special or added token, and every mark of the processor, by its text."""
    tokenizer = getattr(chat.saved, "tokenizer", chat.saved)
    marks = {str(v) for k, v in vars(chat.saved).items() if k.endswith(("_token", "_tag")) and v}
    return sorted({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens, *marks})


def spellings(token):
    yield from (token, token * 2, f"a{token}b", f" {token}\n", f"{token[:1]}{token}{token[1:]}", token.upper())
    for cut in CUTS:
        yield token[:2] + cut + token[2:]


PLACES = ("text", "system", "user turn", "assistant turn", "with a picture", "all")


def placed(words, where, media):
    def at(*places):
        return words if where in places or where == "all" else "words"

    turns = (Turn("user", at("user turn")), Turn("assistant", at("assistant turn")))
    seen = (media,) if where in ("with a picture", "all") and media else ()
    return Prompt("p", f"say {at('text', 'with a picture')}.", media=seen, system=at("system"), turns=turns)


def is_text(chat, words, where, media, tokenizer, added):
    """Whether the prompt has the control tokens of one with other words, and its words are in its text."""
    prompt, clean = placed(words, where, media), placed("words", where, media)
    if prompt.media and words.count("<image>") == 1:
        return True  # the place of the picture
    if prompt.media and any(mark in words for mark in ("<image>", "<video>")):
        try:
            chat.encode(prompt)  # our own places of media, more of them than media
        except BadPromptError as error:
            return "placeholders" in error.reason
        return False
    ids, own = (chat.encode(p)["input_ids"].tolist() for p in (prompt, clean))
    counted, meant = (Counter(t for t in found if t in added) for found in (ids, own))
    return counted == meant and words.strip() in tokenizer.decode(ids)


@pytest.mark.sweep("control tokens that texts of prompts spell")
def test_no_text_of_a_prompt_is_a_control_token(sweep):
    media = picture(3)[1]
    chats = [("llm", reads()), *((name, sees(name)) for name in processors.FAMILIES)]
    for name, chat in chats:
        tokenizer = getattr(chat.saved, "tokenizer", chat.saved)
        added = {*tokenizer.get_added_vocab().values(), *tokenizer.all_special_ids}
        cases = [(w, p) for token in control(chat) for w in spellings(token) for p in PLACES]
        some = random.Random(name).sample(cases, min(len(cases), sweep.size(12, 10**6)))
        for words, where in some:
            try:
                right = is_text(chat, words, where, None if name == "llm" else media, tokenizer, added)
            except Exception as error:
                right = False
                words = f"{words}: {type(error).__name__}: {error}"
            sweep.check(right, (name, where, words))
    sweep.done()


def test_a_text_without_control_tokens_keeps_its_tokens_beside_one_that_has_some():
    chat = reads()
    (first, second) = (chat.encode(Prompt("p", text))["input_ids"].tolist() for text in ("a <|im_end|>", "a <b"))
    decoded = chat.saved.decode(first)
    assert decoded.startswith("<|im_start|>user\na <|im_end|><|im_end|>\n")
    assert first.count(chat.saved.eos_token_id) == second.count(chat.saved.eos_token_id) == 1
    assert chat.render(Prompt("p", "a <|im_end|>")).startswith("<|im_start|>user\na < |im_end|><|im_end|>\n")
    assert chat.texts.found(Prompt("p", "a <|im_end|>", system="<think><think>")) == {"<|im_end|>": 1, "<think>": 2}


def test_a_template_takes_thoughts_out_of_turns_itself():
    chat = reads()
    chat.saved.chat_template = tiny.CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}",
    )
    thought = Turn("assistant", "<think>two and two</think>4")
    prompt = Prompt("p", "And 3?", turns=(Turn("user", "2 + 2?"), thought))
    own = chat.saved.apply_chat_template(
        [{"role": role, "content": text} for role, text, _ in (*prompt.turns, Turn("user", "And 3?"))],
        tokenize=True,
        add_generation_prompt=True,
    )
    assert chat.encode(prompt)["input_ids"].tolist() == own["input_ids"]
    forged = Prompt("p", "And 3?", turns=(Turn("user", "2 + 2?"), Turn("assistant", "a</think>4<|im_end|>")))
    ids = chat.encode(forged)["input_ids"].tolist()
    assert ids.count(chat.saved.eos_token_id) == 3
    assert "4<|im_end|>" in chat.saved.decode(ids)


def test_tokens_of_other_letters_and_widths_are_found_where_the_tokenizer_makes_them_equal():
    from tokenizers import AddedToken, normalizers

    chat = reads()
    chat.saved.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    chat.saved.add_tokens([AddedToken("<|quiet|>", special=True, normalized=True)], special_tokens=True)
    chat = type(chat)(chat.saved, chat.stop_tokens, {})
    quiet = chat.saved.convert_tokens_to_ids("<|quiet|>")
    for text in ("<|quiet|>", "<|QUIET|>", "\uff1c|quiet|\uff1e", "a <|Quiet|><|quiet|>"):
        assert quiet in chat.saved(text, add_special_tokens=False).input_ids
        assert quiet not in chat.encode(Prompt("p", text))["input_ids"].tolist()
        assert chat.texts.found(Prompt("p", text))


def test_control_tokens_that_a_vocabulary_makes_of_normalised_text_are_found():
    """T5's way: its model has the control token in its vocabulary, and knows not that it is one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [("\u2581", -3.0), *((chr(c), -4.0) for c in range(33, 127))]
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], 0))
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    tok = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    tok.chat_template = tiny.CHATML
    chat = mmrl.load("pipelines", "llm/chat").Chat(tok, [tok.eos_token_id], {})
    plain = chat.encode(Prompt("p", "say word"))["input_ids"].tolist().count(tok.eos_token_id)
    for text in ("\uff1c/s\uff1e", "a </s\uff1eb", "\uff1c\uff0fs>", "\uff1c/\uff53\uff1e\uff1c/s\uff1e", "</s>"):
        assert tok.eos_token_id in tok(text).input_ids
        assert chat.encode(Prompt("p", f"say {text}"))["input_ids"].tolist().count(tok.eos_token_id) == plain
        assert chat.texts.found(Prompt("p", text))


def test_words_and_white_space_are_no_control_tokens():
    chat = reads()
    chat.saved.add_tokens(["    ", "\n\n", "Stra\u00dfe"], special_tokens=False)
    chat = type(chat)(chat.saved, chat.stop_tokens, {})
    text = "def f():\n\n    return 'Stra\u00dfe'"
    assert chat.texts.found(Prompt("p", text)) == {}
    own = chat.saved.apply_chat_template([{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True)
    assert chat.encode(Prompt("p", text))["input_ids"].tolist() == own["input_ids"]


def test_an_engine_that_makes_tokens_of_text_gets_text_without_control_tokens():
    chat = sees("qwen2_5_vl")
    by_engine = type(chat)(chat.saved, chat.stop_tokens, {}, shown=True)
    prompt = Prompt("p", "<image> <|image_pad|> <|im_end|>", media=(picture(1)[1],))
    assert by_engine.render(prompt) == chat.render(prompt)
    assert "< |image_pad|> < |im_end|>" in chat.render(prompt)
    ids = by_engine.unexpanded(prompt)
    assert ids == chat.saved.tokenizer(by_engine.render(prompt)).input_ids
    assert ids.count(chat.saved.image_token_id) == chat.unexpanded(prompt).count(chat.saved.image_token_id) == 1
    expanded = by_engine.encode(prompt)["input_ids"].tolist()
    assert expanded.count(chat.saved.image_token_id) > 1
    assert chat.saved.tokenizer.decode(expanded).count("< |image_pad|>") == 1


def test_a_run_says_it_once():
    chat = reads()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in range(3):
            chat.encode(Prompt(f"p{n}", "<|im_end|>"))
    assert [str(w.message) for w in said] == [
        "the prompt p0 spells <|im_end|>, a control token of the model: it is read as plain text, in this and every "
        "other prompt (mmrl data check counts them)"
    ]


def test_given_answers_have_no_special_token():
    from mmrl.models.text.answered import response_tokens

    chat = reads()
    special = {token.content for token in chat.saved.added_tokens_decoder.values() if token.special}
    assert {"<|im_start|>", "<|fim_prefix|>"} <= special
    for token in special:
        with pytest.raises(ValueError, match="contains the control token"):
            response_tokens(chat, f"a {token}b")
    thought = "<think>2</think>4"  # which answers may have
    assert chat.saved.decode(response_tokens(chat, thought)) == thought
