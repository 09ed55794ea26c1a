"""Tiny pipelines of diffusers' real classes with random weights, one for each family: no download, no file of ours but
the shipped model's tokenizers."""

import atexit
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.planning import random_weights

allow_cpu_only()  # before diffusers imports transformers, and that torchvision

SHAPES = Path(__file__).resolve().parents[2] / "pipelines" / "diffusion" / "models" / "shapes-sd3"
CLIP = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TIMES = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


@cache
def two_blocks() -> Path:
    """The shipped model with its first and last block alone, for tests that hold for any size: made once in a
    process."""
    from diffusers import SD3Transformer2DModel

    folder = Path(tempfile.mkdtemp(prefix="mmrl-two-blocks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(SHAPES, folder, ignore=lambda *_: ["transformer"], dirs_exist_ok=True)
    whole = SD3Transformer2DModel.from_pretrained(SHAPES / "transformer")
    less = SD3Transformer2DModel.from_config({**whole.config, "num_layers": 2})
    first, second, last = (f"transformer_blocks.{n}." for n in (0, 1, whole.config.num_layers - 1))
    kept = {name.replace(last, second): t for name, t in whole.state_dict().items() if first in name or last in name}
    kept |= {name: t for name, t in whole.state_dict().items() if "transformer_blocks." not in name}
    less.load_state_dict(kept)
    less.save_pretrained(folder / "transformer")
    return folder


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """Save a pipeline of ``family`` (the name of its module) into ``folder``, its weights large enough to matter."""
    torch.manual_seed(seed)
    pipe = globals()[f"_{family}"]()
    predicts = [getattr(pipe, name, None) for name in ("unet", "transformer", "transformer_2")]
    with torch.no_grad():
        for p in torch.nn.ModuleList([one for one in predicts if one is not None]).parameters():
            if p.ndim >= 2:  # output layers that start at zero would leave nothing to compare
                p.add_(0.02 * torch.randn_like(p))
    pipe.save_pretrained(folder)
    return folder


def _clip(projected=False, **config):
    import transformers as t

    tok = t.CLIPTokenizer.from_pretrained(SHAPES / "tokenizer")
    ids = {"bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}
    length = {"max_position_embeddings": tok.model_max_length, "vocab_size": len(tok), "projection_dim": 32}
    made = t.CLIPTextConfig(**(CLIP | ids | length | config))
    return tok, (t.CLIPTextModelWithProjection if projected else t.CLIPTextModel)(made).eval()


def _t5():
    import transformers as t

    tok = t.T5Tokenizer.from_pretrained(SHAPES / "tokenizer_3")
    config = t.T5Config(vocab_size=len(tok), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return tok, t.T5EncoderModel(config).eval()


def _vae(channels=4, **config):
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=8,
        layers_per_block=1,
        sample_size=32,
        **config,
    )


def _unet(**config):
    import diffusers

    return diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        **config,
    )


def _sd():
    import diffusers

    tok, encoder = _clip()
    return diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=encoder,
        tokenizer=tok,
        unet=_unet(cross_attention_dim=32, attention_head_dim=2),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, **TIMES),  # as the published checkpoints come
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl():
    import diffusers

    tok, encoder = _clip()
    tok_2, encoder_2 = _clip(projected=True)
    unet = _unet(
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=_vae(scaling_factor=0.13025),
        text_encoder=encoder,
        text_encoder_2=encoder_2,
        tokenizer=tok,
        tokenizer_2=tok_2,
        unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **TIMES),
        add_watermarker=False,
    )


def _flux(kind="FluxPipeline"):
    import diffusers

    tok, encoder = _clip()
    tok_2, encoder_2 = _t5()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return getattr(diffusers, kind)(
        vae=_vae(shift_factor=0.0609, scaling_factor=1.5035, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=encoder,
        text_encoder_2=encoder_2,
        tokenizer=tok,
        tokenizer_2=tok_2,
        transformer=transformer,
        scheduler=_shifting(base_shift=0.5, max_shift=1.15, shift=3.0),
    )


def _flux_kontext():
    return _flux("FluxKontextPipeline")


def _shifting(**config):
    import diffusers

    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096, **config
    )


