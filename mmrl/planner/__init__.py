"""The planner: what a recipe needs of its devices, computed before any weight is loaded (``mmrl plan``)."""
