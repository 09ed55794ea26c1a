"""The protocols of the four kinds of objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from mmrl.algorithms.advantages import Advantages, AllSum, alone, group_advantages
from mmrl.config.algorithm_settings import Kind, Spread

__all__ = ["EqualEntries", "GraphSteps", "Kind", "Loss", "Objective", "Scored"]


@dataclass(frozen=True)
class Loss:
    """``value``: a scalar with its graph, already divided by the update's global denominator.

    ``sums``: detached sums over this slice's entries, each divided by the same denominator when logged, and
    ``maxima``: detached maxima.
    """

    value: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@dataclass(frozen=True)
class Scored:
    """A controller's whole batch as advantages see it: ``B`` samples of up to ``T`` response tokens (diffusion: no
    token fields).

    The tensors that the objective ``prepares`` are present. Positions outside ``mask`` may hold any finite number.
    """

    rewards: Tensor
    """``[B]`` float64, NaN where the sample was dropped."""
    groups: Tensor
    """``[B]`` int64, the group of each row."""
    mask: Tensor | None = None
    """``[B, T]`` float32, 1 on response tokens."""
    token_rewards: Tensor | None = None
    """``[B, T]`` float64, rewards of single tokens (CAPO: -1 in a wrong step); None if there are none."""
    log_probs: Tensor | None = None
    """``[B, T]`` of the policy before this step's updates."""
    reference_log_probs: Tensor | None = None
    """``[B, T]`` of the reference."""
    values: Tensor | None = None
    """``[B, T]`` of the critic before this step's updates."""
    all_sum: AllSum = alone
    """Sums over all controllers, for statistics of the whole batch."""
    step_rewards: Tensor | None = None
    """``[B, T]`` float64, of the results predicted before each recorded denoising step, NaN where one is missing; None
    unless the algorithm ``scores_steps``."""
    parts: Sequence[tuple[float, Tensor]] = ()
    """The weight and the values ``[B]`` float64 of each reward, NaN where ``rewards`` is; empty if one advantage is
    computed from their sum."""


class EqualEntries:
    """Base class: every entry (denoising step, noise level) of every sample counts the same."""

    advantage_std: Spread = "batch"

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, self.advantage_std, scored.all_sum)

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        return float((weights.double() * lengths).sum())


class OfflineObjective:
    """Base class: trains on given pairs, responses or pictures, of which each counts the same."""

    kind: Literal["offline"] = "offline"
    entries: int | None = None

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        return float(weights.double().sum())


@dataclass(frozen=True)
class GraphSteps:
    """Which sampling steps of a pathwise objective carry a graph: ``first`` to ``last``, counted from 0.

    At ``last`` the clean picture is predicted from the state, as the final step always does; later steps are skipped.
    ``renoised``: how many times that picture, detached, is noised to the level of ``last`` again and predicted anew.
    ``jumps``: no step carries a graph. For each pair of levels the picture is noised to the first one with the noise it
    was sampled from, moved to the second by one prediction with a graph, and recovered from there by the known noise.
    """

    first: int
    last: int
    renoised: int = 0
    jumps: tuple[tuple[float, float], ...] = ()


