"""Handle a run with numbers that are not finite: name them, the last good checkpoints, and how to continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mmrl.config.schema import Recipe
from mmrl.core import nan_check
from mmrl.core.checkpoint_manifest import entries, mark_diverged
from mmrl.core.errors import NotFiniteError
from mmrl.logging.metrics import read
from mmrl.logging.rundir import RunDir
from mmrl.step.step_context import StepContext

KIND = "diverged"
"""The kind of such a row in failures.jsonl."""
ADAPTER = "the weights of the adapter"
"""Where numbers are that ``model.lora.path`` brought."""
CHANGEABLE = (
    *("optim.lr", "optim.max_grad_norm", "optim.betas", "optim.eps", "optim.weight_decay", "optim.warmup_steps"),
    *("algorithm.critic_lr", "model.dtype"),
)
"""The settings that may change when a diverged run is resumed."""


@dataclass(frozen=True)
class Divergence:
    """``what`` was not finite, in training step ``step`` (counted from 1) or in the evaluation after it.

    ``lr``: the learning rate of the next update. ``done``: finished steps. ``proved``: a finite gradient or evaluation
    was computed with the weights after these steps. If not, a checkpoint of them cannot be used either.
    """

    what: str
    step: int
    evaluating: bool
    lr: float
    done: int
    proved: bool
    trained: bool
    """Whether a weight had been updated before. If not, no learning rate made these numbers."""
    where: str = ""
    """The weights that were loaded so; empty where loaded weights are finite."""

    @property
    def place(self) -> str:
        return f"the evaluation after step {self.step}" if self.evaluating else f"step {self.step}"


def divergence(context: StepContext, error: NotFiniteError, done: int, *, evaluating: bool, proved: bool) -> Divergence:
    """Describe the divergence after ``done`` finished steps. A weight that is not finite is named first."""
    what, where = str(error), ""
    trained = any(policy is not None and policy.updates for policy in (context.policy, context.critic))
    trained = trained and "starts from weights" not in what  # a critic is updated after the policy
    for whose, policy in (("", context.policy), ("the critic: ", context.critic)):
        if policy is None or "weights after update" in what:
            continue
        if held := nan_check.first(dict(policy.module.named_parameters())):
            what, where = f"{whose}a weight of the model is not finite: {held}; so {what}", "the weights"
            lora = context.recipe.model.lora
            if "lora_" in held and lora is not None and lora.path is not None:
                where = ADAPTER
            break
    if not trained and not where:
        frozen: Mapping[str, nn.Module] = getattr(context.pipeline, "frozen", {})
        for name, module in frozen.items():
            if held := nan_check.first(dict(module.named_parameters())):
                what, where = f"a weight of the {name} is not finite: {held}; so {what}", f"the weights of the {name}"
                break
    step = done if evaluating else done + 1
    return Divergence(what, step, evaluating, context.policy.learning_rate(), done, proved, trained, where)


def settle(directory: RunDir, found: Divergence, recipe: Recipe, command: str) -> str:
    """Record the divergence in the run directory, so that ``--resume`` continues from the last good checkpoint. Returns
    the message for the user. ``command``: the command line that trains this run."""
    if not found.proved:
        for entry in entries(directory.checkpoints):
            if entry.step == found.done:
                mark_diverged(entry, f"{found.place}: {found.what}")
    directory.failure(found.step, KIND, "training", found.what, lr=found.lr)
    there = entries(directory.checkpoints)
    last = max((entry.step for entry in there if entry.usable and entry.step <= found.done), default=None)
    if not found.trained:
        return f"numbers are not finite in {found.place}, before the first update: {found.what}\n{_mend(found, recipe)}"
    lines = [f"training diverged in {found.place} at learning rate {found.lr:g}: {found.what}"]
    edits = ["lower optim.lr or optim.max_grad_norm"]
    edits += ["set model.dtype=float32"] if recipe.model.dtype != "float32" else []
    how = "--resume"
    if last is not None:
        lines.append(f"the last finite checkpoint is of step {last}, and is kept; nothing after it was saved")
    elif there:
        lines.append("there is no finite checkpoint")
        how = "--overwrite"
    else:
        lines.append("there is no checkpoint yet: --resume starts again at step 0")
    lower = f"optim.lr={recipe.optim.lr / 10:g}"
    return "\n".join([*lines, f"{', or '.join(edits)}; for example: {command} {lower} {how}"])


_LOOK_AT = {
    "the features": "the text encoders made them: look at the prompt, and at the text encoders of the checkpoint",
    "the pictures": "the VAE made them of finite latents: look at vae/config.json (scaling_factor, shift_factor, "
    "latents_mean, latents_std) and at the VAE's weights",
    "the latents": "the model made them: look at scheduler/scheduler_config.json (prediction_type, betas, shift), at "
    "sampling.guidance_scale and at the checkpoint",
    "the encoded pictures": "the VAE made them: look at the pictures, at vae/config.json (scaling_factor, "
    "shift_factor, latents_mean, latents_std) and at the VAE's weights",
    "the logits": "the model made them: look at the checkpoint",
    "the gradient": "the loss was finite: look at the checkpoint",
}
"""What to look at for numbers that nothing trained has made, by the first words of the error."""


def _mend(found: Divergence, recipe: Recipe) -> str:
    """The edit for numbers that are not finite before anything was trained."""
    if found.where:
        lora = recipe.model.lora
        if lora is not None and found.where == ADAPTER:
            return f"the checkpoint has them: repair {ADAPTER} in model.lora.path ({lora.path})"
        return f"the checkpoint has them: repair {found.where} in model.path ({recipe.model.path})"
    known = (look for begins, look in _LOOK_AT.items() if found.what.startswith(begins))
    rewards = "the rewards and at " if recipe.rewards else ""
    look = next(known, f"nothing that trained made them: look at {rewards}the checkpoint")
    if found.what.startswith("the gradient") and recipe.algorithm.kind == "pathwise":
        look += " and at the rewards' gradients"
    return look + (
        "" if recipe.model.dtype == "float32" else f"; or {recipe.model.dtype} overflows: set model.dtype=float32"
    )


def diverged(directory: RunDir) -> bool:
    """Whether the run stopped because it diverged, and was not resumed since."""
    return any(row.get("kind") == KIND for row in read(directory.failures))
