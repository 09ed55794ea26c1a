"""Two models that predict, each at times of its own (Wan 2.2 A14B): one module, which trains as one.

An adapter on it has weights for each model; copies, optimizer, checkpoints and gradients are those of one module.

With ``model.offload`` the frozen weights of the model that does not predict wait in the host's memory (``rest``). One
comes where the other was: with an adapter and a frozen base, where no update back-propagates through both at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.algorithms import find_algorithm
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.offload import Offloaded
from mmrl.models.description import Phase, Resting

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
        self._frozen: list[nn.Module] = []
        self._resting: Offloaded | None = None

    def rest(self, device: torch.device) -> None:
        """Keep the frozen weights of the models in the host's memory from now on, but of those that compute on
        ``device``. The others are moved there."""
        self._frozen = [_frozen(model) for model in self.models]
        self._resting = Offloaded(self._frozen, device)
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(device)

    def using(self, *which: int) -> AbstractContextManager[None]:
        """Have these of the two models on the device, the other only where it has to be."""
        if self._resting is None:
            return nullcontext()
        return self._resting.using(*(self._frozen[n] for n in which))

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
            with self.using(not high[0]):
                return self.models[not high[0]](*given, return_dict=return_dict)
        rows = [[n for n, is_high in enumerate(high) if is_high == wanted] for wanted in (True, False)]
        with self.using(0, 1):
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


def _frozen(model: nn.Module) -> nn.Module:
    """A module with the parameters of ``model`` that do not train and with its buffers, as the same objects."""
    held = nn.Module()
    for n, parameter in enumerate(p for p in model.parameters() if not p.requires_grad):
        held.register_parameter(f"p{n}", parameter)
    for n, buffer in enumerate(model.buffers()):
        held.register_buffer(f"b{n}", buffer)
    return held


def awake(model: nn.Module) -> AbstractContextManager[None]:
    """Have all of ``model`` on the device."""
    return model.using(0, 1) if isinstance(model, Experts) else nullcontext()


def resting(recipe: Recipe, model: nn.Module) -> Resting | None:
    """What of ``model`` waits in the host's memory where ``model.offload`` is on; None where nothing does."""
    kind = recipe.algorithm.kind
    if not isinstance(model, Experts) or not recipe.model.offload or recipe.model.lora is None:
        return None
    if recipe.model.quantize is not None or kind not in ("policy_gradient", "forward_process"):
        return None
    sizes = [sum(t.nbytes for t in (*one.parameters(), *one.buffers())) for one in map(_frozen, model.models)]
    one_time = recipe.train.at_once == 1 if kind == "policy_gradient" else recipe.train.micro_batch_size == 1
    phases: list[Phase] = ["encode", "sample", "decode", "optimizer", *(["train"] if one_time else [])]
    return Resting(min(sizes), sum(sizes), frozenset(phases))


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
