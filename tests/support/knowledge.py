"""Shared by the tests of knowledge and others."""
