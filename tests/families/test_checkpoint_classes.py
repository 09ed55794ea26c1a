"""A checkpoint whose class a family is not for is refused by name, before a weight is read."""

import json
import os
import random
import shlex
import shutil

import pytest
import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.families import FAMILIES, folders, recipe  # noqa: F401
from tests.support.tiny_diffusion import _unet

allow_cpu_only()  # before transformers imports torchvision


def described(family, folder):
    """What ``mmrl plan`` reads of a checkpoint."""
    module = mmrl.load("pipelines", f"diffusion/{family}")
    return module.describe(recipe(family, {family: folder}), str(folder), None)


def built(family, folder):
    module = mmrl.load("pipelines", f"diffusion/{family}")
    return module.build(recipe(family, {family: folder}), str(folder), torch.device("cpu"))


def of_class(folder, made, kind=None, **components):
    """A copy of a checkpoint whose index names other classes."""
    shutil.copytree(folder, made, copy_function=os.link)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": kind} if kind is not None else {}
    index |= {name: [library, value] for name, (library, value) in components.items()}
    (made / "model_index.json").unlink()
    (made / "model_index.json").write_text(json.dumps(index))
    return made


def exported():
    """Every class of a pipeline that diffusers exports."""
    import diffusers

    return sorted(name for name in dir(diffusers) if name.endswith(("Pipeline", "PipelineSafe", "PipelineLegacy")))


@pytest.mark.slow
@pytest.mark.sweep("classes of pipelines")
def test_every_class_of_diffusers_is_drawn_or_refused_by_name(folders, tmp_path, sweep):
    from mmrl.pipelines.diffusion.classes import shipped

    for_class = {family.pipeline for family in shipped().values()}
    pairs = [(kind, family) for kind in exported() for family in FAMILIES]
    random.Random(0).shuffle(pairs)
    seen, copies = {}, {family: of_class(folders[family], tmp_path / family) for family in FAMILIES}
    for kind, family in pairs:
        if len(seen.setdefault(kind, [])) >= sweep.size(1, len(FAMILIES)):
            continue
        seen[kind].append(family)
        folder = copies[family]
        index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": kind}
        (folder / "model_index.json").write_text(json.dumps(index))
        own = mmrl.load("pipelines", f"diffusion/{family}")
        drawn = shipped()[f"diffusion/{family}"].pipeline == kind
        said = ""
        try:
            own.describe(recipe(family, {family: folder}), str(folder), None)
        except UserError as error:
            said = str(error)
        right = not said if drawn else kind in said and ("set pipeline to" in said) == (kind in for_class)
        sweep.check(right, f"{family} of class {kind}: {said or 'accepted'}")
    assert len(seen) > 300
    sweep.done()


NAMED = [
    ("sd", "StableDiffusionInpaintPipeline"),
    ("sd", "StableDiffusionInstructPix2PixPipeline"),
    ("sd", "StableDiffusionControlNetPipeline"),
    ("sdxl", "StableDiffusionXLInpaintPipeline"),
    ("flux", "FluxKontextInpaintPipeline"),
    ("flux_kontext", "FluxKontextInpaintPipeline"),
    ("flux", "FluxFillPipeline"),
    ("flux", "ChromaPipeline"),
    ("flux", "Flux2Pipeline"),
    ("flux2_klein", "Flux2Pipeline"),
    ("qwen_image", "QwenImageEditInpaintPipeline"),
    ("qwen_image", "QwenImageEditPlusPipeline"),
    ("qwen_image_edit", "QwenImageEditPlusPipeline"),
    ("sd3", "HiDreamImagePipeline"),
    ("sd3", "CogView4Pipeline"),
    ("sana", "SanaVideoPipeline"),
    ("sana", "SanaSprintPipeline"),
    ("z_image", "Lumina2Pipeline"),
    ("z_image", "ZImageOmniPipeline"),
    ("wan", "WanImageToVideoPipeline"),
    ("wan", "HunyuanVideoPipeline"),
    ("wan", "HunyuanVideo15Pipeline"),
    ("wan", "LTX2Pipeline"),
    ("wan", "Kandinsky5T2VPipeline"),
]


@pytest.mark.parametrize(("family", "kind"), NAMED)
def test_plan_and_train_name_the_class(folders, tmp_path, family, kind):
    folder = of_class(folders[family], tmp_path / "made", kind)
    for how in (described, built):
        with pytest.raises(UserError, match=rf"model\.path: .* is a {kind}, and this pipeline is for a "):
            how(family, folder)


