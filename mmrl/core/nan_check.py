"""Find numbers that are not finite. If all are finite, a check reads one number from the device.

Of tensors without data, with which a step is planned, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mmrl.core.errors import NotFiniteError
from mmrl.core.trajectory import SampleId


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """A scalar on the device: where it is finite all tensors are. It may overflow where they are; then ask ``first``.

    Of a ``DTensor`` this rank's part is looked at; integers are left out.
    """
    found = [_local(t.detach()) for t in tensors]
    return torch.nn.utils.get_total_norm([t for t in found if t.is_floating_point() and t.numel()])


def first(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite, with such a value of it: ``layer.weight (nan)``; else None.

    Waits for the device.
    """
    if torch.isfinite(norm(tensors.values())):
        return None
    for name, tensor in tensors.items():
        part = _local(tensor.detach())
        if part.is_floating_point() and not (finite := part.isfinite()).all():
            return f"{name} ({part[~finite][0].item()})"
    return None


def check_steps(finite: Sequence[Tensor], ids: Sequence[SampleId]) -> None:
    """``finite``: whether each sample's latents were, ``[B]`` bool after each denoising step.

    Raises ``NotFiniteError`` naming the first step and sample. Waits once for the device.
    """
    bad = ~torch.stack(list(finite))
    if _any(bad):
        step = int(bad.any(1).nonzero()[0])
        raise NotFiniteError(
            f"the latents after denoising step {step + 1} of {len(finite)} are not finite ({_of(bad[step], ids)})"
        )


def check_tokens(log_probs: Tensor, mask: Tensor, ids: Sequence[SampleId]) -> None:
    """``log_probs`` ``[B, T]`` of drawn tokens, which are not finite where the logits were not.

    Raises ``NotFiniteError`` naming the first token and sample. Waits once for the device.
    """
    bad = ~log_probs.isfinite() & (mask > 0)
    if _any(bad):
        token = int(bad.any(0).nonzero()[0])
        raise NotFiniteError(
            f"the logits that token {token + 1} of a response was drawn from are not finite ({_of(bad[:, token], ids)})"
        )


def check_features(features: Mapping[str, Tensor], prompt: str) -> None:
    """Raises ``NotFiniteError`` naming ``prompt`` where the text encoders made numbers of it that are not finite."""
    for name, made in features.items():
        if made.is_floating_point() and _any(~made.isfinite()):
            raise NotFiniteError(f"the features of the prompt {prompt} are not finite ({name})")


def check_encoders(encoders: Iterable[torch.nn.Module], prompt: str) -> None:
    """Raises ``NotFiniteError`` naming ``prompt``, the first that text encoders read, where a weight of them is not
    finite: torch's attention on a CPU answers zeros for scores that are all nan, and the features look right."""
    for encoder in encoders:
        weights = {name: weight for name, weight in encoder.named_parameters() if _is_real(weight)}
        if weights and first(weights) is not None:
            raise NotFiniteError(f"the features of the prompt {prompt} are wrong")


def check_given(latents: Mapping[str, Tensor], prompt: str) -> None:
    """Raises ``NotFiniteError`` naming ``prompt`` where the VAE made numbers of its pictures that are not finite."""
    for name, made in latents.items():
        if _any(~made.isfinite()):
            raise NotFiniteError(f"the encoded pictures of the prompt {prompt} are not finite ({name})")


def checked_pictures(pictures: Tensor, latents: Tensor, ids: Sequence[SampleId]) -> Tensor:
    """``pictures``, decoded from ``latents``; ``[n B, ...]`` each, ``n`` of every sample.

    Raises ``NotFiniteError`` naming which of the two are not finite. Waits once for the device.
    """
    if not _any(~pictures.detach().isfinite()):
        return pictures
    for values, what in ((latents, "the latents"), (pictures, "the pictures that the autoencoder decoded")):
        bad = ~values.detach().flatten(1).isfinite().all(1)
        if bad.any():
            raise NotFiniteError(f"{what} are not finite ({_of(bad.view(-1, len(ids)).any(0), ids)})")
    return pictures


def _of(bad: Tensor, ids: Sequence[SampleId]) -> str:
    """The first of the samples that ``bad`` ``[B]`` marks, and how many there are."""
    rows = bad.nonzero().flatten().tolist()
    sample = ids[rows[0]]
    attempt = f", attempt {sample.attempt}" if sample.attempt else ""
    return f"slot {sample.slot}{attempt}, sample {sample.sample}; {len(rows)} of {len(ids)} samples of a micro-batch"


def _any(bad: Tensor) -> bool:
    return _is_real(bad) and bool(bad.any())


def _is_real(tensor: Tensor) -> bool:
    return not hasattr(tensor, "fake_mode") and not tensor.is_meta


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
