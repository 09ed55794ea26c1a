"""What tests ask of rows that were sampled."""

from dataclasses import replace

from mmrl.core.trajectory import TextRows


def contents(rows):
    """The latents of each row, or its tokens behind the prompt."""
    return (
        [row[p:] for row, p in zip(rows.tokens.split(rows.lengths), rows.prompts, strict=True)]
        if isinstance(rows, TextRows)
        else list(rows.clean)
    )


def distance(log_probs, rows):
    """The largest distance of log-probs ``[R, T]`` from those that were recorded."""
    return ((log_probs - rows.padded("log_probs")) * rows.padded("action_mask")).abs().max()


def add_gap(rows, row, gap):
    """Add the first of ``gap`` to the log-probs of one row, in place."""
    behind = rows.log_probs.split(rows.lengths)[row][rows.prompts[row] :]
    behind += gap[: len(behind)]


def with_prompts_of(rows, other):
    """``rows`` whose prompts have the features of those of ``other``."""
    segments = [
        (one[0]._replace(features=two[0].features), *one[1:])
        for one, two in zip(rows.segments, other.segments, strict=True)
    ]
    return replace(rows, segments=segments)
