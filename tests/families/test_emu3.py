"""A model that writes pictures as tokens, on a tiny real Emu3: its frame, guidance, log-probs, runs and refusals."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

import mmrl
from mmrl.app.export import export
from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.trajectory import Prompt, SampleId, Slot, Turn
from mmrl.logging.card import public
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from tests.support import tiny
from tests.support.rows import distance
from tests.support.text import recipe

emu3 = mmrl.load("pipelines", "llm/emu3")
TEXTS = ["a red circle", "two of them", "a longer text than the others, so that padding matters"]
HEIGHT, WIDTH = 8, 12
TOKENS = 2 * (3 + 1) + 3


def picture(**more):
    return {"max_new_tokens": TOKENS, "picture": {"height": HEIGHT, "width": WIDTH, **more}}


GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurry"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.picture_writer(tmp_path_factory.mktemp("emu3"))


def built(path, changes, **more):
    made = recipe(path, sampling=picture(**changes), **more).model_copy(update={"pipeline": "llm/emu3"})
    return emu3.build(made, str(path), torch.device("cpu"))


@pytest.fixture(scope="module", params=[{}, GUIDED], ids=["plain", "guided"])
def pipeline(request, path):
    return built(path, request.param)


def rows(size=2):
    slots = [Slot(0, i, 0, Prompt(f"p{i}", text)) for i, text in enumerate(TEXTS)]
    pairs = [(slot, SampleId(0, slot.index, 0, k)) for slot in slots for k in range(size)]
    return [s for s, _ in pairs], [i for _, i in pairs]


def sampled(pipeline, at=slice(None), slots=None, **more):
    slots, ids = rows() if slots is None else slots
    pipeline.encode(slots)
    return pipeline.sample(slots[at], ids[at], [], 7, **more)


def by_hand(pipeline, text, negative, written):
    """Log-probs ``[T]`` of ``written``, by forwards of one row and a softmax over what may stand at each place."""
    model, processor, frame = pipeline.policy, pipeline.conditioner.saved, pipeline.frame

    def said(asked):
        before = processor.tokenizer(f"<|extra_203|>{asked}<|image start|>2*3<|image token|>").input_ids
        ids = torch.tensor([before + written.tolist()])
        return model(input_ids=ids).logits[0, len(before) - 1 : -1]

    logits = said(text)
    if negative is not None:
        other = said(negative)
        logits = other + frame.scale * (logits - other)
    found, codes = [], model.vocabulary_mapping.image_tokens
    for place, token in enumerate(written.tolist()):
        at = [*codes] if place < 8 and place % 4 < 3 else [token]
        found.append(logits[place, at].log_softmax(-1)[at.index(token)])
    return torch.stack(found)


def test_log_probs_and_gradients_are_those_of_a_full_forward(pipeline):
    drawn = sampled(pipeline)
    again = pipeline.replay(drawn, [], frozenset({"log_probs", "entropy"}), None)
    assert distance(again["log_probs"], drawn) < 1e-5
    assert (again["entropy"].detach() * drawn.padded("action_mask")).sum(1).min() > 1
    (again["log_probs"] * drawn.padded("action_mask")).sum().backward()
    weight = pipeline.policy.lm_head.weight
    own, weight.grad = weight.grad, None
    negative = "blurry" if pipeline.frame.guided else None
    texts = [slot.prompt.text for slot in drawn.slots]
    hand = [by_hand(pipeline, t, negative, w) for t, w in zip(texts, drawn.padded("tokens"), strict=True)]
    assert distance(torch.stack(hand), drawn) < 1e-5
    torch.stack(hand).sum().backward()  # forced tokens have no gradient
    assert own.abs().max() > 0.1
    assert torch.allclose(own, weight.grad, atol=1e-4, rtol=1e-4)
    weight.grad = None
    wrong = pipeline.replay(drawn.rows([2]), [], frozenset({"log_probs"}), None)["log_probs"]
    assert distance(wrong, drawn.rows([4])) > 0.2, "the comparison cannot fail"


def test_a_picture_is_a_frame_and_depends_on_its_own_seed(pipeline):
    drawn = sampled(pipeline)
    tokens, names = drawn.padded("tokens"), pipeline.conditioner.tokenizer
    end_of_row = names.convert_tokens_to_ids("<|extra_200|>")
    ends = [names.convert_tokens_to_ids(t) for t in ("<|extra_201|>", "<|image end|>", "<|im_end|>")]
    assert tokens.shape[1] == TOKENS
    assert (tokens[:, [3, 7]] == end_of_row).all()
    assert (tokens[:, -3:] == torch.tensor(ends)).all()
    codes = torch.isin(tokens, torch.tensor(pipeline.policy.vocabulary_mapping.image_tokens))
    assert torch.equal(codes, drawn.padded("action_mask"))
    assert codes.sum() == 6 * len(tokens)
    assert not drawn.truncated.any()
    assert (drawn.padded("log_probs")[~codes] == 0).all()
    alone = sampled(pipeline, slice(3, 4))
    assert torch.equal(alone.padded("tokens")[0], tokens[3])
    assert len({tuple(row) for row in tokens.tolist()}) == len(tokens)


def test_the_pixels_are_those_of_transformers(pipeline):
    drawn = sampled(pipeline)
    made = pipeline.samples(drawn, frozenset({"image", "tensor"}))
    model, processor = pipeline.policy, pipeline.conditioner.saved
    pixels = model.decode_image_tokens(image_tokens=drawn.padded("tokens"), height=2, width=3)
    shown = processor.postprocess(list(pixels), return_tensors="PIL.Image.Image")["pixel_values"]
    for sample, theirs in zip(made, shown, strict=True):
        assert sample.image.size == (WIDTH, HEIGHT)
        apart = np.asarray(sample.image, int) - np.asarray(theirs, int)
        assert abs(apart).max() <= 1  # of 255: one rounds, the other cuts
        assert sample.text is None
        assert sample.tensor.shape == (3, HEIGHT, WIDTH)


def test_a_prompts_own_negative_prompt_goes_before_the_recipes(path):
    pipeline = built(path, GUIDED)
    slots, ids = rows()
    own = [replace(s, prompt=replace(s.prompt, negative_prompt="dark" if s.index else None)) for s in slots]
    drawn = sampled(pipeline, slots=(own, ids))
    for n, wanted in ((0, "blurry"), (2, "dark")):
        row = drawn.rows([n])
        hand = by_hand(pipeline, row.slots[0].prompt.text, wanted, row.padded("tokens")[0])
        assert distance(hand.unsqueeze(0), row) < 1e-5
    plain = built(path, {})
    with pytest.raises(UserError, match=r"negative_prompt.*guidance_scale is 1"):
        plain.encode(own)


@pytest.mark.filterwarnings("ignore::mmrl.models.text.spelled.SpelledTokens")
def test_control_tokens_that_a_prompt_spells_are_text(pipeline):
    ids = pipeline.conditioner.encode(Prompt("p", "a <|image start|> <|visual token 000003|>"))["input_ids"]
    assert (ids == pipeline.conditioner.tokenizer.convert_tokens_to_ids("<|image start|>")).sum() == 1
    assert not torch.isin(ids, torch.tensor(pipeline.policy.vocabulary_mapping.image_tokens)).any()


def test_what_a_picture_cannot_have_makes_a_bad_prompt(pipeline):
    for wrong in ({"system": "Draw."}, {"turns": (Turn("user", "a"),)}, {"max_new_tokens": 4}):
        with pytest.raises(BadPromptError, match=r"take .* out"):
            pipeline.conditioner.encode(Prompt("p", "a red circle", **wrong))


@pytest.fixture(scope="module")
def folder(path, tmp_path_factory):
    """A recipe of a run, rewarded for red."""
    home = tmp_path_factory.mktemp("recipe")
    (home / "redness.py").write_text(
        "import numpy as np\nimport mmrl\n\n\n@mmrl.reward(inputs=('image',))\ndef score(samples, *, context=None):\n"
        "    return [float(np.asarray(s.image, float)[..., 0].mean() / 255) for s in samples]\n"
    )
    values = {
        "name": "emu",
        "pipeline": "llm/emu3",
        "model": {"path": str(path)},
        "data": {"name": "shapes"},
        "sampling": picture(**GUIDED),
        "rewards": [{"name": "redness.py:score"}],
        "algorithm": {"type": "grpo"},
        "train": {"steps": 3, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        "optim": {"lr": 1.0e-3},
        "eval": {"every": 3, "samples": 4, "grid": 4},
        "checkpoint": {"every": 1},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(values))
    return home


def rows_of(run):
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left = ("time/", "perf/", "plan/", "features/")
    return [{k: v for k, v in row.items() if not k.startswith(left)} for row in kept]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_learns_resumes_and_exports_for_transformers(folder, tmp_path, monkeypatch, lora):
    more = ["model.lora={rank: 4}", "optim.lr=1e-2"] if lora else []
    loaded = load_recipe([folder / "recipe.yaml"], more)
    assert not plan(loaded).problems
    train(loaded, tmp_path / "run")
    train(load_recipe([folder / "recipe.yaml"], [*more, "train.steps=2"]), tmp_path / "cut")
    train(loaded, tmp_path / "cut", resume=True)
    made = rows_of(tmp_path / "run")
    assert made == rows_of(tmp_path / "cut")
    assert made[0]["policy/first_ratio_max_dev"] == 0
    assert max(row["mismatch/log_prob_gap_max"] for row in made) < 1e-5
    assert (made[0]["text/length"], made[0]["policy/ratio"]) == (6, 1)  # what is forced counts nowhere
    assert (tmp_path / "run" / "samples" / "step_000003.png").is_file()
    what = "lora" if lora else "merged"
    export(tmp_path / "run", tmp_path / "out", what, "latest")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    left = {}
    monkeypatch.chdir(tmp_path)
    base_path = loaded.recipe.model.path
    exec(code.replace(f'"{public(base_path)}"', repr(str(base_path))), left)
    assert left["picture"].size == (WIDTH, HEIGHT)
    base = tiny_weights(base_path)
    now = left["model"].state_dict()
    assert set(base) == set(now)
    changed = {name for name in base if not torch.equal(base[name], now[name])}
    assert "model.text_model.layers.0.self_attn.q_proj.weight" in changed
    assert not any("vqmodel" in name for name in changed)


@pytest.mark.slow
def test_a_critic_reads_the_prompts_alone_under_guidance(folder, tmp_path):
    changes = ["algorithm={type: ppo, aggregation: token_mean}", "train.steps=2"]
    train(load_recipe([folder / "recipe.yaml"], changes), tmp_path / "run")
    first = rows_of(tmp_path / "run")[0]
    assert (first["policy/first_ratio_max_dev"], first["policy/ratio"]) == (0, 1)


def tiny_weights(path):
    from transformers import Emu3ForConditionalGeneration

    return Emu3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).state_dict()


REFUSED = [
    (["rollout.engine=vllm"], "rollout.engine: vllm writes texts"),
    (["rollout.engine=sglang"], "rollout.engine: sglang writes texts"),
    (["sampling.picture.height=10"], "sampling.picture.height: the VQ model makes 4 pixels of a token.*set it to 8"),
    (["sampling.max_new_tokens=64"], "sampling.max_new_tokens: a picture of 8 x 12 pixels is 11 tokens.*set it to 11"),
    (["sampling.picture={height: 8, width: 12, guidance_scale: 3}"], "sampling.picture.negative_prompt: guidance"),
    (["sampling.picture={height: 8, width: 12, negative_prompt: x}"], "sampling.picture.negative_prompt: without"),
    (["sampling.stop=[x]"], "sampling.stop: it is for texts"),
    (["environment={name: tools, options: {tools: []}}"], "environment: a picture is one turn"),
    (["train.backend=fsdp"], "train.backend: the model that decodes"),
    (["pipeline=llm/chat"], "sampling.picture: llm/chat writes texts"),
    (["sampling={max_new_tokens: 11}"], "sampling.picture: llm/emu3 writes pictures"),
    (["algorithm={type: dpo}"], "algorithm.type: dpo trains on given pairs of texts"),
    (["rewards=[{name: 'answer:exact'}]"], "reads 'text'.*makes pictures"),
]


@pytest.mark.parametrize(("edits", "said"), REFUSED, ids=[" ".join(edits) for edits, _ in REFUSED])
def test_what_is_impossible_is_refused_in_the_plan(folder, edits, said):
    try:
        found = "\n".join(plan(load_recipe([folder / "recipe.yaml"], edits)).problems)
    except UserError as error:
        found = str(error)
    assert re.search(said, found), found
