"""Read a rank's own rows of a transformers checkpoint, for a policy that is about to be sharded.

transformers does the reading: it finds the files, renames and merges weights of other layouts, and reads the slice of
a file that a DTensor has. It asks the model's class to divide the model between building and reading
(``maybe_distribute_model``), and there this module divides as our FSDP layout does. Its own layout has other blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mmrl.core import notices, sharded_loading

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

_HOOK = "maybe_distribute_model"


def load_rows(
    read: Callable[..., Any],
    path: str,
    dtype: torch.dtype,
    ranks: dist.ProcessGroup,
    new: Collection[str] = (),
    **more: Any,
) -> PreTrainedModel | None:
    """What ``read``, the ``from_pretrained`` of a class, makes of the model at ``path`` and ``more``, with this rank's
    rows of its weights (``mmrl.core.sharded_loading``). None where it must be loaded whole, and a notice says why.
    ``new``: the parameters that the checkpoint may lack; each rank has them whole. Raises what ``read`` raises. All
    ``ranks`` call it together."""
    if reason := next(_obstacles(path), None):
        _tell(ranks, f"every process loads the whole model before its weights are sharded: {reason}")
        return None
    from transformers.distributed import DistributedConfig

    asked = DistributedConfig()  # of one device: transformers then makes no process group
    with _divided(asked, ranks, new):
        model, found = read(path, dtype=dtype, distributed_config=asked, output_loading_info=True, **more)
    vars(model.config).pop("distributed_config", None)  # an export would name it
    if lacking := sorted({*found["missing_keys"]} - {*new}):
        _tell(ranks, f"every process loads the whole model: the checkpoint lacks {lacking[0]}, which gets new values")
        return None
    sharded_loading.set_aside(model)
    return model


def _obstacles(path: str) -> Iterator[str]:
    """Why the checkpoint cannot be read by rows. An unreadable configuration is none: loading will say it."""
    import transformers

    if not hasattr(transformers.PreTrainedModel, _HOOK):
        yield f"transformers {transformers.__version__} cannot read by rows; update it"
        return
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception:  # odd values in its files; loading will name them
        return
    if getattr(config, "quantization_config", None) is not None:
        yield "the checkpoint is quantized"


def _tell(ranks: dist.ProcessGroup, line: str) -> None:
    if ranks.rank() == 0:
        notices.tell(line)


@contextmanager
def _divided(asked: Any, ranks: dist.ProcessGroup, whole: Collection[str]) -> Generator[None]:
    """Divide the models that are loaded with the configuration ``asked``, all but the parameters ``whole``; other
    threads may load others."""
    from transformers import PreTrainedModel

    otherwise = getattr(PreTrainedModel, _HOOK)

    def maybe_distribute_model(cls: type, model: PreTrainedModel, config: Any, *rest: Any) -> PreTrainedModel:
        if config is not asked:
            return otherwise.__func__(cls, model, config, *rest)
        sharded_loading.divide(model, ranks, whole=_converted(model, ranks.size()) | {*whole})
        return model

    setattr(PreTrainedModel, _HOOK, classmethod(maybe_distribute_model))
    try:
        yield
    finally:
        delattr(PreTrainedModel, _HOOK)


def _converted(model: PreTrainedModel, size: int) -> set[str]:
    """The parameters that transformers computes from several rows of the checkpoint, or from other rows: each rank
    needs them whole. Experts that are stacked are none of them: they are the rows, and each rank has at least one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    def by_rows(operation: Any) -> bool:
        return (isinstance(operation, MergeModulelist) and operation.dim == 0) or (
            isinstance(operation, Concatenate) and operation.dim >= 1
        )

    found: set[str] = set()
    shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        operations = converter.operations
        stacked = isinstance(operations[0], MergeModulelist) and all(map(by_rows, operations))
        for pattern in converter.target_patterns:
            wanted = re.compile(".*".join(map(re.escape, re.split(r"\\1|\*", pattern.strip("^$")))))
            names = {name for name in shapes if wanted.search(name)}
            found |= {n for n in names if not stacked or -(-shapes[n][0] // size) * (size - 1) >= shapes[n][0]}
    return found
