"""Advantages, objectives and step kernels: pure functions on tensors, one small file each.

The file of an algorithm holds its settings (the section ``algorithm`` of a recipe) and the objective that is made of
them. ``mmrl/config/algorithms.py`` finds it by its name. The loop reads the objective's ``kind`` and ``needs``, never
its name.
"""
