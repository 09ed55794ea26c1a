"""Two models that predict, each at times of its own (Wan 2.2 A14B): one module, which trains as one.

An adapter on it has weights for each model; copies, optimizer, checkpoints and gradients are those of one module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.algorithms import find_algorithm
from mmrl.core.errors import UserError

from .predictor import Predictor


class Experts(nn.Module):
    """Final class. ``first`` predicts at timesteps of ``boundary`` and more, ``second`` below; both are children by
    their names in diffusers' pipeline. A row of a batch meets the one of its own time."""

    def __init__(self, first: tuple[str, nn.Module], second: tuple[str, nn.Module], boundary: float) -> None:
        super().__init__()
        self.names, self.boundary = (first[0], second[0]), boundary
        for name, model in (first, second):
            self.add_module(name, model)
        self._repeated_blocks = getattr(first[1], "_repeated_blocks", None)

    @property
    def models(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in self.names]

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, *, return_dict: bool = False
    ) -> tuple[Tensor]:
        """A prediction ``[B, ...]``; all arguments have ``[B, ...]``."""
        given = hidden_states, timestep, encoder_hidden_states
        high = (timestep >= self.boundary).tolist()
        if len({*high}) == 1:
            return self.models[not high[0]](*given, return_dict=return_dict)
        rows = [[n for n, is_high in enumerate(high) if is_high == wanted] for wanted in (True, False)]
        parts = [
            model(*(one[which] for one in given), return_dict=return_dict)[0]
            for model, which in zip(self.models, rows, strict=True)
        ]
        order = sorted(range(len(high)), key=lambda place: (rows[0] + rows[1])[place])
        return (torch.cat(parts)[order],)

    def enable_gradient_checkpointing(self) -> None:
        for model in self.models:
            model.enable_gradient_checkpointing()  # type: ignore[operator]

    def disable_gradient_checkpointing(self) -> None:
        for model in self.models:
            model.disable_gradient_checkpointing()  # type: ignore[operator]

    def set_attention_backend(self, backend: str) -> None:
        for model in self.models:
            model.set_attention_backend(backend)  # type: ignore[operator]


def trained_steps(pipeline: Predictor, noisy: Sequence[int]) -> dict[str, int]:
    """How many denoising steps, of all that may train, each of two models predicts in; ``noisy``: those that may carry
    noise. Raises ``UserError`` where a model has none. Objectives on given clips train all noise levels: nothing is
    counted for them, nor for one model.
    """
    adapter, recipe = pipeline.adapter, pipeline.recipe
    kind, steps = recipe.algorithm.kind, pipeline.steps
    if not adapter.also_trains or kind == "offline":
        return {}
    times = adapter.schedule().timesteps.tolist()
    if kind == "policy_gradient":
        trains, edit = [times[n] for n in noisy], "sampling.window"
    elif kind == "forward_process":
        trains, edit = [times[n] for n in pipeline.renoising.levels], f"algorithm ({recipe.algorithm.type})"
    else:
        trains, edit = list(_with_graph(pipeline, times)), f"algorithm ({recipe.algorithm.type})"
    counts = {name: sum(adapter.expert(t) == name for t in trains) for name in adapter.trained()}
    for name, count in counts.items():
        if not count:
            own = [n for n, t in enumerate(times) if adapter.expert(t) == name]
            where = f"in steps {own[0]} to {own[-1]}" if own else "in none"
            raise UserError(
                f"{edit}: no step trains {name}, which predicts {where} of {steps} (from 0); let one of them train, or "
                "change sampling.steps or sampling.shift"
            )
    return counts


def _with_graph(pipeline: Predictor, times: Sequence[float]) -> Iterator[float]:
    """The timesteps that a pathwise objective back-propagates through, over its random draws."""
    settings = pipeline.recipe.algorithm
    objective = find_algorithm(settings.type).objective(settings)
    for draw in range(100):
        path: GraphSteps = objective.graph_steps(len(times), draw / 100)
        yield from times[path.first : path.last + 1]
        yield from (float(pipeline.adapter.timestep(torch.tensor(a))) for a, _ in path.jumps)
