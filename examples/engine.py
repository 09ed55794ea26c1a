"""A rollout engine: Hugging Face's ``generate`` on a copy of the weights. It takes no pictures and no adapters."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig

from mmrl.core.errors import UserError
from mmrl.inference.engine_weights import Counted, allowances, completion, nothing_left
from mmrl.models.text.token_sampling import Draw


class OwnCopy:
    several = True  # an instance for each controller and device works

    def __init__(self, model, *, max_model_len, dtype="float32", device="cpu", batch=64):
        self.max_model_len, self.batch, self.device = max_model_len, batch, torch.device(device)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(self.device)
        self.model.generation_config = GenerationConfig()  # not the checkpoint's own, such as a repetition penalty
        self.sleeps = self.device.type != "cpu"  # on the CPU sleeping would free nothing

    def generate(self, requests, settings):
        allowed = allowances(requests, settings, self.max_model_len)  # how many tokens each may draw, with which seed
        answers, rows = [nothing_left(r) for r in requests], [n for n, one in enumerate(allowed) if one.tokens]
        for part in (rows[i : i + self.batch] for i in range(0, len(rows), self.batch)):
            prompts = [[*requests[n].prompt_ids, *requests[n].partial] for n in part]
            drawn = self._draw(prompts, [allowed[n] for n in part], settings)
            for n, prompt, tokens, said in zip(part, prompts, *drawn, strict=True):
                stops = [i for i, t in enumerate(tokens[: allowed[n].tokens]) if t in settings.stop_token_ids]
                end, why = (stops[0] + 1, "stop") if stops else (allowed[n].tokens, "length")
                answers[n] = completion(requests[n], allowed[n], tokens[:end], said[:end], why, len(prompt), "OwnCopy")
        return answers

    @torch.no_grad()
    def _draw(self, prompts, allowed, settings):
        ids = pad_sequence([torch.tensor(p) for p in prompts], True, -1, "left").to(self.device)
        n = max(one.tokens for one in allowed)
        own = [torch.rand(n, generator=torch.Generator().manual_seed(a.seed), dtype=torch.float64) for a in allowed]
        draw = Draw(torch.stack(own), settings.temperature, settings.top_p, settings.top_k)
        how = {"do_sample": False, "max_new_tokens": n, "eos_token_id": [*settings.stop_token_ids], "pad_token_id": 0}
        out = self.model.generate(ids.clamp(0), attention_mask=(ids >= 0).long(), logits_processor=[draw], **how)
        return out[:, ids.shape[1] :].tolist(), torch.stack(draw.log_probs, 1).tolist()

    @torch.no_grad()
    def update(self, weights):
        own, given = dict(self.model.named_parameters()), Counted(weights)
        for name, tensor in given:
            own[name].copy_(tensor)
        given.check(sum(tensor.numel() for tensor in own.values()), "OwnCopy")

    def update_lora(self, tensors, rank, alpha, targets):
        raise UserError("OwnCopy takes no adapter; remove model.lora")

    def sleep(self):
        self.model.to("cpu")

    def wake(self):
        self.model.to(self.device)

    def close(self):
        self.model = None
