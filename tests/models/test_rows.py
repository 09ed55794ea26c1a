"""Rows of text as flat columns: what ``padded``, ``rows`` and ``join`` give, against lists of lists."""

import random

import pytest
import torch

from mmrl.core.trajectory import DenoisingRows, Prompt, Rows, SampleId, Segment, Slot, TextRows, denoised, text_rows


def named(count):
    return [Slot(0, n, 0, Prompt(f"p{n}", "")) for n in range(count)], [SampleId(0, n, 0, 0) for n in range(count)]


def drawn(seed, count=5):
    """Rows of random lengths, of one turn; and their prompts, tokens, log-probs and steps as lists."""
    rng = random.Random(seed)
    asked = [[rng.randrange(99) for _ in range(rng.randint(1, 6))] for _ in range(count)]
    said = [[rng.randrange(1, 99) for _ in range(rng.randint(0, 7))] for _ in range(count)]
    log_probs = [[-rng.random() for _ in row] for row in said]
    dates = [[rng.randrange(9) for _ in row] for row in said]
    made = TextRows.answers(
        *named(count),
        [(f"key{n}", torch.tensor(row)) for n, row in enumerate(asked)],
        [torch.tensor(row, dtype=torch.long) for row in said],
        torch.tensor([rng.random() < 0.5 for _ in said]),
        [torch.tensor(row) for row in log_probs],
        [torch.tensor(row, dtype=torch.long) for row in dates],
    )
    return made, asked, said, log_probs, dates


def filled(rows, dtype):
    width = max(1, *map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=dtype)


def same(a, b):
    assert (a.slots, a.ids, a.segments) == (b.slots, b.ids, b.segments)
    for name in ("tokens", "action_mask", "log_probs", "drawn_at", "truncated"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("seed", range(20))
def test_columns_are_those_of_the_lists(seed):
    made, asked, said, log_probs, dates = drawn(seed)
    assert torch.equal(made.padded("tokens"), filled(said, torch.long))
    assert torch.equal(made.padded("log_probs"), filled(log_probs, torch.float32))
    assert torch.equal(made.padded("drawn_at"), filled(dates, torch.long))
    there = filled([[1] * len(row) for row in said], torch.bool)
    assert torch.equal(made.padded("action_mask"), there)
    assert torch.equal(made.inside, there)
    assert made.spoken() == said
    assert made.responses == made.written == [len(row) for row in said]
    assert made.prompts == [len(row) for row in asked]
    whole = [tokens.tolist() for tokens in made.tokens.split(made.lengths)]
    assert whole == [a + b for a, b in zip(asked, said, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_join_are_those_of_the_lists(seed):
    made, *_ = drawn(seed)
    order = random.Random(seed).sample(range(len(made)), len(made))
    same(Rows.join([made.rows([n]) for n in order]), made.rows(order))
    back = made.rows(order).rows([order.index(n) for n in range(len(made))])
    same(back, made)
    assert made.rows([2, 2]).spoken() == [made.spoken()[2]] * 2


def test_what_was_told_between_is_padded_and_not_counted():
    segments = [
        (
            Segment(0, 2, "prompt", "a"),
            Segment(2, 4, "written"),
            Segment(4, 7, "told", turn=1),
            Segment(7, 8, "written"),
        ),
        (Segment(0, 1, "prompt", "b"), Segment(1, 3, "written")),
    ]
    counted = [s.kind == "written" for of in segments for s in of for _ in range(s.stop - s.start)]
    rows = TextRows(*named(2), segments, torch.arange(11), torch.tensor(counted), torch.zeros(2, dtype=torch.bool))
    assert rows.padded("tokens").tolist() == [[2, 3, 4, 5, 6, 7], [9, 10, 0, 0, 0, 0]]
    assert rows.padded("action_mask").int().tolist() == [[1, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0]]
    assert (rows.responses, rows.written, rows.features) == ([6, 2], [3, 2], ["a", "b"])
    assert rows.rows([1, 0]).padded("tokens")[1].tolist() == [2, 3, 4, 5, 6, 7]


def test_what_rows_lack_is_named():
    slots, ids = named(1)
    with pytest.raises(TypeError, match="DenoisingRows have no tokens"):
        text_rows(DenoisingRows(slots, ids, torch.zeros(1, 2)))
    with pytest.raises(TypeError, match="Rows were not denoised"):
        denoised(Rows(slots, ids))
    given = TextRows.answers(slots, ids, [("a", torch.tensor([1]))], [torch.tensor([2])], torch.tensor([False]))
    with pytest.raises(TypeError, match="these rows of text have no log_probs"):
        given.padded("log_probs")