def _qwen_image(kind="QwenImagePipeline", special=(), **parts):
    import diffusers
    import transformers as t

    from tests.support.tiny import tokenizer

    tok = tokenizer(special=special)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = LANGUAGE | {"rope_parameters": rope, "vocab_size": len(tok), "max_position_embeddings": 1024}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    names = {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")} if special else {}
    ids = {name: tok.convert_tokens_to_ids(token) for name, token in names.items()}
    config = t.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    encoder = t.Qwen2_5_VLForConditionalGeneration(config).eval()
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.8, 1.0, 2.0],
    )
    scheduler = _shifting(base_shift=0.5, max_shift=0.9, shift=1.0, shift_terminal=0.02, time_shift_type="exponential")
    parts = {name: make(tok) for name, make in parts.items()}
    return getattr(diffusers, kind)(
        vae=vae, text_encoder=encoder, tokenizer=tok, transformer=transformer, scheduler=scheduler, **parts
    )


def _qwen_image_edit(kind="QwenImageEditPipeline"):
    """Its text encoder sees at most nine tokens of a picture."""
    import pytest

    pytest.importorskip("torchvision")
    import transformers as t

    from tests.support.tiny import VISION

    def processor(tok):
        images = t.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=84 * 84)
        clips = t.Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
        return t.Qwen2VLProcessor(image_processor=images, tokenizer=tok, video_processor=clips)

    return _qwen_image(kind, VISION, processor=processor)


def _qwen_image_edit_plus():
    return _qwen_image_edit("QwenImageEditPlusPipeline")


