"""Checkpoints: their format, how they are written, and how a run resumes from one."""
