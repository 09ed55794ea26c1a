"""Conversations of several turns as prompts: records, chat templates, pairs, judges and remote rewards."""

import json

import pytest
import torch
from PIL import Image

import mmrl
from mmrl._torchvision import allow_cpu_only
from mmrl.config.schema import Recipe
from mmrl.datasets.fields import Columns, digest_of_prompt, make_prompt, read_fields
from mmrl.errors import BadPromptError, UserError
from mmrl.judge.rubric import Rubric
from mmrl.media import Media
from mmrl.report.texts import write_texts
from mmrl.rewards.wire import decode_request, encode_request
from mmrl.text.conversation import messages_of, messages_with_media
from mmrl.text.features import key_of
from mmrl.text.given import given_text
from mmrl.text.pairs import pair_of
from mmrl.trajectory import Prompt, Sample, SampleId, Slot, Turn
from tests import tiny

allow_cpu_only()

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And one more?"},
]
ANSWER = {"role": "assistant", "content": "6"}
WRONG = {"role": "assistant", "content": "7"}
PICTURE = Media("image", data=b"1")
OTHER = Media("image", data=b"2")


def read(record, media=(), **columns):
    return make_prompt("p", read_fields(record, Columns(**columns)), media)


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_a_conversation_is_read_with_its_system_message_and_its_answer(key):
    prompt = read({key: [SYSTEM, *TALK, ANSWER]})
    assert (prompt.system, prompt.text) == ("Be brief.", "And one more?")
    assert prompt.turns == (Turn("user", "What is 2 + 3?"), Turn("assistant", "5"))
    assert prompt.meta["answer"] == "6"
    assert messages_of(prompt) == [SYSTEM, *TALK]
    first = read({key: TALK[:1]})
    assert first.turns == ()
    assert key_of(prompt) != key_of(read({key: TALK})) != key_of(read({key: TALK[2:]}))
    assert digest_of_prompt(read({key: TALK})) != digest_of_prompt(read({key: TALK[2:]}))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": [*TALK, {"role": "tool", "content": "5"}]}, "a message of a tool"),
        ({"messages": [TALK[0], {"role": "assistant", "content": "", "tool_calls": [{}]}]}, "a call of one"),
        ({"messages": TALK, "tools": [{"name": "add"}]}, "has tools"),
        ({"messages": [*TALK, SYSTEM]}, "system message that is not the first"),
        ({"messages": [SYSTEM]}, "has the messages system; user and assistant must alternate"),
        ({"messages": []}, "has the messages none"),
        ({"messages": TALK[1:]}, "has the messages assistant, user"),
        ({"messages": [*TALK, ANSWER, ANSWER]}, "user, assistant, user, assistant, assistant"),
        ({"messages": [{"role": "user", "content": " "}, *TALK[1:]]}, "empty"),
        ({"messages": [{"role": "system", "content": [{"type": "image"}]}, *TALK]}, "in a message of the system"),
    ],
)
def test_what_is_no_conversation_is_named(record, why):
    with pytest.raises(ValueError, match=why):
        read_fields(record)


def test_tools_may_be_something_a_reward_knows(tmp_path):
    assert read({"messages": TALK, "tools": ["add"]}, meta=["tools"]).meta["tools"] == ["add"]
    assert read({"messages": TALK, "tools": None}).turns
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": TALK, "tools": [{"name": "add"}]}))
    with pytest.raises(UserError, match=r"q\.jsonl:1: has tools, and no chat here calls any; take the column out"):
        mmrl.load("datasets", "jsonl:prompts")("train", path=str(tmp_path / "q.jsonl"))


def recipe(path, **changes):
    values = {
        "name": "talk",
        "pipeline": "llm/chat",
        "model": {"path": str(path)},
        "data": {"name": "sums"},
        "sampling": {"max_new_tokens": 8},
        "rewards": [{"name": "answer:exact"}],
        "algorithm": {"type": "grpo", "kl_coef": 0.0},
        "train": {"steps": 1, "prompts_per_step": 1, "group_size": 2, "micro_batch_size": 2},
    }
    return Recipe.model_validate(values | changes)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.language_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def pipeline(path):
    return mmrl.load("pipelines", "llm/chat").build(recipe(path), str(path), torch.device("cpu"))


