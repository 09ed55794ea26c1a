"""The divergence from a teacher over the whole vocabulary: closed forms in float64, and the gradient by differences."""

import pytest
import torch

from mmrl.models.text import divergence as module
from mmrl.models.text.divergence import Outputs, divergence

K, H, V, T = 5, 4, 7, 0.7


def drawn(*shape, seed):
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def closed_form(kind, student, teacher):
    p, q = ((logits / T).log_softmax(-1) for logits in (student, teacher))
    reverse, forward = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    if kind == "jensen":  # entropies, in place of the two divergences
        parts = [0.7 * p.exp() + 0.3 * q.exp(), p.exp(), q.exp()]
        middle, mine, theirs = (-(of * of.log()).sum(-1) for of in parts)
        return middle - 0.7 * mine - 0.3 * theirs
    return {"reverse": reverse, "forward": forward, "mixed": (reverse + forward) / 2}[kind]


@pytest.mark.parametrize("kind", ["reverse", "forward", "mixed", "jensen"])
@pytest.mark.parametrize("layers", [True, False])
def test_it_is_the_closed_form_and_its_gradient(kind, layers, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4 * V)  # two places at a time
    states, layer = drawn(K, H, seed=0), drawn(V, H, seed=1)
    other, head = drawn(K, 3, seed=2).detach(), drawn(V + 2, 3, seed=3).detach()  # the teacher's vocabulary is padded
    barred = torch.tensor([2])
    counted = [0, 1, 3, 4, 5, 6]

    def computed(states, layer):
        student = Outputs(states, layer) if layers else Outputs(states @ layer.T)
        return divergence(student, Outputs(other, head), kind, T, barred, alpha=0.3)

    expected = closed_form(kind, (states @ layer.T)[:, counted], (other @ head.T)[:, counted])
    assert torch.allclose(computed(states, layer), expected, atol=1e-12)
    assert torch.autograd.gradcheck(computed, (states, layer))


def test_equal_distributions_have_none_and_half_precision_is_summed_in_float32():
    states, layer = drawn(K, H, seed=0).bfloat16(), drawn(V, H, seed=1).bfloat16()
    found = divergence(Outputs(states, layer), Outputs(states, layer), "mixed", 1.0)
    assert found.dtype == torch.float32
    assert found.abs().max() == 0
