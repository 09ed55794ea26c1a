"""VideoReward of VideoAlign: quality, motion and text alignment of clips (arXiv 2501.13918), for ``mmrl serve``.

Not run here with its real model: see README.md.
"""

import sys
import tempfile
from pathlib import Path

import mmrl
from mmrl.core.errors import UserError

PARTS = {"score": "Overall", "visual": "VQ", "motion": "MQ", "text": "TA"}


@mmrl.reward(inputs=("video",))
class VideoAlign:
    """``repo``: a clone of github.com/KwaiVGI/VideoAlign; ``checkpoints``: its weights (``repo``/checkpoints).

    ``fps``: frames a second of the clips as they are meant. ``num_frames``: how many the model sees; None is the
    authors' two a second, for which short clips have too few.
    """

    def __init__(self, repo: str, checkpoints: str = "", fps: int = 16, num_frames: int | None = None, device="cuda"):
        if not Path(repo, "inference.py").is_file():
            raise UserError(f"options.repo: {repo} has no inference.py; clone github.com/KwaiVGI/VideoAlign there")
        sys.path.insert(0, repo)
        from inference import VideoVLMRewardInference

        self.model = VideoVLMRewardInference(checkpoints or str(Path(repo, "checkpoints")), device=device)
        self.fps, self.num_frames = fps, num_frames

    def score(self, samples, *, context):
        import torch

        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            paths = [str(Path(folder, f"{i}.mp4")) for i in range(len(samples))]
            for sample, path in zip(samples, paths, strict=True):
                write(sample.video, path, self.fps)
            rewards = self.model.reward(paths, [s.prompt.text for s in samples], num_frames=self.num_frames)
        return {part: [float(reward[name]) for reward in rewards] for part, name in PARTS.items()}


def write(frames, path: str, fps: int) -> None:
    """H.264 without visible loss, colours at full resolution."""
    import av

    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=fps, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv444p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())


score = VideoAlign
