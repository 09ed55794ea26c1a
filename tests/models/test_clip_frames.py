"""Frames of clips in prompts: those that the checkpoint's own processor takes, and what a recipe or a record says."""

import io
import itertools
import json
import random
import re

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.cli import app
from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import ClipInfo, Media, Show
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.data.fields import read_fields
from mmrl.data.loading import load_prompts
from mmrl.data.record_media import media_from
from mmrl.models.text.clip_frames import limit_frames, shown_frames
from tests.support import processors, tiny

allow_cpu_only()
pytest.importorskip("torchvision")
pytest.importorskip("num2words")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "glm4v", "internvl", "llava_onevision")
CAPPED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "glm4v")
"""Whose own sampling has a rate and a limit, or can be given a rate."""


def encoded(frames, rate, size=(64, 48)):
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=rate, options={"preset": "ultrafast", "crf": "30"})
        stream.width, stream.height = size
        for i in range(frames):
            frame = Image.new("RGB", size, (i * 7 % 256, i * 3 % 256, 200))
            out.mux(stream.encode(av.VideoFrame.from_image(frame)))
        out.mux(stream.encode())
    return buffer.getvalue()


def chat_of(family, **show):
    made = processors.processor(family)
    limit_frames(made.video_processor, show.get("fps"), show.get("max_frames"))
    return mmrl.load("pipelines", "vlm/chat").Chat(made, [made.tokenizer.eos_token_id], {})


def by_transformers(family, data, tmp_path, **values):
    """What transformers' own loader, sampling and processor make of a clip in a file."""
    made = processors.processor(family)
    file = tmp_path / "clip.mp4"
    file.write_bytes(data)
    messages = [{"role": "user", "content": [{"type": "video", "path": str(file)}, {"type": "text", "text": "Why?"}]}]
    return made.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        processor_kwargs={"do_sample_frames": True, **values},
    )


@pytest.fixture
def by_pyav(monkeypatch):
    """transformers decodes with PyAV in place of torchcodec. Once decord is loaded, PyAV writes no VP9 there. Where a
    processor asks for a frame twice, torchcodec gives it twice, and PyAV once."""
    pytest.importorskip("av")
    from transformers import video_processing_utils as utils
    from transformers.video_utils import load_video

    def fetch(self, urls, sample_indices_fn=None):
        if isinstance(urls, list):
            return list(zip(*[fetch(self, url, sample_indices_fn) for url in urls], strict=True))
        video, metadata = load_video(urls, backend="pyav", sample_indices_fn=sample_indices_fn)
        asked = [int(i) for i in metadata.frames_indices]
        return video[[sorted({*asked}).index(i) for i in asked]], metadata

    monkeypatch.setattr(utils.BaseVideoProcessor, "fetch_videos", fetch)


def same(ours, own):
    for name, value in ours.items():
        other = own[name][0] if name in ("input_ids", "mm_token_type_ids") else own[name]
        if value.shape != other.shape or not torch.allclose(value.float(), other.float(), atol=0.1):
            return f"{name}: {tuple(value.shape)} and {tuple(other.shape)}"
    return ""


CLIPS = [(300, 30), (120, 24), (45, 15), (200, 50), (24, 8), (90, 30), (31, 10), (500, 25)]


@pytest.mark.sweep("clips as transformers' own loader and sampling show them")
def test_clips_are_shown_as_transformers_shows_them(sweep, by_pyav, tmp_path):
    cases = list(itertools.product(CAPPED, CLIPS, (None, 1.0, 4.0)))
    random.Random(1).shuffle(cases)
    for family, (frames, rate), fps in cases[: sweep.size(8, len(cases))]:
        data = encoded(frames, rate)
        own_default = family in ("qwen3_vl", "glm4v", "smolvlm")
        values = {"fps": fps} if fps else {} if own_default else {"fps": 2}
        own = by_transformers(family, data, tmp_path, **values)
        ours = chat_of(family, fps=fps).encode(Prompt("p", "Why?", media=(Media("video", data=data),)))
        sweep.check(not same(ours, own), (family, frames, rate, fps, same(ours, own)))
    sweep.done()


