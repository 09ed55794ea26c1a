"""Shared by the tests of example recipes and others."""

from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
