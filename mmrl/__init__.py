"""mmrl: reinforcement learning from feedback on text, vision-language and diffusion models."""

from mmrl._load import load
from mmrl.rewards.contract import reward

__all__ = ["load", "reward"]