@pytest.mark.parametrize(("family", "channels"), [("sd", 9), ("sd", 8), ("sdxl", 9)])
def test_inputs_of_an_inpainting_model_are_refused_whatever_the_class_says(
    folders,
    tmp_path,
    family,
    channels,
):
    folder = of_class(folders[family], tmp_path / "made")
    config = json.loads((folder / "unet" / "config.json").read_text())
    own = {k: v for k, v in config.items() if not k.startswith("_")}
    shutil.rmtree(folder / "unet")
    torch.manual_seed(0)
    unet = type(_unet(cross_attention_dim=32, attention_head_dim=2)).from_config(own | {"in_channels": channels})
    unet.save_pretrained(folder / "unet")
    for how in (described, built):
        with pytest.raises(UserError, match=rf"unet/config\.json says in_channels: {channels}, .* has 4;"):
            how(family, folder)


def _config(name, kind):
    def change(folder):
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").unlink()
        (folder / name / "config.json").write_text(json.dumps(config | {"_class_name": kind}))

    return change


def _index(name, value):
    def change(folder):
        index = json.loads((folder / "model_index.json").read_text()) | {name: value}
        (folder / "model_index.json").unlink()
        (folder / "model_index.json").write_text(json.dumps(index))

    return change


def _without(name):
    def change(folder):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return change


def _emptied(name):
    def change(folder):
        for file in (folder / name).glob("*"):
            if file.name != "tokenizer_config.json":
                file.unlink()

    return change


COMPONENTS = ("unet", "transformer", "vae", "text_encoder", "tokenizer", "scheduler")
LISTED = [None, [None, None], "diffusers", ["diffusers", "a", "b"], ["diffusers", "NoSuchModel"], ["mine", "Own"]]
FOLDERS = {
    **{f"{name}: {value}": _index(name, value) for name in COMPONENTS for value in LISTED},
    **{f"without {name}": _without(name) for name in (*COMPONENTS, "model_index.json", "vae/config.json")},
    **{
        f"{name}/config.json: {kind}": _config(name, kind)
        for name in ("unet", "transformer", "vae")
        for kind in ("AutoencoderKL", "ControlNetModel", "UNetMotionModel", "VQModel", None)
    },
    "another component": _index("controlnet", ["diffusers", "ControlNetModel"]),
}
"""What a folder may have lost, or say of its parts."""


@pytest.mark.slow
@pytest.mark.sweep("folders of checkpoints with other parts than their index says")
def test_plan_takes_the_folders_that_train_takes(folders, tmp_path, sweep):
    cases = [(family, name) for family in ("sd", "flux", "wan", "sana", "z_image") for name in FOLDERS]
    random.Random(0).shuffle(cases)
    for n, (family, name) in enumerate(cases[: sweep.size(20, len(cases))]):
        made = of_class(folders[family], tmp_path / str(n))
        try:
            FOLDERS[name](made)
        except FileNotFoundError:  # the other kind of model
            continue
        said = []
        for how in (described, built):
            try:
                said.append(how(family, made) and "")
            except UserError as error:
                said.append(str(error))
        sweep.check(bool(said[0]) == bool(said[1]), f"{family} {name}: plan {said[0]!r}, train {said[1]!r}")
    sweep.done()


def test_a_tokenizer_without_a_vocabulary_is_refused(folders, tmp_path):
    """transformers makes one that knows no word, and says nothing."""
    gone, emptied = (of_class(folders["sd"], tmp_path / name) for name in ("gone", "emptied"))
    _without("tokenizer")(gone)
    for how in (described, built):
        with pytest.raises(UserError, match=r"has no files in tokenizer, .*download it again"):
            how("sd", gone)
    _emptied("tokenizer")(emptied)
    with pytest.raises(UserError, match="the files beside it have no vocabulary; download them again"):
        built("sd", emptied)


@pytest.mark.parametrize("named", [None, ["pipeline", "MyPipeline"], 3])
def test_an_index_without_a_class_is_refused_with_the_line_to_write(folders, tmp_path, named):
    folder = of_class(folders["sd"], tmp_path / "made", "x")
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": named}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r'write "_class_name": "StableDiffusionPipeline" there'):
        described("sd", folder)
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))
    described("sd", folder)


COMPONENTS = [
    ("sd", {"text_encoder": ("transformers", "CLIPTextModelWithProjection")}, "CLIPTextModel"),
    ("sd", {"unet": ("diffusers", "UNetMotionModel")}, "UNet2DConditionModel"),
    ("sd", {"vae": ("diffusers", "AutoencoderTiny")}, "AutoencoderKL"),
    ("sdxl", {"text_encoder_2": ("transformers", "CLIPTextModel")}, "CLIPTextModelWithProjection"),
    ("flux", {"transformer": ("diffusers", "ChromaTransformer2DModel")}, "FluxTransformer2DModel"),
    ("flux", {"text_encoder_2": ("transformers", "UMT5EncoderModel")}, "T5EncoderModel"),
    ("flux", {"text_encoder": (None, None)}, "CLIPTextModel"),
    ("qwen_image", {"transformer": ("my_module", "Mine")}, "QwenImageTransformer2DModel"),
    ("wan", {"vae": ("diffusers", "AutoencoderKLHunyuanVideo")}, "AutoencoderKLWan"),
    ("hunyuan_video15", {"guider": ("diffusers", "AutoGuidance")}, "ClassifierFreeGuidance"),
    ("z_image", {"transformer": ("diffusers", "Lumina2Transformer2DModel")}, "ZImageTransformer2DModel"),
    ("flux2_klein", {"text_encoder": ("transformers", "Mistral3ForConditionalGeneration")}, "Qwen3ForCausalLM"),
]


