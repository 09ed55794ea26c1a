"""Every family of diffusion models, each as a tiny pipeline of the real class: what its adapter owes the loop."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import mmrl
from mmrl.algorithms.objective import GraphSteps
from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe, shipped_recipes
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Slot
from mmrl.logging.rundir import RunDir
from mmrl.planner.plan import plan
from tests.support.planning import run_steps
from tests.support.tiny_diffusion import TIMES, cut

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import CLIPS, EDITORS, FAMILIES, TOLD, UNREAD, folders, recipe  # noqa: E402, F401

KOHYAS = ("module", "dim", "alpha")
GUIDED = [*((f, 4.0) for f in FAMILIES), *((f, 1.0) for f in FAMILIES if f not in TOLD)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "guidance"), GUIDED)
def test_without_noise_it_is_the_stock_pipeline(folders, family, guidance):
    contract.sampling_is_the_stock_pipelines(recipe(family, folders, guidance_scale=guidance))


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in TOLD])
def test_negative_prompts_are_the_stock_pipelines(folders, family):
    longer = {"max_sequence_length": 320} if family == "qwen_image" else {}  # its template alone has 220 tiny tokens
    asked = recipe(family, folders, guidance_scale=4.0, steps=2, **longer)
    contract.negative_prompts_are_the_stock_pipelines(asked)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [*((f, "flow") for f in FAMILIES), ("sd", "ddim"), ("sdxl", "cps")])
def test_the_first_ratio_is_one(folders, family, kind):
    contract.first_ratio_is_one(recipe(family, folders, guidance_scale=3.0, sde={"kind": kind, "noise_level": 0.7}))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_move_every_parameter_of_the_adapter(folders, family):
    contract.two_steps_move_every_parameter(recipe(family, folders), UNREAD.get(family, ()))


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CLIPS])
def test_decoding_undoes_encoding(folders, family):
    adapter = contract.Case(recipe(family, folders)).pipeline.adapter
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seen = []
    decode = adapter.pipe.vae.decode
    adapter.pipe.vae.decode = lambda z, **more: seen.append(z) or decode(z, **more)
    with torch.no_grad():
        latents = adapter.encode_image(pixels)
        adapter.decode(latents)
        encoded = adapter.pipe.vae.encode(pixels.unsqueeze(2) if family.startswith("qwen_image") else pixels)
        expected = encoded.latent if family == "sana" else encoded.latent_dist.mode()
        torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
    assert latents.shape == (2, *adapter.latent_shape(32, 32))


def test_pairs_are_of_pictures_alone(folders):
    made = recipe("wan", folders).model_dump(mode="json") | {"algorithm": {"type": "picture_dpo"}, "rewards": []}
    made["train"] |= {"group_size": 1}
    with pytest.raises(UserError, match="pairs of pictures, and Wan makes clips"):
        contract.Case(Recipe.model_validate(made))


@pytest.mark.parametrize("family", [EDITORS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in EDITORS[1:])])
def test_another_source_picture_changes_the_picture_as_in_the_stock_pipeline(folders, family):
    """Attention of random weights all but ignores it (1e-4 of a pixel), so that it is made stronger."""
    case = contract.Case(recipe(family, folders, guidance_scale=3.0, steps=2))
    with torch.no_grad():
        for name, weight in case.pipeline.adapter.model.named_parameters():
            if weight.ndim == 2 and ".to_" in name:
                weight.mul_(4)
    before = case.drawn()
    others = [
        replace(slot, prompt=replace(slot.prompt, media=case.slots[2 - n // 2 * 2].prompt.media))
        for n, slot in enumerate(case.slots)
    ]
    case.slots = others
    case.pipeline.encode(case.slots)
    ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    assert (ours - theirs).abs().max() < contract.CLOSE
    assert (ours - before).abs().flatten(1).amax(1).min() > 100 * contract.CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("family", EDITORS)
def test_an_editor_trains_on_prompts_that_carry_one_picture(folders, tmp_path, family):
    made = recipe(family, folders, guidance_scale=2.0).model_dump(mode="json")
    made["sampling"]["pictures"] = None  # of each prompt one
    made |= {
        "data": {"name": "shape_edits"},
        "rewards": [{"name": "jpeg:incompressibility"}],
        "eval": {"every": 1, "samples": 2, "grid": 2},
    }
    if family in CLIPS:
        made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility", "count": 2}}]
        made["rewards"][0] |= {"modality": "video"} if family.startswith("ltx2") else {}
    made["train"] |= {"steps": 1, "group_size": 2, "micro_batch_size": 4}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    loaded = load_recipe([tmp_path / "recipe.yaml"], ["sampling.window={size: 1}"])
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(loaded, directory).begin(Stop(), resume=False)
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["optim/grad_norm"] > 0
    (described,) = [c for c in plan(loaded).phases if c.name == "encode"]
    assert "VAE" in described.parts
    case = contract.Case(loaded.recipe)
    with pytest.raises(BadPromptError, match=r"has 0 media; give every prompt the one (picture|clip)"):
        case.pipeline.encode([Slot(0, 0, 0, Prompt("bare", "make it red"))])
    first, second = case.pipeline.batch_features(case.slots[1:3], guided=False)["source"]
    assert not torch.equal(first, second)
    prompt = case.slots[0].prompt
    (tmp_path / "a.png").write_bytes(prompt.media[0].data)
    lying = replace(prompt, media=(Media("image", path=str(tmp_path / "a.png")),))
    assert case.pipeline.key(lying) == case.pipeline.key(prompt) != case.pipeline.key(case.slots[2].prompt)
    pairs = made | {"algorithm": {"type": "picture_dpo"}, "rewards": []}
    pairs["train"] |= {"group_size": 1}
    with pytest.raises(
        UserError, match=r"(starts from the picture that .*|makes clips); use an algorithm that samples"
    ):
        contract.Case(Recipe.model_validate(pairs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f not in ("sd3", "sdxl", "wan"))) for f in FAMILIES]
)
def test_exported_lora_draws_the_same(folders, family):
    contract.exported_lora_draws_the_same(recipe(family, folders, guidance_scale=2.0))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", "sdxl", "flux", pytest.param("sd", marks=pytest.mark.slow)])
def test_a_lora_in_one_file_draws_the_same(folders, family):
    """alpha is twice the rank, and the file has no metadata of peft's to say so."""
    contract.exported_lora_draws_the_same(recipe(family, folders, guidance_scale=2.0), "lora-file")


