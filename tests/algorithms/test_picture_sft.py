"""SFT on given pictures and clips: the loss of each prediction, its noise levels, data, resumption, refusals."""

import math
import re
from io import BytesIO

import pytest
import torch
from PIL import Image

from mmrl.algorithms.picture_sft import PictureSFT, PictureSFTSettings
from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.randomness import noise
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Rows, SampleId, Slot
from mmrl.logging.rundir import RunDir
from mmrl.planner.data_check import check_recipe
from mmrl.planner.plan import plan
from mmrl.training.loop import train_step
from tests.support.sft import flat, gradient_of, lines
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision

from tests.support import families  # noqa: E402
from tests.support.families import folders  # noqa: E402, F401

SMALL = [
    "train.prompts_per_step=4",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "eval.samples=4",
    "eval.grid=2",
    "eval.rewards=[]",
]


def loaded(*overrides):
    return load_recipe(["shapes-sft"], [f"model.path={two_blocks()}", *SMALL, *overrides])


def png(colour="red", size=(32, 32)):
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "png")
    return file.getvalue()


def of_family(name, folders, shift=None, **algorithm):
    made = families.recipe(name, folders, shift=shift).model_dump(mode="json")
    made |= {"algorithm": {"type": "sft", **algorithm}, "rewards": [], "data": {"name": "shape_style"}}
    made["train"] |= {"group_size": 1}
    return build(Recipe.model_validate(made | {"device": "cpu"}), scored=False).pipeline


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weighting", "weight"),
    [
        ("none", lambda s: 1.0),
        ("sigma_sqrt", lambda s: s**-2),
        ("cosmap", lambda s: 2 / math.pi / (1 - 2 * s + 2 * s * s)),
    ],
)
def test_the_loss_is_the_weighted_mean_of_the_errors(weighting, weight):
    draw = torch.Generator().manual_seed(0)
    errors = torch.rand(5, generator=draw, dtype=torch.float64, requires_grad=True)
    sigma = torch.rand(5, generator=draw, dtype=torch.float64) * 0.9 + 0.05
    kept = torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64)
    objective = PictureSFT(PictureSFTSettings(weighting=weighting))
    loss = objective.loss({"picture_error": errors, "sigma": sigma}, {"weights": kept}, 4.0)
    expected = [weight(sigma[i].item()) / 4 for i in (0, 1, 3, 4)]
    assert loss.value.item() == pytest.approx(
        sum(w * errors[i].item() for w, i in zip(expected, (0, 1, 3, 4), strict=True)), rel=1e-12
    )
    (gradient,) = torch.autograd.grad(loss.value, errors)
    assert gradient.tolist() == pytest.approx([*expected[:2], 0.0, *expected[2:]], rel=1e-12)
    assert loss.sums["sft/fit"].item() == -loss.sums["policy/loss"].item() == pytest.approx(-4 * loss.value.item())


