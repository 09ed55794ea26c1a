"""Names of algorithms that are settings of others, and settings that one kind of algorithm does not have."""

from __future__ import annotations

import re

from mmrl.config.algorithm_settings import TURN_KEYS, AlgorithmSettings

SETTINGS: dict[str, list[str]] = {
    "DDPO (arXiv 2305.13301), on UNets": [
        "type: flow_grpo",
        "sampling.sde: {kind: ddim, noise_level: 1.0}",
        "algorithm: {kl_coef: 0, advantage_std: group}",
    ],
    "DanceGRPO (arXiv 2505.07818)": [
        "type: flow_grpo",
        "sampling: {steps: 16, shift: 3, same_initial_noise: true}",
        "sampling.sde: {kind: dance, noise_level: 0.3}",
        "algorithm: {trained_steps: 9, kl_coef: 0, advantage_std: group}",
    ],
    "MixGRPO (arXiv 2507.21802)": [
        "type: flow_grpo",
        "sampling: {steps: 25, shift: 3, same_initial_noise: true}",
        "sampling.window: {size: 4, strategy: progressive, every: 25}",
        "algorithm: {advantage_aggregation: each, kl_coef: 0, advantage_std: group}",
    ],
    "MixGRPO, windows that move faster the later they are": [
        "sampling.window: {size: 4, strategy: exp_decay, every: 25, decay_from: 13, decay_rate: 0.1}",
    ],
    "Flow-GRPO-Fast": [
        "type: flow_grpo",
        "sampling.window: {size: 3, first: 0, last: 5}",
        "sampling.sde: {kind: cps, noise_level: 0.8}",
        "algorithm: {clip_range: 1e-5, kl_coef: 0}",
    ],
    "Flow-CPS (arXiv 2509.05952)": ["sampling.sde: {kind: cps, noise_level: 0.8}"],
    "TempFlow-GRPO (arXiv 2508.04324)": ["algorithm.step_weight: tempflow", "sampling.window: {size: 1}"],
    "Flash-GRPO (arXiv 2605.15980)": [
        "type: flow_grpo",
        "sampling: {schedule: checkpoint, sde: {kind: linear, noise_level: 1.0}, window: {size: 1, last: 10}}",
        "algorithm: {step_weight: flash, clip_range: 1e-3, kl_coef: 0}",
    ],
    "GDPO (arXiv 2601.05242)": ["algorithm.advantage_aggregation: gdpo"],
    "GiGPO (arXiv 2505.10978)": ["type: grpo", "algorithm: {credit: turn}", "environment: {name: worlds.py:Mine}"],
    "DRaFT-LV": ["type: draft", "algorithm.renoise: 2"],
    "SFT on the best samples": ["type: rwr", "algorithm.weights: best"],
}
"""Settings by the name of the paper, as in the authors' scripts (docs/published.yaml). DanceGRPO trains 60 % of the
first 15 of 16 steps, Flash-GRPO one of the first 10 of 20."""


def alias_message(name: str) -> str:
    """``; DDPO is ...`` for one of these names in any spelling (``mix_grpo``, ``MixGRPO``), else an empty text."""
    for known, settings in SETTINGS.items():
        short = re.split(r"[ ,]", known)[0]
        if _plain(name) in (_plain(short), _plain(short).removesuffix("grpo")):
            return f"; {short} is {', '.join(settings)}"
    return ""


NO_GUIDANCE = {
    "policy_gradient": "{} replays the steps it sampled, and so with sampling.guidance_scale",
    "pathwise": "{} samples inside the update, and so with sampling.guidance_scale",
    "offline": "{} trains the prediction with the prompt alone",
}
"""Why a loss has no guidance setting, by the kind of algorithm."""


def why_missing(section: type[AlgorithmSettings], name: str, key: str) -> str:
    """Why the settings of ``name`` lack ``key``; empty if no reason is known."""
    if key in TURN_KEYS:
        return f"{name} has no group's advantage for each turn; grpo, dr_grpo, dapo, cispo, sapo and drpo have"
    if key != "guidance" or section.trains_on not in ("denoising", "picture_pairs", "given_pictures"):
        return ""
    return NO_GUIDANCE.get(section.kind, "").format(name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())
