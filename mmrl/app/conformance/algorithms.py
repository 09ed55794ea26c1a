"""What an algorithm owes the training loop: see ``mmrl.algorithms.objective``.

All checks use made-up batches in float64 that hold all an objective may read: eight rows in two groups of four; of
tokens, rows of several lengths. Nothing is at a bend of a loss by design: log-probs are drawn at random, and the
advantages stay inside every clip range of a shipped algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.objective import Loss, Objective, Scored, advantages_of
from mmrl.app.conformance.running import Check, expect
from mmrl.config.algorithm_settings import AlgorithmSettings, with_length_limit
from mmrl.config.algorithms import Algorithm, find_algorithm
from mmrl.core.errors import UserError
from mmrl.core.stored import faults

ROWS, TOKENS, STEPS = 8, 5, 3
GROUPS = torch.arange(ROWS) // 4
SHAPE = (3, 2, 2)
OF_PICTURES = {"v", "target", "x_s", "x0", "v_old", "v_average", "v_reference"}
CLOSE = 1e-6
MADE = {
    "policy_gradient": {
        "log_probs", "reference_log_probs", "entropy", "values", "reference_distance", "old_distance",
        "self_divergence",
    },
    "forward_process": {*OF_PICTURES},
    "pathwise": {"rewards", "reference_distance"},
    "offline": {
        *(f"{prefix}{side}_{what}" for prefix in ("", "reference_") for side in ("chosen", "rejected")
          for what in ("log_probs", "error")),
        "chosen_scores", "rejected_scores", "chosen_tokens", "rejected_tokens", "completion_log_probs",
        "reference_completion_log_probs", "mismatched_log_ratio", "picture_error", "sigma",
    },
}  # fmt: skip
"""What pipelines recompute for an objective of each kind."""
REWARDS = torch.tensor([1.0, 0.0, 0.25, 1.5, 0.5, 0.5, 2.0, -1.0], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """An algorithm with the settings to check it with."""

    algorithm: Algorithm
    settings: AlgorithmSettings

    @property
    def objective(self) -> Objective:
        return self.algorithm.objective(with_length_limit(self.settings, TOKENS))

    def batch(self, *, fresh: bool = False) -> Batch:
        return batch_for(self.objective, self.settings, fresh=fresh)


def opened(name: str, options: Mapping[str, object]) -> Case:
    """The algorithm ``name`` with ``options`` as its settings. Raises ``UserError`` where they are wrong."""
    found = find_algorithm(name)
    try:
        return Case(found, found.settings.model_validate({"type": name, **options}))
    except ValidationError as error:
        raise UserError(f"--options: {name} cannot have these settings: {faults(error)}") from None


def loss_of(objective: Objective, batch: Batch, total: float | None = None) -> Loss:
    """The loss of ``batch``, checked to be a finite number."""
    total = objective.loss_denominator(batch.old["weights"], batch.lengths) if total is None else total
    loss = objective.loss(batch.new, batch.old, total)
    value = loss.value
    expect(value.ndim == 0, f"loss() returned a value of shape {list(value.shape)}; return a scalar")
    expect(bool(value.isfinite()), f"loss() returned {value.item()} for finite numbers")
    return loss


def gradients(objective: Objective, batch: Batch) -> dict[str, Tensor]:
    """The gradients of the loss, by the name of the tensor."""
    leaves = {name: batch.new[name].clone().requires_grad_() for name in batch.leaves}
    value = loss_of(objective, replace(batch, new={**batch.new, **leaves})).value
    expect(value.requires_grad, f"the loss has no graph to {', '.join(leaves)}; nothing would train")
    found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def settings_survive(case: Case) -> str:
    """The settings are part of a checkpoint, as JSON."""
    again = type(case.settings).model_validate_json(case.settings.model_dump_json())
    expect(again == case.settings, "settings change on their way through JSON; use numbers, texts, lists and sections")
    first = float(loss_of(case.objective, case.batch()).value.detach())
    second = float(loss_of(Case(case.algorithm, again).objective, case.batch()).value.detach())
    expect(first == second, f"the loss is {first} before and {second} after the settings went through JSON")
    return "written and read as JSON they give the same loss"


def nonsense_is_refused(case: Case) -> str:
    numbers = [n for n, f in case.settings.__class__.model_fields.items() if {f.annotation} & {int, float}]
    for wrong in ({"no_such_setting": 1}, *({name: "many"} for name in numbers)):
        try:
            type(case.settings).model_validate({**case.settings.model_dump(), **wrong})
        except (ValidationError, UserError):
            continue
        raise AssertionError(f"settings take {wrong}; derive them from AlgorithmSettings, and give fields a type")
    return f"an unknown setting, and a text for {len(numbers)} numbers"


def it_asks_for_what_there_is(case: Case) -> str:
    objective = case.objective
    unknown = objective.needs - MADE[objective.kind]
    expect(not unknown, f"needs {', '.join(sorted(unknown))}, which nothing recomputes; there are "
           f"{', '.join(sorted(MADE[objective.kind]))}")  # fmt: skip
    if objective.kind == "policy_gradient":
        possible = {"log_probs", "reference_log_probs", "values"}
        expect(objective.prepares <= possible, f"prepares may name {', '.join(sorted(possible))}")
    if objective.kind == "forward_process":
        named = {objective.samples_with(step) for step in range(20)} - {"current", *objective.copies}
        expect(not named, f"samples with {', '.join(named)}, which is none of its copies")
        moved = [decay(n) for decay in objective.copies.values() for n in (0, 1, 1000)]
        expect(all(0 <= d <= 1 for d in moved), f"a copy's decay is {moved}; it is a share from 0 to 1")
    if objective.kind == "pathwise":
        for draw in (0.0, 0.5, 0.999):
            path = objective.graph_steps(10, draw)
            expect(0 <= path.first <= 10 and path.last < 10, f"graph_steps(10, {draw}) is {path}; steps are 0 to 9")
    return ", ".join(sorted(objective.needs))


def advantages_are_sound(case: Case) -> str:
    make = advantages_of(case.objective)
    rewards = REWARDS.clone()
    rewards[2] = float("nan")
    found = make(scored(rewards, case.settings))
    shapes = [[ROWS], [ROWS, STEPS if case.settings.trains_on == "denoising" else TOKENS]]
    expect(list(found.values.shape) in shapes, f"values have shape {list(found.values.shape)}; it is [B] or [B, T]")
    expect(bool(found.values.isfinite().all()), "an advantage is not finite where a sample was dropped (NaN)")
    expect(
        case.settings.whole == "group" or not found.valid[2],
        "valid must be False for a dropped sample (its reward is NaN)",
    )
    expect(not found.values[2].any(), "a dropped sample has an advantage; give it 0")
    again = make(scored(rewards, case.settings))
    expect(torch.equal(found.values, again.values), "the same rewards got other advantages the second time")
    order = torch.tensor([3, 0, 2, 1, 7, 4, 6, 5])
    other = make(scored(rewards, case.settings, order)).values
    expect(torch.allclose(other, found.values[order], atol=1e-5), "the order of a group's samples changes advantages")
    return f"{list(found.values.shape)}, dropped samples have 0{_of_groups(case, make)}"


def _of_groups(case: Case, make: Callable[[Scored], Advantages]) -> str:
    if not case.settings.compares_group:
        return ""
    equal = make(scored(torch.ones(ROWS, dtype=torch.float64), case.settings, alike=True)).values
    expect(
        not equal.any(),
        "a group of equal responses and rewards has advantages; give it 0, it teaches nothing (or let "
        "compares_group of the settings be False, where a sample is not compared with its group)",
    )
    return ", and so have groups of equal rewards"


def fresh_ratio_is_one(case: Case) -> str:
    """On samples of the policy itself the loss's gradient is the policy gradient's: minus the advantage, times a
    positive weight that knows nothing of the advantage."""
    objective, batch = case.objective, case.batch(fresh=True)
    dev = loss_of(objective, batch).maxima.get("policy/ratio_max_dev")
    expect(dev is None or float(dev) < CLOSE, f"policy/ratio_max_dev is {dev} for the policy that drew the samples")
    scales = []
    inside = batch.old.get("mask", torch.ones_like(batch.new["log_probs"])) > 0
    for advantages in (batch.old["advantages"], 0.3 - batch.old["advantages"].flip(0)):
        batch.old["advantages"] = advantages
        g = gradients(objective, batch)["log_probs"]
        scale = -g / advantages.unsqueeze(1)
        expect(
            bool((scale[inside] > 0).all()),
            "its sign is wrong somewhere, or it is 0: a better sample must become likelier",
        )
        expect(not g[~inside].any(), "positions outside the mask have a gradient")
        scales.append(scale[inside])
    gap = float((scales[0] - scales[1]).abs().max() / scales[0].abs().max())
    expect(gap < 1e-4, f"it is not proportional to the advantage (off by {gap:.2g})")
    return f"minus the advantage times a positive weight, within {gap:.1g}"


class _Held(TorchFunctionMode):
    """What is computed without a gradient keeps the values that it had in the first run."""

    def __init__(self) -> None:
        super().__init__()
        self._values: list[Tensor] = []
        self._place: int | None = None

    def again(self) -> _Held:
        self._place = 0
        return self

    def __torch_function__(
        self,
        func: Callable[..., Tensor | tuple[Tensor, ...] | bool | int | None],
        types: Iterable[type],
        args: tuple[Tensor, ...] = (),
        kwargs: Mapping[str, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, ...] | bool | int | None:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or (func is not Tensor.detach and torch.is_grad_enabled()):
            return out
        if self._place is None:
            self._values.append(out.clone())
            return out
        self._place += 1
        return self._values[self._place - 1]


def gradient_is_the_slope(case: Case) -> str:
    """Compare gradients along random directions with finite differences in float64; detached tensors are held
    constant."""
    objective, batch = case.objective, case.batch()
    found, held = gradients(objective, batch), _Held()
    draw = torch.Generator().manual_seed(11)
    total = objective.loss_denominator(batch.old["weights"], batch.lengths)
    with held:
        objective.loss(
            {**batch.new, **{n: batch.new[n].clone().requires_grad_() for n in batch.leaves}}, batch.old, total
        )

    def at(directions: Mapping[str, Tensor], step: float) -> float:
        moved = {n: (batch.new[n] + step * d).requires_grad_() for n, d in directions.items()}
        with held.again():
            loss = objective.loss({**batch.new, **moved}, batch.old, total)
        return float(loss.value.detach())

    worst, size = 0.0, sum(float(g.square().sum()) for g in found.values()) ** 0.5
    for _ in range(3):
        along = {n: torch.randn(g.shape, generator=draw, dtype=torch.float64) for n, g in found.items()}
        slope = sum(float((g * along[n]).sum()) for n, g in found.items())
        gaps = []
        for step in (1e-6, 3e-5, 1e-4, 1e-3, 1e-2):  # the longer ones for losses that compute in float32
            measured = (at(along, step) - at(along, -step)) / (2 * step)
            gaps.append(abs(measured - slope) / max(size, abs(measured), 1e-8))
        worst = max(worst, min(gaps))
    expect(worst < 5e-3, f"it differs from finite differences by {worst:.2g}; something detaches what should have a "
           "graph, or writes to its inputs")  # fmt: skip
    return f"within {worst:.1g} of finite differences, in {', '.join(found)}"


def slices_add_up(case: Case) -> str:
    objective, batch = case.objective, case.batch()
    total = objective.loss_denominator(batch.old["weights"], batch.lengths)
    parts = [batch.rows(0, ROWS // 2), batch.rows(ROWS // 2, ROWS)]
    shares = [objective.loss_denominator(part.old["weights"], part.lengths) for part in parts]
    expect(
        abs(sum(shares) - total) < CLOSE * total, f"loss_denominator of two halves is {shares}, of the whole {total}"
    )
    whole = float(loss_of(objective, batch, total).value.detach())
    values = [float(loss_of(objective, part, total).value.detach()) for part in parts]
    expect(
        abs(sum(values) - whole) < 1e-5 * max(1.0, abs(whole)),
        f"two halves have losses {values}, the whole {whole}; divide by the given total, not by this slice's size",
    )
    return "the losses and denominators of two halves are those of the whole"


def dropped_rows_are_left_out(case: Case) -> str:
    objective, batch = case.objective, case.batch()
    dropped = 2 if case.settings.whole is None else slice(0, 4)  # a pair is dropped as a whole
    batch.old["weights"][dropped] = 0.0
    before = float(loss_of(objective, batch).value.detach())
    for name in batch.leaves:
        g = gradients(objective, batch)[name]
        expect(not g[dropped].any(), f"a row with weight 0 has a gradient in {name}; multiply its loss by weights")
        batch.new[name][dropped] *= 1.5
    after = float(loss_of(objective, batch).value.detach())
    expect(abs(before - after) < CLOSE, f"changing a row with weight 0 moves the loss from {before} to {after}")
    if "mask" in batch.old:
        batch.new["log_probs"][batch.old["mask"] == 0] = 40.0
        outside = float(loss_of(objective, batch).value.detach())
        expect(abs(outside - after) < CLOSE, "values outside the mask move the loss; use torch.where, not a product")
        return "and so are positions outside the mask"
    return "they move neither the loss nor a gradient"


def it_is_a_function(case: Case) -> str:
    objective, batch = case.objective, case.batch()
    kept = [{name: t.clone() for name, t in given.items()} for given in (batch.new, batch.old)]
    first, second = loss_of(objective, batch).value.detach(), loss_of(objective, batch).value.detach()
    expect(torch.equal(first, second), f"the same batch has loss {float(first)}, then {float(second)}")
    pairs = zip(kept, (batch.new, batch.old), strict=True)
    changed = [name for before, after in pairs for name, t in before.items() if not torch.equal(t, after[name])]
    expect(not changed, f"loss() wrote to {', '.join(changed)}; others read these tensors")
    return "the same batch, the same loss; its inputs stay"


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "settings go through JSON": settings_survive,
    "wrong settings are refused": nonsense_is_refused,
    "it asks for what there is": it_asks_for_what_there_is,
    "advantages": advantages_are_sound,
    "ratio 1 on fresh samples": fresh_ratio_is_one,
    "its gradient is the slope": gradient_is_the_slope,
    "slices add up": slices_add_up,
    "dropped rows are left out": dropped_rows_are_left_out,
    "the loss is a function": it_is_a_function,
}


def checks(case: Case) -> Iterator[Check]:
    """All checks that the kind of the algorithm has."""
    kind: str = case.objective.kind
    without: Mapping[str, Sequence[str]] = {
        "forward_process": ["ratio 1 on fresh samples"],
        "pathwise": ["advantages", "ratio 1 on fresh samples", "dropped rows are left out"],
        "offline": ["advantages", "ratio 1 on fresh samples"],
    }
    own = ["ratio 1 on fresh samples"] if case.settings.teaches_itself else []  # no policy gradient of a reward
    left_out = [*without.get(kind, ()), *own]
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items() if name not in left_out)


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
    if name == "sigma":
        return values.sigmoid()
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
            "self_divergence": normal(ROWS, TOKENS).abs(),
        },
        {"log_probs": old, "mask": mask, "values": values, "returns": normal(ROWS, TOKENS)},
        lengths,
        ("log_probs", "entropy", "values", "self_divergence"),
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
        before = rewards[order].unsqueeze(1) * torch.linspace(-0.5, 0.5, STEPS, dtype=torch.float64).square()
        return Scored(rewards[order], GROUPS[order], step_rewards=before if settings.scores_steps else None)
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
