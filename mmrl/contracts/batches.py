"""Made-up batches in float64 that hold all an objective may read, for the checks of algorithms.

Eight rows in two groups of four; of tokens, rows of several lengths. Nothing is at a bend of a loss by design:
log-probs are drawn at random, and the advantages stay inside every clip range of a shipped algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.algorithms.objective import Objective, Scored
from mmrl.algorithms.settings import AlgorithmSettings

ROWS, TOKENS, STEPS = 8, 5, 3
GROUPS = torch.arange(ROWS) // 4
SHAPE = (3, 2, 2)
OF_PICTURES = {"v", "target", "x_s", "x0", "v_old", "v_average", "v_reference"}


@dataclass(frozen=True)
class Batch:
    """``new`` and ``old`` as ``loss`` takes them, and the sizes of each row; ``leaves``: the tensors with a
    gradient."""

    new: dict[str, Tensor]
    old: dict[str, Tensor]
    lengths: Tensor
    leaves: tuple[str, ...]
    columns: frozenset[str] = frozenset()
    """Tensors whose rows are in their second dimension."""
    constants: frozenset[str] = frozenset()
    """Tensors without rows."""

    def rows(self, start: int, end: int) -> Batch:
        def cut(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: t if name in self.constants else t[:, start:end] if name in self.columns else t[start:end]
                for name, t in tensors.items()
            }

        return Batch(cut(self.new), cut(self.old), self.lengths[start:end], self.leaves, self.columns, self.constants)


def batch_for(objective: Objective, settings: AlgorithmSettings, *, fresh: bool = False) -> Batch:
    """A batch for the loss of ``objective``. ``fresh``: the policy drew the samples itself, and it is the
    reference."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    weights = torch.ones(ROWS, dtype=torch.float64)
    advantages = normal(ROWS).clamp(-1.5, 1.5)
    if objective.kind == "policy_gradient":
        maker = _tokens if settings.trains_on == "tokens" else _steps
        made = maker(normal, 0.0 if fresh else 1.0)
        made.old.update(advantages=advantages, weights=weights)
    elif objective.kind == "forward_process":
        new = {name: normal(ROWS, *SHAPE) for name in ("v", "target", "x_s", "x0")}
        new |= {name: new["v"] + 1e-3 * normal(ROWS, *SHAPE) for name in ("v_old", "v_average", "v_reference")}
        new["sigma"] = 0.2 + 0.6 * torch.rand(ROWS, generator=draw, dtype=torch.float64)
        made = Batch(
            new,
            {"advantages": advantages, "weights": weights, "groups": GROUPS},
            torch.ones(ROWS, dtype=torch.float64),
            ("v",),
        )
    elif objective.kind == "pathwise":
        path = objective.graph_steps(10, 0.5)
        predictions = max(1, len(objective.phrases(0))) * (len(path.jumps) or 1 + path.renoised)
        levels = torch.tensor([jump[0] for jump in path.jumps], dtype=torch.float64)
        new = {"rewards": normal(predictions, ROWS), "reference_distance": normal(ROWS).abs(), "from": levels}
        leaves = ("rewards", "reference_distance")
        lengths = torch.ones(ROWS, dtype=torch.float64)
        made = Batch(new, {"weights": weights}, lengths, leaves, frozenset({"rewards"}), frozenset({"from"}))
    else:
        new = {name: normal(ROWS) for name in sorted(objective.needs)}
        made = Batch(
            {name: _of_pair(name, t) for name, t in new.items()},
            {
                "weights": weights,
                "margins": normal(ROWS).abs(),
                "labels": (normal(ROWS) > 0).double(),
                "kl": torch.full((ROWS,), 0.3, dtype=torch.float64),
            },
            torch.ones(ROWS, dtype=torch.float64),
            tuple(name for name in new if not name.startswith("reference_") and not name.endswith("_tokens")),
        )
    known = objective.needs | {"target", "x_s", "x0", "sigma", "from"}
    return Batch(
        {name: t for name, t in made.new.items() if name in known},
        made.old,
        made.lengths,
        tuple(name for name in made.leaves if name in objective.needs),
        made.columns,
        made.constants,
    )


def _of_pair(name: str, values: Tensor) -> Tensor:
    """``values`` ``[B]`` in the range of what a pair of texts or pictures has under this name."""
    if name.endswith("_error"):
        return 0.01 * values.abs()
    if name.endswith("_tokens"):
        return 3 + values.abs().round()
    return values - 5 if name.endswith("_log_probs") else values


def _tokens(normal: Callable[..., Tensor], moved: float) -> Batch:
    lengths = torch.tensor([5, 3, 1, 4, 5, 2, 5, 4], dtype=torch.float64)
    mask = (torch.arange(TOKENS) < lengths.unsqueeze(1)).double()
    old = -normal(ROWS, TOKENS).abs()
    new = old + 0.4 * moved * normal(ROWS, TOKENS)
    values = normal(ROWS, TOKENS)
    return Batch(
        {
            "log_probs": new,
            "reference_log_probs": new + 0.3 * moved * normal(ROWS, TOKENS),
            "entropy": normal(ROWS, TOKENS).abs(),
            "values": values + 0.1 * normal(ROWS, TOKENS),
        },
        {"log_probs": old, "mask": mask, "values": values, "returns": normal(ROWS, TOKENS)},
        lengths,
        ("log_probs", "entropy", "values"),
    )


def _steps(normal: Callable[..., Tensor], moved: float) -> Batch:
    old = normal(ROWS, STEPS)
    of_step = {"std": 0.5, "kl_std": 1.5, "dt": -0.1, "c_v": -0.15}
    schedule = {name: torch.full((STEPS,), value, dtype=torch.float64) for name, value in of_step.items()}
    every = {f"every_{name}": schedule[name] for name in ("std", "c_v")}
    return Batch(
        {
            "log_probs": old + 0.2 * moved * normal(ROWS, STEPS),
            "reference_distance": 0.1 * normal(ROWS, STEPS).abs(),
            "old_distance": 0.1 * moved * normal(ROWS, STEPS).abs(),
        },
        {"log_probs": old, **schedule, **every},
        torch.full((ROWS,), STEPS, dtype=torch.float64),
        ("log_probs", "reference_distance", "old_distance"),
        constants=frozenset({*schedule, *every}),
    )


def scored(rewards: Tensor, settings: AlgorithmSettings, order: Tensor | None = None, *, alike: bool = False) -> Scored:
    """What advantages are made of: ``rewards`` ``[8]`` of two groups; ``order`` of the rows. ``alike``: the responses
    are all the same but for their rewards."""
    order = torch.arange(ROWS) if order is None else order
    rows = torch.zeros_like(order) if alike else order
    if settings.trains_on != "tokens":
        return Scored(rewards[order], GROUPS[order])
    generator = torch.Generator().manual_seed(5)
    made = _tokens(lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64), 1.0)
    return Scored(
        rewards[order],
        GROUPS[order],
        mask=made.old["mask"][rows],
        log_probs=made.old["log_probs"][rows],
        reference_log_probs=made.new["reference_log_probs"][rows],
        values=made.old["values"][rows],
    )