@pytest.mark.parametrize(
    ("family", "prediction"), [("sd3", "flow"), ("sd", "epsilon"), ("sd", "v_prediction"), ("sdxl", "epsilon")]
)
def test_the_error_is_of_what_the_model_itself_predicts(folders, tmp_path, family, prediction):
    """Compared with diffusers' own scheduler, in float64 on the model's outputs."""
    import diffusers

    if prediction == "v_prediction":
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(folders[family])
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type=prediction)
        pipe.save_pretrained(tmp_path / "model")
        folders = folders | {family: tmp_path / "model"}
    pipeline = of_family(family, folders)
    prompt = Prompt("one", "a red circle", media=(Media("image", data=png("red")),))
    rows = Rows([Slot(3, i, 0, prompt) for i in range(2)], [SampleId(3, i, 0, 0) for i in range(2)])
    pipeline.encode(rows.slots)
    with torch.no_grad():
        got = pipeline.compare(rows, PictureSFT.needs, None)
        sigma = pipeline.pairs.sigma(rows)
        x0 = pipeline.pairs.latents(rows.slots)
        eps = noise(pipeline.recipe.seed, rows.ids, "given", tuple(x0.shape[1:]))
        features, timestep = pipeline.batch_features(rows.slots), pipeline.adapter.timestep(sigma)
        adapter, s = pipeline.adapter, sigma.view(-1, 1, 1, 1)
        if prediction == "flow":
            z, target = (1 - s) * x0.double() + s * eps.double(), eps.double() - x0.double()
            out = adapter.predict(pipeline.policy, z.float(), timestep, features)
        else:
            ddpm = diffusers.DDPMScheduler.from_config(adapter.pipe.scheduler.config)
            z = ddpm.add_noise(x0.double(), eps.double(), timestep)
            target = eps.double()
            if prediction == "v_prediction":
                target = ddpm.get_velocity(x0.double(), eps.double(), timestep)
            out = adapter.denoise(pipeline.policy, z.float(), timestep, features)
        expected = (out.double() - target).square().flatten(1).mean(1)
    assert len({*sigma.tolist()}) == 2
    torch.testing.assert_close(got["picture_error"].double(), expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize(("family", "shift"), [("sd3", 3.0), ("flux", None), ("sd", None), ("wan", None)])
def test_levels_are_those_of_the_training_timesteps(folders, family, shift):
    import diffusers

    adapter = of_family(family, folders, shift).adapter
    levels, config = adapter.levels(), adapter.pipe.scheduler.config
    if family == "sd":
        a = diffusers.DDPMScheduler.from_config(config).alphas_cumprod.double().flip(0)
        torch.testing.assert_close(levels, (1 - a).sqrt() / (a.sqrt() + (1 - a).sqrt()), rtol=1e-9, atol=0)
        assert adapter.timestep(levels).tolist() == list(range(999, -1, -1))
    else:
        assert family == "flux" or config.shift != 1
        sigmas = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config).sigmas
        torch.testing.assert_close(levels, sigmas.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "flow", "named"),
    [
        ({}, True, {"weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0}),
        ({"density": "logit_normal", "logit_mean": 1.0, "logit_std": 0.5}, True,
         {"weighting_scheme": "logit_normal", "logit_mean": 1.0, "logit_std": 0.5}),
        ({"density": "mode"}, True, {"weighting_scheme": "mode", "mode_scale": 1.29}),
        ({"density": "uniform"}, True, {"weighting_scheme": "none"}),
        ({}, False, {"weighting_scheme": "none"}),
    ],
)  # fmt: skip
def test_densities_are_those_of_diffusers_scripts(settings, flow, named):
    from diffusers.training_utils import compute_density_for_timestep_sampling

    draw, made = torch.Generator().manual_seed(0), PictureSFTSettings(**settings)
    mine = torch.tensor([made.place(draw, flow=flow) for _ in range(4000)])
    theirs = compute_density_for_timestep_sampling(
        batch_size=100_000, generator=torch.Generator().manual_seed(1), **named
    )
    at = torch.linspace(0.05, 0.95, 19)
    assert (mine.quantile(at) - theirs.quantile(at)).abs().max() < 0.025
    assert 0 <= mine.min() <= mine.max() < 1


def moved(parameters, along):
    """``parameters`` moved by the flat vector ``along``."""
    with torch.no_grad():
        for p, part in zip(parameters, along.split([p.numel() for p in parameters]), strict=True):
            p.add_(part.view_as(p))


def test_any_micro_batch_gives_the_same_gradient_which_finite_differences_confirm():
    def make(size):
        changes = f"train.micro_batch_size={size}", "model.lora.rank=2", "optim.max_grad_norm=1e9"
        return build(loaded(*changes).recipe)

    whole, split = (flat(gradient_of(make(size))[0]) for size in (4, 1))
    assert (whole - split).norm() < 1e-4 * whole.norm()
    run = make(4)
    slots = run.controller.slots(0, run.prompts, 4, None)
    rows = Rows(slots, [SampleId(0, slot.index, 0, 0) for slot in slots])
    run.pipeline.encode(slots)
    parameters, losses, step = [p for _, p in sorted(run.policy.trainable.items())], [], 1e-3 * whole / whole.norm()
    for along in (step, -2 * step):
        moved(parameters, along)
        new = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
        losses.append(run.objective.loss(new, {"weights": torch.ones(4)}, 4.0).value.item())
    assert (losses[0] - losses[1]) / (2 * step.norm()) == pytest.approx(whole.norm().item(), rel=0.02)


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ((), "it has 0 media; give every caption one picture to learn"),
        ((Media("image", data=png()),) * 2, "it has 2 media"),
        ((Media("video", data=b"clip"),), "it has a clip, which this model does not make"),
        ((Media("image", data=b"none"),), "mend the picture or take the prompt out"),
    ],
)
def test_a_prompt_without_one_picture_is_named(media, message):
    pipeline = build(loaded().recipe).pipeline
    with pytest.raises(BadPromptError, match=message):
        pipeline.encode([Slot(0, 0, 0, Prompt("wrong", "a red circle", media=media))])
    assert not pipeline.features.held


