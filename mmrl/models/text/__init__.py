"""Shared code of language and vision-language pipelines: sampling tokens, log-probs, transcripts, export."""
