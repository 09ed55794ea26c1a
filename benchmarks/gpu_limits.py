"""How far a GPU's limit is, in about ten minutes on an H100: the code that ``mmrl train RECIPE`` runs, each figure
beside the one that was written down before any was measured.

    python benchmarks/gpu_limits.py                          # a GPU, true sizes
    python benchmarks/gpu_limits.py --peer PATH              # with flow_grpo's functions, of a checkout at PATH
    python benchmarks/gpu_limits.py --only 6 7               # some checks: those that a run was stopped in, say
    python benchmarks/gpu_limits.py --device cpu --small     # the same checks at small sizes, where there is no GPU

Models have random weights of the recorded shapes, so no checkpoint is needed. Every check runs in a process of its own
with a limit of seconds, and measures first what a launch costs on this host. Table and JSON are written into
``benchmarks/results/gpu/`` after each check (on the CPU only where ``--out`` names a folder). liger-kernel and trl are
measured where they are installed. The exit code is 1 where a check failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import checks
from checks import Check, Suite
from smoke_place import Place


def every_check() -> list[Check]:
    import gpu_proof as proof
    import limits_cards as cards
    import limits_device as device
    import limits_goals as goals
    import limits_pictures as pictures
    import limits_text as text

    return [
        Check(
            "products, copies",
            device.products,
            60,
            {
                "bfloat16, TFLOP/s": (790, 790),
                "TF32, TFLOP/s": (380, 380),
                "float32, TFLOP/s": (52, 52),
                "copy, TB/s": (3.0, 3.0),
                "us a launch": (5, 20),
            },
        ),
        Check(
            "SD3.5-M slice, 16 rows and the reference",
            pictures.as_shipped,
            150,
            {
                "float32 adapters, ms": (590, 590),
                "the same, TF32, ms": (565, 565),
                "the same under autocast, ms": (505, 505),
                "the recipe, ms": (505, 505),
                "the recipe, not checkpointed, ms": (395, 395),
            },
        ),
        Check(
            "the same slice compiled, and as a graph",
            pictures.compiled,
            200,
            {"compiled, ms": (255, 255), "graph, ms": (240, 240)},
        ),
        Check("a slice by flow_grpo's functions", pictures.flow_grpo, 100, {"flow_grpo, ms": (370, 420)}),
        Check(
            "VAE, 8 pictures of 512 x 512",
            pictures.decode,
            60,
            {
                "the product's, ms": (50, 80),
                "float32, ms": (140, 140),
                "under autocast, ms": (65, 80),
                "the same, channels last, ms": (50, 80),
                "bfloat16 weights, channels last, ms": (45, 45),
            },
        ),
        Check(
            "decoding of 256 rows, 0.5B",
            text.decoding,
            150,
            {
                "ours, tokens/s": (6000, 8500),
                "ours with graphs, tokens/s": (60_000, 85_000),
                "static cache and graphs, tokens/s": (60_000, 85_000),
                "generate_batch, tokens/s": (30_000, 60_000),
            },
        ),
        Check(
            "update of 8,192 tokens, 0.5B",
            text.update,
            100,
            {"the recipe, ms": (75, 95), "with Liger's loss, ms": (63, 83)},
        ),
        Check("LoRA on a decoder of 3B width", text.lora, 100, {"float32 over the recipe": (1.7, 1.7)}),
        Check("TRL's step beside ours, 0.5B", text.trl, 120, {"TRL over ours": (0.8, 1.2)}),
        Check("proof: shapes-full, 48 x 24 samples", proof.shapes, 330, proof.PREDICTED),
        Check("whole rows in lines, 0.5B", text.packing, 100, {"lines over padded": (0.6, 0.8)}),
        Check("SD3.5-M, shares of the ceiling", goals.pictures, 200, goals.PICTURES),
        Check("1.5B, shares of the ceiling", goals.text, 150, goals.TEXT),
        Check("Z-Image with the layer for 12 GB", cards.twelve_gib, 100, cards.PEAK),
    ]


def beside(place: Place) -> dict[str, float]:
    from limits_device import launch

    return launch(place)


SUITE = Suite("limits", "gpu_limits.py", every_check, beside)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    parser = checks.parser(__doc__)
    parser.add_argument("--peer", metavar="PATH", type=Path, help="a checkout of flow_grpo with its fast scripts")
    options = parser.parse_args(words)
    return checks.main(SUITE, options, words, options.peer and options.peer.resolve())


if __name__ == "__main__":
    sys.exit(main())
