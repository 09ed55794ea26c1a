"""Pipelines: one adapter per model family, found by the name in the recipe."""

from mmrl.core.checkout import drop_ins

__path__ += drop_ins("pipelines")
