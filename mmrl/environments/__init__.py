"""Environments: what a policy acts in over several turns (``mmrl.core.episode``).

``mmrl.load("environments", "guess")`` finds ``environments/guess.py`` of this project; ``path/to/mine.py:World`` finds
a class, or a function that the model can call, of a user's own.
"""

from mmrl.core.checkout import drop_ins

__path__ += drop_ins("environments")
