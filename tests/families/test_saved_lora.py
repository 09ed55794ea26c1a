"""LoRA files of other programs: what is accepted computes what diffusers computes with it, the rest is refused."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import save_file

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

import diffusers  # noqa: E402
from peft import LoraConfig, get_peft_model_state_dict  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from mmrl.core.errors import UserError  # noqa: E402
from tests.support.saved_lora import FAMILIES, Lazy, folders_in, model_of, recipe, velocity  # noqa: E402

UNETS = ["sd", "sdxl"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folders_in(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def stock(folders):
    """The stock pipelines, by family."""
    return Lazy(lambda family: diffusers.DiffusionPipeline.from_pretrained(folders[family]))


def built(family, folder, path):
    return built_with(family, folder, {"path": str(path)})


def built_with(family, folder, lora):
    made = recipe(family, folder, lora)
    kind = mmrl.load("pipelines", made.pipeline)
    return kind.build(made, made.model.path, torch.device("cpu"))


def component(family):
    return "unet" if family in UNETS else "transformer"


def linears(family, model):
    """Names of linear layers that every family's computation reads."""
    kept = r"attn.*\.(to_[qkv]|to_out\.0)$|\.attention\.to_[qkv]$"
    return sorted(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and re.search(kept, n))


def pair(model, name, rank, dtype=torch.float32):
    out, into = model.get_submodule(name).weight.shape[:2]
    return torch.randn(rank, into).to(dtype) * 0.3, torch.randn(out, rank).to(dtype) * 0.3


# --- formats: each gives tensors and metadata, by the names of a program ---------------------------------------------


