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
from safetensors.torch import save_file
from torch import Tensor, nn

from mmrl.config.adapters import SETTINGS
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.logging.card import Usage, What, public, quoted
from mmrl.models.lora import lora_layers, save_adapter
from mmrl.models.merging import merged_weights
from mmrl.models.text.base_model import peft_model

from .adapter import Adapter
from .saved_lora import convert

if TYPE_CHECKING:  # slow to import
    from peft import PeftModel

FILE = "lora.safetensors"
SECOND = "pytorch_lora_weights_2.safetensors"
"""The LoRA of the second of two models, beside diffusers' own file of the first."""
_SAVE_LORA = "save_lora_weights"


def write(adapter: Adapter, policy: nn.Module, recipe: Recipe, out: Path, what: What) -> None:
    """Write what is asked for of ``policy`` into ``out``."""
    if what == "lora":
        write_lora(adapter, peft_model(policy), public(recipe.model.path), out)
    elif what == "lora-file":
        write_lora_file(adapter, peft_model(policy), out)
    else:
        write_merged(adapter, getattr(torch, recipe.model.dtype), out)


def write_merged(adapter: Adapter, dtype: torch.dtype, out: Path) -> None:
    """Write the pipeline as a diffusers directory in ``dtype``, with what was trained merged in float32."""
    plain = {
        name: _copy(module, merged_weights(module), dtype) if name in (*adapter.trained(), "vae") else module
        for name, module in adapter.pipe.components.items()
    }
    kind = type(adapter.pipe)
    taken = inspect.signature(kind).parameters
    settings = {k: v for k, v in adapter.pipe.config.items() if k in taken and k not in plain}
    kind(**plain, **(settings | adapter.options)).save_pretrained(out)
    for path in out.rglob("*.json"):
        _forget_origin(path)


def write_lora(adapter: Adapter, policy: PeftModel, base: str, out: Path) -> None:
    """Write the adapter of ``policy`` (a ``PeftModel``) for ``PeftModel.from_pretrained`` and, where the family's class
    has it, ``load_lora_weights``."""
    from peft.utils import get_peft_model_state_dict

    save_adapter(policy, base, out)
    if not loads_lora(adapter):
        return
    state = get_peft_model_state_dict(policy, save_embedding_layers=False)
    layers = {key.removeprefix("base_model.model."): value.cpu() for key, value in state.items()}
    save: Callable[..., None] = getattr(adapter.pipe, _SAVE_LORA)
    for name in adapter.trained():
        own, settings, file = layers, policy.peft_config["default"].to_dict(), {}
        if adapter.also_trains:
            own = {key.removeprefix(f"{name}."): value for key, value in layers.items() if key.startswith(f"{name}.")}
            settings |= {"target_modules": sorted({key.partition(".lora_")[0] for key in own})}
            file = {"weight_name": SECOND} if name != adapter.trains else {}
        named = {"lora_layers": own, "lora_adapter_metadata": settings}
        save(out, **{f"{adapter.trains}_{k}": v for k, v in named.items()}, **file)


def loading_code(adapter: Adapter, folder: str) -> str:
    """Python that has a stock ``pipe`` load what ``write_lora`` wrote into ``folder``."""
    named = quoted(folder)
    second = f"pipe.load_lora_weights({named}, weight_name={quoted(SECOND)}, load_into_transformer_2=True)\n"
    return f"pipe.load_lora_weights({named})\n" + (second if adapter.also_trains else "")


def loads_lora(adapter: Adapter) -> bool:
    """Whether the family's class of diffusers has ``load_lora_weights``. Others (PixArt) take a LoRA by peft alone."""
    return hasattr(adapter.pipe, _SAVE_LORA)


def write_lora_file(adapter: Adapter, policy: PeftModel, out: Path) -> None:
    """Write the adapter of ``policy`` (a ``PeftModel``) as ``FILE`` in ``out``, for programs that take a single file.

    UNets: kohya's names (``lora_unet_..._to_q.lora_down.weight``), with ``alpha``. Transformers: diffusers' names
    (``transformer. ... .lora_A.weight``), which these programs know of Stable Diffusion 3 and FLUX.1. They take the
    scale for 1 there, so it is multiplied into the weights. Raises ``UserError`` for another family.
    """
    from diffusers.utils import convert_state_dict_to_kohya
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    if adapter.lora_file is None:
        raise UserError(
            f"--what lora-file: it is not known how other programs name the weights of a LoRA of {adapter.family}; use "
            "--what lora, which diffusers and peft load (the file is for Stable Diffusion 1, 2, XL, 3 and FLUX.1)"
        )
    config = policy.peft_config["default"]
    assert isinstance(config, LoraConfig)
    state = get_peft_model_state_dict(policy, save_embedding_layers=False)
    state = {key.removeprefix("base_model.model."): value.detach().cpu() for key, value in state.items()}
    if odd := next((key for key in state if not key.endswith((".lora_A.weight", ".lora_B.weight"))), None):
        raise UserError(f"--what lora-file: other programs have no name for {odd}; use --what lora")
    scales = {name: layer.scaling["default"] for name, layer in lora_layers(policy)}
    named = {f"{adapter.trains}.{key}": value for key, value in state.items()}
    about = {"format": "pt"}
    if adapter.lora_file == "kohya":
        alphas = {
            f"lora_unet_{n.replace('.', '_')}.alpha": s * len(state[f"{n}.lora_A.weight"]) for n, s in scales.items()
        }
        named = convert_state_dict_to_kohya(named)
        named = {key: torch.tensor(alphas[key]) if key.endswith(".alpha") else value for key, value in named.items()}
        about |= {"ss_network_module": "networks.lora", "ss_network_dim": str(config.r)}
        about |= {"ss_network_alpha": str(float(config.lora_alpha))}
        if lost := sorted({*state} - {*convert(adapter, named)[0]}):
            raise UserError(f"--what lora-file: diffusers cannot read {lost[0]} by kohya's names; use --what lora")
    else:
        named = {
            f"{adapter.trains}.{key}": value * scales[key.rpartition(".lora_B.")[0]] if ".lora_B." in key else value
            for key, value in state.items()
        }
        kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
        about[SETTINGS] = json.dumps({key: getattr(config, key) for key in kept})
    save_file({key: value.contiguous() for key, value in named.items()}, out / FILE, about)


