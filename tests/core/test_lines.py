"""Files of JSON lines that only grow (``mmrl/core/lines.py``)."""

import pytest

from mmrl.core import lines


@pytest.mark.parametrize("whole", [b"", b"{}\n", b'{"a": 1}\n{"b": 2}\n'])
@pytest.mark.parametrize("torn", [b"", b"{", b'{"longer": "than a piece'])
@pytest.mark.parametrize("piece", [1, 4, 1 << 16])
def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path, monkeypatch, whole, torn, piece):
    monkeypatch.setattr(lines, "_PIECE", piece)
    (file := tmp_path / "a.jsonl").write_bytes(whole + torn)
    lines.Lines(file).append({"c": 3})
    assert file.read_bytes() == whole + b'{"c": 3}\n'
