"""VQAScore, P("yes") to "does this figure show ...?" (arXiv 2404.01291), for ``mmrl serve``.

Not run here with its real model: see README.md.
"""

import tempfile
from pathlib import Path

import mmrl


@mmrl.reward(inputs=("image",))
class VQAScore:
    """``model``: a name of t2v_metrics, which also has the question that the model is asked."""

    def __init__(self, model: str = "clip-flant5-xxl", device: str = "cuda"):
        import t2v_metrics

        self.model = t2v_metrics.VQAScore(model=model, device=device)

    def score(self, samples, *, context):
        rows: dict[str, list[int]] = {}
        for i, sample in enumerate(samples):
            rows.setdefault(sample.prompt.text, []).append(i)
        scores = [float("nan")] * len(samples)
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder, f"{i}.png")) for i in range(len(samples))]
            for sample, path in zip(samples, paths, strict=True):
                sample.image.save(path)
            for text, index in rows.items():  # it scores each picture with each text: a call for each prompt
                found = self.model(images=[paths[i] for i in index], texts=[text])
                for i, row in zip(index, found.tolist(), strict=True):
                    scores[i] = row[0]
        return scores


score = VQAScore
