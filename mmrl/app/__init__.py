"""Whole tasks on a run: build, train, resume, export, sample, verify, and checks of plug-ins."""