def _wan(channels=4, vae=None, kind="WanPipeline", inputs=None, **pipeline):
    import diffusers
    import transformers as t

    tok = t.T5Tokenizer.from_pretrained(SHAPES / "tokenizer_3")
    config = t.UMT5Config(vocab_size=len(tok), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        out_channels=channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **(inputs or {"in_channels": channels}),
    )
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=12,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0] * (channels // 4),
        latents_std=[1.5, 0.8, 1.0, 2.0] * (channels // 4),
        **(vae or {}),
    )
    return getattr(diffusers, kind)(
        tokenizer=tok,
        text_encoder=t.UMT5EncoderModel(config).eval(),
        vae=autoencoder,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        **pipeline,
    )


def _wan22_ti2v():
    """Wan 2.2 TI2V-5B: another VAE, of patches, and a time for every token."""
    patches = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    vae = {"is_residual": True, "decoder_base_dim": 12, "scale_factor_temporal": 4} | patches
    return _wan(channels=8, vae=vae, expand_timesteps=True)


def _wan_i2v():
    """Wan 2.1 image-to-video, with an image encoder of five tokens."""
    import transformers as t

    eye = t.CLIPVisionConfig(**CLIP, image_size=28, patch_size=14)
    shown = t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return _wan(
        kind="WanImageToVideoPipeline",
        inputs={"in_channels": 4 + 4 + 4, "image_dim": 32, "added_kv_proj_dim": 24},
        image_encoder=t.CLIPVisionModel(eye).eval(),
        image_processor=shown,
    )


def _wan22_i2v_a14b():
    """Wan 2.2 A14B image-to-video: two models, and no image encoder."""
    inputs = {"in_channels": 4 + 4 + 4}
    second = _wan(inputs=inputs).transformer
    return _wan(kind="WanImageToVideoPipeline", inputs=inputs, transformer_2=second, boundary_ratio=0.9)


def _wan22_a14b():
    """Wan 2.2 A14B: two models, here with the first of three steps for that of high noise."""
    second = _wan().transformer
    return _wan(transformer_2=second, boundary_ratio=0.9)


def _hunyuan_video15(kind="HunyuanVideo15Pipeline", **parts):
    """HunyuanVideo 1.5: texts in quotes are read by a second encoder, and guidance is an object. Words of its long
    template are tokens."""
    import inspect

    import diffusers
    import transformers as t

    from tests.support.tiny import tokenizer

    told = inspect.signature(diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"]
    words = [word.replace(" ", "\u0120") for word in re.findall(" ?[a-zA-Z]{2,}", told.default)]
    tok, tok_2 = tokenizer(dict.fromkeys(words)), t.ByT5Tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = LANGUAGE | {"num_hidden_layers": 4, "rope_parameters": rope, "max_position_embeddings": 2048}
    encoder = t.Qwen2_5_VLTextModel(t.Qwen2_5_VLTextConfig(**text, vocab_size=len(tok)))
    config = t.T5Config(vocab_size=len(tok_2), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16, 16), layers_per_block=1, spatial_compression_ratio=4
    )
    return getattr(diffusers, kind)(
        text_encoder=encoder.eval(),
        tokenizer=tok,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=t.T5EncoderModel(config).eval(),
        tokenizer_2=tok_2,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **parts,
    )


def _hunyuan_video15_i2v():
    """Its image encoder has four tokens."""
    import transformers as t

    shown = CLIP | {"image_size": 28, "patch_size": 14}
    return _hunyuan_video15(
        "HunyuanVideo15ImageToVideoPipeline",
        image_encoder=t.SiglipVisionModel(t.SiglipVisionConfig(**shown)).eval(),
        feature_extractor=t.SiglipImageProcessor(size={"height": 28, "width": 28}),
    )


def _ltx2():
    """LTX-2: clips with sound. Its text encoder's connectors have no registers, so that masks count."""
    import diffusers
    import transformers as t
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    tok = _gemma()
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = t.Gemma3TextConfig(**LANGUAGE, vocab_size=len(tok), head_dim=8, max_position_embeddings=1024)
    vision = t.SiglipVisionConfig(**sees, image_size=28, patch_size=14)
    encoder = t.Gemma3ForConditionalGeneration(
        t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    small = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    streams = {f"{stream}_connector_{what}": n for stream in ("video", "audio") for what, n in small.items()}
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        vae_scale_factors=(4, 8, 8),
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=32,
        rope_double_precision=False,
        rope_type="split",
    )
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatiotemporal"),
        upsample_residual=(True, True),
        upsample_factor=(1, 1),
        patch_size=2,
        decoder_causal=False,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=32, latent_channels=4, mel_bins=8
    )
    for one in (vae, audio_vae):
        one.latents_mean.normal_(std=0.2)
        one.latents_std.uniform_(0.5, 2)
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    return diffusers.LTX2Pipeline(
        scheduler=_shifting(base_shift=0.95, max_shift=2.05, shift_terminal=0.1),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=encoder,
        tokenizer=tok,
        connectors=LTX2TextConnectors(32, 3, **streams, rope_double_precision=False, rope_type="split"),
        transformer=transformer,
        vocoder=vocoder,
    )


def _gemma():
    import transformers as t

    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *bytes_])}
    return t.GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True)


def _sana():
    import diffusers
    import transformers as t

    tok = _gemma()
    text = t.Gemma2Config(**LANGUAGE, vocab_size=len(tok), head_dim=8, max_position_embeddings=4096)
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        num_layers=2,
        sample_size=8,
    )
    blocks, widths = ("ResBlock", "EfficientViTBlock"), (16, 32)
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    solver = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return diffusers.SanaPipeline(
        tokenizer=tok,
        text_encoder=t.Gemma2Model(text).eval(),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(**solver),  # as the published checkpoints come
    )


def _qwen3(kind, **config):
    """A tokenizer and an encoder of text, of class ``kind``."""
    import transformers as t

    from tests.support.tiny import tokenizer

    tok = tokenizer()
    made = t.Qwen3Config(**LANGUAGE | config, vocab_size=len(tok), head_dim=8, max_position_embeddings=1024)
    return tok, getattr(t, kind)(made).eval()


