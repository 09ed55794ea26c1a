"""Typed recipes. Importing it imports no torch; reading a recipe does, with the algorithm that it names."""
