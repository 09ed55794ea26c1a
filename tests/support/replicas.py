"""Shared by the tests of replicas and others."""

import json
from pathlib import Path

from mmrl.config.loader import load_recipe

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine.py"
TWO = "rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"
MODEL = EXAMPLE.parents[1] / "pipelines" / "llm" / "models" / "sums-qwen3"
ASKED = "rubric: 'Is it right? {{ response }}', model: {vllm: %s, args: {tensor_parallel_size: %d}}"
JUDGE = f"rewards=[{{name: judge, options: {{{ASKED % (MODEL, 8)}}}}}]"
SHORT = [
    "data.train.count=40",
    "data.heldout.count=8",
    "train.steps=3",
    "train.prompts_per_step=4",
    "train.group_size=4",
    "train.micro_batch_size=8",
    "sampling.batch_size=8",
    "eval.every=3",
    "eval.samples=8",
    "checkpoint.every=1",
]


def recipe(*words):
    return load_recipe(["sums"], list(words)).recipe


def metrics(out):
    rows_ = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    shown = [{k: v for k, v in row.items() if k.startswith(("reward", "policy", "optim", "sampling"))} for row in rows_]
    return [{k: v for k, v in row.items() if "second" not in k} for row in shown]
