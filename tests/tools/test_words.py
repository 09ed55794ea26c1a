"""The words of the site, counted."""

import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "words.py"
PAGE = """# One heading

Text with a [link](page.md#part) - and `code`.

| key | what |
|---|---|
| `seed` | 7 |

    mmrl train sums = 1
"""


def run(monkeypatch, capsys, *given):
    monkeypatch.setattr(sys, "argv", ["words.py", *given])
    runpy.run_path(str(TOOL), run_name="__main__")
    return [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]


def test_text_code_and_tables_count_and_the_reference_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "reference").mkdir()
    (tmp_path / "a.md").write_text(PAGE)  # 2 + 6 + 4 + 4
    (tmp_path / "b.md").write_text("word " * 1000)
    (tmp_path / "reference" / "keys.md").write_text("a b c")
    assert run(monkeypatch, capsys, str(tmp_path)) == [
        ["1,000", "b.md"],
        ["16", "a.md"],
        ["3", "reference/keys.md"],
        ["1,016", "all without reference/"],
        ["3", "reference/"],
    ]


def test_a_folder_without_pages_is_said(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="has no page"):
        run(monkeypatch, capsys, str(tmp_path))
