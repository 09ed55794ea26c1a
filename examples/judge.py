"""A judge with a model of its own: a base model without a chat template says how likely "yes" follows the rubric.

Rubric, modes, cache and transcripts are those of ``mmrl.rewards.judge``; this file says how a question is answered.
"""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmrl
from mmrl.core.errors import UserError
from mmrl.rewards.judge import Judge
from mmrl.rewards.judging.answers import Words
from mmrl.rewards.judging.asking import Outcome


class Likelihood:
    """Answers by log-probs: that of the word for yes against that of the word for no."""

    sees, control = False, ()  # it reads text only, and breaks no further control tokens

    def __init__(self, path):
        self.identity = f"likelihood of {path}"  # what the cache knows it by
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def ask(self, asks, kind, settings, device):
        if not isinstance(kind, Words):
            raise UserError("options.answer: Likelihood compares two words; set it to {type: yes_no}")
        return [self._answer(ask, kind) for ask in asks]

    def _answer(self, ask, kind):
        yes, no = (self._log_prob(ask.text + "\nAnswer:", f" {word}") for word in (kind.yes, kind.no))
        words = replace(kind, floor=0.0)  # the two are compared, however likely they are
        return Outcome(words.verdict([yes], [no]), [f"{kind.yes}: {yes:.4f}, {kind.no}: {no:.4f}"])

    @torch.inference_mode()
    def _log_prob(self, question, word):
        before = self.tokenizer(question, add_special_tokens=False).input_ids
        after = self.tokenizer(word, add_special_tokens=False).input_ids
        logits = self.model(torch.tensor([before + after], device=self.model.device)).logits[0, len(before) - 1 : -1]
        chosen = torch.tensor(after, device=logits.device).unsqueeze(1)
        return float(logits.float().log_softmax(-1).gather(1, chosen).mean())

    def wake(self, device):
        self.model.to(device)
        return False

    def sleep(self, device):
        self.model.to("cpu")


@mmrl.reward(inputs=("text",), paths=("model", "rubric"), device=True)
class BaseJudge(Judge):
    """The options are those of ``judge``; ``model`` is a directory or a hub name."""

    def open_local(self, model):
        return Likelihood(model)
