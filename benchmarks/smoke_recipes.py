"""Checks of ``gpu_smoke.py`` that train shipped recipes, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smoke_place import MissedError, Place, SkippedError

WITHIN = 1e-3
"""Relative, of rewards and gradient norms in float32 on two kinds of device."""
GAP = 0.05
"""Nats by which log-probs of sampling and of the replay may differ, mean per token."""
PICTURES = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=8", "eval.samples=8"]
TEXTS = ["train.prompts_per_step=8", "train.group_size=4", "train.micro_batch_size=16", "eval.samples=16"]
Row = dict[str, Any]


def doctor(place: Place) -> dict[str, Any]:
    """What ``mmrl doctor`` finds; a problem fails the check."""
    from mmrl.planner.doctor import examine

    found = examine()
    rows = dict(found.rows)
    figures = {key: rows[key] for key in ("torch", "transformers", "diffusers", "peft", "accelerators")}
    if found.problems:
        raise MissedError("; ".join(found.problems), figures)
    return figures


def trained(place: Place, recipe: str, *words: str, steps: int = 2, device: str | None = None) -> list[Row]:
    """The rows of a run of ``steps`` steps, one evaluation at its end."""
    from mmrl import cli

    out = place.folder / f"run{len([*place.folder.iterdir()])}"
    sys.argv = ["mmrl", "train", recipe, *settings(device or place.device, steps), *words, "--out", str(out)]
    try:
        cli.main()
    except SystemExit as ended:
        if ended.code:
            raise MissedError(f"mmrl train {recipe} ended with {ended.code}", {}) from None
    rows = rows_of(out)
    if len(rows) != steps:
        raise MissedError(f"mmrl train {recipe} took {len(rows)} of {steps} steps", {})
    return rows


def settings(device: str, steps: int) -> list[str]:
    every = [f"device={device}", f"train.steps={steps}", f"eval.every={steps}", "eval.grid=4"]
    return [*every, "train.max_cpu_seconds=null", f"checkpoint.every={steps}"]


def rows_of(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def as_on_the_cpu(place: Place) -> dict[str, Any]:
    """Three steps in float32 on the device and on the CPU: the noise is the same, so the numbers nearly are."""
    words = [*PICTURES, "model.dtype=float32"]
    here, there = (trained(place, "shapes-lora", *words, steps=3, device=d) for d in (place.device, "cpu"))
    figures = {}
    for name in ("reward/mean", "optim/grad_norm"):
        gaps = [abs(a[name] - b[name]) / max(abs(b[name]), 1e-3) for a, b in zip(here, there, strict=True)]
        figures[f"{name}, largest relative gap"] = float(f"{max(gaps):.2g}")
    if max(figures.values()) > WITHIN:
        raise MissedError(f"a gap is above {WITHIN}", figures)
    return figures


def half(place: Place, recipe: str, *words: str) -> dict[str, Any]:
    """Two steps in bfloat16 with guidance and gradient checkpointing; how far the first ratio was from 1."""
    made = ["model.dtype=bfloat16", "sampling.guidance_scale=4.5", "model.gradient_checkpointing=true"]
    rows = trained(place, recipe, *PICTURES, *made, *words)
    gaps = [row["policy/first_ratio_max_dev"] for row in rows]
    return {"first |ratio - 1|": float(f"{max(gaps):.2g}"), "grad norm": float(f"{rows[-1]['optim/grad_norm']:.3g}")}


def first_ratio(place: Place, recipe: str = "shapes-lora") -> dict[str, Any]:
    """Where sampling and replay have one shape, they compute the same bits."""
    figures = half(place, recipe)
    if figures["first |ratio - 1|"] > 0:
        raise MissedError("sampling and replay differ", figures)
    return figures


def two_steps_a_forward(place: Place) -> dict[str, Any]:
    """Another shape may round otherwise; past its tolerance the run itself stops."""
    return half(place, "shapes-lora", "train.steps_per_forward=2")


def all_weights(place: Place) -> dict[str, Any]:
    return first_ratio(place, "shapes-full")


def other_objectives(place: Place) -> dict[str, Any]:
    """Two steps each; a loss that is not finite stops the run."""
    figures = {}
    for recipe, words in (
        ("shapes-nft", PICTURES),
        ("shapes-draft", PICTURES),
        ("shapes-dpo", ["train.prompts_per_step=8", "train.micro_batch_size=8", "eval.samples=8"]),
    ):
        rows = trained(place, recipe, *words)
        figures[f"{recipe} grad norm"] = float(f"{rows[-1]['optim/grad_norm']:.3g}")
    return figures


def text(place: Place) -> dict[str, Any]:
    figures = {}
    for label, words in (
        ("full", []),
        ("LoRA", ["model.lora={rank: 8, alpha: 16}"]),
        ("PPO", ["algorithm={type: ppo}"]),
    ):
        rows = trained(place, "sums", *TEXTS, *words)
        gap = max(row.get("mismatch/log_prob_gap", row["policy/first_ratio_max_dev"]) for row in rows)
        figures[f"{label}: log-prob gap"] = float(f"{gap:.2g}")
    if max(figures.values()) > GAP:
        raise MissedError(f"a gap is above {GAP}", figures)
    return figures


def vision_language(place: Place) -> dict[str, Any]:
    if not find_spec("torchvision"):
        raise SkippedError("torchvision is not installed, which the processors of vision-language models need")
    figures = {}
    for recipe in ("scenes", "scenes-judge"):
        rows = trained(place, recipe, *TEXTS)
        figures[f"{recipe}: dropped"] = sum(row["reward/dropped"] for row in rows)
    if any(figures.values()):
        raise MissedError("samples were left out", figures)
    return figures


def killed_and_resumed(place: Place) -> dict[str, Any]:
    """A run that is killed in its second half and goes on has the rows of one that was not."""
    words = [*PICTURES, "model.dtype=float32", "checkpoint.every=1"]
    whole = trained(place, "shapes-lora", *words, steps=4)
    out = place.folder / "killed"
    made = [*settings(place.device, 4), *words, "--out", str(out)]
    command = [sys.executable, "-m", "mmrl.cli", "train", "shapes-lora", *made]
    with (place.folder / "killed.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ)
        until = time.monotonic() + 120
        while not (out / "checkpoints" / "step_000002").exists() and process.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = len(rows_of(out)) if (out / "metrics.jsonl").exists() else 0
        subprocess.run([*command, "--resume"], stdout=said, stderr=said, check=True, env=os.environ)
    rows = rows_of(out)
    clocks = ("time/", "perf/", "plan/", "sent/", "features/")
    same = [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in whole]
    figures = {"steps before the kill": done, "steps": len(rows)}
    if same != [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]:
        raise MissedError("metrics differ after --resume", figures)
    return figures


def family_contract(place: Place) -> dict[str, Any]:
    """What ``python -m mmrl.pipelines.diffusion.contract`` checks, on the device."""
    import mmrl
    from mmrl.config.loader import load_recipe
    from mmrl.config.schema import Recipe

    contract = mmrl.load("pipelines", "diffusion/contract")
    words = [f"device={place.device}", "model.dtype=float32"]
    recipe = Recipe.model_validate(load_recipe(["shapes-lora"], words).resolved())
    figures = {}
    for check in contract.CHECKS:
        unread = [("transformer_blocks.3.attn.add_q_proj.lora_B",)] if "two_steps" in check.__name__ else []
        try:
            figures[check.__name__] = check(recipe, *unread)  # of the last block, SD3 reads no queries of the prompt
        except AssertionError as error:
            raise MissedError(f"{check.__name__}: {error}", figures) from error
    return figures


def fsdp(place: Place) -> dict[str, Any]:
    """FSDP2 on one rank (NCCL on a GPU): forward, backward, gather, and a save beside other work."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    if place.gpu and not dist.is_nccl_available():
        raise SkippedError("this torch is built without NCCL")
    kind = place.device.partition(":")[0]
    store = dist.FileStore(str(place.folder / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.gpu else "gloo", store=store, rank=0, world_size=1)
    try:
        width = 64 if place.small else 2048
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to(place.device)
        plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
        mesh = init_device_mesh(kind, (1,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(torch.ones(2, width, device=place.device)).square().mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        gathered = {name: value.full_tensor() for name, value in model.state_dict().items()}
        saving: Any = dcp.async_save(get_model_state_dict(model), checkpoint_id=str(place.folder / "saved"))
        saving.result()
    finally:
        dist.destroy_process_group()
    figures = {"grad norm": float(f"{norm.item():.3g}"), "files": len([*(place.folder / "saved").iterdir()])}
    if not all(torch.equal(gathered[name], plain[name]) for name in plain):
        raise MissedError("gathered weights are not those that were sharded", figures)
    return figures
