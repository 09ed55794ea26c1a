"""Where a recipe's roles live, what they take, and whether that fits: ``mmrl plan``."""
