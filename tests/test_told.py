"""What a policy is told after a turn, in the chat templates that other people's models have (those of the package trl).

The oracle renders a whole conversation by the tokenizer's own ``apply_chat_template``, with answers before that one.
"""

import random
import re
from pathlib import Path

import pytest

import mmrl
from mmrl._torchvision import allow_cpu_only
from mmrl.text.template_probe import TemplateFaultError

allow_cpu_only()  # before transformers imports torchvision

from transformers import AddedToken, AutoTokenizer  # noqa: E402

trl = pytest.importorskip("trl")
TEMPLATES = sorted(
    file for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja") if "_training" not in file.name
)
WORDS = [
    "apple",
    "two words",
    "17",
    "a\nb",
    "x = {1: 'y'}",
    "  led",
    "end  ",
    "é日本",
    '{"error": "no"}',
    "<b>bold</b>",
]
"""Contents of what is told; some have white space at their ends, which some templates trim."""


def tokenizer_of(template):
    """A tokenizer whose control tokens are those that the template writes."""
    made = AutoTokenizer.from_pretrained(Path(mmrl.__file__).parents[1] / "pipelines/llm/models/sums-qwen3")
    made.chat_template = template
    made.bos_token = "<|endoftext|>"
    spelled = {*re.findall(r"<\|[\w/ ]+\|>|<[a-z_/]+>|\[/?[A-Z_]+\]", template)}
    added = [text for text in sorted(spelled) if text not in made.get_vocab()]
    made.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in added])
    return made


def conversation(draw, role, before):
    """Some answers and what was told after each, as ``before``; the last message is what is told now, as ``role``."""
    said = [{"role": "user", "content": f"q{draw.randrange(99)}"}]
    for _ in range(draw.randint(1, 3)):
        said.append({"role": "assistant", "content": f"Z{draw.randrange(10**6)}Z"})
        said.append({"role": before, "content": draw.choice(WORDS)})
    return [*said[:-1], {**said[-1], "role": role}]


def whole(saved, messages):
    """The conversation as the template writes it, with contents as text or as lists, whichever it shows."""
    answer = messages[-2]["content"]
    shown = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if answer in shown:
        return shown
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    return saved.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)


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
                    shown = whole(saved, messages)
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
