"""Distil a generative judge to a reward that costs next to nothing (after ERNIE-Search, arXiv 2205.09153)."""
