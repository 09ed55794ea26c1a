"""Functions that the model can call, named in ``options.tools`` (``my_tools.py:search``)."""

from mmrl.episodes.tools import Toolbox as Environment

__all__ = ["Environment"]
