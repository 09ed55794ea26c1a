"""What a process prints where it is to be quiet."""

import sys

from mmrl.core.notices import note, silenced, silent, tell
from mmrl.logging.progress import Progress


def test_a_quiet_process_prints_warnings_and_errors_alone(capsys):
    with silenced():
        note("note: a")
        tell("b")
        tell("warning: c")
        note("error: d")
        with Progress(2, "train", "steps") as progress:
            progress.advance(text="reward 1")
            progress.line("step 1")
            progress.line("warning: e")
        print("of the user's", file=sys.stderr)
    note("f")
    assert capsys.readouterr().err == "warning: c\nerror: d\nwarning: e\nof the user's\nf\n"


def test_quiet_lasts_as_long_as_one_block_that_asks_for_it():
    outer, inner = silenced(), silenced()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert silent()
    inner.__exit__(None, None, None)
    assert not silent()
    with silenced(quiet=False):
        assert not silent()
