"""Prompts with more tokens than there is room for: skipped, cut, or an error, in plan, training and evaluation."""

import json
import warnings

import pytest
from PIL import Image

import mmrl
from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot
from mmrl.data.fields import UnreadColumns
from mmrl.data.loading import load_prompts
from mmrl.logging.rundir import RunDir
from mmrl.models.text.conversation import messages_with_media
from mmrl.models.text.overlong import without_first
from mmrl.planner.plan import plan
from mmrl.rewards.judging.rubric import Rubric
from mmrl.training.evaluation import Evaluator
from tests.support import tiny

allow_cpu_only()

RECIPE = """
name: tiny
device: cpu
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 0}, heldout: {path: held.jsonl, heldout: 0}}
sampling: {max_new_tokens: 4, max_prompt_tokens: 40}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 2, prompts_per_step: 4, group_size: 2, micro_batch_size: 8}
eval: {every: 2, samples: 6, grid: 6}
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(s.text) % 3 + s.id.sample) for s in samples]
"""
LONG = "word " * 20 + "what is 1+1"
TEMPLATE = len("SuserN" + "EN" + "SassistantN")
"""Tokens of the chat template: one for each control token, newline and byte."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlong")
    tiny.language_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for name in ("data", "held"):
        rows = [{"prompt": LONG + str(i) if i % 4 == 1 else f"Say {i} now"} for i in range(12)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def loaded(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], changes)


def pipeline_of(folder, *changes):
    made = loaded(folder, *changes)
    return build(made.recipe).pipeline


def encoded(pipeline, text, media=()):
    keys = pipeline.encode([Slot(0, 0, 0, Prompt("one", text, media=media))])
    return pipeline.features.get(keys[0])["input_ids"].tolist()


def test_plan_says_what_is_skipped_and_plans_for_what_fits(folder):
    made = plan(loaded(folder))
    assert made.problems == []
    [note] = made.notes
    assert "6 of 24 prompts looked at are too long (data:2, data:6, data:10, held:2, held:6, ...)" in note
    assert f"it has {len(LONG) + 1 + TEMPLATE} tokens, and sampling.max_prompt_tokens is 40" in note
    assert "they are left out (data.overlong)" in note
    assert made.counts.row_tokens == len("Say 10 now") + TEMPLATE + 4


def test_plan_cuts_as_training_does(folder):
    made = plan(loaded(folder, "data.overlong=cut"))
    assert (made.problems, made.notes) == ([], [])
    assert made.counts.row_tokens == 40 + 4


def test_plan_stops_at_any_of_them_where_it_is_an_error(folder):
    [problem] = plan(loaded(folder, "data.overlong=error")).problems
    assert "6 of 24 prompts looked at are too long (data:2, data:6, data:10, held:2, held:6, ...)" in problem
    assert "set data.overlong to skip or cut" in problem
    assert plan(loaded(folder, "data.overlong=error", "sampling.max_prompt_tokens=200")).problems == []


def test_one_too_long_prompt_is_found_among_many_of_more_characters(folder, tmp_path):
    """Tokens count, not characters: a word of the vocabulary is one token, however long it is."""
    rows = [{"prompt": "a" * 15}] * 3 + [{"prompt": "<|im_end|>" * 10}] * 40
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"data.{split}.path={tmp_path / 'data.jsonl'}" for split in ("train", "heldout")]
    assert plan(loaded(folder, *data)).counts.row_tokens == 15 + TEMPLATE + 4


def test_a_run_skips_and_names_them_in_training_and_in_evaluation(folder, tmp_path):
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(loaded(folder), directory).begin(Stop(), resume=False)
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert {f["step"] for f in failures if f["kind"] == "heldout"} == {0, 2}
    heldout = {f["name"] for f in failures if f["kind"] == "heldout"}
    trained = {f["name"] for f in failures if f["kind"] == "reward"}
    assert {f"{LONG}{i}" for i in (1, 5)} <= heldout <= {f"{LONG}{i}" for i in (1, 5, 9)}
    assert set() < trained <= {f"{LONG}{i}" for i in (1, 5, 9)}
    assert all("sampling.max_prompt_tokens is 40" in f["error"] for f in failures)
    rows = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert [(row["samples"], row["dropped"]) for row in rows] == [(6, 0), (6, 0)], "others take their places"


def test_cut_keeps_the_end_of_the_text_and_the_template(folder):
    pipeline = pipeline_of(folder, "data.overlong=cut")
    whole = pipeline.conditioner.encode(Prompt("x", LONG))["input_ids"].tolist()
    tokens = encoded(pipeline, LONG)
    assert len(tokens) == 40
    head, tail = len("SuserN"), len("EN" + "SassistantN")
    assert tokens[:head] == whole[:head]
    assert tokens[head:] == whole[-(40 - head) :]
    assert pipeline.conditioner.decode(tokens[head:-tail]) == LONG[-(40 - TEMPLATE) :]
    assert encoded(pipeline, "Say 3") == pipeline.conditioner.encode(Prompt("x", "Say 3"))["input_ids"].tolist()
    shown = pipeline.fitter.shown(Prompt("one", LONG), pipeline.limit)
    assert shown.text == LONG[-(40 - TEMPLATE) :], "what an engine is shown"


def test_what_cannot_be_cut_is_skipped(folder):
    pipeline = pipeline_of(folder, "data.overlong=cut", f"sampling.max_prompt_tokens={TEMPLATE}")
    with pytest.raises(BadPromptError, match="too many without its text"):
        encoded(pipeline, LONG)


def test_an_error_names_the_prompt(folder):
    pipeline = pipeline_of(folder, "data.overlong=error")
    with pytest.raises(UserError, match=r"data: the prompt one has .* set data.overlong to skip or cut") as caught:
        encoded(pipeline, LONG)
    assert not isinstance(caught.value, BadPromptError), "nothing takes its place"


def test_the_context_limits_prompts_too(folder):
    pipeline = pipeline_of(
        folder, "sampling.max_prompt_tokens=null", "sampling.max_new_tokens=200", "data.overlong=cut"
    )
    assert len(encoded(pipeline, LONG)) == 256 - 200


def test_a_cut_leaves_placeholders_of_media_and_words_like_them():
    media = (Media("image", data=b"1"), Media("image", data=b"2"))
    prompt = Prompt("x", "abc<image>def<image>ghi", media=media)
    assert [without_first(prompt, n) for n in (0, 2, 4, 7, 9)] == [
        "abc<image>def<image>ghi",
        "c<image>def<image>ghi",
        "<image>ef<image>ghi",
        "<image><image>hi",
        "<image><image>",
    ]
    assert without_first(Prompt("x", "ab<image>cd"), 4) == "mage>cd"


# -- held-out prompts that cannot be used ----------------------------------------------------------------------------


def test_another_prompt_takes_the_place_of_an_unusable_held_out_one_always_the_same(folder, tmp_path):
    made = loaded(folder)
    run = build(made.recipe)
    heldout = Evaluator(run, load_prompts(made.recipe, "heldout"))
    row, first, failures = heldout.score(6)
    assert (row["samples"], row["dropped"]) == (6, 0)
    assert {f"{LONG}{i}" for i in (1, 5)} <= {f.prompt for f in failures} <= {f"{LONG}{i}" for i in (1, 5, 9)}
    shown = [s.prompt.text for s in first.samples]
    assert [shown[i] for i in (0, 2, 3, 4)] == [f"Say {i} now" for i in (0, 2, 3, 4)]
    assert all(text.startswith("Say") for text in shown)
    assert [s.prompt.text for s in heldout.score(6)[1].samples] == shown
    other = build(made.recipe.model_copy(update={"seed": 99}))
    heldout = Evaluator(other, heldout.prompts)
    assert [s.prompt.text for s in heldout.score(6)[1].samples] == shown, "whatever the run's seed"


# -- words that look like placeholders, and columns that are not used -------------------------------------------------


def write(file, *records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_a_literal_image_is_text_where_a_record_has_no_pictures(folder, tmp_path):
    asked = "What does <image> do in <video>?"
    file = write(tmp_path / "tags.jsonl", {"prompt": asked}, {"messages": [{"role": "user", "content": asked}]})
    found = mmrl.load("datasets", "jsonl:prompts")("train", path=str(file), heldout=0)
    assert ([p.text for p in found], found.bad) == ([asked, asked], [])
    pipeline = pipeline_of(folder, "sampling.max_prompt_tokens=100")
    assert asked in pipeline.conditioner.decode(encoded(pipeline, asked))
    assert messages_with_media(found[0]) == [{"role": "user", "content": [{"type": "text", "text": asked}]}]
    template = Rubric("{{ prompt }}|{{ prompt_text }}|{{ response }}", "pointwise")
    broken = asked.replace("<", "< ")  # some judge's tokenizer may have such a token
    assert template.render([Sample(found[0], SampleId(0, 0, 0, 0), text="x")]) == (f"{broken}|{broken}|x",)


def test_a_picture_that_messages_show_must_be_there(tmp_path):
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    file = write(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": parts}]}, {"prompt": "fine"})
    found = mmrl.load("datasets", "jsonl:prompts")("train", path=str(file), heldout=0)
    assert [bad.why for bad in found.bad] == ["its messages show 1 pictures or clips, and the record has none of them"]


def test_columns_that_nobody_reads_are_named_once_in_plan_and_in_training(folder, tmp_path):
    record = {"prompt": "Say hi", "origin": [{"name": "add"}], "level": 3, "lang": "en"}
    file = write(tmp_path / "tools.jsonl", *({**record, "prompt": f"Say {i}"} for i in range(8)))
    made = loaded(folder, *(f"data.{s}={{path: {file}, heldout: 0, meta: [level]}}" for s in ("train", "heldout")))
    for begin in (lambda: plan(made), lambda: build(made.recipe)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            begin()
        named = [str(w.message) for w in seen if issubclass(w.category, UnreadColumns)]
        assert named == [
            f"{file}: the columns origin, lang are not used; to give them to rewards, set meta: [origin, lang] "
            "in data.train and data.heldout"
        ]


def test_columns_of_a_folder_are_named_too(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    write(tmp_path / "metadata.jsonl", {"file_name": "a.png", "prompt": "a", "artist": "b", "answer": "c"})
    with pytest.warns(UnreadColumns, match="the columns artist are not used;"):
        mmrl.load("datasets", "folder:prompts")("train", path=str(tmp_path), heldout=0)