@pytest.mark.parametrize(
    ("family", "name", "others"),
    [
        ("sdxl", "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q", {"lora_down.weight", "alpha"}),
        ("sd3", "transformer.transformer_blocks.0.attn.to_q", {"lora_A.weight"}),
    ],
)
def test_the_names_in_a_lora_file_are_those_that_other_programs_read(folders, family, name, others, tmp_path):
    case = contract.Case(recipe(family, folders))
    case.pipeline.write(tmp_path, "lora-file")
    (file,) = tmp_path.iterdir()
    with safe_open(file, framework="pt") as opened:
        parts = {key.removeprefix(f"{name}."): opened.get_tensor(key) for key in opened.keys() if key.startswith(name)}  # noqa: SIM118
        assert set(opened.metadata()) <= {"format", "mmrl_lora", *(f"ss_network_{part}" for part in KOHYAS)}
    assert others | {"lora_up.weight" if family == "sdxl" else "lora_B.weight"} == set(parts)
    if family == "sdxl":
        assert parts["alpha"].item() == 8


def test_a_family_without_a_known_file_is_refused(folders, tmp_path):
    case = contract.Case(recipe("wan", folders))
    with pytest.raises(UserError, match=r"not known how other programs name .* use --what lora"):
        case.pipeline.write(tmp_path, "lora-file")