def _z_image(channels=4, longest=128):
    import diffusers

    tok, encoder = _qwen3("Qwen3Model")
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=channels,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=(4, 6, 6),
        axes_lens=(longest, 16, 16),
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(channels, shift_factor=0.1159, scaling_factor=0.3611, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=encoder,
        tokenizer=tok,
        transformer=transformer,
    )


def _z_image_served():
    """One that SGLang reads, which takes 16 channels for granted."""
    return _z_image(16, 1024)


def _flux2_klein(kind="Flux2KleinPipeline", guided=False, encoder=None):
    import diffusers

    tok, encoder = encoder or _qwen3("Qwen3ForCausalLM", num_hidden_layers=4)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guided,
    )
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        layers_per_block=1,
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    return getattr(diffusers, kind)(
        scheduler=_shifting(base_shift=0.5, max_shift=1.15, shift=3.0),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tok,
        transformer=transformer,
    )


def _flux2():
    """FLUX.2 dev: its tokenizer is a processor of pictures, too."""
    import pytest

    pytest.importorskip("torchvision")
    import transformers as t

    from tests.support.tiny import SEES, tokenizer

    tok = tokenizer(special=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), template=SEES.replace("IMAGE", "[IMG]"))
    processor = t.PixtralProcessor(
        image_processor=t.PixtralImageProcessor(size={"longest_edge": 28}, patch_size=14),
        tokenizer=tok,
        patch_size=14,
        chat_template=tok.chat_template,
    )
    text = t.MistralConfig(**LANGUAGE | {"num_hidden_layers": 4}, vocab_size=len(tok), head_dim=8)
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = t.PixtralVisionConfig(**sees, image_size=28, patch_size=14, head_dim=8)
    image = tok.convert_tokens_to_ids("[IMG]")
    config = t.Mistral3Config(text_config=text, vision_config=vision, image_token_index=image)
    encoder = t.Mistral3ForConditionalGeneration(config).eval()
    return _flux2_klein("Flux2Pipeline", guided=True, encoder=(processor, encoder))


LAYERS = {
    "transformer": {"num_layers": 2, "num_single_layers": 2, "n_layers": 2},
    "unet": {"transformer_layers_per_block": 1, "layers_per_block": 1},
    "text_encoder": {"num_hidden_layers": 2, "num_layers": 2, "depth": 2, "fullatt_block_indexes": [1]},
}


def cut(architecture: Path, pipeline: str, folder: Path) -> None:
    """Save the pipeline of a recorded architecture into ``folder``, at true width with two layers of each kind, random
    weights and tiny tokenizers."""
    configs = json.loads(architecture.read_text())["components"]
    for name, config in configs.items():
        layers = LAYERS.get(name.removesuffix("_2"), {})
        for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
            part |= {key: value for key, value in layers.items() if key in part}
    recorded = folder.with_name("cut.json")
    recorded.write_text(json.dumps({"components": configs}))
    module = mmrl.load("pipelines", pipeline)
    (family,) = [
        v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__ and hasattr(v, "family")
    ]
    pipe, _ = mmrl.load("pipelines", "diffusion/describe").empty_pipeline(
        family, "no/model", recorded, {"default": torch.bfloat16, "vae": torch.float32}
    )
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module):
            random_weights(part)
        elif name.startswith("tokenizer"):
            encoder = configs[name.replace("tokenizer", "text_encoder")]["architectures"][0]
            pipe.register_modules(**{name: _tokenizer(encoder)})
    pipe.save_pretrained(folder)


def _tokenizer(encoder: str):
    import transformers as t

    from tests.support.tiny import tokenizer

    if encoder.startswith("CLIP"):
        return t.CLIPTokenizer.from_pretrained(SHAPES / "tokenizer", model_max_length=77)
    return t.T5Tokenizer.from_pretrained(SHAPES / "tokenizer_3") if "T5" in encoder else tokenizer()
