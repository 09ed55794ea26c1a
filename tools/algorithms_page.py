"""Generate the page of all algorithms from their files: ``python tools/algorithms_page.py``.

Of a file's docstring the indented lines are the formula. Settings and defaults are those of the class that the
objective takes, without those that it has unchanged from a class that several share. A test compares the page with what
this prints. (``tools/recipe_page.py`` takes the paragraph that begins with ``Departs:``.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from mmrl.config import algorithm_settings
from mmrl.config.algorithms import Algorithm, shipped_algorithms
from mmrl.config.aliases import SETTINGS

KINDS = {
    "policy_gradient": "Policy gradients: actions with log-probs, denoising steps or tokens.",
    "forward_process": "Forward process: clean samples noised afresh; any solver samples.",
    "pathwise": "Pathwise: a differentiable reward, sampled and decoded inside the update.",
    "offline": "Offline: given pairs or responses, nothing is sampled.",
}
HEAD = """# Algorithms

`algorithm: {type: flow_grpo, clip_range: 1e-3}` in a recipe; the defaults are the settings of each one's paper.
[published.yaml](published.yaml) has what authors' scripts set, each number with its file and key. Every file is
`mmrl/algorithms/<type>.py`. `A` is the advantage, `v` the velocity, `r` a ratio of the policy to the one that
sampled, or a reward. The tables have each one's own settings; those that several share, such as `kl_coef`, are in the
[reference](reference/recipe.md#algorithm), where each one's section also says how it departs from its paper.

The divergence from a teacher (GKD, Flow-OPD) may be added to every policy gradient:
[teachers](reference/teachers.md).

Settings rather than algorithms:

| known as | settings |
|---|---|
"""
GUIDANCE = """Samples may be drawn with guidance (`sampling.guidance_scale`). A policy gradient replays the steps it
sampled, with the same guidance. A loss on the forward process takes the prediction with the prompt alone, as the
authors do; `algorithm.guidance` sets another scale for it, and `algorithm.guidance: sampling` takes that of sampling
(DiffusionNFT in Flow-Factory and verl-omni). FLUX.1, which is told its guidance, is told that of sampling everywhere.
"""
OWN = '''## An algorithm of your own

`algorithm: {type: path/to/file.py:Class}` takes a class in a file, which is looked up from the recipe's folder:

```python
# mine.py
import torch
from pydantic import PositiveFloat

from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import TokenSettings


class MineSettings(TokenSettings):
    """A soft gate in place of the clip."""

    tau: PositiveFloat = 1.0


class Mine(TokenObjective):
    def __init__(self, settings: MineSettings) -> None:
        super().__init__(settings)
        self.tau = settings.tau

    def advantages(self, scored):
        return group_advantages(scored.rewards, scored.groups, "group", scored.all_sum)

    def surrogate(self, log_probs, log_ratio, advantages, mask):
        ratio = log_ratio.exp()
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return Surrogate(-advantages * torch.sigmoid(self.tau * (ratio - 1)) * 4 / self.tau, ratio, none, none)
```

`mmrl check mine.py:Mine` checks it, and `algorithm: {type: mine.py:Mine, tau: 2.0, kl_coef: 0.0}` trains with it.

The settings are the keys of the section `algorithm`, as a pydantic model. The class follows one of four protocols of
`mmrl/algorithms/objective.py`; its `kind` says which, and the settings say the same. These bases do most of the work:

| kind | trains on | class | settings, in `mmrl/config/algorithm_settings.py` |
|---|---|---|---|
| `policy_gradient` | tokens | `policy_gradient.TokenObjective` | `TokenSettings`, `ClippedSettings`, `CriticSettings` |
| `policy_gradient` | denoising steps | `denoising.DenoisingObjective` | `StepSettings` |
| `forward_process` | clean pictures or clips | `forward_process.ForwardObjective` | `ForwardSettings` |
| `pathwise` | the reward's gradient | `pathwise.PathwiseObjective` | `PathwiseSettings` |
| `offline` | pairs of texts | `pairs.PairObjective` | `PairSettings` |
| `offline` | responses | none; `sft.SFT` shows one | `ResponseSettings` |
'''
TAIL = "The page is made by `python tools/algorithms_page.py`; a test compares the two.\n"


def page() -> str:
    """The whole page in Markdown."""
    known = [f"| {name} | {', '.join(f'`{one}`' for one in of)} |" for name, of in SETTINGS.items()]
    out = [HEAD + "\n".join(known), "", GUIDANCE, TAIL]
    for kind, text in KINDS.items():
        out += [f"## {text}", "", "| algorithm | formula | settings |", "|---|---|---|"]
        out += [row(one) for one in shipped_algorithms() if one.settings.kind == kind]
        out.append("")
    return "\n".join([*out, OWN])


def row(algorithm: Algorithm) -> str:
    """What it is, its formula, and settings with their defaults."""
    section, text = algorithm.settings, algorithm.module.__doc__ or ""
    formula = "<br>".join(f"`{_cell(line)}`" for line in formula_of(text))
    above = [base for base in section.__mro__[1:] if base.__module__ == algorithm_settings.__name__]
    known = {key: value for base in reversed(above) for key, value in defaults_of(base).items()}
    own = {key: value for key, value in defaults_of(section).items() if key not in known or known[key] != value}
    settings = _listed(own)
    name = f"[`{algorithm.name}`](reference/recipe.md#{algorithm.name})"
    cells = [f"{name}: {_cell((section.__doc__ or '').splitlines()[0])}", formula or "-", settings or "-"]
    return "| " + " | ".join(cells) + " |"


def defaults_of(section: type) -> dict[str, object]:
    """The keys of a class of settings, with their defaults."""
    return {key: field.default for key, field in getattr(section, "model_fields", {}).items() if key != "type"}


def formula_of(text: str) -> Iterator[str]:
    """The indented lines of a docstring."""
    return (line.strip() for line in text.splitlines() if line.startswith("    "))


def _listed(settings: dict[str, object]) -> str:
    return ", ".join(f"`{key}: {_written(value)}`" for key, value in settings.items())


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
