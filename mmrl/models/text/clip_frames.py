"""Which frames of a clip a model is shown: those that the checkpoint's own processor takes.

The values of a record's part come first (``mmrl.core.media.Show``), then the recipe's ``data.fps`` and
``data.max_frames``, then the checkpoint's. A checkpoint that says nothing gets two frames a second, as the authors of
Qwen2-VL and Qwen2.5-VL show them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mmrl.core.errors import UserError
from mmrl.core.media import LIMITS, ClipInfo, Show, evenly

if TYPE_CHECKING:  # slow to import
    from transformers.video_utils import VideoMetadata

FPS = 2.0
_USUAL_FPS = 24.0
"""Frames per second of a file that does not say them; transformers takes this too."""


class VideoProcessor(Protocol):
    """The part of transformers' ``BaseVideoProcessor`` that is used here. Some have no limits."""

    fps: float | None
    num_frames: int | None
    """What is shown of each clip, or the most that is shown where there is a rate too."""
    max_frames: int
    min_frames: int

    def sample_frames(self, *, metadata: VideoMetadata, **values: float | None) -> Sequence[int]: ...


def limit_frames(videos: VideoProcessor | None, fps: float | None, max_frames: int | None) -> None:
    """Give the processor of clips the recipe's frame rate and limit. Raises ``UserError`` where there is none."""
    key = "data.fps" if fps is not None else "data.max_frames"
    if fps is None and max_frames is None:
        return
    if videos is None:
        raise UserError(f"{key}: the model's processor reads no clips; remove it")
    _set(videos, Show(fps=fps, max_frames=max_frames))


def shown_frames(videos: VideoProcessor | None, clip: ClipInfo, show: Show | None) -> list[int]:
    """The numbers of the frames to show of ``clip``, ascending. Raises ``ValueError`` where ``show`` leaves none."""
    show = show or Show()
    rate = clip.fps or _USUAL_FPS
    begin = 0 if show.start is None else math.ceil(show.start * rate - 1e-6)
    end = clip.frames if show.end is None else min(clip.frames, math.floor(show.end * rate + 1e-6) + 1)
    if not 0 <= begin < end:
        raise ValueError(
            f"lasts {clip.frames / rate:.1f} seconds, and its part shows {show.start or 0:g} to "
            f"{show.end if show.end is not None else clip.frames / rate:g}; correct video_start and video_end"
        )
    found = [begin + i for i in _sampled(videos, end - begin, rate, show)]
    most = min(show.max_frames or LIMITS.frames, LIMITS.frames)
    if show.max_frames is None and show.count is None and videos is not None:
        most = min(most, getattr(videos, "max_frames", None) or most)
    found = evenly(found, most)
    least = getattr(videos, "temporal_patch_size", None) or 1
    return [*found, *[found[-1]] * (least - len(found))]  # a processor may refuse a clip of one frame


def _sampled(videos: VideoProcessor | None, total: int, rate: float, show: Show) -> list[int]:
    """Frames of ``total`` as the processor samples them; evenly where it cannot."""
    if show.count is not None and show.count >= total:
        return list(range(total))
    fps = show.fps if show.fps is not None else getattr(videos, "fps", None) or FPS
    count = show.count or max(1, min(total, round(total / rate * fps)))
    if videos is not None:
        from transformers.video_utils import VideoMetadata

        own = copy.copy(videos)
        _set(own, show)
        if own.fps is None and (own.num_frames is None or show.fps is not None):
            own.fps = FPS
        for values in _values(own, show):
            metadata = VideoMetadata(total_num_frames=total, fps=rate, duration=total / rate)
            try:
                made = [int(i) for i in own.sample_frames(metadata=metadata, **values)]
            except Exception:  # processors raise anything for clips that are too short
                continue
            if made and all(0 <= i < total for i in made) and (show.count is None or len(made) == show.count):
                return made
    return evenly(range(total), count)


def _values(videos: VideoProcessor, show: Show) -> list[dict[str, float | None]]:
    """Arguments of ``sample_frames`` to try: transformers gives it those that the processor has by name."""
    known: Mapping[str, object] = getattr(getattr(videos, "valid_kwargs", None), "__annotations__", {})
    usual: dict[str, float | None] = {
        name: value for name in known if isinstance(value := getattr(videos, name, None), int | float)
    }
    usual |= {"fps": videos.fps, "num_frames": videos.num_frames}
    if show.count is not None:
        return [usual | {"fps": None, "num_frames": show.count}]
    if videos.num_frames is not None and show.fps is not None:  # the number is a limit, or stands against the rate
        return [usual | {"num_frames": None}, usual]
    return [usual, usual | {"num_frames": None}]


def _set(videos: VideoProcessor, show: Show) -> None:
    """Give ``videos`` what ``show`` says. What limits its frames has the name ``max_frames`` or ``num_frames``."""
    given: Mapping[str, float] = getattr(videos, "video_sampling", None) or {}  # of older SmolVLM
    if videos.fps is None and given:
        videos.fps = given.get("fps")
    if videos.num_frames is None and (most := given.get("max_frames")):
        videos.num_frames = int(most)
    if show.fps is not None:
        videos.fps = show.fps
    if show.max_frames is not None:
        videos.max_frames = show.max_frames
        if videos.num_frames is not None:
            videos.num_frames = min(videos.num_frames, show.max_frames)
    least = show.min_frames
    if hasattr(videos, "min_frames") and (least is not None or show.max_frames is not None):
        least = videos.min_frames if least is None else least
        videos.min_frames = min(least, show.max_frames or least)
