"""What a frozen model thinks of the tokens that the policy wrote: the reward of a teacher (docs/reference/teachers.md).

    rewards:
      - {name: teacher, label: large, weight: 0, options: {path: org/Large-Instruct}}
    teacher: {reward: large, divergence: sampled}

It computes where rewards do: beside the policy, or on devices of its own (``placement``), and sleeps and is planned as
they are. Its score, the mean log-prob of a written token, is only measured. The model needs the student's vocabulary. A
response that is longer than its context, or stands behind pictures, fails and is not taught.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files, check_weights
from mmrl.core.library_loading import check_size, refused
from mmrl.core.reward_contract import Context, Failed, Spans, weights_in_half
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Sample, Tokens
from mmrl.core.whole_weights import whole_weights
from mmrl.models.text.likelihood import head_log_probs, token_log_probs
from mmrl.models.text.packing import headless, plain_head
from mmrl.rewards.sleeping import DTYPES, Sleeping, check_dtype, dtype_on

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel


@mmrl.reward(inputs=("tokens",), spans="token", device=True, paths=("path",), models=weights_in_half, checks=True)
class Teacher(Sleeping):
    """The log-prob of each token that the policy wrote, behind all that it read there.

    At the temperature of the policy (``sample.tokens``). ``batch_size``: texts in a forward; those of similar
    length share one. ``dtype``: of its weights; ``auto`` is bfloat16 where the device has it.
    """

    def __init__(self, path: str, batch_size: int = 16, dtype: str = "auto") -> None:
        if batch_size < 1:
            raise UserError(f"options.batch_size is {batch_size}; set it to 1 or more")
        dtype = dtype_on(check_dtype(dtype, (*DTYPES, "float16")), "auto")
        check_files(path)
        self.batch_size = batch_size
        mmrl.before_loading()
        load = partial(_load, path, getattr(torch, dtype))
        self._model = self.frozen(load(), load)
        config = self._model.config.get_text_config()
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        self._words: int = config.vocab_size

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, list[Any]]:
        """``score``, the mean log-prob of a written token of each sample (0 where there is none), and ``spans``."""
        self.wake(context.device)
        failed = [self._unread(sample) for sample in samples]
        good = [n for n, why in enumerate(failed) if why is None]
        read = [(n, tokens) for n in good if (tokens := samples[n].tokens) is not None]
        texts = [(n, *text) for n, tokens in read for text in _texts(tokens)]
        temperature = read[0][1].temperature if read else 1.0  # one policy drew them all
        order, found = sorted(range(len(texts)), key=lambda i: len(texts[i][1])), [list[float]()] * len(texts)
        for first in range(0, len(order), self.batch_size):
            some = order[first : first + self.batch_size]
            for i, values in zip(some, self._log_probs([texts[i][1:] for i in some], temperature), strict=True):
                found[i] = values
        said: list[list[float]] = [[] for _ in samples]
        for (n, *_), values in zip(texts, found, strict=True):
            said[n] += values
        scores: list[float | Failed] = [Failed(why) if why else _mean(said[n]) for n, why in enumerate(failed)]
        return {
            "score": scores,
            "spans": [
                None if why else Spans([(i, i + 1, value) for i, value in enumerate(of)])
                for why, of in zip(failed, said, strict=True)
            ],
        }

    def _unread(self, sample: Sample) -> str | None:
        """Why the sample cannot be read; None where it can."""
        tokens = sample.tokens
        if tokens is None:
            return "has no tokens"
        if sample.prompt.media:
            return "has pictures in its prompt, which this teacher cannot see"
        longest = max(len(ids) for ids, _ in _texts(tokens))
        if self._context is not None and longest > self._context:
            return f"has {longest} tokens with its prompt, and the teacher's context {self._context}"
        return "has tokens that are not in the teacher's vocabulary" if max(tokens.ids) >= self._words else None

    @torch.inference_mode()
    def _log_probs(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """The log-probs of the tokens at the given places of each text."""
        device, model = self._model.device, self._model
        ids = pad_sequence([torch.tensor(of) for of, _ in texts], batch_first=True).to(device)
        ends = torch.tensor([len(of) for of, _ in texts]).unsqueeze(1)
        mask = (torch.arange(ids.shape[1]) < ends).long().to(device)
        row = torch.tensor([n for n, (_, places) in enumerate(texts) for _ in places], dtype=torch.long, device=device)
        at = torch.tensor([place for _, places in texts for place in places], dtype=torch.long, device=device)
        if (layer := plain_head(model)) is not None:
            with headless(model):
                states = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[row, at - 1]
            values = head_log_probs(states, layer.weight, ids[row, at], temperature)
        else:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[row, at - 1]
            values = token_log_probs(logits.unsqueeze(0), ids[row, at].unsqueeze(0), temperature)[0]
        sizes = [len(places) for _, places in texts]
        return [part.tolist() for part in values.cpu().split(sizes)]


score = Teacher


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _texts(tokens: Tokens) -> list[tuple[Sequence[int], list[int]]]:
    """Each text that is read by itself, and the places of its written tokens."""
    out: list[tuple[Sequence[int], list[int]]] = []
    for first, last in zip(tokens.begins, [*tokens.begins[1:], len(tokens.ids)], strict=True):
        places = [n - first for start, end in tokens.written for n in range(start, end) if first <= n < last]
        out.append((tokens.ids[first:last], places))
    return out


def _load(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The language model at ``path``, frozen and without dropout. Raises ``UserError``."""
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from transformers import AutoModelForCausalLM

    where = f"the directory {path}" if Path(path).exists() else f"{path!r} (no such directory here)"
    with (
        refused(
            lambda reason: (
                f"options.path: {where} cannot be loaded as a language model: {reason}\n"
                "  Give a directory with config.json and safetensors as transformers saves it, or a hub name."
            )
        ),
        whole_weights(f"options.path: {path}"),
    ):
        check_weights(path)
        check_size(AutoModelForCausalLM, path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).requires_grad_(False).eval()
