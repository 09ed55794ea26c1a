"""Few labels spread over many samples: embeddings, a graph and its transformer."""
