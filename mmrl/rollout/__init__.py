"""Sampling: collect groups of responses or pictures, with partial, asynchronous and dynamic sampling."""
