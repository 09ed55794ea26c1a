"""mmrl: reinforcement learning from feedback on text, vision-language and diffusion models.

``train``, ``start``, ``continue_run``, ``plan``, ``score``, ``compare``, ``search`` and ``load_run`` do from Python
what the commands do. They are imported when they are first used, so that ``import mmrl`` is fast. ``__init__.pyi`` has
their types.
"""

import importlib
import sys

from mmrl._moved import Moved
from mmrl.core.plugins.loading import load as load
from mmrl.core.reward_contract import before_loading as before_loading
from mmrl.core.reward_contract import reward as reward

sys.meta_path.append(Moved())

_LAZY = {
    "train": "mmrl.api.training",
    "start": "mmrl.api.training",
    "continue_run": "mmrl.api.training",
    "plan": "mmrl.api.training",
    "score": "mmrl.api.scoring",
    "compare": "mmrl.api.comparing",
    "search": "mmrl.api.searching",
    "load_run": "mmrl.api.run",
    "Run": "mmrl.api.run",
    "Callback": "mmrl.training.callbacks",
    "Recipe": "mmrl.config.schema",
    "Observation": "mmrl.core.episode",
    "Action": "mmrl.core.episode",
    "Episode": "mmrl.core.episode",
    "Prompt": "mmrl.core.trajectory",
    "Sample": "mmrl.core.trajectory",
    "UserError": "mmrl.core.errors",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'mmrl' has no attribute {name!r}")
    if not _LAZY[name].startswith("mmrl.api."):
        return getattr(importlib.import_module(_LAZY[name]), name)
    quiet = importlib.import_module("mmrl.core.quiet")
    with quiet.quietly():  # torch and the model libraries are imported here
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
