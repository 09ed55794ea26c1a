"""A judge in this process: a transformers model, text or vision-language, with its own chat template or a given one.

Weights are frozen. Sampling takes its randomness from each question's own seed, so that an answer does not depend on
what stands in the same batch (up to float rounding) or was asked before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config.chat_template import checked
from mmrl.config.dtype import has_bfloat16
from mmrl.config.model import Quantize
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.installing import install
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.library_loading import check_tokens, frozen, refused, try_processor, try_tokenizer
from mmrl.core.reward_contract import before_loading
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.quantized import quantize as quantized
from mmrl.models.quantized import refusals
from mmrl.models.text.control_tokens import ControlTokens
from mmrl.models.text.token_sampling import Draw
from mmrl.rewards.judging.answers import Kind, Words, read
from mmrl.rewards.judging.asking import REASK_TEMPERATURE, Ask, Outcome, Settings, seeded, unread
from mmrl.rewards.judging.json_answer import UnreadableError, ends_in_a_thought, is_thought_mark, with_thought_closed
from mmrl.rewards.judging.protocol import kind_of
from mmrl.rewards.sleeping import Sleeping

if TYPE_CHECKING:
    from transformers import BatchEncoding, BatchFeature

_NOT_FINITE = "the judge's logits are not finite: set options.model.dtype to float32, or take another judge"
_WHOLE = 64 << 20
"""A model's file of at most so many bytes is hashed in full for ``fingerprint``; of a larger one, size and time."""


