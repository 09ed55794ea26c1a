"""Engines that sample text with weights of their own, and how weights reach them."""
