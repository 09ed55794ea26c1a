"""Conversations of several turns as prompts: records, chat templates, pairs, judges and remote rewards."""

import json
import random

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot, Turn
from mmrl.data.fields import Columns, UnreadColumns, digest_of_prompt, make_prompt, read_fields
from mmrl.logging.texts import write_texts
from mmrl.models.text.conversation import messages_of, messages_with_media
from mmrl.models.text.features import key_of
from mmrl.models.text.given import Pair, given_message, given_text, pair_of
from mmrl.rewards.judging.rubric import Rubric
from mmrl.rewards.wire import decode_request, encode_request
from tests.support import tiny
from tests.support.rows import distance

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
    assert distance(found, trajectory) < 2e-5


def test_a_literal_image_is_text_for_a_language_model(pipeline):
    prompt = read({"messages": [{"role": "user", "content": "What does <image> or <video> mean in HTML?"}]})
    assert "<image> or <video>" in pipeline.conditioner.decode(pipeline.conditioner.encode(prompt)["input_ids"])


def test_a_template_that_takes_no_such_conversation_names_the_prompt(pipeline, monkeypatch):
    strict = "{% if messages|length > 1 %}{{ raise_exception('one message, please') }}{% endif %}"
    monkeypatch.setattr(pipeline.conditioner.saved, "chat_template", strict)
    with pytest.raises(BadPromptError, match=r"does not take its messages \(user, assistant, user\): one message"):
        pipeline.conditioner.render(read({"messages": TALK}))


# -- how data sets store conversations ---------------------------------------------------------------------------------


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


FORMS = {
    "list": lambda messages: messages,
    "JSON": json.dumps,
    "JSON behind a mark of UTF-8": lambda messages: "\ufeff" + json.dumps(messages),
    "ShareGPT in capitals": lambda messages: [{**m, "from": m["from"].capitalize()} for m in sharegpt(messages)],
    "JSON, indented": lambda messages: "\n " + json.dumps(messages, indent=2, ensure_ascii=False) + "\n",
    "ShareGPT": sharegpt,
    "ShareGPT in JSON": lambda messages: json.dumps(sharegpt(messages)),
    "nulls of a table": lambda messages: [{**m, "tool_calls": None, "name": None} for m in messages],
}


def _spoken(rng):
    parts = ["Hi", "[1, 2]", '{"a": 1}', "a\nb", "é漢", '"quoted"', "'x'", "<think>", '[{"role": "user"}]']
    return " ".join(rng.choices(parts, k=rng.randint(1, 3)))


@pytest.mark.sweep("conversations in records")
def test_a_conversation_is_read_in_every_form_that_data_sets_have(sweep):
    rng = random.Random(0)
    for _ in range(sweep.size(40, 2000)):
        turns = rng.randint(0, 3)
        talk = [{"role": ("user", "assistant")[n % 2], "content": _spoken(rng)} for n in range(2 * turns + 1)]
        system = [{"role": "system", "content": _spoken(rng)}] if rng.random() < 0.5 else []
        answer, other = ({"role": "assistant", "content": text + _spoken(rng)} for text in ("a", "b"))
        column, (name, form) = rng.choice(["messages", "prompt", "conversations"]), rng.choice([*FORMS.items()])
        whole = Prompt(
            "p",
            talk[-1]["content"],
            {"answer": answer["content"], "completion": answer["content"]},
            system=system[0]["content"] if system else None,
            turns=tuple(Turn(m["role"], m["content"]) for m in talk[:-1]),
        )
        case = (name, column, talk, answer)
        sweep.run([case], lambda _: read({column: form([*system, *talk, answer])}) == whole)  # noqa: B023
        pair = {column: form([*system, *talk]), "chosen": form([answer]), "rejected": form([other])}
        best = Pair(answer["content"], other["content"])
        sweep.run([pair], lambda record: pair_of(read(record)) == best)  # noqa: B023
        implicit = {"chosen": form([*talk, answer]), "rejected": form([*talk, other])}
        sweep.run([implicit], lambda record: messages_of(read(record)) == talk and pair_of(read(record)) == best)  # noqa: B023
        given = {column: form(talk), "completion": form([answer])}
        sweep.run([given], lambda record: given_text(read(record), "completion", []) == answer["content"])  # noqa: B023
    sweep.done()