class LocalModel(Sleeping):
    """A judge model at ``path``, a directory or a hub name. Loaded when built, on the CPU; raises ``UserError``.

    ``batch``: questions answered at once. ``dtype``: ``auto`` takes the checkpoint's, and float32 on a processor that
    cannot multiply half precision, where that takes several times as long. ``template``: arguments for the
    chat template, such as ``{enable_thinking: false}``. ``chat_template``: a Jinja template in place of the model's;
    ``{{ messages[-1].content }}`` lets a base model continue a rubric with worked examples. ``quantize``: ``int8``,
    ``fp8`` or ``nf4``, the bits of the linear layers in its blocks.
    """

    def __init__(
        self,
        path: str,
        batch: int = 16,
        dtype: str = "auto",
        template: JsonObject | None = None,
        chat_template: str | None = None,
        quantize: str | None = None,
    ):
        self.path, self.batch, self.dtype, self.template = path, batch, dtype_here(dtype), dict(template or {})
        if chat_template is not None:
            self.template["chat_template"] = _checked(chat_template)
        kind = kind_of(quantize)
        for why in refusals(kind, "cpu"):
            raise UserError(f"options.{why}")
        before_loading()
        model, self.sees = _load_model(path, self.dtype, kind)
        self.processor, self.tokenizer = _readers(path, model.config, sees=self.sees)
        self.model = self.frozen(model, lambda: _load_model(path, self.dtype, kind)[0])
        self.tokenizer.padding_side = "left"
        if chat_template is None and getattr(self.processor or self.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"options.model: {path} has no chat template, which a judge needs; write one as "
                "options.model.chat_template ('{{ messages[-1].content }}' for a base model)"
            )
        bits = f" {kind}" if kind else ""
        self.identity = f"transformers {fingerprint(path)} {self.dtype} {sorted(self.template.items())}{bits}"
        self._words: dict[Words, tuple[list[int], list[int]]] = {}

    @property
    def control(self) -> tuple[str, ...]:
        """The control tokens of its tokenizer, which a text must not contain."""
        return tuple(ControlTokens(self.processor or self.tokenizer).texts)

    def ask(self, asks: Sequence[Ask], kind: Kind, settings: Settings, device: torch.device | str) -> list[Outcome]:
        """An outcome for each question, in order. Never raises for what the model wrote."""
        self.wake(device)
        outcomes: list[Outcome] = [Outcome()] * len(asks)
        pending = list(range(len(asks)))
        for round_ in range(1 if isinstance(kind, Words) else settings.reasks + 1):
            for index in self._batches([asks[i] for i in pending], pending):
                again = [replace(asks[i], seed=seeded(asks[i].seed, round_)) for i in index]
                for i, outcome in zip(index, self._answer(again, kind, settings, round_), strict=True):
                    raw = [*outcomes[i].raw, *outcome.raw]
                    seconds = outcomes[i].seconds + outcome.seconds
                    reason = unread(outcome.reason, raw) if outcome.reason and outcome.raw else outcome.reason
                    outcomes[i] = Outcome(outcome.verdict, raw, reason, seconds)
            pending = [i for i in pending if outcomes[i].verdict is None and outcomes[i].raw]
            if not pending:
                break
        return outcomes

    def _batches(self, asks: Sequence[Ask], index: Sequence[int]) -> list[list[int]]:
        """Indices in batches of about equal length, those with pictures apart."""
        order = sorted(range(len(asks)), key=lambda i: (bool(asks[i].pictures), len(asks[i].text)))
        kinds = [[i for i in order if bool(asks[i].pictures) == seen] for seen in (False, True)]
        return [[index[i] for i in of[n : n + self.batch]] for of in kinds for n in range(0, len(of), self.batch)]

    def _answer(self, asks: list[Ask], kind: Kind, settings: Settings, round_: int) -> list[Outcome]:
        began = time.perf_counter()
        try:
            outcomes = self._generate(asks, kind, settings, round_)
        except UserError:
            raise
        except Exception as error:  # a picture the processor refuses, say, must not cost its neighbours their verdict
            if len(asks) > 1:
                return [self._answer([ask], kind, settings, round_)[0] for ask in asks]
            said = (str(error).splitlines() or [""])[0]
            outcomes = [Outcome(reason=f"the judge could not be asked: {type(error).__name__}: {said}")]
        seconds = (time.perf_counter() - began) / len(asks)
        return [replace(outcome, seconds=seconds) for outcome in outcomes]

    def _fits(self, asks: list[Ask], inputs: BatchEncoding | BatchFeature, room: int) -> None:
        """Raise ``ValueError`` where a question cannot be asked as a whole."""
        if any(ask.pictures for ask in asks) and not self.sees:
            raise ValueError(
                "it reads text only and the question has pictures; write prompt_text for prompt, and response_text "
                "for response"
            )
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        length = inputs["input_ids"].shape[1]
        if limit is not None and length + room > limit:
            raise ValueError(f"the question has {length} tokens, and with {room} of answer the model takes {limit}")

    def _generate(self, asks: list[Ask], kind: Kind, settings: Settings, round_: int) -> list[Outcome]:
        from transformers import GenerationConfig

        room = 1 if isinstance(kind, Words) else settings.max_tokens
        texts = question_texts(self.processor or self.tokenizer, self.template, asks, kind)
        inputs = encoded(self.processor, self.tokenizer, texts, asks, self.model.dtype).to(self.model.device)
        self._fits(asks, inputs, room)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=self._stop(),
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=isinstance(kind, Words),
        )
        if isinstance(kind, Words):
            with torch.inference_mode():
                logits = self.model.generate(**inputs, generation_config=config).logits[0]
            return [self._weigh(row, kind) for row in torch.log_softmax(logits.float(), -1).cpu()]
        temperature = max(settings.temperature, REASK_TEMPERATURE) if round_ else settings.temperature
        draws = [torch.rand(room, generator=torch.Generator().manual_seed(a.seed), dtype=torch.float64) for a in asks]
        draw = Draw(torch.stack(draws), temperature)
        with torch.inference_mode():
            made = self.model.generate(**inputs, generation_config=config, logits_processor=[draw]).sequences
        answers = [self._written(row) for row in made[:, inputs["input_ids"].shape[1] :].tolist()]
        begun = ["<think>" if ends_in_a_thought(text) else "" for text in texts]
        finite = torch.stack(draw.log_probs, 1).isfinite().all(1).tolist()
        return [
            read(kind, answer, ask.items, thought, "" if ended else f"at max_tokens {room}")
            if fine
            else Outcome(reason=_NOT_FINITE)
            for (answer, ended), ask, thought, fine in zip(answers, asks, begun, finite, strict=True)
        ]

    def _written(self, ids: list[int]) -> tuple[str, bool]:
        """An answer as text, and whether it ended by itself. Of special tokens only the marks of a thought are kept."""
        stop, special = set(self._stop()), set(self.tokenizer.all_special_ids)
        length = next((i for i, token in enumerate(ids) if token in stop), len(ids))
        kept = [i for i in ids[:length] if i not in special or is_thought_mark(self.tokenizer.decode([i]))]
        return self.tokenizer.decode(kept), length < len(ids)

    def _weigh(self, log_probs: torch.Tensor, words: Words) -> Outcome:
        if words not in self._words:
            size = len(self.tokenizer)
            texts = self.tokenizer.batch_decode([[i] for i in range(size)])
            self._words[words] = words.tokens(enumerate(texts))
        yes, no = (log_probs[ids].double().tolist() for ids in self._words[words])
        try:
            return Outcome(words.verdict(yes, no), [f"{words.yes}: {_best(yes)}, {words.no}: {_best(no)}"])
        except UnreadableError as error:
            if not yes and not no:
                return Outcome(reason=f"the judge's vocabulary {error}")
            likeliest = log_probs.topk(min(6, len(log_probs)))
            found = zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
            said = ", ".join(f"{self.tokenizer.decode([token])!r} {log_prob:.4f}" for log_prob, token in found)
            return Outcome(raw=[said], reason=str(error))

    def _stop(self) -> list[int]:
        given = self.model.generation_config.eos_token_id
        return sorted({*(given if isinstance(given, list) else [given]), self.tokenizer.eos_token_id} - {None})


def question_texts(of: Any, template: JsonObject, asks: Sequence[Ask], kind: Kind | None) -> list[str]:
    """The questions, written with the chat ``template`` of a processor or tokenizer. Where the first token is the
    answer (``Words``), no thought is left open before it."""
    settings = {"tokenize": False, "add_generation_prompt": True, **template}
    if isinstance(kind, Words):
        settings = {"enable_thinking": False, **settings}
    plain = not hasattr(of, "image_processor")
    texts = [of.apply_chat_template(_messages(ask, plain=plain), **settings) for ask in asks]
    return [with_thought_closed(text) for text in texts] if isinstance(kind, Words) else texts


