"""Sampling and recomputing text on tiny real models: randomness, log-probs, padding, packing, updates, refusals."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Rows, SampleId, Slot, TextRows
from mmrl.models.text import likelihood
from mmrl.models.text.features import key_of
from mmrl.models.text.likelihood import entropy, head_log_probs, token_log_probs
from mmrl.models.text.token_sampling import Draw, choose, uniforms, without
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.step.micro_batches import packed
from tests.support import tiny
from tests.support.rows import distance
from tests.support.text import QUESTIONS, chat, path, pipeline, recipe, rows, sampled  # noqa: F401


def test_the_log_probs_of_sampling_are_those_of_replay(pipeline):
    drawn = sampled(pipeline)
    new = pipeline.replay(drawn, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert new.requires_grad
    gap = distance(new, drawn)
    assert gap < 1e-5
    other = replace(drawn, tokens=(drawn.tokens + 1) % 256)
    wrong = pipeline.replay(other, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert distance(wrong, drawn) > 0.5, "the comparison cannot fail"


def test_log_probs_are_at_the_sampling_temperature(path):
    made = chat.build(recipe(path, sampling={"temperature": 0.5}), str(path), torch.device("cpu"))
    drawn = sampled(made)
    row = drawn.rows([0])
    logits = made.policy(**made._read(row)).logits[0, -row.width - 1 : -1].double() / 0.5
    closed = logits.log_softmax(-1).gather(-1, row.padded("tokens")[0].unsqueeze(-1)).squeeze(-1)
    assert ((closed - row.padded("log_probs")[0]) * row.padded("action_mask")[0]).abs().max() < 1e-4


def test_a_sample_does_not_depend_on_its_neighbours(pipeline):
    whole = sampled(pipeline)
    slots, ids = rows()
    alone = pipeline.sample(slots[3:4], ids[3:4], [], 7)
    assert alone.spoken() == [whole.spoken()[3]]
    assert not torch.equal(sampled(pipeline, seed=8).padded("tokens")[:, :4], whole.padded("tokens")[:, :4])
    assert len({tuple(row) for row in whole.spoken()}) > 3, "the samples of a group are alike"


def test_the_choice_follows_the_distribution():
    log_probs = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().repeat(20000, 1)
    u = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def shares(**how):
        return torch.bincount(choose(log_probs, u, **how).squeeze(1), minlength=4) / 20000

    assert torch.allclose(shares(), torch.tensor([0.5, 0.2, 0.2, 0.1]), atol=0.01)
    assert torch.allclose(shares(top_k=1), torch.tensor([1.0, 0, 0, 0]))
    kept = shares(top_p=0.65)
    assert kept[3] == 0
    assert torch.allclose(kept[0], torch.tensor(0.5 / 0.7), atol=0.01)
    assert choose(log_probs[:2], torch.tensor([0.0, 1 - 1e-16])).squeeze(1).tolist() == [0, 3]


def test_uniforms_belong_to_the_sample():
    ids = [SampleId(0, 1, 0, k) for k in range(3)]
    assert torch.equal(uniforms(5, ids, 8)[1:], uniforms(5, ids[1:], 8))
    assert not torch.equal(uniforms(5, ids, 8)[0], uniforms(5, ids, 8)[1])


def test_greedy_is_the_librarys_greedy(path, pipeline):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    greedy = chat.build(recipe(path, eval={"temperature": 0.0}), str(path), torch.device("cpu"))
    slots, ids = rows(size=1)
    greedy.encode(slots)
    drawn = greedy.sample(slots, ids, [], 0, evaluate=True)
    for i, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        given = tokenizer(text, return_tensors="pt").input_ids
        theirs = model.generate(given, do_sample=False, max_new_tokens=12, eos_token_id=greedy.conditioner.stop_tokens)
        assert theirs[0, given.shape[1] :].tolist()[: drawn.responses[i]] == drawn.spoken()[i]


def test_what_ends_and_what_is_cut(pipeline):
    drawn = sampled(pipeline, size=8)
    stop = pipeline.conditioner.stop_tokens
    for tokens, cut in zip(drawn.spoken(), drawn.truncated, strict=True):
        assert (tokens[-1] in stop) != bool(cut)
        assert not any(t in stop for t in tokens[:-1])
        assert len(tokens) == 12 or not cut
    texts = pipeline.samples(drawn, frozenset({"text"}))
    assert [s.truncated for s in texts] == drawn.truncated.tolist()
    assert not any("<|" in s.text for s in texts)


def test_padding_changes_no_gradient(pipeline):
    drawn = sampled(pipeline)

    def gradient(parts):
        pipeline.policy.zero_grad()
        for part in parts:
            log_probs = pipeline.replay(part, [0], frozenset({"log_probs"}), None)["log_probs"]
            (log_probs * part.padded("action_mask")).sum().backward()
        return torch.cat([p.grad.flatten() for p in pipeline.policy.parameters()])

    together, apart = gradient([drawn]), gradient([drawn.rows([i]) for i in range(len(drawn))])
    assert torch.allclose(together, apart, rtol=1e-4, atol=1e-5 * together.abs().max())
    joined = Rows.join([drawn.rows([0, 1]), drawn.rows([2]), drawn.rows([3, 4, 5])])
    assert torch.equal(joined.padded("tokens"), drawn.padded("tokens"))
    assert joined.segments == drawn.segments


def test_micro_batches_are_packed_by_length():
    sizes = [(5,), (30,), (6,), (29,), (7,), (8,)]
    made = list(packed([0, 1, 2, 3, 4, 5], sizes, 4, 60))
    assert made == [[0, 2, 4, 5], [3, 1]]
    assert list(packed([0, 1, 2], sizes, 8, 12)) == [[0, 2], [1]], "a row longer than the budget goes alone"
    assert list(packed([2, 0, 1], [(1,)] * 3, 2, None)) == [[2, 0], [1]], "equal lengths keep their order"
    crossed = [(20, 1), (1, 20)]  # equally long, and 40 tokens each when padded together
    assert list(packed([0, 1], crossed, 8, 60)) == [[0], [1]], "prompts and responses are padded apart"


def test_spans_of_characters_reach_their_tokens(pipeline):
    drawn = sampled(pipeline, ["Say a."], 1)
    asked = [(drawn.features[0], drawn.tokens[: drawn.prompts[0]])]
    row = TextRows.answers(drawn.slots, drawn.ids, asked, [torch.tensor([64, 65, 66, 67])], drawn.truncated)
    assert pipeline.conditioner.decode([64, 65, 66, 67]) == "abcd"
    assert pipeline.token_values(row, [(1, 3, -1.0), (2, 4, -0.5)]) == [0, -1, -1.5, -0.5]


def test_features_are_encoded_once_per_content(pipeline):
    a, b = Prompt("one", "Say a."), Prompt("two", "Say a.", {"answer": "a"})
    assert key_of(a) == key_of(b) != key_of(Prompt("one", "Say a.", system="Be short."))


def test_a_system_message_is_rendered(pipeline):
    assert "<|im_start|>system\nBe short.<|im_end|>" in pipeline.conditioner.render(
        Prompt("p", "Hi", system="Be short.")
    )


def refused(path, **changes):
    with pytest.raises(UserError) as caught:
        chat.build(recipe(path, **changes), str(path), torch.device("cpu"))
    return str(caught.value)


def test_what_cannot_work_is_refused(path, pipeline, tmp_path):
    slot = Slot(0, 0, 0, Prompt("long", "x" * 300))
    with pytest.raises(UserError, match=r"the prompt long: it has 3\d\d tokens; with 12 new ones .* context of 256"):
        pipeline.encode([slot])
    limited = chat.build(recipe(path, sampling={"max_prompt_tokens": 20}), str(path), torch.device("cpu"))
    with pytest.raises(UserError, match=r"sampling\.max_prompt_tokens is 20"):
        limited.encode([slot])
    mute = tmp_path / "mute"
    tiny.language_model(mute)
    (mute / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((mute / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (mute / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "has no chat template" in refused(mute)
    assert "cannot be loaded" in refused(tmp_path / "nowhere") or "no tokenizer" in refused(tmp_path / "nowhere")
    assert "the model has no module 'visual'" in refused(path, model={"freeze": ["visual"]})
    assert "model.lora.targets" in refused(path, model={"lora": {"targets": ["nope"]}})


def test_entropy_is_the_closed_form_and_forbidden_tokens_have_none():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs = (logits / 0.7).softmax(-1)
    assert torch.allclose(entropy(logits, 0.7).double(), -(probs * probs.log()).sum(-1), atol=1e-6)
    narrowed = without(logits, [1, 4])
    kept = (logits[..., [0, 2, 3, 5, 6]] / 0.7).softmax(-1)
    assert torch.allclose(entropy(narrowed, 0.7).double(), -(kept * kept.log()).sum(-1), atol=1e-6)
    narrowed.requires_grad_(True)
    entropy(narrowed, 0.7).sum().backward()
    assert narrowed.grad is not None
    assert narrowed.grad.isfinite().all()


def test_draw_remembers_what_it_chose():
    draw = Draw(torch.full((2, 3), 0.5, dtype=torch.float64), 1.0)
    scores = torch.tensor([[0.0, 0.0, -50.0], [5.0, -50.0, -50.0]])
    chosen = draw(torch.zeros(2, 1), scores)
    assert chosen.argmax(-1).tolist() == [1, 0]
    assert torch.allclose(draw.log_probs[0], torch.tensor([0.5, 1.0]).log(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [likelihood.CHUNK, 700, 1])
def test_log_probs_and_their_gradient_are_those_of_float64(dtype, temperature, chunk, monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", chunk)
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 5, 300)).to(dtype).requires_grad_()
    tokens, weights = torch.randint(300, (2, 5)), torch.randn(2, 5)
    token_log_probs(logits, tokens, temperature).backward(weights)
    exact = logits.detach().double().requires_grad_()
    log_probs = (exact / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    log_probs.backward(weights.double())
    with torch.no_grad():
        found = token_log_probs(logits, tokens, temperature)
    assert found.dtype == torch.float32
    assert (found - log_probs).abs().max() < 1e-5
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    assert (logits.grad.double() - exact.grad).abs().max() < tolerance * exact.grad.abs().max() + tolerance


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_of_many_logits_their_gradient_alone_is_kept_beside_them(temperature, monkeypatch):
    """Counted in the sizes of the logits: one more at the peak, and two chunks in float32 that work."""
    logits = torch.randn(4, 100, 3000, dtype=torch.bfloat16, requires_grad=True)
    tokens, size = torch.randint(3000, (4, 100)), logits.numel() * logits.element_size()
    peaks = {}
    for chunk in (1 << 25, 10 * 3000):
        monkeypatch.setattr(likelihood, "CHUNK", chunk)
        with LiveBytes() as live:
            token_log_probs(logits, tokens, temperature).sum().backward()
        logits.grad, peaks[chunk] = None, live.peak / size
    assert peaks[10 * 3000] < 1.3
    assert peaks[1 << 25] > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [likelihood.CHUNK, 700, 1])
@pytest.mark.parametrize("trained", ["both", "states", "layer"])
def test_log_probs_behind_the_output_layer_are_those_of_float64(dtype, temperature, chunk, trained, monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", chunk)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 32).to(dtype), torch.randn(300, 32)
    hidden.requires_grad_(trained != "layer")
    weight.requires_grad_(trained != "states")
    tokens, weights = torch.randint(300, (10,)), torch.randn(10)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = head_log_probs(hidden, weight, tokens, temperature)
    found.backward(weights)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    log_probs = (exact[0] @ exact[1].T / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    log_probs.backward(weights.double())
    assert found.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (found - log_probs).abs().max() < tolerance * log_probs.abs().max()
    for one, reference in zip((hidden, weight), exact, strict=True):
        if one.requires_grad:
            assert one.grad.dtype == one.dtype
            assert (one.grad.double() - reference.grad).norm() < tolerance * reference.grad.norm()


@pytest.mark.parametrize("trained", [False, True])
def test_logits_behind_the_output_layer_are_never_there_at_once(trained, monkeypatch):
    """Counted in the sizes of all logits in bfloat16, less the gradients that are asked for."""
    hidden = torch.randn(400, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3000, 16, dtype=torch.bfloat16, requires_grad=trained)
    tokens, size = torch.randint(3000, (400,)), 400 * 3000 * 2
    monkeypatch.setattr(likelihood, "CHUNK", 10 * 3000)
    with LiveBytes() as live:
        head_log_probs(hidden, weight, tokens, 0.7).sum().backward()
    assert live.peak < 0.3 * size


@pytest.mark.parametrize("vocabulary", [3, 128, 129, 1000])
def test_the_choice_is_that_of_running_sums_over_the_whole_vocabulary(vocabulary):
    torch.manual_seed(1)
    log_probs = (3 * torch.randn(500, vocabulary)).log_softmax(-1)
    log_probs[:, vocabulary // 2] = -torch.inf
    u = torch.rand(500, dtype=torch.float64)
    ends = log_probs.double().exp().cumsum(-1)
    place = u.unsqueeze(1) * ends[:, -1:]
    expected = torch.searchsorted(ends, place, right=True)
    near = ((ends - place).abs() < 1e-6).any(-1)  # there, float32 probabilities may fall to either side
    assert near.float().mean() < 0.05
    assert torch.equal(choose(log_probs, u)[~near], expected[~near])
    log_probs[:, vocabulary // 2 :] = -torch.inf
    for extreme in (0.0, 1 - 2**-53):
        chosen = choose(log_probs, torch.full((500,), extreme, dtype=torch.float64))
        assert log_probs.gather(-1, chosen).isfinite().all(), "a token of no probability was drawn"
