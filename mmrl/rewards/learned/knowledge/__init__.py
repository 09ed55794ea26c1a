"""Embeddings of a graph of facts."""
