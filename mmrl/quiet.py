"""Defaults of the environment for libraries that print much or spin; set them before torch is imported."""

import os
import warnings

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin between operations starve their neighbours on a shared machine
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "KINETO_LOG_LEVEL": "5",  # torch's profiler tells of every start and stop
}
"""Defaults of the environment, set before torch and the model libraries are imported; what the user set stays."""


def be_quiet() -> None:
    """Set what the user's environment does not."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook without ipywidgets
