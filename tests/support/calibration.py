"""Shared by the tests of calibration and others."""

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.calibration import Calibration, Launches, Timing

allow_cpu_only()
EVEN = Calibration(
    "a CPU",
    "cpu",
    ("float32",),
    Launches(1e-6, 2e-6, 1e-5, 2e-5, 5e-6),
    (
        Timing("product", "float32", (1, 1024, 128, 128), 2.0 * 1024 * 128 * 128, 2.0 * 1024 * 128 * 128 / 1e9),
        Timing("attention", "float32", (4, 64, 64, 32), 1e6, 1e-3),
        Timing("attention_backward", "float32", (4, 64, 64, 32), 1e6, 1e-3),
        Timing("convolution", "float32", (64, 64), 1e6, 1e-3),
        Timing("convolution_backward", "float32", (64, 64), 1e6, 1e-3),
        Timing("add", "float32", (), 1e9, 1.0),
    ),
)
