"""Credit for turns: a turn is compared with the turns that were taken in the same state (GiGPO, arXiv 2505.10978).

    G_t = r_t + turn_discount G_(t+1)
    A_t = A + turn_weight (G_t - mean of its state) / (std + 1e-4)

``A`` is the episode's advantage, as without turns, and every token of turn ``t`` has the advantage ``A_t`` (eq. 5 to
8). ``r_t`` is what the environment gave after turn ``t``, by the weight of the reward ``environment``. What the other
rewards give arrives with the last turn, so that the ``r_t`` of an episode add up to its reward.

Turns of a group's episodes are in one state where the environment answered the same before them, or gave the same
``info["anchor"]``. The first turns of a group are in one state. A turn that is alone in its state has the episode's
advantage. The division is that of the algorithm, ``advantage_std``.

Departs: standard deviations are the population's, and the mean of a group is over episodes, as in the paper; in the
authors' code (verl-agent) an episode with more turns weighs more in it. There, the first turn shares its state with a
later one that is shown the same.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.config.algorithm_settings import TurnSettings
from mmrl.config.schema import Recipe
from mmrl.core.episode import REWARD, Episode, Observation
from mmrl.step.batch import Batch


def with_turns(recipe: Recipe, batch: Batch, scored: Scored, of: Advantages) -> Advantages:
    """``of`` with the credit of turns ``[B, T]``, where the recipe's algorithm has it. All controllers must call it
    equally often."""
    settings = recipe.algorithm
    if not isinstance(settings, TurnSettings) or settings.credit == "episode":
        return of
    assert scored.mask is not None
    values = (of.values if of.values.ndim == 2 else of.values.unsqueeze(1)) * scored.mask
    weight = sum(reward.weight for reward in recipe.rewards if reward.name == REWARD)
    rewards, groups, texts = scored.rewards.tolist(), scored.groups.tolist(), batch.texts
    tokens, returns, numbers, states = list[Tensor](), list[float](), list[int](), dict[Hashable, int]()
    for row, (m, i) in enumerate(batch.places):
        played = texts[m].episodes
        assert played is not None
        (prompt, *behind), turns = texts[m].segments[i], played[i].turns
        returns += discounted(turn_rewards(played[i], rewards[row], weight), settings.turn_discount)
        for segment in (s for s in behind if s.kind == "written"):
            before = state(turns[segment.turn - 1].told) if segment.turn else None
            tokens.append(values[row, segment.start - prompt.stop : segment.stop - prompt.stop])
            numbers.append(states.setdefault((groups[row], before), len(states)))
    state_of = torch.tensor(numbers, dtype=torch.long)
    found = group_advantages(torch.tensor(returns, dtype=torch.float64), state_of, settings.spread, scored.all_sum)
    for of_turn, value in zip(tokens, found.values, strict=True):
        of_turn += settings.turn_weight * value
    alike = state_of.bincount()[state_of] > 1
    shared, count = scored.all_sum(torch.tensor([alike.sum(), len(alike)], dtype=torch.float64)).tolist()
    return replace(of, values=values, metrics={**of.metrics, "advantage/shared_states": shared / max(1.0, count)})


def turn_rewards(episode: Episode, reward: float, weight: float) -> list[float]:
    """The reward of each turn; they add up to ``reward``, the episode's, in which the environment's own has ``weight``.
    NaN where the episode has none."""
    given = [weight * sum(observation.reward for observation in turn.told) for turn in episode.turns]
    return [*given[:-1], reward - sum(given[:-1])] if given else []


def discounted(rewards: Sequence[float], discount: float) -> list[float]:
    """The sum of the rewards from each turn on, each times ``discount`` for every turn before it."""
    sums = list(accumulate(reversed(rewards), lambda later, reward: reward + discount * later, initial=0.0))
    return sums[:0:-1]


def state(told: Sequence[Observation]) -> Hashable:
    """What names the state of a turn: the anchors of ``told``, what the policy was told just before, or their
    content."""
    if any("anchor" in observation.info for observation in told):
        return json.dumps([observation.info.get("anchor") for observation in told], sort_keys=True)
    return tuple(observation.parts for observation in told)
