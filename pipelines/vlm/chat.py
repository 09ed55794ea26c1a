"""Vision-language models with a chat template (``AutoModelForImageTextToText``): pictures and clips in the prompt.

The placeholders ``<image>`` and ``<video>`` in a prompt are the places of its media; without placeholders the media
come first. The processor encodes each prompt once, for all its samples, in sampling and in training.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import Image
from torch import Tensor

from mmrl.config.schema import Model, Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.installing import install
from mmrl.core.library_loading import check_tokens, refused, try_processor
from mmrl.core.media import BadMediaError, Clip, Media, open_clip, open_image, probe_clip
from mmrl.core.media import describe as describe_media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.episodes.showing import tools_shown
from mmrl.families.text.assembly import Load, build_writer, describe_writer
from mmrl.models.text import chat
from mmrl.models.text.clip_frames import limit_frames, shown_frames
from mmrl.models.text.conditioner import Given, Processor
from mmrl.models.text.features import PER_TOKEN
from mmrl.models.text.loading import stop_tokens
from mmrl.models.text.own_pixels import PixelProcessor, own_pixels, resized
from mmrl.models.text.template_probe import TemplateFaultError
from mmrl.models.text.told import Contents, Role, Told, pictures_of

if TYPE_CHECKING:  # slow to import
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.video_utils import VideoMetadata

OTHERWISE = "Set pipeline: llm/chat for a model of text alone."
TESTED = ("qwen2_5_vl", "qwen3_vl", "smolvlm")


class Chat(chat.Chat[Processor]):
    """Final class; see ``mmrl.models.text.chat.Chat``. A conversation with pictures and clips."""

    own_positions = True
    no_pictures = ""

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        (text, reader), (images, clips) = self.texts.read(prompt), self.media(prompt)
        given = self._special(text)
        if clips:
            given["videos"] = [[np.stack([np.asarray(frame) for frame in clip.frames]) for clip in clips]]  # per text
            given["video_metadata"] = [_metadata(clip) for clip in clips]
            given["do_sample_frames"] = False
        for kind in ("image", "video"):
            if own_pixels(prompt.media, kind, getattr(self.saved, f"{kind}_processor", None)):
                given["images_kwargs" if kind == "image" else "videos_kwargs"] = {"do_resize": False}
        try:
            made = reader(text=[text], images=[images] if images else None, return_tensors="pt", **given)
        except Exception as error:  # processors raise anything
            raise BadPromptError(
                prompt.id, f"the processor cannot read it, with {len(images)} pictures and {len(clips)} clips: {error}"
            ) from error
        out = {name: value[0] if name in PER_TOKEN else value for name, value in made.items()}
        del out["attention_mask"]  # one prompt has no padding
        return self.texts.joined(out)

    def told(self, role: Role, contents: Contents) -> Told:
        if self.no_pictures or not (pictures := pictures_of(contents)):
            return super().told(role, contents)
        text = self.behind(role, contents)
        ids = self.texts.ids(text)
        if (shown := sum(token in self.forbidden for token in ids)) != len(pictures):
            raise TemplateFaultError(f"the chat template shows {shown} of {len(pictures)} pictures as {role}", text)
        images = [open_image(medium) for medium in pictures]
        try:
            reader = self.texts.reader(text)
            made = reader(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # processors raise anything
            raise BadMediaError(f"the processor cannot read {len(images)} pictures: {error}") from error
        out = {name: value[0] if name in PER_TOKEN else value for name, value in made.items()}
        del out["attention_mask"]
        features = self.texts.joined(out)
        tokens = features.pop("input_ids").tolist()
        return Told(tokens, ids, images, features)

    def unexpanded(self, prompt: Prompt) -> list[int]:
        text, _ = self.texts.read(prompt)
        return self._tokens(prompt, adds=not self._special(text))["input_ids"].tolist()

    def _special(self, text: str) -> Given:
        """What transformers' ``apply_chat_template(tokenize=True)`` does: a template that writes the first token itself
        needs none from the tokenizer."""
        first = self.tokenizer.bos_token
        return {"add_special_tokens": False} if first is not None and text.startswith(first) else {}

    def media(self, prompt: Prompt) -> tuple[list[Image], list[Clip]]:
        """The prompt's decoded pictures and clips. Raises ``BadPromptError``, which names the broken file."""
        try:
            shown = [m for m in prompt.media if m.kind == "image"], [m for m in prompt.media if m.kind == "video"]
            images, clips = [open_image(m) for m in shown[0]], [self._clip(m) for m in shown[1]]
        except BadMediaError as error:
            raise BadPromptError(prompt.id, f"{error}; mend the file or take the prompt out of the data") from error
        try:
            if own_pixels(prompt.media, "image", pictures := getattr(self.saved, "image_processor", None)):
                images = [resized([i], pictures, m.show)[0] for i, m in zip(images, shown[0], strict=True)]
            if own_pixels(prompt.media, "video", videos := getattr(self.saved, "video_processor", None)):
                made = [resized(clip.frames, videos, m.show) for clip, m in zip(clips, shown[1], strict=True)]
                clips = [replace(clip, frames=frames) for clip, frames in zip(clips, made, strict=True)]
        except ValueError as error:
            raise BadPromptError(prompt.id, f"min_pixels, max_pixels of a part: {error}") from error
        return images, clips

    def _clip(self, media: Media) -> Clip:
        """Raises ``BadMediaError``."""
        if media.frames is not None:
            return open_clip(media)
        try:
            frames = shown_frames(
                getattr(self.saved, "video_processor", None), probe_clip(media, decode=False), media.show
            )
        except BadMediaError:
            raise
        except ValueError as error:
            raise BadMediaError(f"{describe_media(media)} {error}") from None
        return open_clip(media, frames=frames)


