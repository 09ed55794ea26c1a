"""The table of edits that tests carry out is whole."""

from pathlib import Path

from tests.carried import named
from tests.carried_table import CARRIED, NOT_HERE, OPEN, PLANNED

ROOT = Path(__file__).resolve().parents[1]


def test_every_message_that_names_an_edit_is_carried_out_or_says_why_not():
    known, listed = {*named()}, {*CARRIED, *NOT_HERE, *OPEN}
    assert len(listed) == len(CARRIED) + len(NOT_HERE) + len(OPEN)
    assert not known - listed, "carry the edit out (tests/carried.py), or say in tests/carried_table.py why not"
    assert not listed - known, "these messages are gone; take them out of tests/carried_table.py"
    assert all(NOT_HERE.values())


def test_every_test_of_the_table_is_there():
    for where in {*CARRIED.values()} - {PLANNED}:
        file, _, name = where.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), where
