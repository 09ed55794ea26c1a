"""Language and vision-language models as a pipeline."""
