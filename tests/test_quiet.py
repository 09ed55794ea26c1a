"""Warnings on the command line."""

import subprocess
import sys

SCRIPT = """
import warnings
from mmrl.datasets.fields import UnreadColumns
from mmrl.quiet import warn_plainly
warn_plainly()
for _ in range(2):
    with warnings.catch_warnings():  # makes Python forget what it has printed, as libraries do
        warnings.simplefilter("default")
        warnings.warn("t.csv: the columns shop are not used", UnreadColumns)
        warnings.warn("of a library")
"""


def test_a_warning_of_ours_is_printed_once_and_without_a_line_of_code():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [line for line in lines if "shop" in line] == ["warning: t.csv: the columns shop are not used"]
    assert sum("UserWarning: of a library" in line for line in lines) == 2
