"""Advantages, objectives and step kernels: pure functions on tensors, one small file each.

An objective module holds the class ``Objective``, built from its section of the recipe. The loop reads its ``kind`` and
``needs`` and never its name.
"""
