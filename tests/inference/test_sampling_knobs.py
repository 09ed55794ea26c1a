"""What ends a response, and what changes the choice of its tokens: stop strings, limits, min_p, repetition penalty."""

import json
import sys

import pytest
import torch

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.data.fields import Columns, make_prompt, read_fields
from mmrl.families.text.engine_sampling import request, settings_of
from mmrl.inference import own_class, sampling_options
from mmrl.inference.engine_weights import Allowance, allowances
from mmrl.inference.vllm import sampling_parameters
from mmrl.models.text.stop_strings import StopStrings
from mmrl.models.text.token_sampling import Draw, Penalty, narrowed
from mmrl.planner.plan import plan
from mmrl.training import loop
from tests.support import tiny
from tests.support.rows import distance

allow_cpu_only()

RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: q.jsonl, heldout: 0}, heldout: {path: q.jsonl, heldout: 0}}
sampling: {max_new_tokens: 24}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
eval: {every: null, temperature: 0.0}
"""
QUESTIONS = ("Hi", "Say something longer, please.", "2 + 3?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("knobs")
    tiny.language_model(root / "model")
    (root / "tiny.yaml").write_text(RECIPE)
    rows = [{"prompt": text, "answer": "a"} for text in QUESTIONS]
    rows[0]["max_new_tokens"] = 5
    (root / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def loaded(folder, *changes):
    return load_recipe([folder / "tiny.yaml"], changes)


def pipeline_of(folder, *changes):
    made = loaded(folder, *changes)
    return mmrl.load("pipelines", "llm/chat").build(made.recipe, str(folder / "model"), torch.device("cpu"))


def drawn(pipeline, questions=QUESTIONS, *, evaluate=False, **more):
    slots = [Slot(0, i, 0, Prompt(f"q{i}", text, **more)) for i, text in enumerate(questions)]
    rows = [(slot, SampleId(0, slot.index, 0, k)) for slot in slots for k in range(2)]
    pipeline.encode(slots)
    return pipeline.sample([s for s, _ in rows], [i for _, i in rows], [], 7, evaluate=evaluate)


def texts(pipeline, trajectory):
    return [sample.text for sample in pipeline.samples(trajectory, frozenset({"text"}))]


# -- the choice of a token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p", "penalty", "least"),
    [
        (1.0, 1.0, None, 0.1, 1.0, 0),
        (0.7, 1.0, None, 0.0, 1.4, 0),
        (1.3, 0.8, 20, 0.2, 0.8, 0),
        (1.0, 0.95, None, 0.05, 1.2, 3),
    ],
)
def test_the_distribution_is_that_of_transformers_processors(temperature, top_p, top_k, min_p, penalty, least):
    import transformers as t

    torch.manual_seed(0)
    logits, ids, stops = 3 * torch.randn(4, 60), torch.randint(0, 60, (4, 9)), [3, 7]
    theirs = [
        t.RepetitionPenaltyLogitsProcessor(penalty),
        t.MinNewTokensLengthLogitsProcessor(9, least, stops),
        t.TemperatureLogitsWarper(temperature),
        *([t.TopKLogitsWarper(top_k)] if top_k else []),
        *([t.TopPLogitsWarper(top_p)] if top_p < 1 else []),
        t.MinPLogitsWarper(min_p),
    ]
    expected = torch.softmax(t.LogitsProcessorList(theirs)(ids, logits.clone()), -1)
    seen = {}

    class Kept(Draw):
        def _log_probs(self, of):
            seen[len(seen)] = super()._log_probs(of)
            return seen[len(seen) - 1]

    draw = Kept(
        torch.rand(4, 9, dtype=torch.float64),
        temperature,
        top_p,
        top_k,
        min_p=min_p,
        penalty=Penalty(penalty, torch.ones(4, 9)),
        least=least,
        stops=stops,
    )
    token = draw(ids, logits.clone()).argmax(-1)
    probs = narrowed(seen[1].exp(), top_p, top_k, min_p)
    torch.testing.assert_close(probs / probs.sum(-1, keepdim=True), expected.to(probs.dtype), rtol=1e-5, atol=1e-7)
    whole = torch.log_softmax(logits / temperature, -1)  # what the update recomputes: without all of these
    torch.testing.assert_close(draw.log_probs[0], whole.gather(1, token[:, None])[:, 0])


def test_padding_is_not_penalised():
    mask = torch.tensor([[0, 0, 1, 1]])
    changed = Penalty(2.0, mask)(torch.tensor([[5, 5, 1, 2, 3]]), torch.ones(1, 8))
    assert changed.tolist() == [[1, 0.5, 0.5, 0.5, 1, 1, 1, 1]]


KNOBS = ["sampling={max_new_tokens: 24, min_p: 0.05, repetition_penalty: 1.3, min_new_tokens: 4, stop: ['e', 'th']}"]


@pytest.mark.parametrize("evaluate", [False, True])
def test_log_probs_are_those_of_replay_and_no_sample_depends_on_its_neighbours(folder, evaluate):
    pipeline = pipeline_of(folder, *KNOBS)
    trajectory = drawn(pipeline, evaluate=evaluate)
    found = pipeline.replay(trajectory, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert distance(found, trajectory) < 2e-5
    alone = drawn(pipeline, QUESTIONS[:1], evaluate=evaluate)
    n = alone.padded("tokens").shape[1]
    assert torch.equal(alone.padded("tokens"), trajectory.padded("tokens")[:2, :n])
    assert trajectory.padded("action_mask")[:2, n:].sum() == 0


def test_the_first_ratio_of_a_step_is_one(folder):
    made = loaded(folder, *KNOBS, "train.updates_per_step=2")
    run = build(made.recipe)
    row, _ = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert row["policy/first_ratio_max_dev"] < 1e-5
    assert row["mismatch/log_prob_gap_max"] < 2e-5


def test_each_setting_changes_what_it_says(folder):
    plain = pipeline_of(folder)
    trajectory = drawn(plain)
    greedy = drawn(plain, evaluate=True)
    assert torch.equal(drawn(pipeline_of(folder, "sampling.min_p=1.0")).padded("tokens"), greedy.padded("tokens"))
    assert not torch.equal(trajectory.padded("tokens"), greedy.padded("tokens"))

    def distinct(of):
        return sum(len(set(row[:n])) / n for row, n in zip(of.padded("tokens").tolist(), of.responses, strict=True))

    penalised = pipeline_of(folder, "sampling.repetition_penalty=5.0")
    assert distinct(drawn(penalised)) > distinct(trajectory)
    assert distinct(drawn(penalised, evaluate=True)) > distinct(greedy)


def test_no_response_ends_before_its_least_tokens(folder):
    pipeline = pipeline_of(folder)
    sharp = torch.zeros(len(pipeline.conditioner.saved))
    sharp[pipeline.conditioner.stop_tokens] = 20.0  # it would stop at once
    hook = lambda module, given, out: out + sharp  # noqa: E731
    handle = pipeline.policy.lm_head.register_forward_hook(hook)
    assert drawn(pipeline).responses == [1] * 6
    handle.remove()
    patient = pipeline_of(folder, "sampling.min_new_tokens=6")
    patient.policy.lm_head.register_forward_hook(hook)
    assert drawn(patient).responses == [7] * 6
    assert drawn(patient, evaluate=True).responses == [7] * 6
    assert drawn(patient, max_new_tokens=4).responses == [4] * 6  # a prompt's own limit wins


# -- stop strings ------------------------------------------------------------------------------------------------------


def test_a_response_ends_where_a_stop_string_appears(folder):
    before = pipeline_of(folder)
    trajectory = drawn(before)
    whole = texts(before, trajectory)
    stop = whole[0][3:5]
    pipeline = pipeline_of(folder, f"sampling.stop=[{json.dumps(stop)}]")
    cut = drawn(pipeline)
    for n, (text, made) in enumerate(zip(whole, texts(pipeline, cut), strict=True)):
        at = text.find(stop)
        assert made == (text if at < 0 else text[: at + len(stop)])
        kept = cut.responses[n]
        assert cut.padded("tokens")[n, :kept].tolist() == trajectory.padded("tokens")[n, :kept].tolist()
        if at >= 0:
            assert not cut.truncated[n]
            assert cut.padded("tokens")[n, kept:].sum() == 0
    assert texts(pipeline, cut)[0].endswith(stop)
    assert pipeline_of(folder, f"sampling.stop={json.dumps(stop)}").settings.stop == [stop]


def stops(strings, words=(), least=0):
    made = tiny.tokenizer(words)
    found = StopStrings(
        strings, least, lambda tokens: made.decode(tokens, skip_special_tokens=True), made.all_special_ids
    )
    return found, lambda text: made(text, add_special_tokens=False).input_ids


def test_what_the_last_token_has_behind_a_stop_string_is_cut_from_the_text():
    found, tokens = stops(["</a>", "STOP"], words=[">..", "x</a"])
    ids = tokens("ex</a>.. and STOP")
    n = len(ids) - len(tokens(" and STOP"))
    assert found.length(ids) == n
    assert found.text(ids[:n]) == "ex</a>"
    assert found.text(ids) == "ex</a>.. and STOP"  # ends with the other
    assert found.text(ids[:-1]) == "ex</a>.. and STO"


def test_characters_of_several_tokens_and_control_tokens_hide_nothing():
    found, tokens = stops(["né"])
    ids = tokens("ici né.")
    assert found.length(ids) == len(tokens("ici né"))
    with_control = [*tokens("n"), *tokens("<|im_start|>"), *tokens("é")]
    assert found.length(with_control) == len(with_control)
    assert found.text(with_control) == "né"
    early, tokens = stops(["ab"], least=3)
    assert early.length(tokens("ababab")) == 4  # the first is completed within the first three tokens
    assert early.length(tokens("ab")) is None


def test_a_response_drawn_in_parts_ends_where_its_parts_meet():
    found, tokens = stops(["STOP"])
    done, more = tokens("say ST"), tokens("OP and on")
    request = Request([1], "p", 0, partial=done)
    made = found.ended(Completion(more, [0.0] * len(more), "cut", 1), request)
    assert (list(made.token_ids), made.finish) == (tokens("OP"), "stop")
    limited = Request([1], "p", 0, partial=done, max_new_tokens=len(done) + 1)
    made = found.ended(Completion(more, [0.0] * len(more), "cut", 1), limited)
    assert (list(made.token_ids), made.finish) == (tokens("O"), "length")


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|endoftext|>"])
def test_a_stop_string_that_no_response_can_have_is_refused(folder, text):
    change = f"sampling.stop=[{json.dumps(text)}]"
    with pytest.raises(UserError, match=r"sampling\.stop: no response can have .* is a control token"):
        pipeline_of(folder, change)
    assert any("sampling.stop: no response" in str(problem) for problem in plan(loaded(folder, change)).problems)


# -- limits of a prompt ------------------------------------------------------------------------------------------------


def test_a_records_limit_lowers_that_of_its_prompt(folder):
    made = loaded(folder)
    run = build(made.recipe)
    prompts = {prompt.text: prompt for prompt in run.prompts}
    assert prompts["Hi"].max_new_tokens == 5
    slots = [Slot(0, 0, 0, prompts["Hi"]), Slot(0, 1, 0, prompts["2 + 3?"])]
    run.pipeline.encode(slots)
    ids = [SampleId(0, 0, 0, 0), SampleId(0, 1, 0, 0)]
    free = run.pipeline.sample([Slot(0, 0, 0, Prompt("Hi", "Hi")), slots[1]], ids, [], 7)
    limited = run.pipeline.sample(slots, ids, [], 7)
    assert free.responses[0] > 5
    assert limited.responses == [5, free.responses[1]]
    assert limited.truncated[0]
    assert limited.padded("tokens")[0, :5].tolist() == free.padded("tokens")[0, :5].tolist()
    assert limited.padded("tokens")[1].tolist() == free.padded("tokens")[1].tolist()


@pytest.mark.parametrize("most", [0, -1, 2.5, True, "9"])
def test_a_limit_that_is_none_is_a_bad_record(most):
    with pytest.raises(ValueError, match=r'"max_new_tokens" is .*; write a whole number'):
        read_fields({"prompt": "Hi", "max_new_tokens": most})
    assert make_prompt("p", read_fields({"prompt": "Hi", "max_new_tokens": None}, Columns()), []).max_new_tokens is None


# -- engines -----------------------------------------------------------------------------------------------------------


def test_engines_are_asked_for_the_same():
    settings = Settings(
        20, stop=["</a>"], min_new_tokens=6, repetition_penalty=1.2, min_p=0.1, stop_token_ids=(4,), cut_after=None
    )
    asked = Request([1, 2], "p", 0, partial=[1] * 4, max_new_tokens=9)
    (allowed,) = allowances([asked], settings, 64)
    assert (allowed.tokens, allowed.least, allowed.at_end) == (5, 2, "length")
    said = sampling_parameters(allowed, settings)
    assert (said["stop"], said["detokenize"], said["min_tokens"]) == (["</a>"], True, 2)
    assert (said["repetition_penalty"], said["min_p"]) == (1.2, 0.1)
    (short,) = allowances([Request([1], "p", 0, max_new_tokens=3)], settings, 64)
    assert (short.tokens, short.least) == (3, 3)  # vLLM refuses a minimum above the maximum
    assert sampling_parameters(Allowance(5, "length", 0), Settings(20))["detokenize"] is False


def test_further_parameters_go_to_the_engine_and_to_no_other(folder):
    made = loaded(folder, "rollout={engine: vllm_server, sampling: {presence_penalty: 0.5, logit_bias: {'3': -1.0}}}")
    settings = settings_of(made.recipe, 1.0, [4])
    features = {"input_ids": torch.tensor([1])}
    asked = request(0, SampleId(0, 0, 0, 0), Prompt("p", "p"), features, made.recipe.rollout.sampling, "p", [], [])
    said = sampling_parameters(*allowances([asked], settings, 6), settings)
    assert (said["presence_penalty"], said["logit_bias"], said["max_tokens"]) == (0.5, {"3": -1.0}, 5)
    assert sampling_options.problems(made.recipe) == []
    for engine, says in (
        ("transformers", "sampling in process has none"),
        ("examples/engine.py:OwnCopy", "rollout.opt"),
    ):
        changed = loaded(folder, f"rollout={{engine: {engine}, sampling: {{presence_penalty: 1}}}}")
        assert any(says in str(problem) for problem in plan(changed).problems)


@pytest.mark.parametrize(
    ("engine", "name", "says"),
    [
        ("vllm", "max_tokens", "sampling.max_new_tokens says it"),
        ("vllm_server", "logprobs", "mmrl sets it, to read tokens and log-probs; remove it"),
        ("sglang", "sampling_seed", "seed says it"),
        ("vllm", "presence_penaltie", "has no 'presence_penaltie'; did you mean 'presence_penalty'"),
        ("sglang", "presence_penaltie", "has no 'presence_penaltie'; did you mean 'presence_penalty'"),
    ],
)
def test_what_is_no_further_parameter_is_refused(folder, monkeypatch, tmp_path, engine, name, says):
    """The classes as vLLM and SGLang write theirs; ``tests/inference/test_vllm.py`` reads the one that is installed."""
    for package, file, source in (
        (
            "vllm",
            "sampling_params.py",
            "class SamplingParams(Struct):\n    presence_penalty: float = 0.0\n    _own: int = 0\n",
        ),
        (
            "sglang",
            "srt/sampling/sampling_params.py",
            "class SamplingParams:\n    def __init__(self, presence_penalty: float = 0.0) -> None:\n        pass\n",
        ),
    ):
        (tmp_path / package / file).parent.mkdir(parents=True)
        (tmp_path / package / file).write_text(source)
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("vllm", "sglang"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    made = loaded(folder, f"rollout={{engine: {engine}, sampling: {{{name}: 1}}}}")
    (problem,) = sampling_options.problems(made.recipe)
    assert problem.startswith(f"rollout.sampling.{name}: ")
    assert says in problem
    assert sampling_options.fields("vllm") == sampling_options.fields("sglang") == {"presence_penalty"}
    with pytest.raises(UserError, match=f"rollout.sampling.{name}: "):
        mmrl.load("pipelines", "llm/chat").build(made.recipe, str(folder / "model"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["sampling.min_new_tokens=25"], r"sampling\.min_new_tokens: no response has more than 24"),
        (["rollout.engine=sglang", "sampling={max_new_tokens: 9, min_new_tokens: 2, stop: a}"], "may end a response"),
        (
            ["rollout={engine: sglang, partial: {cut_after: 4, extra: 1}}", "sampling.repetition_penalty=1.1"],
            "sglang counts no tokens that a response had before",
        ),
        (["sampling.stop=['']"], r"sampling\.stop"),
        (["sampling.min_p=1.5"], r"sampling\.min_p"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(folder, changes, says):
    with pytest.raises(RecipeError, match=says):
        loaded(folder, *changes)


def test_a_class_of_ones_own_says_what_it_obeys(folder, tmp_path):
    made = loaded(folder, "rollout.engine=examples/engine.py:OwnCopy", "sampling.min_p=0.1", "sampling.stop=a")
    (wrong,) = own_class.problems(made.recipe)
    assert "sampling.min_p: OwnCopy does not say that it obeys it" in wrong
    mine = tmp_path / "mine.py"
    source = "from examples.engine import OwnCopy\n\n\nclass Mine(OwnCopy):\n    understands = ('min_p',)\n"
    mine.write_text(source)
    assert own_class.problems(loaded(folder, f"rollout.engine={mine}:Mine", "sampling.min_p=0.1").recipe) == []
