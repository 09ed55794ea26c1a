"""vLLM as a rollout engine: the real one, against transformers in float32. Skipped where it is not installed.

Models are tiny and random with sharp logits (initial deviation 0.3): near-uniform logits would hide errors. Every
comparison has a control that must fail it.
"""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmrl.core.errors import UserError
from mmrl.core.media import Clip
from mmrl.core.rollout_engine import AnswersAsItGoes, Request, Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.sampling_options import FIXED, OURS, fields
from mmrl.inference.server_process import Timeouts
from mmrl.inference.sleep_mode import SleepMode
from mmrl.inference.vllm import VllmEngine
from mmrl.inference.vllm_server import GroupSender, VllmServer
from mmrl.inference.weight_files import Sending
from tests.support.vllm import IMAGE, PROMPT, TEXT, VIDEO, VISION, VISION_END, ask, gap, tokenizer

allow_cpu_only()  # before anything imports torchvision
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

CLOSE, APART = 1e-4, 0.5


def language_model(folder, seed):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(head_dim=32, tie_word_embeddings=True, **TEXT))  # the other model is not tied
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval()


def vision_model(folder, seed):
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    torch.manual_seed(seed)
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": sections, "initializer_range": 0.2},
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION,
        vision_end_token_id=VISION_END,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template="{{ messages[0]['content'] }}",
    )
    processor.save_pretrained(folder)
    return model.eval(), processor


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return folder / "a", language_model(folder / "a", 0), language_model(folder / "b", 7)


