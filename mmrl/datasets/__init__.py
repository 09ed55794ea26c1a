"""Data sets: a data set is a function that returns a sequence of prompts.

``mmrl.load("datasets", "shapes")`` finds ``datasets/shapes.py`` of this project; ``path/to/mine.py:prompts`` finds a
function of a user's own. The recipe's keys beside ``name`` are its keyword arguments.
"""

from mmrl.core.checkout import drop_ins

__path__ += drop_ins("datasets")