def _steps(recipe: Recipe) -> str:
    """What the code that draws does not do as the recipe's evaluation."""
    if (recipe.eval.solver or recipe.denoising.solver) == "euler":
        return ""
    return "# Evaluated with DPM-Solver++ (2M) over these noise levels. Euler's steps, as below, need more of them.\n"


def usage(adapter: Adapter, recipe: Recipe, what: What, folder: str, prompt: str, negative: str | None) -> Usage:
    """Code that draws ``prompt`` with what was written to ``folder``, as the recipe's evaluation draws it; with a
    ``negative`` prompt, where one is given."""
    pipe, dtype, sampling = adapter.pipe, recipe.model.dtype, adapter.sampling
    encoders = [*adapter.encoders, *map(adapter.tokenizer_of, adapter.encoders)]
    absent = [f"{n}=None" for n in encoders if pipe.components.get(n, "") is None]
    given = [f"{name}={value!r}" for name, value in adapter.options.items()]
    options = ", ".join([f"torch_dtype=torch.{dtype}", *absent, *given])
    opens, source = adapter.opened()
    loader = adapter.pipeline if adapter.saved_as else "DiffusionPipeline"  # the checkpoint names another
    head = f"import torch\nfrom diffusers import {loader}\n{opens}"
    size = {"height": sampling.height, "width": sampling.width} if adapter.sized else {}
    asked = {"num_inference_steps": recipe.eval.steps or sampling.steps} | size | adapter.call()
    arguments = {name: repr(value) for name, value in asked.items()}
    arguments |= {} if negative is None else adapter.call_negative(negative)
    shown = "images" if adapter.makes == "image" else "frames"
    draw = (
        'pipe.to("cuda" if torch.cuda.is_available() else "cpu")\n'
        f"{adapter.makes} = pipe(\n    prompt={quoted(prompt)},\n"
        + (f"    {source},\n" if source else "")
        + "".join(f"    {name}={value},\n" for name, value in arguments.items())
        + f"    generator=torch.Generator().manual_seed(0),\n).{shown}[0]\n"
    )
    place = folder if what == "merged" else public(recipe.model.path)
    start = f"pipe = {loader}.from_pretrained({quoted(place)}, {options})\n{adapter.prepare}{_steps(recipe)}"
    if what == "merged":
        code = {"With diffusers": f"{head}\n{start}{draw}"}
    elif what == "lora-file":
        loads = f"pipe.load_lora_weights({quoted(folder)}, weight_name={quoted(FILE)})"
        code = {"With diffusers": f"{head}\n{start}{loads}\n{draw}"}
    else:
        loads = f"{head}\n{start}{loading_code(adapter, folder)}{draw}"
        code = {"With diffusers": loads} if loads_lora(adapter) else {}
        in_peft = f"pipe.{adapter.trains} = PeftModel.from_pretrained(pipe.{adapter.trains}, {quoted(folder)})\n"
        if not adapter.also_trains:  # peft's file is of both models, as they are here
            code |= {"With peft": f"{head}from peft import PeftModel\n\n{start}{in_peft}{draw}"}
    kind = type(pipe).__name__
    tags = [kind] if what == "merged" else [kind, "lora"]
    task = f"{'video' if adapter.clips else 'image' if adapter.edits else 'text'}-to-{adapter.makes}"
    return Usage("diffusers", task, tags, code)


def _copy(module: Any, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """A module of the same class and configuration with the weights ``state`` in ``dtype``; tensors that have it
    are not copied."""
    with torch.device("meta"):
        copy = type(module).from_config(module.config)
    cast = {k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    copy.load_state_dict(cast, assign=True)
    return copy.eval()


def _forget_origin(path: Path) -> None:
    """Take the place the base model was loaded from out of a configuration: it is a path of this machine."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