@pytest.mark.parametrize(("family", "changes", "right"), COMPONENTS)
def test_a_component_of_another_class_is_refused_by_name(folders, tmp_path, family, changes, right):
    folder = of_class(folders[family], tmp_path / "made", None, **changes)
    ((name, (_, kind)),) = changes.items()
    for how in (described, built):
        with pytest.raises(UserError, match=rf"has a {kind or 'nothing'} as its {name}, .* is a .*{right}"):
            how(family, folder)


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux", "qwen_image", "wan", "z_image", "flux2_klein"])
def test_a_text_encoder_without_its_tokenizer_is_refused_by_name(folders, tmp_path, family):
    folder = of_class(folders[family], tmp_path / "made", None, tokenizer=(None, None))
    for how in (described, built):
        with pytest.raises(UserError, match="has a text_encoder and no tokenizer for it"):
            how(family, folder)


def test_the_advice_for_a_model_of_the_same_weights_works(folders, tmp_path):
    """Img2Img and PAG draw with the weights of text-to-image: the command that is printed saves one."""
    folder = of_class(folders["sd"], tmp_path / "made", "StableDiffusionImg2ImgPipeline")
    with pytest.raises(UserError, match="Both draw with the same weights") as error:
        described("sd", folder)
    command = shlex.split(str(error.value).splitlines()[-1])
    assert command[:2] == ["python", "-c"]
    exec(command[2], {})
    saved = tmp_path / "made-as-text-to-image"
    described("sd", saved)
    built("sd", saved)


@pytest.mark.parametrize("parts", [("unet",), ("unet", "vae", "text_encoder")])
def test_a_folder_of_a_variant_is_planned_and_trained(folders, tmp_path, parts):
    folder = of_class(folders["sd"], tmp_path / "made")
    for part in parts:
        (file,) = (folder / part).glob("*.safetensors")
        file.rename(file.with_suffix(".fp16.safetensors"))
    described("sd", folder)
    ours, plain = built("sd", folder), built("sd", folders["sd"])
    for name in ("unet", "vae", "text_encoder"):
        for a, b in zip(
            getattr(ours.adapter.pipe, name).parameters(),
            getattr(plain.adapter.pipe, name).parameters(),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("family", "reads"), [("sd", True), ("sdxl", True), ("flux", True), ("wan", False)])
def test_a_single_file_is_refused_with_a_command(folders, tmp_path, monkeypatch, family, reads):
    """The command runs as it is printed; what diffusers makes of a real file is diffusers' own matter, for which it
    needs the hub, so that a stored pipeline stands for it."""
    import diffusers

    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    for how in (described, built):
        with pytest.raises(UserError, match="is a single file") as error:
            how(family, file)
    if not reads:
        assert "diffusers reads no single file of a WanPipeline" in str(error.value)
        return
    command = shlex.split(str(error.value).splitlines()[-1])
    kind = getattr(
        diffusers, {"sd": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}.get(family, "FluxPipeline")
    )
    asked = []
    monkeypatch.setattr(
        kind, "from_single_file", lambda path: asked.append(path) or kind.from_pretrained(folders[family])
    )
    exec(command[2], {})
    assert asked == [str(file)]
    described(family, tmp_path / "model-diffusers")


@pytest.mark.sweep("names of single files, in the command that makes a folder of one")
def test_the_command_holds_for_every_name_of_a_single_file(folders, tmp_path, monkeypatch, sweep):
    import diffusers

    asked = []
    kind = diffusers.StableDiffusionPipeline
    whole = kind.from_pretrained(folders["sd"])
    monkeypatch.setattr(kind, "from_single_file", lambda path: asked.append(path) or whole)
    for seed in range(sweep.size(15, 200)):
        draw = random.Random(seed)
        name = "".join(draw.choice("ab '\"$`\\!{}%;&.éß") for _ in range(draw.randint(1, 12))).strip(". ") or "a"
        file = tmp_path / str(seed) / (name + draw.choice(["", ".safetensors", ".ckpt", ".v2.pt"]))
        file.parent.mkdir()
        file.write_bytes(b"")
        with pytest.raises(UserError, match="is a single file") as error:
            described("sd", file)
        said = str(error.value)
        exec(shlex.split(said.splitlines()[-1])[2], {})
        folder = said.splitlines()[0].partition("set model.path=")[2]
        sweep.check(asked[-1] == str(file) and os.path.isfile(f"{folder}/model_index.json"), f"{file}: {said}")
    sweep.done()
