"""Peak memory of an update per rank as rows grow, with several ranks per row, and the longest row within a limit.

    OMP_NUM_THREADS=1 python benchmarks/context.py --lengths 1024 2048 4096 --ranks 1 2 4 --limit 64 [--json out.json]

Needs Linux. One row of random tokens goes through a Qwen3 with random weights: log-probs, backward pass and optimizer
step, on ranks that are processes of this machine (gloo) with all weights each. Measured by the kernel (resident pages)
and by counting tensors that are alive. What there was before is not in it: it is activations, logits, gradients and
what attention gathers.

``--limit``: MiB of private memory that each rank may take beyond what it had (``RLIMIT_DATA``). The longest row of one
rank is searched for; then all ranks train on rows ``--times`` as long under that limit, where one rank fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from stepping import give_back, resident, say

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Alone, Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId, Slot, TextRows
from mmrl.logging.environment import environment
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.step.step_context import StepContext

allow_cpu_only()  # before transformers imports torchvision

MIB = 2**20
SHIPPED = Path(__file__).resolve().parents[1] / "pipelines/llm/models/sums-qwen3"
CONTEXT = 1 << 17
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}


def write_model(folder: Path) -> Path:
    """A Qwen3 with random weights, the shipped tokenizer, and a context that nothing here fills."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("model*", "config.json"))
    sizes: Any = SIZES
    config = Qwen3Config(
        **sizes,
        vocab_size=334,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=331,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


# -- a rank ------------------------------------------------------------------------------------------------------------


def made(model: Path, rank: int, size: int, port: int) -> StepContext:
    """The run of one rank of those that share a row."""
    words = [
        "train.backend=replicated",
        f"model.path={model}",
        "model.dtype=float32",
        "device=cpu",
        f"devices_per_controller={size}",
    ]
    loaded = load_recipe(["sums"], [*words, f"train.context_parallel={size}"])
    peers = Group(rank, size, "127.0.0.1", port, devices=size) if size > 1 else Alone()
    return build(loaded.recipe, Controller(0, 0, 1, peers))


def update(context: StepContext, tokens: int) -> float:
    """An update on one row of ``tokens``, prompt and response; the mean log-prob."""
    slot = Slot(0, 0, 0, context.prompts[0])
    keys = context.pipeline.encode([slot])
    length = tokens - context.pipeline.features.ref(keys[0]).shapes["input_ids"][0]
    drawn = torch.randint(0, 300, (1, length), generator=torch.Generator().manual_seed(0))
    asked = [(keys[0], context.pipeline.features.get(keys[0])["input_ids"])]
    cut = torch.zeros(1, dtype=torch.bool)
    rows = TextRows.answers([slot], [SampleId(0, 0, 0, 0)], asked, list(drawn), cut)
    found = context.pipeline.replay(rows, [0], frozenset({"log_probs"}), context.policy.using)["log_probs"]
    context.policy.backward(-found.mean())
    context.policy.apply()
    context.pipeline.features.release(keys)
    return found.mean().item()


def measured(context: StepContext, tokens: int) -> dict[str, float]:
    """MiB of an update beyond what there is between updates."""
    give_back()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    said = update(context, tokens)
    peak = resident("VmHWM") - before
    with LiveBytes() as live:
        update(context, tokens)
    return {"resident": peak, "tensors": live.peak / MIB, "log_prob": said}


def limited(context: StepContext, tokens: list[int], limit: int) -> dict[str, Any]:
    """Updates on rows of ``tokens``, one after another, until one has no room in ``limit`` MiB more than there are."""
    give_back()
    resource.setrlimit(resource.RLIMIT_DATA, (int((resident("VmData") + limit) * MIB), resource.RLIM_INFINITY))
    held: list[tuple[int, float]] = []
    for n in tokens:
        try:
            held.append((n, update(context, n)))
        except (RuntimeError, MemoryError) as error:
            return {"held": held, "failed": str(error).splitlines()[0]}
    return {"held": held, "failed": None}


def serve(out: Path, rank: int, size: int, port: int, model: Path, limit: int, tokens: list[int]) -> None:
    torch.set_num_threads(1)
    run = made(model, rank, size, port)
    update(run, 64 * size)  # the optimizer's state, and what the library makes once
    found: Any = limited(run, tokens, limit) if limit else [measured(run, n) for n in tokens]
    out.write_text(json.dumps(found))


def together(size: int, model: Path, limit: int, tokens: list[int]) -> list[Any]:
    """What each of ``size`` ranks found, in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outs = [model.parent / f"{size}-{rank}.json" for rank in range(size)]
    words = [str(word) for word in (size, port, model, limit, *tokens)]
    command = [sys.executable, __file__, "rank"]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # glibc: a tensor that is freed is given back at once
    started = [subprocess.Popen([*command, str(out), str(rank), *words], env=env) for rank, out in enumerate(outs)]
    try:
        while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
            time.sleep(0.1)  # one that failed leaves the others waiting for it
        if any(one.poll() for one in started):
            raise SystemExit(f"a rank of {size} failed")
    finally:
        for one in started:
            one.kill()
    return [json.loads(out.read_text()) for out in outs]


# -- all of it ---------------------------------------------------------------------------------------------------------


def table(lengths: list[int], found: dict[int, list[dict[str, float]]]) -> str:
    lines = [
        "| tokens | ranks | resident MiB of a rank | of one rank's | tensors MiB | of one rank's |",
        "|---" * 6 + "|",
    ]
    for n, tokens in enumerate(lengths):
        for size, rows in found.items():
            here, one = rows[n], found[min(found)][n]
            cells = [f"{here[kind]:.1f} | {here[kind] / one[kind]:.3f}" for kind in ("resident", "tensors")]
            lines.append(f"| {tokens:,} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        found: dict[int, list[dict[str, float]]] = {}
        for size in arguments.ranks if arguments.lengths else ():
            each = together(size, model, 0, arguments.lengths)
            found[size] = [max(rows, key=lambda row: row["resident"]) for rows in zip(*each, strict=True)]
            say(f"{size} ranks: done")
        print(table(arguments.lengths, found))
        result: dict[str, Any] = {"lengths": arguments.lengths, "found": found, "environment": environment()}
        if arguments.limit:
            result["limit"] = under(arguments, model)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def under(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The longest row of one rank under the limit, and rows so many times as long on all ranks."""
    step, most = 128, max(arguments.ranks)
    (one,) = together(1, model, arguments.limit, list(range(512, CONTEXT, step)))
    longest = one["held"][-1][0]
    say(
        f"one rank under {arguments.limit} MiB: rows of {longest:,} tokens; of {longest + step:,}: {one['failed'][:70]}"
    )
    tokens = int(longest * arguments.times)
    several = together(most, model, arguments.limit, [tokens] * 3)
    failed = [rank["failed"] for rank in several if rank["failed"]]
    said = [round(value, 4) for _, value in several[0]["held"]]
    say(f"{most} ranks under {arguments.limit} MiB each, 3 updates of rows of {tokens:,}: log-probs {said}; {failed}")
    return {"one": longest, "ranks": most, "tokens": tokens, "log_probs": said, "failed": failed}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        out, rank, size, port, model, limit, *tokens = sys.argv[2:]
        serve(Path(out), int(rank), int(size), int(port), Path(model), int(limit), [int(n) for n in tokens])
    else:
        main()
