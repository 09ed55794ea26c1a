"""Apply a picture reward to frames of a clip: the mean of its scores.

    rewards:
      - name: frames
        options: {name: pickscore, count: 4}

It does not measure motion: a clip without motion gets the same score as one with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import mmrl
from mmrl.core.errors import UserError, refuse
from mmrl.core.reward_contract import Context, Failed, Weights
from mmrl.core.trajectory import Sample
from mmrl.rewards import loading
from mmrl.rewards.returned import Answer, read_answer


def _models(options: Mapping[str, Any]) -> Sequence[Weights]:
    inner = loading.find(str(options["name"])).declaration.models
    return inner(options.get("options", {})) if inner else []


@mmrl.reward(inputs=("video",), device=True, paths=("options.path", "options.processor"), models=_models, checks=True)
class Frames:
    """The mean score of ``count`` frames at even distances, first and last among them.

    ``name`` and ``options``: a reward that reads ``image``, one sample at a time. A clip of which any frame fails
    fails. Raises ``UserError`` for a reward of another kind.
    """

    def __init__(self, name: str, count: int = 4, options: Mapping[str, Any] | None = None) -> None:
        found = loading.find(name)
        declared = found.declaration
        if declared.inputs != ("image",) or declared.per != "sample":
            raise UserError(f"options.name: frames asks a reward that reads pictures one by one, and {name} is another")
        if count < 1:
            raise UserError(f"options.count is {count}; set it to 1 or more")
        refuse(loading.problems(found, dict(options or {})) or loading.refused(found, dict(options or {})))
        mmrl.before_loading()
        self.count, self.inner = count, loading.build(found, options or {})
        if self.inner.is_async:
            self.score = self._score_awaited

    def score(self, samples: Sequence[Sample], *, context: Context) -> Any:
        """One number per clip."""
        return self._means(self.inner.call(self._pictures(samples), context=context), len(samples))

    async def _score_awaited(self, samples: Sequence[Sample], *, context: Context) -> list[float | Failed]:
        return self._means(await self.inner.call(self._pictures(samples), context=context), len(samples))

    def _pictures(self, samples: Sequence[Sample]) -> list[Sample]:
        return [dataclasses.replace(s, image=f, video=None) for s in samples for f in self._frames(s)]

    def _means(self, returned: object, clips: int) -> list[float | Failed]:
        answer = read_answer(returned, clips * self.count, self.inner.place)
        return [_mean(answer, slice(i * self.count, (i + 1) * self.count)) for i in range(clips)]

    def sleep(self, device: torch.device | str) -> None:
        """Have the reward that is asked free the memory of ``device``, where it can."""
        self.inner.sleep(device)

    def wake(self, device: torch.device | str) -> bool:
        """Make the reward ready. Returns whether later calls are faster."""
        return self.inner.wake(device)

    def _frames(self, sample: Sample) -> list[Any]:
        clip = sample.video or ()
        last = max(1, self.count - 1)
        return [clip[round(i * (len(clip) - 1) / last)] for i in range(self.count)]


def _mean(answer: Answer, frames: slice) -> float | Failed:
    values = answer.total[frames]
    why = next((reason for reason in answer.reasons[frames] if reason is not None), None)
    return sum(values) / len(values) if why is None else Failed(why)


score = Frames
