"""Export a trained diffusion model: a whole diffusers directory, or LoRA for diffusers and for peft.

Nothing here changes the policy in memory. LoRA traps that these files avoid (measured with diffusers 0.42, peft 0.21):
``load_lora_weights`` on peft's own files loads nothing and raises nothing; without the adapter's metadata it takes
``alpha = rank``; without the ``transformer.`` prefix it applies nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.engines.merging import merged_weights
from mmrl.report.card import Usage, What, public

from .adapter import Adapter
from .describe import tokenizer_of

if TYPE_CHECKING:  # slow to import
    from peft import PeftModel

_SAVE_LORA = "save_lora_weights"


def write_merged(adapter: Adapter, dtype: torch.dtype, out: Path) -> None:
    """Write the pipeline as a diffusers directory in ``dtype``, with what was trained merged in float32."""
    plain = {
        name: _copy(module, merged_weights(module), dtype) if name in (adapter.trains, "vae") else module
        for name, module in adapter.pipe.components.items()
    }
    kind = type(adapter.pipe)
    taken = inspect.signature(kind).parameters
    settings = {k: v for k, v in adapter.pipe.config.items() if k in taken and k not in plain}
    kind(**plain, **(settings | adapter.options)).save_pretrained(out)
    for path in out.rglob("*.json"):
        _forget_origin(path)


def write_lora(adapter: Adapter, policy: PeftModel, base: str, out: Path) -> None:
    """Write the adapter of ``policy`` (a ``PeftModel``) for ``PeftModel.from_pretrained`` and ``load_lora_weights``."""
    from peft.utils import get_peft_model_state_dict

    config = policy.peft_config["default"]
    config.base_model_name_or_path = base
    # save_embedding_layers: peft would ask the hub for the base model's vocabulary, which a transformer does not have
    policy.save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # peft's empty template
    state = get_peft_model_state_dict(policy, save_embedding_layers=False)
    layers = {key.removeprefix("base_model.model."): value.cpu() for key, value in state.items()}
    named = {"lora_layers": layers, "lora_adapter_metadata": config.to_dict()}
    save: Callable[..., None] = getattr(adapter.pipe, _SAVE_LORA)
    save(out, **{f"{adapter.trains}_{k}": v for k, v in named.items()})


def usage(adapter: Adapter, recipe: Recipe, what: What, folder: str, prompt: str) -> Usage:
    """Code that draws ``prompt`` with the model in ``folder``, as the recipe's evaluation does."""
    pipe, dtype, sampling = adapter.pipe, recipe.model.dtype, recipe.denoising
    encoders = [*adapter.encoders, *map(tokenizer_of, adapter.encoders)]
    absent = [f"{n}=None" for n in encoders if pipe.components.get(n, "") is None]
    given = [f"{name}={value!r}" for name, value in adapter.options.items()]
    options = ", ".join([f"torch_dtype=torch.{dtype}", *absent, *given])
    picture = "from PIL import Image\n" if adapter.edits else ""
    head = f"import torch\nfrom diffusers import DiffusionPipeline\n{picture}"
    size = {"num_inference_steps": recipe.eval.steps or sampling.steps, "height": sampling.height}
    arguments = size | {"width": sampling.width} | adapter.call()
    shown = "images" if adapter.makes == "image" else "frames"
    draw = (
        'pipe.to("cuda" if torch.cuda.is_available() else "cpu")\n'
        f"{adapter.makes} = pipe(\n    prompt={_quoted(prompt)},\n"
        + (f'    image=Image.open("picture.png").resize(({sampling.width}, {sampling.height})),\n' if picture else "")
        + "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
        + f"    generator=torch.Generator().manual_seed(0),\n).{shown}[0]\n"
    )
    source = folder if what == "merged" else public(recipe.model.path)
    start = f"pipe = DiffusionPipeline.from_pretrained({_quoted(source)}, {options})\n{adapter.prepare}"
    if what == "merged":
        code = {"With diffusers": f"{head}\n{start}{draw}"}
    else:
        code = {
            "With diffusers": f"{head}\n{start}pipe.load_lora_weights({_quoted(folder)})\n{draw}",
            "With peft": (
                f"{head}from peft import PeftModel\n\n{start}"
                f"pipe.{adapter.trains} = PeftModel.from_pretrained(pipe.{adapter.trains}, {_quoted(folder)})\n{draw}"
            ),
        }
    kind = type(pipe).__name__
    tags = [kind, "lora"] if what == "lora" else [kind]
    task = "image-to-image" if adapter.edits else f"text-to-{adapter.makes}"
    return Usage("diffusers", task, tags, code)


def _copy(module: Any, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A module of the same class and configuration with the weights ``state`` in ``dtype``; tensors that have it
    are not copied."""
    with torch.device("meta"):
        copy = type(module).from_config(module.config)
    cast = {k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    copy.load_state_dict(cast, assign=True)
    return copy.eval()


def _quoted(text: str) -> str:
    """A Python literal in double quotes (JSON's strings are Python's)."""
    return json.dumps(text, ensure_ascii=False)


def _forget_origin(path: Path) -> None:
    """Take the place the base model was loaded from out of a configuration: it is a path of this machine."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
