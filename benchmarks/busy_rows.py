"""How many rows of sampling in the process are busy, counted on a CPU: in batches that end with their longest response,
and where a response takes the place of one that has ended.

    OMP_NUM_THREADS=1 python benchmarks/busy_rows.py                       # 640 samples, 32 rows at once, 5 a prompt
    OMP_NUM_THREADS=1 python benchmarks/busy_rows.py --rows 64 --samples 1280

The model is tiny; lengths are drawn as those of answers to GSM8K are distributed (lognormal, 211 tokens on average),
or a part of them with ``--shorter``. Both ways draw the same tokens, which is checked. ``busy`` is the share of row
forwards whose token is in a response; ``while others wait``: before the last response has begun.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from smoke_place import Place
from true_shapes import decoder, run_of_text

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId, Slot, TextRows
from mmrl.models.row_tables import Fixed, Growing, Reader

Counts = dict[str, int]


def counting(found: Counts) -> None:
    """Have ``found`` count what the tables of rows read from now on."""
    begin, read = Reader.begin, {kind: kind.read for kind in (Fixed, Growing)}

    def begun(self: Reader, rows: Any, width: int = 0) -> Any:
        made = begin(self, rows, width)
        found["prompts"] += len(made.tokens)
        found["prompt tokens"] += made.tokens.numel()
        return made

    Reader.begin = begun  # type: ignore[method-assign]
    for kind, inner in read.items():

        def counted(self: Any, inner: Any = inner) -> None:
            inner(self)
            found["steps"] += 1
            found["places"] += len(self.rows)
            if None not in self.rows:
                found["full steps"] += 1

        kind.read = counted  # type: ignore[method-assign]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--group", type=int, default=5)
    parser.add_argument("--shorter", type=int, default=1)
    given = parser.parse_args(words)
    allow_cpu_only()
    draw, prompts = random.Random(0), given.samples // given.group
    with tempfile.TemporaryDirectory() as folder:
        place = Place("cpu", True, Path(folder))
        lengths = [min(1024, int(draw.lognormvariate(5.25, 0.45))) // given.shorter + 1 for _ in range(given.samples)]
        records = [
            {
                "prompt": f"{n} " + "one " * max(1, int(draw.lognormvariate(4.2, 0.35)) // given.shorter // 4)
            }  # of four tokens
            for n in range(prompts)
        ]
        data = place.folder / "lengths.jsonl"
        data.write_text("".join(json.dumps(record | {"answer": "1"}) + "\n" for record in records))
        of = [f"data.{split}={{path: {data}, heldout: 0}}" for split in ("train", "heldout")]
        most = 1024 // given.shorter + 1
        sizes = [f"sampling.{name}={most}" for name in ("max_new_tokens", "min_new_tokens")]  # limits alone end a row
        sizes += [f"sampling.batch_size={given.rows}", "model.dtype=float32"]
        model = decoder(place)
        drawn = [told(way, model, place, of + sizes, lengths, given) for way in ("batches", "refilled")]
    assert drawn[0].spoken() == drawn[1].spoken(), "the two ways drew other tokens"
    said = [one.padded("log_probs") for one in drawn]
    gap = (said[0] - said[1]).abs().max()
    print(f"both drew the same {sum(drawn[0].responses):,} tokens; log-probs differ by {gap:.1e} at most")


def told(way: str, model: Path, place: Place, words: list[str], lengths: list[int], given: Any) -> TextRows:
    """What was drawn in one way, whose counts are printed."""
    context = run_of_text(place, model, *words, f"performance.compile={str(way == 'refilled').lower()}")
    pipeline = cast("Any", context.pipeline)
    chosen = [Slot(0, n, 0, context.prompts[n]) for n in range(len(lengths) // given.group)]
    pipeline.encode(chosen)
    rows = [(slot, SampleId(0, slot.index, 0, k)) for slot in chosen for k in range(given.group)]
    found: Counts = dict.fromkeys(("prompts", "prompt tokens", "steps", "places", "full steps"), 0)
    limited = [
        (Slot(0, slot.index, 0, replace(slot.prompt, max_new_tokens=n)), name)
        for (slot, name), n in zip(rows, lengths, strict=True)
    ]
    began = time.process_time()
    if way == "refilled":
        counting(found)
        drawn = pipeline.sample([s for s, _ in limited], [i for _, i in limited], (), 0)
    else:
        parts = []
        for first in range(0, len(limited), given.rows):
            part = limited[first : first + given.rows]
            parts.append(pipeline.sample([s for s, _ in part], [i for _, i in part], (), 0))
            found["steps"] += max(parts[-1].responses) - 1
            found["places"] += len(part) * (max(parts[-1].responses) - 1)
            found["prompts"] += len(part)
            found["prompt tokens"] += len(part) * max(parts[-1].prompts)
        drawn = TextRows.join(parts)
    seconds = time.process_time() - began
    useful = sum(drawn.responses) - len(drawn)  # the first tokens are drawn behind the prompts
    full = f", {found['full steps']:,} of them full" if way == "refilled" else ""
    print(
        f"{way}: {useful / found['places']:.1%} of rows busy in {found['steps']:,} steps{full}; "
        f"{found['prompts']:,} prompts with {found['prompt tokens']:,} tokens read; {seconds:.0f} s of CPU time"
    )
    return drawn


if __name__ == "__main__":
    main()