def folder_of(root, count=12, sizes=((32, 32), (48, 32), (32, 48))):
    root.mkdir()
    for i in range(count):
        (root / f"{i}.png").write_bytes(png((20 * i, 40, 90), sizes[i % len(sizes)]))
        (root / f"{i}.txt").write_text(f"picture number {i % 5}")
    return root


@pytest.mark.slow
def test_a_folder_trains_in_buckets_and_resumes_equal_to_the_bit(tmp_path):
    data = f"{{path: {folder_of(tmp_path / 'mine')}, heldout: 3}}"
    changes = [
        f"data={{name: folder, train: {data}, heldout: {data}}}",
        "sampling.buckets=[[32, 32], [24, 32], [32, 24]]",
        "train.steps=3",
        "eval.every=3",
        "checkpoint.every=1",
    ]
    whole = loaded(*changes)
    assert whole.recipe.algorithm.type == "picture_sft"
    planned = plan(whole)
    assert planned.problems == []
    assert planned.measured is not None, planned.notes
    assert not any("only their captions" in note for note in planned.notes)
    with RunDir.create(tmp_path / "whole") as directory:
        assert Trainer(whole, directory).begin(Stop(), resume=False).finished
    stop = Stop()
    with RunDir.create(tmp_path / "parts") as directory:
        steps = Trainer(whole, directory).steps(stop)
        next(steps)
        steps.close()
    with RunDir.create(tmp_path / "parts", resume=True) as directory:
        assert Trainer(whole, directory).begin(Stop(), resume=True).finished
    for name in ("metrics.jsonl", "heldout.jsonl"):
        assert lines(tmp_path / "whole", name) == lines(tmp_path / "parts", name)
    held = lines(tmp_path / "whole")
    assert [row["dropped"] for row in held] == [0, 0]
    assert held[-1]["sft/fit"] == pytest.approx(-held[-1]["policy/loss"])


def test_latents_are_encoded_once():
    run = build(loaded("train.prompts_per_step=30").recipe)
    calls, encode = [], run.pipeline.adapter.encode_image
    run.pipeline.adapter.encode_image = lambda pixels: calls.append(1) or encode(pixels)
    for step in range(2):
        train_step(run, step, Clock(torch.device("cpu")))
    assert len(calls) == 30


def told(folder, **options):
    given = ", ".join(["path: " + str(folder), *(f"{key}: {value}" for key, value in options.items())])
    return f"data={{name: folder, train: {{{given}}}, heldout: {{{given}}}}}"


