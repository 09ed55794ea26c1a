"""Tables that map the tensors of a Hugging Face decoder to Megatron-Core's, and the supported decoders.

What Megatron-Core fuses (queries, keys and values; gate and up) is seen through views, so that weights, gradients and
moments have the names of Hugging Face in every layout, and nothing has to be written twice for the way back. Needs
no Megatron-Core, for ``mmrl plan``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any, Literal

from torch import Tensor, nn

from mmrl.config.megatron_layouts import Kind, untested
from mmrl.config.schema import Train
from mmrl.models.text.critic import Critic

Cut = Literal["rows", "columns", "heads", "halves", "experts", "same", "shared", "apart"]


@dataclass(frozen=True)
class Place:
    """A parameter of Megatron-Core, and the tensors of Hugging Face that lie in it.

    ``cut``: how tensor-parallel ranks divide it. ``rows`` and ``columns`` of a matrix; ``halves``, by rows, one tensor
    above the other; ``heads``, by query groups, each with its queries, its key and its value; ``same``: each has all of
    it and comes to the same gradient; ``shared``: each has all of it and the gradient of its own heads; ``apart``: no
    tensor of Megatron-Core's, and each has all of it and all of its gradient. ``experts``, by its first dimension: over
    expert-parallel ranks, and whole experts on each.
    """

    name: str
    tensors: tuple[str, ...]
    cut: Cut


_ATTENTION, _THEIRS = "self_attention.", "self_attn."
LAYER = (
    Place("input_layernorm.weight", ("input_layernorm.weight",), "same"),
    *(
        Place(f"{_ATTENTION}linear_qkv.{kind}", tuple(f"{_THEIRS}{n}_proj.{kind}" for n in "qkv"), "heads")
        for kind in ("weight", "bias")
    ),
    *(Place(f"{_ATTENTION}{n}_layernorm.weight", (f"{_THEIRS}{n}_norm.weight",), "shared") for n in "qk"),
    Place(f"{_ATTENTION}linear_proj.weight", (f"{_THEIRS}o_proj.weight",), "columns"),
    Place("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "same"),
    Place("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "halves"),
    Place("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
    Place("mlp.router.weight", ("mlp.gate.weight",), "same"),
    Place("mlp.experts.gate_up", ("mlp.experts.gate_up_proj",), "experts"),
    Place("mlp.experts.down", ("mlp.experts.down_proj",), "experts"),
)
"""Of a layer, behind ``decoder.layers.N.`` there and ``model.layers.N.`` at Hugging Face."""
AROUND = (
    Place("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows"),
    Place("decoder.final_layernorm.weight", ("model.norm.weight",), "same"),
    Place("output_layer.weight", ("lm_head.weight",), "rows"),
)
_TOWERS = {"qwen2_5_vl": "visual."}
"""Of models that see, by their type: their vision tower's name in the body."""
_MROPE = {"rope_type", "rope_theta", "mrope_section", "type"}
"""What is known here of rotary positions in three directions."""


def before(module: nn.Module) -> str:
    """What the names of the decoder's tensors begin with in ``module``: ``model.``, or longer in one that sees."""
    names, last = (name for name, _ in module.named_parameters()), "embed_tokens.weight"
    return next((name.removesuffix(last) for name in names if name.endswith(last)), "model.")


def body(module: Any) -> Any:
    """``module`` without what makes logits, or values, of its hidden states: Hugging Face's model."""
    return module.body if isinstance(module, Critic) else module.base_model


def text_config(module: Any) -> Any:
    """Hugging Face's settings of the decoder in ``module``."""
    return body(module).config.get_text_config()


def tower(module: Any) -> str | None:
    """What the names of its vision tower begin with; None where it does not see, or no such model is known here."""
    name = _TOWERS.get(body(module).config.model_type)
    return name and ("body." if isinstance(module, Critic) else "model.") + name


