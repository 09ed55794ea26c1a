"""Scalars of a run: one JSON line per step, the same to every tracker the recipe names.

    {"step": 12, "reward/mean": 0.41, "policy/kl": null, "nonfinite": ["policy/kl"]}

A number that is not finite stands as null with its key in ``nonfinite``, so that the file is JSON for every reader.
A line a crash tore off at the end of the file is dropped. The names and their meaning are in ``METRICS``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.lines import append_whole, row_of
from mmrl.core.stored import LARGEST_LINES, lines, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_LAST_STEP = 10**9
METRICS: dict[str, str] = {
    "reward/mean": "Weighted sum of the rewards (after normalisation), mean over the step's samples.",
    "reward/std": "Its standard deviation over the step's samples.",
    "reward/dropped": "Samples left out because a reward could not score them.",
    "reward/<label>": "One reward as its author returned it (before weight and normalisation), mean.",
    "reward/<label>/<part>": "A named part of that reward, mean.",
    "source/<label>/samples": "data.mixture: samples of the step whose prompts come from this source.",
    "source/<label>/reward/<name>": "data.mixture: one reward as its author returned it, mean over this source.",
    "source/<label>/reward/<name>/<part>": "data.mixture: a named part of that reward, mean.",
    "source/<label>/teacher/kl": "data.mixture: divergence from the teachers of this source, mean per action.",
    "sampler/<name>": "data.sampler: what its method learn returned.",
    "advantage/zero_std_groups": "Fraction of groups whose samples all got the same reward and so give no gradient.",
    "advantage/first_gain": "stepwise_flow_grpo: size of the gain in reward of the first recorded step, mean.",
    "advantage/last_gain": "stepwise_flow_grpo: the same of the last recorded step, to the finished sample.",
    "policy/first_ratio_max_dev": "Largest |ratio - 1| before the step's first update; above 1e-5 a float32 run stops.",
    "policy/ratio_max_dev": "Largest |ratio - 1| over all updates of the step.",
    "policy/ratio": "Probability ratio of the current policy to the one that sampled, mean.",
    "policy/clip_fraction": "Fraction outside the clip range, of ratios; flow_dppo: steps; dgpo: errors; drpo: shifts.",
    "policy/approx_kl": "KL divergence from the policy that sampled, as half the squared log-ratio, mean.",
    "policy/kl": "KL divergence from the reference, mean per action; without actions: squared distance of velocities.",
    "policy/loss": "The objective's loss without its KL term.",
    "policy/loss_<modality>": "Clips with sound: the loss of video or audio, where each has its own advantages.",
    "policy/optimality": "diffusion_nft: optimality probability from the advantage, mean (0.5 is an average sample).",
    "policy/v_change": "diffusion_nft, crd: squared distance of velocities between the policy and the old policy.",
    "policy/x0_change": "v_grpo: squared distance of predicted clean results between the policy and the old policy.",
    "policy/old_kl": "grpo_guard, flow_dppo: KL divergence of a step from the policy that sampled, of both Gaussians.",
    "policy/matching": "awm, dgpo, diffusion_dpo, rwr, v_grpo, crd: squared distance of velocity and noise - sample.",
    "policy/average_distance": "awm: squared distance of velocities between the policy and its moving average.",
    "policy/implicit_reward": "crd: how much closer the policy's velocity is to the target than the old policy's.",
    "policy/group_weight": "dgpo: weight of a group, from 1 (not learned yet) to 0; 0.5 at first.",
    "policy/pair_accuracy": "diffusion_dpo: fraction of pairs whose better sample has the higher implicit reward.",
    "policy/pair_margin": "diffusion_dpo: implicit reward of the better sample minus that of the worse one, mean.",
    "policy/clip_fraction_low": "Text: fraction of ratios below the clip range whose gradient is clipped to 0.",
    "policy/clip_fraction_high": "Text: fraction of ratios above the clip range whose gradient is clipped to 0.",
    "policy/entropy": "Entropy of the policy per token in nats, if the objective has a term for it.",
    "mismatch/kl": "KL divergence of the sampler from the trainer, nats per token or denoising step (estimator k1).",
    "mismatch/kl_k3": "The same by the estimator k3, which is never negative.",
    "mismatch/log_prob_gap": "|Log-prob of the trainer - of the sampler| per token or denoising step, mean.",
    "mismatch/log_prob_gap_max": "The largest such gap.",
    "mismatch/weight_mean": "Truncated importance weight against that gap, mean over tokens.",
    "mismatch/weight_clipped": "Fraction of tokens whose weight was beyond its limits.",
    "mismatch/rejected": "Fraction of tokens that rollout.rejection left out.",
    "text/length": "Tokens of a response, including the end-of-text token, mean.",
    "text/truncated": "Fraction of responses cut at sampling.max_new_tokens.",
    "episode/turns": "Turns of the policy in an episode, mean.",
    "episode/calls": "Calls of tools in an episode, mean.",
    "episode/unusable_calls": "Fraction of the calls that were cut, no JSON, or without a name.",
    "episode/failed_calls": "Fraction of the calls that a tool did not answer: unusable ones, wrong arguments or "
    "names, and those that raised.",
    "episode/turns_without_action": "Fraction of the turns that were no action which the environment could take.",
    "episode/cut": "Fraction of episodes that ended because what they were told, or the next turn, did not fit into "
    "environment.max_tokens.",
    "episode/reward": "The environment's own reward of an episode, mean.",
    "episode/failed": "Fraction of episodes whose environment failed; they are not trained on.",
    "episode/unclosed": "Fraction of episodes whose environment could not be closed; they are trained on.",
    "time/environment": "Seconds that the calls of an episode's environment took together, mean.",
    "episode/told_tokens": "Tokens behind the prompt that the policy was told in an episode, mean.",
    "sampling/rounds": "Dynamic sampling: rounds of sampling in the step. Partial rollout: of cut_after tokens each.",
    "sampling/groups": "Dynamic sampling: groups sampled in the step, including replaced ones.",
    "sampling/ahead_unused": "Dynamic sampling: groups sampled ahead and not used, since an earlier attempt was kept.",
    "sampling/valid": "Dynamic sampling: fraction of those groups whose rewards differ.",
    "sampling/valid_ema": "Its moving average over the steps, which sets how many groups are sampled ahead.",
    "midway/rank_correlation": "midway: Spearman's correlation of predicted and final rewards in a group, mean.",
    "midway/begun_std": "midway: standard deviation of the predicted rewards of the samples begun in a group, mean.",
    "midway/kept_std": "midway: the same of the samples that were kept.",
    "midway/mean_shift": "midway: mean predicted reward of the kept samples minus that of all, mean over groups.",
    "midway/dropped": "midway: samples of the step that were begun and not finished.",
    "midway/branch_std": "midway: standard deviation of the final rewards of the branches of one beginning, mean.",
    "midway/tokens_dropped": "midway, text: share of the sampled tokens that are of dropped responses.",
    "midway/ended": "midway, text: share of the begun responses that had ended when they were scored.",
    "sampling/in_flight": "Partial rollout: groups with unfinished responses after the step.",
    "sampling/waiting": "Partial rollout: complete groups that wait for a later step.",
    "sampling/stale_tokens": "Partial rollout: fraction of the batch's tokens sampled with weights of earlier steps.",
    "sampling/stale_age": "Partial rollout: age in steps of the weights that sampled a token, mean.",
    "sampling/stale_steps": "Partial rollout, sampling ahead: age in steps of the oldest weights used.",
    "balance/padding": "Text: fraction of the update's tokens that are padding.",
    "balance/load": "Several controllers, text: work seconds of the busiest, without waiting, over the mean.",
    "balance/load_predicted": "The same ratio, as predicted when the step's prompts were assigned.",
    "balance/moved": "train.balance moving: prompts that another controller began than the one they were assigned to.",
    "balance/residual": "Absolute errors of the predicted seconds over the measured seconds, all controllers.",
    "mismatch/normalizer": "rollout.importance_normalize: mean importance weight that all are divided by.",
    "teacher/kl": "Divergence from the teachers on what the student sampled, mean per action (teacher.divergence).",
    "teacher/loss": "The same times each teacher's weight: what is added to the loss, mean per action.",
    "self_teacher/divergence": "sdpo: divergence from the policy that is shown a hint, mean per token.",
    "self_teacher/loss": "sdpo: the same as it counts in the loss, mean per token.",
    "self_teacher/taught": "sdpo: fraction of the responses that had a hint and train.",
    "self_teacher/solutions": "sdpo: fraction for which the group has another right response.",
    "self_teacher/feedback": "sdpo: fraction with none, but with feedback of a reward.",
    "self_teacher/too_long": "sdpo: fraction whose prompt with the hint is too long.",
    "policy/kl_k2": "reinforce_pp, variant baseline: half the squared log-ratio to the reference, mean.",
    "advantage/overlong_fraction": "dapo: fraction of responses punished for their length.",
    "advantage/kl": "KL divergence from the reference, subtracted from the reward, nats (reinforce_pp, ppo, rloo).",
    "advantage/shared_states": "Fraction of turns whose state other turns of the group share (algorithm.credit: turn).",
    "advantage/wrong_step_fraction": "capo: fraction of tokens in steps that the judge found wrong.",
    "dpo/accuracy": "dpo: fraction of pairs whose better text the policy prefers more than the reference does.",
    "dpo/margin": "dpo: implicit reward of the better text minus that of the worse one, mean.",
    "dpo/chosen_reward": "dpo: implicit reward of the better text, mean.",
    "dpo/rejected_reward": "dpo: implicit reward of the worse text, mean.",
    "kto/accuracy": "kto: fraction of responses on the right side of the divergence: above it if good, below if bad.",
    "kto/margin": "kto: implicit reward minus that of the divergence, its negative for bad responses, mean.",
    "kto/kl": "kto: divergence from the reference on mismatched responses, nats a response, at least 0.",
    "sft/fit": "picture_sft: minus the loss on given pictures, mean.",
    "sft/log_prob": "sft: log-prob of a token of the given responses, nats, mean.",
    "orpo/accuracy": "orpo: fraction of pairs whose better text has the larger odds.",
    "orpo/log_odds_ratio": "orpo: log odds of the better text minus those of the worse one, mean.",
    "orpo/odds_loss": "orpo: -log sigmoid of that, mean.",
    "orpo/likelihood_loss": "orpo: negative log-likelihood of the better text, nats per token, mean.",
    "reward_model/accuracy": "reward_model: fraction of pairs whose better text scores higher.",
    "reward_model/margin": "reward_model: score of the better text minus that of the worse one, mean.",
    "reward_model/score": "reward_model: score, mean over both texts.",
    "value/loss": "ppo: half the squared error of the critic, clipped, mean per token.",
    "value/clip_fraction": "ppo: fraction of values that are clipped.",
    "value/grad_norm": "ppo: norm of the critic's gradient before clipping, mean over the step's updates.",
    "value/lr": "ppo: learning rate of the critic.",
    "value/explained_variance": "ppo: share of the returns' variance that the critic explains.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the step's updates.",
    "optim/lr": "Learning rate, mean over the step's updates.",
    "time/<phase>": "Wall seconds in a phase: encode, sample, decode, reward, prepare, train.",
    "time/step": "Wall seconds of the whole step.",
    "plan/step_seconds": "Seconds of a step that the plan expected, to compare with time/step.",
    "plan/peak": "On an accelerator: MiB at the plan's peak, to compare with perf/peak_memory_mib.",
    "features/bytes": "Bytes of prompts' features in memory after the step.",
    "features/spilled_bytes": "Bytes of features that the step wrote to disk, above features.budget.",
    "features/held": "Prompts whose features are in use after the step: those of unfinished groups.",
    "sent/gradients": "Several controllers: bytes of gradients sent, by the controller that sent most.",
    "sent/numbers": "Several controllers: bytes of counts, rewards and metrics sent to the others.",
    "sent/statistics": "Several controllers: bytes of sums that whiten or scale advantages and rewards.",
    "sent/claims": "train.balance moving: bytes of messages about who begins which prompts.",
    "sent/media": "Bytes of encoded pictures and clips sent to judges and rewards in other processes, each once.",
    "sent/questions": "Bytes of the rest of those requests: texts, rubrics, settings.",
    "judge/<label>/calls": "Requests to a judge's endpoint since the last row, including retries, all controllers.",
    "judge/<label>/prompt_tokens": "Prompt tokens of these requests, as the endpoint reports.",
    "judge/<label>/completion_tokens": "Completion tokens, as the endpoint reports.",
    "judge/<label>/unreported": "Answers without a report of their tokens.",
    "sent/weights": "Sharded weights: bytes of weights, approximately, that a device sent to the others.",
    "perf/engine_updates": "An engine with its own weights: weight updates since the last row.",
    "perf/engine_update_bytes": "Bytes of those updates, for the controller's first device.",
    "perf/engine_update_seconds": "Wall seconds to gather, write and load them; in time/sample, without shards.",
    "perf/engine_calls": "Sampling calls to the engine since the last row, of the busiest controller.",
    "perf/engine_requests": "Samples that those calls started or continued.",
    "perf/shared_steps": "Groups with one initial noise: denoising steps of samples that a device did not repeat.",
    "engine/<name>": "What an engine of your own returned as metrics, or gaps of pictures; of controllers the largest.",
    "placement/rollout_devices": "Several devices: devices per controller that began the step by sampling.",
    "placement/judge_devices": "Several devices: per controller, devices that judged; 0 if all sampled first.",
    "placement/rollout_busy": "Several devices: device-seconds of sampling and decoding, of all controllers.",
    "placement/judge_busy": "Several devices: device-seconds of judging.",
    "placement/wake": "Several devices, placement.sleep: device-seconds of sleep and wake of judges and engines.",
    "placement/moves": "Several devices: changes of role within the step.",
    "placement/idle": "Several devices: idle share of all devices' time in the step.",
    "placement/cpu": "Several devices: CPU seconds of their processes over wall seconds of all devices in the step.",
    "placement/gpu": "Several GPUs: share of the step in which a GPU computed, mean over them; needs nvidia-ml-py.",
    "perf/cpu_seconds": "CPU seconds of all training steps so far, without evaluation.",
    "perf/peak_memory_mib": "Peak memory so far, MiB: of the accelerator if there is one, else of the process.",
}
"""Every metric of metrics.jsonl; heldout.jsonl has ``samples`` and the ``reward/<label>`` keys. docs/metrics.md is
made from this table (a test compares them)."""


def of_pairs(keys: Iterable[str]) -> list[str]:
    """The metrics of how a model judges given texts (``dpo/accuracy``), which stand where others have rewards."""
    return [key for key in keys if key.startswith(("dpo/", "orpo/", "reward_model/", "sft/", "kto/"))]


def of_repeated(keys: Iterable[str]) -> list[str]:
    """Those of several samples of a prompt: ``pass@4/answer``, ``maj@4/answer``."""
    return [key for key in keys if re.match(r"(pass|maj)@[0-9]+/", key)]


def of_source(key: str) -> list[str]:
    """The parts of a metric of one source of a mixture (``source/math/reward/answer``); nothing of others."""
    parts = key.split("/")
    return parts if parts[0] == "source" else []


def describe(key: str) -> str | None:
    """What a metric is, by its name or the pattern it follows; None for a name the table lacks."""
    if key in METRICS:
        return METRICS[key]
    for pattern, text in METRICS.items():
        if "<" in pattern and re.fullmatch(re.sub(r"<\w+>", "[^/]+", pattern), key):
            return text
    return None


class Tracker(Protocol):
    """Where scalars and pictures go besides the run directory."""

    def scalars(self, step: int, row: Mapping[str, float]) -> None:
        """Keep the finite numbers of a step by their name."""

    def picture(self, step: int, name: str, image: Image) -> None:
        """Keep the picture ``name`` of a step."""

    def close(self) -> None:
        """Send what is left; nothing follows."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends rows to a JSONL file and hands them to trackers, under ``prefix`` there (``heldout/``).

    A line reaches the operating system before ``write`` returns, so that a killed process loses none.
    """

    def __init__(self, path: Path | str, trackers: Sequence[Tracker] = (), prefix: str = "") -> None:
        self.path = Path(path)
        self.trackers = list(trackers)
        self.prefix = prefix
        _mend(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Append ``{"step": step, **row}``. Raises ``ValueError`` for a reserved key, ``UserError`` on a full disk."""
        if reserved := {"step", "nonfinite"} & row.keys():
            raise ValueError(f"{sorted(reserved)} are the log's own keys; give the metric another name")
        values = {key: value if isinstance(value, int) else float(value) for key, value in row.items()}
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        line: dict[str, Any] = {"step": step, **{key: finite.get(key) for key in values}}
        if len(finite) < len(values):
            line["nonfinite"] = [key for key in values if key not in finite]
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
        for tracker in self.trackers:
            tracker.scalars(step, {self.prefix + key: value for key, value in finite.items()})

    def picture(self, step: int, name: str, image: Image) -> None:
        """Hand a sample grid to the trackers (the run directory has its own copy in samples/)."""
        for tracker in self.trackers:
            tracker.picture(step, self.prefix + name, image)

    def truncate_after(self, step: int) -> None:
        """Cut the rows of steps past ``step``, which a resumed run writes again."""
        self._file.close()
        truncate_after(self.path, step)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. The trackers stay open: their owner closes them."""
        self._file.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        try:
            append_whole(self._file, line)
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}; free space there and continue with --resume"
            ) from error


def read(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a JSONL file, in its order; none where there is no file. A torn last line is left out.

    Raises ``UserError`` for a broken line that is not the last: a crash does not make one.
    """
    return [row for _, row in _rows(path)]


