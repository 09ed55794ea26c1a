"""Spread few labels over many samples with a graph transformer (after UniMP, arXiv 2009.03509; docs/labels.md)."""