def encoded(
    processor: Any, tokenizer: Any, texts: list[str], asks: Sequence[Ask], dtype: torch.dtype
) -> BatchEncoding | BatchFeature:
    """The questions as a model with weights of this ``dtype`` takes them; ``processor`` is None for one that reads text
    only."""
    if processor is None:
        return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    pictures = {"images": [ask.pictures for ask in asks]} if asks[0].pictures else {}
    made = processor(text=texts, return_tensors="pt", padding=True, add_special_tokens=False, **pictures)
    pixels = {name: of.to(dtype) for name, of in made.items() if name.startswith("pixel_values")}
    made.update(pixels)  # some processors make them in bfloat16, whatever the weights are in
    return made


def empty_model(path: str, dtype: str) -> tuple[Any, bool]:
    """A judge without weights, on the meta device, and whether it sees. Raises ``UserError``."""
    from transformers import AutoConfig

    allow_cpu_only()
    with _refused(path):
        auto, sees = _class_of(config := AutoConfig.from_pretrained(path))
        kind = getattr(config, "dtype", None) if dtype_here(dtype) == "auto" else getattr(torch, dtype_here(dtype))
        with torch.device("meta"):
            return auto.from_config(config, dtype=kind or torch.float32).eval().requires_grad_(False), sees


def inputs_of(
    model: Any, path: str, template: JsonObject, ask: Ask, rows: int, *, sees: bool
) -> Callable[[], BatchEncoding | BatchFeature]:
    """What makes the inputs of so many ``rows`` with one question of an ``empty_model``. Raises ``UserError``."""
    processor, tokenizer = _readers(path, model.config, sees=sees)
    tokenizer.padding_side = "left"
    asks = [ask] * rows

    def inputs() -> BatchEncoding | BatchFeature:
        texts = question_texts(processor or tokenizer, template, asks, None)
        return encoded(processor, tokenizer, texts, asks, model.dtype)

    return inputs


def dtype_here(dtype: str) -> str:
    """The dtype that a judge is loaded in."""
    slow = not torch.cuda.is_available() and not has_bfloat16("cpu")
    return "float32" if dtype == "auto" and slow else dtype


def _checked(chat_template: str) -> str:
    try:
        return checked(chat_template)
    except ValueError as error:
        raise UserError(f"options.model.chat_template: {error}") from None


def fingerprint(path: str) -> str:
    """A hash of a model's files, so that other weights at the same path are another judge; of a hub model its name."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja", ".txt")):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} ".encode())
        digest.update(file.read_bytes() if status.st_size <= _WHOLE else str(status.st_mtime_ns).encode())
    return digest.hexdigest()


def _messages(ask: Ask, plain: bool) -> list[JsonObject]:
    content: Json = "".join(part for part in ask.parts if isinstance(part, str))
    system: Json = ask.system
    if not plain:
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in ask.parts]
        system = [{"type": "text", "text": ask.system}]
    head: list[JsonObject] = [{"role": "system", "content": system}] if ask.system else []
    return [*head, {"role": "user", "content": content}]


def _readers(path: str, config: Any, *, sees: bool) -> tuple[Any, Any]:
    """The processor of a model with ``config`` (None where it reads text only) and its tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    with _refused(path):
        if not sees:
            tokenizer = AutoTokenizer.from_pretrained(path)
            try_tokenizer(tokenizer)
            check_tokens(tokenizer, config)
            return None, tokenizer
        processor = AutoProcessor.from_pretrained(path)
        try_processor(processor)
        check_tokens(processor.tokenizer, config)
        return processor, processor.tokenizer


def _load_model(path: str, dtype: str, bits: Quantize | None) -> tuple[Any, bool]:
    """The model alone, frozen and on the CPU, with its layers in ``bits``, and whether it sees."""
    allow_cpu_only()
    import transformers.utils.logging
    from transformers import AutoConfig, GenerationConfig

    transformers.utils.logging.disable_progress_bar()
    check_files(path)
    with _refused(path):
        config = AutoConfig.from_pretrained(path)
        auto, sees = _class_of(config)
        model = frozen(auto, path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    # Without the checkpoint's sampling defaults: a repetition penalty would keep it from words of the question.
    ends = getattr(model.generation_config, "eos_token_id", None)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    if bits:
        quantized(model, bits)
    return model, sees


def _class_of(config: Any) -> tuple[Any, bool]:
    """The class of a judge's model, and whether it sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM, sees


def _refused(path: str) -> AbstractContextManager[None]:
    """Raises ``UserError`` with the edit that helps where a judge cannot be loaded."""
    return refused(
        lambda reason: (
            f"options.model: the judge {path} cannot be loaded: {reason}\n"
            "  Give a directory with config.json, safetensors and a tokenizer as transformers saves it, or a hub name "
            f"while online. A judge that sees pictures also needs torchvision: {install('vlm')}."
        )
    )


def _best(log_probs: list[float]) -> str:
    return f"{max(log_probs):.4f}" if log_probs else "no token"
