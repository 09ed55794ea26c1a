"""The table of where the tests' time goes."""

import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "suite_times.py"
CASES = {"tests.test_a::test_x[1]": 2.0, "tests.test_a::test_x[2]": 3.0, "tests.test_b::test_y": 1.5}


def junit(path, cases):
    tests = ([*case.split("::"), str(spent)] for case, spent in cases.items())
    rows = "".join(f'<testcase classname="{c}" name="{n}" time="{t}"/>' for c, n, t in tests)
    path.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    return str(path)


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["suite_times.py", *words])
    runpy.run_path(str(TOOL), run_name="__main__")
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_seconds_are_summed_by_file_and_by_test(tmp_path, monkeypatch, capsys):
    lines = run(monkeypatch, capsys, junit(tmp_path / "now.xml", CASES))
    assert lines[1:4] == [["5.0", "test_a"], ["1.5", "test_b"], ["6.5", "all"]]
    assert ["5.0", "test_a::test_x"] in lines
    before = junit(tmp_path / "before.xml", CASES | {"tests.test_gone::test_z": 9.0})
    lines = run(monkeypatch, capsys, str(tmp_path / "now.xml"), "--before", before)
    assert lines[1:3] == [["9.0", "0.0", "test_gone"], ["5.0", "5.0", "test_a"]]
    assert lines[4] == ["15.5", "6.5", "all"]


def test_another_file_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.xml").write_text("no xml")
    with pytest.raises(SystemExit, match=r"x\.xml is no JUnit file .* pytest --junitxml"):
        run(monkeypatch, capsys, str(tmp_path / "x.xml"))
