"""The sizes of a run's pictures: at which of them a prompt is sampled, and what of a family depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmrl.algorithms import sde
from mmrl.config.sampling import Size
from mmrl.core.errors import UserError, refuse
from mmrl.core.trajectory import Prompt, Slot
from mmrl.data.buckets import bucket_of

from .adapter import Adapter

_KEYS = "sampling.height and sampling.width"


class Sizes:
    """Final class. The sizes that ``adapter.sampling`` has. Raises ``UserError`` with all that the family cannot
    make."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.several = adapter, adapter.sampling.buckets is not None
        self.shapes: dict[Size, tuple[int, ...]] = {}
        refused = []
        for size in adapter.sampling.sizes:
            try:
                self.shapes[size] = adapter.latent_shape(*size)
            except UserError as error:
                refused.append(str(error))
        refuse(self._named(why) for why in dict.fromkeys(refused))

    def of(self, prompt: Prompt) -> Size:
        """Raises ``BadPromptError`` (``mmrl.data.buckets.bucket_of``)."""
        return bucket_of(prompt, self.adapter.sampling)

    def of_batch(self, slots: Sequence[Slot]) -> Size:
        """The one size of a batch. Raises ``ValueError`` where it has several."""
        found = {self.of(slot.prompt) for slot in slots}
        if len(found) != 1:
            raise ValueError(f"a batch is of one size, and this one has {', '.join(map(str, found)) or 'no prompt'}")
        return found.pop()

    def adapted(self, slots: Sequence[Slot]) -> Adapter:
        """The adapter for a batch, whose schedule and features may depend on the size."""
        return self.adapter.at(self.of_batch(slots)) if self.several else self.adapter

    def shape(self, slots: Sequence[Slot]) -> tuple[int, ...]:
        """The shape of one sample's latents."""
        return self.shapes[self.of_batch(slots) if self.several else self.adapter.sampling.size]

    def key(self, name: str, prompt: Prompt) -> str:
        """``name``, of features of ``prompt``, with the size that they are for. No text has the character 0."""
        return f"{name}\0{self.of(prompt)}" if self.several else name

    def refuse_noiseless(self, noisy: Iterable[int]) -> None:
        """Raises ``UserError`` where a step of ``noisy`` could carry no noise, at any size."""
        kind, noisy = self.adapter.sampling.sde.kind, list(noisy)
        for size in self.shapes:
            sigmas = self.adapter.at(size).schedule().sigmas
            steps = len(sigmas) - 1
            if bad := sde.noiseless(sigmas, kind, noisy):
                n = bad[0]
                edit = f"set sampling.window to {{size: {n}, last: {n}}}, or to less" if n else "raise sampling.steps"
                raise UserError(
                    f"sampling.sde: step {n} of {steps} ends at sigma {sigmas[n + 1].item():.3f}, where DDIM leaves no "
                    f"noise to learn from; {edit}"
                )

    def _named(self, why: str) -> str:
        return why.replace(_KEYS, "sampling.buckets", 1) if self.several else why
