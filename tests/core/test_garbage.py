"""Cycles are collected less often while a command loads, and as ever in training."""

import gc

import pytest

from mmrl.core.garbage import rarely_collected


@pytest.fixture
def usual():
    """Python's own thresholds; those of the tests are larger (tests/conftest.py)."""
    of_tests = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*of_tests)


def test_thresholds_are_as_before_after_an_error_too(usual):
    with pytest.raises(KeyError), rarely_collected():
        raise KeyError(gc.get_threshold())
    with rarely_collected():
        assert gc.get_threshold()[0] > 10 * usual[0]
    assert gc.get_threshold() == usual