class _Objective(Protocol):
    """What every objective must have: a pure function from recomputed tensors to a loss."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the tensors that recomputation must return."""
        ...

    @property
    def entries(self) -> int | None:
        """Entries of a sample (noise levels, actions) that an update uses; None takes all the pipeline has."""
        ...

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """This controller's share of an update's global denominator.

        ``weights`` ``[B]``, 1 for rows that count and 0 for those left out; ``lengths`` ``[B]``, the entries of each
        row (actions, noise levels or response tokens). The sum over controllers is the ``total`` of ``loss``.
        """
        ...

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: recomputed under the current weights; ``old``: what sampling recorded; ``total``: the
        ``loss_denominator`` of the whole optimizer step over all controllers. The losses of the slices add up."""
        ...


class PolicyGradient(_Objective, Protocol):
    """Compares log-probs of recorded actions (denoising steps or tokens) with those of the policy that sampled them."""

    kind: Literal["policy_gradient"]

    @property
    def prepares(self) -> frozenset[str]:
        """Those of ``log_probs``, ``reference_log_probs`` and ``values`` that ``advantages`` reads. They are recomputed
        for the whole batch before the updates."""
        ...

    def advantages(self, scored: Scored) -> Advantages:
        """The advantage of each sample, or of each of its tokens."""
        ...


@runtime_checkable
class KeepsCopies(Protocol):
    """An objective that keeps copies of the weights: each of a forward process, and others where they say so."""

    @property
    def copies(self) -> Mapping[str, Callable[[int], float]]:
        """Their names, and for each the decay of its moving average after step ``n``."""
        ...


class ForwardProcess(_Objective, KeepsCopies, Protocol):
    """Noises the clean samples afresh and matches velocities, without log-probs."""

    kind: Literal["forward_process"]

    @property
    def shares_noise(self) -> bool:
        """Whether the samples of a group get the same noise."""
        ...

    def samples_with(self, step: int) -> str:
        """The copy of the weights that samples in training step ``step``: ``"current"``, or one of ``copies``."""
        ...

    def advantages(self, scored: Scored) -> Advantages:
        """The advantage of each sample."""
        ...


class Pathwise(_Objective, Protocol):
    """Back-propagates differentiable rewards through sampling steps."""

    kind: Literal["pathwise"]

    def graph_steps(self, steps: int, draw: float) -> GraphSteps:
        """Which of ``steps`` sampling steps carry a graph. ``draw``: the training step's uniform random number in
        [0, 1); 0 needs the most memory."""
        ...

    def phrases(self, step: int) -> Sequence[str]:
        """The phrases to put before a picture's prompt for the reward, which is computed once with each; empty takes
        the prompt itself."""
        ...


class Offline(_Objective, Protocol):
    """Trains on given pairs or responses, without sampling."""

    kind: Literal["offline"]


@runtime_checkable
class ComparesBatch(Offline, Protocol):
    """An offline objective whose loss reads a statistic of all responses of a step."""

    @property
    def prepares(self) -> frozenset[str]:
        """The tensors that are recomputed for the statistic before the updates, without a graph."""
        ...

    def of_batch(self, columns: Mapping[str, Tensor], weights: Tensor, all_sum: AllSum) -> dict[str, Tensor]:
        """Tensors ``[B]`` to add to the ``old`` of ``loss``, from ``columns`` ``[B]`` and ``weights`` ``[B]`` of this
        controller; ``all_sum`` sums over all controllers."""
        ...


Objective = PolicyGradient | ForwardProcess | Pathwise | Offline
PROTOCOLS: Mapping[Kind, type] = {
    "policy_gradient": PolicyGradient,
    "forward_process": ForwardProcess,
    "pathwise": Pathwise,
    "offline": Offline,
}


def lacking(objective: Objective) -> list[str]:
    """The members of its kind's protocol that ``objective`` lacks."""
    bases = [base for base in PROTOCOLS[objective.kind].__mro__ if base.__module__ == __name__]
    names = {name for base in bases for name in (*vars(base), *base.__annotations__) if not name.startswith("_")}
    return sorted(name for name in names if not hasattr(objective, name))


def copies_of(objective: Objective) -> Mapping[str, Callable[[int], float]]:
    """The copies of the weights that ``objective`` keeps, and the decay of each after step ``n``."""
    return objective.copies if isinstance(objective, KeepsCopies) else {}


def sampler(objective: Objective, step: int) -> str:
    """The copy of the weights that samples in training step ``step``; ``"current"``: the trained weights."""
    return objective.samples_with(step) if objective.kind == "forward_process" else "current"


def compares_batch(objective: Objective) -> TypeGuard[ComparesBatch]:
    """Whether the loss of an offline objective reads a statistic of all responses of a step."""
    return objective.kind == "offline" and isinstance(objective, ComparesBatch)


def prepared_by(objective: Objective) -> frozenset[str]:
    """The tensors that ``objective`` needs recomputed for the whole batch before the updates."""
    return objective.prepares if objective.kind == "policy_gradient" else frozenset()


def advantages_of(objective: Objective) -> Callable[[Scored], Advantages]:
    """The objective's ``advantages``. Raises ``TypeError`` for a kind that has none."""
    if objective.kind == "policy_gradient" or objective.kind == "forward_process":
        return objective.advantages
    raise TypeError(f"{type(objective).__module__} is {objective.kind}: it has no advantages")
