"""The proof of RL with an OCR model as the reward: held-out words read right before and after, by two readers.

    mmrl fetch rapidocr               # PP-OCR, the reward
    apt-get install tesseract-ocr     # the second reader, which RL does not see
    python benchmarks/proof_words.py --seeds 0 1 2 --jobs 1

Every run is resumable: what is finished is not done again. A run trains ``words-ocr``, then makes the same held-out
pictures with the base model and with the trained one, from the same noise, and prints for each reader the share of
words that are read right. Where PP-OCR's share rises and tesseract's does not, RL learned to fool PP-OCR, not to write.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from proof_shapes import every_seed, measured, of_seeds

from mmrl.rewards.judging.statistics import wilson

if TYPE_CHECKING:
    from PIL import Image

SAMPLES = 438
"""Each held-out word once."""
ENLARGED, MARGIN = 4, 30
"""How the second reader gets a picture: it reads drawn words of this size without an error then."""


def second_reader(picture: Image.Image) -> str:
    """What tesseract reads in ``picture`` as one line of capitals."""
    from PIL import Image

    large = picture.convert("L").resize((picture.width * ENLARGED, picture.height * ENLARGED), Image.Resampling.LANCZOS)
    page = Image.new("L", (large.width + 2 * MARGIN, large.height + 2 * MARGIN), large.getpixel((0, 0)))
    page.paste(large, (MARGIN, MARGIN))
    file = BytesIO()
    page.save(file, "png", dpi=(200, 200))
    letters = "tessedit_char_whitelist=ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    command = ["tesseract", "-", "-", "--psm", "7", "-c", letters]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(command, input=file.getvalue(), capture_output=True, check=True, env=environment)
    return "".join(done.stdout.decode().split())


def measure_here(out: Path, samples: int) -> None:
    """The work of ``measure``, in this process."""
    import mmrl
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.logging.metrics import read
    from mmrl.training.evaluation import Evaluator

    words = mmrl.load("datasets", "words")
    rows = read(out / "metrics.jsonl")
    result: dict[str, float] = {"steps": len(rows), "cpu_seconds": rows[-1]["perf/cpu_seconds"], "samples": samples}
    for when, which in (("before", "base"), ("after", "latest")):
        run, _, _ = restored(out, which)
        prompts = load_prompts(run.recipe, "heldout")
        trained = {prompt.meta["text"] for prompt in run.prompts}
        assert not any(prompt.meta["text"] in trained for prompt in prompts), "a held-out word was trained on"
        _, made, _ = Evaluator(run, prompts).score(samples)
        wanted = [str(sample.prompt.meta["text"]) for sample in made.samples]
        first = [scores["ocr/correct"] for scores in made.scores]
        pictures = [sample.image for sample in made.samples]
        second = [float(second_reader(p) == w) for p, w in zip(pictures, wanted, strict=True) if p is not None]
        drawn = [words.picture(sample.prompt, 7) for sample in made.samples]
        result |= {
            f"{when}/pp-ocr": mean(first),
            f"{when}/tesseract": mean(second),
            f"{when}/both": mean(a * b for a, b in zip(first, second, strict=True)),
            "drawn/tesseract": mean(float(second_reader(p) == w) for p, w in zip(drawn, wanted, strict=True)),
        }
    (out / "proof.json").write_text(json.dumps(result, indent=1))


def table(results: dict[int, dict[str, float]]) -> str:
    """A row per seed, and mean and standard deviation over seeds."""
    shown = [f"{when}/{name}" for name in ("pp-ocr", "tesseract", "both") for when in ("before", "after")]
    keys = ["cpu_seconds", "steps", *shown, "rise", "drawn/tesseract"]
    rows = {str(seed): r | {"rise": r["after/pp-ocr"] - r["before/pp-ocr"]} for seed, r in results.items()}
    counts = [(round(r["after/pp-ocr"] * r["samples"]), round(r["samples"])) for r in results.values()]
    limits = ", ".join("{:.3f} to {:.3f}".format(*wilson(*count)) for count in counts)
    return "\n".join([*of_seeds(rows, keys), f"\n95 % intervals of PP-OCR's share after RL, for each seed: {limits}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="words-ocr")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="held-out pictures, before and after")
    parser.add_argument("--out", type=Path, default=Path("runs/proof"))
    parser.add_argument("--measure", type=Path, help="only evaluate this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if shutil.which("tesseract") is None:
        sys.exit("tesseract is not installed; run: apt-get install tesseract-ocr")
    if arguments.measure:
        measure_here(arguments.measure, arguments.samples)
        return
    print(table(every_seed(arguments, lambda out: measured(__file__, out, arguments.samples))))


if __name__ == "__main__":
    main()
