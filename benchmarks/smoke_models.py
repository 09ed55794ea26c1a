"""Checks of ``gpu_smoke.py`` on models of true width with random weights: speed, memory, engines."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from smoke_place import MissedError, Place, SkippedError
from smoke_recipes import GAP, settings, trained

from mmrl.config.performance import Performance
from mmrl.core.offload import Frozen
from mmrl.models import performance
from mmrl.planner.gpus import GPUS

MEMORY_WITHIN = 0.10
"""Of the plan's peak, by which a step's may differ."""
FREED = 0.3
"""Of the device's memory, of which vLLM takes 0.4: what must be free of it while it sleeps."""


def share_of_peak(flops: float, seconds: float) -> str:
    """Of the device's bfloat16 peak; ``unknown`` where the table lacks the device."""
    name = torch.cuda.get_device_name().lower().replace(" ", "") if torch.cuda.is_available() else ""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in name), None)
    return "unknown" if gpu is None else f"{flops / seconds / gpu.rate('bfloat16'):.1%}"


def synchronize(place: Place) -> None:
    if place.gpu:
        torch.cuda.synchronize()


def timed(place: Place, work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of ``work``, after one that warms up."""
    work()
    found = []
    for _ in range(repeats):
        synchronize(place)
        began = time.perf_counter()
        work()
        synchronize(place)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30


# -- a language model --------------------------------------------------------------------------------------------------


def decoder(place: Place) -> tuple[Path, int]:
    """A folder with a random decoder as wide as Qwen2.5-1.5B, four layers deep, and a shipped tokenizer; its
    parameters."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(
        Path(__file__).resolve().parents[1] / "pipelines" / "llm" / "models" / "sums-qwen3"
    )
    true: dict[str, Any] = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "vocab_size": 151_936,
    }
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    config = Qwen2Config(
        **(small if place.small else true),
        num_hidden_layers=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = place.folder / "decoder"
    with torch.device(place.device):
        model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, sum(p.numel() for p in model.parameters())


def language_model(place: Place) -> dict[str, Any]:
    """GRPO on it: tokens a second, share of the peak in the update, and peak memory against the plan."""
    from mmrl.config.loader import load_recipe
    from mmrl.planner.plan import plan

    length, rows = (16, 8) if place.small else (256, 64)
    folder, parameters = decoder(place)
    made = [f"model.path={folder}", "model.dtype=bfloat16", f"sampling.max_new_tokens={length}"]
    made += ["train.prompts_per_step=4", f"train.group_size={rows // 4}", "train.micro_batch_size=16"]
    made += ["eval.samples=8", "data.train={count: 64}", "data.heldout={count: 16}"]
    expected = plan(load_recipe(["sums"], [*settings(place.device, 3), *made]))
    if expected.problems:
        raise MissedError(f"the plan: {expected.problems[0]}", {})
    last = trained(place, "sums", *made, steps=3)[-1]
    tokens = last["text/length"] * rows
    figures = {
        "tokens/s sampled": round(tokens / last["time/sample"]),
        "tokens/s trained": round(tokens / last["time/train"]),
        "share of the bf16 peak in the update": share_of_peak(6 * parameters * tokens, last["time/train"]),
    }
    if not place.gpu or place.small:
        return figures
    assert expected.peak is not None
    peak, planned = last["perf/peak_memory_mib"], expected.peak.total / 2**20
    figures |= {"peak MiB": round(peak), "planned MiB": round(planned)}
    if abs(peak - planned) > MEMORY_WITHIN * planned:
        raise MissedError(f"the peak is not within {MEMORY_WITHIN:.0%} of the plan's", figures)
    return figures


# -- slices of diffusion transformers ----------------------------------------------------------------------------------


@contextlib.contextmanager
def tf32(place: Place) -> Iterator[None]:
    """As performance.tf32=true has it."""
    device = torch.device(place.device)
    performance.settle(Performance(tf32=True), device)
    try:
        yield
    finally:
        performance.settle(Performance(), device)


def qwen_image_slice(place: Place) -> dict[str, Any]:
    """A slice of the recipe for Qwen-Image, as ``mmrl train`` builds it, fits, and offload takes seconds."""
    if place.gpu and torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
        raise SkippedError("the device has less than 70 GiB of memory")
    from slices import JPEG, closed, sampled
    from true_shapes import built

    words = ["train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=1", "train.updates_per_step=1"]
    small = ["sampling.height=64", "sampling.width=64", "sampling.max_sequence_length=8"] if place.small else []
    context = built(place, "qwen-image", *words, *small, JPEG)
    milliseconds = sampled(context).milliseconds(place, 3)
    module = context.policy.module
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in module.parameters()), "slice ms": milliseconds}
    if place.gpu:
        figures["peak GiB"] = round(peak_gib(), 1)
    frozen = Frozen(module)
    moves = {"page-locked copy s": frozen.sleep, "back s": frozen.wake, "offload s": frozen.sleep}
    for label, move in moves.items():
        began = time.perf_counter()
        move(place.device)
        synchronize(place)
        figures[label] = round(time.perf_counter() - began, 2)
    closed(context)
    return figures