def read_numbers(path: Path | str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl or heldout.jsonl: a step each, and by name numbers that are finite, or None.

    ``nonfinite`` lists names. Raises as ``read``, and for a row without a step.
    """
    found = []
    for number, row in _rows(path):
        if "step" not in row:
            raise UserError(f"{path} line {number} has no step; delete that line")
        named = row.get("nonfinite")
        values: dict[str, Any] = {key: _finite(value) for key, value in row.items() if key != "nonfinite"}
        if isinstance(named, list):
            values["nonfinite"] = [str(key) for key in named]
        found.append(values)
    return found


def _finite(value: object) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _rows(path: Path | str) -> list[tuple[int, dict[str, Any]]]:
    found = list(lines(Path(path)))
    rows = []
    for place, (number, line) in enumerate(found):
        row = row_of(line, strict=True)
        if row is None:
            if place < len(found) - 1:
                raise UserError(f"{path} line {number} is not a JSON object; delete that line")
            continue
        for key in ("step", "of"):
            if key in row and not _is_step(row[key]):
                raise UserError(f"{path} line {number}, {key}: {str(row[key])[:40]} is no step; delete that line")
        rows.append((number, row))
    return rows


def _is_step(value: object) -> bool:
    """Whether it can be the number of a step; -1 is before the first."""
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= _LAST_STEP


def truncate_after(path: Path, step: int) -> None:
    """Keep the rows of a JSONL file up to and with ``step`` (rows without a step stay); drop a torn last line.

    What was done in a step for a later one (``of``) goes too: it will be done again.
    """
    if path.exists():
        kept = [row for row in read(path) if row.get("of", row.get("step", step)) <= step]
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _mend(path: Path) -> None:
    """Make the file end with a whole line, so that the next row does not grow onto a torn one."""
    if not path.exists():
        return
    content = read_bytes(path, LARGEST_LINES)
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if row_of(content[start:], strict=True) is None:
            file.truncate(start)
        else:
            file.seek(0, 2)
            file.write(b"\n")
