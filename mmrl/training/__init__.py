"""Training: the data of a step, the loop, evaluation and the metrics of a step."""
