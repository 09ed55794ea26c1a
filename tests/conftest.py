"""One thread per process, set before torch is imported; no hub, no chatter."""

import os
from pathlib import Path

for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long is slow. Leave out what passed in another environment, where ``MMRL_TESTS_PASSED`` names the report
    of ``pytest -rp``. Tests of torchvision's own effects run in both."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
    if report := os.environ.get("MMRL_TESTS_PASSED"):
        lines = Path(report).read_text(encoding="utf-8", errors="replace").splitlines()
        passed = {line.removeprefix("PASSED ").strip() for line in lines if line.startswith("PASSED ")}
        again = [item for item in items if item.nodeid not in passed or "torchvision" in item.nodeid]
        config.hook.pytest_deselected(items=[item for item in items if item not in again])
        items[:] = again


settings.register_profile("unhurried", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("unhurried")
