"""Diffusion models: sampling, replay, re-noising and back-propagation, for any family's adapter.

States and step maths are float32 whatever the weights' dtype. Sampling and replay call the same ``velocity`` with the
same shapes, so that the first ratio is 1 to the last bit.

Text encoders read captions in which a control token of a tokenizer is broken by a space.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.algorithms import sde
from mmrl.algorithms.objective import GraphSteps, Kind
from mmrl.algorithms.window import start as window_start
from mmrl.config.schema import Recipe
from mmrl.controller.feature_cache import FeatureCache
from mmrl.core import nan_check
from mmrl.core.randomness import generator
from mmrl.core.samples import make_samples
from mmrl.core.trajectory import ONLY_SAMPLED, Audio, DenoisingRows, Prompt, Rows, Sample, SampleId, Slot
from mmrl.core.transfer import picked, to_device
from mmrl.logging.card import Usage, What
from mmrl.models.policy import Policy
from mmrl.models.protocol import Weights
from mmrl.models.teachers import lessons
from mmrl.models.text.control_tokens import ControlTokens
from mmrl.models.text.spelled import SHOWN, SpelledTokens

from . import export
from .adapter import Adapter, Schedule
from .decoding import Decoder
from .denoiser import Denoiser
from .experts import awake, trained_steps
from .given import given_of
from .prompt_lengths import PromptLengths, readers


class Elsewhere(Protocol):
    """Samples in other processes (``served.py``), with the weights that ``policy`` has when it is asked."""

    policy: Policy | None

    def sample(
        self, slots: Sequence[Slot], ids: Sequence[SampleId], actions: Sequence[int], seed: int
    ) -> DenoisingRows: ...

    def updates(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class FlowPipeline(Denoiser):
    """Final class; see ``mmrl.models.protocol.DenoisingPipeline``. ``policy`` is what predicts, with LoRA or not."""

    def __init__(self, adapter: Adapter, policy: nn.Module, recipe: Recipe, device: torch.device) -> None:
        super().__init__(adapter, policy, recipe, device)
        self.makes: Literal["image", "video"] = adapter.makes
        self.reads_media = adapter.edits
        self.masks = adapter.masks
        self.cache: FeatureCache | None = None
        self._encoders_looked_at = False
        self.lengths_of_prompts: PromptLengths | None = None
        self.captions, self.decoded = Captions(adapter), Decoder(adapter, recipe, device)
        adapter.schedule(recipe.eval.steps)  # what it refuses, before anything trains
        if recipe.midway is not None and recipe.midway.draft_steps is not None:
            adapter.schedule(recipe.midway.draft_steps)
        ends_noisy = bool(adapter.schedule().sigmas[-1] > 0)  # then the last step can carry noise too
        self._noisy = self.steps if ends_noisy else self.steps - 1
        if recipe.algorithm.kind == "policy_gradient":
            self.sizes.refuse_noiseless(self._may_carry_noise())
        self.pairs = given_of(self)
        self.served: Elsewhere | None = None
        """What samples in training; None: this process, which samples for an evaluation in any case."""
        self.trained_steps = trained_steps(self, self._may_carry_noise())
        """How many of the steps that may train each of two models predicts in; empty of one model."""

    # -- conditioning ------------------------------------------------------------------------------------------------

    def encode(self, slots: Sequence[Slot]) -> list[str]:
        # One prompt at a time: text encoders are not bit-equal across batch shapes, and after a resume the missing
        # prompts are not the ones that were missing before.
        prompts = {self.key(slot.prompt): slot.prompt for slot in slots}
        if self.lengths_of_prompts is not None:
            for prompt in prompts.values():
                self.lengths_of_prompts.check(prompt)
        negatives = self.negatives.needed(slots)
        texts = list(dict.fromkeys([*prompts, *negatives]))
        pairs = {
            self.pairs.key(slot.prompt): slot.prompt
            for slot in slots
            if self.pairs is not None and slot.step != ONLY_SAMPLED
        }
        keys = [*texts, *pairs]
        self.features.hold(keys)  # before the first put, which drops what nobody holds
        try:
            missing = [k for k in texts if k not in self.features and not self._kept(k)]
            if missing:
                eyes = [self.adapter.vae] if self.adapter.edits else []
                with self.offloaded.using(*self.adapter.text_encoders, *eyes), torch.no_grad():
                    for key in missing:
                        made = self._encoded(prompts[key]) if key in prompts else self._negative(negatives[key])
                        prompt_id = prompts[key].id if key in prompts else "of guidance"
                        nan_check.check_features(made, prompt_id)
                        if not self._encoders_looked_at:
                            nan_check.check_encoders(self.adapter.text_encoders, prompt_id)
                            self._encoders_looked_at = True
                        self.features.put(key, made)
                        if self.cache is not None:
                            self.cache.write(key, self.features.get(key))
                self.offloaded.rest()
            for key, prompt in pairs.items():
                if self.pairs is not None and key not in self.features:
                    pair = self.pairs.encoded(prompt)
                    nan_check.check_given(pair, prompt.id)
                    self.features.put(key, pair)
        except BaseException:
            self.features.release(keys)
            raise
        return keys

    @property
    def frozen(self) -> dict[str, nn.Module]:
        """The parts that do not train, by their names in messages."""
        adapter = self.adapter
        names = [
            name
            for name in (*adapter.encoders, *adapter.connects)
            if getattr(self.adapter.pipe, name, None) is not None
        ]
        shown = [f"{name}_1" if f"{name}_2" in names else name for name in names]
        named = zip((name.replace("_", " ") for name in shown), self.adapter.text_encoders, strict=True)
        return {**dict(named), "VAE": self.adapter.vae}

    def unused_negative(self, prompt: Prompt) -> str | None:
        return self.negatives.unused(prompt)

    def _negative(self, prompt: Prompt) -> dict[str, Tensor]:
        """Features of what guidance moves away from, beside every picture: of the text alone, or of the text and what
        is edited."""
        adapter, given = self.adapter.at(self.sizes.of(prompt)), self.negatives.given(prompt)
        text = adapter.negative if given is None else self.captions.plain(given)
        if adapter.sees:
            return adapter.encode_seen(text, adapter.sources(prompt))
        return adapter.encode(text) if given is None else adapter.encode_negative(text)

    def _encoded(self, prompt: Prompt) -> dict[str, Tensor]:
        adapter, text = self.adapter.at(self.sizes.of(prompt)), self.captions.plain(prompt.text)
        if not adapter.edits:
            return adapter.encode(text)
        sources = adapter.sources(prompt)
        embeds = adapter.encode_seen(text, sources) if adapter.sees else adapter.encode(text)
        return embeds | adapter.encode_source(sources)

    def _kept(self, key: str) -> bool:
        """Whether the features of ``key`` were on disk from before; then they are in the store."""
        found = None if self.cache is None else self.cache.read(key)
        if found is not None:
            self.features.put(key, {name: t.to(self.device) for name, t in found.items()})
        return found is not None

    # -- sampling ----------------------------------------------------------------------------------------------------

    def noisy_steps(self, step: int) -> list[int]:
        window = self.recipe.denoising.window
        if window is None:
            return list(range(self._noisy))
        if window.strategy == "random":
            places = len(self._may_carry_noise()) - window.size + 1
            drawn = torch.randint(places, (), generator=generator(self.recipe.seed, step, "window"))
            start = window.first + int(drawn)
        else:
            start = window_start(window, self._may_carry_noise(), step)
        return list(range(start, start + window.size))

    def _may_carry_noise(self) -> range:
        """All that ``noisy_steps`` may be of."""
        window = self.recipe.denoising.window
        if window is None:
            return range(self._noisy)
        return range(window.first, self._noisy if window.last is None else window.last)

    def sync(self, policy: Policy) -> None:
        if self.served is not None:
            self.served.policy = policy

    @torch.no_grad()
    def sample(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        *,
        evaluate: bool = False,
        version: tuple[int, str] | None = None,
    ) -> DenoisingRows:
        if self.served is not None and not evaluate:
            return self.served.sample(slots, ids, actions, seed)
        return super().sample(slots, ids, actions, seed, evaluate=evaluate, version=version)

    def samples(self, rows: DenoisingRows, inputs: frozenset[str]) -> list[Sample]:
        made = make_samples(rows, self.images(rows), inputs)
        if "audio" not in inputs:
            return made
        sound = zip(made, self.waves(rows), strict=True)
        return [replace(sample, audio=Audio(wave, self.adapter.sound_rate)) for sample, wave in sound]

    @torch.no_grad()
    def waves(self, rows: DenoisingRows) -> Tensor:
        """The sound of clips, float32 ``[B, channels, N]`` in [-1, 1] on the CPU."""
        with self.offloaded.using(self.adapter.vae):
            waves = self.adapter.decode_sound(rows.clean).float()
            return nan_check.checked_pictures(waves, rows.clean, rows.ids).clamp(-1, 1).cpu()

    @torch.no_grad()
    def images(self, rows: DenoisingRows) -> Tensor:
        """Decode clean results to float32 ``[B, 3, H, W]``, clips ``[B, F, 3, H, W]``, in [0, 1]."""
        with self.offloaded.using(self.adapter.vae):  # it stays for the next micro-batch
            return nan_check.checked_pictures(self.decoded(rows.clean), rows.clean, rows.ids)

    def updates(self) -> dict[str, float]:
        if self.served is not None:
            return self.served.updates()
        return {"perf/shared_steps": self.prefix.saved} if self.prefix.used else {}

    def sleep(self) -> None:
        self.offloaded.rest()

    def close(self) -> None:
        self.features.close()
        if self.served is not None:
            self.served.close()

    def _schedule(self, rows: DenoisingRows) -> Schedule:
        """The training rollout's, for the size of ``rows``."""
        return self.sizes.adapted(rows.slots).schedule()

    # -- updates -----------------------------------------------------------------------------------------------------

    def entries(self, kind: Kind) -> int:
        if kind in ("pathwise", "offline"):
            return 1
        window = self.recipe.denoising.window
        if kind == "policy_gradient":
            return window.size if window else self._noisy
        return self.renoising.entries

    def lengths(self, rows: Rows) -> list[int]:
        return [1] * len(rows)

    def recorded(self, rows: Rows, entries: Sequence[int]) -> dict[str, Tensor]:
        if not isinstance(rows, DenoisingRows) or rows.log_probs is None or rows.actions is None:
            return {}
        schedule, every = self._schedule(rows), list(self._may_carry_noise())
        c = self.coefficients(schedule, every)
        steps = rows.actions[list(entries)]
        constants = {
            "std": c.std[steps],
            "kl_std": c.kl_std[steps],
            "dt": c.dt[steps],
            "c_v": c.c_v[steps],
            "every_std": c.std[every],
            "every_c_v": c.c_v[every],
        }
        log_probs = picked(rows.log_probs, entries, 1)
        return {"log_probs": log_probs} | {name: to_device(v, self.device) for name, v in constants.items()}

    def replay(
        self, rows: DenoisingRows, actions: Sequence[int], needs: frozenset[str], weights: Weights
    ) -> dict[str, Tensor]:
        self.offloaded.rest()  # what decoded
        self.prefix.forget()
        assert rows.states is not None
        assert rows.actions is not None
        steps = [int(rows.actions[a]) for a in actions]
        c = self.coefficients(self._schedule(rows), rows.actions.tolist())
        mine, following = self._means(rows, actions, c), [self.counted(rows.states[:, a + 1]) for a in actions]
        made = list(zip(following, mine, steps, strict=True))
        out = {"log_probs": torch.stack([sde.log_prob(after, mean, c, s) for after, mean, s in made], 1)}
        if "reference_distance" in needs:
            with torch.no_grad(), weights("reference"):
                reference = self._means(rows, actions, c)
            out["reference_distance"] = torch.stack(list(map(sde.squared_distance, mine, reference)), 1)
        if "teacher_kl" in needs:
            out |= self._taught(rows, actions, c, mine, weights)
        if "old_distance" in needs:  # of the mean that was sampled from: the noise is known from its seed
            shape = self.sizes.shape(rows.slots)
            given = [self.counted(self.noise(rows.ids, f"step{s}", self.recipe.seed, shape)) for s in steps]
            drawn = [after - c.std[s].item() * z for (after, _, s), z in zip(made, given, strict=True)]
            out["old_distance"] = torch.stack(list(map(sde.squared_distance, mine, drawn)), 1)
        return out

    def _means(self, rows: DenoisingRows, actions: Sequence[int], c: sde.Coefficients) -> list[Tensor]:
        """The mean ``[B, ...]`` that each of the ``actions`` moves to, what is ``counted`` of it, in one forward of
        all."""
        assert rows.states is not None
        assert rows.actions is not None
        steps, states = [int(rows.actions[a]) for a in actions], [rows.states[:, a] for a in actions]
        schedule, features = self._schedule(rows), self.batch_features(rows.slots * len(steps))
        timestep = torch.cat([schedule.timesteps[s].expand(len(rows)) for s in steps])
        velocities = self.velocity(torch.cat(states), timestep, features).chunk(len(steps))
        moved = zip(states, velocities, steps, strict=True)
        return [self.counted(sde.step_mean(state, v, c, s)) for state, v, s in moved]

    def _taught(
        self, rows: DenoisingRows, actions: Sequence[int], c: sde.Coefficients, mine: list[Tensor], weights: Weights
    ) -> dict[str, Tensor]:
        """``teacher_kl``, the divergence of each step from all teachers of a row, and ``teacher_loss``, their sum by
        their weights, ``[B, K]``. The KL of a step is ``|mu - mu_teacher|^2 / (2 e^2)`` with the ``e`` of
        ``mmrl.algorithms.denoising``, mean over dimensions (Flow-OPD, arXiv 2605.08063; DiffusionOPD), and with a
        gradient of its own: Flow-OPD's code takes it as a reward."""
        assert rows.actions is not None
        steps = rows.actions[list(actions)]
        none = torch.zeros(len(rows), len(steps), device=self.device)
        out = {"teacher_kl": none, "teacher_loss": none}
        for teacher, copy, index in lessons(self.recipe, rows.slots):
            with torch.no_grad(), weights(copy):
                theirs = self._means(rows.rows(index), actions, c)
            at = to_device(torch.tensor(index), self.device)
            distance = torch.stack([sde.squared_distance(m[at], t) for m, t in zip(mine, theirs, strict=True)], 1)
            scale = 2 * c.kl_std[steps].square() if teacher.divergence == "reverse" else c.c_v[steps].square()
            value = distance / to_device(scale, self.device)
            for name, times in (("teacher_kl", 1.0), ("teacher_loss", teacher.weight)):
                out[name] = out[name].index_add(0, at, times * value)
        return out

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        if self.pairs is None:
            raise TypeError("this pipeline trains on samples, and has no given pictures")
        return self.pairs.compare(rows, needs, weights)

    def renoise(
        self, rows: DenoisingRows, level: int, seed: int, needs: frozenset[str], weights: Weights
    ) -> dict[str, Tensor]:
        self.offloaded.rest()  # what decoded
        scales = {self.renoising.guidance, self.renoising.reference_guidance}
        features = {guided: self.batch_features(rows.slots, guided=guided) for guided in {s > 1 for s in scales}}

        def velocity(x: Tensor, timestep: Tensor, guidance: float) -> Tensor:
            return self.velocity(x, timestep, features[guidance > 1], guidance)

        made = self.renoising(rows, level, seed, needs, weights, velocity)
        return {name: value if name == "sigma" else self.counted(value) for name, value in made.items()}

    def generate(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        path: GraphSteps,
        seed: int,
        needs: frozenset[str],
        weights: Weights,
    ) -> dict[str, Tensor]:
        features = self.batch_features(slots)
        schedule, shape = self.sizes.adapted(slots).schedule(), self.sizes.shape(slots)
        c = self.coefficients(schedule, [])
        x = self.adapter.started(self.initial(ids, seed, schedule, shape), features, schedule.start)
        distances = []

        def velocity(x: Tensor, i: int) -> Tensor:
            timestep = schedule.timesteps[i].expand(len(ids))
            if i < path.first:
                with torch.no_grad():
                    return self.velocity(x, timestep, features)
            return with_graph(x, timestep)

        def with_graph(x: Tensor, timestep: Tensor) -> Tensor:
            v = checkpoint(self.velocity, x, timestep, features, use_reentrant=False)
            if "reference_distance" in needs:
                with torch.no_grad(), weights("reference"):
                    reference = self.velocity(x, timestep, features)
                distances.append(sde.squared_distance(v, reference))
            return v

        for i in range(path.last):
            x = sde.step_mean(x, velocity(x, i), c, i)
        s = schedule.sigmas[path.last].item()
        predicted = [x - s * velocity(x, path.last)]
        for n in range(path.renoised):
            eps = self.noise(ids, f"renoise{n}", seed, shape)
            x = (1 - s) * predicted[0].detach() + s * eps
            predicted.append(x - s * velocity(x, path.last))
        x0, eps = predicted[0], self.initial(ids, seed, schedule, shape) / schedule.start
        for a, b in path.jumps:
            x = (1 - a) * x0 + a * eps
            v = with_graph(x, self.adapter.timestep(torch.full((len(ids),), a, device=self.device)))
            predicted.append((x + (b - a) * v - b * eps) / (1 - b))
        x = torch.cat([self.adapter.whole(one, features) for one in (predicted[1:] if path.jumps else predicted)])
        with self.offloaded.using(self.adapter.vae):  # it stays for the backward, which comes after this returns
            out = {"images": self.decoded.shown(x), "latents": x.detach()}
        out |= {"from": torch.tensor([a for a, _ in path.jumps])} if path.jumps else {}
        return out | ({"reference_distance": torch.stack(distances).mean(0)} if distances else {})

    # -- export ------------------------------------------------------------------------------------------------------

    def write(self, out: Path, what: What) -> None:
        with awake(self.adapter.model):
            export.write(self.adapter, self.policy, self.recipe, out, what)

    def usage(self, folder: str, what: What, prompt: Prompt) -> Usage:
        adapter = self.adapter.at(self.sizes.of(prompt))
        return export.usage(adapter, self.recipe, what, folder, prompt.text, self.negatives.given(prompt))


class Captions:
    """Final class. The captions of the pipeline of ``adapter``, which may have several tokenizers."""

    def __init__(self, adapter: Adapter) -> None:
        found = [getattr(adapter.pipe, adapter.tokenizer_of(name), None) for name in readers(adapter)]
        self._tokens = [ControlTokens(tokenizer) for tokenizer in found if tokenizer is not None]
        self._told = False

    def plain(self, text: str) -> str:
        """``text`` without control tokens of the encoders; equal to it where it spells none."""
        made = text
        for tokens in self._tokens:
            made = tokens.broken(made, SHOWN)
        if made != text and not self._told:
            self._told = True
            warnings.warn(
                f"the prompt {text[:200]!r} spells a control token of a text encoder: it is read as {made[:200]!r}, as "
                "every other such prompt",
                SpelledTokens,
                stacklevel=2,
            )
        return made