@pytest.fixture(scope="module")
def engine(text):
    before = (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    engine = VllmEngine(str(text[0]), max_model_len=512, lora_rank=8)
    after = (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == after
    assert torch.set_num_threads is setter
    assert torch.get_num_threads() == threads
    yield engine
    engine.close()
    engine.close()
    assert not torch.distributed.is_initialized()


@pytest.fixture
def fresh(engine, text):
    """The engine with the weights of model a and without an adapter."""
    engine.update(text[1].named_parameters())  # what is tied comes once, as in a checkpoint
    engine._adapter = None
    return engine


def test_log_probs_are_those_of_transformers_at_every_temperature(fresh, text):
    _, a, b = text
    requests = [ask(seed, PROMPT[: 20 * (seed + 1)]) for seed in range(4)]
    for temperature in (1.0, 0.7):
        answers = fresh.generate(requests, Settings(24, temperature=temperature))
        for request, answer in zip(requests, answers, strict=True):
            assert len(answer.token_ids) == 24
            assert answer.finish == "length"
            assert answer.prompt_tokens == len(request.prompt_ids)
            assert gap(a, request, answer, temperature) < CLOSE
            assert gap(b, request, answer, temperature) > APART
            assert gap(a, request, answer, 0.5 * temperature) > APART / 5


def test_greedy_takes_the_likeliest_token(fresh, text):
    model, tokens = text[1], []
    for _ in range(16):
        with torch.no_grad():
            tokens.append(model(torch.tensor([PROMPT + tokens])).logits[0, -1].argmax().item())
    (answer,) = fresh.generate([ask()], Settings(16, temperature=0))
    assert answer.token_ids == tokens
    assert gap(model, ask(), answer) < CLOSE


def test_top_p_log_probs_are_of_what_is_left(fresh, text):
    (answer,) = fresh.generate([ask()], Settings(16, top_p=0.6))
    with torch.no_grad():
        logits = text[1](torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for row, token, said in zip(logits.softmax(-1), answer.token_ids, answer.log_probs, strict=True):
        falling, order = row.sort(descending=True)
        kept = order[(falling.cumsum(0) - falling) < 0.6]
        assert token in kept.tolist()
        assert said == pytest.approx((row[token] / row[kept].sum()).log().item(), abs=CLOSE)
    assert gap(text[1], ask(), answer) > 0.01  # the whole distribution's are lower


def test_a_seed_decides_a_sample_whoever_its_neighbours_are(fresh):
    settings = Settings(12)
    before = torch.get_rng_state()
    (alone,) = fresh.generate([ask(3)], settings)
    assert torch.equal(torch.get_rng_state(), before)  # the trainer's draws are its own
    among = fresh.generate([ask(1), ask(3), ask(2, PROMPT[:40])], settings)
    assert among[1].token_ids == alone.token_ids
    assert among[0].token_ids != alone.token_ids


def test_without_seeds_each_call_draws_other_samples_and_leaves_the_trainers_numbers_alone(fresh, text):
    before = torch.get_rng_state()
    settings = Settings(12)
    answers = [fresh.generate([ask(None), ask(None)], settings) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    drawn = {tuple(one.token_ids) for both in answers for one in both}
    assert len(drawn) == 6
    assert max(gap(text[1], ask(3), one) for both in answers for one in both) < CLOSE
    assert fresh.generate([ask(3)], settings) == fresh.generate([ask(3)], settings)


def test_one_call_draws_what_several_calls_draw(fresh):
    """More prompts than vLLM takes into one of its own batches, which holds 4096 tokens on a CPU."""
    requests = [ask(seed, [(seed + i) % 250 for i in range(300)]) for seed in range(20)]
    whole = fresh.generate(requests, Settings(12))
    parts = [answer for n in range(0, 20, 5) for answer in fresh.generate(requests[n : n + 5], Settings(12))]
    for one, other in zip(whole, parts, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def as_it_goes(engine, requests, settings, close):
    """Requests in random order and number between answers, some of them cancelled, get what ``generate`` draws."""
    assert isinstance(engine, AnswersAsItGoes)
    assert engine.ready(None) == []
    drawn = [engine.generate([request], how)[0] for request, how in zip(requests, settings, strict=True)]
    draw, order, of, found = random.Random(2), list(range(len(requests))), {}, {}
    draw.shuffle(order)
    while order or len(found) < len(requests):
        for n in [order.pop() for _ in range(min(draw.choice([0, 1, 3]), len(order)))]:
            before = torch.get_rng_state()
            of[engine.submit(requests[n], settings[n])] = n
            assert torch.equal(torch.get_rng_state(), before)
            dropped = engine.submit(requests[n], replace(settings[n], max_new_tokens=200))
            with pytest.raises(
                UserError, match=r"requests under way .*: take their answers .* before new weights come"
            ):
                engine.update(iter(()))
            engine.cancel(dropped)
            with pytest.raises(UserError, match=f"no request {dropped} under way"):
                engine.cancel(dropped)
        for id, answer in engine.ready(None if not order else draw.choice([0.0, None])):
            found[of.pop(id)] = answer
    assert engine.ready(None) == []
    for n, answer in enumerate(drawn):
        assert (found[n].token_ids, found[n].finish) == (answer.token_ids, answer.finish)
        assert found[n].log_probs == pytest.approx(answer.log_probs, abs=close)


def test_requests_in_any_order_get_what_they_get_alone(fresh, text):
    requests = [ask(seed, [(7 * seed + i) % 250 for i in range(20 + 5 * seed)]) for seed in range(24)]
    kinds = [
        Settings(12),
        Settings(30, temperature=0.7, top_p=0.9),
        Settings(9, temperature=0),
        Settings(40, cut_after=5),
    ]
    as_it_goes(fresh, requests, [kinds[n % 4] for n in range(24)], 1e-5)
    fresh.update(text[1].named_parameters())
    id = fresh.submit(ask(), Settings(12))
    with pytest.raises(UserError, match="vLLM has 1 requests under way"):
        fresh.generate([ask()], Settings(12))
    fresh.cancel(id)


def test_only_the_named_tokens_stop(fresh, text):
    (whole,) = fresh.generate([ask()], Settings(24))
    stop = whole.token_ids[5]
    (stopped,) = fresh.generate([ask()], Settings(24, stop_token_ids=(stop,)))
    first = whole.token_ids.index(stop)
    assert stopped.finish == "stop"
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert len(stopped.log_probs) == first + 1
    (ended,) = fresh.generate([ask()], Settings(200))  # the model's own end is a token like any other
    assert len(ended.token_ids) == 200


LETTERS = list(range(32, 64))
"""Tokens of letters: what vLLM decodes begins with the end of the prompt, which is to be whole characters."""


def printable(tokenizer, tokens):
    """A place among ``tokens`` whose token is a visible character that comes there first, and that character."""
    shown = [tokenizer.decode([token]) for token in tokens]
    fits = (n for n, text in enumerate(shown) if n > 2 and len(text) == 1 and 33 <= ord(text) < 127)
    return next((n, shown[n]) for n in fits if shown[n] not in "".join(shown[:n]))


def test_stop_strings_end_a_sample_with_the_token_that_completes_one(fresh):
    (whole,) = fresh.generate([ask(prompt=LETTERS)], Settings(24))
    n, stop = printable(fresh._llm.get_tokenizer(), whole.token_ids)
    (stopped,) = fresh.generate([ask(prompt=LETTERS)], Settings(24, stop=[stop, "never there"]))
    assert (stopped.token_ids, stopped.finish) == (whole.token_ids[: n + 1], "stop")
    (later,) = fresh.generate([ask(prompt=LETTERS)], Settings(24, stop=[stop], min_new_tokens=n + 1))
    assert later.token_ids[: n + 2] == whole.token_ids[: n + 2]
    first = whole.token_ids[0]
    (ended,) = fresh.generate([ask(prompt=LETTERS)], Settings(24, stop_token_ids=(first,)))
    assert ended.token_ids == [first]
    (longer,) = fresh.generate(
        [ask(prompt=LETTERS, max_new_tokens=6)], Settings(24, stop_token_ids=(first,), min_new_tokens=8)
    )
    assert (len(longer.token_ids), longer.finish) == (6, "length")
    assert first not in longer.token_ids


def test_further_parameters_change_what_it_draws_and_wrong_ones_are_named(fresh, text):
    from vllm import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields("vllm") == public
    assert OURS["vllm"].keys() | FIXED["vllm"] <= public
    biased = ask(extra={"logit_bias": {9: 100.0}})
    assert fresh.generate([biased], Settings(8, temperature=0))[0].token_ids == [9] * 8
    with pytest.raises(UserError, match=r"rollout\.sampling: vLLM refuses .*presence_penalty must be in"):
        fresh.generate([ask(extra={"presence_penalty": 9.0})], Settings(8))


def test_penalty_and_min_p_are_in_the_log_probs_and_are_transformers(fresh, text):
    from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), MinPLogitsWarper(0.1)])
    (answer,) = fresh.generate([ask()], Settings(16, repetition_penalty=1.4, min_p=0.1))
    for n, (token, said) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
        ids = torch.tensor([[*PROMPT, *answer.token_ids[:n]]])
        with torch.no_grad():
            logits = theirs(ids, text[1](ids).logits[:, -1].float())
        assert said == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=CLOSE)
    assert gap(text[1], ask(), answer) > 0.01


def test_cut_and_resumed_is_the_same_as_in_one_go(fresh, text):
    (whole,) = fresh.generate([ask()], Settings(21, temperature=0))
    tokens, said, finishes = [], [], []
    while not finishes or finishes[-1] == "cut":
        (part,) = fresh.generate([ask(partial=tokens)], Settings(21, temperature=0, cut_after=8))
        assert part.prompt_tokens == len(PROMPT)
        tokens, said = [*tokens, *part.token_ids], [*said, *part.log_probs]
        finishes.append(part.finish)
    assert finishes == ["cut", "cut", "length"]
    assert tokens == whole.token_ids
    assert said == pytest.approx(whole.log_probs, abs=CLOSE)
    (empty,) = fresh.generate([ask(partial=tokens)], Settings(21))
    assert (empty.token_ids, empty.finish) == ([], "length")


def test_the_context_ends_a_sample_and_a_longer_prompt_is_named(fresh):
    (answer,) = fresh.generate([ask(prompt=PROMPT * 3 + PROMPT[:70])], Settings(40))
    assert (len(answer.token_ids), answer.finish) == (512 - 505, "length")
    with pytest.raises(UserError, match=r"1 of 2 prompts do not fit the engine's context of 512 .* sums/7 with 580"):
        fresh.generate([ask(), ask(prompt=PROMPT * 4, name="sums/7")], Settings(4))


def test_update_brings_the_new_weights_and_forgets_old_prefixes(fresh, text):
    _, a, b = text
    request, settings = ask(), Settings(16)
    (old,) = fresh.generate([request], settings)
    assert gap(a, request, old) < CLOSE
    # the control: new weights without forgetting go on from the old keys and values
    fresh._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": b.named_parameters()})
    (stale,) = fresh.generate([request], settings)
    assert gap(b, request, stale) > APART

    sent = {name: tensor.detach().clone() for name, tensor in b.named_parameters()}
    assert "lm_head.weight" not in sent
    fresh.update(iter(sent.items()))
    for tensor in sent.values():
        tensor.zero_()  # the engine keeps copies
    (new,) = fresh.generate([request], settings)
    assert gap(b, request, new) < CLOSE
    assert gap(a, request, new) > APART


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_wakes_weights_first_gets_new_ones_and_then_its_cache(fresh, text, monkeypatch, level):
    """By vLLM's own account of what sleeps, which it keeps on a CPU too, where it frees nothing: what a GPU drops is
    zeroed here."""
    llm, (_, a, b) = fresh._llm, text
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    monkeypatch.setattr(fresh, "sleeps", True)
    mode = SleepMode(keep_weights=level == 1, sleep=llm.sleep, wake=llm.wake_up)
    monkeypatch.setattr(fresh, "_mode", mode)
    (old,) = fresh.generate([ask()], Settings(16))
    fresh.sleep()
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    assert llm.llm_engine.is_sleeping()
    if level == 2:
        llm.collective_rpc("reset_weights")
        with pytest.raises(RuntimeError, match="update it before it samples"):
            fresh.generate([ask()], Settings(16))
    fresh.wake()
    asleep = []

    def weights():
        for name, tensor in b.named_parameters():
            asleep.append(set(executor.sleeping_tags))
            yield name, tensor

    fresh.update(weights())
    assert asleep
    assert all(parts == {"kv_cache"} for parts in asleep)
    assert not llm.llm_engine.is_sleeping()
    (new,) = fresh.generate([ask()], Settings(16))
    assert gap(b, ask(), new) < CLOSE
    assert gap(a, ask(), new) > APART
    assert gap(a, ask(), old) < CLOSE


def test_an_update_that_brings_too_little_is_an_error(fresh, text):
    some = [(k, v) for k, v in text[1].state_dict().items() if "layers.1" not in k]
    with pytest.raises(UserError, match=r"brought [\d,]+ values in \d+ tensors for vLLM, and its model has"):
        fresh.update(iter(some))


def lora(seed, prefix="base_model.model.model.layers"):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (128, 64)}
    tensors = {}
    for layer in range(2):
        for name, (i, o) in shapes.items():
            tensors[f"{prefix}.{layer}.{name}.lora_A.weight"] = 0.3 * torch.randn(4, i, generator=draw)
            tensors[f"{prefix}.{layer}.{name}.lora_B.weight"] = 0.3 * torch.randn(o, 4, generator=draw)
    return tensors, [name.split(".")[1] for name in shapes]


