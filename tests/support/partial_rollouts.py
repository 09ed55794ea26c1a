"""Runs of partial rollout whose engine is a transformers model of its own, for the tests of it."""

import json
import threading
from collections import Counter

import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.engine_weights import allowances, completion, nothing_left
from mmrl.training.loop import train_step
from tests.support import tiny

allow_cpu_only()  # before transformers imports torchvision

REWARD = '''
from pathlib import Path

import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    """The share of letters that are vowels."""
    return [sum(c in "aeiou" for c in s.text) / max(1, len(s.text)) for s in samples]

@mmrl.reward(inputs=("text",))
def breaks_once(samples, *, context):
    """As score, but for one failure in step 2."""
    mark = Path(__file__).with_name("broken")
    if context.step == 2 and not mark.exists():
        mark.touch()
        raise RuntimeError("down for once")
    return score(samples, context=context)

@mmrl.reward(inputs=("text",), per="group")
def whole(samples, *, context):
    """Only for whole groups of one prompt."""
    assert len(samples) == 2 and len({s.prompt.id for s in samples}) == 1, [s.id for s in samples]
    return [float(s.id.sample) for s in samples]
'''
PER_STEP, EXTRA, CUT, LONGEST = 2, 3, 4, 14


class Sampler:
    """A rollout engine: a transformers model of its own, token by token, a response at a time.

    Each response depends on its prompt, its seed and the weights alone.
    """

    sleeps = False

    def __init__(self, model, *, max_model_len, dtype, lora_rank, options, sending=None, environment=None):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.max_model_len = max_model_len
        self.calls = []

    @torch.no_grad()
    def generate(self, requests, settings):
        allowed = allowances(requests, settings, self.max_model_len)
        self.calls.append((settings.cut_after, len(requests)))
        return [
            self.one(r, a, settings) if a.tokens else nothing_left(r) for r, a in zip(requests, allowed, strict=True)
        ]

    def one(self, request, allowance, settings):
        from transformers import DynamicCache

        draw = torch.Generator().manual_seed(allowance.seed)
        given = torch.tensor([[*request.prompt_ids, *request.partial]])
        tokens, log_probs, past = [], [], DynamicCache(config=self.model.config)
        while len(tokens) < allowance.tokens:
            logits = self.model(given, past_key_values=past, use_cache=True).logits[0, -1].float()
            row = torch.log_softmax(logits / (settings.temperature or 1.0), -1)
            token = row.argmax() if settings.temperature == 0 else torch.multinomial(row.exp(), 1, generator=draw)[0]
            tokens.append(token.item())
            log_probs.append(row[token].item())
            if tokens[-1] in settings.stop_token_ids:
                break
            given = token.reshape(1, 1)
        stopped = bool(tokens) and tokens[-1] in settings.stop_token_ids
        seen = len(request.prompt_ids) + len(request.partial)
        return completion(request, allowance, tokens, log_probs, "stop" if stopped else "length", seen, "the sampler")

    def update(self, weights):
        missing = self.model.load_state_dict({k: v.clone() for k, v in weights}, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        self.model.tie_weights()

    def close(self):
        pass


def write(folder):
    """A recipe of partial rollout with its model, data and rewards in ``folder``, which it returns."""
    tiny.language_model(folder / "model", sharp=0.1)
    settings = json.loads((folder / "model" / "generation_config.json").read_text())
    settings["eos_token_id"] = list(range(0, 256, 6))  # many ways to stop: lengths of all kinds
    (folder / "model" / "generation_config.json").write_text(json.dumps(settings))
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "few.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:3]))
    (folder / "recipe.yaml").write_text(
        f"""
name: flight
pipeline: llm/chat
model: {{path: model}}
data: {{name: jsonl, train: {{path: data.jsonl, heldout: 8}}, heldout: {{path: data.jsonl, heldout: 8}}}}
sampling: {{max_new_tokens: {LONGEST}}}
rollout: {{engine: vllm, partial: {{cut_after: {CUT}, extra: {EXTRA}}}}}
rewards: [{{name: reward.py, label: vowels}}]
algorithm: {{type: grpo, kl_coef: 0.0}}
train: {{steps: 5, prompts_per_step: {PER_STEP}, group_size: 2, micro_batch_size: 4}}
optim: {{lr: 1.0e-2}}
eval: {{every: 2, samples: 4, temperature: 0.0}}
checkpoint: {{every: 1}}
"""
    )
    return folder


def load(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], [*overrides])


def make(folder, *overrides):
    loaded = load(folder, *overrides)
    return build(loaded.recipe)


def step(run, number=0):
    return train_step(run, number, Clock(torch.device("cpu")))


def watched(run):
    """The rounds that the flight hands over, as they come."""
    rounds, collect = [], run.rollout.parts["flight"].collect
    run.rollout.parts["flight"].collect = lambda *args: rounds.append(collect(*args)) or rounds[-1]
    return rounds


def replayed(weights, model, prompt, tokens):
    """Log-probs of ``tokens`` under ``weights``, in float64."""
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


class Room:
    """Controllers in threads of one process: ``Peers`` of each."""

    def __init__(self, size):
        self.barrier, self.said = threading.Barrier(size, timeout=120), [None] * size

    def member(self, rank):
        room = self

        class Member:
            def __init__(self):
                self.sent, self.waited, self.ranks = Counter(), 0.0, None

            def gather(self, values):
                room.said[rank] = values
                room.barrier.wait()
                found = list(room.said)
                room.barrier.wait()
                return found

            def sum(self, values, kind):
                found = self.gather(values.clone())
                return values.copy_(torch.stack(found).sum(0))

        return Member()