# -- what one family has ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("hunyuan_video15", {"type": "diffusion_nft"}),
        ("hunyuan_video15_i2v", {"type": "draft", "last_steps": 1}),
        ("flux2", {"type": "draft", "last_steps": 1}),
        ("flux2_edit", {"type": "diffusion_nft"}),
    ],
)
def test_all_weights_have_gradients_of_every_kind(folders, family, algorithm):
    """A policy gradient moves them; these are the others. Weights that the prompts have no use for have zeros."""
    contract.first_ratio_is_one(recipe(family, folders, lora=False))
    made = recipe(family, folders, lora=False, steps=2).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(0, 1), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        assert out["x_s"].shape[1:] == out["target"].shape[1:] == case.pipeline.shape
        out["v"].square().sum().backward()
    unread = case.pipeline.adapter.weights_without_gradient()
    for name, p in case.policy.trainable.items():
        assert (p.grad is None) == any(part in name for part in unread), name
        assert p.grad is None or p.grad.isfinite().all(), name
    moved = [name for name, p in case.policy.trainable.items() if p.grad is not None and p.grad.abs().sum() > 0]
    assert {name for name, p in case.policy.trainable.items() if "transformer_blocks.0" in name} <= {*moved}


@pytest.mark.slow
def test_texts_in_quotes_are_read_by_a_second_encoder_as_in_the_stock_pipeline(folders):
    case = contract.Case(recipe("hunyuan_video15", folders, guidance_scale=4.0, steps=2))
    said = [replace(s, prompt=replace(s.prompt, text=f'{s.prompt.text} "{s.index}!"')) for s in case.slots]
    case.slots = said
    case.pipeline.encode(said)
    stock = case.stock(case.pipeline.adapter.pipe)
    assert (case.drawn() - stock).abs().max() < contract.CLOSE
    for key in {case.pipeline.key(slot.prompt) for slot in said}:
        own = case.pipeline.features.get(key)
        assert own["quoted_mask"].any()
        case.pipeline.features.put(key, own | {"quoted_mask": torch.zeros_like(own["quoted_mask"])})
    assert (case.drawn() - stock).abs().flatten(1).amax(1).min() > 100 * contract.CLOSE


def test_a_model_that_is_told_the_scale_draws_otherwise_with_another(folders):
    """As the stock pipeline, which the test of it without noise compares; klein's model takes none."""
    drawn = [contract.Case(recipe("flux2", folders, guidance_scale=scale, steps=2)).drawn() for scale in (1.0, 4.0)]
    assert (drawn[0] - drawn[1]).abs().flatten(1).amax(1).min() > 10 * contract.CLOSE
    klein = recipe("flux2_klein", {"flux2_klein": folders["flux2"]})
    with pytest.raises(
        UserError, match=r"is a Flux2Pipeline, .* set pipeline to diffusion/flux2 or diffusion/flux2_edit"
    ):
        contract.Case(klein)
    with pytest.raises(UserError, match=r"sampling.negative_prompt: this FLUX.2 makes one prediction"):
        contract.Case(recipe("flux2", folders, negative_prompt="red", guidance_scale=4.0))


def test_guidance_that_is_an_object_is_refused_where_it_does_more(folders, tmp_path):
    folder = tmp_path / "hunyuan"
    shutil.copytree(folders["hunyuan_video15"], folder)
    config, index = folder / "guider" / "guider_config.json", folder / "model_index.json"
    own = config.read_text()
    config.write_text(own.replace('"start": 0.0', '"start": 0.2'))
    with pytest.raises(UserError, match=r"guider_config.json says start: 0.2, .* write 0.0 for it"):
        contract.Case(recipe("hunyuan_video15", {"hunyuan_video15": folder}))
    config.write_text(own)
    made = contract.Case(recipe("hunyuan_video15", {"hunyuan_video15": folder}, guidance_scale=3.0)).pipeline
    code = made.usage("out", "merged", Prompt("p", "p")).code["With diffusers"]
    assert "pipe.guider = pipe.guider.new(guidance_scale=3.0)" in code
    assert "guidance_scale=3.0,\n" not in code
    index.write_text(index.read_text().replace("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"))
    with pytest.raises(UserError, match=r"ImageToVideoPipeline, .* set pipeline to diffusion/hunyuan_video15_i2v"):
        contract.Case(recipe("hunyuan_video15", {"hunyuan_video15": folder}))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "multiple"), [("sd", 4), ("sdxl", 4), ("flux", 4), ("qwen_image", 8)])
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(folders, family, multiple):
    with pytest.raises(UserError, match=f"34 x 32 is no multiple of {multiple}.*use 3[26] x 32"):
        contract.Case(recipe(family, folders, height=34))


