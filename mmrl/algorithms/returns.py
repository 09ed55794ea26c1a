"""Token rewards and their sums: the KL divergence in the reward, reward-to-go, GAE and whitening.

All are ``[B, T]``, computed in float64. Positions outside the mask are skipped, wherever they are; results are 0 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.algorithms.advantages import AllSum, alone, batch_statistics
from mmrl.algorithms.objective import Scored


def token_rewards(scored: Scored, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """Each token's reward: its own, plus the response's at the last token, minus ``kl_coef log(policy / reference)``.

    The form of InstructGPT (arXiv 2203.02155) and of REINFORCE++ (arXiv 2501.03262, eq. 3), with Schulman's k1. Rows
    without a reward, and without a token, are 0. Returns ``[B, T]`` and the mean divergence per token for the log.
    """
    assert scored.mask is not None, "rewards of tokens need the mask of the response"
    inside = scored.mask > 0
    valid = torch.isfinite(scored.rewards)
    position = inside.cumsum(1)
    last = inside & (position == position[:, -1:])
    rewards = torch.where(last & valid.unsqueeze(1), scored.rewards.double().unsqueeze(1), 0.0)
    if scored.token_rewards is not None:
        rewards = rewards + torch.where(inside, scored.token_rewards.double(), 0.0)
    kl, metrics = divergence(scored, kl_coef)
    return torch.where(valid.unsqueeze(1), rewards - kl_coef * kl, 0.0), metrics


def penalised_rewards(scored: Scored, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """The response's reward ``[B]`` minus ``kl_coef`` times the sum of its tokens' divergence; NaN stays NaN."""
    kl, metrics = divergence(scored, kl_coef)
    return scored.rewards.double() - (kl_coef * kl.sum(1) if kl_coef else 0.0), metrics


def divergence(scored: Scored, kl_coef: float) -> tuple[Tensor, dict[str, float]]:
    """``log(policy / reference)`` ``[B, T]`` (k1), and its mean per token; 0 and nothing where ``kl_coef`` is 0."""
    if not kl_coef:
        return torch.zeros((), dtype=torch.double, device=scored.rewards.device), {}
    assert scored.mask is not None
    assert scored.log_probs is not None
    assert scored.reference_log_probs is not None, "a divergence in the reward needs the log-probs of the reference"
    kl = torch.where(scored.mask > 0, scored.log_probs.double() - scored.reference_log_probs.double(), 0.0)
    counted = scored.mask.double() * torch.isfinite(scored.rewards).unsqueeze(1)
    return kl, {"advantage/kl": ((kl * counted).sum() / counted.sum().clamp(min=1)).item()}


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_(t+1)`` over the tokens inside ``mask``."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16), the value after the last token being 0.

    ``A_t = r_t + gamma V_(t+1) - V_t + gamma lam A_(t+1)``. The returns to fit a critic to are ``A + V``.
    """
    inside, r, v = mask > 0, rewards.double(), values.double()
    following = advantage = torch.zeros(len(r), dtype=torch.double, device=r.device)
    out = torch.zeros_like(r)
    for t in reversed(range(r.shape[1])):
        here = inside[:, t]
        estimate = r[:, t] + gamma * following - v[:, t] + gamma * lam * advantage
        out[:, t] = torch.where(here, estimate, 0.0)
        advantage = torch.where(here, estimate, advantage)
        following = torch.where(here, v[:, t], following)
    return out


def whiten(values: Tensor, mask: Tensor, all_sum: AllSum = alone) -> Tensor:
    """``(x - mean) / std`` over the tokens inside ``mask``; population standard deviation, 1e-8 under its root.

    Values that are all equal are not divided. ``all_sum`` makes the statistics those of all controllers' tokens.
    float64, 0 outside ``mask``.
    """
    mean, variance = batch_statistics(values, mask, all_sum)
    return torch.where(mask > 0, (values.double() - mean) / (variance + 1e-8).sqrt(), 0.0)
