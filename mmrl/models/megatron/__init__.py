"""Megatron-Core as a training engine: tensor-parallel shards of weights with Hugging Face's names."""

import warnings

# the library says so of each part of both that it replaces by its own or torch's
warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed|Apex is not installed", UserWarning)
