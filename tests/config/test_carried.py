"""The table of edits that tests carry out is whole."""

from pathlib import Path

from tests.support.carried import named
from tests.support.carried_table import ADVICE, BY_HAND, CARRIED, NOT_HERE, PLANNED, SEEING

ROOT = Path(__file__).resolve().parents[2]


def test_every_message_that_names_an_edit_is_carried_out_or_says_why_not():
    tables = (CARRIED, BY_HAND, ADVICE, NOT_HERE)
    known, listed = {*named()}, {name for table in tables for name in table}
    assert len(listed) == sum(map(len, tables))
    assert not known - listed, (
        "carry the edit out (tests/support/carried.py), or say in tests/support/carried_table.py why not"
    )
    assert not listed - known, "these messages are gone; take them out of tests/support/carried_table.py"
    assert all(NOT_HERE.values())
    assert all(ADVICE.values())


def test_every_test_of_the_table_is_there():
    for where in {*CARRIED.values(), *BY_HAND.values()} - {PLANNED, SEEING}:
        file, _, name = where.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), where
