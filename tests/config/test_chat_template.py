"""The file that ``model.chat_template`` names (``mmrl/config/chat_template.py``)."""

import os

import pytest

from mmrl.config.chat_template import with_template_read


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_opened(tmp_path, make):
    make(tmp_path / "template")
    given = {"model": {"chat_template": "template"}}
    assert with_template_read(tmp_path, given) == given


def test_a_file_is_read_and_bytes_that_are_no_text_are_left(tmp_path):
    (tmp_path / "good").write_text("{{ messages }}")
    (tmp_path / "bad").write_bytes(b"\xff{{")
    read = with_template_read(tmp_path, {"model": {"chat_template": "good"}})
    assert read == {"model": {"chat_template": "{{ messages }}"}}
    assert with_template_read(tmp_path, {"model": {"chat_template": "bad"}}) == {"model": {"chat_template": "bad"}}
