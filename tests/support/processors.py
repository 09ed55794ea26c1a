"""Tiny processors of vision-language families: transformers' real classes over a byte-level tokenizer, no models."""

from tests.support import tiny

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "smolvlm",
    "idefics3",
    "idefics2",
    "llava",
    "llava_next",
    "llava_onevision",
    "gemma3",
    "internvl",
    "pixtral",
    "aya_vision",
    "llama4",
    "glm4v",
)
CLIPS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl", "glm4v")
"""Those whose processors read clips."""
BOS = "<s>"
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_QWEN_MEDIA = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
_AYA = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"]
_LLAMA4 = ["<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]


def processor(family: str, *, adds_bos: bool = False, writes_bos: bool = False):
    """The processor of ``family``. ``adds_bos``: its tokenizer puts a token before every text; ``writes_bos``: its chat
    template writes that token."""
    made = globals()[f"_{family}"]()
    made.tokenizer.add_special_tokens({"bos_token": BOS})
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        bos = made.tokenizer.convert_tokens_to_ids(BOS)
        made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
        )
    if writes_bos:
        made.chat_template = "{{ bos_token }}" + made.chat_template
    return made


def _template(image: str, video: str = "VIDEO") -> str:
    return tiny.SEES.replace("IMAGE", image).replace("VIDEO", video)


def _tokenizer(*special: str, **named: str):
    made = tiny.tokenizer(special=[*named.values(), *special], template=None, **named)
    made.add_tokens(["<think>", "</think>", "<tool_call>"], special_tokens=False)
    return made


def _limits(side: int):
    return {"min_pixels": side * side, "max_pixels": 9 * side * side, "patch_size": side // 2, "merge_size": 2}


def _qwen2_vl():
    import transformers as t

    images, clips = t.Qwen2VLImageProcessor(**_limits(28)), t.Qwen2VLVideoProcessor(**_limits(28))
    return t.Qwen2VLProcessor(images, _tokenizer(**_QWEN), clips, chat_template=_template(*_QWEN_MEDIA))


def _qwen2_5_vl():
    import transformers as t

    images, clips = t.Qwen2VLImageProcessor(**_limits(28)), t.Qwen2VLVideoProcessor(**_limits(28))
    return t.Qwen2_5_VLProcessor(images, _tokenizer(**_QWEN), clips, chat_template=_template(*_QWEN_MEDIA))


def _qwen3_vl():
    import transformers as t

    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    images = t.Qwen2VLImageProcessor(size=size, patch_size=16, merge_size=2)
    clips = t.Qwen3VLVideoProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 4 * 64 * 64}, patch_size=16)
    return t.Qwen3VLProcessor(images, _tokenizer(**_QWEN), clips, chat_template=_template(*_QWEN_MEDIA))


def _smol_named():
    return {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }


def _smolvlm():
    import transformers as t

    rows = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    edge = {"longest_edge": 32}
    images = t.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size=edge)
    clips = t.SmolVLMVideoProcessor(size=edge, max_image_size=edge, num_frames=8, fps=1)
    tok = _tokenizer(*rows, **_smol_named())
    return t.SmolVLMProcessor(images, tok, clips, image_seq_len=4, chat_template=_template("<image>", "<video>"))


def _idefics3():
    import transformers as t

    rows = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    images = t.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return t.Idefics3Processor(
        images, _tokenizer(*rows, **_smol_named()), image_seq_len=4, chat_template=_template("<image>")
    )


def _idefics2():
    import transformers as t

    images = t.Idefics2ImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}, do_image_splitting=False)
    return t.Idefics2Processor(images, _tokenizer(), image_seq_len=4, chat_template=_template("<image>"))


def _clip_images():
    import transformers as t

    return t.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _llava():
    import transformers as t

    tok = _tokenizer(image_token="<image>")
    return t.LlavaProcessor(
        _clip_images(),
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template("<image>"),
    )


def _llava_next():
    import transformers as t

    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 56], [56, 28]]
    )
    return t.LlavaNextProcessor(
        images,
        _tokenizer(image_token="<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template("<image>"),
    )


def _llava_onevision():
    import transformers as t

    images = t.LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=[[28, 28], [56, 28]])
    clips = t.LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28})
    return t.LlavaOnevisionProcessor(
        images,
        _tokenizer(image_token="<image>", video_token="<video>"),
        clips,
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=_template("<image>", "<video>"),
    )


def _gemma3():
    import transformers as t

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    images = t.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    return t.Gemma3Processor(
        images, _tokenizer(**named), image_seq_length=4, chat_template=_template("<start_of_image>")
    )


def _internvl():
    import transformers as t

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    size = {"height": 28, "width": 28}
    images = t.GotOcr2ImageProcessor(size=size, crop_to_patches=False)
    clips = t.InternVLVideoProcessor(size=size)
    return t.InternVLProcessor(
        images, _tokenizer(**named), clips, image_seq_length=4, chat_template=_template("<IMG_CONTEXT>", "<video>")
    )


def _pixtral():
    import transformers as t

    images = t.PixtralImageProcessor(size={"longest_edge": 64}, patch_size=16)
    return t.PixtralProcessor(
        images, _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"), patch_size=16, chat_template=_template("[IMG]")
    )


def _aya_vision():
    import transformers as t

    images = t.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=False)
    return t.AyaVisionProcessor(
        images,
        _tokenizer("<image>", *_AYA),
        patch_size=14,
        img_size=28,
        downsample_factor=1,
        chat_template=_template("<image>"),
    )


def _llama4():
    import transformers as t

    images = t.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    return t.Llama4Processor(
        images, _tokenizer(*_LLAMA4), patch_size=14, pixel_shuffle_ratio=0.5, chat_template=_template("<|image|>")
    )


def _glm4v():
    import transformers as t

    media = ("<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>")
    named = {"image_token": "<|image|>", "video_token": "<|video|>"}
    others = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    size = {"shortest_edge": 28 * 28, "longest_edge": 9 * 28 * 28}
    images, clips = t.Glm4vImageProcessor(size=size), t.Glm4vVideoProcessor(size=size)
    return t.Glm4vProcessor(images, _tokenizer(*others, **named), clips, chat_template=_template(*media))


def copied(part):
    """A copy of a part of a processor, to be changed."""
    import copy

    return copy.copy(part)
