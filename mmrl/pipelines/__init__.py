"""Pipelines: what knows a model family. One adapter per family, found by the name in the recipe."""

from mmrl._checkout import drop_ins

__path__ += drop_ins("pipelines")