# -- engines -----------------------------------------------------------------------------------------------------------


def engine(place: Place) -> dict[str, Any]:
    """Sampling by vLLM, which is given all weights in each step, and sleeps without any while the policy trains."""
    return _sleeping_engine(place)


def engine_with_adapter(place: Place) -> dict[str, Any]:
    """The same with an adapter, whose base waits in the host's memory."""
    return _sleeping_engine(place, "model.lora={rank: 8, alpha: 16}")


def _sleeping_engine(place: Place, *words: str) -> dict[str, Any]:
    """The log-probs of engine and policy must be near one another after each sleep, or weights have not come back."""
    if not find_spec("vllm"):
        raise SkippedError("vLLM is not installed")
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    sizes = ["train.prompts_per_step=2"] if place.small else ["train.prompts_per_step=8", "train.micro_batch_size=16"]
    made = [f"device={place.device}", "rollout={engine: vllm}", "placement={sleep: true}", "train.group_size=4"]
    loaded = load_recipe(["sums"], [*made, *sizes, *words])
    run, used = build(loaded.recipe), {"samples": 0.0, "replay": 0.0}

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*given: Any) -> Any:
            used[name] = max(used[name], used_gib() if place.gpu else 0.0)
            return call(*given)

        return note

    for name in used:
        setattr(run.pipeline, name, noted(name, getattr(run.pipeline, name)))
    try:
        rows = [train_step(run, n, Clock(run.compute.device))[0] for n in range(2 if place.small else 3)]
    finally:
        run.pipeline.close()
        run.rewards.close()
    figures: dict[str, Any] = {"log-prob gap": float(f"{max(row['mismatch/log_prob_gap'] for row in rows):.2g}")}
    figures["seconds of turning"] = round(rows[-1]["placement/wake"], 2)
    given = run.pipeline.updates()
    for name in ("updates", "update_seconds", "calls", "requests"):
        figures[name] = round(given[f"perf/engine_{name}"], 3)
    if place.gpu:
        figures |= {"GiB when sampled": round(used["samples"], 2), "GiB in training": round(used["replay"], 2)}
    if figures["log-prob gap"] > GAP:
        raise MissedError(f"the gap is above {GAP}: weights have not come back", figures)
    if place.gpu and used["samples"] - used["replay"] < FREED * torch.cuda.mem_get_info()[1] / 2**30:
        raise MissedError(f"less than {FREED:.0%} of the memory is free while the policy trains", figures)
    return figures


def used_gib() -> float:
    """Of the whole device: what vLLM has is not torch's."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


if __name__ == "__main__":
    sys.exit("run gpu_smoke.py")
