"""A small language model as a judge: how likely is this response, without its question?"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmrl


@mmrl.reward(inputs=("text",), paths=("model",))
class Fluent:
    """``model``: a directory."""

    def __init__(self, model):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(self, samples, *, context):
        texts = [self.tokenizer(s.text + "\n", add_special_tokens=False).input_ids for s in samples]
        longest = max(map(len, texts))
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
        logits = self.model(tokens).logits[:, :-1].float().log_softmax(-1)
        each = logits.gather(2, tokens[:, 1:, None])[..., 0]
        inside = torch.arange(longest - 1) < torch.tensor([[len(ids) - 1] for ids in texts])
        return ((each * inside).sum(1) / 10).tolist()
