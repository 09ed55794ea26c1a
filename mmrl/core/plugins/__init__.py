"""Code of the user's that a recipe names: finding it, loading it, and what its errors say."""
