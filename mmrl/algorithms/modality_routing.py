"""Clips with sound: an advantage for each modality, of the rewards that train it (OmniNFT, Zhang et al. 2026, arXiv
2605.12480, modality-wise advantage routing).

    A_m = sum of weight A(r) over the rewards of the modality m and of both
    L   = (L_video(A_video) + L_audio(A_audio)) / 2

``A(r)`` is the objective's advantage of one reward, and ``L_m`` its loss over the numbers of the modality alone, as in
the authors' code, where both losses weigh 1.

Departs: no gradient is scaled down in the cross-attention of single layers, and no part of the picture weighs more
(the paper's gradient surgery and region-wise weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.multi_reward import aggregated
from mmrl.algorithms.objective import Loss, Objective, Scored
from mmrl.config.algorithm_settings import AdvantageAggregation
from mmrl.config.schema import Reward

Modality = Literal["video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
AUDIO_ADVANTAGES = "audio_advantages"
"""The column of a batch with the advantages of the sound, where it has its own; ``advantages`` are the picture's."""


def trained(rewards: Sequence[Reward]) -> list[Modality]:
    """The modalities that any of the ``rewards`` trains."""
    asked = {reward.modality for reward in rewards if reward.weight}
    return [name for name in MODALITIES if {name, "both"} & asked]


def routed(rewards: Sequence[Reward]) -> bool:
    """Whether picture and sound have an advantage each: both are trained, not all rewards train both."""
    return len(trained(rewards)) > 1 and any(reward.modality != "both" for reward in rewards if reward.weight)


def advantages_by_modality(
    of: Callable[[Scored], Advantages], scored: Scored, how: AdvantageAggregation, rewards: Sequence[Reward]
) -> Advantages:
    """The advantages ``[B, 2]`` of picture and sound by ``of``, an objective's function that returns ``[B]``.

    A group counts as flat if every reward is equal in it.
    """
    whole, counted = aggregated(of, scored, how), [reward for reward in rewards if reward.weight]
    columns = list[Tensor]()
    for name in MODALITIES:
        parts = [part for part, reward in zip(scored.parts, counted, strict=True) if reward.modality in (name, "both")]
        columns.append(aggregated(of, replace(scored, parts=parts), how).values)
    return replace(whole, values=torch.stack(columns, 1))


def loss_by_modality(
    objective: Objective,
    new: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    total: float,
    split: Callable[[Tensor], Mapping[str, Tensor]],
) -> Loss:
    """The mean of the ``objective``'s losses of picture and sound, each with its advantages.

    ``split`` divides states ``[B, ...]`` into those of each modality. Sums are means over both, and ``policy/loss`` is
    there of each, too.
    """
    parts = {name: split(value) for name, value in new.items() if value.ndim > 1}
    losses = dict[str, Loss]()
    for name in MODALITIES:
        own = {key: parts[key][name] if key in parts else value for key, value in new.items()}
        mine = old if name == "video" else {**old, "advantages": old[AUDIO_ADVANTAGES]}
        losses[name] = objective.loss(own, mine, total)
    video, audio = losses.values()
    sums = {key: (value + audio.sums[key]) / 2 for key, value in video.sums.items()}
    maxima = {key: torch.maximum(value, audio.maxima[key]) for key, value in video.maxima.items()}
    each = {f"policy/loss_{name}": loss.sums["policy/loss"] for name, loss in losses.items()}
    return Loss((video.value + audio.value) / 2, {**sums, **each}, maxima)
