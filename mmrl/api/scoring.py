"""``mmrl.score``: ask a reward about pictures, clips or texts, from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from PIL.Image import Image

from mmrl.api.entry import entry_point
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.media.images import to_tensor
from mmrl.core.plugins.python_objects import name_of
from mmrl.core.reward_contract import Context, Input
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find

AnySample: TypeAlias = "str | Image | Sequence[Image] | Sample"

TIMEOUT_S = 600.0


@entry_point
def score(
    reward: object,
    samples: Sequence[AnySample],
    prompts: Sequence[str | Prompt] | str | Prompt = "",
    *,
    device: str = "cpu",
    options: Mapping[str, Json] | None = None,
) -> list[float]:
    """The scores of ``samples`` by one reward: a name, a function, a class or an object with a method ``score``.

    ``samples``: PIL pictures, clips (sequences of frames), texts, or ``mmrl.Sample``. ``prompts``: one for each, or one
    for all. All samples of one call are one group. Raises ``mmrl.UserError`` where the reward cannot be called, and
    where it cannot score a sample.
    """
    if isinstance(samples, str):
        raise UserError("samples: a text is no list; write [text]")
    told = [prompts] * len(samples) if isinstance(prompts, str | Prompt) else list(prompts)
    if len(told) != len(samples):
        raise UserError(f"prompts: there are {len(told)} for {len(samples)} samples; give one for each, or one for all")
    if not samples:
        return []
    name = reward if isinstance(reward, str) else name_of("rewards", reward)
    loaded = build(find(name), dict(options or {})).awake(device)
    caller = Caller(loaded, TIMEOUT_S)
    try:
        made = [_sample(s, p, i, loaded.declaration.inputs) for i, (s, p) in enumerate(zip(samples, told, strict=True))]
        answer = caller.one(made, Context(-1, device))
    finally:
        caller.close()
    failed = [f"sample {i}: {reason}" for i, reason in enumerate(answer.reasons) if reason is not None]
    if failed:
        raise UserError(f"the reward {name} has no score for {'; '.join(failed[:5])}")
    return answer.total


def _sample(value: object, prompt: str | Prompt, i: int, inputs: Sequence[Input]) -> Sample:
    if isinstance(value, Sample):
        return value
    asked = prompt if isinstance(prompt, Prompt) else Prompt(str(i), prompt)
    name = SampleId(-1, i, 0, 0)
    if isinstance(value, str):
        return Sample(asked, name, text=value)
    if isinstance(value, Image):
        picture = value.convert("RGB")
        return Sample(asked, name, image=picture, tensor=to_tensor(picture) if "tensor" in inputs else None)
    frames = list(value) if isinstance(value, Iterable) else []
    clip = tuple(frame.convert("RGB") for frame in frames if isinstance(frame, Image))
    if not clip or len(clip) < len(frames):
        raise UserError(f"samples[{i}]: a {type(value).__name__} is neither a PIL picture, a clip of them nor a text")
    return Sample(asked, name, video=clip)
