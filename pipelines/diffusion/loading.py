"""Build the pipeline that trains from a checkpoint, for every family: load it, place it, unfreeze what trains.

``torch.compile`` compiles the predicting modules in place: sampling, replay and back-propagation share them. Its
repeated blocks are compiled, and not the model around them: blocks of one kind share what was compiled for the first,
so that it takes no longer for many of them than for a few.

Where the model is about to be sharded, a rank reads its own rows of it. diffusers can read slices for tensor
parallelism, by a plan that each class has, and not rows of every parameter. Here the class builds the model without
memory, as diffusers does, and each rank reads its rows of the safetensors files (``mmrl.core.sharded_loading``).
Buffers are read whole.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, get_args

import diffusers  # its parts are loaded when they are first used
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.core import notices, sharded_loading
from mmrl.core.errors import UserError
from mmrl.core.hub_files import json_of, place_of
from mmrl.core.json_types import JsonObject, as_list, as_object, as_text
from mmrl.core.library_loading import check_tokens, refused, try_tokenizer
from mmrl.core.offload import apart
from mmrl.core.trajectory import Prompt
from mmrl.core.whole_weights import whole_weights
from mmrl.models.description import Beside, Component, Description, Phase
from mmrl.models.gradient_check import excuse
from mmrl.models.lora import adapted, new_adapter, open_adapter, saved_adapter
from mmrl.models.quantized import quantize

from .adapter import Adapter
from .caching import cache_of
from .decoding import lay
from .describe import empty_pipeline
from .experts import Experts, resting
from .flow import FlowPipeline
from .pictures import without_sources
from .prompt_lengths import PromptLengths, of_checkpoint, of_pipe, readers
from .refusals import check_classes, check_fields, check_path, check_scheduler, variant_of
from .saved_lora import check_experts, reader
from .served import Served
from .sizes import Sizes

_VARIANTS = 64
"""Kinds of blocks times shapes of a batch of one size times with or without gradient and adapter. Past it torch would
go on without compiling, and only where that is met."""
_CLIPS = 64
"""Of how many prompts with clips the plan opens the clips."""
_SERVER = "SGLang's diffusion server"
_FILE = "diffusion_pytorch_model.safetensors"
_LACKS = "its safetensors files have other weights than the model"


def entry_points(family: type[Adapter]) -> tuple[partial[FlowPipeline], partial[Description]]:
    """The functions ``build(recipe, path, device)`` and ``describe(recipe, path, architecture)`` of the module of
    ``family``."""
    return partial(build, family), partial(describe, family)


def build(family: type[Adapter], recipe: Recipe, path: str, device: torch.device) -> FlowPipeline:
    """Load the checkpoint at ``path`` and put what trains on ``device``.

    Frozen weights take ``model.dtype``; the VAE stays float32, for a half-precision VAE clips bright pictures. Raises
    ``UserError`` where the directory holds no model of the family or the picture size does not fit it.
    """
    pipe = _load(family, recipe, path)
    pipeline = _assemble(family, pipe, recipe, path, device)
    model = pipeline.adapter.model
    if isinstance(model, Experts) and apart(device) and resting(recipe, model):
        model.rest(device)
    else:
        sharded_loading.move(pipeline.policy, device)
    if not recipe.model.offload or device.type == "cpu":
        for module in (*pipeline.adapter.text_encoders, pipeline.adapter.vae):
            module.to(device)
    if recipe.performance.compile:
        compile_for_all(model, device, sizes=len(recipe.denoising.sizes))
    pipeline.lengths_of_prompts = PromptLengths(pipeline.negatives, recipe, of_pipe(pipeline.adapter))
    pipeline.cache = cache_of(pipeline.adapter, recipe)
    if not recipe.rollout.in_process:
        pipeline.served = Served(pipeline, recipe, path)
    return pipeline


def describe(family: type[Adapter], recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build`` would make, on the meta device: from the checkpoint's configuration files, or from
    the ``architecture`` file where they cannot be read. Raises ``UserError`` as ``build`` does."""
    pipe, source = empty_pipeline(family, path, architecture, _dtypes(family, recipe))
    pipeline = _assemble(family, pipe, recipe, path, torch.device("cpu"))
    adapter = pipeline.adapter
    encoders = [Component("text encoders", type(e).__name__, e, frozenset({"encode"})) for e in adapter.text_encoders]
    vae_for: frozenset[Phase] = frozenset({"sample", "decode"})  # it stays while the next micro-batch is sampled
    vae_for |= frozenset({"encode"} if adapter.edits else ())
    lengths = pipeline.lengths_of_prompts = PromptLengths(pipeline.negatives, recipe, of_checkpoint(adapter, path))

    def said_of(prompts: Sequence[Prompt]) -> list[str]:
        looked_at = prompts[:: max(1, len(prompts) // _CLIPS)] if adapter.clips else prompts
        lacking = (
            without_sources(looked_at, lambda one: _at(pipeline, one).check_sources(one), recipe.data.max_bad_fraction)
            if adapter.edits
            else []
        )
        return [*lacking, *lengths.said_of(prompts)]

    return Description(
        pipeline,
        [
            Component(
                "policy",
                type(adapter.model).__name__,
                pipeline.policy,
                frozenset(get_args(Phase)),
                resting(recipe, adapter.model),
            ),
            *encoders,
            Component("VAE", type(pipe.vae).__name__, adapter.vae, vae_for),
        ],
        source,
        pictures=adapter.pictures,
        by_rows=True,
        too_long=said_of,
        beside=() if recipe.rollout.in_process else [Beside("engine", f"{_SERVER}; its memory is not known to mmrl")],
        notes=[_steps_of(pipeline.trained_steps)] if pipeline.trained_steps else [],
    )


def _at(pipeline: FlowPipeline, prompt: Prompt) -> Adapter:
    """The adapter for a prompt, whose clip has to fill the size that is sampled."""
    adapter = pipeline.adapter
    return adapter.at(pipeline.sizes.of(prompt)) if adapter.clips else adapter


def _steps_of(counts: Mapping[str, int]) -> str:
    """How the steps that train are divided among two models."""
    said = ", ".join(f"{name} predicts in {count}" for name, count in counts.items())
    return f"of {sum(counts.values())} denoising steps that may train {said}"


def _assemble(
    family: type[Adapter], pipe: diffusers.DiffusionPipeline, recipe: Recipe, path: str, device: torch.device
) -> FlowPipeline:
    """From components, wherever they are, to the pipeline with what trains opened."""
    frames = recipe.denoising.frames
    if (frames is None) != (family.makes == "image"):
        edit = "say how many frames a clip has" if frames is None else "it makes pictures; remove it"
        raise UserError(f"sampling.frames: {family.family}: {edit}")

    if family.also_trains and (recipe.train.backend == "fsdp" or recipe.train.context_parallel > 1):
        key = "backend" if recipe.train.backend == "fsdp" else "context_parallel"
        raise UserError(
            f"train.{key}: {family.family} has two models, of which a row meets the one of its time, and ranks that "
            f"divide them would wait for each other; remove train.{key}"
        )

    def unusable(reason: str) -> str:
        said = f"model.path: {path} cannot be used as a {family.family}: {reason}"
        return f"{said}\n  Correct its configuration files, or download it again."

    with refused(unusable):
        check_fields(family, pipe)
        adapter = family(pipe, recipe.denoising, device)
        for module in (adapter.model, adapter.vae, *adapter.text_encoders):
            module.requires_grad_(False).eval()  # a fresh T5 is in training mode, with dropout
        Sizes(adapter)  # refuses what the family cannot make
    lay(adapter.vae, recipe, device)
    if recipe.model.gradient_checkpointing:
        adapter.model.enable_gradient_checkpointing()  # type: ignore[operator]
    _attend(adapter.model, recipe)
    if recipe.model.quantize:
        connectors = [getattr(pipe, name) for name in adapter.connects]  # small beside the encoders
        for module in (adapter.model, *(one for one in adapter.text_encoders if one not in connectors)):
            quantize(module, recipe.model.quantize)
    policy = _trainable(adapter, recipe)
    excuse(policy, adapter.weights_without_gradient())
    with refused(unusable):
        return FlowPipeline(adapter, policy, recipe, device)


def _attend(model: nn.Module, recipe: Recipe) -> None:
    """Raises ``UserError`` where the family's code leaves no choice. On the meta device attention is counted as a
    kernel that keeps no matrix of all pairs, whatever computes it."""
    from diffusers.models.attention_dispatch import attention_backend

    name = recipe.performance.attention
    if name is None:
        return
    if not any(hasattr(getattr(m, "processor", None), "_attention_backend") for m in model.modules()):
        raise UserError(
            f"performance.attention: {type(model).__name__} calls torch's attention itself, which takes the fastest "
            "kernel that it has, and no other back end of diffusers; remove it"
        )
    if not next(model.parameters()).is_meta:
        with attention_backend("native"):  # diffusers changes that of other models too; afterwards it is as it was
            model.set_attention_backend(name)  # type: ignore[operator]


def _dtypes(family: type[Adapter], recipe: Recipe) -> dict[str, torch.dtype]:
    frozen = getattr(torch, recipe.model.dtype)
    of_trained = frozen if recipe.model.lora else torch.float32
    decoders = dict.fromkeys(("vae", *family.sounds), torch.float32)
    return {"default": frozen} | decoders | dict.fromkeys(family.trained(), of_trained)


def _load(family: type[Adapter], recipe: Recipe, path: str) -> diffusers.DiffusionPipeline:
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()  # one for each of nine components
    check_path(family, path)
    check_scheduler(path)
    kind: type[diffusers.DiffusionPipeline] = getattr(diffusers, family.pipeline)
    with refused(
        lambda reason: (
            f"model.path: {place_of(path)} cannot be loaded as a {family.family} pipeline: {reason}\n"
            "  Give a directory with model_index.json as diffusers saves it, or a hub name while online."
        )
    ):
        index = kind.load_config(path)
        assert isinstance(index, dict)
        check_classes(family, path, index)
        optional = [*family.encoders, *map(family.tokenizer_of, family.encoders)]
        absent = [name for name in optional if index.get(name, [None])[0] is None]
        given: dict[str, nn.Module | None] = dict.fromkeys([*family.unused, *absent])
        if (model := _rows(family, recipe, path, kind, index)) is not None:
            given[family.trains] = model
        variant = variant_of(family, path)
        with whole_weights(f"model.path: {path}"):
            pipe = kind.from_pretrained(path, dtype=_dtypes(family, recipe), variant=variant, **family.options, **given)
        for encoder, name in ((getattr(pipe, one, None), family.tokenizer_of(one)) for one in readers(family)):
            saved = getattr(pipe, name, None)
            tokenizer = getattr(saved, "tokenizer", saved)  # of a processor its own
            try_tokenizer(tokenizer, f"{name}/tokenizer_config.json")
            if encoder is not None:
                check_tokens(tokenizer, encoder.config)
        return pipe


def _rows(
    family: type[Adapter], recipe: Recipe, path: str, kind: type[diffusers.DiffusionPipeline], index: JsonObject
) -> nn.Module | None:
    """The model that trains with this rank's rows, where it is about to be sharded; None to load it whole."""
    if (ranks := sharded_loading.group()) is None:
        return None
    library, name = map(as_text, as_list(index[family.trains]))
    if library != "diffusers":
        return None
    folder = Path(path) if Path(path).is_dir() else Path(kind.download(path))
    return load_rows(getattr(diffusers, name), folder / family.trains, _dtypes(family, recipe)[family.trains], ranks)


def _trainable(adapter: Adapter, recipe: Recipe) -> nn.Module:
    """Add LoRA, or open all weights; what trains is float32."""
    lora = recipe.model.lora
    if lora is None:
        return adapter.model.requires_grad_(True)
    if saved := saved_adapter(lora):
        check_experts(adapter, saved)
        policy = adapted(adapter.model, saved, recipe.model.path, reader(adapter))
    else:
        advice = "Leave model.lora.targets out to take the pipeline's own list."
        policy = new_adapter(adapter.model, recipe, adapter.lora_targets, advice)
    return open_adapter(policy).eval()  # a new layer is in training mode


def compile_for_all(model: nn.Module, device: torch.device, *, sizes: int = 1) -> None:
    """Have every call of the blocks of ``model`` compiled, when it first comes; pictures are of so many ``sizes``.
    Raises ``UserError`` where nothing could be.

    Each shape is compiled for itself: with sizes left open, which of several forms a batch meets would depend on what
    came before, and sampling and replay of one batch could meet two.
    """
    _check_tools(device)
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS * sizes)
    for block in repeated(model):
        block.compile(dynamic=False)  # in place: no name of a weight changes


def repeated(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that ``model`` consists of: those that diffusers names, or where it names none (SD3, Sana) what the
    model has several of in a list of its own. Of a model without any it is the model."""
    named = getattr(model, "_repeated_blocks", None)
    if not named:
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        kinds = Counter(type(block).__name__ for blocks in lists for block in blocks)
        named = [kind for kind, times in kinds.items() if times > 1]
    found = [module for module in model.modules() if type(module).__name__ in named]
    yield from found or [model]


def _check_tools(device: torch.device) -> None:
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise UserError(
                f"performance.compile: on a CPU torch.compile needs a C++ compiler, and there is no {compiler} here; "
                "install one, name another with the variable CXX, or set performance.compile to false"
            )
    elif importlib.util.find_spec("triton") is None:
        raise UserError(
            "performance.compile: torch.compile writes kernels for an accelerator with triton, which is not installed; "
            "install it, or set performance.compile to false"
        )


def load_rows(kind: Any, folder: Path, dtype: torch.dtype, ranks: dist.ProcessGroup) -> nn.Module | None:
    """The model in ``folder``, as ``kind.from_pretrained`` with ``dtype`` would load it, with this rank's rows of its
    weights. None where it must be loaded whole, and a notice says why. Raises what reading raises."""
    files = _files(folder)
    config = json_of(str(folder), "config.json")
    reason = f"it has no {_FILE}" if not files else ""
    if "quantization_config" in config:
        reason = "the checkpoint is quantized"
    if not reason:
        model = _empty(kind, folder, dtype)
        if {*model.state_dict()} == {*files}:
            _read(model, files, dtype, ranks)
            return model.eval()
        reason = _LACKS  # those of an old layout, which diffusers renames
    if ranks.rank() == 0:
        notices.tell(f"every process loads the whole {folder.name} before its weights are sharded: {reason}")
    return None


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; empty where the weights are in no safetensors files."""
    index = folder / f"{_FILE}.index.json"
    if index.exists():
        listed = as_object(json_of(str(folder), index.name)["weight_map"])
        return {name: folder / str(file) for name, file in listed.items()}
    if not (folder / _FILE).exists():
        return {}
    with safe_open(folder / _FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _FILE)


def _empty(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The model, of the class ``kind`` of diffusers, on the meta device. Buffers have values, which some classes
    compute in the dtype of the model."""
    from accelerate import init_empty_weights
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(dtype), init_empty_weights(include_buffers=False):
        model = kind.from_config(kind.load_config(folder))
    model.register_to_config(_name_or_path=str(folder))
    return model


def _read(model: Any, files: Mapping[str, Path], dtype: torch.dtype, ranks: dist.ProcessGroup) -> None:
    kept = model._keep_in_fp32_modules or []
    in_float32 = {*([kept] if isinstance(kept, str) else kept)}
    with ExitStack() as opened:
        handles = {file: opened.enter_context(safe_open(file, framework="pt")) for file in {*files.values()}}
        for name, file in files.items():
            owner, _, of = name.rpartition(".")
            module: nn.Module = model.get_submodule(owner)
            handle = handles[file]
            wanted = torch.float32 if in_float32 & {*name.split(".")} else dtype
            p = dict(module.named_parameters(recurse=False)).get(of)
            if p is None or p.ndim == 0:
                value = _as(handle.get_tensor(name), wanted)
                setattr(module, of, value if p is None else nn.Parameter(value, requires_grad=p.requires_grad))
                continue
            stored = handle.get_slice(name)
            if (shape := tuple(stored.get_shape())) != p.shape:
                raise ValueError(f"{name} has the shape {shape} in {file.name}, and the configuration {tuple(p.shape)}")
            sharded_loading.hold(module, of, _as(stored[sharded_loading.cut(len(p), ranks)], wanted))


def _as(read: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of what was ``read``, which may be a view of the file; numbers that are no fractions keep their dtype."""
    return read.to(dtype if read.is_floating_point() else read.dtype, copy=True).contiguous()
