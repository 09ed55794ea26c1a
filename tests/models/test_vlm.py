"""Vision-language models: tiny real ones with real processors; pictures and clips of any size, several in a prompt."""

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.models.text.features import as_weights, key_of
from mmrl.models.text.overlong import Fitter, Limit
from tests.support import tiny
from tests.support.rows import distance, with_prompts_of
from tests.support.vlm import clip, picture

allow_cpu_only()
pytest.importorskip("torchvision")

chat = mmrl.load("pipelines", "vlm/chat")
KINDS = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]


def recipe(path, **changes):
    values = {
        "name": "tiny",
        "pipeline": "vlm/chat",
        "model": {"path": str(path)},
        "data": {"name": "scenes"},
        "sampling": {"max_new_tokens": 10},
        "rewards": [{"name": "answer:exact"}],
        "algorithm": {"type": "grpo", "kl_coef": 0.0},
        "train": {"steps": 1, "prompts_per_step": 3, "group_size": 2, "micro_batch_size": 8},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value}
    return Recipe.model_validate(values)


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    return tiny.vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def pipeline(path):
    return chat.build(recipe(path), str(path), torch.device("cpu"))


def drawn(pipeline, prompts, size=2):
    slots = [Slot(0, i, 0, prompt) for i, prompt in enumerate(prompts)]
    rows = [(slot, SampleId(0, slot.index, 0, k)) for slot in slots for k in range(size)]
    pipeline.encode(slots)
    return pipeline.sample([s for s, _ in rows], [i for _, i in rows], [], 3)


def replayed(pipeline, trajectory):
    return pipeline.replay(trajectory, [0], frozenset({"log_probs"}), None)["log_probs"]


