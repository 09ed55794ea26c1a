"""Does ``mmrl plan`` tell the truth about time? The 40 pairs of ``benchmarks/data/plan_pairs.yaml``: ten CPU recipes at
four sizes each. For each: what this machine's plan predicts, what the warm steps of a run took, and whether that is
inside the predicted interval.

    mmrl doctor --calibrate
    python benchmarks/plan_pairs.py --json benchmarks/results/plan_pairs.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from mmrl.config.loader import LoadedRecipe, load_recipe
from mmrl.core.quiet import be_quiet
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.logging.environment import environment
from mmrl.planner.estimate import Estimate
from mmrl.planner.plan import plan

PAIRS = Path(__file__).parent / "data" / "plan_pairs.yaml"


@dataclass(frozen=True)
class Pair:
    """A recipe at a size."""

    recipe: str
    size: Mapping[str, Any]

    def overrides(self, scratch: Path) -> list[str]:
        """The recipe's overrides; a wider model is made in ``scratch``."""
        changes = {k: v for k, v in self.size.items() if k != "width"}
        if "width" in self.size:
            shipped = load_recipe([self.recipe])
            folder = Path(shipped.recipe.model.path)
            changes["model.path"] = wider(folder, self.size["width"], scratch / f"{folder.name}-{self.size['width']}")
        return [f"{key}={value}" for key, value in changes.items()]

    def loaded(self, scratch: Path) -> LoadedRecipe:
        return load_recipe([self.recipe], self.overrides(scratch))

    def __str__(self) -> str:
        return " ".join([self.recipe, *(f"{k.rpartition('.')[2]}={v}" for k, v in self.size.items())])


def pairs() -> Iterator[Pair]:
    """The list, as it was written before anything was calibrated."""
    for one in yaml.safe_load(PAIRS.read_text()):
        yield from (Pair(one["recipe"], size) for size in one["sizes"])


def wider(folder: Path, times: int, out: Path) -> Path:
    """A copy of the checkpoint in ``folder`` whose policy is so many ``times`` as wide, with random weights."""
    if out.exists():
        return out
    made = out.with_suffix(".part")
    shutil.copytree(folder, made, dirs_exist_ok=True)
    if (folder / "transformer").is_dir():
        import diffusers

        kind = "SD3Transformer2DModel" if "sd3" in folder.name else "WanTransformer3DModel"
        config = getattr(diffusers, kind).load_config(made / "transformer")
        grown = {
            k: config[k] * times for k in ("num_attention_heads", "caption_projection_dim", "ffn_dim") if k in config
        }
        getattr(diffusers, kind).from_config({**config, **grown}).save_pretrained(made / "transformer")
    else:
        allow_cpu_only()  # before transformers imports torchvision
        import transformers

        config = transformers.AutoConfig.from_pretrained(made)
        text = getattr(config, "text_config", config)
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(text, key, getattr(text, key) * times)
        if text is not config:
            config.vision_config.out_hidden_size *= times
        getattr(transformers, config.architectures[0])(config).save_pretrained(made)
    return made.rename(out)


@dataclass(frozen=True)
class Result:
    """A pair's planned interval and its measured seconds of a warm step, by the ``clock``."""

    pair: str
    low: float
    high: float
    seconds: float
    measured: Mapping[str, float]
    """What ``measured`` returned."""
    planned: Mapping[str, float]
    """The planned seconds by phase."""

    @property
    def inside(self) -> bool:
        return self.low <= self.seconds <= self.high

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.seconds / math.sqrt(self.low * self.high)


def planned(pair: Pair, scratch: Path) -> Estimate:
    """The plan's estimate of a step."""
    made = plan(pair.loaded(scratch))
    if made.time is None:
        raise SystemExit(f"{pair}: no time is planned: {made.problems or made.notes}")
    return made.time


def measured(pair: Pair, scratch: Path) -> dict[str, float]:
    """Train a pair for six steps in a process of its own. The medians of the last five steps: ``wall`` seconds, ``cpu``
    seconds of the process, which neighbours disturb less (with one thread), and the wall seconds of each phase."""
    out = scratch / "run"
    more = ["train.steps=6", "eval.every=null", "checkpoint.every=1000"]
    words = [sys.executable, "-m", "mmrl", "train", pair.recipe, *pair.overrides(scratch), *more]
    done = subprocess.run([*words, "--overwrite", "--out", str(out)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{pair} failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    spent = [b["perf/cpu_seconds"] - a["perf/cpu_seconds"] for a, b in itertools.pairwise(rows)]
    found = {"wall": statistics.median(row["time/step"] for row in rows[1:]), "cpu": statistics.median(spent)}
    return found | {k: statistics.median(row.get(f"time/{k}", 0.0) for row in rows[1:]) for k in _PHASES}


_PHASES = ("encode", "sample", "decode", "reward", "prepare", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what a step's seconds are of")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of pairs, from 1")
    parser.add_argument("--json", type=Path, help="write every figure here, after each pair")
    parser.add_argument("--measured", type=Path, help="take what was measured from such a file, and plan anew")
    arguments = parser.parse_args()
    be_quiet()
    known = {}
    if arguments.measured:
        known = {one["pair"]: one["measured"] for one in json.loads(arguments.measured.read_text())["pairs"]}
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, pair in enumerate(pairs(), 1):
            if arguments.only and number not in arguments.only:
                continue
            took = known[str(pair)] if known else measured(pair, Path(scratch))
            estimate = planned(pair, Path(scratch))
            one = Result(str(pair), *estimate.interval, took[arguments.clock], took, estimate.seconds)
            found.append(one)
            mark = "inside" if one.inside else "OUTSIDE"
            print(
                f"{number:2} {mark:7} {one.low:7.3f} to {one.high:7.3f} s, measured {one.seconds:7.3f} "
                f"({one.ratio:.2f})  {one.pair}",
                flush=True,
            )
            if arguments.json:
                write(found, arguments)
    print(f"{sum(one.inside for one in found)} of {len(found)} inside")


def write(found: Sequence[Result], arguments: argparse.Namespace) -> None:
    rows = [{**asdict(one), "inside": one.inside, "ratio": one.ratio} for one in found]
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "clock": arguments.clock}
    result |= {"measured": str(arguments.measured or "here, now"), "environment": environment()}
    result |= {"inside": sum(one.inside for one in found), "pairs": rows}
    arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
