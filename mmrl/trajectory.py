"""What flows through the loop: prompts, samples (what a reward sees) and trajectories (what an update sees).

Shapes: ``B`` samples (groups of ``K`` samples of one prompt, contiguous), ``T`` actions (denoising steps, or
tokens). Log-probs, masks and ratios are ``[B, T]`` whatever the modality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``meta`` carries what a reward must know of it (the truth of a scene, say); JSON values only."""

    id: str
    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slot:
    """A place in a step's batch. The same slot holds the same prompt and noise whoever runs it (DESIGN 4)."""

    step: int
    index: int
    attempt: int
    prompt: Prompt


@dataclass(frozen=True)
class SampleId:
    """Where a sample's randomness comes from, together with the run's seed and a purpose."""

    step: int
    slot: int
    attempt: int
    sample: int


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one trajectory: the prompt and the clean result.

    ``image`` is an RGB PIL image (of the size the pipeline made); ``tensor`` is the same as float32 ``[3, H, W]`` in
    [0, 1], and carries a graph when the reward was declared differentiable.
    """

    prompt: Prompt
    id: SampleId
    image: Image | None = None
    tensor: torch.Tensor | None = None
    text: str | None = None


@dataclass
class Trajectory:
    """What sampling left behind for a batch of ``B`` samples, on the controller that owns them.

    ``clean`` is the final result in the policy's own space (latents ``[B, C, H, W]`` float32). ``states`` are the
    states before and after each recorded action, ``[B, T + 1, ...]`` float32; ``actions`` ``[T]`` are their indices in
    the schedule; ``log_probs`` ``[B, T]``. Both are None where no action was recorded (forward-process objectives).
    ``features`` name what each row is conditioned on in the controller's feature store.
    """

    slots: list[Slot]
    ids: list[SampleId]
    clean: torch.Tensor
    features: list[str]
    states: torch.Tensor | None = None
    actions: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def join(parts: Sequence[Trajectory]) -> Trajectory:
        """The rows of several trajectories, which recorded the same actions, one after another."""

        def cat(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            import torch

            return None if tensors[0] is None else torch.cat([t for t in tensors if t is not None])

        clean = cat([p.clean for p in parts])
        assert clean is not None
        return replace(
            parts[0],
            slots=[s for p in parts for s in p.slots],
            ids=[i for p in parts for i in p.ids],
            features=[f for p in parts for f in p.features],
            clean=clean,
            states=cat([p.states for p in parts]),
            log_probs=cat([p.log_probs for p in parts]),
        )

    def rows(self, index: list[int]) -> Trajectory:
        """The trajectory of the rows ``index`` alone."""
        return replace(
            self,
            slots=[self.slots[i] for i in index],
            ids=[self.ids[i] for i in index],
            features=[self.features[i] for i in index],
            clean=self.clean[index],
            states=None if self.states is None else self.states[index],
            log_probs=None if self.log_probs is None else self.log_probs[index],
        )
