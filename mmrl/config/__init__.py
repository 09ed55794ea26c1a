"""Typed recipes. This package imports no torch, so that ``--help`` and ``plan`` answer at once."""

from mmrl.config.schema import Recipe

__all__ = ["Recipe"]
