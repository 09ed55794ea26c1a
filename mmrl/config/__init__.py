"""Typed recipes. Importing this package does not import torch; reading a recipe does, for its algorithm."""
