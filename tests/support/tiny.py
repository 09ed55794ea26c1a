"""Tiny real models with random weights, made in memory: no download, no file of ours."""

import shutil
from pathlib import Path

import torch

from mmrl.core.torchvision_on_cpu import allow_cpu_only

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_characters():
    """The 256 printable stand-ins of byte-level tokenizers."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return [chr(c) for c in (*kept, *(256 + n for n in range(len(others))))]


def tokenizer(words=(), special=(), template=CHATML, **named):
    """Byte-level; ``words`` are single tokens beside the bytes, ``special`` further special tokens, ``named`` such that
    a processor asks for by name."""
    from transformers import Qwen2Tokenizer

    vocab = {c: i for i, c in enumerate(byte_characters())}
    merges = []
    for word in words:
        for i in range(1, len(word)):
            if word[: i + 1] not in vocab:
                vocab[word[: i + 1]] = len(vocab)
                merges.append((word[:i], word[i]))
    made = Qwen2Tokenizer(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=named
    )
    made.add_tokens([t for t in (*SPECIAL, *special) if t not in made.get_vocab()], special_tokens=True)
    made.chat_template = template
    return made


def language_model(folder: Path, kind: str = "qwen3", sharp: float = 0.3, seed: int = 0, words=(), **config) -> Path:
    """Save a model of ``kind`` with its tokenizer into ``folder``; ``sharp`` weights make its choices matter.

    ``words``: single tokens beside the bytes; ``config``: what differs in the model's configuration.
    """
    allow_cpu_only()  # before transformers imports torchvision
    import transformers as t

    made, model = {
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM),
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
    }[kind]
    tok = tokenizer(words)
    torch.manual_seed(seed)
    usual = {"head_dim": 8, "max_position_embeddings": 256, "initializer_range": sharp, "tie_word_embeddings": True}
    model(made(**_text(tok, **usual | config))).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


SEES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = SEES.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>").replace(
    "VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"
)
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SMOL = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]


def vision_model(folder: Path, kind: str, sharp: float = 0.2, seed: int = 0) -> Path:
    """Save a vision-language model of ``kind`` with its processor into ``folder``; needs torchvision."""
    torch.manual_seed(seed)
    processor, model = {"qwen2_5_vl": _qwen25, "qwen3_vl": _qwen3, "smolvlm": _smol}[kind]()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.normal_(0, sharp)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def clap(folder: Path) -> Path:
    """A CLAP model of 8 dimensions that hears 48 kHz for 10 s, with its processor."""
    allow_cpu_only()
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor

    words = tokenizer()
    words.model_max_length = 32
    audio = {
        "patch_embeds_hidden_size": 8,
        "hidden_size": 16,
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "spec_size": 128,
        "num_mel_bins": 16,
        "window_size": 4,
        "projection_dim": 8,
        "enable_patch_layer_norm": True,
        "hidden_act": "gelu",
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": words.pad_token_id + 40,
        "pad_token_id": words.pad_token_id,
        "projection_dim": 8,
    }
    torch.manual_seed(0)
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8))
    for parameter in model.parameters():  # so that sounds and texts matter
        parameter.data.normal_(std=0.3) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    ClapProcessor(ClapFeatureExtractor(feature_size=16, truncation="rand_trunc"), words).save_pretrained(folder)
    return folder


def clip(folder: Path, activation: str = "quick_gelu") -> Path:
    """A CLIP model of 32 x 32 pixels, 16 tokens and 8 dimensions, with its processor."""
    allow_cpu_only()
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = {c: i for i, c in enumerate([*letters, *(c + "</w>" for c in letters)])}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    words = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = len(vocabulary) - 1
    config = CLIPConfig(
        text_config={
            **small,
            "vocab_size": end + 1,
            "max_position_embeddings": 16,
            "eos_token_id": end,
            "hidden_act": activation,
        },
        vision_config={**small, "image_size": 32, "patch_size": 8, "hidden_act": activation},
        projection_dim=8,
    )
    size = {"shortest_edge": 32}, {"height": 32, "width": 32}
    processor = CLIPProcessor(CLIPImageProcessor(size=size[0], crop_size=size[1]), words)
    model = CLIPModel(config)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name != "logit_scale":
            parameter.data.normal_()  # wide enough for cosines of both signs
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text(tok, **more):
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tok),
        "max_position_embeddings": 1024,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "bos_token_id": None,
        **more,
    }


def _ids(tok):
    find = tok.convert_tokens_to_ids
    return {
        "image_token_id": find("<|image_pad|>"),
        "video_token_id": find("<|video_pad|>"),
        "vision_start_token_id": find("<|vision_start|>"),
        "vision_end_token_id": find("<|vision_end|>"),
    }


def _qwen_tokenizer():
    return tokenizer(
        special=VISION,
        template=None,  # the processor has one
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )


def _qwen25():
    import transformers as t

    tok = _qwen_tokenizer()
    images = t.Qwen2VLImageProcessor(
        min_pixels=28 * 28, max_pixels=84 * 84, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    clips = t.Qwen2VLVideoProcessor(
        min_pixels=28 * 28, max_pixels=56 * 56, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    processor = t.Qwen2_5_VLProcessor(image_processor=images, tokenizer=tok, video_processor=clips, chat_template=QWEN)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = t.Qwen2_5_VLConfig(
        text_config=_text(tok, rope_parameters=rope), vision_config=vision, tie_word_embeddings=True, **_ids(tok)
    )
    return processor, t.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3():
    import transformers as t

    tok = _qwen_tokenizer()
    images = t.Qwen2VLImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96},
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    clips = t.Qwen3VLVideoProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 4 * 64 * 64}, patch_size=16, merge_size=2, temporal_patch_size=2
    )
    processor = t.Qwen3VLProcessor(image_processor=images, tokenizer=tok, video_processor=clips, chat_template=QWEN)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = t.Qwen3VLConfig(
        text_config=_text(tok, head_dim=8, num_hidden_layers=3, rope_parameters=rope),
        vision_config=vision,
        tie_word_embeddings=True,
        **_ids(tok),
    )
    return processor, t.Qwen3VLForConditionalGeneration(config)


def _smol():
    import transformers as t

    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    rows = [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    tok = tokenizer(special=[*SMOL, *rows], template=None, **named)
    images = t.SmolVLMImageProcessor(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    clips = t.SmolVLMVideoProcessor(
        size={"longest_edge": 32},
        max_image_size={"longest_edge": 32},
        num_frames=4,
        fps=1,
        video_sampling={"max_frames": 4, "fps": 1, "video_size": {"longest_edge": 32}},
    )
    template = SEES.replace("IMAGE", "<image>").replace("VIDEO", "<video>")
    processor = t.SmolVLMProcessor(
        image_processor=images, tokenizer=tok, video_processor=clips, image_seq_len=4, chat_template=template
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = t.SmolVLMConfig(
        image_token_id=tok.convert_tokens_to_ids("<image>"),
        pad_token_id=tok.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=True,
        vision_config=vision,
        text_config=_text(tok, model_type="llama"),
    )
    return processor, t.SmolVLMForConditionalGeneration(config)


def encoder(folder: Path) -> Path:
    """Save a BERT of eleven words with its tokenizer into ``folder``."""
    allow_cpu_only()
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "sea", "warm", "blue", "."]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **small, initializer_range=1.0)).save_pretrained(folder)
    return folder


def eyes(folder: Path) -> Path:
    """Save a vision transformer of 32 x 32 pixels with its image processor into ``folder``."""
    allow_cpu_only()
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(**small, image_size=32, patch_size=8))
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def finder(folder: Path, labels=("cat", "dog")) -> Path:
    """Save a detector (YOLOS) of ``labels`` with its image processor into ``folder``."""
    allow_cpu_only()
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    torch.manual_seed(1)
    config = YolosConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[64, 64],
        num_detection_tokens=6,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
    )
    model = YolosForObjectDetection(config)
    for parameter in model.class_labels_classifier.parameters():
        parameter.data.normal_(std=2)
    model.save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    return folder


def rater(folder: Path) -> Path:
    """Save a Qwen3 with one score for a text, and its tokenizer, into ``folder``."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    words = language_model(folder / "words")
    AutoModelForSequenceClassification.from_pretrained(words, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(words).save_pretrained(folder)
    shutil.rmtree(words)
    return folder


def picture_writer(folder: Path, sharp: float = 0.15, seed: int = 0) -> Path:
    """Save an Emu3 with its processor into ``folder``: 32 codes of 4 x 4 pixels each."""
    allow_cpu_only()
    import transformers as t

    codes = [f"<|visual token {n:06d}|>" for n in range(32)]
    named = {
        "image_token": "<image>",
        "boi_token": "<|image start|>",
        "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
    }
    tok = tokenizer(special=["<|extra_200|>", *codes], template=None, **named)
    tok.add_special_tokens({"bos_token": "<|extra_203|>"})
    known = {name: tok.convert_tokens_to_ids(name) for name in ("<image>", "<|extra_200|>", *codes)}
    vq = {
        "codebook_size": len(codes),
        "embed_dim": 4,
        "temporal_downsample_factor": 1,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "hidden_size": 32,
    }
    usual = {"max_position_embeddings": 128, "attention_dropout": 0.0, "initializer_range": sharp}
    text = _text(tok, **usual, bos_token_id=tok.bos_token_id)
    config = t.Emu3Config(vq_config=vq, text_config=text, vocabulary_map=known)
    torch.manual_seed(seed)
    t.Emu3ForConditionalGeneration(config).save_pretrained(folder)
    pictures = t.Emu3ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3, spatial_factor=4)
    t.Emu3Processor(image_processor=pictures, tokenizer=tok).save_pretrained(folder)
    return folder
