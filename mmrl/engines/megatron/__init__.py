"""Megatron-Core as a training engine: weights in tensor-parallel shards under the names of Hugging Face."""
