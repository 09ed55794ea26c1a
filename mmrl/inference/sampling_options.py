"""Sampling parameters that an engine has and mmrl does not, by the engine's names (``rollout.sampling``).

The names are read from the engine's source where it is installed here, without importing it: that takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from mmrl.config.errors import did_you_mean
from mmrl.config.schema import Recipe

CLASS = "SamplingParams"
FILES = {"vllm": ("vllm", "sampling_params.py"), "sglang": ("sglang", "srt/sampling/sampling_params.py")}
"""The package of an engine, and the file in it that has the class."""
OURS = {
    "vllm": {
        **{"max_tokens": "sampling.max_new_tokens", "min_tokens": "sampling.min_new_tokens"},
        **{name: f"sampling.{name}" for name in ("top_p", "top_k", "min_p", "repetition_penalty", "stop")},
        **{"temperature": "sampling.temperature and eval.temperature", "seed": "seed", "n": "train.group_size"},
    },
    "sglang": {
        **{name: f"sampling.{name}" for name in ("max_new_tokens", "min_new_tokens", "top_p", "top_k", "min_p")},
        **{name: f"sampling.{name}" for name in ("repetition_penalty", "stop")},
        **{
            "temperature": "sampling.temperature and eval.temperature",
            "sampling_seed": "seed",
            "n": "train.group_size",
        },
    },
}
"""What has a key of its own in a recipe."""
FIXED = {
    "vllm": {
        *("logprobs", "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"),
        *("flat_logprobs", "ignore_eos", "stop_token_ids", "detokenize", "include_stop_str_in_output", "output_kind"),
        *("stream_interval", "skip_clone", "skip_special_tokens", "spaces_between_special_tokens"),
    },
    "sglang": {
        *("stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
        "stream_interval",
    },
}
"""What mmrl needs as it is, to read tokens and log-probs."""

_ENGINES = "set rollout.engine to vllm, vllm_server or sglang"


def problems(recipe: Recipe) -> list[str]:
    """Why ``rollout.sampling`` or ``rollout.options`` cannot be given to the recipe's engine, with the edit."""
    given, engine = recipe.rollout.sampling, recipe.rollout.engine.removesuffix("_server")
    if recipe.rollout.in_process and recipe.rollout.options:
        return [f"rollout.options: sampling in process has none; remove it, or {_ENGINES}"]
    if not given:
        return []
    if engine not in FILES:
        why = (
            "a class of your own takes rollout.options" if recipe.rollout.own_class else "sampling in process has none"
        )
        return [f"rollout.sampling: {why}; remove it, or {_ENGINES}"]
    wrong = [
        f"rollout.sampling.{name}: {key} says it; set that, and remove it here"
        for name, key in OURS[engine].items()
        if name in given
    ]
    wrong += [
        f"rollout.sampling.{name}: mmrl sets it, to read tokens and log-probs; remove it"
        for name in sorted(FIXED[engine] & given.keys())
    ]
    known = fields(engine)
    if known is not None:
        wrong += [
            f"rollout.sampling.{name}: the {CLASS} of {engine} that is installed here has no {name!r}"
            f"{did_you_mean(name, sorted(known))}; correct the name, or remove it"
            for name in given
            if name not in known and name not in FIXED[engine] and name not in OURS[engine]
        ]
    return wrong


def fields(engine: str) -> set[str] | None:
    """The names of the engine's sampling parameters; None where it is not installed here, or its source is another."""
    package, file = FILES[engine]
    try:
        found = importlib.util.find_spec(package)
        folders = list(found.submodule_search_locations or ()) if found else []
        tree = ast.parse(Path(folders[0], file).read_text(encoding="utf-8"))
    except (ImportError, ValueError, OSError, IndexError, SyntaxError):
        return None
    kind = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASS), None)
    if kind is None:
        return None
    names = {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
    return {name for name in names if not name.startswith("_")} or None
