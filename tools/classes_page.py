"""Make the page of diffusers' classes: ``python tools/classes_page.py > docs/reference/classes.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

HEAD = """# Classes of diffusers

What a recipe can do with a checkpoint of each pipeline class of diffusers {version}. `mmrl init --model PATH` and
`mmrl plan` say the same of a checkpoint. [Families](../families.md) says how to add one.
`python tools/classes_page.py` makes the page.

| class | pipeline | why not | nearest |
|---|---|---|---|
"""


def page() -> str:
    """The page, as Markdown."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    allow_cpu_only()
    import diffusers

    verdict: Any = mmrl.load("pipelines", "diffusion/classes").verdict
    yield HEAD.format(version=diffusers.__version__)
    for kind in sorted(name for name in dir(diffusers) if name.endswith("Pipeline")):
        if kind.endswith("ModularPipeline") or kind in ("DiffusionPipeline", "AutoPipeline"):
            continue  # put together from blocks, or of no model
        one = verdict(kind)
        families = ", ".join(f"`{name}`" for name in one.families)
        yield f"| `{kind}` | {families} | {one.why} | {f'`{one.nearest}`' if one.nearest else ''} |\n"


if __name__ == "__main__":
    print(page(), end="")
