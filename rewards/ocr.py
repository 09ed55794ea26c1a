"""Does the picture show the requested words? Read by GOT-OCR2 (Wei et al. 2024, arXiv 2409.01704), or by PP-OCR.

The score is Flow-GRPO's (arXiv 2505.05470): 1 - edit distance / length of the words, without blanks and case; 1 where
the words stand anywhere in what was read, 0 at worst. Accents, apostrophes, dashes and wide letters are compared as a
reader sees them, however they are encoded. The words are ``prompt.meta[meta]`` where there are any, else what stands
first in double quotes in the prompt. The part ``correct`` is 1 where these words alone were read: no more, no less.
Departures: Flow-GRPO reads with PaddleOCR, of which ``engine: rapidocr`` has the networks in another version, scores a
picture that it fails to read 0, and compares the characters as they are encoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import frozen, refused, try_processor
from mmrl.core.reward_contract import Context, Failed, Weights
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping, check_dtype
from mmrl.rewards.spelling import spelled

ENGINES = ("got-ocr2", "rapidocr")
DEFAULT = "stepfun-ai/GOT-OCR-2.0-hf"
DTYPES = ("float32", "bfloat16", "float16")
_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')
_END = "<|im_end|>"


def _models(options: Mapping[str, Any]) -> list[Weights]:
    if options.get("engine") == "rapidocr":  # 32 MB, which onnxruntime holds on the CPU
        return []
    return [Weights(str(options.get("path", DEFAULT)), str(options.get("dtype", "float32")))]


@mmrl.reward(device=True, paths=("path",), models=_models, checks=True)
class OCR(Sleeping):
    """How much of the words a picture shows, 0 to 1.

    ``meta``: the key of a prompt's meta that may hold the words. ``max_tokens``: read of a picture at most. ``dtype``:
    of the weights. ``engine``: ``rapidocr`` reads with PP-OCR on the CPU (``mmrl fetch rapidocr``), and takes neither
    of them nor ``path``; ``side``: pixels that the shorter side of a picture is enlarged to for it.
    """

    def __init__(
        self,
        path: str = DEFAULT,
        meta: str = "text",
        max_tokens: int = 256,
        dtype: str = "float32",
        engine: str = "got-ocr2",
        side: int = 160,
    ) -> None:
        if engine not in ENGINES:
            raise UserError(f"options.engine is {engine!r}; set it to {' or '.join(ENGINES)}")
        if max_tokens < 1:
            raise UserError(f"options.max_tokens is {max_tokens}; set it to 1 or more")
        check_dtype(dtype, DTYPES)
        self.meta, self.max_tokens, self.rapid = meta, max_tokens, None
        if engine == "rapidocr":
            if path != DEFAULT:
                raise UserError("options.path: rapidocr has its networks in its package; remove it")
            self.rapid = _rapid(side)
            return
        self.model, self.processor = self.kept(partial(_load, path, dtype))

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[float | Failed]]:
        """``score`` and ``correct`` of each sample; a prompt that asks for no words fails."""
        wanted = [self._words(sample) for sample in samples]
        asked = [i for i, words in enumerate(wanted) if isinstance(words, str)]
        read = dict(zip(asked, self.read([samples[i].image for i in asked], context), strict=True)) if asked else {}
        rows = [(words, read.get(i, "")) for i, words in enumerate(wanted)]
        return {
            "score": [words if isinstance(words, Failed) else likeness(text, words) for words, text in rows],
            "correct": [words if isinstance(words, Failed) else _alone(text, words) for words, text in rows],
        }

    def read(self, images: Sequence[Any], context: Context) -> list[str]:
        """The text in each picture, as the model writes it down (greedily), or line by line."""
        if self.rapid is not None:
            return [_lines(self.rapid, image) for image in images]
        self.wake(context.device)
        model, tokenizer = self.model, self.processor.tokenizer
        inputs = self.processor(images=list(images), return_tensors="pt").to(context.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        end, pad = tokenizer.convert_tokens_to_ids(_END), tokenizer.pad_token_id
        written = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=self.max_tokens,
            eos_token_id=end,
            pad_token_id=end if pad is None else pad,
        )[:, inputs["input_ids"].shape[1] :]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in written]

    def _words(self, sample: Sample) -> str | Failed:
        told = sample.prompt.meta.get(self.meta)
        quoted = _QUOTED.search(sample.prompt.text)
        words = told if isinstance(told, str) else (quoted[1] or quoted[2]) if quoted else ""
        if not _bare(words):
            return Failed(f'the prompt asks for no words; put them in double quotes, or in its meta as "{self.meta}"')
        return words


score = OCR


def likeness(read: str, words: str) -> float:
    """1 - edit distance / length of ``words``, no less than 0; 1 where ``read`` holds them."""
    have, want = _bare(read), _bare(words)
    return 1.0 if want in have else 1 - min(edit_distance(have, want), len(want)) / len(want)


def _alone(read: str, words: str) -> float:
    """1 where nothing but ``words`` was read."""
    return float(_bare(read) == _bare(words))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the fewest characters to insert, delete or replace."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        before, row = row, [i]
        for j, right in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right)))
    return row[-1]


def _bare(text: str) -> str:
    return "".join(spelled(text).split())


def _rapid(side: int) -> Any:
    """PP-OCR with as many threads as torch has. Raises ``UserError``."""
    if not 32 <= side <= 2000:
        raise UserError(f"options.side is {side}; give pixels from 32 to 2000")
    try:
        import_module("onnxruntime")  # what computes it
        from rapidocr import RapidOCR  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"options.engine: rapidocr is not installed ({error}); run: mmrl fetch rapidocr") from error
    mmrl.before_loading()
    threads = torch.get_num_threads()
    return RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_cls": False,  # it would turn some short words upside down: DOD is read as POP
            "Det.limit_type": "min",
            "Det.limit_side_len": side,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def _lines(rapid: Any, image: Any) -> str:
    """The lines of a picture, as they are found."""
    pixels = np.asarray(image.convert("RGB"))[:, :, ::-1]  # OpenCV's order of colours
    return "\n".join(rapid(np.ascontiguousarray(pixels)).txts or ())


def _load(path: str, dtype: str) -> tuple[Any, Any]:
    """The model (frozen, on the CPU) and its processor. Raises ``UserError``."""
    from transformers import AutoProcessor, GotOcr2ForConditionalGeneration

    check_files(path)
    mmrl.before_loading()
    with refused(
        lambda reason: (
            f"cannot load GOT-OCR2 from {path}: {reason}; set the reward's options.path to a "
            f"directory that save_pretrained wrote, or to {DEFAULT} while online"
        )
    ):
        processor = AutoProcessor.from_pretrained(path)
        try_processor(processor)
        return frozen(GotOcr2ForConditionalGeneration, path, dtype=getattr(torch, dtype)), processor
