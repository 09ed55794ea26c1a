"""Defaults of the environment for libraries that print much or spin; set them before torch is imported."""

import os
import sys
import warnings
from typing import TextIO

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


def warn_plainly() -> None:
    """Print warnings to a user without a line of code, and an equal one once in this process: planning and training
    look at the same data. Other warnings (of deprecated functions) stay as Python prints them."""
    usual, said = warnings.showwarning, set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None or not category.__module__.startswith(("mmrl.", "datasets.")):
            usual(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