def apart(module: Any) -> tuple[str, ...]:
    """What the names of all else than the decoder begin with, which each rank has for itself."""
    return tuple(filter(None, [tower(module), "head." if isinstance(module, Critic) else None]))


def places(module: Any) -> list[Place]:
    """The weights of the decoder ``module``, under their whole names. Those that it lacks (biases, norms of heads) are
    left out."""
    names, first = {name for name, _ in module.named_parameters()}, before(module)
    numbered = re.compile(re.escape(first) + r"layers\.(\d+)\.(.+)")
    layers = sorted({int(found[1]) for name in names if (found := numbered.fullmatch(name))})
    around = [
        Place(place.name, tuple(tensor.replace("model.", first, 1) for tensor in place.tensors), place.cut)
        for place in AROUND
    ]
    every = [
        Place(
            f"decoder.layers.{n}.{place.name}",
            tuple(f"{first}layers.{n}.{tensor}" for tensor in place.tensors),
            place.cut,
        )
        for n in layers
        for place in LAYER
    ]
    own = [Place(name, (name,), "apart") for name in sorted(names) if name.startswith(apart(module))]
    return [place for place in (*around, *every, *own) if names.issuperset(place.tensors)]


def sparse(module: nn.Module) -> list[int]:
    """The layers of the decoder ``module`` that have experts."""
    router = re.compile(re.escape(before(module)) + r"layers\.(\d+)\.mlp\.experts\.down_proj")
    return [int(found[1]) for name, _ in module.named_parameters() if (found := router.fullmatch(name))]


def shares(module: nn.Module, train: Train) -> Fraction:
    """How many times as many weights ``module`` has as the device that holds its part of the experts, of the rest and
    of the stages."""
    cuts = {name: place.cut for place in places(module) for name in place.tensors}
    divided = {"experts": train.expert_parallel, "apart": 1}
    by = {name: divided.get(cut, train.tensor_parallel) for name, cut in cuts.items()}
    sizes = [(p.numel(), by.get(name, 1)) for name, p in module.named_parameters()]
    here = sum((Fraction(n, by) for n, by in sizes), Fraction(0)) / train.pipeline_parallel
    return sum(n for n, _ in sizes) / here


def parts(place: Place, parameter: Tensor, heads: int, groups: int, rows: int) -> list[Tensor]:
    """The tensors of Hugging Face in this rank's ``parameter``, or in anything of its shape: views, in the order of
    ``place.tensors``.

    ``heads`` and ``groups``: of queries and of keys on this rank. ``rows``: of the vocabulary on this rank that are no
    padding. Where groups lie apart, a view has them as a dimension of its own in front: ``[groups, rows, ...]``.
    """
    match place.cut:
        case "rows":
            return [parameter[:rows]]
        case "halves":
            return list(parameter.chunk(2))
        case "heads":
            queries = heads // groups
            by_group = parameter.unflatten(0, (groups, queries + 2, -1))
            return [t.flatten(1, 2) for t in by_group.split([queries, 1, 1], 1)]
        case _:
            return [parameter]


def kind(module: Any) -> Kind:
    """What ``module`` is to ``mmrl.config.megatron_layouts``."""
    if isinstance(module, Critic):
        return "critic"
    return "sees" if tower(module) else "mixture" if sparse(module) else "dense"


def refusals(module: Any, train: Train) -> Iterator[str]:
    """Why ``module`` is not trained by ranks that share it so, with the edit that mends it."""
    impossible = list(_impossible(module, train))
    yield from impossible or untested(kind(module), train)


