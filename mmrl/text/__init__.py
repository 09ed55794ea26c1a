"""What language and vision-language pipelines share: sampling tokens, their log-probs, transcripts, export."""
