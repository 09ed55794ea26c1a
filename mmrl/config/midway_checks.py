"""Find settings of ``midway`` that cannot work, as ``key: why; the edit that fixes it``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mmrl.config.evaluation_checks import label_of
from mmrl.config.midway import Midway
from mmrl.config.schema import Recipe


def of_midway(recipe: Recipe) -> Iterator[str]:
    """Contradictions between ``midway`` and other sections."""
    midway = recipe.midway
    if midway is None:
        return
    if recipe.algorithm.kind not in ("policy_gradient", "forward_process"):
        other = "grpo" if recipe.makes == "text" else "flow_grpo or diffusion_nft"
        yield (
            f"midway: {recipe.algorithm.type} samples no groups before its update, so that there is nothing to prune; "
            f"remove it, or use {other}"
        )
        return
    yield from _tokens(recipe, midway) if recipe.makes == "text" else _steps(recipe, midway)
    yield from _size(recipe, midway)
    yield from _branches(recipe, midway)
    yield from _rewards(recipe, midway)


def _tokens(recipe: Recipe, midway: Midway) -> Iterator[str]:
    most = recipe.decoding.max_new_tokens
    if midway.tokens is None or midway.step is not None or midway.draft_steps is not None:
        yield (
            "midway: responses are scored after a number of tokens, and have no denoising steps; set midway.tokens, "
            "and take midway.step and midway.draft_steps out"
        )
        return
    if midway.tokens >= most:
        yield (
            f"midway.tokens: no response has more than {most} tokens (sampling.max_new_tokens), so after "
            f"{midway.tokens} of them nothing is left to save; set it to {most - 1} or less"
        )
    if recipe.rollout.partial is not None:
        yield (
            "midway: rollout.partial leaves responses unfinished at the end of a step, and a group is pruned before "
            "its samples are finished in the same step; remove one of the two"
        )
    if recipe.rollout.engine == "sglang" and recipe.decoding.repetition_penalty != 1:
        yield (
            "sampling.repetition_penalty: sglang counts no tokens that a response had before it was cut; remove it or "
            "midway, or set rollout.engine to vllm_server"
        )


def _steps(recipe: Recipe, midway: Midway) -> Iterator[str]:
    sampling = recipe.denoising
    if (midway.step is None) == (midway.draft_steps is None) or midway.tokens is not None:
        yield (
            "midway: pictures and clips are scored after a number of denoising steps, and have no tokens; set "
            "midway.step or midway.draft_steps, one of the two, and take midway.tokens out"
        )
        return
    if midway.step is None:
        yield from _drafts(recipe, midway)
        return
    if midway.step >= sampling.taken:
        yield (
            f"midway.step: the schedule has {sampling.taken} denoising steps, and after {midway.step} of them nothing "
            f"is left to save; set it to {sampling.taken - 1} or less"
        )
        return
    if sampling.same_initial_noise and recipe.algorithm.kind == "policy_gradient":
        window = sampling.window
        last = 0 if window is None else (window.last or sampling.taken - 1) - window.size
        if midway.step <= last:
            yield (
                "midway.step: with sampling.same_initial_noise the samples of a group are equal until the window, "
                f"which may begin at step {last}; set it to {last + 1} or more, or same_initial_noise to false"
            )
    if recipe.algorithm.exact_replay and recipe.model.dtype != "float32" and midway.records_before(sampling):
        yield (
            "midway.step: samples that are kept are trained in different batches than their first steps were sampled "
            f"in, which changes the rounding of {recipe.model.dtype}, and {recipe.algorithm.type} needs the same step "
            f"mean at sampling and at training; set sampling.window.first to {midway.step + 1} or more, or "
            "model.dtype to float32"
        )


def _drafts(recipe: Recipe, midway: Midway) -> Iterator[str]:
    """A draft says something of the sample that is drawn from its noise, where that noise is all that it is drawn
    from."""
    sampling, steps = recipe.denoising, midway.draft_steps
    if steps is not None and sampling.takes(steps) < 1:
        yield (
            f"midway.draft_steps: of {steps} steps sampling.strength takes none; set it to "
            f"{math.ceil(1 / (sampling.strength or 1))} or more"
        )
    if steps is not None and steps >= sampling.steps:
        yield (
            f"midway.draft_steps: a draft of {steps} steps saves nothing beside a sample of {sampling.steps} "
            f"(sampling.steps); set it to {sampling.steps - 1} or less"
        )
    if recipe.algorithm.kind == "policy_gradient":
        yield (
            f"midway.draft_steps: {recipe.algorithm.type} adds noise in the steps that it trains, and a draft of fewer "
            "steps has none of it, so that it cannot be drawn again; set algorithm.type to diffusion_nft or another "
            "that noises clean samples, or set midway.step in its place"
        )
    if sampling.same_initial_noise:
        yield (
            "midway.draft_steps: with sampling.same_initial_noise all drafts of a group are equal; set "
            "same_initial_noise to false"
        )


def _size(recipe: Recipe, midway: Midway) -> Iterator[str]:
    size = recipe.train.group_size
    if midway.branches > 1:
        if size % midway.branches or size < 2 * midway.branches:
            least = max(2, size // midway.branches) * midway.branches
            yield (
                f"midway.branches: a group of {size} (train.group_size) is not two or more beginnings with "
                f"{midway.branches} branches each; set train.group_size to {least}"
            )
        elif midway.group_size < size // midway.branches:
            yield (
                f"midway.group_size: {size // midway.branches} samples of a group are continued (train.group_size / "
                f"midway.branches), and {midway.group_size} are begun; set it to {size // midway.branches} or more"
            )
    elif midway.group_size <= size:
        yield (
            f"midway.group_size: a group of {midway.group_size} cannot be pruned to train.group_size, {size}; set it "
            f"to {size + 1} or more ({2 * size}, say)"
        )


def _branches(recipe: Recipe, midway: Midway) -> Iterator[str]:
    algorithm = recipe.algorithm
    if midway.branches == 1:
        return
    if midway.draft_steps is not None:
        yield "midway.branches: what a draft is drawn again from is its noise alone, which has no branches; set it to 1"
        return
    if algorithm.kind != "policy_gradient" or not algorithm.compares_group or algorithm.uses_token_rewards:
        yield (
            f"midway.branches: branches share the log-probs of their beginning, whose credit is the mean of their "
            f"advantages relative to the group, and {algorithm.type} has no such advantages; set it to 1, or use "
            f"{'grpo' if recipe.makes == 'text' else 'flow_grpo'}"
        )
    elif recipe.makes == "text":
        if recipe.decoding.top_k == 1:
            yield (
                "midway.branches: sampling.top_k is 1, so that all branches of a beginning are equal; set top_k to 2 "
                "or more, or branches to 1"
            )
    else:
        yield from _noise_after(recipe, midway)


def _noise_after(recipe: Recipe, midway: Midway) -> Iterator[str]:
    """Branches of pictures differ by the noise of the steps behind ``midway.step`` alone."""
    window, steps = recipe.denoising.window, recipe.denoising.taken
    if midway.step is None:
        return
    last = steps - 2 if window is None else window.first + window.size - 1
    if last < midway.step:
        where = "the last step has none" if window is None else f"sampling.window may end with step {last}"
        window_edit = "" if window is None else f", or sampling.window.first to {midway.step - window.size + 1} or more"
        edit = f"set midway.step to {last} or less{window_edit}" if last > 0 else window_edit[5:]
        yield (
            f"midway.branches: no step after the first {midway.step} carries noise in every training step ({where}), "
            f"so that all branches of a beginning would be equal; {edit}"
        )


def _rewards(recipe: Recipe, midway: Midway) -> Iterator[str]:
    known = {label_of(reward.name, reward.label): reward for reward in recipe.rewards}
    unknown = [label for label in midway.rewards if label not in known]
    if unknown:
        yield (
            f"midway.rewards: the recipe has no reward {', '.join(map(repr, unknown))}; it has {', '.join(known)}. To "
            "score predicted results with another one, add it to rewards with weight 0"
        )
        return
    used = [known[label] for label in midway.rewards] or [r for r in recipe.rewards if r.weight != 0]
    if not any(reward.weight for reward in used) and len(used) != 1:
        yield "midway.rewards: all of them have weight 0, so their sum is 0; name one of them"
    if len(used) > 1 and any(reward.normalize == "batch" for reward in used):
        yield (
            "midway.rewards: normalize: batch needs all samples of the step, and a group is pruned before they are "
            "drawn; name one reward, or set its normalize to group"
        )
