"""Pipelines of text, which the drop-ins of ``pipelines/`` are built from."""