def test_one_message_may_stand_in_place_of_a_list():
    record = {
        "conversations": sharegpt(TALK),
        "chosen": {"from": "gpt", "value": "6"},
        "rejected": {"role": "assistant", "content": "7"},
    }
    assert pair_of(read(record)) == Pair("6", "7")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        '["role", "content"]',
        '[{"role": "user"}]',
        '[{"role": "user", "content": "Hi"}, 3]',
        '[{"role": "user", "content": "Hi"}] is what?',
        '{"role": "user", "content": "Hi"}',
        "[]",
        "[",
        pytest.param("[" * 20_000 + "]" * 20_000, id="deep"),
        "[x] [y]",
    ],
)
def test_a_text_that_is_no_list_of_messages_stays_a_text(text):
    assert read({"prompt": text}).text == text


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": str(TALK)}, "as Python prints it.*json.dumps"),
        ({"messages": str(TALK[0])}, "in place of messages; store a list"),
        ({"messages": json.dumps(TALK[0])}, "in place of messages"),
        ({"conversations": json.dumps(json.dumps(TALK))}, "in place of messages"),
        ({"conversations": json.dumps({"messages": TALK})}, "in place of messages"),
        ({"messages": json.dumps(TALK)[:-1]}, "in place of messages"),
        ({"messages": "\n".join(map(json.dumps, TALK))}, "in place of messages"),
        ({"prompt": "Hi", "completion": str([ANSWER])}, "as Python prints it"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "f"}]}, "of a tool"),
        (
            {"conversations": [{"from": "nobody", "value": "Hi"}]},
            "'nobody', which is none of system, user and assistant",
        ),
        ({"messages": [{"role": "developer", "content": "Hi"}]}, "'developer', which is none of"),
        ({"messages": [TALK[0], {**ANSWER, "function_call": {"name": "f"}}]}, r"a call of one \(function_call\)"),
        ({"prompt": "Hi", "completion": [{**ANSWER, "tool_calls": [{"id": 1}]}]}, r"a call of one \(tool_calls\)"),
        ({"prompt": "Hi", "chosen": [{**ANSWER, "tool_calls": [1]}], "rejected": [WRONG]}, r"\(tool_calls\)"),
        ({"messages": [{**TALK[0], "tools": ["f"]}]}, r"\(tools\)"),
        ({"messages": [TALK[0], {**ANSWER, "reasoning_content": ["x"]}]}, "reasoning_content is no text"),
    ],
)
def test_what_cannot_be_a_conversation_here_is_named(record, why):
    with pytest.raises(ValueError, match=why):
        read_fields(record)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_stays_with_its_message(key):
    earlier = [TALK[0], {**TALK[1], key: "2 and 3"}, TALK[2]]
    prompt = read({"messages": [*earlier, {**ANSWER, key: "one more"}]})
    assert messages_of(prompt) == earlier
    assert prompt.meta["answer"] == "6"
    assert given_message(prompt, "completion") == {**ANSWER, key: "one more"}
    assert digest_of_prompt(prompt) != digest_of_prompt(read({"messages": [*TALK, ANSWER]}))
    pair = read({"prompt": TALK, "chosen": [{**ANSWER, key: "so"}], "rejected": [ANSWER]})
    assert pair_of(pair) == Pair("6", "6")
    assert given_message(pair, "chosen")[key] == "so"


def test_keys_inside_messages_that_nothing_reads_are_named_once(tmp_path):
    rows = [
        {"messages": [{**TALK[0], "name": "Ann", "weight": 0}, {**ANSWER, "weight": 1, "refusal": None}]},
        {"messages": [{**TALK[0], "reasoning": "of the user"}, {**ANSWER, "reasoning": "read"}]},
    ] * 3
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UnreadColumns) as seen:
        mmrl.load("datasets", "jsonl:prompts")("train", path=str(tmp_path / "q.jsonl"), heldout=0)
    (said,) = [str(w.message) for w in seen if issubclass(w.category, UnreadColumns)]
    assert "the keys name, weight, reasoning inside messages and media are not used" in said


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
    (again,) = decode_request(encode_request([sample], [[0]], 0)[0]).samples
    assert again is not None
    assert again.prompt == sample.prompt
    directory = type("Folder", (), {"samples": tmp_path})
    write_texts(directory, 1, [sample], [{}])  # type: ignore[arg-type]
    written = json.loads((tmp_path / "step_000001.json").read_text())["samples"][0]["prompt"]
    assert written.startswith("user: What is 2 + 3?")