def test_ten_seconds_are_about_twenty_frames_and_their_times_are_right():
    data = encoded(300, 30)
    chat = chat_of("qwen2_5_vl")
    prompt = Prompt("p", "Why?", media=(Media("video", data=data),))
    (clip,) = chat.media(prompt)[1]
    assert len(clip.frames) == 20
    assert list(clip.indices) == list(range(0, 300, 15))
    assert chat.encode(prompt)["second_per_grid_ts"].tolist() == [1.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clip_of_a_minute_is_read(family):
    prompt = Prompt("p", "Why?", media=(Media("video", data=encoded(1800, 30)),))
    chat = chat_of(family)
    (clip,) = chat.media(prompt)[1]
    assert len(clip.frames) == {"smolvlm": 8}.get(family, 120)
    assert len(chat.encode(prompt)["input_ids"]) > len(clip.frames) // 2


@pytest.mark.sweep("frames that a recipe and a record ask for")
def test_any_clip_can_be_shown_in_any_number_of_frames(sweep):
    rng = random.Random(3)
    shared = {family: processors.processor(family) for family in FAMILIES}
    for _ in range(sweep.size(300, 20_000)):
        family = rng.choice(FAMILIES)
        videos = processors.copied(shared[family].video_processor)
        rate = rng.choice([1, 5, 10, 23.976, 24, 25, 29.97, 30, 50, 60, 0])
        clip = ClipInfo(64, 48, rng.choice([1, 2, 3, 5, rng.randrange(1, 200), rng.randrange(1, 20000)]), rate)
        recipe = {
            "fps": rng.choice([None, 0.1, 0.5, 1, 2, 3.3, 60]),
            "max_frames": rng.choice([None, 1, 2, 7, 64, 768]),
        }
        part = rng.choice(
            [{}, {"fps": 1.5}, {"count": rng.randrange(1, 900)}, {"max_frames": 5}, {"fps": 9, "max_frames": 3}]
        )
        limit_frames(videos, recipe["fps"], recipe["max_frames"])
        found = shown_frames(videos, clip, Show(**part) if part else None)
        most = part.get("max_frames") or (None if "count" in part else recipe["max_frames"]) or 768
        least = getattr(videos, "temporal_patch_size", None) or 1
        fps = part.get("fps") or recipe["fps"]
        right = found == sorted(found) and all(0 <= i < clip.frames for i in found)
        right = right and 1 <= len(found) <= max(most, least)
        if "count" in part:
            wanted = min(part["count"], clip.frames, most)
            right = right and abs(len(found) - max(wanted, min(least, len(found)))) <= 1
        elif fps and rate and family not in ("smolvlm", "glm4v"):  # whose own limits are others
            wanted = min(max(clip.frames / rate * fps, min(getattr(videos, "min_frames", 1), most)), most, clip.frames)
            right = right and abs(len(found) - wanted) <= 2
        sweep.check(right, (family, clip, recipe, part, len(found), found[:5]))
    sweep.done()


def test_a_part_shows_some_seconds_of_a_clip():
    clip = ClipInfo(64, 48, 300, 30)
    videos = processors.processor("qwen3_vl").video_processor
    found = shown_frames(videos, clip, Show(start=2.0, end=5.0))
    assert (found[0], found[-1], len(found)) == (60, 150, 6)
    with pytest.raises(ValueError, match=r"lasts 10.0 seconds, and its part shows 12 to 13; correct video_start"):
        shown_frames(videos, clip, Show(start=12, end=13))


def test_older_smolvlm_says_its_rate_in_another_place():
    videos = processors.processor("smolvlm").video_processor
    videos.fps = videos.num_frames = None
    videos.video_sampling = {"fps": 1, "max_frames": 6, "video_size": {"longest_edge": 32}}
    assert len(shown_frames(videos, ClipInfo(64, 48, 300, 30), None)) == 6
    assert len(shown_frames(videos, ClipInfo(64, 48, 90, 30), None)) == 3


@pytest.mark.parametrize(
    ("part", "show"),
    [
        ({"video": "a.mp4", "fps": 1, "max_frames": 16}, Show(fps=1.0, max_frames=16)),
        ({"video": "a.mp4", "nframes": 8}, Show(count=8)),
        ({"path": "a.mp4", "video_start": 0, "video_end": 2.5}, Show(start=0.0, end=2.5)),
        ({"video_url": {"url": "a.mp4"}, "type": "video_url", "fps": 1}, Show(fps=1.0)),
        ({"video": "a.mp4", "min_pixels": 784, "max_pixels": 7840}, Show(min_pixels=784, max_pixels=7840)),
        ({"video": "a.mp4", "fps": None}, None),
    ],
)
def test_a_part_of_a_message_says_how_it_is_shown(part, show, tmp_path):
    content = [{"type": "video", **part}, {"type": "text", "text": "Why?"}]
    fields = read_fields({"messages": [{"role": "user", "content": content}]})
    ((kind, source),) = fields.media
    assert media_from(kind, source, str(tmp_path)).show == show
    assert media_from("video", {"video": "a.mp4", "fps": 3}, str(tmp_path)).show == Show(fps=3.0)  # of a column


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"fps": "fast"}, "its fps is 'fast'"),
        ({"fps": 0}, "its fps is 0"),
        ({"nframes": 2.5}, "its nframes is 2.5; write a whole number"),
        ({"max_frames": -1}, "its max_frames is -1"),
        ({"fps": float("nan")}, "its fps is nan"),
        ({"fps": 2, "nframes": 4}, "has fps and nframes"),
        ({"min_pixels": 9, "max_pixels": 4}, "are above its max_pixels"),
        ({"min_frames": 9, "max_frames": 4}, "are above its max_frames"),
    ],
)
def test_what_a_part_cannot_say_is_named(part, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        media_from("video", {"video": "a.mp4", **part}, str(tmp_path))


def test_keys_of_a_part_that_nothing_reads_are_named():
    content = [{"type": "video", "video": "a.mp4", "fps": 2, "total_pixels": 9, "resized_width": None}]
    found = read_fields({"messages": [{"role": "user", "content": [*content, {"type": "text", "text": "Why?"}]}]})
    assert [key for key in found.keys if "video" in key] == ["messages: video: total_pixels"]
    column = {"prompt": "Why?", "videos": [{"video": "a.mp4", "fps": 2, "total_pixels": 9}], "image": {"bytes": b"a"}}
    assert [key for key in read_fields(column).keys if ":" in key] == ["messages: video: total_pixels"]


def test_a_part_without_a_source_says_nothing():
    content = [{"type": "video", "fps": 2}, {"type": "text", "text": "Why?"}]
    with pytest.raises(ValueError, match="has fps in a part without a source"):
        read_fields({"messages": [{"role": "user", "content": content}]})


# -- in a recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    tiny.vision_model(folder / "model", "qwen2_5_vl")
    (folder / "a.mp4").write_bytes(encoded(120, 30))
    part = {"type": "video", "video": "a.mp4"}
    own = [{}, {"fps": 1, "max_frames": 4}, {"nframes": 10}, {"video_start": 2, "video_end": 3}]
    rows = [
        {"messages": [{"role": "user", "content": [{**part, **shown}, {"type": "text", "text": f"Why {n}?"}]}]}
        for n, shown in enumerate(own)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({**row, "answer": "x"}) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: vlm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 0}, heldout: {path: data.jsonl, heldout: 0}}
