"""Shared by the tests of verdict and others."""

from __future__ import annotations

import json

import numpy as np

from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir

RESOLVED = {
    "name": "sums",
    "rewards": [{"name": "answer:number", "label": None, "weight": 1.0}],
    "algorithm": {"type": "grpo", "kl_coef": 0.0, "dynamic_sampling": False},
    "sampling": {"type": "text", "temperature": 1.0, "max_new_tokens": 40},
    "rollout": {"importance": "auto"},
    "train": {"steps": 30, "prompts_per_step": 8, "group_size": 8, "max_cpu_seconds": 600},
    "optim": {"lr": 3e-4},
    "eval": {"every": 10, "samples": 64, "early_stopping": None, "guards": {"diversity_min": 0.5}, "rewards": []},
}
FLAT = {"reward/mean": 0.4, "reward/std": 0.4, "reward/dropped": 0.0, "advantage/zero_std_groups": 0.1}


def right(share, n=64):
    """``n`` samples, of which the first ``share`` are right."""
    return [1.0] * round(share * n) + [0.0] * (n - round(share * n))


def made(path, evaluations, row=FLAT, changes=None, guards=None, steps=30):
    """A run whose evaluations have these values by step and figure, a prompt a sample."""
    resolved = json.loads(json.dumps(RESOLVED))
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        at = resolved
        for section in sections:
            at = at[section]
        at[last] = value
    with RunDir.create(path) as run, MetricsLog(run.metrics) as metrics, MetricsLog(run.heldout) as heldout:
        run.resolved.write_text(json.dumps(resolved))
        for step in range(1, steps + 1):
            metrics.write(step, {k: v(step) if callable(v) else v for k, v in row.items()})
        for step, values in evaluations.items():
            count = len(next(iter(values.values())))
            means = {key: float(np.mean(of)) for key, of in values.items()}
            heldout.write(step, {**means, "samples": count, "dropped": 0, **(guards or {})})
            run.evaluated(step, [{"prompts": [f"p{i}" for i in range(count)], "values": values}])
    return path


def accuracy(*shares):
    """Evaluations of the run's own measure, ten steps apart."""
    return {
        10 * i: {"reward/number": right(share), "reward/number/correct": right(share)} for i, share in enumerate(shares)
    }
