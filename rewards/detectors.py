"""Detect objects in pictures with transformers: segmentation (Mask2Former), or boxes (DETR).

Class names are COCO's as GenEval writes them, however the checkpoint calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.core.grouping import grouped
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import frozen, refused, try_processor

if TYPE_CHECKING:
    from PIL.Image import Image

_OTHERWISE = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}
"""What checkpoints call classes that GenEval has another name for."""
_MOST = 100
"""Pairs of an outline and a class that are looked at, the likeliest first (COCO's usual number)."""


@dataclass(frozen=True)
class Found:
    """An object: its box (left, top, right, bottom; in pixels, right and bottom excluded) and how sure of it.

    ``mask`` ``[H, W]`` says which pixels are its own; None of a detector of boxes.
    """

    box: tuple[float, float, float, float]
    score: float
    mask: np.ndarray | None = None


class Detector:
    """Finds the objects that are likelier than ``threshold``. Raises ``UserError`` where ``path`` holds no detector.

    It is asked where ``model`` is.
    """

    def __init__(self, path: str, threshold: float) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection
        from transformers import AutoModelForUniversalSegmentation as Outlining
        from transformers.models.auto.modeling_auto import MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING as OUTLINING

        check_files(path)
        with refused(
            lambda reason: (
                f"cannot load a detector from {path}: {reason}; set the reward's options.path to "
                "a directory that save_pretrained wrote (Mask2Former or DETR), or to a hub name while online"
            )
        ):
            config = AutoConfig.from_pretrained(path)
            self._outlines = type(config) in OUTLINING
            kind = Outlining if self._outlines else AutoModelForObjectDetection
            self.model = frozen(kind, path)
            self._processor = AutoImageProcessor.from_pretrained(path)
            try_processor(self._processor)
            named = self.model.config.id2label.items()
            self.names = {int(i): _OTHERWISE.get(str(name), str(name)) for i, name in named}
        self._threshold = threshold

    def find(self, images: Sequence[Image], device: Any) -> list[dict[str, list[Found]]]:
        """The objects in each picture by class, surest first. Pictures of one size share a forward."""
        found: list[dict[str, list[Found]]] = [{} for _ in images]
        for group in grouped((image.size, i) for i, image in enumerate(images)).values():
            for i, objects in zip(group, self._of_one_size([images[i] for i in group], device), strict=True):
                surest = sorted(objects, key=lambda item: -item[1].score)
                found[i] = grouped((self.names[label], one) for label, one in surest)
        return found

    def _of_one_size(self, images: list[Image], device: Any) -> Iterator[Iterator[tuple[int, Found]]]:
        inputs = self._processor(images=images, return_tensors="pt").to(device)
        outputs = self.model(**inputs)
        size = images[0].height, images[0].width
        if self._outlines:
            for classes, masks in zip(outputs.class_queries_logits, outputs.masks_queries_logits, strict=True):
                yield self._outlined(classes, masks, size)
            return
        sizes = [size] * len(images)
        for one in self._processor.post_process_object_detection(outputs, self._threshold, sizes):
            yield _boxed(one, size)

    def _outlined(
        self, classes: torch.Tensor, masks: torch.Tensor, size: tuple[int, int]
    ) -> Iterator[tuple[int, Found]]:
        """Pairs of an outline and a class, of ``classes`` ``[Q, C + 1]`` and ``masks`` ``[Q, h, w]``, both logits.

        As Mask2Former is evaluated on COCO: sure is how likely the class is (the last is none), times the mean of the
        mask inside itself. transformers' own post-processing rounds masks to 384 x 384 and gives no boxes.
        """
        likely = classes.softmax(-1)[:, :-1]
        best = likely.flatten().topk(min(_MOST, likely.numel()))
        for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if probability <= self._threshold:
                return
            query, label = divmod(index, likely.shape[1])
            logits = torch.nn.functional.interpolate(masks[query][None, None], size, mode="bilinear")[0, 0]
            mask = logits > 0
            if not mask.any():
                continue
            score = probability * float(logits[mask].sigmoid().mean())
            rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
            box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
            if score > self._threshold:
                yield label, Found(box, score, mask.cpu().numpy())


def _boxed(found: dict[str, torch.Tensor], size: tuple[int, int]) -> Iterator[tuple[int, Found]]:
    height, width = size
    for score, label, box in zip(*(found[key].tolist() for key in ("scores", "labels", "boxes")), strict=True):
        left, top, right, bottom = box
        yield label, Found((max(left, 0.0), max(top, 0.0), min(right, width), min(bottom, height)), score)
