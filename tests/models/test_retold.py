"""Conversations as chat templates of others show them once more was said: what is left of earlier turns.

The oracle is the tokenizer's own ``apply_chat_template`` on the whole conversation, whose texts are the decoded turns.
"""

import pickle
import random
import re
from dataclasses import fields

import pytest
import torch

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot, TextRows
from mmrl.models.text.retold import Past, Teller
from mmrl.models.text.template_probe import TemplateFaultError
from tests.support.templates import TEMPLATES, WORDS, squeezed, tokenizer_of, whole

allow_cpu_only()  # before transformers imports torchvision

SLOT = Slot(0, 0, 0, Prompt("p", "q"))
THOUGHTS = ["", "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n", "<think>a <b> c</think>", "so\n17\n</think>\n"]


def turn_of(draw, chat, teller, stop):
    """A random turn as the policy writes it, and what it is told."""
    text = draw.choice(THOUGHTS) + draw.choice(["Z17Z", "two words Z3Z", "{'x': 1}", "é日本Z", "a\n\nb"])
    tokens = chat.tokenizer(text, add_special_tokens=False).input_ids
    tokens = [*tokens, *(stop if draw.random() < 0.7 else [])]
    contents = [draw.choice(WORDS)]
    return Past(tokens, text, contents, teller.told(contents))


def written(saved, turn):
    """The last tokens of a turn, behind its thought."""
    answer = re.sub(r"^.*</think>", "", turn.text, flags=re.DOTALL).strip()
    n = len(turn.tokens) - (turn.tokens != saved(turn.text, add_special_tokens=False).input_ids)
    at = max(at for at in range(n) if saved.decode(turn.tokens[at:n]).strip() == answer)
    return turn.tokens[at:]


def inside(ids, tokens):
    return any(ids[at : at + len(tokens)] == [*tokens] for at in range(len(ids)))


@pytest.mark.slow
@pytest.mark.sweep("conversations told anew, in chat templates of others")
def test_it_is_the_whole_conversation_of_the_template(sweep):
    draw, retold, dropped, refused = random.Random(0), 0, 0, {}
    for file in TEMPLATES:
        saved = tokenizer_of(file.read_text())
        chat = mmrl.load("pipelines", "llm/chat:Chat")(saved, [saved.eos_token_id], {})
        for role in ("user", "tool"):
            teller = Teller(chat, role, lambda contents, c=chat, r=role: c.told(r, contents), renews=True)
            try:
                ends = teller.told(["x"]).tokens[:1]
            except TemplateFaultError:
                continue
            chat.stop_tokens = ends
            for _ in range(sweep.size(4, 40)):
                past = [turn_of(draw, chat, teller, ends) for _ in range(draw.randint(1, 3))]
                prompt = Prompt("p", f"q{draw.randrange(99)}")
                asked = chat.encode(prompt)["input_ids"].tolist()
                try:
                    found = teller.retold(prompt, past)
                except TemplateFaultError as error:
                    refused.setdefault((file.stem, role), str(error))
                    continue
                said = [{"role": "user", "content": prompt.text}]
                for turn in past:
                    said += [{"role": "assistant", "content": turn.text}, {"role": role, "content": turn.contents[0]}]
                try:
                    shown = whole(saved, said, prompt.text)
                except Exception:
                    continue
                retold += 1
                ids = found.behind(asked)
                case = f"{file.stem} {role} {[(t.text, t.contents) for t in past]}: {saved.decode(ids)!r}"
                sweep.check(squeezed(saved.decode(ids)) == squeezed(shown), f"{case}, not {shown!r}")
                for turn in past:
                    whole_turn = inside(ids, turn.tokens)
                    dropped += not whole_turn
                    sweep.check(
                        whole_turn or inside(ids, written(saved, turn)), f"{case} {turn.text!r} has other tokens"
                    )
    sweep.done()
    assert {stem for stem, _ in refused} <= {"deepseek_r1_distill", "deepseekv3"}, refused  # they count tools' results
    assert retold >= 200
    assert dropped >= 50


def test_rows_are_sent_without_what_was_computed_of_them():
    one = torch.arange(5)
    rows = TextRows.answers([SLOT], [SampleId(0, 0, 0, 0)], [("k", one)], [one], torch.tensor([False]), [one.float()])
    assert (rows.sequences, rows.offsets, rows.inside.all()) == (rows, [0, 10], True)
    again = pickle.loads(pickle.dumps(rows))
    assert sorted(vars(again)) == sorted(of.name for of in fields(TextRows))
    assert torch.equal(again.padded("tokens"), rows.padded("tokens"))
