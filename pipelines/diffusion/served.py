"""Pictures that SGLang's diffusion server samples (``rollout.engine: sglang``): requests to it, rows of its answers.

States and prior log-probs come from the server. What an update compares with is computed again here, by the replay of
the update itself, so that the first ratio is exactly 1. Both are compared: the log-probs of every sample, and the
velocities of the first sample after new weights. Log-probs alone would hide a wrong model: they are means over
dimensions, and move by 0.06 where velocities move by all of their size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from mmrl.config.picture_checks import SERVED
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.notices import starting
from mmrl.core.randomness import seed_of
from mmrl.core.trajectory import DenoisingRows, SampleId, Slot
from mmrl.inference.lazy_engine import Given, asked_again
from mmrl.inference.picture_server import Drawn, PictureServer, python_of
from mmrl.inference.server_process import Timeouts
from mmrl.inference.weight_files import Sending
from mmrl.models.lora import lora_layers
from mmrl.models.policy import Policy

from .flow import FlowPipeline
from .packed import PackedAdapter, unpacked

_KINDS = {"flow": "sde", "cps": "cps"}
_SEEDS = 2**31
_SAME = 1e-4
"""How far noise levels of the server and of the checkpoint's schedule may be apart."""


class Served:
    """Final class. Samples of ``pipeline`` by a server of the model at ``path``. It starts when it is first asked."""

    def __init__(self, pipeline: FlowPipeline, recipe: Recipe, path: str) -> None:
        self.pipeline, self.recipe, self._path = pipeline, recipe, path
        self.policy: Policy | None = None
        self._server: PictureServer | None = None
        self._synced: tuple[int, str] | None = None
        self._given = Given()
        self._gaps: dict[str, float] = {}

    def sample(
        self, slots: Sequence[Slot], ids: Sequence[SampleId], actions: Sequence[int], seed: int
    ) -> DenoisingRows:
        """Sample a micro-batch under the policy's present weights. Raises ``UserError``, also where the server samples
        something else than what trains."""
        pipeline = self.pipeline
        schedule, shape = pipeline.sizes.adapted(slots).schedule(), pipeline.sizes.shape(slots)
        named = zip(slots, ids, strict=True)
        bodies = [self._body(slot, name, actions, seed) for slot, name in named]
        found, fresh = asked_again(partial(self._answers, bodies), self.close)
        for one in found:
            if len(one.sigmas) != len(schedule.sigmas) or (one.sigmas - schedule.sigmas.cpu()).abs().max() > _SAME:
                raise UserError(
                    f"rollout.engine: SGLang samples at the noise levels {_few(one.sigmas)}, and the schedule of this "
                    f"checkpoint has {_few(schedule.sigmas)}; correct scheduler/scheduler_config.json, or remove "
                    "rollout"
                )
        states = torch.stack([self._laid(one.latents, shape) for one in found]).to(pipeline.device)
        rows = DenoisingRows(list(slots), list(ids), clean=schedule.end * states[:, -1])
        if actions:
            rows.states = states[:, actions[0] : actions[-1] + 2].contiguous()
            rows.actions = torch.tensor(list(actions))
        self._compare(rows, found, states, actions, fresh=fresh)
        return rows

    def updates(self) -> dict[str, float]:
        """See ``mmrl.models.protocol.DenoisingPipeline.updates``."""
        return self._given.row() | self._gaps if self._synced else {}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._synced = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def _body(self, slot: Slot, name: SampleId, actions: Sequence[int], seed: int) -> dict[str, Json]:
        pipeline, sampling, prompt = self.pipeline, self.recipe.denoising, slot.prompt
        lengths = pipeline.lengths_of_prompts
        if lengths is not None and (why := lengths.why(prompt)) is not None:
            raise UserError(f"data: the prompt {prompt.id} {why}, and SGLang cuts it elsewhere; set data.overlong=skip")
        size, scale = pipeline.sizes.of(prompt), sampling.guidance_scale
        body: dict[str, Json] = {
            "prompt": pipeline.captions.plain(prompt.text),
            "seed": seed_of(seed, name.step, name.slot, name.attempt, name.sample, "pictures") % _SEEDS,
            "generator_device": pipeline.device.type,
            "height": size.height,
            "width": size.width,
            "num_inference_steps": pipeline.steps,
            "rollout_sde_type": _KINDS[sampling.sde.kind],
            "rollout_noise_level": sampling.sde.noise_level,
            "rollout_log_prob_no_const": sampling.sde.kind == "cps",
            "rollout_sde_step_indices": list(actions),
            "rollout_return_dit_trajectory": True,
            "rollout_debug_mode": False,
            "suppress_logs": True,
        }
        if pipeline.guided:
            given = pipeline.negatives.given(prompt)
            body["negative_prompt"] = pipeline.adapter.negative if given is None else pipeline.captions.plain(given)
        if SERVED[self.recipe.pipeline] == "Z-Image":  # whose scale is one less, as the stock pipeline's
            body["guidance_scale"] = max(0.0, scale - 1)
            return body | {"extra_sampling_params": {"quality": "exact", "cfg_normalization": False}}
        return body | {"true_cfg_scale": scale, "extra_sampling_params": {"quality": "exact"}}

    def _answers(self, bodies: list[dict[str, Json]]) -> tuple[list[Drawn], bool]:
        """What the server answers under the policy's present weights, and whether it had none of them before: then the
        first answer has velocities."""
        server, fresh = self._give()
        if fresh:
            bodies[0]["rollout_debug_mode"] = True
        made = server.ask(bodies)
        self._given.asked(len(bodies))
        return made, fresh

    def _give(self) -> tuple[PictureServer, bool]:
        """A server with the policy's present weights, and whether it did not have them before."""
        assert self.policy is not None, "sync comes first"
        if self._server is None:
            with starting():
                self._server = self._start()
        if self._synced == self.policy.tag:
            return self._server, False
        module, began = self.pipeline.policy, time.perf_counter()
        weights = self._given.counted(trained_weights(module))
        self._server.update(weights, 4 * sum(p.numel() for p in module.parameters()))
        self._synced = self.policy.tag
        self._given.updates += 1
        self._given.update_seconds += time.perf_counter() - began
        return self._server, True

    def _start(self) -> PictureServer:
        rollout, options = self.recipe.rollout, dict(self.recipe.rollout.options)
        timeouts = {name: options.pop(f"{name[:-2]}_timeout_s", None) for name in ("start_s", "request_s")}
        transport = rollout.weight_transport
        url, environment = options.pop("url", None), options.pop("environment", None)
        python = python_of(options) or sys.executable
        options.pop("python", None)
        return PictureServer(
            self._path,
            SERVED[self.recipe.pipeline],
            self.recipe.model.dtype,
            python=str(python),
            options=options,
            environment={str(k): str(v) for k, v in (environment or {}).items()},
            url=url,
            timeouts=Timeouts(**{name: float(value) for name, value in timeouts.items() if value is not None}),
            sending=Sending(rollout.update_bucket_mib * 2**20, "files" if url and transport == "auto" else transport),
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    def _laid(self, latents: Tensor, shape: tuple[int, ...]) -> Tensor:
        """States ``[T, ...]`` as the server has them in the layout of this family, ``[T, *shape]``."""
        if latents[0].numel() != torch.Size(shape).numel():
            raise UserError(
                f"rollout.engine: SGLang's states have the shape {list(latents.shape[1:])}, and this checkpoint's are "
                f"{list(shape)}; remove rollout"
            )
        if isinstance(self.pipeline.adapter, PackedAdapter):
            return unpacked(latents, shape)
        return latents.reshape(len(latents), *shape)

    def _compare(
        self, rows: DenoisingRows, found: list[Drawn], states: Tensor, actions: Sequence[int], *, fresh: bool
    ) -> None:
        """Record the log-probs of the policy here, and compare them and a velocity with the server's."""
        pipeline = self.pipeline
        self._gaps = {} if fresh else self._gaps
        if actions:
            using = lambda _: nullcontext()  # noqa: E731
            own = [pipeline.replay(rows, [n], frozenset({"log_probs"}), using) for n in range(len(actions))]
            rows.log_probs = torch.cat([one["log_probs"] for one in own], 1)
            theirs = torch.stack([one.log_probs for one in found])[:, list(actions)]
            self._gap("log_prob_gap", (rows.log_probs.cpu() - theirs).abs().max().item(), "log-probs")
        if fresh and found[0].velocities is not None:
            step, shape = (actions[0] if actions else 0), tuple(states.shape[2:])
            schedule = pipeline.sizes.adapted(rows.slots).schedule()
            timestep, features = schedule.timesteps[step].expand(len(rows)), pipeline.batch_features(rows.slots)
            mine = pipeline.velocity(states[:, step], timestep, features)[0].cpu()
            theirs = self._laid(found[0].velocities, shape)[step]
            self._gap("velocity_gap", ((mine - theirs).norm() / mine.norm()).item(), "velocities")

    def _gap(self, name: str, gap: float, what: str) -> None:
        """Keep the largest. Raises ``UserError`` where it is too large."""
        limit, name = self.recipe.rollout.max_gap, f"engine/{name}"
        self._gaps[name] = max(gap, self._gaps.get(name, 0.0))
        if limit is not None and not gap <= limit:
            raise UserError(
                f"rollout.max_gap: {what} of SGLang and of the model that trains are {gap:.3g} apart, with the same "
                f"weights; at most {limit:g} is allowed. It samples something else than what trains: use SGLang 0.5.23 "
                "and a server of the same checkpoint, or remove rollout, or set rollout.max_gap to null to train all "
                "the same"
            )


@torch.no_grad()
def trained_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights that train by their names in the plain model, one at a time; those under a LoRA with it added, in
    float32."""
    if not hasattr(module, "disable_adapter"):
        yield from ((name, p.detach()) for name, p in module.named_parameters() if p.requires_grad)
        return
    for name, layer in lora_layers(module):  # type: ignore[arg-type]
        whole: Tensor = layer.get_base_layer().weight.detach().float()  # type: ignore[union-attr]
        for adapter in layer.active_adapters:
            whole = whole + layer.get_delta_weight(adapter).float()  # type: ignore[operator]
        yield f"{name}.weight", whole


def _few(sigmas: Tensor) -> str:
    return ", ".join(f"{level:.4g}" for level in sigmas[:4].tolist()) + ", ..."
