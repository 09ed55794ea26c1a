"""Seconds that vLLM takes to draw samples with a seed each, and without (``rollout.reproducible: false``).

    OMP_NUM_THREADS=1 python benchmarks/engine_seeds.py [RECIPE] [OVERRIDE ...] [--samples 256] [--repeats 9]

The arms take turns on one engine, the recipe's, and on its prompts; each sample has as many tokens. Ratios are taken
within a repeat. On a CPU vLLM draws row by row in both arms, where a GPU draws all rows at once without seeds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from stepping import spread

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.families.text.engine_sampling import settings_of
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.step.batch import samples_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="sums")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    recipe = load_recipe([arguments.recipe], ["rollout.engine=vllm", *arguments.overrides]).recipe
    run = build(recipe)
    pipeline, slots = run.pipeline, run.controller.slots(0, run.prompts, -(-arguments.samples // 8))
    assert isinstance(pipeline, LanguagePipeline)
    assert pipeline.engine is not None
    pipeline.encode(slots)
    drawn = samples_of(slots, 8)[: arguments.samples]
    asked = pipeline.requests([slot for slot, _ in drawn], [sample for _, sample in drawn], recipe.seed)
    requests = {True: asked, False: [replace(one, seed=None) for one in asked]}
    settings = replace(settings_of(recipe, 1.0, ()), max_new_tokens=arguments.tokens, min_new_tokens=arguments.tokens)
    took: dict[bool, list[float]] = {True: [], False: []}
    for n in range(1 + arguments.repeats):
        for arm in (True, False) if n % 2 else (False, True):
            began = time.perf_counter()
            pipeline.engine.generate(requests[arm], settings)
            if n:  # the first warms up
                took[arm].append(time.perf_counter() - began)
    run.pipeline.close()
    for arm, seconds in took.items():
        print(f"{'with' if arm else 'without'} seeds: {spread(seconds)} s for {len(asked)} samples")
    print(f"without / with: {spread([b / a for a, b in zip(took[True], took[False], strict=True)])}")


if __name__ == "__main__":
    main()
