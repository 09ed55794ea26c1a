"""Rows at fixed places: the bits of a row depend on nothing but itself, for every family that has them."""

import random
from dataclasses import replace

import pytest
import torch

from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Slot, TextRows
from mmrl.training.loop import train_step
from tests.support import midway_text, tiny
from tests.support.midway_text import asked
from tests.support.slots import arrived, settings

allow_cpu_only()

from mmrl.models.fixed_cache import FAMILIES, attending  # noqa: E402 (imports transformers)

SEE = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm", "idefics3")
"""Of those, the ones that see pictures: ``test_slots.py`` has them."""


def shuffled(pipeline, of, how, arrivals):
    """How many of the answers to requests that come in ``arrivals`` orders differ in a bit from those to the first."""
    first = arrived(pipeline, of, how, 0)
    return sum(arrived(pipeline, of, how, seed) != first for seed in range(1, arrivals))


def mixed(pipeline):
    return [
        settings(pipeline),
        settings(pipeline),
        settings(pipeline, temperature=0.7, top_k=50),
        settings(pipeline, repetition_penalty=1.3, min_new_tokens=3),
        settings(pipeline, top_p=0.9, stop=["a"]),
    ]


def odd(folder):
    """A recipe whose model has rows of 16 numbers between its products, fewer than torch takes at once: which formula
    it computes the last ones by would depend on the slot."""
    midway_text.write(folder)
    ends = (folder / "model" / "generation_config.json").read_text()
    tiny.language_model(folder / "model", sharp=0.1, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    (folder / "model" / "generation_config.json").write_text(ends)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("arrivals", "batch"), [(12, 3), (3, 70), pytest.param(1000, 3, marks=pytest.mark.long)])
def test_no_bit_of_a_row_depends_on_its_neighbours_or_on_the_order_of_arrival(tmp_path, dtype, arrivals, batch):
    changes = f"sampling.batch_size={batch}", f"model.dtype={dtype}", "sampling.max_new_tokens=5"
    run = midway_text.make(odd(tmp_path), *changes)
    size = 3 if batch == 3 else 20  # of the larger, all slots are in use for a while, and fewer are looked at later
    slots, ids = asked(run, size=size, slots=[Slot(0, n, 0, run.prompts[n]) for n in range(4)])
    requests = run.pipeline.requests(slots, ids, 5)
    draw, kinds = random.Random(1), mixed(run.pipeline)
    differ = shuffled(run.pipeline, requests, [draw.choice(kinds) for _ in requests], arrivals)
    differ += shuffled(run.pipeline, requests, [kinds[0]] * len(requests), arrivals)
    print(f"{2 * arrivals} arrivals of {len(requests)} requests, {dtype}, {batch} slots: {differ} differ in a bit")
    assert differ == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in (*SEE, "qwen3_moe")])
def test_nor_do_the_bits_of_any_family_without_experts(folder, kind):
    run = midway_text.make(folder, family(folder, kind), "sampling.batch_size=3", "sampling.max_new_tokens=5")
    slots, ids = asked(run, size=3, slots=[Slot(0, n, 0, run.prompts[n]) for n in range(3)])
    requests = run.pipeline.requests(slots, ids, 5)
    assert shuffled(run.pipeline, requests, [settings(run.pipeline)] * len(requests), 8) == 0


@pytest.mark.parametrize("of", ["silu", "gelu", "sigmoid"])
def test_an_activation_of_several_rows_is_that_of_each_alone(run_of, of):
    function = getattr(torch.nn.functional, of)
    rows = torch.randn(7, 1, 45, generator=torch.Generator().manual_seed(0))
    with attending(run_of.pipeline.policy):
        assert torch.equal(function(rows), torch.stack([function(row) for row in rows]))


FIXED = "performance.compile=true"
"""On a CPU it has samples drawn at fixed places, and nothing compiled."""
OF_FAMILIES = {"smollm3": {"no_rope_layers": [1, 0]}, "cohere": {"logit_scale": 1.0}}
SETTINGS = {
    "plain": [],
    "cool": ["sampling.temperature=0.6", "sampling.top_k=9"],
    "narrow": ["sampling.top_p=0.8", "sampling.min_p=0.02", "sampling.min_new_tokens=5"],
    "stops": ["sampling.stop=[a, e]", "sampling.repetition_penalty=1.6"],
    "half": ["model.dtype=bfloat16"],
    "lora": ["model.lora={rank: 2, alpha: 4}", "model.dtype=bfloat16"],
}


def both(folder, *changes):
    """What ``generate`` draws, and what is drawn at fixed places, of the same recipe."""
    found = []
    for way in ([], [FIXED]):
        run = midway_text.make(folder, "sampling.batch_size=5", *changes, *way)
        assert run.pipeline.refills == bool(way)
        slots, ids = asked(run, size=3, slots=[Slot(0, n, 0, run.prompts[n]) for n in range(7)])
        parts = [(slots, ids)] if way else [(slots[n : n + 5], ids[n : n + 5]) for n in range(0, len(ids), 5)]
        found.append(TextRows.join([run.pipeline.sample(*of, [], 5) for of in parts]))
    return found


def alike(drawn, fixed, gap=1e-4):
    assert fixed.spoken() == drawn.spoken()
    assert torch.equal(fixed.truncated, drawn.truncated)
    assert len(set(drawn.responses)) > 3
    torch.testing.assert_close(
        fixed.log_probs[fixed.action_mask], drawn.log_probs[drawn.action_mask], rtol=gap, atol=gap
    )


