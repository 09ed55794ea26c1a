"""Frozen generative models that read a sample together with its prompt: what rewards are made of them.

``pictures``: a diffusion model reads a picture. ``texts``: a language or vision-language model reads an answer.
"""
