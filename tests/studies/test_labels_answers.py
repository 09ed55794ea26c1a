"""Answers that are embedded by the model that wrote them, with the pictures of their prompts."""

import json
import math

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli import app
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.learned.labels.embeddings import Content, Embedder, Encoders, model_of
from mmrl.rewards.learned.labels.folder import read
from mmrl.rewards.loading import build, find
from mmrl.studies.labels import table
from tests.support import tiny

allow_cpu_only()  # before transformers is asked for a model
COLOURS = ("red", "blue")
ASKED = "<image>What colour is the circle?"


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A recipe of a tiny language model, and the encoders that read with it."""
    folder = tmp_path_factory.mktemp("writer")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "recipe.yaml").write_text(
        "name: tiny\npipeline: llm/chat\nmodel: {path: tinylm}\ndata: {name: sums}\nsampling: {max_new_tokens: 6}\n"
        "rewards: [{name: 'answer:number'}]\nalgorithm: {type: grpo}\n"
        "train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}\n"
    )
    loaded = load_recipe([str(folder / "recipe.yaml")], [])
    return folder, Encoders("text", "model", "", model_of(loaded.recipe))


def test_the_probabilities_are_those_of_one_plain_forward(writer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, encoders = writer
    model = AutoModelForCausalLM.from_pretrained(folder / "tinylm", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tinylm")
    contents = [Content("1 + 1", "2"), Content("1 + 1", "it is 13"), Content("20 - 7", "")]
    states, found = Embedder(encoders).parts(contents)
    assert len(states) == 3
    for n, content in enumerate(contents):
        said = [{"role": "user", "content": content.prompt}]
        before = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        after = [*tokenizer(content.text, add_special_tokens=False).input_ids]
        after.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *after]])).logits[0, len(before) - 1 : -1].softmax(-1)
        each = [logits[i, token].item() for i, token in enumerate(after)]
        wanted = [each[0], math.prod(each), math.prod(each) ** (1 / len(each)), min(each), each[-1]]
        torch.testing.assert_close(found[n], torch.tensor(wanted), atol=1e-5, rtol=1e-3)


def test_an_embedding_depends_on_the_prompt_and_not_on_the_rest_of_the_batch(writer):
    contents = [Content("1 + 1", "2"), Content("20 - 7", "2"), Content("20 - 7", "it is 13")]
    embedder = Embedder(writer[1])
    together = embedder.parts(contents)
    for n, content in enumerate(contents):
        for one, of in zip(embedder.parts([content]), together, strict=True):
            torch.testing.assert_close(one[0], of[n], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together[0][0], together[0][1], atol=1e-3)


def test_a_model_that_makes_other_samples_is_refused(tmp_path):
    rows = [{"prompt": "1 + 1", "text": f"{n}"} for n in range(30)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"samples.jsonl#{n},{n % 2}" for n in range(1, 21)]
    (tmp_path / table.NAME).write_text("file,label\n" + "\n".join(lines) + "\n")
    done = CliRunner().invoke(app, ["spread", str(tmp_path), "--out", str(tmp_path / "out"), "--model", "shapes-full"])
    assert isinstance(done.exception, UserError)
    assert "this recipe's model makes image, and these samples are of the kind text" in str(done.exception)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A folder of answers to a question about a red or a blue circle, each with its picture; "red" and "blue" in turn,
    half of them right, and labels for half of them."""
    pytest.importorskip("torchvision")

    root = tmp_path_factory.mktemp("answers") / "samples"
    (root / "prompts").mkdir(parents=True)
    rows, labels = [], []
    for n in range(120):
        shown, said = COLOURS[n % 2], COLOURS[n // 2 % 2]
        picture = Image.new("RGB", (32, 32), "black")
        picture.paste(shown, (4 + n % 5, 4 + n % 7, 24, 24))
        picture.save(root / "prompts" / f"{n:03d}.png")
        rows.append({"prompt": ASKED, "text": said, "pictures": [f"prompts/{n:03d}.png"]})
        if n < 60:
            labels.append(f"samples.jsonl#{n + 1},{int(shown == said)}")
    (root / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / table.NAME).write_text("file,label\n" + "\n".join(labels) + "\n")
    return root


@pytest.mark.slow
def test_answers_about_pictures_are_told_apart_by_the_model_that_sees_and_become_a_reward(answered, tmp_path):
    out = tmp_path / "spread"
    done = CliRunner().invoke(app, ["spread", str(answered), "--out", str(out), "--model", "scenes"])
    assert done.exit_code == 0, str(done.exception)
    record = read(out)
    assert record.figures[record.by]["auc"][0] > 0.8
    reward = build(find("labels"), {"path": str(out)})
    assert reward.declaration.inputs == ("text",)
    samples = []
    for n in range(60, 80):
        media = Media("image", data=(answered / "prompts" / f"{n:03d}.png").read_bytes())
        said = COLOURS[n // 2 % 2]
        samples.append(Sample(Prompt(f"{n}", ASKED, media=(media,)), SampleId(0, n, 0, 0), text=said))
    scores = torch.tensor(reward.call(samples, context=Context()))
    right = torch.tensor([n % 2 == n // 2 % 2 for n in range(60, 80)])
    assert scores[right].mean() > scores[~right].mean() + 0.2


@pytest.mark.slow
def test_without_a_model_the_pictures_are_not_read_and_the_labels_are_chance(answered, tmp_path):
    done = CliRunner().invoke(app, ["spread", str(answered), "--out", str(tmp_path / "out"), "--texts", "words"])
    assert done.exit_code == 0, str(done.exception)
    assert "no better than chance" in done.stdout