def test_the_model_reads_what_the_librarys_template_makes_of_the_messages(pipeline):
    prompt = read({"messages": [SYSTEM, *TALK]})
    tokenizer = pipeline.conditioner.saved
    expected = tokenizer.apply_chat_template([SYSTEM, *TALK], add_generation_prompt=True).input_ids
    assert pipeline.conditioner.encode(prompt)["input_ids"].tolist() == expected
    ids = [SampleId(0, 0, 0, k) for k in range(2)]
    pipeline.encode([Slot(0, 0, 0, prompt)])
    trajectory = pipeline.sample([Slot(0, 0, 0, prompt)] * 2, ids, [], 3)
    found = pipeline.replay(trajectory, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert ((found - trajectory.log_probs) * trajectory.mask).abs().max() < 2e-5


def test_a_literal_image_is_text_for_a_language_model(pipeline):
    prompt = read({"messages": [{"role": "user", "content": "What does <image> or <video> mean in HTML?"}]})
    assert "<image> or <video>" in pipeline.conditioner.decode(pipeline.conditioner.encode(prompt)["input_ids"])


def test_a_template_that_takes_no_such_conversation_names_the_prompt(pipeline, monkeypatch):
    strict = "{% if messages|length > 1 %}{{ raise_exception('one message, please') }}{% endif %}"
    monkeypatch.setattr(pipeline.conditioner.saved, "chat_template", strict)
    with pytest.raises(BadPromptError, match=r"does not take its messages \(user, assistant, user\): one message"):
        pipeline.conditioner.render(read({"messages": TALK}))


# -- pictures ----------------------------------------------------------------------------------------------------------


def shown(*turns, media=(PICTURE, OTHER)):
    return Prompt("p", turns[-1], media=media, turns=tuple(Turn(*turn) for turn in turns[:-1]))


def kinds(prompt):
    return [[part["type"] for part in message["content"]] for message in messages_with_media(prompt)]


def test_pictures_stand_where_the_turns_show_them():
    prompt = shown(("user", "What is <image>?"), ("assistant", "An <image>."), "And <image> here?")
    assert kinds(prompt) == [["text", "image", "text"], ["text"], ["text", "image", "text"]]
    assert kinds(shown(("user", "What?"), ("assistant", "A."), "And?")) == [
        ["image", "image", "text"],
        ["text"],
        ["text"],
    ]
    with pytest.raises(BadPromptError, match="the placeholders image and the media image, image"):
        messages_with_media(shown(("user", "<image>"), ("assistant", "A."), "And?"))
    assert kinds(shown(("user", "<image>"), ("assistant", "A."), "And?", media=())) == [["text"]] * 3


def test_media_of_messages_are_in_the_order_of_the_turns():
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "This: "}, {"type": "image", "image": "a.png"}]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": " or this?"}]},
    ]
    fields = read_fields({"messages": talk})
    assert [source for _, source in fields.media] == ["a.png", "b.png"]
    assert fields.shown == 2
    prompt = make_prompt("p", fields, [PICTURE, OTHER])
    assert (prompt.turns[0].text, prompt.text) == ("This: <image>", "<image> or this?")
    with pytest.raises(ValueError, match="2 <image> and the record 1"):
        make_prompt("p", fields, [PICTURE])


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_vision_model_reads_pictures_of_several_turns(tmp_path, kind):
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path, kind)
    made = recipe(tmp_path, pipeline="vlm/chat")
    conditioner = mmrl.load("pipelines", "vlm/chat").build(made, str(tmp_path), torch.device("cpu")).conditioner
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    picture = Media("image", path=str(tmp_path / "a.png"))
    prompt = shown(("user", "What is <image>?"), ("assistant", "Red."), "And <image>?", media=(picture, picture))
    features = conditioner.encode(prompt)
    tokens = features["input_ids"].tolist()
    image = conditioner.saved.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert tokens.count(image) == int(features["image_grid_thw"].prod(1).sum()) // 4
    between = conditioner.saved.tokenizer.decode(tokens[tokens.index(image) : len(tokens) - tokens[::-1].index(image)])
    assert "assistant\nRed." in between


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TALK, "chosen": [ANSWER], "rejected": [WRONG]},
        {"prompt": TALK, "chosen": [*TALK, ANSWER], "rejected": [*TALK, WRONG]},
        {"chosen": [*TALK, ANSWER], "rejected": [*TALK, WRONG]},
        {"prompt": [SYSTEM, *TALK], "chosen": [SYSTEM, *TALK, ANSWER], "rejected": [WRONG]},
    ],
)
def test_pairs_are_trls_conversations(pipeline, record):
    prompt = read(record, meta=["chosen", "rejected"])
    pair = pair_of(prompt)
    assert (pair.chosen, pair.rejected) == ("6", "7")
    whole = [*messages_of(prompt), ANSWER]
    tokenizer = pipeline.conditioner.saved
    text = pipeline.conditioner.render(prompt) + pair.chosen
    assert tokenizer.apply_chat_template(whole, tokenize=False).startswith(text)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TALK, "completion": [ANSWER]},
        {"prompt": TALK, "completion": [*TALK, ANSWER]},
        {"prompt": [SYSTEM, *TALK], "completion": "6"},
        {"messages": [SYSTEM, *TALK, ANSWER]},
    ],
)
def test_given_responses_are_trls_conversations(pipeline, record):
    prompt = read(record)
    assert given_text(prompt, "completion", ["completion"]) == "6"
    assert prompt.turns == (Turn("user", "What is 2 + 3?"), Turn("assistant", "5"))


def test_an_answer_to_another_conversation_is_named():
    other = [{"role": "user", "content": "What is 9?"}, *TALK[1:], ANSWER]
    for chosen, why in ((other, "another conversation"), ([*TALK[2:], ANSWER], "1 messages before its answer")):
        prompt = read({"prompt": TALK, "chosen": chosen, "rejected": [WRONG]}, meta=["chosen", "rejected"])
        with pytest.raises(BadPromptError, match=why):
            pair_of(prompt)


# -- what else sees prompts --------------------------------------------------------------------------------------------


def test_judges_reports_and_remote_rewards_see_the_whole_conversation(tmp_path):
    sample = Sample(read({"messages": [SYSTEM, *TALK]}), SampleId(0, 0, 0, 0), text="6")
    (page,) = Rubric("{{ prompt }}|{{ response }}", "pointwise").render([sample])
    assert page == "user: What is 2 + 3?\n\nassistant: 5\n\nuser: And one more?|6"
    (again,) = decode_request(encode_request([sample], [[0]], 0)).samples
    assert again is not None
    assert again.prompt == sample.prompt
    directory = type("Folder", (), {"samples": tmp_path})
    write_texts(directory, 1, [sample], [{}])  # type: ignore[arg-type]
    written = json.loads((tmp_path / "step_000001.json").read_text())["samples"][0]["prompt"]
    assert written.startswith("user: What is 2 + 3?")