def family(folder, kind):
    """A tiny model of a family, with the tokenizer and the ends of that in ``folder``."""
    import transformers as t

    torch.manual_seed(0)
    tok = t.AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = {"head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    ids = {"pad_token_id": tok.pad_token_id, "bos_token_id": None, "eos_token_id": tok.eos_token_id}
    config = t.AutoConfig.for_model(
        kind, vocab_size=len(tok), sliding_window=None, **sizes, **given, **ids, **few, **OF_FAMILIES.get(kind, {})
    )
    model = t.AutoModelForCausalLM.from_config(config)
    model.generation_config = t.GenerationConfig.from_pretrained(folder / "model")
    model.save_pretrained(folder / kind)
    tok.save_pretrained(folder / kind)
    return f"model.path={folder / kind}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return midway_text.write(tmp_path_factory.mktemp("fixed"))


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS)
def test_samples_at_fixed_places_are_those_of_generate(folder, how):
    alike(*both(folder, *SETTINGS[how]), gap=1e-4 if "dtype" not in str(SETTINGS[how]) else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in SEE])
def test_samples_of_every_family_are_those_of_generate(folder, kind):
    alike(*both(folder, family(folder, kind)))


@pytest.mark.parametrize("how", ["plain", "narrow", "stops"])
def test_two_parts_at_fixed_places_are_one_whole(folder, how):
    run = midway_text.make(folder, "sampling.batch_size=5", FIXED, *SETTINGS[how])
    slots, ids = asked(run)
    whole = run.pipeline.sample(slots, ids, [], 5)
    begun = run.pipeline.begin(slots, ids, [], 5, midway_text.AT)
    assert begun.under_way.tolist() == [n > midway_text.AT for n in whole.responses]
    finished = run.pipeline.finish(begun, [], 5, midway_text.AT)
    assert finished.under_way is None
    assert finished.spoken() == whole.spoken()
    assert torch.equal(finished.truncated, whole.truncated)
    torch.testing.assert_close(finished.padded("log_probs"), whole.padded("log_probs"), rtol=1e-4, atol=1e-5)


def test_a_step_that_refills_is_the_step_of_batches(folder):
    """Of a whole training step: the same samples, scores and gradient, but for rounding."""
    rows = []
    for way in ([], [FIXED]):
        run = midway_text.make(folder, "sampling.batch_size=5", "train.prompts_per_step=6", *way)
        rows.append(train_step(run, 0, Clock(torch.device("cpu")))[0])
    first, second = (
        {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))} for row in rows
    )
    assert first.keys() == second.keys()
    assert second == pytest.approx(first, rel=1e-3, abs=1e-4)


def test_a_family_without_fixed_places_is_sampled_in_batches_and_it_is_said_once(folder, capsys):
    tiny.language_model(
        folder / "window", "qwen2", sharp=0.1, use_sliding_window=True, sliding_window=7, max_window_layers=1
    )
    run = midway_text.make(folder, FIXED, f"model.path={folder / 'window'}")
    slots, ids = asked(run)
    assert not run.pipeline.refills
    run.pipeline.sample(slots, ids, [], 5)
    said = (
        "every batch is sampled until its longest response ends: its layers do not keep keys and values of all tokens"
    )
    assert "".join(capsys.readouterr()).count(said) == 1


@pytest.mark.slow
def test_a_step_is_one_graph(run_of):
    """What a CUDA graph records: torch traces it without a break, and the graph gives the same logits."""
    slots, ids = asked(run_of, size=1)
    requests, engine, graphs = run_of.pipeline.requests(slots, ids, 4), run_of.pipeline.answering(), []
    asking = [engine.submit(request, settings(run_of.pipeline)) for request in requests]
    answered = dict(engine.ready(0.0))
    table, cache = engine._table, engine._table._cache
    places, columns = cache.places[: cache.rows].unsqueeze(1), torch.arange(cache.width)
    given = table._tokens[: cache.rows].gather(1, places), (columns <= places)[:, None, None], places

    def step(tokens, mask, positions):
        named = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 1}
        return run_of.pipeline.policy(**named, past_key_values=cache, use_cache=True).logits

    def traced(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad(), attending(run_of.pipeline.policy):
        expected, found = step(*given), torch.compile(step, fullgraph=True, backend=traced)(*given)
    torch._dynamo.reset()
    assert len(graphs) == 1
    assert torch.equal(found, expected)
    for id in set(asking) - set(answered):
        engine.cancel(id)


def test_more_prompts_than_there_was_room_for_make_it_grow(run_of):
    """A request that needs more columns comes while others are under way."""
    pipeline = run_of.pipeline
    slots, ids = asked(run_of, size=1)
    requests, engine = pipeline.requests(slots, ids, 4), pipeline.answering()
    long = replace(requests[0], prompt_ids=[*requests[0].prompt_ids] * 4)
    (alone,) = engine.generate([long], settings(pipeline))
    among = arrived(pipeline, [*requests, long], [settings(pipeline)] * (len(requests) + 1), 3)
    assert among[-1].token_ids == alone.token_ids
    assert [a.token_ids for a in among[:-1]] == [a.token_ids for a in engine.generate(requests, settings(pipeline))]


@pytest.fixture(scope="module")
def run_of(folder):
    return midway_text.make(folder, "sampling.batch_size=5")
