"""What computes: products of matrices by dtype, launches and bytes, counted as they run. Torch is imported late, for
the device that is pretended."""

from collections import Counter
from contextlib import contextmanager

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm", "linear", "matmul")
VIEWS = ("view", "t", "transpose", "_unsafe_view", "expand", "permute", "slice", "select", "unsqueeze", "squeeze")
VIEWS += ("detach", "alias", "split", "unbind", "as_strided", "split_with_sizes")


def is_product(operator):
    """Whether an operator of aten multiplies matrices."""
    return operator in PRODUCTS or operator.startswith("_scaled_dot_product")


def counter():
    """A mode that counts matrix products by dtype while it is not ``paused``, launches, and the bytes that they read
    and write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products, self.launches, self.bytes = Counter(), 0, 0
            self.paused = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name in VIEWS:
                return out
            given = [t for t in args if isinstance(t, torch.Tensor)]
            made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
            self.launches += 1
            self.bytes += sum(t.nbytes for t in (*given, *made))
            if is_product(name) and not self.paused:
                self.products[str(given[0].dtype).removeprefix("torch.")] += 1
            return out

    return Counting()


@contextmanager
def attention_in_half():
    """Attention that is taken apart would multiply in float32; a kernel of CUDA does not."""
    import torch

    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
