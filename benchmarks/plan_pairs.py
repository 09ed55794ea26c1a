"""Does ``mmrl plan`` tell the truth about time? The 40 pairs of ``benchmarks/data/plan_pairs.yaml``: ten CPU recipes at
four sizes each. For each: what this machine's plan predicts, what the warm steps of a run took, and whether that is
inside the predicted interval.

    mmrl doctor --calibrate
    python benchmarks/plan_pairs.py --json benchmarks/results/plan_pairs.json
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmrl.config.loader import LoadedRecipe, load_recipe

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
            folder = Path(shipped.resolve(shipped.recipe.model.path))
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
        import transformers

        config = transformers.AutoConfig.from_pretrained(made)
        text = getattr(config, "text_config", config)
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            setattr(text, key, getattr(text, key) * times)
        if text is not config:
            config.vision_config.out_hidden_size *= times
        getattr(transformers, config.architectures[0])(config).save_pretrained(made)
    return made.rename(out)


def main() -> None:
    import tempfile

    from mmrl.planner.plan import plan
    from mmrl.quiet import be_quiet

    be_quiet()

    with tempfile.TemporaryDirectory() as scratch:
        for pair in pairs():
            made = plan(pair.loaded(Path(scratch)))
            steps = made.recipe.train.steps
            print(f"{pair}: {made.lasts / steps:.3f} s", *made.problems, flush=True)


if __name__ == "__main__":
    main()
