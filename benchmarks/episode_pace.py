"""Episodes at their own pace against turns in lock step: the time of a step's sampling where tools take time.

    python benchmarks/episode_pace.py                       # 20 loads, about 4 minutes on a CPU
    python benchmarks/episode_pace.py --loads 2 --samples 8 # a short form
    python benchmarks/episode_pace.py --trl                 # and TRL's own loop on the same loads

A load is a distribution of the seconds that a tool takes: its mean, its spread, and the share of slow calls. The same
samples are drawn both ways by the code of ``mmrl train``, with the shipped model ``products-qwen3`` in this process; in
lock step every turn waits for all answers. What is sampled must be equal. The order of the two ways alternates.

``--trl`` adds the loop of TRL's ``GRPOTrainer`` (``_generate``) with the same model, prompts, limits and distribution
of seconds. Its parser is replaced, so that every turn calls the tool, as every turn of the load is answered; no answer
follows its last turn, which is one sleep of four less than ours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId, Slot
from mmrl.episodes.play import InStep

WORLD = """
import random
import time


class Sleeps:
    def __init__(self, mean, spread, slow):
        self.mean, self.spread, self.slow = mean, spread, slow

    def reset(self, prompt, seed):
        self.turn, self.text = 0, prompt.text

    def step(self, action):
        self.turn += 1
        draw = random.Random(f"{self.text} {self.turn} {action.tokens}")
        time.sleep(self.mean * draw.lognormvariate(0, self.spread) * (8 if draw.random() < self.slow else 1))
        return "go on"
"""


def loads(n: int) -> list[dict[str, float]]:
    """The same loads for every run."""
    draw = random.Random(0)
    return [
        {"mean": draw.choice([0.01, 0.03, 0.1]), "spread": draw.choice([0.0, 0.5, 1.0]), "slow": draw.choice([0, 0.1])}
        for _ in range(n)
    ]


def opened(load: dict[str, float], folder: Path) -> Any:
    """The pipeline of a recipe whose tool takes its time."""
    file = folder / "sleeps.py"
    file.write_text(WORLD)
    options = json.dumps(load)
    world = f"environment={{name: '{file}:Sleeps', options: {options}, max_turns: 4, max_tokens: 200, workers: 64}}"
    recipe = load_recipe(["sums-tool"], [world, "sampling.max_new_tokens=24"]).recipe
    return mmrl.load("pipelines", "llm/chat").build(recipe, recipe.model.path, torch.device("cpu"))


def seconds(pipeline: Any, samples: int, *, in_step: bool) -> tuple[float, list[int]]:
    """How long a step's sampling takes, and the tokens."""
    own = type(pipeline).answering
    if in_step:
        slots = own(pipeline)
        pipeline.answering = lambda: InStep(slots.generate)
    prompts = mmrl.load("datasets", "products").prompts("train", count=samples)
    rows = [Slot(0, n, 0, prompt) for n, prompt in enumerate(prompts)]
    pipeline.encode(rows)
    began = time.perf_counter()
    drawn = pipeline.sample(rows, [SampleId(0, n, 0, 0) for n in range(samples)], [], 0)
    took = time.perf_counter() - began
    vars(pipeline).pop("answering", None)
    return took, drawn.tokens.tolist()


CALLS = (
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\\n{% endif %}{% endfor %}"
)


def peer(load: dict[str, float], samples: int, folder: Path) -> Callable[[], tuple[float, list[int]]]:
    """How long TRL's loop takes for a step's sampling, and the numbers of turns."""
    sys.modules.setdefault("torchcodec", None)  # type: ignore[arg-type]  # vLLM imports it, and it may not load
    allow_cpu_only()  # before transformers imports torchvision
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.trainer import grpo_trainer  # pyright: ignore[reportMissingImports]

    draw = random.Random(0)

    def wait() -> str:
        """Wait."""
        time.sleep(load["mean"] * draw.lognormvariate(0, load["spread"]) * (8 if draw.random() < load["slow"] else 1))
        return "go on"

    def parse(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        called = [{"type": "function", "function": {"name": "wait", "arguments": {}}}]
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": called}

    grpo_trainer.parse_response = parse
    path = load_recipe(["sums-tool"]).recipe.model.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    head, tail = tokenizer.chat_template.split("{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}")
    tokenizer.chat_template = head + CALLS + tail
    tokenizer.response_template = {}
    prompts = mmrl.load("datasets", "products").prompts("train", count=samples)
    asked = [{"prompt": [{"role": "user", "content": prompt.text}]} for prompt in prompts]
    settings = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=samples,
        num_generations=2,
        max_completion_length=200,
        max_tool_calling_iterations=3,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list(asked),
        processing_class=tokenizer,
        tools=[wait],
    )
    trainer.generation_config.max_new_tokens = 24
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"wait": wait}] * samples, [{}] * samples  # as before a step

    def once() -> tuple[float, list[int]]:
        began = time.perf_counter()
        made = trainer._generate([one["prompt"] for one in asked])
        return time.perf_counter() - began, [sum(m["role"] == "assistant" for m in one) for one in made[3]]

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl", action="store_true", help="beside the loop of TRL's GRPOTrainer")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for n, load in enumerate(loads(arguments.loads)):
        with tempfile.TemporaryDirectory() as folder:
            pipeline = opened(load, Path(folder))
            seconds(pipeline, 2, in_step=False)  # warm
            took: dict[bool, list[float]] = {False: [], True: []}
            other = peer(load, arguments.samples, Path(folder))() if arguments.trl else None
            for repeat in range(arguments.repeats):
                made = {}
                for in_step in (False, True) if repeat % 2 else (True, False):
                    one, made[in_step] = seconds(pipeline, arguments.samples, in_step=in_step)
                    took[in_step].append(one)
                if made[False] != made[True]:
                    raise SystemExit(f"load {n}: the two ways sampled other tokens")
        own, step = (statistics.median(took[which]) for which in (False, True))
        found.append({**load, "own_pace": round(own, 3), "in_step": round(step, 3), "times": round(step / own, 3)})
        if other is not None:
            found[-1] |= {"trl": round(other[0], 3), "of_trl": round(own / other[0], 3)}
            found[-1]["trl_turns"] = statistics.mean(other[1])
        print(f"load {n + 1}: {json.dumps(found[-1])}", flush=True)
    times = sorted(one["times"] for one in found)
    print(f"lock step takes {statistics.median(times):.2f} times as long (least {times[0]:.2f}, most {times[-1]:.2f})")
    if arguments.trl:
        of = sorted(one["of_trl"] for one in found)
        print(f"ours takes {statistics.median(of):.2f} of TRL's time (least {of[0]:.2f}, most {of[-1]:.2f})")
    if arguments.out:
        arguments.out.write_text(json.dumps({"samples": arguments.samples, "loads": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
