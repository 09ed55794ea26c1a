"""Language and vision-language models as a pipeline: sample, recompute and decode tokens, for any conditioner.

Sampling uses transformers' ``generate`` in the training process with the training weights, or an engine that has its
own weights. Both pad prompts on the left, as training does, so that responses align; padding is never attended to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from PIL.Image import Image, new
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.algorithms.objective import Kind
from mmrl.algorithms.policy_gradient import divergence as estimate
from mmrl.algorithms.sdpo import COPY, SDPOSettings
from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.core import nan_check, sharded_loading
from mmrl.core.episode import Episode
from mmrl.core.errors import UserError
from mmrl.core.media import Clip, open_image
from mmrl.core.notices import tell
from mmrl.core.offload import Offloaded, apart
from mmrl.core.rollout_engine import AnswersAsItGoes, Completion, Request, RolloutEngine, Settings
from mmrl.core.samples import make_samples
from mmrl.core.trajectory import Prompt, Rows, Sample, SampleId, Segment, Slot, TextRows, text_rows
from mmrl.core.transfer import to_device
from mmrl.episodes.journal import Journal
from mmrl.episodes.loading import draws
from mmrl.episodes.play import InStep
from mmrl.episodes.world import World
from mmrl.families.text import drawing, engine_sampling, export, scoring
from mmrl.inference.lazy_engine import LazyEngine, unfailing
from mmrl.inference.slots import Slots
from mmrl.logging.card import Usage, What
from mmrl.models.context_parallel import SplitRows
from mmrl.models.policy import Policy
from mmrl.models.protocol import Weights
from mmrl.models.teachers import lessons
from mmrl.models.text import generation, packing
from mmrl.models.text.base_model import base_model
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.critic import Critic
from mmrl.models.text.divergence import Kind as Divergence
from mmrl.models.text.divergence import Outputs, divergence
from mmrl.models.text.features import PER_TOKEN, as_weights, features_of, joined, key_of, with_told
from mmrl.models.text.given import GivenTexts, Pairs, Responses
from mmrl.models.text.likelihood import Vocabulary, entropy, head_log_probs, token_log_probs
from mmrl.models.text.overlong import Fitter, Limit, limit_of
from mmrl.models.text.shared_pictures import Shared
from mmrl.models.text.stop_strings import stops_of
from mmrl.models.text.thoughts import left_open
from mmrl.models.text.token_sampling import without
from mmrl.models.text.told import Contents, Told, key_of_told, whole_key

if TYPE_CHECKING:  # slow to import
    from transformers import Emu3ForConditionalGeneration

MISMATCHED = "mismatched_log_ratio"


@dataclass(frozen=True)
class _Said:
    """What the policy says at the ``K`` places behind the prompts of ``rows``: its outputs, and the ``tokens`` there
    with their ``log_probs`` ``[K]``; ``whole``: outputs are logits."""

    rows: TextRows
    own: Outputs
    tokens: Tensor
    log_probs: Tensor
    temperature: float
    whole: bool

    def part(self, index: Sequence[int]) -> tuple[Tensor, Outputs]:
        """The places of the rows ``index``, and the outputs there."""
        some = torch.tensor([n in index for n in range(len(self.rows))])
        places = some.repeat_interleave(torch.tensor(self.rows.responses)).nonzero()[:, 0]
        at = to_device(places, self.tokens.device)
        return at, self.own if len(index) == len(self.rows) else Outputs(self.own.states[at], self.own.layer)


class LanguagePipeline:
    """Final class; see ``mmrl.models.protocol.TextPipeline``. ``policy`` is the Hugging Face model."""

    makes: Literal["text"] = "text"

    def __init__(
        self,
        conditioner: Conditioner,
        policy: nn.Module,
        recipe: Recipe,
        device: torch.device,
        engine: RolloutEngine | None = None,
    ) -> None:
        self.conditioner, self.policy, self.recipe, self.device = conditioner, policy, recipe, device
        self.reads_media = bool(conditioner.forbidden)  # such a model has tokens that stand for pictures
        self.frame = conditioner.frame
        """Where which token of a picture stands, of a model that writes pictures."""
        self._guided = self.frame is not None and self.frame.guided
        self.engine, self.given = engine, engine_sampling.GivenWeights()
        self._synced: object = None
        self._source: Policy | None = None
        self._slots: Slots | None = None
        self._told_once = False
        self.critic: Critic | None = None
        self.taught_by({})
        self.settings = recipe.decoding
        self.features = FeatureStore(recipe.features.budget, recipe.features.folder)
        self._encoding = threading.Lock()
        self.dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self.context: int | None = getattr(base_model(policy).config.get_text_config(), "max_position_embeddings", None)
        self.engine_context: int | None = engine_sampling.engine_context(recipe, self.context)
        self.fitter = Fitter(conditioner, recipe.overlong)
        self.shared = Shared(policy)
        self.packing = packing.way(recipe, policy, device, conditioner)
        self.stops = stops_of(self.settings.stop, self.settings.min_new_tokens, conditioner)
        self.world = None if recipe.environment is None else World(recipe, conditioner, device)
        self.pairs: GivenTexts | None = None
        if recipe.algorithm.trains_on in ("pairs", "responses"):
            self.pairs = Pairs(self) if recipe.algorithm.trains_on == "pairs" else Responses(self)

    def taught_by(self, teachers: Mapping[str, nn.Module]) -> None:
        """Have these whole models teach, by their paths; with ``model.offload`` they are on the device in updates."""
        self.teachers = teachers
        moves = self.recipe.model.offload and apart(self.device)
        self._resting = Offloaded(teachers.values() if moves else (), self.device)

    # -- conditioning ------------------------------------------------------------------------------------------------

    def encode(self, slots: Sequence[Slot]) -> list[str]:
        with self._encoding:  # asynchronous rollouts encode prompts while another step is trained
            return self._encode(self._begun(slots))

    def _begun(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """``slots`` with what an environment shows first in their prompts. Raises ``BadPromptError``."""
        return slots if self.world is None else [self.world.begun(slot) for slot in slots]

    def unused_negative(self, prompt: Prompt) -> str | None:
        if prompt.negative_prompt is None or self._guided:
            return None
        why = "text has none; take" if self.frame is None else "sampling.picture.guidance_scale is 1; raise it, or take"
        return (
            f"data: the prompt {prompt.id} has a negative_prompt, which guidance of pictures and clips moves away "
            f"from, and {why} negative_prompt out of the records"
        )

    def _encode(self, slots: Sequence[Slot]) -> list[str]:
        for slot in slots:
            if why := self.unused_negative(slot.prompt):
                raise UserError(why)
        prompts = {key_of(slot.prompt): slot.prompt for slot in slots}
        paired = {} if self.pairs is None else {self.pairs.key(slot.prompt): slot.prompt for slot in slots}
        keys = [*prompts, *paired]
        self.features.hold(keys)  # before anything is put: the store may drop features that nobody holds
        try:
            made = {
                key: as_weights(self.fitter.encode(prompt, self.limit)[1], self.policy, self.device)
                for key, prompt in prompts.items()
                if key not in self.features
            }
            for key, prompt in paired.items():
                if self.pairs is not None and key not in self.features:
                    features = made.get(key_of(prompt)) or self.features.get(key_of(prompt))
                    made[key] = self.pairs.encoded(self._shown(prompt), len(features["input_ids"]))
        except BaseException:
            self.features.release(keys)
            raise
        for key, features in made.items():
            self.features.put(key, features)
        return keys

    def _shown(self, prompt: Prompt) -> Prompt:
        """As the model is shown it: cut, where it is too long and the recipe says so."""
        return self.fitter.shown(prompt, self.limit)

    @property
    def limit(self) -> Limit | None:
        """The most tokens of a prompt."""
        settings, samples = self.settings, self.pairs is None or self.recipe.eval.rewards
        context = self.context if samples else None  # Pairs checks the context with the responses
        key = "sampling.max_new_tokens" if self.recipe.environment is None else "environment.max_tokens"
        return limit_of(settings.max_prompt_tokens, self.recipe.response_tokens, context, self.engine_context, key)

    def _negatives(self, slots: Sequence[Slot]) -> list[dict[str, Tensor]]:
        """The features of what guidance moves away from for each prompt; none without guidance."""
        if not self._guided:
            return []
        return [as_weights(self.conditioner.negative(slot.prompt), self.policy, self.device) for slot in slots]

    def _read(self, rows: TextRows, shown: Sequence[Mapping[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """The model's arguments: prompts padded on the left, then what is behind them, ``[R, T]``. ``shown``: see
        ``_outputs``."""
        if shown is None:
            found = zip(rows.features, rows.prompts, strict=True)
            prompts = [features_of(self.features, key, length) for key, length in found]
        else:
            kept = [self.features.get(key) for key in rows.features]
            whole = [{name: of[name] for name in of.keys() - PER_TOKEN} for of in kept]
            prompts = [{**of, **hint} for of, hint in zip(whole, shown, strict=True)]
        keys = [" ".join(s.features for s in of if s.features) for of in rows.segments]
        for n, played in enumerate(rows.episodes or ()):
            if told := self._told_in(rows.segments[n], played):
                prompts[n] = with_told(prompts[n], told)
        tokens = torch.where(rows.inside, rows.padded("tokens"), self.conditioner.pad_token)
        negatives = self._negatives(rows.slots)
        behind = [torch.cat([of, of]) if negatives else of for of in (tokens, rows.inside)]
        return self._inputs(keys, prompts + negatives, *behind)

    def _told_in(self, segments: Sequence[Segment], played: Episode) -> list[tuple[int, Mapping[str, Tensor]]]:
        """The features of the pictures that a row was told, each from a token on. They are made again of the episode
        where the store has dropped them, and where another device sampled it."""
        found: list[tuple[int, Mapping[str, Tensor]]] = []
        for segment in segments[1:]:
            if segment.features is not None and self.world is not None:
                (key, less), n = whole_key(segment.features), segment.stop - segment.start
                if key not in self.features:
                    told = played.turns[segment.turn - 1].told
                    self._told(self.world.role, [observation.parts for observation in told])
                made = self.features.get(key)
                cut = {k: of[len(of) - less - n :][:n] if k in PER_TOKEN else of for k, of in made.items()}
                found.append((segment.start, cut))
        return found

    def _told(self, role: Literal["user", "tool"], contents: Contents) -> Told:
        """What ``Conditioner.told`` makes; the features of pictures are on the device, and in the store."""
        told = self.conditioner.told(role, contents)
        if not told.features:
            return told
        features = as_weights(told.features, self.policy, self.device)
        key = key_of_told(role, contents)
        self.features.put(key, features)
        return replace(told, features=features, key=key)

    def _inputs(self, keys: Sequence[str], prompts: Sequence[dict[str, Tensor]], *behind: Tensor) -> dict[str, Tensor]:
        chat = self.conditioner
        made = joined(prompts, chat.pad_token, *behind, own_positions=chat.own_positions)
        return self.shared.expected(keys, prompts, made)

    # -- sampling ----------------------------------------------------------------------------------------------------

    def sync(self, policy: Policy) -> None:
        engine, self._source = self.engine, policy
        self._resting.rest()
        if policy.tag == self._synced:
            return
        if self._slots is not None:
            self._slots.renewed()
        if engine is None:
            self._synced = policy.tag
            return
        if policy.weights.in_shards:  # gathered by all ranks together: one rank cannot send them again
            self.given.push(engine, policy)
        else:
            unfailing(engine, lambda: None, self._push)
        self._synced = policy.tag

    def _push(self) -> None:
        assert self.engine is not None
        assert self._source is not None
        self.given.again(self.engine, self._source)

    def _ask(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        """Sample with the engine, under the weights of the last update, which the policy still has; without one with
        the policy itself."""
        engine = self.engine
        if engine is None:
            assert self._slots is not None
            return self._slots.generate(requests, settings)
        self.given.asked(len(requests))
        drawn = unfailing(engine, self._push, lambda: engine.generate(requests, settings))
        return [self.stops.ended(made, request) for made, request in zip(drawn, requests, strict=True)]

    def answering(self) -> AnswersAsItGoes | None:
        """Who answers ``requests`` as they come: the engine, or this process; None where that one cannot."""
        if self.engine is not None:
            engine = self.engine.ready() if isinstance(self.engine, LazyEngine) else self.engine
            return engine if isinstance(engine, AnswersAsItGoes) else None
        if self._slots is None and self._cut is None and self._vocabulary is None:
            self._slots = Slots(
                self,
                self._inputs,
                self._autocast,
                self.context or sys.maxsize,
                self.recipe.sampled_at_once,
                record=self.recipe.performance.compile and self.device.type == "cuda",
            )
        return self._slots

    @property
    def refills(self) -> bool:
        asked = (self.recipe.performance.compile or self.device.type == "cuda") and self.frame is None
        if not asked or self.engine is not None or self.device.type == "meta":
            return False
        if (self.world is not None and self.world.plays) or self.answering() is None or self._slots is None:
            return False
        if self._slots.refusal and not self._told_once:
            tell(f"every batch is sampled until its longest response ends: {self._slots.refusal}")
            self._told_once = True
        return not self._slots.refusal

    def updates(self) -> dict[str, float]:
        return self.given.row() | (self.engine.metrics() if isinstance(self.engine, LazyEngine) else {})

    def wake(self) -> bool:
        return isinstance(self.engine, LazyEngine) and self.engine.wake()

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()
            self._synced = None  # it may have freed its weights
        if self.world is not None and self.world.drawer is not None:
            self.world.drawer.sleep()

    def close(self) -> None:
        self.features.close()
        if self.engine is not None:
            self.engine.close()

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
    ) -> TextRows:
        temperature = self.recipe.eval.temperature if evaluate else None
        try:
            return self._drawn(slots, ids, seed, self.settings.temperature if temperature is None else temperature)
        finally:
            if self._slots is not None:
                self._slots.rest()

    @torch.no_grad()
    def begin(
        self,
        slots: Sequence[Slot],
        ids: Sequence[SampleId],
        actions: Sequence[int],
        seed: int,
        until: int,
        version: tuple[int, str] | None = None,
    ) -> TextRows:
        drawn = self._drawn(slots, ids, seed, self.settings.temperature, until)
        return generation.begun(drawn, until, self.settings.max_new_tokens)

    @torch.no_grad()
    def finish(self, begun: TextRows, actions: Sequence[int], seed: int, at: int) -> TextRows:
        def go_on(rows: TextRows) -> TextRows:
            if self.engine is not None or self.refills:
                return self.continue_generation(rows, self.settings.max_new_tokens - at, seed)
            inputs, before = self._read(rows), rows.padded("log_probs")
            limits = [slot.prompt.max_new_tokens for slot in rows.slots]
            with self._autocast():
                made = generation.generate(
                    self, inputs, rows.ids, limits, seed, self.settings.temperature, before=before
                )
            return self._checked(rows.slots, rows.ids, made)

        return generation.finished(begun, go_on)

    def _drawn(
        self, slots: Sequence[Slot], ids: Sequence[SampleId], seed: int, temperature: float, until: int | None = None
    ) -> TextRows:
        """Responses from their first token on; ``until``: only so many tokens of each."""
        slots = self._begun(slots)
        if self.world is not None and self.world.plays:
            return self._played(self.world, slots, ids, seed, temperature)
        if self.engine is None and not self.refills:
            keys = [key_of(slot.prompt) for slot in slots]
            inputs = self._inputs(keys, [self.features.get(key) for key in keys] + self._negatives(slots))
            limits = [slot.prompt.max_new_tokens for slot in slots]
            with self._autocast():
                drawn = generation.generate(self, inputs, ids, limits, seed, temperature, until)
        else:
            settings = engine_sampling.settings_of(self.recipe, temperature, self.conditioner.stop_tokens)
            made = self._ask(self.requests(slots, ids, seed), replace(settings, cut_after=until))
            drawn = engine_sampling.stack(made, self.conditioner.forbidden, self.device)
        rows = self._checked(slots, ids, drawn)
        return rows if self.world is None else rows.repeated(self.world.texts)

    def _played(
        self, world: World, slots: Sequence[Slot], ids: Sequence[SampleId], seed: int, temperature: float
    ) -> TextRows:
        """An episode of each sample."""
        settings = engine_sampling.settings_of(self.recipe, temperature, self.conditioner.stop_tokens)
        answers = self.answering() or InStep(self._ask)
        room = self.context if self.engine is None else self.engine.max_model_len
        requests, asked = self.requests(slots, ids, seed), [self._shown(slot.prompt) for slot in slots]
        played = world.play(answers, slots, asked, ids, requests, settings, self.stops, room, self._told)
        tokens = [torch.tensor(one.tokens, dtype=torch.long, device=self.device) for one in played]
        log_probs = [torch.tensor(one.log_probs, dtype=torch.float32, device=self.device) for one in played]
        cut = torch.tensor([one.cut for one in played], device=self.device)
        behind = [one.segments for one in played]
        made = TextRows.answers(slots, ids, self._prompts(slots), tokens, cut, log_probs, behind=behind)
        nan_check.check_tokens(made.padded("log_probs"), made.padded("action_mask").float(), ids)
        return replace(made, episodes=[one.episode for one in played])

    def _checked(
        self, slots: Sequence[Slot], ids: Sequence[SampleId], drawn: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> TextRows:
        tokens, log_probs, mask, truncated = drawn
        nan_check.check_tokens(log_probs, mask, ids)
        lengths = mask.sum(1).long().tolist()
        cut = [[row[:n] for row, n in zip(column, lengths, strict=True)] for column in (tokens, log_probs)]
        prompts, behind = self._prompts(slots), None
        if self.frame is not None:
            behind = [self.frame.segments(len(of), n) for (_, of), n in zip(prompts, lengths, strict=True)]
        return TextRows.answers(slots, ids, prompts, cut[0], truncated, cut[1], behind=behind)

    def _prompts(self, slots: Sequence[Slot]) -> list[tuple[str, Tensor]]:
        """The key of each prompt's features, and its tokens."""
        keys = [key_of(slot.prompt) for slot in slots]
        tokens = {key: self.features.get(key)["input_ids"] for key in dict.fromkeys(keys)}
        return [(key, tokens[key]) for key in keys]

    def unwritten(self, slots: Sequence[Slot], ids: Sequence[SampleId]) -> TextRows:
        going = torch.ones(len(ids), dtype=torch.bool, device=self.device)
        none = [torch.empty(0, device=self.device)] * len(ids)
        tokens = [t.long() for t in none]
        made = TextRows.answers(slots, ids, self._prompts(slots), tokens, going, none, tokens)
        return replace(made, under_way=going)

    @torch.no_grad()
    def continue_generation(self, rows: TextRows, most: int, seed: int) -> TextRows:
        before = engine_sampling.unstack(rows)
        asked = self.requests(rows.slots, rows.ids, seed)
        settings = engine_sampling.settings_of(self.recipe, self.settings.temperature, self.conditioner.stop_tokens)
        drawn = self._ask(
            [replace(r, partial=done.token_ids) for r, done in zip(asked, before, strict=True)],
            replace(settings, cut_after=most),
        )
        made = [engine_sampling.appended(done, more) for done, more in zip(before, drawn, strict=True)]
        grown = self._checked(
            rows.slots, rows.ids, engine_sampling.stack(made, self.conditioner.forbidden, self.device)
        )
        kept = grown.responses  # fewer tokens if a forbidden one was drawn: it ends the row
        cut = [c.finish == "cut" and n == len(c.token_ids) for c, n in zip(made, kept, strict=True)]
        return replace(grown, under_way=torch.tensor(cut, device=self.device))

    def requests(self, slots: Sequence[Slot], ids: Sequence[SampleId], seed: int) -> list[Request]:
        """The engine's requests; the media of a prompt are opened once for all its samples."""
        prompts = {key_of(slot.prompt): slot.prompt for slot in slots}
        theirs = self.engine is not None or self.world is not None  # who else samples has the features
        shown = {k: self._shown(p) for k, p in prompts.items()} if theirs else {}
        extra = self.recipe.rollout.sampling
        run_seed = seed if self.recipe.rollout.reproducible else None
        chat = self.conditioner
        opened = {k: (chat.render(p), chat.unexpanded(p) if p.media else (), self._media(p)) for k, p in shown.items()}
        features = {key: self.features.get(key) for key in prompts}
        return [
            engine_sampling.request(run_seed, sample, slot.prompt, features[key], extra, *opened.get(key, ("", (), ())))
            for key, slot, sample in zip((key_of(s.prompt) for s in slots), slots, ids, strict=True)
        ]

    def _media(self, prompt: Prompt) -> list[Image | Clip]:
        """The prompt's decoded pictures and clips, in order."""
        images, clips = map(iter, self.conditioner.media(prompt))
        return [next(images) if medium.kind == "image" else next(clips) for medium in prompt.media]

    def samples(self, rows: TextRows, inputs: frozenset[str]) -> list[Sample]:
        if self.frame is not None:
            model = cast("Emu3ForConditionalGeneration", base_model(self.policy))
            return make_samples(rows, self.frame.pixels(model, rows.padded("tokens")), inputs)
        episodes, cut = rows.episodes or [None] * len(rows), rows.truncated.tolist()
        spoken = zip(rows.spoken(), episodes, strict=True)
        texts = [self.stops.text(row) if one is None else one.answer for row, one in spoken]
        begun = left_open(self.conditioner.render(rows.slots[0].prompt)) if len(rows) else ""
        drawn = "image" in inputs and draws(self.recipe.environment)
        tokens = rows.spelled(self.settings.temperature) if "tokens" in inputs else [None] * len(rows)
        return [
            Sample(
                slot.prompt,
                sample,
                image=self._last_picture(one) if drawn else None,
                text=text,
                truncated=was_cut,
                begun=begun,
                episode=one,
                tokens=spelled,
            )
            for slot, sample, text, was_cut, one, spelled in zip(
                rows.slots, rows.ids, texts, cut, episodes, tokens, strict=True
            )
        ]

    def _last_picture(self, episode: Episode | None) -> Image:
        """The picture that an episode drew last; black where it drew none, or failed before."""
        drawer = None if self.world is None else self.world.drawer
        pictures = [] if episode is None else episode.pictures
        return open_image(pictures[-1]) if pictures else new("RGB", (64, 64) if drawer is None else drawer.size)

    def token_values(self, row: TextRows, spans: Sequence[tuple[int, int, float]]) -> list[float]:
        starts = [0] if row.episodes is None else row.episodes[0].starts
        found, tokens = list[float](), row.tokens.tolist()
        for segment in row.segments[0][1:]:
            written = tokens[segment.start : segment.stop]
            if segment.kind != "written":
                found += [0.0] * len(written)
                continue
            at = starts[segment.turn]
            ends = [at + len(self.conditioner.decode(written[: n + 1])) for n in range(len(written))]
            found += [
                sum(value for first, last, value in spans if first < end and last > begin)
                for begin, end in zip([at, *ends], ends, strict=False)
            ]
        return found

    # -- updates -----------------------------------------------------------------------------------------------------

    def entries(self, kind: Kind) -> int:
        return 1

    def lengths(self, rows: Rows) -> list[int]:
        if self.pairs is not None:
            return self.pairs.lengths(rows)
        return text_rows(rows).lengths

    def recorded(self, rows: Rows, entries: Sequence[int]) -> dict[str, Tensor]:
        if self.pairs is not None:
            return self.pairs.recorded(rows)
        drawn = text_rows(rows)
        mask = drawn.padded("action_mask").float()
        return {"mask": mask, "rollout_log_probs": drawn.padded("log_probs")}

    def replay(
        self, rows: TextRows, actions: Sequence[int], needs: frozenset[str], weights: Weights
    ) -> dict[str, Tensor]:
        temperature, out = self.settings.temperature, {}
        if needs & {"teacher_kl", "self_divergence"}:
            out |= self._taught(rows, temperature, weights, needs)
        elif needs != frozenset({"reference_log_probs"}):
            out |= self._of_tokens(rows, temperature, with_entropy="entropy" in needs)
        if "values" in needs:
            out["values"] = self._values(rows)
        if "reference_log_probs" in needs:
            with torch.no_grad(), weights("reference"):
                out["reference_log_probs"] = self.response_log_probs(rows, temperature)
        return out

    def compare(self, rows: Rows, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """What is needed of the given texts of each row, ``[B]`` float32: ``<text>_scores``; or ``<text>_log_probs``,
        summed over the text and its end, whose tokens are counted by ``<text>_tokens``, and the same of the reference
        without a graph; and ``mismatched_log_ratio``, without one."""
        given, out = self.pairs, dict[str, Tensor]()
        if given is None:
            raise TypeError("this pipeline trains on samples, and has no given texts")
        if given.scores:
            return given.by_name("scores", self.response_scores(given.given(rows)))
        if needs - {MISMATCHED}:
            texts = given.given(rows)
            out = given.by_name("log_probs", self._summed(texts))
            if any(name.endswith("_tokens") for name in needs):
                out |= given.by_name("tokens", texts.padded("action_mask").float().sum(1))
            if any(name.startswith("reference_") for name in needs):
                with torch.no_grad(), weights("reference"):
                    found = given.by_name("log_probs", self._summed(texts))
                out |= {f"reference_{name}": value for name, value in found.items()}
        if MISMATCHED in needs and isinstance(given, Responses):
            others = given.mismatched(rows)
            with torch.no_grad():
                own = self._summed(others)
                with weights("reference"):
                    out[MISMATCHED] = own - self._summed(others)
        return out

    def _summed(self, rows: TextRows) -> Tensor:
        """Log-probs of each given text ``[B]``, of the model at temperature 1, whatever samples are drawn at."""
        every_token = self.pairs is not None and self.pairs.every_token
        per_token = self.response_log_probs(rows, 1.0, every_token=every_token)
        return (per_token * rows.padded("action_mask")).sum(1)

    def response_log_probs(self, rows: TextRows, temperature: float, *, every_token: bool = False) -> Tensor:
        """Log-probs ``[B, T]`` of the rows' tokens. ``every_token``: among the whole vocabulary, see ``_logits``."""
        return self._of_tokens(rows, temperature, every_token=every_token)["log_probs"]

    def _of_tokens(
        self, rows: TextRows, temperature: float, *, with_entropy: bool = False, every_token: bool = False
    ) -> dict[str, Tensor]:
        """The ``log_probs`` of the rows' tokens, and the ``entropy`` of what each was drawn from, ``[B, T]``."""
        if rows.sequences is not rows:
            found = self._of_tokens(rows.sequences, temperature, with_entropy=with_entropy, every_token=every_token)
            return {name: rows.rejoined(values) for name, values in found.items()}
        if self.packing is not None and any(rows.responses):  # only of models without forbidden tokens
            out = self._said(rows, temperature, whole=with_entropy)[1]
            return {name: packing.padded(rows, values) for name, values in out.items()}
        logits = self._logits(rows, every_token=every_token)
        tokens = rows.padded("tokens") if every_token else self._drawn_tokens(rows)
        out = {"log_probs": self.token_log_probs(logits, tokens, temperature)}
        if with_entropy:
            found = entropy(logits, temperature, self._vocabulary)
            out["entropy"] = found if self._cut is None else self._cut.whole(found)
        return out

    def _said(self, rows: TextRows, temperature: float, *, whole: bool) -> tuple[_Said, dict[str, Tensor]]:
        """What the policy says, and the ``log_probs`` of the tokens; with its ``whole`` logits their ``entropy`` too,
        ``[K]``."""
        own = self._outputs(self.policy, rows, whole=whole)
        tokens = self._drawn_tokens(rows).flatten()[packing.behind(rows)]
        out = {"log_probs": self._of_outputs(own, tokens, temperature)}
        out |= {"entropy": entropy(own.states, temperature)} if whole else {}
        return _Said(rows, own, tokens, out["log_probs"], temperature, whole), out

    def _taught(self, rows: TextRows, temperature: float, weights: Weights, needs: frozenset[str]) -> dict[str, Tensor]:
        """``_of_tokens``, and by the same forward what is needed of ``teacher_kl``, the divergence from all teachers of
        a row, with ``teacher_loss``, their sum by their weights, and ``self_divergence``, that from the policy that is
        shown a hint, ``[R, T]``."""
        if rows.sequences is not rows:
            found = self._taught(rows.sequences, temperature, weights, needs)
            return {name: rows.rejoined(values) for name, values in found.items()}
        said, out = self._said(rows, temperature, whole="entropy" in needs)
        if "teacher_kl" in needs:
            out |= self._of_teachers(said, weights)
        if "self_divergence" in needs:
            out["self_divergence"] = self._of_itself(said, weights)
        return {name: packing.padded(rows, values) for name, values in out.items()}

    def _of_teachers(self, said: _Said, weights: Weights) -> dict[str, Tensor]:
        """``teacher_kl`` and ``teacher_loss`` ``[K]``."""
        names = {"teacher_kl": 1.0, "teacher_loss": 1.0}
        out = {name: torch.zeros_like(said.log_probs) for name in names}
        for teacher, copy, index in lessons(self.recipe, said.rows.slots):
            if teacher.model is None:
                continue
            at, mine = said.part(index)
            some = said.rows if len(index) == len(said.rows) else said.rows.rows(index)
            with torch.no_grad():
                if teacher.is_adapter:
                    with weights(copy):
                        theirs = self._outputs(self.policy, some, whole=said.whole)
                else:
                    with self._resting.using(*self.teachers.values()):  # all: each slice has rows of each
                        theirs = self._outputs(self.teachers[teacher.model], some)
            assert teacher.divergence != "velocity"
            value = self._apart(said, at, mine, theirs, teacher.divergence)
            for name, times in (names | {"teacher_loss": teacher.weight}).items():
                out[name] = out[name].index_add(0, at, times * value)
        return out

    def _of_itself(self, said: _Said, weights: Weights) -> Tensor:
        """``self_divergence`` ``[K]``: 0 for rows without a hint."""
        settings, rows = self.recipe.algorithm, said.rows
        assert isinstance(settings, SDPOSettings)
        hints, out = rows.hints or self._planned_hints(rows), torch.zeros_like(said.log_probs)
        index = [n for n, hint in enumerate(hints) if hint is not None]
        if not index:
            return out
        at, mine = said.part(index)
        shown = [as_weights(hint, self.policy, self.device) for hint in hints if hint is not None]
        behind = rows.rows(index).behind([hint["input_ids"] for hint in shown])
        with torch.no_grad(), weights(COPY):
            theirs = self._outputs(self.policy, behind, shown, whole=said.whole)
            if theirs.layer is not None:  # which has other weights as soon as the copy is left
                theirs = Outputs(theirs.states, theirs.layer.detach())
        kind = "forward" if settings.alpha == 0 else "reverse" if settings.alpha == 1 else "jensen"
        how = "sampled" if settings.vocabulary == "sampled" else kind
        return out.index_add(0, at, self._apart(said, at, mine, theirs, how, settings.alpha))

    def _planned_hints(self, rows: TextRows) -> Sequence[Mapping[str, Tensor] | None]:
        """The hints of rows that nothing has shown one for: none, and in a plan one as long as a response may be."""
        if self.device.type != "meta":
            return [None] * len(rows)
        found = [self.features.get(key) for key in rows.features]
        more = self.settings.max_new_tokens
        return [{name: pad(value, (0, more)) for name, value in of.items() if name in PER_TOKEN} for of in found]

    def _apart(
        self,
        said: _Said,
        at: Tensor,
        mine: Outputs,
        theirs: Outputs,
        how: Divergence | Literal["sampled"],
        alpha: float = 0.5,
    ) -> Tensor:
        """The divergence ``[K]`` of what the policy says at the places ``at`` from what a teacher says there."""
        if how == "sampled":
            there = self._of_outputs(theirs, said.tokens[at], said.temperature)
            return estimate(said.log_probs[at], there, torch.ones_like(there, dtype=torch.bool), "k1+")
        with self._autocast():
            return divergence(mine, theirs, how, said.temperature, self._barred, alpha=alpha)

    def hinted(self, prompt: Prompt, hint: str, most: int) -> dict[str, Tensor] | None:
        if self.context is not None:
            most = min(most, self.context - self.recipe.response_tokens)
        shown = self._shown(prompt)
        features = self.conditioner.encode(replace(shown, text=shown.text + hint))
        if len(features["input_ids"]) > most:
            return None
        return {name: value for name, value in features.items() if name in PER_TOKEN}

    def _outputs(
        self,
        model: nn.Module,
        rows: TextRows,
        shown: Sequence[Mapping[str, Tensor]] | None = None,
        *,
        whole: bool = False,
    ) -> Outputs:
        """What ``model`` says before each token behind the prompts, row by row; ``whole``: its logits. ``shown``: what
        there is per token of prompts that are not those of the features."""
        layer = None if whole else packing.plain_head(model)
        with self._autocast(), nullcontext() if layer is None else packing.headless(model):
            if self.packing is not None and model is self.policy and any(rows.responses):
                made = self.packing.of(rows, self.conditioner.pad_token)
                with made.head(model):
                    states = model(**made.inputs, use_cache=False).logits[0]
            else:
                states = self._before_tokens(model, rows, shown).flatten(0, 1)[packing.behind(rows)]
        if layer is not None:
            return Outputs(states, layer.weight)
        return Outputs(without(states, self.conditioner.forbidden, None))

    def _of_outputs(self, said: Outputs, tokens: Tensor, temperature: float) -> Tensor:
        """Log-probs ``[K]`` of ``tokens`` ``[K]``."""
        with self._autocast():
            if said.layer is not None:
                return head_log_probs(said.states, said.layer, tokens, temperature, self._barred)
        return token_log_probs(said.states.unsqueeze(0), tokens.unsqueeze(0), temperature)[0]

    @property
    def _barred(self) -> Tensor:
        """``[N]`` int64: tokens that no policy draws, on the device."""
        return to_device(torch.tensor(self.conditioner.forbidden, dtype=torch.long), self.device)

    def _drawn_tokens(self, rows: TextRows) -> Tensor:
        """``[R, T]``: the tokens, and padding in place of those that no policy draws: pictures that it was told. Their
        log-probs would be infinite."""
        tokens = rows.padded("tokens")
        if not any(segment.features for of in rows.segments for segment in of[1:]):
            return tokens
        told = torch.isin(tokens, to_device(torch.tensor(self.conditioner.forbidden, dtype=torch.long), tokens.device))
        return torch.where(told, self.conditioner.pad_token, tokens)

    def response_scores(self, rows: TextRows) -> Tensor:
        """``[B]`` float32: the scores of a reward model."""
        inputs = self._read(rows)
        with self._autocast():
            return self.policy(**inputs, use_cache=False).logits[:, 0].float()

    def token_log_probs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Log-probs ``[B, T]`` of ``tokens``; ``logits`` may be this rank's part of the tokens or the vocabulary."""
        own = tokens if self._cut is None else self._cut.own(tokens)
        found = token_log_probs(logits, own, temperature, self._vocabulary)
        return found if self._cut is None else self._cut.whole(found)

    @property
    def _cut(self) -> SplitRows | None:
        """How the ranks divide rows (context parallelism); None if they do not."""
        return getattr(self.policy, "cut", None)

    @property
    def _vocabulary(self) -> Vocabulary | None:
        """The part of the vocabulary that this rank has logits of; None if it has the whole."""
        return getattr(self.policy, "vocabulary", None)

    def open_critic(self) -> nn.Module:
        self.critic = sharded_loading.move(Critic(self.policy), self.device)
        return self.critic

    def _values(self, rows: TextRows) -> Tensor:
        """Values ``[B, T]`` of the state before each response token."""
        assert self.critic is not None
        if rows.sequences is not rows:
            return rows.rejoined(self._values(rows.sequences))
        inputs = self._read(rows)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.critic(**inputs)[: len(rows), -rows.width - 1 : -1]  # not those of negative prompts

    def _logits(self, rows: TextRows, *, every_token: bool = False) -> Tensor:
        """Logits ``[B, T, V]`` of each response token, this rank's part. ``every_token``: of forbidden ones too."""
        with self._autocast():
            logits = self._before_tokens(self.policy, rows)
        if self.frame is not None:
            return self.frame.logits(logits)
        return logits if every_token else without(logits, self.conditioner.forbidden, self._vocabulary)

    def _before_tokens(
        self, model: nn.Module, rows: TextRows, shown: Sequence[Mapping[str, Tensor]] | None = None
    ) -> Tensor:
        """The logits of ``model`` before each token behind the prompts, ``[B, T, V]``; ``shown``: see ``_outputs``."""
        inputs = self._read(rows, shown)
        end = inputs["input_ids"].shape[1] - 1  # no token follows the last one
        kept = torch.arange(end - rows.width, end, device=self.device)
        return model(**inputs, logits_to_keep=kept, use_cache=False).logits

    def _autocast(self) -> torch.autocast:
        """With all weights, which are float32. An adapter multiplies in the dtype of what it is given without it."""
        half = self.dtype != torch.float32 and self.recipe.model.lora is None
        return torch.autocast(self.device.type, self.dtype, enabled=half)

    # -- export ------------------------------------------------------------------------------------------------------

    def write(self, out: Path, what: What) -> None:
        if self.pairs is not None and self.pairs.scores:
            scoring.write(self.policy, self.conditioner, self.recipe, out, what)
        else:
            export.write(self.policy, self.conditioner.saved, self.recipe, out, what, self.conditioner.forbidden)

    def usage(self, folder: str, what: What, prompt: Prompt) -> Usage:
        if self.pairs is not None and self.pairs.scores:
            return scoring.usage(self.policy, self.conditioner, self.recipe, what, folder, prompt)
        if self.frame is not None:
            return drawing.usage(self.frame, self.conditioner, self.recipe, what, folder, prompt)
        return export.usage(self.policy, self.conditioner, self.recipe, what, folder, prompt)


def keep_episodes(pipeline: object, folder: Path, replayed: int | None = None) -> Journal | None:
    """Have what its environment answers kept in ``folder``, of a run or one of its controllers, and taken from there
    where an earlier start has asked; ``replayed``: see ``Journal``. None where the pipeline has no environment."""
    world = pipeline.world if isinstance(pipeline, LanguagePipeline) else None
    if world is None:
        return None
    world.journal = Journal(folder, replayed)
    return world.journal
