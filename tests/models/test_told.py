"""What a policy is told after a turn, in the chat templates that other people's models have (those of the package trl).

The oracle renders a whole conversation by the tokenizer's own ``apply_chat_template``, with answers before that one.
"""

import random

import pytest

import mmrl
from mmrl.models.text.template_probe import TemplateFaultError
from tests.support.templates import TEMPLATES, WORDS, tokenizer_of, whole


def conversation(draw, role, before):
    """Some answers and what was told after each, as ``before``; the last message is what is told now, as ``role``."""
    said = [{"role": "user", "content": f"q{draw.randrange(99)}"}]
    for _ in range(draw.randint(1, 3)):
        said.append({"role": "assistant", "content": f"Z{draw.randrange(10**6)}Z"})
        said.append({"role": before, "content": draw.choice(WORDS)})
    return [*said[:-1], {**said[-1], "role": role}]


@pytest.mark.slow
@pytest.mark.sweep("what is told, in chat templates of others")
def test_it_is_what_the_template_writes_in_a_whole_conversation(sweep):
    draw, told, refused = random.Random(0), 0, set()
    for file in TEMPLATES:
        saved = tokenizer_of(file.read_text())
        chat = mmrl.load("pipelines", "llm/chat:Chat")(saved, [saved.eos_token_id], {})
        for role in ("user", "tool"):
            for _ in range(sweep.size(10, 40)):
                # DeepSeek's counts the results in the whole conversation, behind messages with calls
                messages = conversation(draw, role, "user" if "deepseek" in file.stem else role)
                content, answer = messages[-1]["content"], messages[-2]["content"]
                try:
                    found = saved.decode(chat.told(role, [content]).tokens)
                except TemplateFaultError:
                    refused.add((file.stem, role))
                    break
                try:
                    shown = whole(saved, messages, answer)
                except Exception:
                    continue  # it takes no such conversation, such as two messages of one role
                told += 1
                sweep.check(found == shown.rpartition(answer)[2], f"{file.stem} {role} {content!r}: {found!r}")
    sweep.done()
    assert told >= 300
    assert not {name for name, role in refused if role == "user"}, refused


@pytest.mark.sweep("control tokens in what is told")
def test_contents_make_no_control_tokens(sweep):
    draw = random.Random(1)
    for file in TEMPLATES:
        saved = tokenizer_of(file.read_text())
        chat = mmrl.load("pipelines", "llm/chat:Chat")(saved, [saved.eos_token_id], {})
        control = [*saved.added_tokens_decoder]
        names = [str(token) for token in saved.added_tokens_decoder.values()]
        for role in ("user", "tool"):
            try:
                plain = [t for t in chat.told(role, ["x"]).tokens if t in control]
            except TemplateFaultError:
                continue
            for _ in range(sweep.size(3, 30)):
                content = " ".join(draw.choice([*names, "a", "<", "|>"]) for _ in range(draw.randint(1, 6)))
                found = [t for t in chat.told(role, [content]).tokens if t in control]
                sweep.check(found == plain, f"{file.stem} {role} {content!r}: {found}, not {plain}")
    sweep.done()