def merged(model, tensors, scale):
    import copy

    changed = copy.deepcopy(model)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name in [n for n in tensors if ".lora_A." in n]:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            parameters[target] += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return changed


def test_an_adapter_is_worth_its_merged_weights_and_is_replaced(fresh, text):
    request, settings = ask(), Settings(16)
    for seed in (1, 2):
        tensors, targets = lora(seed)
        fresh.update_lora(tensors, rank=4, alpha=8.0, targets=targets)
        (answer,) = fresh.generate([request], settings)
        assert gap(merged(text[1], tensors, 2.0), request, answer) < CLOSE
        assert gap(text[1], request, answer) > APART
    fresh.update(text[2].named_parameters())  # it stays on new weights
    (answer,) = fresh.generate([request], settings)
    assert gap(merged(text[2], tensors, 2.0), request, answer) < CLOSE
    with pytest.raises(UserError, match="for adapters of rank 8 at most; start it with lora_rank=16"):
        fresh.update_lora(tensors, rank=16, alpha=8.0, targets=targets)


def test_what_cannot_work_says_so(text, tmp_path):
    with pytest.raises(UserError, match=r"there is no model directory .*nowhere.*; set model.path"):
        VllmEngine(str(tmp_path / "nowhere"), max_model_len=64)
    with pytest.raises(UserError, match="engine options: logprobs_mode: set by the recipe's other keys"):
        VllmEngine(str(text[0]), max_model_len=64, options={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(UserError, match="take the vLLM server for tensor_parallel_size above 1"):
        VllmEngine(str(text[0]), max_model_len=64, options={"tensor_parallel_size": 2})


def picture(seed, size=(112, 84)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


class See:
    """Requests about pictures and clips, and what transformers makes of them."""

    def __init__(self, model, processor):
        self.model, self.processor = model, processor

    def request(self, images=(), clips=(), seed=0, partial=()):
        shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        shown += "<|vision_start|><|video_pad|><|vision_end|>" * len(clips)
        text = f"user: {shown}what is it? "
        ids = self.inputs(text, images, clips)["input_ids"][0].tolist()
        shown = self.processor.tokenizer(text, add_special_tokens=False).input_ids if images or clips else ()
        return Request(ids, text, seed=seed, media=[*images, *clips], partial=partial, unexpanded_ids=shown)

    def second_turn(self, first, answer, image):
        """What follows an answer about a picture: the answer's own tokens, and another picture. The answer spells a
        control token, whose text would be made into that token."""
        spelled = list(b"<|im_end|>")
        said = [*answer.token_ids, *[self.processor.tokenizer.convert_tokens_to_ids(chr(b)) for b in spelled]]
        told = self.request([image])
        return Request(
            [*first.prompt_ids, *said, *told.prompt_ids],
            "",
            seed=first.seed + 1,
            media=[*first.images, image],
            unexpanded_ids=[*first.unexpanded_ids, *said, *told.unexpanded_ids],
        )

    def turns_gap(self, request, answer, images=None):
        """As ``gap``, of a prompt of which parts were sampled: its ids are taken as they are."""
        made = self.inputs("<|image_pad|>" * 2, images or request.images, [])
        whole = [*request.prompt_ids, *answer.token_ids]
        kinds = torch.tensor([[int(token == IMAGE) for token in whole]])
        pixels = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return gap(self.model, request, answer, mm_token_type_ids=kinds, **pixels)

    def inputs(self, text, images, clips):
        media = {}
        if images:
            media["images"] = list(images)
        if clips:
            media["videos"] = [np.stack([np.asarray(f) for f in c.frames]) for c in clips]
            media["video_metadata"] = [
                {"total_num_frames": c.total, "fps": c.fps, "duration": c.total / c.fps, "frames_indices": c.indices}
                for c in clips
            ]
            media["do_sample_frames"] = False
        return self.processor(text=[text], return_tensors="pt", **media)

    def gap(self, request, answer, images=None, clips=None):
        """Against what transformers computes from the request's media, or from ``images`` and ``clips``."""
        made = self.inputs(request.text, images or request.images, clips or request.clips)
        more = len(request.partial) + len(answer.token_ids)
        extra = {k: v for k, v in made.items() if k not in ("input_ids", "attention_mask")}
        kinds = extra["mm_token_type_ids"]
        extra["mm_token_type_ids"] = torch.cat([kinds, torch.zeros(1, more, dtype=kinds.dtype)], 1)
        return gap(self.model, request, answer, **extra)


def test_pictures_have_the_limits_that_the_recipe_sets(vision):
    folder, a, _ = vision
    size = type(a.processor.image_processor.size)
    kept = a.processor.image_processor.size
    pixels = {"min_pixels": 784, "max_pixels": 4 * 784}
    engine = VllmEngine(
        str(folder), max_model_len=1024, images=1, options={"mm_processor_kwargs": {"images_kwargs": pixels}}
    )
    try:
        a.processor.image_processor.size = size(shortest_edge=784, longest_edge=4 * 784)
        request = a.request([picture(1, (168, 168))])
        assert request.prompt_ids.count(IMAGE) == 4
        (answer,) = engine.generate([request], Settings(4))
        assert a.gap(request, answer) < CLOSE
    finally:
        a.processor.image_processor.size = kept
        engine.close()


def clip(seed, fps=16.0):
    return Clip([picture(seed + i, (84, 84)) for i in range(4)], fps, [0, 2, 4, 6], 8)


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    pytest.importorskip("torchvision")
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return folder / "a", See(*vision_model(folder / "a", 0)), See(*vision_model(folder / "b", 5))


def test_pictures_and_clips_in_process(vision, capsys):
    folder, a, b = vision
    if ours := not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engine = VllmEngine(str(folder), max_model_len=1024, images=2, clips=1)
    assert "transformers 5 lets text after a clip start" in capsys.readouterr().err
    try:
        cases = [
            (a.request([picture(1)]), {"images": [picture(2)]}),
            (a.request([picture(2)]), {"images": [picture(1)]}),  # another of the same shape is another
            (a.request([picture(1), picture(3, (140, 168))]), {"images": [picture(2), picture(3, (140, 168))]}),
            (a.request(clips=[clip(10)]), {"clips": [clip(30)]}),
            (a.request(clips=[clip(10, fps=8.0)]), {"clips": [clip(10)]}),  # its rate counts
            (a.request([picture(1)], [clip(10)]), {"images": [picture(2)]}),
        ]
        requests = [request for request, _ in cases]
        for (request, other), answer in zip(cases, engine.generate(requests, Settings(12)), strict=True):
            assert answer.prompt_tokens == len(request.prompt_ids)
            assert a.gap(request, answer) < CLOSE
            assert a.gap(request, answer, **other) > 0.02

        one = requests[0]
        (whole,) = engine.generate([one], Settings(12, temperature=0))
        (start,) = engine.generate([one], Settings(12, temperature=0, cut_after=5))
        (rest,) = engine.generate([a.request([picture(1)], partial=start.token_ids)], Settings(12, temperature=0))
        assert [*start.token_ids, *rest.token_ids] == whole.token_ids

        wrong = replace(one, prompt_ids=[i for i in one.prompt_ids if i != IMAGE], name="scenes/3")
        made = len(one.prompt_ids)
        said = (
            f"made {made} tokens of the prompt of sample scenes/3 .*, the trainer's processor {len(wrong.prompt_ids)} "
        )
        with pytest.raises(UserError, match=said):
            engine.generate([wrong], Settings(4))

        turn = a.second_turn(one, whole, picture(3, (140, 168)))
        again = a.processor.tokenizer(a.processor.tokenizer.decode(turn.unexpanded_ids)).input_ids
        assert len(again) < len(turn.unexpanded_ids)  # text would have brought other tokens
        (said,) = engine.generate([turn], Settings(12))
        assert said.prompt_tokens == len(turn.prompt_ids)
        assert a.turns_gap(turn, said) < CLOSE
        assert a.turns_gap(turn, said, images=[picture(1), picture(4, (140, 168))]) > 0.02
        with pytest.raises(UserError, match=r"has pictures or clips and no Request\.unexpanded_ids"):
            engine.generate([replace(one, unexpanded_ids=())], Settings(4))

        engine.update(iter(b.model.state_dict().items()))  # what was encoded of a picture is forgotten too
        (new,) = engine.generate([one], Settings(12))
        assert b.gap(one, new) < CLOSE
        assert a.gap(one, new) > APART
    finally:
        engine.close()
    assert torch.distributed.is_initialized()  # it was there before
    if ours:
        torch.distributed.destroy_process_group()


def alive(group):
    """Processes of a group that run; one whose parent has not noticed its end does not."""
    listed = subprocess.run(["ps", "-o", "stat=,pid=", "-g", str(group)], capture_output=True, text=True).stdout
    return [line.split()[1] for line in listed.splitlines() if not line.startswith("Z")]


def test_a_server_of_its_own(vision, tmp_path):
    folder, a, b = vision
    server = VllmServer(str(folder), max_model_len=1024, images=2, lora_rank=8, log=tmp_path / "vllm.log")
    group = server._process._process.pid
    try:
        assert server._private.stat().st_mode & 0o777 == 0o700
        assert b"key" not in Path(f"/proc/{group}/cmdline").read_bytes()
        request, words, settings = a.request([picture(1)]), ask(), Settings(12)
        shown, plain = server.generate([request, words], settings)
        assert shown.prompt_tokens == len(request.prompt_ids)
        assert a.gap(request, shown) < CLOSE
        assert a.gap(request, shown, images=[picture(2)]) > 0.02
        assert gap(a.model, words, plain) < CLOSE

        from transformers import AutoTokenizer

        n, stop = printable(AutoTokenizer.from_pretrained(folder), plain.token_ids)
        (stopped,) = server.generate([words], Settings(12, stop=[stop], min_p=1e-9, repetition_penalty=1.0))
        assert (stopped.token_ids, stopped.finish) == (plain.token_ids[: n + 1], "stop")

        (whole,) = server.generate([request], Settings(12, temperature=0))
        (start,) = server.generate([request], Settings(12, temperature=0, cut_after=5))
        assert start.finish == "cut"
        (rest,) = server.generate([a.request([picture(1)], partial=start.token_ids)], Settings(12, temperature=0))
        assert [*start.token_ids, *rest.token_ids] == whole.token_ids

        turn = a.second_turn(request, whole, picture(3, (140, 168)))
        (said,) = server.generate([turn], settings)
        assert a.turns_gap(turn, said) < CLOSE
        requests = [request, words, turn, *(ask(seed, PROMPT[: 10 * seed]) for seed in range(1, 7))]
        as_it_goes(server, requests, [settings] * len(requests), CLOSE)

        # the control: new weights without forgetting go on from the old keys and values
        save_file(b.model.state_dict(), tmp_path / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        server._client.post("/collective_rpc", body)
        (stale,) = server.generate([words], settings)
        assert gap(b.model, words, stale) > APART
        server.update(iter(b.model.state_dict().items()))
        shown, plain = server.generate([request, words], settings)
        assert b.gap(request, shown) < CLOSE
        assert gap(b.model, words, plain) < CLOSE
        assert gap(a.model, words, plain) > APART
        assert [p.name for p in server._private.iterdir()] == ["socket"]
        by_file = plain.log_probs
        sending = Sending(2**14, "gloo")  # many buckets
        server._group = GroupSender(server._client, server._private, sending, server._dtypes, 1, Timeouts())
        for model in (a.model, b.model):
            server.update(iter(model.state_dict().items()))
            (plain,) = server.generate([words], settings)
            assert gap(model, words, plain) < CLOSE
        assert plain.log_probs == by_file

        for seed in (1, 2):
            tensors, targets = lora(seed, "base_model.model.model.language_model.layers")
            server.update_lora(tensors, rank=4, alpha=8.0, targets=targets)
            (adapted,) = server.generate([words], settings)
            assert gap(merged(b.model, tensors, 2.0), words, adapted) < CLOSE
            assert gap(b.model, words, adapted) > APART
        server.sleeps = True  # it frees nothing on a CPU, and keeps its account of what sleeps
        server.sleep()
        assert server._client._http.get("/is_sleeping").json() == {"is_sleeping": True}
        server.wake()
        assert server._client._http.get("/is_sleeping").json() == {
            "is_sleeping": True
        }  # its cache does, until there are weights
        server.update_lora(tensors, rank=4, alpha=8.0, targets=targets)
        assert server._client._http.get("/is_sleeping").json() == {"is_sleeping": False}
        (woken,) = server.generate([words], settings)
        assert woken.token_ids == adapted.token_ids
        server._group.close()
        server._group = None
        with pytest.raises(UserError, match=r"brought .* values"):
            server.update(iter([("lm_head.weight", torch.zeros(2, 2))]))
        with pytest.raises(UserError, match="has a clip, and a request to vLLM's server cannot tell its frame rate"):
            server.generate([a.request(clips=[clip(1)])], settings)
        wrong = replace(request, prompt_ids=[i for i in request.prompt_ids if i != IMAGE])
        with pytest.raises(UserError, match=f"made {len(request.prompt_ids)} tokens of the prompt"):
            server.generate([wrong], settings)
        assert len(alive(group)) > 2
    finally:
        server.close()
    assert not alive(group)
    assert not server._private.exists()


def test_a_server_that_does_not_start_shows_its_last_lines(text, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((text[0] / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"], "model_type": "none"}))
    with pytest.raises(UserError, match=r"did not start: it ended. The end of .*log:(.|\n)*none"):
        VllmServer(str(broken), max_model_len=64)


FLIGHT = """
name: flight
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 4}, heldout: {path: data.jsonl, heldout: 4}}
sampling: {max_new_tokens: 24}
rollout: {engine: vllm, partial: {cut_after: 6, extra: 3}}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 5, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
optim: {lr: 1.0e-2}
eval: {every: null}
checkpoint: {every: 1, keep: 5}
"""


@pytest.mark.long  # in short: tests/rollout/test_partial_rollout.py with the engine of transformers
def test_responses_that_take_several_steps_are_trained_on_and_resumed(text, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(text[0], folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": list(range(0, 256, 8))}))
    rows = [{"id": str(i), "prompt": f"Say {i}."} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        'import mmrl\n\n@mmrl.reward(inputs=("text",))\ndef score(samples, *, context):\n'
        "    return [sum(map(ord, s.text)) % 7 / 7 for s in samples]\n"
    )
    (tmp_path / "recipe.yaml").write_text(FLIGHT)

    def train(*words):
        command = [sys.executable, "-m", "mmrl.cli", "train", "recipe.yaml", "--out", "run", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            assert row["perf/engine_calls"] == row["sampling/rounds"]  # all that is under way, 10 at most, in each
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))} for row in rows
        ]

    whole = train()
    for row in whole:
        fresh = row["sampling/stale_tokens"] == 0
        assert fresh == (row["mismatch/log_prob_gap_max"] < 1e-3), row
        assert row["policy/first_ratio_max_dev"] == 0
    assert whole[0]["sampling/stale_tokens"] == 0
    assert max(row["sampling/stale_steps"] for row in whole) >= 2
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_00000{step}")
    again = train("--resume")
    for one, other in zip(whole, again, strict=True):
        assert one == pytest.approx(other, abs=1e-3)
