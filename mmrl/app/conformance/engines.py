"""What a rollout engine owes a text pipeline: see ``mmrl.core.rollout_engine``.

Every check compares with Hugging Face's model of the same weights in float32, and has a control that other weights, or
another temperature, must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mmrl.app.conformance.running import CannotRun, Check, expect, refused
from mmrl.core.plugins.loading import folders
from mmrl.core.rollout_engine import AnswersAsItGoes, Completion, ReportsMetrics, Request, RolloutEngine, Settings
from mmrl.inference import own_class
from mmrl.inference.lazy_engine import metrics_of

CLOSE, APART = 1e-3, 1e-2
"""Log-probs of the same weights in float32, and of others."""
CONTEXT, TOKENS = 96, 12
SMALL = Path("llm") / "models" / "sums-qwen3"


@dataclass(frozen=True)
class Case:
    """An engine that was just started on ``model``, whose context is ``CONTEXT`` tokens; ``other``: the same
    architecture with other weights. ``start`` starts a further engine, for adapters of the given rank; None where the
    engine takes none."""

    engine: RolloutEngine
    model: nn.Module
    other: nn.Module
    start: Callable[[int], RolloutEngine] | None = None

    def ask(self, *requests: Request, **settings: object) -> list[Completion]:
        """The engine's answers, their number checked."""
        made = self.engine.generate(list(requests), replace(Settings(TOKENS), **settings))
        expect(len(made) == len(requests), f"{len(requests)} requests got {len(made)} answers; return one for each")
        return made

    def give(self, model: nn.Module) -> None:
        """Update the engine with the weights of ``model``."""
        self.engine.update((name, tensor.detach().clone()) for name, tensor in model.named_parameters())


def request(seed: int = 0, length: int = 17, vocabulary: int = 256, **more: object) -> Request:
    """A prompt of ``length`` tokens without meaning."""
    tokens = torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return replace(Request(tokens, "", seed), **more)


