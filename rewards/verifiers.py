"""The rewards of verifiers' own tasks, for prompts of the data set ``verifiers`` (docs/worlds.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import describe
from mmrl.core.reward_contract import Context, Failed, Parts, Value
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",))
async def score(samples: Sequence[Sample], *, context: Context) -> Parts:
    """The weighted sum of its task's rewards for each response; each of them, and each metric, is a part of its name. A
    task whose scoring raises has failed for this sample."""
    of = mmrl.load("datasets", "verifiers").score
    tried = (of(sample.prompt, sample.text or "") for sample in samples)
    totals, parts = list[Value](), list[dict[str, float]]()
    for found in await asyncio.gather(*tried, return_exceptions=True):
        if isinstance(found, UserError) or not isinstance(found, tuple | Exception):
            raise found
        total, each = (Failed(describe(found)), {}) if isinstance(found, Exception) else found
        totals.append(total)
        parts.append(each)
    names = sorted({name for each in parts for name in each} - {"score"})
    return {"score": totals, **{name: [each.get(name) for each in parts] for name in names}}
