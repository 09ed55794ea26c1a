"""Budgets of waits for a GPU: one table, for ``gpu_smoke.py`` and the tests of the pretended device, and the check
that counts waits by torch's profiler.

The waits of a denoising step, slice or token are the difference between a step and one of twice the length.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smoke_place import MissedError, Place, SkippedError

LIBRARIES = {
    "transformers/generation/utils.py": "generate asks after every token whether a response goes on",
    "transformers/masking_utils.py": "every forward asks whether its rows are padded",
    "diffusers/models/transformers/transformer_qwenimage.py": "every forward takes the length of its texts to the GPU",
    "diffusers/models/transformers/transformer_hunyuan_video15.py": "every forward picks tokens by masks",
}
"""Files of libraries that make the host wait again and again, and what for."""


@dataclass(frozen=True)
class Budget:
    """``ours``: waits of mmrl's own lines, by file; ``libraries``: of theirs. At most."""

    ours: Mapping[str, int] = field(default_factory=dict)
    libraries: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.ours.values()) + sum(self.libraries.values())


BUDGETS = {
    "a denoising step": Budget(),
    "a denoising step of Qwen-Image": Budget(
        libraries={"diffusers/models/transformers/transformer_qwenimage.py": 2}  # with guidance, two predictions
    ),
    "a denoising step of HunyuanVideo": Budget(  # twelve picks for each of four rows, and whether there is a picture
        libraries={"diffusers/models/transformers/transformer_hunyuan_video15.py": 49}
    ),
    "a denoising step of two models": Budget({"pipelines/diffusion/experts.py": 1}),
    "a slice of pictures": Budget(),
    "a slice of pictures with a reward's gradient": Budget({"mmrl/rewards/scoring.py": 1}),
    "a slice of text": Budget({"mmrl/placement/device_tasks.py": 1}, {"transformers/masking_utils.py": 2}),
    "a slice of text with a critic": Budget(
        {"mmrl/placement/device_tasks.py": 1}, {"transformers/masking_utils.py": 5}
    ),
    "a generated token": Budget({"mmrl/inference/slots.py": 1}),
    "a generated token of batches": Budget(  # of a family without fixed places, here with windows
        libraries={
            "transformers/generation/utils.py": 1,
            "transformers/masking_utils.py": 2,  # of padded prompts; before 5.19 of all prompts
        }
    ),
    "model.offload, a step": Budget(),
}


@dataclass(frozen=True)
class Case:
    """Two lengths of a step: ``many`` has ``times`` more of what is counted than ``few``."""

    recipe: str
    few: Sequence[str]
    many: Sequence[str]
    times: int
    both: Sequence[str] = ()


PICTURES = ["train.prompts_per_step=2", "train.group_size=4", "sampling.batch_size=8", "sampling.window={size: 2}"]
TEXTS = ["train.prompts_per_step=2", "train.group_size=4", "sampling.batch_size=8"]
MICRO = ["train.micro_batch_size=8"]
CASES = {
    "a denoising step": Case("shapes-lora", ["sampling.steps=4"], ["sampling.steps=8"], 4, [*PICTURES, *MICRO]),
    "a slice of pictures": Case("shapes-lora", MICRO, ["train.micro_batch_size=2"], 3 * 2, PICTURES),
    "model.offload, a step": Case(
        "shapes-lora", ["model.offload=false"], ["model.offload=true"], 1, [*PICTURES, "train.micro_batch_size=2"]
    ),
    "a generated token": Case(
        "sums", ["sampling.max_new_tokens=4"], ["sampling.max_new_tokens=8"], 4, [*TEXTS, *MICRO]
    ),
    "a slice of text": Case("sums", MICRO, ["train.micro_batch_size=2"], 3, [*TEXTS, "sampling.max_new_tokens=8"]),
}
"""What a GPU is asked for: with shipped recipes, of text with a model of random weights, whose responses do not end."""


def waits_of_a_step(recipe: str | Path, overrides: Sequence[str], counting: Callable[[], Any]) -> Any:
    """What ``counting()`` counted in the second step of a run; the first one makes what is made once."""
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    loaded = load_recipe([recipe], overrides)
    run = build(loaded.recipe)
    try:
        train_step(run, 0, Clock(run.compute.device))
        with counting() as found:
            train_step(run, 1, Clock(run.compute.device))
    finally:
        run.rewards.close()
    return found


@contextlib.contextmanager
def profiled() -> Iterator[dict[str, int]]:
    """Calls of CUDA that wait for the device, by name; filled in when the block ends."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        yield found
    waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    found |= {event.key: event.count for event in seen.key_averages() if event.key in waiting}


@contextlib.contextmanager
def located() -> Iterator[dict[str, int]]:
    """Waits by the line that waits, as torch warns of them: not those of a library in C++ or of an event."""
    import torch

    found: Counter[str] = Counter()

    def seen(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            frames = reversed(traceback.extract_stack()[:-1])  # the first outside torch
            where = next(f for f in frames if "packages/torch/" not in f.filename and "warnings.py" not in f.filename)
            found[f"{'/'.join(Path(where.filename).parts[-3:])}:{where.lineno}"] += 1

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


COUNTING: Callable[[], Any] | None = None
"""What counts in place of the profiler."""


def waits(place: Place) -> dict[str, Any]:
    """How often the host waits for the device, against the budgets."""
    from smoke_models import decoder
    from torch.profiler import ProfilerActivity, supported_activities

    if not place.gpu:
        raise SkippedError("the CPU computes at once: there is nothing to wait for")
    if COUNTING is None and ProfilerActivity.CUDA not in supported_activities():
        raise SkippedError("torch's profiler does not see this device")
    folder, _ = decoder(Place(place.device, True, place.folder))
    words = {"sums": [f"model.path={folder}"], "shapes-lora": []}
    figures: dict[str, Any] = {}
    known: dict[tuple[str, ...], Mapping[str, int]] = {}

    def counted(case: Case, size: Sequence[str], counting: Callable[[], Any]) -> Counter[str]:
        asked = (case.recipe, f"device={place.device}", "train.steps=2", *words[case.recipe], *case.both, *size)
        key = (counting.__name__, *asked)
        if key not in known:
            known[key] = waits_of_a_step(asked[0], asked[1:], counting)
        return Counter(known[key])

    over = []
    for name, case in CASES.items():
        few, many = (counted(case, size, COUNTING or profiled).total() for size in (case.few, case.many))
        each, most = (many - few) / case.times, BUDGETS[name].total
        figures[name] = f"{each:.3g} of {most}"
        if each > most:
            over.append(name)
            for counting in () if COUNTING else (profiled, located):
                few, many = (counted(case, size, counting) for size in (case.few, case.many))
                for where in (many - few) + (few - many):
                    figures[f"{name}, {where}"] = f"{few[where]} and {many[where]}"
    if over:
        raise MissedError(f"the host waits more often than the budget says: {', '.join(over)}", figures)
    return figures
