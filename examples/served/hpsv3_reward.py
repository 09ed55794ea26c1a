"""HPSv3, a learned human preference for pictures (arXiv 2508.03789), for ``mmrl serve``.

Not run here with its real model: see README.md.
"""

import tempfile
from pathlib import Path

import mmrl


@mmrl.reward(inputs=("image",))
class HPSv3:
    """``device``: where its 8 billion parameters go; ``config`` and ``checkpoint``: files in place of the authors'."""

    def __init__(self, device: str = "cuda", config: str | None = None, checkpoint: str | None = None):
        from hpsv3 import HPSv3RewardInferencer

        self.model = HPSv3RewardInferencer(config_path=config, checkpoint_path=checkpoint, device=device)

    def score(self, samples, *, context):
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, f"{i}.png")) for i in range(len(samples))]
            for sample, path in zip(samples, paths, strict=True):
                sample.image.save(path)
            rewards = self.model.reward(prompts=[s.prompt.text for s in samples], image_paths=paths)
        found = [[float(number) for number in row] for row in rewards]  # mean and uncertainty, [B, 2]
        return {"score": [row[0] for row in found], "uncertainty": [row[1] for row in found]}


score = HPSv3
