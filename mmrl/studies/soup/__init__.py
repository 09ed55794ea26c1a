"""Bone Soup (arXiv 2502.10762): a model for any mix of rewards after training, merged from models of a few mixes."""
