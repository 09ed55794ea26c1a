"""CLAP similarity of a clip's sound and its prompt, through transformers.

``score`` is (cosine + 1) / 2 (Wu et al. 2023, arXiv 2211.06687), as OmniNFT's authors use it (arXiv 2605.12480).
``path`` is a directory or a hub name; only safetensors weights are read, in float32.

Departs: of a sound longer than the model's 10 s the first 10 are heard; the model's own reader takes a random part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

import numpy
import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import check_tokens, frozen, refused
from mmrl.core.reward_contract import Context, Failed, Value, weights_at
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Audio, Sample
from mmrl.rewards.sleeping import Sleeping

DEFAULT = "laion/clap-htsat-unfused"


@mmrl.reward(inputs=("audio",), device=True, paths=("path",), models=weights_at(DEFAULT), checks=True)
class Clap(Sleeping):
    """How well the sound fits the prompt, 0 to 1. ``key``: the key of a prompt's meta with the text of the sound; None
    takes the whole prompt. Texts are cut at the text encoder's length."""

    def __init__(self, path: str = DEFAULT, key: str | None = None) -> None:
        self.key = key
        self.model, self.processor = self.kept(partial(_load, path))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, context: Context) -> list[Value]:
        """A prompt without the text of its sound fails."""
        self.wake(context.device)
        wanted = [s.prompt.text if self.key is None else s.prompt.meta.get(self.key) for s in samples]
        scores: list[Value] = [Failed(f"the prompt's meta has no text under {self.key!r}; correct options.key")] * len(
            samples
        )
        rows = [i for i, text in enumerate(wanted) if isinstance(text, str) and text.strip()]
        if not rows:
            return scores
        texts = list(dict.fromkeys(str(wanted[i]) for i in rows))
        tokens = self.processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        reader = self.processor.feature_extractor
        heard = [_mono(sound, reader) for i in rows if (sound := samples[i].audio) is not None]
        features = reader(heard, sampling_rate=reader.sampling_rate, return_tensors="pt")["input_features"]
        found = self.model(
            input_ids=tokens["input_ids"].to(context.device),
            attention_mask=tokens["attention_mask"].to(context.device),
            input_features=features.float().to(context.device),
            is_longer=torch.zeros(len(rows), 1, dtype=torch.bool, device=context.device),
        )
        of_text = found.text_embeds[[texts.index(str(wanted[i])) for i in rows]]
        cosines = torch.nn.functional.cosine_similarity(found.audio_embeds, of_text, dim=-1)
        for i, cosine in zip(rows, cosines.tolist(), strict=True):
            scores[i] = (cosine + 1) / 2
        return scores


score = Clap


def _mono(sound: Audio, reader: Any) -> numpy.ndarray[Any, Any]:
    """The mean of the channels at the rate that ``reader`` wants, ``[N]``, no longer than it hears at once."""
    from scipy.signal import resample_poly

    most = int(reader.nb_max_samples * sound.rate / reader.sampling_rate) + 1
    wave, rate = sound.wave.mean(0)[:most].double().numpy(), int(reader.sampling_rate)
    common = gcd(rate, sound.rate)
    made = wave if rate == sound.rate else resample_poly(wave, rate // common, sound.rate // common)
    return made[: reader.nb_max_samples]


def _load(path: str) -> tuple[Any, Any]:
    """A CLAP model (frozen, float32, on the CPU) and its processor. Raises ``UserError``."""
    allow_cpu_only()  # before transformers imports torchaudio
    from transformers import ClapConfig, ClapModel, ClapProcessor

    check_files(path)
    mmrl.before_loading()
    with refused(
        lambda reason: (
            f"cannot load a CLAP model from {path}: {reason}; set the reward's options.path to a directory that "
            "save_pretrained wrote, or to a hub name while online"
        )
    ):
        heard: Any = ClapConfig.from_pretrained(path).audio_config
        if heard.enable_fusion:
            raise UserError(
                f"the reward's options.path: {path} joins parts of a sound that it chooses at random (enable_fusion), "
                f"so that scores differ between calls; take one without, such as {DEFAULT}"
            )
        model = frozen(ClapModel, path, dtype=torch.float32)
        processor: Any = ClapProcessor.from_pretrained(path)
        check_tokens(processor.tokenizer, model.config.text_config)
    return model, processor
