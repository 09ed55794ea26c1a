"""The planner: the memory and work of a recipe, computed before any weight is loaded (``mmrl plan``)."""
