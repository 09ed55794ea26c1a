"""Peak memory of a rank while a model is loaded in parts and while it trains, beside what ``mmrl plan`` says.

    OMP_NUM_THREADS=1 python benchmarks/loading_memory.py                     # 1, 2 and 4 CPU ranks
    python benchmarks/loading_memory.py --ranks 2 --layers 32 --json out.json
    python benchmarks/loading_memory.py --backend megatron                    # parts of layers on 1, 2 and 4 ranks

The model is made here: a Qwen3 of random weights, saved in bfloat16, trained in float32 (about 200 MB of weights with
the defaults). Two arms, one after the other, each rank in a process of its own:

- rows    as ``mmrl train`` does it: a rank reads its rows of the checkpoint; with ``fsdp`` it gives freed memory back
- whole   every rank reads the whole model, which is then divided, and malloc keeps what was freed

Memory is what a process has for itself (RssAnon of /proc, read every 2 ms) above what it had before the model was
built: pages of files that processes share do not count. Loading is ``build``, training two steps; the plan is of the
same recipe, its largest phase for training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mmrl.core import sharded_loading
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from mmrl.app.build import build  # noqa: E402
from mmrl.config.loader import load_recipe  # noqa: E402
from mmrl.controller import Controller  # noqa: E402
from mmrl.controller.peers import Group  # noqa: E402
from mmrl.core.clock import Clock  # noqa: E402
from mmrl.logging.environment import environment  # noqa: E402
from mmrl.models import sharded  # noqa: E402
from mmrl.planner.plan import plan  # noqa: E402
from mmrl.training.loop import train_step  # noqa: E402

SHIPPED = Path(__file__).resolve().parents[1] / "pipelines" / "llm" / "models" / "sums-qwen3"
ARMS = ("rows", "whole")
MIB = 2**20
MARK = "@"


def model_of(folder: Path, layers: int) -> Path:
    """A Qwen3 of ``layers`` layers of 3.1 million weights each, in bfloat16, with the tokenizer of a shipped model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("model*"))
    config = Qwen3Config.from_pretrained(SHIPPED)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1536, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 64
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def words_of(path: Path, ranks: int, backend: str) -> list[str]:
    backend = backend if ranks > 1 else "fsdp"  # of one rank: the whole model
    layout = [f"controllers={ranks}"]
    if backend == "megatron":
        layout = [f"devices_per_controller={ranks}", f"train.tensor_parallel={ranks}"]
    return [
        f"model.path={path}",
        *layout,
        f"train.backend={backend}",
        "train.prompts_per_step=4",
        "train.group_size=2",
        "train.micro_batch_size=2",
        "sampling.batch_size=2",
        "sampling.max_new_tokens=4",
        "optim.schedule=constant",
        "device=cpu",
    ]


# -- a rank ------------------------------------------------------------------------------------------------------------


def private() -> int:
    """Bytes that no other process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak:
    """Final class: the most private memory within ``of``, above what there was when it was made."""

    def __init__(self) -> None:
        self._before, self.found = private(), dict[str, float]()

    @contextmanager
    def of(self, name: str) -> Generator[None]:
        done, most = threading.Event(), [private()]

        def look() -> None:
            while not done.wait(0.002):
                most[0] = max(most[0], private())

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self.found[name] = (max(most[0], private()) - self._before) / MIB


def serve(chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if chosen.arm == "whole":
        sharded_loading.reading = lambda _: nullcontext()  # type: ignore[assignment]
        sharded.give_back = lambda: None
    devices = chosen.of if chosen.backend == "megatron" else 1
    peers = Group(chosen.rank, chosen.of, "127.0.0.1", chosen.port, devices=devices) if chosen.of > 1 else None
    controller = Controller(0)
    if peers is not None:
        controller = Controller(0, chosen.rank // devices, chosen.of // devices, peers)
    small = load_recipe(["sums"], words_of(chosen.small, chosen.of, chosen.backend))
    warm = build(small.recipe, controller)  # imports, and what torch keeps
    train_step(warm, 0, Clock(torch.device("cpu")))
    del warm
    loaded, peak = load_recipe(["sums"], words_of(chosen.model, chosen.of, chosen.backend)), Peak()
    began = time.perf_counter()
    with peak.of("load"):
        run = build(loaded.recipe, controller)
    seconds, began = time.perf_counter() - began, time.process_time()
    with peak.of("train"):
        for step in range(2):
            train_step(run, step, Clock(torch.device("cpu")))
    trained = time.process_time() - began
    held = sum(tensor_bytes(p) for p in run.policy.trainable.values()) / MIB
    print(MARK + json.dumps({**peak.found, "seconds": seconds, "trained": trained, "weights": held}), flush=True)
    if peers is not None:
        peers.close()


def tensor_bytes(p: Any) -> int:
    return p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes


# -- all ranks ---------------------------------------------------------------------------------------------------------


def measured(arm: str, ranks: int, path: Path, small: Path, backend: str) -> dict[str, float]:
    """The most that any rank needed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [sys.executable, __file__, f"--arm={arm}", f"--of={ranks}", f"--port={port}", f"--model={path}"]
    given += [f"--small={small}", f"--backend={backend}"]
    processes = [
        subprocess.Popen([*given, f"--rank={rank}"], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for rank in range(ranks)
    ]
    answers = []
    for process in processes:
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank of {ranks} ended with status {process.returncode}")
        answers.append(json.loads(next(line for line in said.splitlines() if line.startswith(MARK))[1:]))
    return {name: max(one[name] for one in answers) for name in answers[0]}


def planned(path: Path, ranks: int, backend: str) -> dict[str, float]:
    made = plan(load_recipe(["sums"], words_of(path, ranks, backend)))
    if made.problems:
        raise SystemExit("\n".join(made.problems))
    most = max(made.phases, key=lambda phase: phase.total)
    return {"load": made.load.total / MIB if made.load else 0.0, "train": most.total / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda given: [int(n) for n in given.split(",")], default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--backend", choices=["fsdp", "megatron"], default="fsdp")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    for name, kind in (("arm", str), ("of", int), ("rank", int), ("port", int), ("model", Path), ("small", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.arm:
        serve(chosen)
        return
    found: dict[str, Any] = {"environment": environment()}
    with tempfile.TemporaryDirectory() as folder:
        path = model_of(Path(folder) / "model", chosen.layers)
        # with enough heads for four ranks
        small = model_of(Path(folder) / "small", 1) if chosen.backend == "megatron" else SHIPPED
        print(f"{(path / 'model.safetensors').stat().st_size / MIB:.0f} MiB in the file, in bfloat16")
        print("ranks arm     weights  loading   plan  training   plan   load s  train s   (MiB, the largest rank's)")
        for ranks in chosen.ranks:
            said = planned(path, ranks, chosen.backend)
            for arm in chosen.arms if ranks > 1 else ARMS[:1]:
                one = measured(arm, ranks, path, small, chosen.backend)
                found[f"{ranks} {arm}"] = {**one, "planned": said}
                print(
                    f"{ranks:>5} {arm:<6} {one['weights']:>8.0f} {one['load']:>8.0f} {said['load']:>6.0f} "
                    f"{one['train']:>9.0f} {said['train']:>6.0f} {one['seconds']:>8.1f} {one['trained']:>8.1f}",
                    flush=True,
                )
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