def of_diffusers(rng, family, model, names):
    """As diffusers saves it, with its settings."""
    kinds, said = {}, {"r": rng.choice([2, 4]), "lora_alpha": rng.choice([1, 3, 8]), "target_modules": names}
    if rng.random() < 0.5:
        kinds["rank_pattern"] = {n: rng.choice([1, 3]) for n in rng.sample(names, len(names) // 3)}
    if rng.random() < 0.5:
        kinds["alpha_pattern"] = {n: rng.choice([2, 5]) for n in rng.sample(names, len(names) // 3)}
    kinds |= {"use_rslora": rng.random() < 0.3, "lora_dropout": rng.choice([0.0, 0.5])}
    config = LoraConfig(**said, **kinds)
    tensors = {}
    for n in names:
        a, b = pair(model, n, kinds.get("rank_pattern", {}).get(n, said["r"]))
        tensors |= {f"{component(family)}.{n}.lora_A.weight": a, f"{component(family)}.{n}.lora_B.weight": b}
    about = {f"{component(family)}.{k}": sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return tensors, {"lora_adapter_metadata": json.dumps(about, default=str)}


def of_diffusers_bare(rng, family, model, names):
    """As ai-toolkit and older versions of diffusers save it: no settings, ranks that may differ."""
    tensors, ranks = {}, rng.choice([[4], [2, 4], [1, 2, 8]])
    for n in names:
        a, b = pair(model, n, rng.choice(ranks), rng.choice([torch.float32, torch.bfloat16]))
        tensors |= {f"{component(family)}.{n}.lora_A.weight": a, f"{component(family)}.{n}.lora_B.weight": b}
    return tensors, {"format": "pt", "software": "ai-toolkit"}


def of_kohya(rng, family, model, names):
    tensors, ranks, alpha = {}, rng.choice([[4], [2, 4]]), rng.choice([4.0, 1.0, 0.5])
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    for n in names:
        a, b = pair(model, n, rng.choice(ranks), dtype)
        key = f"lora_unet_{n.replace('.', '_')}"
        tensors |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
        tensors[f"{key}.alpha"] = torch.tensor(alpha).to(dtype)
    return tensors, {"ss_network_module": "networks.lora", "ss_network_dim": "4", "ss_network_alpha": "1"}


def of_kohya_sgm(rng, family, model, names):
    """Kohya's names for SDXL, which follow the model of Stability."""
    places = {"down_blocks.1.attentions.0": "input_blocks_3_1", "mid_block.attentions.0": "middle_block_1"}
    places |= {"up_blocks.0.attentions.0": "output_blocks_0_1"}
    tensors = {}
    for n in names:
        for begin, sgm in places.items():
            if n.startswith(begin):
                a, b = pair(model, n, 4)
                key = f"lora_unet_{sgm}_{n.removeprefix(begin + '.').replace('.', '_')}"
                tensors |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b, f"{key}.alpha": torch.tensor(2.0)}
    return tensors, {}


def of_old_diffusers(rng, family, model, names):
    """Processors of attention, as diffusers saved them before it used peft."""
    tensors = {}
    for n in names:
        a, b = pair(model, n, 4)
        attention, _, layer = n.removesuffix(".0").rpartition(".")
        key = f"unet.{attention}.processor.{layer}_lora"
        tensors |= {f"{key}.down.weight": a, f"{key}.up.weight": b}
    return tensors, {}


def of_older_names(rng, family, model, names):
    tensors = {}
    for n in names:
        a, b = pair(model, n, 4)
        tensors |= {f"unet.{n}.lora.down.weight": a, f"unet.{n}.lora.up.weight": b}
    return tensors, {}


def _scaled(rng, key, a, b, alpha, names=("lora_A", "lora_B")):
    made = {f"{key}.{names[0]}.weight": a, f"{key}.{names[1]}.weight": b}
    return made | ({f"{key}.alpha": torch.tensor(alpha)} if alpha else {})


def of_kohya_flux(rng, family, model, names):
    tensors, double = {}, "transformer_blocks.0."
    parts = {"attn.to_out.0": "img_attn_proj", "attn.to_add_out": "txt_attn_proj", "ff.net.2": "img_mlp_2"}
    parts |= {
        "norm1.linear": "img_mod_lin",
        "norm1_context.linear": "txt_mod_lin",
        "ff_context.net.0.proj": "txt_mlp_0",
    }
    for n, theirs in parts.items():
        key = f"lora_unet_double_blocks_0_{theirs}"
        tensors |= _scaled(rng, key, *pair(model, double + n, 4), rng.choice([1.0, 8.0]), ("lora_down", "lora_up"))
    a, b = torch.randn(5, 32) * 0.3, torch.randn(96, 5) * 0.3
    into = model.get_submodule(f"{double}attn.to_q").weight.shape
    a, b = torch.randn(5, into[1]) * 0.3, torch.randn(3 * into[0], 5) * 0.3
    tensors |= _scaled(rng, "lora_unet_double_blocks_0_img_attn_qkv", a, b, 2.0, ("lora_down", "lora_up"))
    return tensors, {"ss_network_module": "networks.lora_flux"}


def of_xlabs(rng, family, model, names):
    into = model.get_submodule("transformer_blocks.0.attn.to_q").weight.shape
    tensors = {}
    for n, key in {"attn.to_out.0": "proj_lora1", "attn.to_add_out": "proj_lora2"}.items():
        a, b = pair(model, f"transformer_blocks.0.{n}", 4)
        key = f"double_blocks.0.processor.{key}"
        tensors |= {f"{key}.down.weight": a, f"{key}.up.weight": b}
    for key in ("qkv_lora1", "qkv_lora2"):
        a, b = torch.randn(4, into[1]) * 0.3, torch.randn(3 * into[0], 4) * 0.3
        key = f"double_blocks.0.processor.{key}"
        tensors |= {f"{key}.down.weight": a, f"{key}.up.weight": b}
    return tensors, {}


WAN = {"attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_out.0": "self_attn.o"}
WAN |= {"attn2.to_v": "cross_attn.v", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}


def of_comfy_wan(rng, family, model, names):
    tensors, alpha = {}, rng.choice([None, 2.0])
    down = rng.choice([("lora_A", "lora_B"), ("lora_down", "lora_up")])
    for n, theirs in WAN.items():
        a, b = pair(model, f"blocks.0.{n}", 4)
        tensors |= _scaled(rng, f"diffusion_model.blocks.0.{theirs}", a, b, alpha, down)
    return tensors, {}


def of_musubi_wan(rng, family, model, names):
    tensors = {}
    whole = {f"attn{n}.to_{d}": f"{kind}_attn.{d}" for n, kind in ((1, "self"), (2, "cross")) for d in "qkv"}
    whole |= {f"attn{n}.to_out.0": f"{kind}_attn.o" for n, kind in ((1, "self"), (2, "cross"))}
    for n, theirs in (whole | {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}).items():
        for block in range(len(model.blocks)):
            key = f"lora_unet_blocks_{block}_{theirs.replace('.', '_')}"
            tensors |= _scaled(rng, key, *pair(model, f"blocks.{block}.{n}", 4), 2.0, ("lora_down", "lora_up"))
    return tensors, {}


def of_comfy_plain(rng, family, model, names):
    """``diffusion_model.`` before the names of diffusers."""
    tensors, alpha = {}, rng.choice([None, 2.0])
    down = ("lora_down", "lora_up") if alpha else ("lora_A", "lora_B")
    for n in names:
        tensors |= _scaled(rng, f"diffusion_model.{n}", *pair(model, n, 4), alpha, down)
    return tensors, {}


def of_musubi_plain(rng, family, model, names):
    tensors = {}
    for n in names:
        key = f"lora_unet_{n.replace('.', '_')}"
        tensors |= _scaled(rng, key, *pair(model, n, 4), 2.0, ("lora_down", "lora_up"))
    return tensors, {}


def of_flux2(rng, family, model, names):
    """Black Forest Labs' names, as ai-toolkit and ComfyUI have them for FLUX.2."""
    block, tensors = "transformer_blocks.0.", {}
    for n, theirs in {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}.items():
        tensors |= _scaled(rng, f"diffusion_model.double_blocks.0.{theirs}", *pair(model, block + n, 4), None)
    out, into = model.get_submodule(f"{block}attn.to_q").weight.shape
    a, b = torch.randn(6, into) * 0.3, torch.randn(3 * out, 6) * 0.3
    return tensors | _scaled(rng, "diffusion_model.double_blocks.0.img_attn.qkv", a, b, None), {}


def of_ltx2(rng, family, model, names):
    """Lightricks' names, as its trainer and ComfyUI have them: those of diffusers but for what is at the ends."""
    tensors, theirs = {}, {"proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj"}
    theirs |= {"time_embed.linear": "adaln_single.linear", "audio_time_embed.linear": "audio_adaln_single.linear"}
    for n in [*names, *theirs]:
        tensors |= _scaled(rng, f"diffusion_model.{theirs.get(n, n)}", *pair(model, n, 4), None)
    return tensors, {}


def of_z_image(rng, family, model, names):
    tensors = {}
    for n in names:
        key = f"diffusion_model.{n.replace('to_out.0', 'out')}"
        tensors |= _scaled(rng, key, *pair(model, n, 4), 2.0, ("lora_down", "lora_up"))
    return tensors, {}


WANS = ["wan", "wan_i2v", "wan_v2v", "wan22_ti2v", "wan22_i2v_5b"]
FORMATS = {
    of_diffusers: FAMILIES,
    of_diffusers_bare: FAMILIES,
    of_kohya: UNETS,
    of_kohya_sgm: ["sdxl"],
    of_old_diffusers: UNETS,
    of_older_names: UNETS,
    of_kohya_flux: ["flux"],
    of_xlabs: ["flux"],
    of_comfy_wan: WANS,
    of_musubi_wan: WANS,
    of_comfy_plain: ["qwen_image"],
    of_musubi_plain: ["qwen_image"],
    of_flux2: ["flux2_klein", "flux2_klein_edit", "flux2", "flux2_edit"],
    of_ltx2: ["ltx2", "ltx2_i2v", "ltx2_v2v"],
    of_z_image: ["z_image"],
}


def some(rng, names):
    return sorted(rng.sample(names, rng.randint(max(3, len(names) // 2), len(names))))


@pytest.mark.slow
@pytest.mark.sweep("LoRA files of other programs")
def test_a_file_means_what_diffusers_computes_with_it(sweep, folders, stock, tmp_path):
    for n in range(sweep.size(1, 12)):
        for make, family in [(make, f) for make, of in FORMATS.items() for f in of[: sweep.size(1, len(of))]]:
            rng = random.Random(f"{n} {make.__name__} {family}")
            torch.manual_seed(rng.randrange(2**31))
            pipe = stock[family]
            tensors, about = make(rng, family, model_of(pipe), some(rng, linears(family, model_of(pipe))))
            file = tmp_path / f"{make.__name__}-{family}-{n}.safetensors"
            save_file({k: v.contiguous() for k, v in tensors.items()}, file, {k: str(v) for k, v in about.items()})
            case = f"{make.__name__}, {family}, {n}"
            try:
                pipeline = built(family, folders[family], file)
                before = velocity(pipeline.adapter, model_of(pipe))
                pipe.load_lora_weights(str(file.parent), weight_name=file.name)
                model_of(pipe).eval()
                expected = velocity(pipeline.adapter, model_of(pipe))
                found = velocity(pipeline.adapter, pipeline.policy)
                again = velocity(pipeline.adapter, pipeline.policy)
                gap, moved = (found - expected).abs().max().item(), (before - expected).abs().max().item()
                alike = gap < 1e-5 * max(1, expected.abs().max().item())
                sweep.check(alike and moved > 1e-4 and torch.equal(found, again), f"{case}: {gap}, it moves {moved}")
            except Exception as error:
                sweep.check(False, f"{case}: {type(error).__name__}: {error}")
            finally:
                pipe.unload_lora_weights()
            file.unlink()
    sweep.done()


@pytest.mark.parametrize("family", UNETS)
def test_kohyas_alphas_are_of_their_modules(folders, stock, tmp_path, family):
    """diffusers gives all modules the most common one; kohya's own code, and ComfyUI, each module its own."""
    pipe, tensors = stock[family], {}
    base = type(model_of(pipe)).from_pretrained(folders[family] / "unet")
    for n, name in enumerate(linears(family, base)):
        a, b = pair(base, name, 4)
        key, alpha = f"lora_unet_{name.replace('.', '_')}", [1.0, 4.0, 7.0, None][n % 4]
        tensors |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
        tensors |= {} if alpha is None else {f"{key}.alpha": torch.tensor(alpha)}
        base.get_submodule(name).weight.data += (4.0 if alpha is None else alpha) / 4 * b @ a
    save_file(tensors, tmp_path / "several.safetensors")
    pipeline = built(family, folders[family], tmp_path / "several.safetensors")
    expected, found = velocity(pipeline.adapter, base), velocity(pipeline.adapter, pipeline.policy)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def kohya(key="lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"):
    a, b = torch.randn(4, 32), torch.randn(32, 4)
    return {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b, f"{key}.alpha": torch.tensor(2.0)}


BESIDE = {
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": "a part for a text encoder",
    "lora_te2_text_model_encoder_layers_0_mlp_fc1.alpha": "a part for a text encoder",
    "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_A.weight": "a part for a text encoder",
    "text_encoder_2.text_projection.lora.down.weight": "a part for a text encoder",
    "lora_unet_x.dora_scale": "DoRA",
    "unet.x.lora_magnitude_vector": "DoRA",
    "lora_unet_x.lokr_w1": "LoKr of LyCORIS",
    "lora_unet_x.hada_w1_a": "LoHa of LyCORIS",
    "lora_unet_x.oft_blocks": "OFT",
    "lora_unet_x.lora_mid.weight": "a LoRA with a middle matrix",
    "lora_unet_x.diff": "whole differences of weights",
    "diffusion_model.blocks.0.norm.diff_b": "whole differences of weights",
    "lora_unet_x.on_input": r"\(IA\)3",
    "unet.x.lora_B.bias": "biases",
    "bundle_emb.me.string_to_param.*": "an embedding of textual inversion",
    "lora_unet_x.a1.weight": "GLoRA",
    "unet.conv_in.weight": "no weight of a LoRA",
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_part_that_is_no_plain_lora_is_named_before_a_model_is_loaded(tmp_path, name):
    save_file(kohya() | {name: torch.ones(4, 4)}, tmp_path / "one.safetensors")
    for path in (tmp_path, tmp_path / "one.safetensors"):
        with pytest.raises(
            ValidationError, match=f"which is {BESIDE[name]}.*remove lora.path, and a new adapter"
        ) as said:
            recipe("sd", "nowhere", {"path": str(path)})
        assert name in str(said.value)


@pytest.mark.parametrize("alpha", [0.0, -2.0, float("nan"), float("inf")])
def test_an_alpha_that_does_nothing_is_refused(tmp_path, alpha):
    save_file(kohya() | {f"{next(iter(kohya()))[:-17]}.alpha": torch.tensor(alpha)}, tmp_path / "one.safetensors")
    with pytest.raises(ValidationError, match=r"has an alpha of .*remove lora\.path"):
        recipe("sd", "nowhere", {"path": str(tmp_path / "one.safetensors")})


def test_what_a_message_says_of_files_can_be_done(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file(kohya(), tmp_path / name)
    with pytest.raises(ValidationError, match=r"give one of its files \(a\.safetensors, b\.safetensors\)"):
        recipe("sd", "nowhere", {"path": str(tmp_path)})
    assert recipe("sd", "nowhere", {"path": str(tmp_path / "a.safetensors")}).model.lora.alpha == 2
    (tmp_path / "old").mkdir()
    torch.save(kohya(), tmp_path / "old" / "one.pt")
    with pytest.raises(ValidationError, match=r"no safetensors file.*safetensors\.torch\.save_file, or remove"):
        recipe("sd", "nowhere", {"path": str(tmp_path / "old" / "one.pt")})
    save_file(torch.load(tmp_path / "old" / "one.pt", weights_only=True), tmp_path / "old" / "one.safetensors")
    lora = recipe("sd", "nowhere", {"path": str(tmp_path / "old")}).model.lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 2.0, None)
    (tmp_path / "old" / "one.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValidationError, match="cannot be read"):
        recipe("sd", "nowhere", {"path": str(tmp_path / "old" / "one.safetensors")})


def test_a_lora_of_another_family_is_refused(folders, tmp_path):
    save_file(kohya("lora_unet_double_blocks_0_img_attn_proj"), tmp_path / "flux.safetensors")
    for family in ("sd", "sd3", "wan"):
        with pytest.raises(UserError, match=r"Give a LoRA of this family|Set model\.path to the model") as said:
            built(family, folders[family], tmp_path / "flux.safetensors")
        assert len(str(said.value)) < 800


def test_files_that_diffusers_does_not_read_are_refused(folders, tmp_path):
    """Of LTX-2 those with kohya's names, or of its connectors; of HunyuanVideo 1.5 all."""
    key, a, b = "diffusion_model.transformer_blocks.0.attn1.to_q", torch.ones(4, 32), torch.ones(32, 4)
    own, kohyas = _scaled(None, key, a, b, None), ("lora_down", "lora_up")
    for tensors, message in (
        (_scaled(None, key, a, b, None, kohyas), r"lora_down.weight, and weights"),
        (_scaled(None, key, a, b, 2.0), r"to_q.alpha, and weights of a LoRA .* end in lora_A"),
        (
            own | _scaled(None, "text_embedding_projection.aggregate_embed", 2 * a, 2 * b, None),
            r"connectors.text_proj_in",
        ),
    ):
        save_file(tensors, tmp_path / "one.safetensors")
        with pytest.raises(UserError, match=rf"cannot be read for LTX-2 by diffusers: it has .*{message}"):
            built("ltx2", folders["ltx2"], tmp_path / "one.safetensors")
    save_file(own, tmp_path / "one.safetensors")
    with pytest.raises(UserError, match=r"diffusers reads no file of a LoRA for HunyuanVideo 1.5; give a folder that"):
        built("hunyuan_video15", folders["hunyuan_video15"], tmp_path / "one.safetensors")


def test_merging_into_the_base_works_as_the_message_says(folders, tmp_path):
    """For what is refused: a LoRA whose settings of diffusers ask for DoRA."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folders["sd"])
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=6, use_dora=True, target_modules=["to_q", "to_v"])
    pipe.unet.add_adapter(config)
    for p in pipe.unet.parameters():
        p.data += 0.2 * torch.randn_like(p) if p.requires_grad else 0
    state = get_peft_model_state_dict(pipe.unet)
    about = json.loads(json.dumps(config.to_dict(), default=list))
    pipe.save_lora_weights(tmp_path / "dora", unet_lora_layers=state, unet_lora_adapter_metadata=about)
    with pytest.raises(ValidationError, match=r"DoRA|use_dora"):
        recipe("sd", folders["sd"], {"path": str(tmp_path / "dora")})
    fresh = diffusers.DiffusionPipeline.from_pretrained(folders["sd"])
    fresh.load_lora_weights(str(tmp_path / "dora"))
    fresh.fuse_lora()
    fresh.unload_lora_weights()
    fresh.save_pretrained(tmp_path / "merged")
    pipeline = built_with("sd", tmp_path / "merged", {"rank": 2})
    found = velocity(pipeline.adapter, pipeline.policy)
    torch.testing.assert_close(found, velocity(pipeline.adapter, pipe.unet.eval()), atol=1e-4, rtol=1e-4)
