"""Folders and tables of strangers: no traceback, no hang, nothing from outside, and memory within the stated limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.data.limits import LIMITS, MIB
from tests.support import hostile_data
from tests.support.sweeps import Sweep

pytest.importorskip("datasets")
SCRIPT = Path(hostile_data.__file__)


@pytest.mark.slow
@pytest.mark.sweep("hostile folders and tables")
def test_hostile_folders_and_tables_are_refused_or_read_within_limits(tmp_path: Path, sweep: Sweep) -> None:
    count = sweep.size(40, 304)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "0", str(count), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        case = json.loads(line)
        small = case["mib"] <= 2 * LIMITS.memory // MIB
        sweep.check(case["how"] in ("read", "refused") and small, case)
    assert sweep.tried == count
    sweep.done()
