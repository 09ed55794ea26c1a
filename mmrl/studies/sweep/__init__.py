"""A search over settings of a recipe by successive halving, on this machine."""
