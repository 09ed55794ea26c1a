"""Rewards as TRL and verl call them; the recipes beside this file name them as they are."""


def right(completions, solution, **kwargs):
    return [float(truth in text) for text, truth in zip(completions, solution, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
