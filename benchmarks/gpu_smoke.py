"""Checks for a GPU, in ten minutes: one after another, each in its own process.

    python benchmarks/gpu_smoke.py                          # a GPU, true sizes
    python benchmarks/gpu_smoke.py --device cpu --small     # the same checks at small sizes, where there is none
    python benchmarks/gpu_smoke.py --only 2 9 12

It needs torch, transformers, diffusers and peft; a check whose package is missing is skipped, and says which. A table
and a JSON file are written into ``benchmarks/results/gpu/``, with the date, the device and the command; on the CPU only
where ``--out`` names a folder. The exit code is 1 where a check failed.
"""

from __future__ import annotations

import sys

import checks
from checks import Check, Suite


def every_check() -> list[Check]:
    import limits_pictures as pictures
    import smoke_models as models
    import smoke_parts as parts
    import smoke_recipes as recipes
    import smoke_waits as waiting
    import smoke_weights as weights

    return [
        Check("mmrl doctor", recipes.doctor, 60),
        Check("shapes-lora: float32 as on the CPU", recipes.as_on_the_cpu, 120),
        Check("bfloat16, guidance, checkpointing: first ratio", recipes.first_ratio, 90),
        Check("the same, two steps a forward", recipes.two_steps_a_forward, 90),
        Check("the same, all weights", recipes.all_weights, 90),
        Check("NFT, DRaFT, DPO", recipes.other_objectives, 120),
        Check("sums: full, LoRA, PPO", recipes.text, 120),
        Check("scenes, scenes-judge: nothing dropped", recipes.vision_language, 120),
        Check("kill -9 and resume", recipes.killed_and_resumed, 180),
        Check("family contract", recipes.family_contract, 90),
        Check("FSDP2 on one rank, asynchronous save", recipes.fsdp, 120),
        Check("language model of 1.5B width", models.language_model, 180),
        Check("SD3.5-M slice of the recipe and its variants", pictures.as_shipped, 240),
        Check("Qwen-Image slice and offload", models.qwen_image_slice, 180),
        Check("waits of the host against the budgets", waiting.waits, 120),
        Check("vLLM: new weights in each step, asleep between", models.engine, 180),
        Check("the same with an adapter", models.engine_with_adapter, 180),
        Check("weights to another process, without a file", weights.weights_to_another_process, 90),
        Check("FSDP2 on one rank: rows, bfloat16 gathering", parts.shards, 120),
        Check("groups pruned midway, DGPO", parts.midway, 90),
    ]


SUITE = Suite("smoke", "gpu_smoke.py", every_check)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    return checks.main(SUITE, checks.parser(__doc__).parse_args(words), words)


if __name__ == "__main__":
    sys.exit(main())