def test_pictures_without_captions_are_refused_with_what_to_do(tmp_path):
    folder = folder_of(tmp_path / "mine")
    for text in folder.glob("*.txt"):
        text.unlink()
    said = plan(loaded(told(folder, heldout=3))).problems
    assert any("put metadata.jsonl there, or a .txt beside each picture, or give all one text" in one for one in said)
    made = loaded(told(folder, heldout=3, caption="a drawing of mine"))
    assert plan(made).problems == []
    assert {prompt.text for prompt in build(made.recipe).prompts} == {"a drawing of mine"}


def test_three_pictures_are_no_style(tmp_path):
    made = loaded(told(folder_of(tmp_path / "mine", 4), heldout=1))
    note = "data.train: 3 pictures to learn from: the model soon has them by heart"
    assert any(note in one for one in plan(made).notes)
    checked = check_recipe(made.recipe, 1, 10).splits
    assert [sum(note in one for one in checked[split].notes) for split in ("train", "heldout")] == [1, 0]


def test_an_algorithm_that_learns_from_pictures_is_refused_without_any(tmp_path):
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\na green cross\n")
    data = f"{{path: {tmp_path / 'prompts.txt'}, heldout: 1}}"
    made = loaded(f"data={{name: prompts, train: {data}, heldout: {data}}}")
    why = r"data\.train: none of 2 records looked at can train: it has 0 media; give every caption one picture to learn"
    with pytest.raises(UserError, match=why):
        build(made.recipe)
    assert any(re.search(why, one) for one in plan(made).problems)
    assert check_recipe(made.recipe, 1, 10).faults == 3


def test_a_run_says_that_nothing_reads_its_pictures(tmp_path, capsys):
    small = ["train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2", "sampling.steps=3"]
    made = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *small, told(folder_of(tmp_path / "mine"))])
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(made, directory)
    assert "note: data: 10 of 10 prompts looked at carry pictures, and only their captions are used" in (
        capsys.readouterr().err
    )


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sums", ["algorithm={type: picture_sft}"], "picture_sft trains denoising steps"),
        ("shapes-sft", ["rewards=[{name: shapes}]"], "trains on given pictures and samples nothing"),
        ("shapes-sft", ["train.group_size=2"], "one given picture per prompt"),
        ("shapes-sft", ["algorithm.completion=answer"], "belongs to type kto and sft, this section's type is"),
        ("shapes-sft", ["algorithm.guidance=2"], "picture_sft trains the prediction with the prompt alone"),
        ("shapes-sft", ["algorithm.density=cosine"], "density"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe([recipe], overrides)


def test_families_refuse_what_they_are_not_trained_with(folders):
    with pytest.raises(UserError, match="density: Stable Diffusion 1 or 2 is trained at timesteps that come"):
        of_family("sd", folders, density="mode")
    with pytest.raises(UserError, match="starts from the picture that a prompt carries; use an algorithm that samples"):
        of_family("flux2_klein_edit", folders)


# -- clips -----------------------------------------------------------------------------------------------------------


def test_clips_train_and_a_picture_is_one_that_stands_still(folders):
    pipeline = of_family("wan", folders)
    still = Prompt("still", "a red circle", media=(Media("image", data=png()),))
    pipeline.encode([Slot(0, 0, 0, still)])
    rows = Rows([Slot(0, 0, 0, still)], [SampleId(0, 0, 0, 0)])
    x0 = pipeline.pairs.latents(rows.slots)
    assert x0.shape == (1, *pipeline.adapter.latent_shape(32, 32))
    pixels = torch.tensor(list(Image.open(BytesIO(png())).tobytes())).view(32, 32, 3).permute(2, 0, 1) / 127.5 - 1
    vae = pipeline.adapter.pipe.vae
    with torch.no_grad():
        z = vae.encode(pixels.expand(1, 5, 3, 32, 32).transpose(1, 2)).latent_dist.mode()
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    torch.testing.assert_close(x0, (z - mean) / std, rtol=1e-5, atol=1e-5)
    assert pipeline.compare(rows, PictureSFT.needs, None)["picture_error"].requires_grad