def _impossible(module: Any, train: Train) -> Iterator[str]:
    size = train.tensor_parallel
    of, config = type(module).__name__, text_config(module)
    known = {name for place in places(module) for name in place.tensors}
    other = sorted(name for name, _ in module.named_parameters() if name not in known)
    mend = "set train.backend to fsdp"
    if other or not known:
        yield f"train.backend: megatron has no place for {', '.join(other[:3]) or 'any tensor'} of {of}; {mend}"
        return
    yield from _trained_apart(module, train)
    for what, is_it in _unusual(config).items():
        if is_it:
            yield f"train.backend: megatron trains no {of} with {what} yet; {mend}"
    yield from _of_experts(module, train)
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate units": config.intermediate_size,
    }
    if len(sparse(module)) == config.num_hidden_layers:
        del sizes["intermediate units"]
    for what, n in sizes.items():
        if n % size:
            fitting = _fitting(gcd(*sizes.values()))
            yield f"train.tensor_parallel: {size} does not divide the model's {n} {what}; {fitting}"
            break
    layers, stages, chunks = config.num_hidden_layers, train.pipeline_parallel, train.pipeline_chunks
    if layers % stages:
        yield f"train.pipeline_parallel: {stages} does not divide the model's {layers} layers; {_fitting(layers)}"
    elif layers % (stages * chunks):
        yield (
            f"train.pipeline_chunks: {stages} stages of {chunks} chunks do not divide the model's {layers} layers; "
            f"{_fitting(layers // stages)}"
        )


def _of_experts(module: Any, train: Train) -> Iterator[str]:
    """A layer of experts is given each token once, and each expert is whole on one device."""
    config, size, of = text_config(module), train.expert_parallel, type(module).__name__
    if not sparse(module):
        if size > 1:
            yield f"train.expert_parallel: {of} has no experts to divide; remove it"
        return
    one_stage = train.tensor_parallel * train.context_parallel
    if not hasattr(config, "norm_topk_prob") or (config.norm_topk_prob and config.num_experts_per_tok == 1):
        yield f"train.backend: megatron does not know how {of} weighs its experts; set train.backend to fsdp"
    if config.num_experts % size:
        fitting = _fitting(config.num_experts)
        yield f"train.expert_parallel: {size} does not divide the model's {config.num_experts} experts; {fitting}"
    if train.tensor_parallel > 1 and not train.sequence_parallel:
        yield "train.sequence_parallel: devices that share a layer of experts divide its tokens; set it to true"
    if train.pipeline_parallel > 1 and size != one_stage:
        yield (
            f"train.expert_parallel: the {one_stage} device{'s' * (one_stage > 1)} of a stage "
            f"divide{'s' * (one_stage == 1)} its experts; set it to {one_stage}"
        )


def _trained_apart(module: Any, train: Train) -> Iterator[str]:
    """What of frozen weights, and of models that see, is refused."""
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    sees = tower(module)
    if others := [name for name in frozen if not sees or not name.startswith(sees)]:
        but = f" but those of {sees.rstrip('.')}" if sees else ""
        yield f"model.freeze: megatron trains all weights{but}, and {others[0]} is frozen; remove it, or " + (
            "set train.backend to fsdp"
        )
    for key in ("pipeline_parallel", "context_parallel") if sees else ():
        if (n := getattr(train, key)) > 1:
            yield (
                f"train.{key}: a model that sees is cut in parts of layers alone; remove it, and set "
                f"train.tensor_parallel={n * train.tensor_parallel}"
            )


def _fitting(n: int) -> str:
    good = [str(m) for m in range(1, n + 1) if n % m == 0]
    return f"set it to {' or '.join([', '.join(good[:-1]), good[-1]] if len(good) > 1 else good)}"


def _unusual(config: Any) -> dict[str, bool]:
    rope = getattr(config, "rope_parameters", None) or {}
    section = rope.get("mrope_section")
    return {
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        f"RoPE of type {rope.get('rope_type')}": rope.get("rope_type", "default") != "default",
        "RoPE on a part of each head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "RoPE in several directions of another kind": section is not None and not _MROPE.issuperset(rope),
        "a sliding window": bool(getattr(config, "sliding_window", None))
        and getattr(config, "use_sliding_window", True),
    }
