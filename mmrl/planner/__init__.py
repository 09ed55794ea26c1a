"""The planner: computes the memory and operations of a recipe before any weight is loaded (``mmrl plan``)."""