def test_another_familys_checkpoint_is_refused(folders):
    with pytest.raises(UserError, match=r"is a StableDiffusionPipeline, .* set pipeline to diffusion/sd"):
        contract.Case(recipe("flux", folders | {"flux": folders["sd"]}))


def test_a_unet_that_predicts_something_else_is_refused(folders, tmp_path):
    folder = tmp_path / "sd"
    shutil.copytree(folders["sd"], folder)
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"epsilon"', '"sample"'))
    with pytest.raises(UserError, match="predicts 'sample'"):
        contract.Case(recipe("sd", {"sd": folder}))


def test_a_unet_that_predicts_velocity_is_the_stock_pipeline_too(folders, tmp_path):
    folder = tmp_path / "sd"
    shutil.copytree(folders["sd"], folder)
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"epsilon"', '"v_prediction"'))
    contract.sampling_is_the_stock_pipelines(recipe("sd", {"sd": folder}, guidance_scale=2.0))


def test_a_distilled_klein_takes_no_guidance_and_stays_distilled(folders, tmp_path):
    folder = tmp_path / "klein"
    shutil.copytree(folders["flux2_klein"], folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"is_distilled": false', '"is_distilled": true'))
    distilled = recipe("flux2_klein", {"flux2_klein": folder}, guidance_scale=4.0)
    contract.sampling_is_the_stock_pipelines(distilled)
    pipeline = contract.Case(distilled).pipeline
    assert not pipeline.guided
    pipeline.write(tmp_path / "out", "merged")
    assert json.loads((tmp_path / "out" / "model_index.json").read_text())["is_distilled"] is True


def with_scheduler(folder, made, scheduler):
    """A copy of a model with another scheduler."""
    shutil.copytree(folder, made)
    shutil.rmtree(made / "scheduler")
    scheduler.save_pretrained(made / "scheduler")
    index = json.loads((made / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    (made / "model_index.json").write_text(json.dumps(index))
    return made


def test_sigmas_of_the_checkpoints_own_solver(folders, tmp_path):
    """Wan 2.1 comes with UniPC: of 20 steps the last is from .139 to 0, and Euler's schedule would go from .009."""
    import diffusers

    solver = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    folder = with_scheduler(folders["wan"], tmp_path / "wan", diffusers.UniPCMultistepScheduler(**solver))
    sigmas = {}
    for schedule in ("euler", "checkpoint"):
        asked = recipe("wan", {"wan": folder}, schedule=schedule, steps=20)
        adapter = mmrl.load("pipelines", "diffusion/wan").build(asked, str(folder), torch.device("cpu")).adapter
        sigmas[schedule] = adapter.schedule(20).sigmas
    t = torch.linspace(1, 0.001, 21).double()
    torch.testing.assert_close(sigmas["checkpoint"][:-1].double(), (3 * t / (1 + 2 * t))[:-1], rtol=1e-5, atol=1e-5)
    assert sigmas["checkpoint"][-2:].tolist() == pytest.approx([0.1387, 0], abs=1e-4)
    assert sigmas["euler"][-2:].tolist() == pytest.approx([0.0089, 0], abs=1e-4)
    made = recipe("wan", {"wan": folder}, schedule="checkpoint", guidance_scale=2.0, shift=5.0)
    contract.sampling_is_the_stock_pipelines(made)
    pipeline = contract.Case(made).pipeline
    u = torch.linspace(1, 0.001, 5).double()[:-1]
    torch.testing.assert_close(
        pipeline.adapter.schedule(4).sigmas[:-1].double(), 5 * u / (1 + 4 * u), rtol=1e-5, atol=1e-5
    )
    contract.first_ratio_is_one(
        recipe("wan", {"wan": folder}, schedule="checkpoint", sde={"kind": "linear", "noise_level": 1.0})
    )
    code = "\n".join(pipeline.usage("out", "lora", Prompt("p", "p")).code.values())
    stock = diffusers.WanPipeline.from_pretrained(folder)
    exec(pipeline.adapter.prepare, {"pipe": stock})
    assert pipeline.adapter.prepare in code
    stock.scheduler.set_timesteps(4)
    torch.testing.assert_close(stock.scheduler.sigmas, pipeline.adapter.schedule(4).sigmas)
    assert stock.scheduler.config["solver_order"] == 1


def spaced(folders, made, spacing):
    """A copy of the small SD with a scheduler that spaces its timesteps so."""
    import diffusers

    scheduler = diffusers.EulerDiscreteScheduler(timestep_spacing=spacing, **TIMES)
    return {"sd": with_scheduler(folders["sd"], made, scheduler)}


def test_timesteps_that_trail_are_the_stock_pipelines_too(folders, tmp_path):
    trailing = spaced(folders, tmp_path / "sd", "trailing")
    asked = recipe("sd", trailing, steps=4, guidance_scale=2.0)
    contract.sampling_is_the_stock_pipelines(asked)
    assert contract.Case(asked).pipeline.adapter.schedule(4).timesteps.tolist() == [999, 749, 499, 249]
    with pytest.raises(UserError, match=r"sampling\.steps and eval\.steps: .* takes 3 steps .*; use 2 or 4"):
        contract.Case(recipe("sd", trailing, steps=3))
    evaluated = Recipe.model_validate(asked.model_dump(mode="json") | {"eval": {"steps": 30}})
    with pytest.raises(UserError, match=r"takes 30 steps .*; use 25 or 40"):
        contract.Case(evaluated)


def test_timesteps_that_ddim_cannot_take_are_refused(folders, tmp_path):
    """diffusers' DDIM subtracts 1000 // steps from a timestep, which is none of linspace's."""
    with pytest.raises(UserError, match=r"says timestep_spacing: linspace.*write leading or trailing in scheduler/"):
        contract.Case(recipe("sd", spaced(folders, tmp_path / "sd", "linspace")))


def test_a_fixed_shift(folders):
    """DanceGRPO's FLUX: even levels shifted by 3 whatever the size, where the checkpoint's own shift grows with it."""
    asked = recipe("flux", folders, shift=3.0, steps=4)
    contract.sampling_is_the_stock_pipelines(asked)
    adapter = contract.Case(asked).pipeline.adapter
    t = torch.linspace(1, 0, 5).double()
    torch.testing.assert_close(adapter.schedule(4).sigmas.double(), 3 * t / (1 + 2 * t), rtol=1e-6, atol=1e-7)
    own = contract.Case(recipe("flux", folders, steps=4)).pipeline.adapter.schedule(4).sigmas
    assert (own - adapter.schedule(4).sigmas).abs().max() > 0.01
    import diffusers

    stock = diffusers.FluxPipeline.from_pretrained(folders["flux"])
    exec(adapter.prepare, {"pipe": stock})
    assert (stock.scheduler.config["shift"], stock.scheduler.config["use_dynamic_shifting"]) == (3.0, False)


@pytest.mark.parametrize("change", [{"shift": 3.0}, {"schedule": "checkpoint"}])
def test_a_unet_has_the_levels_of_its_timesteps(folders, change):
    with pytest.raises(UserError, match=rf"sampling\.{next(iter(change))}: .*; remove it"):
        contract.Case(recipe("sd", folders, **change))


@pytest.mark.parametrize("family", ["flux", "flux2_klein"])
def test_a_model_of_one_prediction_has_no_guidance_in_its_loss(folders, tmp_path, family):
    """FLUX.1 is told its guidance and a distilled klein takes none: a loss tells them what sampling does."""
    folder = tmp_path / "model"
    shutil.copytree(folders[family], folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"is_distilled": false', '"is_distilled": true'))
    asked = recipe(family, {family: folder}, guidance_scale=3.5).model_dump(mode="json")
    for guidance in (1.0, "sampling"):
        made = Recipe.model_validate(asked | {"algorithm": {"type": "diffusion_nft", "guidance": guidance}})
        case = contract.Case(made)
        assert case.pipeline.renoising.guidance == 1
        assert len(case.pipeline.features) == 2, "no negative prompt"
    refused = Recipe.model_validate(asked | {"algorithm": {"type": "diffusion_nft", "guidance": 2.0}})
    with pytest.raises(UserError, match=r"algorithm\.guidance: this FLUX.* remove algorithm\.guidance"):
        contract.Case(refused)


def test_a_broken_adapter_is_found(folders, monkeypatch):
    flux = mmrl.load("pipelines", "diffusion/flux")
    predict = flux.FluxAdapter.predict
    monkeypatch.setattr(flux.FluxAdapter, "predict", lambda self, *a: 1.01 * predict(self, *a))
    with pytest.raises(AssertionError, match="pixels differ from the stock pipeline's"):
        contract.sampling_is_the_stock_pipelines(recipe("flux", folders))
    monkeypatch.setattr(flux.FluxAdapter, "predict", lambda self, *a: predict(self, *a) + 1e-3 * torch.rand(()))
    with pytest.raises(AssertionError, match="differ between sampling and replay"):
        contract.first_ratio_is_one(recipe("flux", folders))


# -- real sizes ------------------------------------------------------------------------------------------------------

WIDE = [
    "device=cpu",
    "threads=1",
    "model.path=model",
    "architecture=null",
    "sampling={steps: 2, guidance_scale: 1, height: 128, width: 128, max_sequence_length: 64, batch_size: 4}",
    "rewards=[{name: 'jpeg:incompressibility'}]",
    "train={steps: 2, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}",
]


@pytest.mark.long  # in short: of sd35-medium, in test_plan
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["sd15", "sdxl", "flux-dev", "qwen-image", "wan21-1.3b", "z-image", "flux2-klein-base-4b", "sana15-1.6b"],
)
def test_a_real_step_at_true_width_takes_what_the_plan_says(name, tmp_path):
    """Two layers of each kind, random weights: tensors counted as they live, within 20 percent."""
    shipped = shipped_recipes()[name]
    for file in (shipped, shipped.with_name("prompts-example.txt")):
        shutil.copy(file, tmp_path)
    cut(shipped.with_name(f"{name}.architecture.json"), load_recipe([name]).recipe.pipeline, tmp_path / "model")
    more = {
        "wan21-1.3b": ["sampling.frames=5", "rewards=[{name: frames, options: {name: 'jpeg:incompressibility'}}]"],
        "flux-dev": ["algorithm.trained_steps=null"],
        "z-image": ["train.micro_batch_size=2"],  # gradients are large, and a second slice meets those of the first
        "flux2-klein-base-4b": ["train.micro_batch_size=2"],
    }
    loaded = load_recipe([tmp_path / shipped.name], WIDE + more.get(name, []))
    made = plan(loaded)
    assert made.problems == []
    real = run_steps(loaded, steps=2)  # the optimizer's state is there from the second on
    fixed = sum(made.peak.parts.get(p, 0) for p in ("policy", "text encoders", "VAE", "copies of the trained weights"))
    print(f"plan {made.peak.total / 2**20:.0f} MiB in {made.peak.name}, weights {fixed / 2**20:.0f}; real: {real}")
    assert fixed == pytest.approx(real["held"], rel=0.001)
    assert made.peak.total - fixed == pytest.approx(real["peak"], rel=0.2)


OWN = """
from mmrl.pipelines.diffusion import loading
from mmrl.pipelines.diffusion.sd import SDAdapter

class Mine(SDAdapter):
    lora_targets = ("to_q",)

def build(recipe, path, device):
    return loading.build(Mine, recipe, path, device)
"""


@pytest.mark.slow
def test_an_adapter_of_ones_own_is_checked_by_the_command(folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(OWN)
    made = recipe("sd", folders).model_dump(mode="json") | {"pipeline": "mine.py"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    monkeypatch.setattr("sys.argv", ["contract", str(tmp_path / "recipe.yaml"), "sampling.same_initial_noise=true"])
    assert contract.main() == 0
    assert capsys.readouterr().out.count("ok  ") == 5
    (tmp_path / "mine.py").write_text(OWN.replace('("to_q",)', '("to_q",)\n    negative = "two red circles"'))
    monkeypatch.setattr("sys.argv", ["contract", str(tmp_path / "recipe.yaml"), "sampling.guidance_scale=3"])
    for name in [name for name in sys.modules if name.startswith("mmrl_user_mine_")]:  # other tests have such a file
        del sys.modules[name]
    assert contract.main() == 2
    assert "FAILED  sampling_is_the_stock_pipelines: pixels differ" in capsys.readouterr().out


MOTION = """
import mmrl

@mmrl.reward(inputs=("video",))
def score(samples, *, context):
    assert all(len(s.video) == 5 and s.video[0].size == (32, 32) for s in samples)
    return [sum(s.video[-1].tobytes()) / sum(s.video[0].tobytes()) for s in samples]
"""


@pytest.mark.slow
def test_clips_train_and_rewards_that_read_pictures_are_refused(folders, tmp_path):
    (tmp_path / "motion.py").write_text(MOTION)
    made = recipe("wan", folders).model_dump(mode="json")
    made |= {"rewards": [{"name": "motion.py"}], "eval": {"every": 1, "samples": 2, "grid": 2}}
    made["train"] |= {"steps": 2, "group_size": 2, "micro_batch_size": 4}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    loaded = load_recipe([tmp_path / "recipe.yaml"], ["sampling.window={size: 1}"])
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(loaded, directory).begin(Stop(), resume=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/first_ratio_max_dev"] == 0 and row["optim/grad_norm"] > 0 for row in rows)
    samples = tmp_path / "run" / "samples"
    clips = [Image.open(path) for path in samples.glob("*/*")]
    assert [(clip.size, clip.n_frames) for clip in clips] == [((32, 32), 5)] * 6  # two of each evaluation
    with Image.open(next(samples.glob("*.png"))) as picture:
        assert picture.width > 2 * 5 * 32  # frames side by side, two clips of them
    assert plan(loaded).problems == []
    pictures = load_recipe([tmp_path / "recipe.yaml"], ["rewards=[{name: 'jpeg:incompressibility'}]"])
    with pytest.raises(UserError, match="reads 'image', and this pipeline makes clips"):
        build(pictures.recipe)
    watched = load_recipe([tmp_path / "recipe.yaml"], ["eval.rewards=[{name: 'jpeg:incompressibility'}]"])
    with RunDir.create(tmp_path / "watched") as directory, pytest.raises(UserError, match="reads 'image'"):
        Trainer(watched, directory).begin(Stop(), resume=False)


@pytest.mark.parametrize(
    ("family", "frames", "message"),
    [("wan", None, "say how many frames"), ("wan", 6, "use 5"), ("flux", 5, "makes pictures")],
)
def test_frames_are_for_clips(folders, family, frames, message):
    with pytest.raises(UserError, match=f"sampling.frames.*{message}"):
        contract.Case(recipe(family, folders, frames=frames))