@torch.no_grad()
def log_probs(model: nn.Module, asked: Request, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """The log-probs of ``tokens`` after the prompt, computed by ``model``."""
    prompt = [*asked.prompt_ids, *asked.partial]
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


def gap(model: nn.Module, asked: Request, answer: Completion, temperature: float = 1.0) -> float:
    """The largest difference of the answer's log-probs from those of ``model``."""
    return (log_probs(model, asked, answer.token_ids, temperature) - torch.tensor(answer.log_probs)).abs().max().item()


def every_request_is_answered(case: Case) -> str:
    asked = [request(n, 5 + 7 * n, name=f"sample {n}") for n in range(4)]
    for one, answer in zip(asked, case.ask(*asked), strict=True):
        n, said = len(answer.token_ids), len(answer.log_probs)
        expect(n == said, f"{n} tokens came with {said} log-probs; return one for each token")
        expect(
            n == TOKENS, f"{n} tokens were drawn of {TOKENS} with no stop token; only stop_token_ids may end a sample"
        )
        expect(
            answer.finish == "length", f"a sample that used up its tokens ended with {answer.finish!r}, not 'length'"
        )
        seen, given = answer.prompt_tokens, len(one.prompt_ids)
        expect(seen == given, f"prompt_tokens is {seen} for a prompt of {given} tokens; count the prompt alone")
    (empty,) = case.ask(request(partial=range(3, 3 + TOKENS)))
    expect(
        not empty.token_ids, "a sample whose tokens were used up got more; max_new_tokens counts Request.partial too"
    )
    return f"{len(asked)} of {len(asked)}, in their order, {TOKENS} tokens and log-probs each"


def metrics_are_numbers(case: Case) -> str:
    case.ask(request())
    found = metrics_of(case.engine)
    wrong = [name for name, value in found.items() if not math.isfinite(value)]
    expect(not wrong, f"{', '.join(wrong)}: not finite; leave a number out that there is not yet")
    return f"{', '.join(found) or 'none yet'}, logged after every step"


def requests_are_answered_as_they_come(case: Case) -> str:
    engine = case.engine
    assert isinstance(engine, AnswersAsItGoes)
    asked = [request(n, 5 + 7 * n, name=f"sample {n}") for n in range(4)]
    whole = case.ask(*asked)
    ids = [engine.submit(one, Settings(TOKENS)) for one in reversed(asked)]
    expect(len(set(ids)) == len(ids), f"submit() returned {ids}; give every request an id of its own")
    refused(lambda: case.give(case.model), "update() with requests under way", "their answers would mix the weights")
    engine.cancel(ids[0])
    refused(lambda: engine.cancel(ids[0]), "cancel() of what was cancelled", "its answer never comes")
    found: dict[int, Completion] = {}
    while more := engine.ready(None):
        found.update(more)
    left = set(ids[1:])
    expect(set(found) == left, f"ready() answered {sorted(found)}, under way were {sorted(left)}; answer each once")
    for n, id in enumerate(reversed(ids[1:])):
        expect(
            list(found[id].token_ids) == list(whole[n].token_ids),
            "a request that came beside others drew other tokens than in generate(); draw from its own seed",
        )
    return f"{len(left)} of {len(ids)}, one cancelled, with the tokens of generate()"


def log_probs_are_the_models(case: Case) -> str:
    most = 0.0
    for temperature in (1.0, 0.7):
        asked = [request(n, 9 + 6 * n) for n in range(3)]
        for one, answer in zip(asked, case.ask(*asked, temperature=temperature), strict=True):
            off = gap(case.model, one, answer, temperature)
            expect(
                off < CLOSE,
                f"at temperature {temperature} log-probs differ from the model's by {off:.2g}; return those of the "
                "distribution that the token was drawn from, after the temperature",
            )
            most = max(most, off)
            expect(gap(case.other, one, answer, temperature) > APART, "other weights give the same log-probs")
    return f"within {most:.1g} of Hugging Face's at temperatures 1 and 0.7"


@torch.no_grad()
def greedy_takes_the_likeliest(case: Case) -> str:
    (answer,) = case.ask(request(), temperature=0.0)
    tokens: list[int] = []
    for _ in range(TOKENS):
        prompt = torch.tensor([[*request().prompt_ids, *tokens]])
        tokens.append(int(case.model(input_ids=prompt).logits[0, -1].argmax()))
    expect(
        list(answer.token_ids) == tokens,
        f"temperature 0 drew {list(answer.token_ids)}, the likeliest are {tokens}; take the likeliest token at 0",
    )
    (first,) = case.ask(request(3), top_k=1)
    expect(list(first.token_ids) == tokens, "top_k 1 drew something else than the likeliest; apply Settings.top_k")
    (nucleus,) = case.ask(request(3), top_p=1e-6)
    expect(list(nucleus.token_ids) == tokens, "top_p 1e-6 drew something else than the likeliest; apply Settings.top_p")
    return "so do top_k 1 and top_p 1e-6"


def a_seed_decides_a_sample(case: Case) -> str:
    before = torch.get_rng_state()
    (alone,) = case.ask(request(3))
    among = case.ask(request(1), request(3), request(2, 40))
    state = "draw from a generator seeded with Request.seed, not from torch's own: the trainer's draws depend on that"
    expect(torch.equal(torch.get_rng_state(), before), f"sampling changed torch's random state; {state}")
    same = among[1].token_ids, alone.token_ids
    expect(
        list(same[0]) == list(same[1]),
        "a sample drew other tokens beside others than alone; give every request a random stream of its own seed",
    )
    expect(list(among[0].token_ids) != list(alone.token_ids), "two seeds drew the same; use Request.seed")
    return "whatever is sampled beside it; torch's random state stays"


def only_named_tokens_stop(case: Case) -> str:
    (whole,) = case.ask(request())
    stop = whole.token_ids[5]
    first = list(whole.token_ids).index(stop)
    (stopped,) = case.ask(request(), stop_token_ids=(stop,))
    expect(
        stopped.finish == "stop" and list(stopped.token_ids) == list(whole.token_ids[: first + 1]),
        f"with stop token {stop} it drew {list(stopped.token_ids)} ({stopped.finish}); end with that token, keep it, "
        "and say 'stop'",
    )
    return "at that token, which is kept"


def a_cut_sample_goes_on(case: Case) -> str:
    (whole,) = case.ask(request(), temperature=0.0)
    tokens: list[int] = []
    finishes: list[str] = []
    while len(finishes) < TOKENS and (not finishes or finishes[-1] == "cut"):
        (part,) = case.ask(request(partial=tuple(tokens)), temperature=0.0, cut_after=5)
        expect(part.prompt_tokens == len(request().prompt_ids), "prompt_tokens counts Request.partial; leave it out")
        tokens += part.token_ids
        finishes.append(part.finish)
    expect(
        finishes == ["cut", "cut", "length"],
        f"{TOKENS} tokens, 5 at a time, ended with {finishes}; say 'cut' where cut_after ended a call",
    )
    expect(tokens == list(whole.token_ids), "a greedy sample cut twice differs from the same in one go")
    return "greedy, cut twice, it is the sample in one go"


def a_long_prompt_is_refused(case: Case) -> str:
    said = refused(
        lambda: case.ask(request(), request(length=CONTEXT + 5, name="step 1, slot 7")),
        f"a prompt of {CONTEXT + 5} tokens, with max_model_len {CONTEXT},",
        "say which prompt does not fit (mmrl.inference.engine_weights.allowances does)",
    )
    expect("step 1, slot 7" in said, f"the refusal does not name the prompt ({said!r}); use Request.name")
    near = request(length=CONTEXT - 4)
    (answer,) = case.ask(near)
    expect(len(answer.token_ids) == 4, f"the context has room for 4 tokens, {len(answer.token_ids)} were drawn")
    return "by its name; a sample ends where the context does"


def new_weights_replace_the_old(case: Case) -> str:
    (old,) = case.ask(request())
    sent = {name: tensor.detach().clone() for name, tensor in case.other.named_parameters()}
    case.engine.update(iter(sent.items()))
    for tensor in sent.values():
        tensor.zero_()
    (new,) = case.ask(request())
    off = gap(case.other, request(), new)
    expect(
        off < CLOSE,
        f"after update() log-probs differ from the new weights' by {off:.2g}; copy every tensor, keep none of those "
        "given, and forget cached prefixes",
    )
    case.give(case.model)
    (back,) = case.ask(request())
    expect(list(back.token_ids) == list(old.token_ids), "the first weights, given again, do not draw what they drew")
    expect(back.log_probs == old.log_probs or gap(case.model, request(), back) < CLOSE, "nor the same log-probs")
    return f"within {off:.1g}; the first ones, given again, draw the same tokens"


def a_part_of_the_weights_is_refused(case: Case) -> str:
    part = list(case.model.named_parameters())[1:]
    try:
        refused(
            lambda: case.engine.update((name, tensor.detach()) for name, tensor in part),
            "an update that lacks weights",
            "the rest would stay old (mmrl.inference.engine_weights.Counted counts what came)",
        )
    finally:
        case.give(case.model)
    return "an update must bring every weight"


def it_wakes_as_it_fell_asleep(case: Case) -> str:
    if not case.engine.sleeps:
        raise CannotRun("sleeps is False on this device: with placement.sleep it is ended and started again")
    (before,) = case.ask(request())
    case.engine.sleep()
    case.engine.wake()
    case.give(case.model)
    (after,) = case.ask(request())
    expect(list(before.token_ids) == list(after.token_ids), "after sleep(), wake() and update() it draws other tokens")
    return "after sleep(), wake() and update() it draws the same"


def adapters_are_applied(case: Case) -> str:
    if case.start is None:
        raise CannotRun("its constructor takes no lora_rank, so recipes with model.lora are refused")
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    engine = case.start(4)
    try:
        targets = ["q_proj", "v_proj"]
        adapted = get_peft_model(deepcopy(case.model), LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        with torch.no_grad():
            for name, tensor in adapted.named_parameters():
                if "lora_" in name:
                    tensor.copy_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
        tensors: Mapping[str, Tensor] = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        engine.update_lora(tensors, 4, 8.0, targets)
        (answer,) = engine.generate([request()], Settings(TOKENS))
        off, base = gap(adapted, request(), answer), gap(case.model, request(), answer)
        expect(off < CLOSE, f"with an adapter log-probs differ from peft's by {off:.2g} (scale by alpha / rank)")
        expect(base > APART, "the adapter changes nothing")
        return f"within {off:.1g} of peft's"
    finally:
        engine.close()


def it_closes_twice(case: Case) -> str:
    case.engine.close()
    case.engine.close()
    return "without harm"


def perturbed(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with other weights."""
    made = deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.add_(0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    return made


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "every request is answered": every_request_is_answered,
    "log-probs are the model's": log_probs_are_the_models,
    "temperature 0 takes the likeliest token": greedy_takes_the_likeliest,
    "a seed decides a sample": a_seed_decides_a_sample,
    "named tokens alone end a sample": only_named_tokens_stop,
    "a sample that was cut goes on": a_cut_sample_goes_on,
    "a prompt that does not fit is refused": a_long_prompt_is_refused,
    "update() replaces the weights": new_weights_replace_the_old,
    "a part of the weights is refused": a_part_of_the_weights_is_refused,
    "update_lora() applies an adapter": adapters_are_applied,
    "sleep() and wake()": it_wakes_as_it_fell_asleep,
    "close() twice": it_closes_twice,
}


def small_model() -> str:
    """The folder of the smallest language model that mmrl ships."""
    return str(next(root / SMALL for root in folders("pipelines") if (root / SMALL).is_dir()))


def opened(name: str, options: Mapping[str, object], path: str) -> Case:
    """The engine ``path/to/file.py:Class``, or one of ours, on the language model at ``path``, on the CPU.

    Raises ``UserError`` where it cannot be built or does not start.
    """
    import transformers.utils.logging
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    given = {
        "max_model_len": CONTEXT, "dtype": "float32", "lora_rank": None, "images": 0, "clips": 0,
        "bucket_bytes": 2**16, "device": torch.device("cpu"),
    }  # fmt: skip
    engine = own_class.starter(name, path, options, given)()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def with_adapters(rank: int) -> RolloutEngine:
        return own_class.starter(name, path, options, {**given, "lora_rank": rank})()

    return Case(engine, model, perturbed(model), with_adapters if own_class.takes(name, "lora_rank") else None)


def checks(case: Case) -> Iterator[Check]:
    """All checks of ``case``; the last closes its engine."""
    if isinstance(case.engine, ReportsMetrics):
        yield Check("metrics() gives numbers", partial(metrics_are_numbers, case))
    if isinstance(case.engine, AnswersAsItGoes):
        yield Check("requests are answered as they come", partial(requests_are_answered_as_they_come, case))
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items())
