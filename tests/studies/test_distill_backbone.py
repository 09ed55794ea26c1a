"""Students for whom the recipe's model reads: what it reads against other code, and real small runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.encoders.described import described, digest
from mmrl.rewards.encoders.pictures import Views
from mmrl.rewards.encoders.texts import Question, TextReader
from mmrl.rewards.learned.distilled.encoders import Backbone, backbone_of, fewer, tokens_of
from mmrl.rewards.learned.distilled.folder import load_encoder
from mmrl.rewards.learned.distilled.read_students import Features, ReadShape, ReadStudents
from mmrl.rewards.learned.distilled.sides import VERDICTS, Pairs, read_pairs
from mmrl.rewards.learned.distilled.students import Side
from mmrl.rewards.loading import Loaded, build, find
from mmrl.studies.distill.distilling import fitted
from mmrl.studies.distill.training import Settings
from tests.support import asleep, tiny
from tests.support.cli import mmrl
from tests.support.distill import JUDGES, RECIPE

allow_cpu_only()  # before transformers is asked for a model
TEXTS = ["12 34", "none at all", "7", "", "a 9 b 8", "111"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "judges.py").write_text(JUDGES)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def made(root: Path) -> Path:
    """A distilled counter of digits, for which the policy reads."""
    words = ["distill", str(root / "tiny.yaml"), "--samples", "320", "--reward", "digits", "--passes", "10"]
    assert mmrl(*words, "--out", str(root / "distilled")) == 0
    return root / "distilled"


def opened(path: Path, **options: Any) -> Loaded:
    return build(find("distilled"), {"path": str(path), **options})


def answers(texts: list[str]) -> list[Sample]:
    return [Sample(Prompt("x", "1 + 1"), SampleId(0, 0, 0, n), text=text) for n, text in enumerate(texts)]


def test_the_states_of_an_answer_are_those_of_one_plain_forward(root: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = load_recipe([str(root / "tiny.yaml")], [])
    reader = TextReader(described(loaded.recipe), "reads", "mmrl distill")
    questions, texts = [Question("1 + 1"), Question("what is 20 - 7?")], ["2", "it is 13", ""]
    of = [0, 1, 1]
    found = reader.states(reader.asked(questions, of, texts))
    model = AutoModelForCausalLM.from_pretrained(root / "tinylm", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "tinylm")
    for n, text in enumerate(texts):
        said = [{"role": "user", "content": questions[of[n]].text}]
        before = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        after = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        with torch.no_grad():
            out = model(torch.tensor([[*before, *after]]), output_hidden_states=True)
        layers = out.hidden_states
        states = torch.cat([layers[0], layers[len(layers) // 2], layers[-1]], -1)[0, len(before) - 1 :]
        logits = out.logits[0, len(before) - 1 : -1].log_softmax(-1)
        count = len(after)
        assert found.mask[n].sum() == count
        torch.testing.assert_close(found.before[n], states[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.answers[n, :count], states[1:], rtol=1e-4, atol=1e-4)
        expected = logits.gather(1, torch.tensor(after)[:, None])[:, 0]
        torch.testing.assert_close(found.log_probs[n, :count], expected, rtol=1e-4, atol=1e-4)
        assert not found.answers[n, count:].any()


def test_neighbours_are_averaged_where_there_are_too_many_tokens() -> None:
    tokens = torch.arange(10.0).view(2, 5, 1)
    found = fewer(Features(tokens, torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])), 2)
    assert found.tokens[..., 0].tolist() == [[1.0, 3.5], [5.0, 6.0]]  # means of 0, 1, 2 and of 3, 4
    assert found.mask.tolist() == [[1, 1], [1, 1]]
    same = fewer(Features(tokens, torch.ones(2, 5)), 8)
    assert torch.equal(same.tokens, tokens)


def test_a_token_of_a_picture_has_what_lies_at_its_place() -> None:
    latents = torch.arange(32.0).view(1, 2, 4, 4)
    errors = [latents + 100, latents + 200]
    rows = latents.flatten(2).transpose(1, 2)  # of each place, as a transformer has them
    coarse = torch.arange(4.0).view(1, 4, 1)  # places of two by two
    found = tokens_of(Views(latents, errors, [rows + 300, coarse]))
    assert found.shape == (1, 16, 2 + 2 * 2 + 2 + 2 + 1)
    place = 4 * 2 + 1  # row 2, column 1
    at = latents[0, :, 2, 1]
    squared = torch.stack([((at + level) ** 2).mean() for level in (100, 200)])
    expected = torch.cat([at, at + 100, at + 200, squared, at + 300, torch.tensor([2.0])])
    torch.testing.assert_close(found[0, place], expected)
    alone = tokens_of(Views(latents, [], [torch.ones(1, 3, 5)]))  # places that are no grid: their mean
    assert torch.equal(alone[0, :, 2:], torch.ones(16, 5))


def test_students_see_numbers_of_one_size_and_no_padding() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    tokens = 1000 + 50 * torch.randn(2, 3, 4)
    students = ReadStudents(ReadShape(4, 4, 3, 3)).eval()
    students.standardize(Features(tokens, mask), Features(tokens, mask))
    there = tokens[mask > 0]
    side = students.sides[0]
    seen = (there - side.mean) / side.spread
    torch.testing.assert_close(seen.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(4), atol=1e-4, rtol=0)
    other = torch.where(mask.unsqueeze(-1) > 0, tokens, 7.0)
    one, two = (students.encode(Features(of, mask), 1) for of in (tokens, other))
    torch.testing.assert_close(one.vectors, two.vectors)
    short = students.encode(Features(tokens[1:, :1], mask[1:, :1]), 1)
    torch.testing.assert_close(short.vectors[0], one.vectors[1])
    torch.testing.assert_close(short.tokens[0], one.tokens[1, :2])


@pytest.mark.slow
def test_a_folder_names_the_model_that_reads(made: Path, root: Path) -> None:
    said = json.loads((made / "distilled.json").read_text())
    assert said["format"] == 2
    assert said["backbone"]["model"]["model"]["path"] == str(root / "tinylm")
    assert said["backbone"]["sha256"] == digest(str(root / "tinylm"))
    assert said["figures"]["heldout"]["interaction"]["order"][1] > 0.5
    assert sorted(file.name for file in made.iterdir()) == ["distilled.json", "model.safetensors", "verdicts.jsonl"]
    declared = find("distilled").declaration.models
    assert declared is not None
    assert [one.path for one in declared({"path": str(made)})] == [str(made), str(root / "tinylm")]


def test_the_reward_scores_the_same_each_time_and_after_sleep(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = opened(made)
    first = reward.call(answers(TEXTS), context=Context())["score"]
    assert first == opened(made).call(answers(TEXTS), context=Context())["score"]
    assert all(0 < value < 1 for value in first)
    alone = [reward.call(answers([text]), context=Context())["score"][0] for text in TEXTS]
    assert alone == pytest.approx(first, abs=1e-4)  # padding rounds differently
    asleep.scores_the_same(reward.sleeper, lambda: reward.call(answers(TEXTS), context=Context())["score"], monkeypatch)


def test_another_model_at_the_place_is_refused(made: Path, root: Path, tmp_path: Path) -> None:
    loaded = load_recipe([str(root / "tiny.yaml")], [])
    said = backbone_of(loaded.recipe)
    moved = tmp_path / "lm"
    shutil.copytree(root / "tinylm", moved)
    there = json.loads(json.dumps(said).replace(str(root / "tinylm"), str(moved)))
    Backbone(there)
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"is not the one with which the students were trained"):
        Backbone(there)
    shutil.rmtree(moved)
    with pytest.raises(UserError, match=r"is not at .*lm any more; run mmrl distill again; or distil with --backbone"):
        Backbone(there)


def test_a_model_that_cannot_read_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    makes = 'text'\ndef build(recipe, path, device):\n    return Mine()\n"
    )
    loaded = load_recipe([str(root / "tiny.yaml")], [])
    recipe = loaded.recipe.model_copy(update={"pipeline": str(tmp_path / "mine.py")})
    with pytest.raises(UserError, match=r"mine\.py.*a stored model names parts of mmrl only"):
        backbone_of(recipe)
    said = backbone_of(loaded.recipe)
    with pytest.raises(UserError, match="is no diffusion model of ours; or distil with --backbone none"):
        Backbone({**said, "makes": "image"})


@pytest.mark.slow
def test_a_diffusion_model_reads_which_picture_fits_its_prompt() -> None:
    """A fast form of the proof: pictures of the right and of the wrong shape in a colour, drawn by rule."""
    from mmrl.datasets import shapes

    loaded = load_recipe(["shapes-judge"], [])
    known = {p.text: p for p in shapes.prompts("all", relations=None)}
    colours, kinds = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle", "cross")
    names = [name for c in colours for k in kinds if (name := f"one {c} {k}") in known]
    pairs = Pairs()
    for group, name in enumerate(names * 2):
        for n, other in enumerate([name, name, names[(group + 1) % len(names)], names[(group + 5) % len(names)]]):
            picture = shapes.picture(known[other], 10 * group + n)
            pairs.add(Side(name), Side("", (picture,)), 0.95 if other == name else 0.05, group)
    backbone = Backbone(backbone_of(loaded.recipe))
    _, record, outcome = fitted(pairs, Settings(epochs=15), "cpu", backbone)
    assert isinstance(record.shape, ReadShape)
    assert outcome.agreements[outcome.student].order[1] > 0.5


def test_a_picture_of_any_size_is_read() -> None:
    loaded = load_recipe(["shapes-judge"], [])
    backbone = Backbone(backbone_of(loaded.recipe))
    pictures = [Image.new("RGB", size, (200, 30, 30)) for size in ((32, 32), (64, 48))]
    asked, given = backbone.read([Side("one red circle")], [0, 0], [Side("", (one,)) for one in pictures])
    assert given.tokens.shape[:2] == (2, 64)
    assert asked.tokens.shape[0] == 1
    assert bool(given.tokens.isfinite().all())


def test_the_adapter_is_trained_from_its_beginning_and_kept(made: Path, root: Path) -> None:
    loaded = load_recipe([str(root / "tiny.yaml")], [])
    backbone = Backbone(backbone_of(loaded.recipe))
    assert backbone.lr == 0.02  # the recipe trains an adapter too
    first = {name: of.detach().clone() for name, of in backbone.adapter.items()}
    assert all(not of.any() for name, of in first.items() if "lora_B" in name)
    pairs = read_pairs(made / VERDICTS)
    before = torch.random.get_rng_state()
    backbone.tune(pairs, range(10), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    once = {name: of.detach().clone() for name, of in backbone.adapter.items()}
    assert any(bool(of.any()) for name, of in once.items() if "lora_B" in name)
    backbone.tune(pairs, range(10), seed=0)
    assert all(torch.equal(of, once[name]) for name, of in backbone.adapter.items())
    assert not any(of.requires_grad for of in backbone.adapter.values())
    kept = load_encoder(made)
    assert isinstance(kept, Backbone)
    assert any(bool(of.any()) for name, of in kept.adapter.items() if "lora_B" in name)
    with pytest.raises(ValueError, match="not the adapter"):
        kept.load({})


@pytest.mark.slow
def test_a_run_trains_on_it_asks_the_judge_and_resumes(made: Path, root: Path, tmp_path: Path) -> None:
    reward = f"rewards=[{{name: distilled, options: {{path: {made}, judge_below: 0.8}}}}]"

    def trained(out: Path, *more: str) -> None:
        assert mmrl("train", str(root / "tiny.yaml"), reward, *more, "--out", str(out)) == 0

    trained(tmp_path / "whole")
    trained(tmp_path / "parts", "train.steps=1")
    trained(tmp_path / "parts", "--resume")
    rows, again = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    kept = ("reward/mean", "reward/distilled/asked", "reward/distilled/off", "policy/loss", "optim/grad_norm")
    assert [[row.get(k) for k in kept] for row in again] == [[row.get(k) for k in kept] for row in rows]
