"""What a reward owes the training loop: see ``mmrl.core.reward_contract``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from PIL import Image

from mmrl.app.conformance.datasets import prompts_of
from mmrl.app.conformance.running import CannotRun, Check, expect
from mmrl.core.json_types import JsonObject
from mmrl.core.media.images import to_tensor
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Audio, Prompt, Sample, SampleId, Tokens
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import Found, Loaded, build, find, problems
from mmrl.rewards.returned import Answer

CLOSE = 1e-4
"""Scores of a sample in batches of two sizes: matrices of other shapes differ in their last digits."""
TIMEOUT_S = 600.0
PROMPTS = (Prompt("a", "a red circle", {"answer": "round"}), Prompt("b", "What is 2 + 3?", {"answer": "5"}))
TEXTS = ("2 + 3 = 5\n\nanswer: 5", "A red circle is round.", "no", "answer: 6", "The sum is 5.", "I do not know.")


@dataclass(frozen=True)
class Case:
    """A reward, six samples for it (three of each of two prompts), and its caller."""

    found: Found
    options: JsonObject
    loaded: Loaded
    caller: Caller
    samples: Sequence[Sample]
    made_up: bool = False
    """Whether the prompts are our own, which have an answer alone in ``meta``."""

    def ask(self, samples: Sequence[Sample]) -> Answer:
        """Its answer, where the call as a whole went well. Raises ``AssertionError``."""
        answer = self.caller.one(samples, Context(step=0, label="check"))
        if answer.error is not None:
            said = f"{answer.error.reason}; {answer.error.mend}"
            if self.made_up and ("KeyError" in answer.error.reason or "(it has answer)" in answer.error.reason):
                said += "; where it reads meta of the prompt, name a data set that has it with --data (such as sums)"
            raise AssertionError(said)
        return answer


def opened(name: str, options: JsonObject, data: str | None = None) -> Case:
    """The reward ``name`` with ``options``; ``data``: the data set whose prompts it is asked about, with no options.

    Raises ``UserError`` where it cannot be built.
    """
    found = find(name)
    loaded = build(found, options).awake("cpu")
    prompts = list(prompts_of(data, "train", {})[:2]) if data else list(PROMPTS)
    samples = [sample_of(prompts[i // 3], i, loaded.declaration.inputs) for i in range(6)]
    return Case(found, options, loaded, Caller(loaded, TIMEOUT_S), samples, made_up=data is None)


def sample_of(prompt: Prompt, number: int, inputs: Sequence[str]) -> Sample:
    """A made-up sample that holds ``inputs``: noise around a colour of its own, one of ``TEXTS``, a second of
    noise."""
    draw = torch.Generator().manual_seed(number)
    shade = torch.randint(256, (3,), generator=draw).view(1, 1, 3)
    frames = []
    for _ in range(5 if "video" in inputs else 1):
        noise = torch.randint(-30, 30, (64, 64, 3), generator=draw)
        frames.append(Image.fromarray((shade + noise).clamp(0, 255).to(torch.uint8).numpy()))
    tensors = torch.stack([to_tensor(frame) for frame in frames])
    return Sample(
        prompt,
        SampleId(0, number // 3, 0, number % 3),
        image=frames[0] if "image" in inputs else None,
        video=tuple(frames) if "video" in inputs else None,
        tensor=None if "tensor" not in inputs else tensors if "video" in inputs else tensors[0],
        text=TEXTS[number % len(TEXTS)] if "text" in inputs else None,
        tokens=Tokens(tuple(range(9)), ((3, 6 + number % 4),)) if "tokens" in inputs else None,
        audio=Audio(0.1 * torch.randn(2, 24000, generator=draw), 24000) if "audio" in inputs else None,
    )


def every_sample_is_scored(case: Case) -> str:
    answer = case.ask(case.samples)
    failed = [reason for reason in answer.reasons if reason]
    if len(failed) == len(case.samples):
        raise CannotRun(f"it scored none of the made-up samples ({failed[0]}); name a data set that fits with --data")
    scores = [value for value in answer.total if not math.isnan(value)]
    expect(all(math.isfinite(value) for value in scores), f"a score is not finite: {scores}")
    without = f", {len(failed)} without: {failed[0]}" if failed else ""
    return f"{len(scores)} of {len(case.samples)}, from {min(scores):.4g} to {max(scores):.4g}{without}"


def it_answers_alike(case: Case) -> str:
    first, second = case.ask(case.samples).total, case.ask(case.samples).total
    gap = _gap(first, second)
    expect(gap < CLOSE, f"the same samples got scores that differ by {gap:.2g}; seed what it draws, by the sample")
    return f"asked twice, within {gap:.1g}"


def neighbours_do_not_matter(case: Case) -> str:
    together = case.ask(case.samples).total
    if case.loaded.declaration.per == "group":
        order = [2, 0, 1, 3, 5, 4]
        gap = _gap([together[i] for i in order], case.ask([case.samples[i] for i in order]).total)
        expect(gap < CLOSE, f"the order inside a group changes scores by {gap:.2g}")
        return f"the order inside a group: within {gap:.1g}"
    alone = [case.ask([sample]).total[0] for sample in case.samples]
    gap = _gap(together, alone)
    expect(gap < CLOSE, f"a sample scores otherwise alone than in a batch, by {gap:.2g}; or declare per='group'")
    back = _gap(together[::-1], case.ask(case.samples[::-1]).total)
    expect(back < CLOSE, f"the order of a batch changes scores by {back:.2g}; return them in the samples' order")
    return f"alone or in a batch, in any order: within {max(gap, back):.1g}"


def a_strange_sample_costs_only_itself(case: Case) -> str:
    """A policy makes such things: a black picture, silence, an empty response that was cut."""
    if case.loaded.declaration.per == "group":
        raise CannotRun("it compares the samples of a group, so that one may change the others")
    strange = case.samples[1]
    black = Image.new("RGB", (64, 64))
    strange = replace(
        strange,
        image=None if strange.image is None else black,
        video=None if strange.video is None else (black,) * 5,
        tensor=None if strange.tensor is None else torch.zeros_like(strange.tensor),
        text=None if strange.text is None else "",
        audio=None if strange.audio is None else Audio(torch.zeros(2, 24000), 24000),
        truncated=strange.text is not None,
    )
    before = case.ask(case.samples).total
    samples = [*case.samples]
    samples[1] = strange
    after = case.ask(samples)
    kept = [i for i in range(len(samples)) if i != 1]
    gap = _gap([before[i] for i in kept], [after.total[i] for i in kept])
    expect(gap < CLOSE, f"a black picture or an empty text among them changes the others' scores by {gap:.2g}")
    said = f"no score ({after.reasons[1]})" if after.reasons[1] else f"a score of {after.total[1]:.4g}"
    return f"a black picture or an empty text gets {said}"


def an_unknown_option_is_refused(case: Case) -> str:
    wrong = problems(case.found, {**case.options, "no_such_option": 1})
    expect(wrong, "it takes any option (**kwargs), so that a slip of the pen is not noticed; name its options")
    return wrong[0].partition(";")[0]


def its_gradient_is_the_slope(case: Case) -> str:
    pictures = [sample.tensor for sample in case.samples if sample.tensor is not None]
    draw = torch.Generator().manual_seed(1)
    along = [torch.randn(picture.shape, generator=draw) / 64 for picture in pictures]

    def total(step: float, *, graph: bool) -> torch.Tensor:
        moved = [(p + step * d).requires_grad_(graph) for p, d in zip(pictures, along, strict=True)]
        shown = [replace(sample, tensor=picture) for sample, picture in zip(case.samples, moved, strict=True)]
        returned = case.loaded.call(shown, context=Context(step=0, label="check"))
        scores = returned["score"] if isinstance(returned, Mapping) else returned
        expect(isinstance(scores, torch.Tensor), f"it returned a {type(scores).__name__}; return a tensor [B]")
        if not graph:
            return scores.detach().double().sum()
        expect(scores.requires_grad, "the scores have no graph to sample.tensor; compute them with torch throughout")
        found = torch.autograd.grad(scores.sum(), moved)
        return torch.stack([(g * d).sum() for g, d in zip(found, along, strict=True)]).sum()

    slope = float(total(0.0, graph=True))
    measured = [float(total(h, graph=False) - total(-h, graph=False)) / (2 * h) for h in (1e-2, 1e-1, 1.0)]
    gap = min(abs(m - slope) for m in measured) / max(abs(slope), 1e-6)
    expect(gap < 0.02, f"along a random direction the slope is {measured[1]:.4g}, and the gradient says {slope:.4g}")
    return f"within {gap:.1g} of finite differences, along a random direction"


def it_wakes_as_it_fell_asleep(case: Case) -> str:
    before = case.ask(case.samples).total
    case.loaded.sleep("cpu")
    case.loaded.sleep("cpu")
    case.loaded.wake("cpu")
    gap = _gap(before, case.ask(case.samples).total)
    expect(gap == 0, f"after sleep() and wake() scores differ by {gap:.2g}")
    return "after sleep() and wake() it scores the same"


def _gap(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference; infinite where one has a score and the other none."""
    gaps = [
        0.0 if math.isnan(a) and math.isnan(b) else abs(a - b) if not math.isnan(a + b) else math.inf
        for a, b in zip(first, second, strict=True)
    ]
    return max(gaps) / max(1.0, *(abs(v) for v in first if not math.isnan(v)), 0.0)


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "every sample gets a score": every_sample_is_scored,
    "the same samples, the same scores": it_answers_alike,
    "a sample's neighbours do not matter": neighbours_do_not_matter,
    "a strange sample costs only itself": a_strange_sample_costs_only_itself,
    "an unknown option is refused": an_unknown_option_is_refused,
    "its gradient is the slope": its_gradient_is_the_slope,
    "sleep() and wake()": it_wakes_as_it_fell_asleep,
}


def checks(case: Case) -> Iterator[Check]:
    """All checks that the reward's declaration asks for."""
    left_out = {"its gradient is the slope"} if not case.loaded.declaration.differentiable else set()
    left_out |= {"sleep() and wake()"} if case.loaded.sleeper is None else set()
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items() if name not in left_out)