def _parts(recipe: Recipe, path: str, load: Load) -> tuple[Chat, PreTrainedModel]:
    """The conditioner, and the model as ``load`` makes it."""
    processor = load_processor(path, recipe)
    from transformers import AutoModelForImageTextToText

    model = load(AutoModelForImageTextToText, recipe, path, TESTED, OTHERWISE)
    stop = stop_tokens(model, processor.tokenizer)
    by_engine, forbidden = recipe.rollout.engine == "sglang", placeholders(model.config)
    made = Chat(processor, stop, *tools_shown(processor, recipe), forbidden=forbidden, shown=by_engine)
    if model.config.model_type not in TESTED:
        made.no_pictures = untested(model.config.model_type)
    return made, model


build = partial(build_writer, _parts, sees=True)
describe = partial(describe_writer, _parts)


def untested(kind: str) -> str:
    """``Chat.no_pictures`` of models of another type than ``TESTED``."""
    return (
        f"the tokens of pictures behind an answer are not known for models of type {kind}; take one of "
        f"{', '.join(TESTED)}"
    )


def placeholders(config: PretrainedConfig) -> list[int]:
    """The tokens that stand for pictures and clips in the model's input."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return sorted({token for name in names if (token := getattr(config, name, None)) is not None})


def load_processor(path: str, recipe: Recipe | None = None) -> Processor:
    """The processor at ``path``, with the chat template, the limits of pixels and the frames of clips of ``recipe``.
    Raises ``UserError`` if it cannot see or chat, or if torchvision is missing."""
    allow_cpu_only()
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401  transformers reports its absence much later, in other words
    except ImportError as error:
        raise UserError(f"vision-language models need torchvision for their processors: {install('vlm')}") from error
    from transformers import AutoConfig, AutoProcessor

    with refused(lambda reason: f"model.path: {path} has no processor that can be used: {reason}"):
        processor = AutoProcessor.from_pretrained(path)
        if not hasattr(processor, "image_processor"):
            raise UserError(f"model.path: {path} has a tokenizer but no image processor; use pipeline: llm/chat for it")
        try_processor(processor)
        with suppress(OSError):  # there is no config.json, which the model's own loading says
            config = AutoConfig.from_pretrained(path)
            check_tokens(processor.tokenizer, config)
            _check_patches(processor.image_processor, config)
    if recipe is not None:
        _limit_pixels(processor.image_processor, recipe.model)
        limit_frames(getattr(processor, "video_processor", None), recipe.data.fps, recipe.data.max_frames)
        if recipe.model.chat_template is not None:
            processor.chat_template = recipe.model.chat_template
    if not processor.chat_template:
        raise UserError(
            f"model.path: the processor of {path} has no chat template, so the format of its prompts is unknown. "
            "Take an instruct model, set model.chat_template, or add chat_template.jinja to the directory"
        )
    return processor


def _check_patches(images: object, config: PretrainedConfig) -> None:
    """Raises ``ValueError`` where the image processor cuts pictures into other patches than the model reads."""
    vision = getattr(config, "vision_config", None)
    for name, theirs in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        made, read = getattr(images, name, None), getattr(vision, theirs, None)
        if isinstance(made, int) and isinstance(read, int) and made != read:
            raise ValueError(
                f"its image processor has {name}: {made}, and vision_config of config.json {theirs}: {read}; download "
                "both again, together"
            )


def _limit_pixels(images: PixelProcessor, settings: Model) -> None:
    """Give the image processor the limits of ``settings``. Raises ``UserError`` if it has none."""
    if settings.min_pixels is None and settings.max_pixels is None:
        return
    name, size = type(images).__name__, images.size
    known = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {})
    if not {"min_pixels", "max_pixels"} <= known.keys():
        raise UserError(
            f"model.{'min' if settings.min_pixels else 'max'}_pixels: {name} limits no number of pixels; remove it, or "
            "set the sizes in preprocessor_config.json of the checkpoint"
        )
    least, most = settings.min_pixels or int(size.shortest_edge), settings.max_pixels or int(size.longest_edge)
    if least > most:  # one of them is the checkpoint's
        said = f"pictures would have at least {least} pixels and at most {most}"
        if settings.min_pixels:
            raise UserError(f"model.min_pixels: {said}; set model.max_pixels to {least} or more")
        raise UserError(f"model.max_pixels: {said}; set model.min_pixels to {most} or less")
    images.size = type(images.size)(shortest_edge=least, longest_edge=most)


def _metadata(clip: Clip) -> VideoMetadata:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=clip.total,
        fps=clip.fps,
        duration=clip.total / clip.fps if clip.fps else None,
        frames_indices=list(clip.indices),  # type: ignore[arg-type]
    )
