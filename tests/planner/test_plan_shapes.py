"""The memory of the mode that a plan's fake tensors have: what it makes again is what torch makes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mmrl.planner import fake_shapes, fake_tensors
from mmrl.planner.fake_shapes import Shapes
from mmrl.planner.fake_tensors import KnownMasks, LiveBytes, fake

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "a new tensor": lambda x: x @ x.mT,
    "a view": lambda x: x[:, 1:].t(),
    "views": lambda x: x.split(2),
    "in place": lambda x: x.add_(1),
    "in place, of a view": lambda x: x[0].mul_(2),
    "detached": lambda x: x.detach(),
    "a whole number": lambda x: x.int() + 2,
    "a number with a point": lambda x: x.int() + 2.0,
    "true": lambda x: x.bool() + True,
    "a named tuple": lambda x: torch.native_layer_norm(x, [6], None, None, 1e-5),
    "a list of inputs": lambda x: torch.cat([x, x], 1),
    "lists in place": lambda x: torch._foreach_add_([x, x], 1),
    "with a real tensor": lambda x: x + torch.ones(6),
    "no storage of its own kind": lambda x: x.expand(3, 4, 6).to(torch.bfloat16),
}


def told(out: Any, x: Tensor) -> Any:
    """All that a plan could see of an output."""
    if isinstance(out, list | tuple):
        return [told(one, x) for one in out]
    if out is None:
        return None
    assert isinstance(out, FakeTensor)
    storage = out.untyped_storage()
    own = storage._cdata == x.untyped_storage()._cdata
    return out.shape, out.stride(), out.dtype, out.storage_offset(), out.device, storage.nbytes(), own, out is x


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_comes_out_of_memory_as_torch_makes_it(name: str) -> None:
    found = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), Shapes()):
        x = FakeTensor(mode, torch.empty(4, 6, device="meta"), torch.device("cpu"))
        with LiveBytes() as live:
            found += [(told(OPERATIONS[name](x), x), live.now) for _ in range(3)]
        del x
    assert found[:3] == found[3:]


def test_a_step_of_a_model_takes_the_same_memory_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> tuple[int, int]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))
        fake([model])
        with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(2, 5, 16)).float().square().mean().backward()
        return live.peak, live.now

    remembered = peak()
    assert remembered[0] > remembered[1] > 0
    monkeypatch.setattr(fake_tensors, "Shapes", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    assert remembered == peak()


def test_the_second_block_is_made_from_memory() -> None:
    mode = Shapes()
    x = FakeTensor(mode, torch.empty(4, 6, device="meta"), torch.device("cpu"))
    with LiveBytes():
        _ = x @ x.mT
        known = len(fake_shapes._KNOWN)
        _ = x @ x.mT
    assert len(fake_shapes._KNOWN) == known > 0


def test_another_plan_is_made_from_the_same_memory_which_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_shapes, "_KNOWN", {})
    monkeypatch.setattr(fake_shapes, "_MOST", 2)

    def product(side: int) -> tuple[torch.Size, int]:
        mode = Shapes()
        x = FakeTensor(mode, torch.empty(side, side, device="meta"), torch.device("cpu"))
        with LiveBytes():
            return (x @ x).shape, len(fake_shapes._KNOWN)

    assert [product(3), product(3), product(4), product(5)] == [
        ((n, n), k) for n, k in ((3, 1), (3, 1), (4, 2), (5, 1))
    ]


def test_a_large_mask_has_no_data_and_counts_as_if_it_had(monkeypatch):
    monkeypatch.setattr(fake_tensors, "_LARGE", 64)
    layer = nn.Linear(8, 8, device="meta")
    fake([layer])
    ids = torch.arange(16)
    with LiveBytes() as live, KnownMasks(live):
        hidden = layer(torch.ones(1, 16, 8))
        causal = (ids[:, None] >= ids)[None].expand(1, 16, 16)
        began = live.now
        bias = causal.to(torch.float64) + 0.0
        assert isinstance(bias, FakeTensor)
        assert live.now - began == 256 * 8
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=causal)
        assert isinstance(attended, FakeTensor)
        assert not isinstance(ids + 1, FakeTensor), "tokens have theirs"
        assert hidden[:, ids > 3].shape == (1, 12, 8)
