"""The data set ``episodes``."""

import pytest

import mmrl
from mmrl.core.errors import UserError


def test_each_episode_has_the_same_words_and_a_name_of_its_own():
    prompts = mmrl.load("datasets", "episodes").prompts
    train, held = prompts("train", text="Go.", size=3), prompts("heldout", text="Go.", size=2)
    assert [p.text for p in (*train, *held)] == ["Go."] * 5
    assert len({p.id for p in (*train, *held)}) == 5
    with pytest.raises(UserError, match="size is 0"):
        prompts("train", text="Go.", size=0)
    with pytest.raises(UserError, match="'train' and 'heldout'"):
        prompts("test", text="Go.")
