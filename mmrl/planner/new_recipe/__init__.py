"""The first recipe for a user's data, model and reward (``mmrl init``)."""