sampling: {max_new_tokens: 4}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
"""
    )
    return folder


@pytest.mark.parametrize(
    ("edits", "frames"),
    [
        ((), [8, 4, 10, 4]),
        (("data.fps=4",), [16, 4, 10, 4]),
        (("data.fps=4", "data.max_frames=6"), [6, 4, 10, 4]),
        (("data.max_frames=2",), [2, 4, 10, 2]),
    ],
)
def test_data_check_says_how_many_frames_are_shown(folder, edits, frames, capsys):
    app(["data", "check", str(folder / "recipe.yaml"), *edits, "--json", "--show", "4"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert [record["frames"] for record in sorted(found["shown"], key=lambda r: r["text"])] == [[n] for n in frames]
    assert found["frames"] == {"fewest": min(frames), "mean": sum(frames) / 4, "most": max(frames)}


@pytest.mark.slow
def test_the_plan_says_it_and_training_sees_the_same_frames(folder, capsys):
    loaded = load_recipe([folder / "recipe.yaml"], ["data.fps=4"])
    made = mmrl.load("pipelines", "vlm/chat").build(loaded.recipe, str(folder / "model"), torch.device("cpu"))
    media = Media("video", path=str(folder / "a.mp4"))
    (clip,) = made.conditioner.media(Prompt("p", "Why?", media=(media,)))[1]
    assert len(clip.indices) == 16
    assert made.conditioner.saved.video_processor.fps == 4  # an export keeps it
    app(["plan", str(folder / "recipe.yaml"), "data.fps=4"], standalone_mode=False)
    said = capsys.readouterr()
    assert "4 to 16 frames are shown of a clip, of the 8 looked at (data.fps, data.max_frames)" in " ".join(
        (said.out + said.err).split()
    )


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        (["data.train.fps=2"], "set data.fps, which all prompts share, and remove it from data.train"),
        (["data.fps=2", "pipeline=llm/chat"], "data.fps: llm/chat reads no clips"),
        (["data.max_frames=1000"], "data.max_frames"),
        (["data.fps=0"], "data.fps"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_edit(folder, edits, why):
    def prompts():
        loaded = load_recipe([folder / "recipe.yaml"], edits)
        return load_prompts(loaded.recipe, "train")

    with pytest.raises(UserError, match=re.escape(why)):
        prompts()


def test_a_processor_without_clips_takes_no_frame_rate():
    with pytest.raises(UserError, match=r"data\.fps: the model's processor reads no clips"):
        limit_frames(None, 2, None)


# -- a record's own pixels --------------------------------------------------------------------------------------------


def noise(size):
    file = io.BytesIO()
    Image.frombytes("RGB", size, random.Random(1).randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_part_limits_its_own_pixels(family):
    chat = chat_of(family)
    factor = 32 if family == "qwen3_vl" else 28
    for low, high, size in [(None, 4 * factor**2, (300, 200)), (30 * factor**2, 40 * factor**2, (100, 100))]:
        show = Show(min_pixels=low, max_pixels=high)
        media = (Media("image", data=noise(size), show=show), Media("image", data=noise((50, 50))))
        made = chat.encode(Prompt("p", "Why?", media=media))
        (_, tall, wide), other = made["image_grid_thw"].tolist()
        pixels = tall * wide * (factor // 2) ** 2
        assert (low or 0) <= pixels <= high
        alone = chat.encode(Prompt("p", "Why?", media=media[1:]))["image_grid_thw"].tolist()
        assert alone == [other]
    clip = Media("video", data=encoded(40, 10, (320, 240)), show=Show(max_pixels=6 * factor**2, max_frames=4))
    grid = chat.encode(Prompt("p", "Why?", media=(clip,)))["video_grid_thw"][0].tolist()
    assert grid[0] == 2
    assert grid[1] * grid[2] * (factor // 2) ** 2 <= 6 * factor**2


def test_a_processor_without_limits_of_pixels_names_the_prompt():
    media = Media("image", data=noise((40, 40)), show=Show(max_pixels=1000))
    with pytest.raises(BadPromptError, match="limits no number of pixels; remove them"):
        chat_of("smolvlm").encode(Prompt("p", "Why?", media=(media,)))