def test_sampling_and_replay_agree_with_pictures(pipeline):
    prompts = [
        Prompt("one", "What is <image>?", media=(picture(40, 40, 1),)),
        Prompt("wide", "<image>What colour is it, and why would anybody ask?", media=(picture(90, 40, 2),)),
        Prompt("before", "No placeholder.", media=(picture(40, 70, 3),)),
    ]
    trajectory = drawn(pipeline, prompts)
    assert (
        (replayed(pipeline, trajectory) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() < 2e-5
    others = [
        Prompt(p.id, p.text, media=(picture(*size, 9),))
        for p, size in zip(prompts, [(40, 40), (90, 40), (40, 70)], strict=True)
    ]
    other = drawn(pipeline, others)
    swapped = with_prompts_of(trajectory, other)
    assert (
        (replayed(pipeline, swapped) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() > 1e-2, "blind"


def test_several_pictures_in_a_prompt(pipeline):
    two = Prompt("two", "<image> or <image>?", media=(picture(40, 40, 1), picture(60, 40, 2)))
    turned = Prompt("turned", "<image> or <image>?", media=(picture(60, 40, 2), picture(40, 40, 1)))
    trajectory = drawn(pipeline, [two, turned])
    assert (
        (replayed(pipeline, trajectory) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() < 2e-5
    alone = trajectory.rows([0])
    assert (replayed(pipeline, alone)[0] - replayed(pipeline, trajectory)[0, : alone.width]).abs().max() < 2e-5


def test_prompts_with_one_and_with_two_pictures_share_a_batch(pipeline):
    one = Prompt("one alone", "What is <image>?", media=(picture(40, 40, 5),))
    two = Prompt("two beside", "<image> or <image>?", media=(picture(40, 40, 6), picture(60, 40, 7)))
    trajectory = drawn(pipeline, [one, two])
    assert (
        (replayed(pipeline, trajectory) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() < 2e-5
    for row in (0, 2):
        alone = trajectory.rows([row])
        length = alone.padded("tokens").shape[1]
        assert (replayed(pipeline, alone)[0] - replayed(pipeline, trajectory)[row, :length]).abs().max() < 2e-5


def test_clips(pipeline):
    prompts = [Prompt("a", "Which way? <video>", media=(clip(0),)), Prompt("b", "<video> Which way?", media=(clip(1),))]
    trajectory = drawn(pipeline, prompts)
    assert (
        (replayed(pipeline, trajectory) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() < 2e-5
    other = drawn(pipeline, prompts[::-1])
    swapped = with_prompts_of(trajectory, other)
    assert (
        (replayed(pipeline, swapped) - trajectory.padded("log_probs")) * trajectory.padded("action_mask")
    ).abs().max() > 1e-2, "blind"


def test_the_processor_sees_a_prompt_once(pipeline, monkeypatch):
    calls = []
    original = pipeline.conditioner.encode
    monkeypatch.setattr(pipeline.conditioner, "encode", lambda prompt: calls.append(prompt.id) or original(prompt))
    prompt = Prompt("once", "Only <image> once", media=(picture(seed=77),))
    drawn(pipeline, [prompt], size=4)
    drawn(pipeline, [prompt], size=4)
    assert calls == ["once"]


def refused(pipeline, prompt):
    with pytest.raises(BadPromptError) as caught:
        pipeline.encode([Slot(0, 0, 0, prompt)])
    return str(caught.value)


def test_unusable_prompts_are_named(pipeline):
    assert "the prompt few: it has the placeholders image, image and the media image" in refused(
        pipeline, Prompt("few", "<image><image>", media=(picture(),))
    )
    assert "the placeholders video and the media image" in refused(
        pipeline, Prompt("kind", "<video>", media=(picture(),))
    )
    assert "the prompt torn" in refused(
        pipeline, Prompt("torn", "<image>", media=(Media("image", data=b"\x89PNG no"),))
    )


def test_frozen_vision_and_lora_leave_the_tower_alone(path):
    def trained(**model):
        made = chat.build(recipe(path, model=model), str(path), torch.device("cpu"))
        return [name for name, p in made.policy.named_parameters() if p.requires_grad]

    everything = trained()
    towers = [name for name in everything if "visual" in name or "vision" in name]
    assert towers
    tower = "visual" if "visual" in towers[0] else "vision_model"
    assert not any(tower in name.split(".") for name in trained(freeze=[tower]))
    adapters = trained(lora={"rank": 2})
    assert adapters
    assert all("lora" in name and "visual" not in name and "vision" not in name for name in adapters)


@pytest.mark.parametrize(("load", "last"), [("build", torch.device("cpu")), ("describe", None)])
def test_a_model_of_another_sort_is_told_its_pipeline(load, last):
    loaded = load_recipe(["scenes"], ["pipeline=llm/chat"])
    make = getattr(mmrl.load("pipelines", "llm/chat"), load)
    with pytest.raises(UserError, match=r"it has a Qwen2_5_VLConfig\n  Set pipeline: vlm/chat for a model that sees"):
        make(loaded.recipe, loaded.recipe.model.path, last)


def test_tokens_of_pictures_count_and_a_cut_leaves_pictures_whole(pipeline):
    conditioner = pipeline.conditioner
    prompt = Prompt("long", "one two three <image> four five six", media=(picture(),))
    whole = conditioner.encode(prompt)
    length, alone = (
        len(conditioner.encode(p)["input_ids"]) for p in (prompt, Prompt("x", "one two three four five six"))
    )
    assert length > alone
    with pytest.raises(BadPromptError, match=rf"the prompt long: it has {length} tokens, too many"):
        Fitter(conditioner, "skip").encode(prompt, Limit(length - 1, ", too many"))
    shown, features = Fitter(conditioner, "cut").encode(prompt, Limit(length - 5, ", too many"))
    assert prompt.text.endswith(shown.text)
    assert "<image> four five six" in shown.text
    assert length - 10 < len(features["input_ids"]) <= length - 5
    assert torch.equal(features["pixel_values"], whole["pixel_values"])


def test_a_literal_image_is_text_where_there_is_none(pipeline):
    prompt = Prompt("word", "What is <image>?")  # SmolVLM's own token is spelled like that
    tokens = pipeline.conditioner.encode(prompt)["input_ids"].tolist()
    assert "What is <image>?" in pipeline.conditioner.decode(tokens)


def encoded(pipeline, monkeypatch):
    """Calls of the vision tower from now on, each with how much of pictures it was given."""
    model, calls = pipeline.policy.base_model, []
    tower = model.visual if hasattr(model, "visual") else model.vision_model
    plain = type(tower).forward

    def noted(self, *given, **named):
        pixels = given[0] if given else named["pixel_values"]
        calls.append(len(pixels))
        return plain(self, *given, **named)

    monkeypatch.setattr(type(tower), "forward", noted)
    return calls


def in_rows(pipeline, trajectory, trained=None):
    """Log-probs of the rows; with ``trained``, the gradient of their sum for this parameter too."""
    found = replayed(pipeline, trajectory)
    if trained is None:
        return found.detach()
    return found.detach(), torch.autograd.grad((found * trajectory.padded("action_mask")).sum(), trained)[0]


def test_a_response_in_two_parts_is_that_drawn_at_once(pipeline):
    prompts = [
        Prompt("halved", "What is <image>?", media=(picture(40, 40, 21),)),
        Prompt("wide", "<image>What colour is it, and why would anybody ask?", media=(picture(90, 40, 22),)),
        Prompt("text", "No placeholder, but a picture.", media=(picture(40, 70, 23),)),
    ]
    whole = drawn(pipeline, prompts, size=3)
    begun = pipeline.begin(whole.slots, whole.ids, [], 3, 4)
    assert begun.under_way.any()
    finished = pipeline.finish(begun, [], 3, 4)
    assert torch.equal(finished.padded("tokens"), whole.padded("tokens"))
    assert torch.equal(finished.padded("action_mask"), whole.padded("action_mask"))
    torch.testing.assert_close(finished.padded("log_probs"), whole.padded("log_probs"), rtol=1e-3, atol=2e-5)


def test_a_picture_is_encoded_once_for_its_group_and_the_rows_are_those_of_each_alone(pipeline, monkeypatch):
    one = Prompt("one of three", "What is <image>?", media=(picture(40, 40, 11),))
    two = Prompt("two of three", "<image> or <image>?", media=(picture(40, 40, 12), picture(60, 40, 13)))
    calls = encoded(pipeline, monkeypatch)
    first = drawn(pipeline, [one, two], size=3)
    mixed = first.rows([0, 3, 1, 4, 2, 5])  # a group need not stand together
    tower = next(p for name, p in pipeline.policy.named_parameters() if "vis" in name and p.ndim > 1)
    shared, gradient = in_rows(pipeline, mixed, tower)
    assert len(calls) == 2
    assert calls[0] == calls[1]
    monkeypatch.setattr(pipeline.shared, "_fits", lambda *given: False)
    plain, wanted = in_rows(pipeline, mixed, tower)
    assert calls[2] == 3 * calls[1]
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max())
    assert distance(shared, mixed) < 2e-5


def test_a_clip_is_encoded_once_for_its_group(pipeline, monkeypatch):
    calls = encoded(pipeline, monkeypatch)
    trajectory = drawn(pipeline, [Prompt("c", "Which way? <video>", media=(clip(5),))])
    shared = in_rows(pipeline, trajectory)
    monkeypatch.setattr(pipeline.shared, "_fits", lambda *given: False)
    plain = in_rows(pipeline, trajectory)
    assert calls == [calls[0], calls[0], 2 * calls[0]]
    assert torch.allclose(shared, plain, rtol=0, atol=1e-5)


def test_a_copy_encodes_with_its_own_weights_and_other_batches_are_left_alone(pipeline):
    import copy

    prompt = Prompt("copied", "What is <image>?", media=(picture(40, 40, 14),))
    trajectory = drawn(pipeline, [prompt])
    other = copy.deepcopy(pipeline.policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    keys = [key_of(slot.prompt) for slot in trajectory.slots]
    inputs = pipeline._inputs(keys, [pipeline.features.get(key) for key in keys])
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    with torch.no_grad():
        copied = other.base_model.get_image_features(**pixels, return_dict=True).pooler_output
        mine = pipeline.policy.base_model.get_image_features(**pixels, return_dict=True).pooler_output
        again = {name: value.clone() for name, value in pixels.items()}  # not what was announced
        alone = pipeline.policy.base_model.get_image_features(**again, return_dict=True).pooler_output
    assert all(part.abs().max() == 0 for part in copied)
    assert len(mine) == len(alone) == 2
    for a, b in zip(mine, alone, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)
        assert a.abs().max() > 0


TIMES = ("second_per_grid_ts", "video_second_per_grid")
"""Floating features that are no pixels."""


@pytest.mark.sweep("pixels of a family in the dtype of its weights")
def test_what_a_processor_makes_has_the_dtype_of_the_weights(sweep):
    from tests.support import processors

    for family in processors.FAMILIES:
        processor = processors.processor(family)
        shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        text = processor.apply_chat_template(shown, add_generation_prompt=True)
        for made_in in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            made = processor(text=[text], images=[[Image.new("RGB", (56, 56))]], return_tensors="pt")
            made = {name: t.to(made_in) if t.is_floating_point() else t for name, t in made.items()}
            for dtype in (torch.bfloat16, torch.float32):
                given = as_weights(made, torch.nn.Linear(1, 1, dtype=dtype), torch.device("cpu"))
                wrong = {name: t.dtype for name, t in given.items() if t.is_floating_point() and t.dtype != dtype}
                pixels = any(t.is_floating_point() for t in given.values())
                sweep.check(pixels and not {*wrong} - {*TIMES}, (family, made_in, dtype, wrong))
    sweep.done()


def llama4(folder):
    """A tiny Llama 4, whose processor makes pixels in bfloat16."""
    import transformers as t

    from tests.support import processors

    processor = processors.processor("llama4")
    tok = processor.tokenizer
    find = tok.convert_tokens_to_ids
    text = {
        "vocab_size": len(tok),
        "hidden_size": 32,
        "intermediate_size": 32,
        "intermediate_size_mlp": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 512,
        "pad_token_id": tok.pad_token_id,
        "eos_token_id": tok.eos_token_id,
        "bos_token_id": tok.bos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "pixel_shuffle_ratio": 0.5,
    }
    config = t.Llama4Config(text_config=text, vision_config=vision, image_token_index=find("<|patch|>"))
    torch.manual_seed(0)
    t.Llama4ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_pixels_have_the_dtype_of_the_weights(tmp_path):
    path = llama4(tmp_path)
    made = chat.build(recipe(path), str(path), torch.device("cpu"))
    trajectory = drawn(made, [Prompt("p", "What is <image>?", media=(picture(40, 40, 1),))])
    assert trajectory.padded("tokens").shape[0] == 2
    assert made.features.get(trajectory.features[0])["pixel_values"].dtype == torch.float32
    assert replayed(made, trajectory).isfinite().all()
