"""The optimizer that ``performance.optimizer`` names, and its state in checkpoints.

A checkpoint has ``step``, ``exp_avg`` and ``exp_avg_sq`` of each parameter, whichever optimizer made them. Of moments
in 8 bits it has ``exp_avg_8bit`` and ``exp_avg_absmax`` in their place, so that the same optimizer goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmrl.config.performance import Performance
from mmrl.config.schema import Optim
from mmrl.core.errors import UserError
from mmrl.core.installing import install

MOMENTS = {"exp_avg": ("1", "dynamic"), "exp_avg_sq": ("2", "udynamic")}
"""With what bitsandbytes calls them, and the table of values that their 8 bits stand for."""
BLOCK = 256
"""Entries of a moment in 8 bits that share a scale."""
LEAST = 4096
"""Parameters with fewer entries have moments in float32 (bitsandbytes' default)."""


def optimizer_of(parameters: Iterable[Tensor], settings: Optim, performance: Performance) -> torch.optim.Optimizer:
    """AdamW on ``parameters``, which are on one device."""
    parameters = list(parameters)
    given: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if performance.optimizer == "adamw_8bit":
        made: torch.optim.Optimizer = _library().optim.AdamW8bit(parameters, min_8bit_size=LEAST, **given)
        return made
    fused = _is_fused(performance, *parameters[:1])
    return torch.optim.AdamW(parameters, fused=fused or None, **given)  # None: torch chooses among the others


def _is_fused(performance: Performance, *of: Tensor) -> bool:
    """Whether the kernel that updates ``of`` is the fused one."""
    on_gpu = any(p.device.type == "cuda" for p in of)
    return performance.optimizer == "adamw_fused" or (performance.optimizer == "auto" and on_gpu)


def bytes_in_8_bits(parameters: Iterable[Tensor]) -> int:
    """What ``adamw_8bit`` keeps of ``parameters``."""
    sizes = [p.numel() for p in parameters]
    return sum(8 * n if n < LEAST else 2 * (n + 4 * -(-n // BLOCK)) for n in sizes)


def as_saved(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The optimizer's state of a parameter, as a checkpoint has it; the same storage."""
    if "exp_avg" in state:
        return {kind: state[kind] for kind in ("step", *MOMENTS)}
    out = {"step": torch.tensor(float(state["step"]))}
    for moment, (number, _) in MOMENTS.items():
        values = state[f"state{number}"]
        if values.dtype == torch.uint8:
            out |= {f"{moment}_8bit": values, f"{moment}_absmax": state[f"absmax{number}"]}
        else:
            out[moment] = values
    return out


def as_kept(saved: Mapping[str, Tensor], p: Tensor, performance: Performance) -> dict[str, Any]:
    """``as_saved`` of any optimizer, copied, as the one that ``performance`` names keeps it. Raises ``UserError``."""
    if performance.optimizer != "adamw_8bit":
        counts = p.device if _is_fused(performance, p) else "cpu"
        moments = {moment: _whole(saved, moment, p) for moment in MOMENTS}
        return {"step": saved["step"].to(counts, copy=True), **moments}
    out: dict[str, Any] = {"step": int(saved["step"])}
    for moment, (number, table) in MOMENTS.items():
        if p.numel() < LEAST:
            out[f"state{number}"] = _whole(saved, moment, p)
            continue
        code = _table(table, p.device)
        if f"{moment}_8bit" in saved:
            values, scales = (saved[f"{moment}_{kind}"].to(p.device, copy=True) for kind in ("8bit", "absmax"))
        else:
            whole = _whole(saved, moment, p)
            values, found = _library().functional.quantize_blockwise(whole, code=code, blocksize=BLOCK)
            scales = found.absmax
        out |= {f"state{number}": values.view(p.shape), f"qmap{number}": code, f"absmax{number}": scales}
    return out


def _whole(saved: Mapping[str, Tensor], moment: str, p: Tensor) -> Tensor:
    """The moment in float32."""
    if moment in saved:
        return saved[moment].to(p.device, copy=True)
    code = _table(MOMENTS[moment][1], p.device)
    scales = saved[f"{moment}_absmax"].to(p.device).repeat_interleave(BLOCK)[: p.numel()]
    values = code[saved[f"{moment}_8bit"].to(p.device).flatten().long()]
    return (values * scales).view(p.shape)


def _table(name: str, device: torch.device) -> Tensor:
    table: Tensor = _library().functional.create_dynamic_map(signed=name == "dynamic")
    return table.to(device)


def _library() -> Any:
    try:
        import bitsandbytes  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(
            "performance.optimizer: AdamW in 8 bits, or a checkpoint of it, needs bitsandbytes, which is not installed "
            f"here ({install('bitsandbytes')})"
        ) from error
    return bitsandbytes
