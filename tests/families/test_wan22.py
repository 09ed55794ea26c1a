"""Wan 2.2 as tiny pipelines of the real class: TI2V-5B, whose VAE has patches, and A14B, of two models."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmrl
from mmrl.algorithms.objective import GraphSteps
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.randomness import noise
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.policy import Policy
from mmrl.planner.new_recipe.model import look_at_model

allow_cpu_only()  # before transformers imports torchvision

import diffusers  # noqa: E402

from mmrl.pipelines.diffusion import contract, export  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] * (check is not contract.sampling_is_the_stock_pipelines))
        for check in contract.CHECKS
    ],
)
def test_ti2v_keeps_the_contract(folders, check):
    check(recipe("wan22_ti2v", folders, guidance_scale=4.0, steps=3))


@pytest.mark.slow
def test_all_weights_of_ti2v_train(folders):
    contract.first_ratio_is_one(recipe("wan22_ti2v", folders, lora=False))
    contract.two_steps_move_every_parameter(recipe("wan22_ti2v", folders, lora=False))


def test_ti2v_has_sixteen_pixels_to_a_latent_and_four_frames(folders):
    adapter = contract.Case(recipe("wan22_ti2v", folders)).pipeline.adapter
    assert adapter.latent_shape(64, 32) == (8, 2, 4, 2)
    clip = torch.rand(1, 5, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = adapter.encode_image(clip)
        assert latents.shape == (1, 8, 2, 4, 2)
        assert adapter.decode(latents).shape == clip.shape
    with pytest.raises(UserError, match=r"48 x 32 is no multiple of 32.*use 64 x 32"):
        contract.Case(recipe("wan22_ti2v", folders, height=48))


def test_a_time_for_every_token_is_that_of_the_sample(folders):
    """Text-to-video gives all tokens one time, so that the model needs no second kind of input."""
    pipeline = contract.Case(recipe("wan22_ti2v", folders)).pipeline
    x = torch.randn(2, *pipeline.shape, generator=torch.Generator().manual_seed(0))
    features = {k: torch.stack([v, v]) for k, v in pipeline.adapter.encode("a red circle").items()}
    times = torch.tensor([900.0, 300.0])
    with torch.no_grad():
        one = pipeline.adapter.predict(pipeline.policy, x, times, features)
        each = pipeline.adapter.predict(pipeline.policy, x, times.unsqueeze(1).expand(2, 2), features)
    torch.testing.assert_close(one, each, rtol=1e-5, atol=1e-6)
    assert (one[0] - one[1]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
def test_other_kinds_of_objective_have_gradients(folders, algorithm):
    made = recipe("wan22_ti2v", folders).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(1, 2), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset(), case.policy.using)
        out["v"].square().sum().backward()
    assert all(p.grad is not None for p in case.policy.trainable.values())
    assert any(p.grad.abs().sum() > 0 for p in case.policy.trainable.values())


# -- A14B: two models ------------------------------------------------------------------------------------------------


SCALES = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] * (check is not contract.sampling_is_the_stock_pipelines))
        for check in contract.CHECKS
    ],
)
def test_two_models_keep_the_contract(folders, check):
    check(recipe("wan22_a14b", folders, **SCALES))


@pytest.mark.slow
def test_all_weights_of_two_models_train(folders):
    contract.first_ratio_is_one(recipe("wan22_a14b", folders, lora=False, **SCALES))
    contract.two_steps_move_every_parameter(recipe("wan22_a14b", folders, lora=False))


@pytest.mark.parametrize("scales", [SCALES, {"guidance_scale": 1.0}])
def test_latents_of_two_models_are_the_stock_pipelines(folders, scales):
    """To the bit without guidance; with it the two predictions are of one batch here, of two there."""
    case = contract.Case(recipe("wan22_a14b", folders, steps=10, lora=False, **scales))
    slot, name = case.slots[0], case.ids[0]
    ours = case.pipeline.sample([slot], [name], [], seed=5).clean
    pipe = case.pipeline.adapter.pipe
    pipe.set_progress_bar_config(disable=True)

    def gap(**change):
        given = {"height": 32, "width": 32, "num_inference_steps": 10} | case.pipeline.adapter.call() | change
        start = noise(5, [name], "initial", case.pipeline.shape)
        with torch.no_grad():
            theirs = pipe(prompt=slot.prompt.text, latents=start, output_type="latent", **given).frames
        return (ours - theirs).abs().max().item()

    assert gap() <= (0 if scales["guidance_scale"] == 1 else 1e-5)
    if "guidance_scale_2" in scales:
        assert gap(guidance_scale_2=None) > 1e-3
        pipe.transformer, pipe.transformer_2 = pipe.transformer_2, pipe.transformer
        assert gap() > 1e-3


def gradients(pipeline, rows, actions):
    """Of the log-probs of noisy steps, by the names of the trained weights."""
    policy = Policy(pipeline.policy, pipeline.recipe.optim, total_updates=1)
    pipeline.replay(rows, actions, frozenset({"log_probs"}), policy.using)["log_probs"].sum().backward()
    found = {n: p.grad.clone() for n, p in policy.trainable.items() if p.grad is not None}
    policy.optimizer.zero_grad(set_to_none=True)
    return found


@pytest.mark.slow
def test_each_of_two_models_has_the_gradient_of_a_pipeline_of_it_alone(folders, tmp_path):
    case = contract.Case(recipe("wan22_a14b", folders, steps=4, lora=False, **SCALES))
    pipeline = case.pipeline
    steps = pipeline.noisy_steps(0)
    rows = pipeline.sample(case.slots, case.ids, steps, seed=0)
    times = pipeline.adapter.schedule(4).timesteps[: len(steps)]
    assert (times >= 900).tolist() == [True, False, False]
    every = gradients(pipeline, rows, [0, 1, 2])
    for name, actions, scale in (("transformer", [0], 4.0), ("transformer_2", [1, 2], 3.0)):
        folder = tmp_path / name
        shutil.copytree(folders["wan22_a14b"], folder)
        index = json.loads((folder / "model_index.json").read_text())
        index |= {"boundary_ratio": None, "transformer_2": [None, None]}
        (folder / "model_index.json").write_text(json.dumps(index))
        if name != "transformer":
            shutil.rmtree(folder / "transformer")
            shutil.copytree(folders["wan22_a14b"] / name, folder / "transformer")
        alone = contract.Case(recipe("wan", {"wan": folder}, steps=4, lora=False, guidance_scale=scale)).pipeline
        alone.encode(case.slots)
        expected = gradients(alone, rows, actions)
        own = {n.removeprefix(f"{name}."): g for n, g in every.items() if n.startswith(f"{name}.")}
        assert own.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(own[key], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item() + 1e-7)
        assert {n.partition(".")[0] for n in gradients(pipeline, rows, actions)} == {name}, "the other has none"


def test_the_lora_of_each_of_two_models_is_a_file_and_goes_on(folders, tmp_path):
    case = contract.Case(recipe("wan22_a14b", folders))
    case.push()
    case.pipeline.write(tmp_path / "out", "lora")
    names = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert names == {"adapter_model.safetensors", "pytorch_lora_weights.safetensors", export.SECOND}
    first, second = (load_file(tmp_path / "out" / file) for file in ("pytorch_lora_weights.safetensors", export.SECOND))
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[key], second[key]) for key in first)
    assert (
        "load_into_transformer_2=True"
        in case.pipeline.usage("out", "lora", case.slots[0].prompt).code["With diffusers"]
    )
    made = recipe("wan22_a14b", folders).model_dump(mode="json")
    made["model"]["lora"] = {"path": str(tmp_path / "out")}
    goes_on = contract.Case(Recipe.model_validate(made))
    for name, weight in case.policy.trainable.items():
        assert torch.equal(weight, goes_on.policy.trainable[name])
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "transformer_2" not in k}, tmp_path / "out/adapter_model.safetensors"
    )
    with pytest.raises(UserError, match=r"lacks transformer_2, and Wan 2.2 A14B has a LoRA for each of"):
        contract.Case(Recipe.model_validate(made))
    (tmp_path / "out" / "adapter_config.json").unlink()
    (tmp_path / "out" / "adapter_model.safetensors").unlink()
    made["model"]["lora"] = {"path": str(tmp_path / "out" / "pytorch_lora_weights.safetensors")}
    with pytest.raises(UserError, match=r"lacks the names of its models.*mmrl export --what lora"):
        contract.Case(Recipe.model_validate(made))
    made["model"]["lora"] = {"rank": 4, "alpha": 8}
    contract.Case(Recipe.model_validate(made))


@pytest.mark.slow
def test_a_merged_export_has_both_models(folders, tmp_path):
    case = contract.Case(recipe("wan22_a14b", folders, **SCALES))
    case.push()
    ours = case.drawn()
    case.pipeline.write(tmp_path / "out", "merged")
    theirs = case.stock(diffusers.WanPipeline.from_pretrained(tmp_path / "out"))
    assert (ours - theirs).abs().max() < contract.CLOSE


def described(made, folders):
    family = mmrl.load("pipelines", "diffusion/wan22_a14b")
    return family.describe(made, str(folders["wan22_a14b"]), None)


def test_the_steps_of_each_of_two_models_are_counted(folders):
    made = described(recipe("wan22_a14b", folders, steps=10), folders)
    assert made.pipeline.trained_steps == {"transformer": 3, "transformer_2": 6}
    assert made.notes == ["of 9 denoising steps that may train transformer predicts in 3, transformer_2 predicts in 6"]


@pytest.mark.parametrize(
    ("algorithm", "window", "message"),
    [
        (
            {"type": "flow_grpo"},
            {"size": 2, "last": 3},
            r"sampling.window: no step trains transformer_2, .* 3 to 9 of 10",
        ),
        (
            {"type": "flow_grpo"},
            {"size": 2, "first": 3},
            r"sampling.window: no step trains transformer, .* 0 to 2 of 10",
        ),
        ({"type": "draft", "last_steps": 2}, None, r"algorithm \(draft\): no step trains transformer, "),
        ({"type": "refl"}, None, r"algorithm \(refl\): no step trains transformer, "),
    ],
)
def test_a_recipe_that_leaves_one_of_two_models_untrained_is_refused(folders, algorithm, window, message):
    made = recipe("wan22_a14b", folders, steps=10, window=window).model_dump(mode="json") | {"algorithm": algorithm}
    if algorithm["type"] != "flow_grpo":
        made["train"] |= {"group_size": 1}
    with pytest.raises(UserError, match=message):
        described(Recipe.model_validate(made), folders)


def test_one_model_is_not_taken_for_two_nor_two_for_one(folders):
    with pytest.raises(UserError, match=r"two models, .*set pipeline to diffusion/wan22_a14b"):
        contract.Case(recipe("wan", {"wan": folders["wan22_a14b"]}))
    contract.Case(recipe("wan22_a14b", folders))
    with pytest.raises(UserError, match="nothing as its transformer_2"):
        contract.Case(recipe("wan22_a14b", {"wan22_a14b": folders["wan"]}))
    with pytest.raises(UserError, match=r"sampling.guidance_scale_2: Wan has one model .*; remove guidance_scale_2"):
        contract.Case(recipe("wan", folders, guidance_scale_2=3.0))
    for name, pipeline in (("wan", "diffusion/wan"), ("wan22_a14b", "diffusion/wan22_a14b")):
        found = look_at_model(str(folders[name]), None, edits=False, algorithm=None)
        assert found.pipeline == pipeline


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundary_ratio": None}, r"boundary_ratio: None.*set pipeline to diffusion/wan for one model"),
        ({"expand_timesteps": True}, r"expand_timesteps: true.*set pipeline to diffusion/wan$"),
    ],
)
def test_an_index_that_is_not_of_two_models_is_refused(folders, tmp_path, change, message):
    folder = tmp_path / "model"
    shutil.copytree(folders["wan22_a14b"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | change))
    with pytest.raises(UserError, match=message):
        contract.Case(recipe("wan22_a14b", {"wan22_a14b": folder}))
    (folder / "model_index.json").write_text(json.dumps(index | change | {"boundary_ratio": None}))
    contract.Case(recipe("wan", {"wan": folder}))


def test_two_models_are_not_sharded(folders):
    made = recipe("wan22_a14b", folders).model_dump(mode="json")
    for key, value in (("backend", "fsdp"), ("context_parallel", 2)):
        train = made["train"] | {key: value}
        with pytest.raises(UserError, match=rf"train.{key}: Wan 2.2 A14B has two models.*remove train.{key}"):
            contract.Case(Recipe.model_validate(made | {"train": train}))
        del train[key]
        contract.Case(Recipe.model_validate(made | {"train": train}))
