"""Offline objectives in the loop: pairs, their log-probs and scores, learning, evaluation, export, resumption."""

import functools
import json
import random

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build, evaluate, restored
from mmrl.app.export import export
from mmrl.app.trainer import Trainer
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Rows, Sample, SampleId, Slot
from mmrl.data.loading import load_prompts
from mmrl.logging.metrics import describe
from mmrl.models.text.answered import ending
from mmrl.models.text.given import Pair, pair_of
from mmrl.runtime.start import train
from mmrl.training import loop
from mmrl.training.evaluation import Evaluator
from tests.support import tiny

COLUMNS = "{path: pairs.jsonl, meta: [chosen, rejected], heldout: 64}"
RECIPE = f"""
name: tiny-pairs
pipeline: llm/chat
model: {{path: model}}
data: {{name: jsonl, train: {COLUMNS}, heldout: {COLUMNS}}}
sampling: {{max_new_tokens: 8}}
algorithm: {{type: dpo}}
train: {{steps: 25, prompts_per_step: 16, group_size: 1, micro_batch_size: 16}}
optim: {{lr: 3.0e-3, weight_decay: 0.0}}
eval: {{every: 25, samples: 64}}
"""
SCORE = ["pipeline=llm/score", "algorithm={type: reward_model}"]
LORA = "model.lora={rank: 4, alpha: 8}"


def pairs(n, seed=0):
    """The rule to learn: a good answer ends in an even digit."""
    rng = random.Random(seed)
    for _ in range(n):
        good, bad = (f"{'7' * rng.randint(0, 3)}{rng.choice(ends)}" for ends in ("02468", "13579"))
        yield {"prompt": f"Say a number, not {rng.randint(0, 999)}", "chosen": good, "rejected": bad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("offline")
    tiny.language_model(made / "model", sharp=0.05)
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(400)))
    (made / "recipe.yaml").write_text(RECIPE)
    return made


def load(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], list(changes))


def make(folder, *changes):
    loaded = load(folder, *changes)
    return build(loaded.recipe)


def slots_of(*given):
    prompts = [
        Prompt(f"p{i}", text, {"chosen": chosen, "rejected": rejected})
        for i, (text, chosen, rejected) in enumerate(given)
    ]
    return [Slot(0, i, 0, prompt) for i, prompt in enumerate(prompts)]


def rows_of(pipeline, slots):
    pipeline.encode(slots)
    ids = [SampleId(0, slot.index, 0, 0) for slot in slots]
    return Rows(slots, ids)


UNEVEN = slots_of(
    ("Hi", "short", "a much longer text than the other one"),
    ("A question that is longer than the one before, so that padding matters", "yes", ""),
    ("Hi", "ümlaut 7", "no"),
)


# -- what is computed ---


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_log_probs_are_those_of_the_librarys_logits_one_text_at_a_time(tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny.language_model(tmp_path / kind, kind)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(70)))
    run = make(tmp_path, f"model.path={path}", "sampling.temperature=0.5")
    rows = rows_of(run.pipeline, UNEVEN)
    found = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).double(), AutoTokenizer.from_pretrained(path)
    for i, slot in enumerate(UNEVEN):
        messages = [{"role": "user", "content": slot.prompt.text}]
        given = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)).input_ids
        for name in ("chosen", "rejected"):
            answer = tokenizer(slot.prompt.meta[name] + "<|im_end|>\n").input_ids
            logits = model(torch.tensor([given + answer])).logits[0, len(given) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer).unsqueeze(-1)).sum().item()
            assert found[f"{name}_log_probs"][i].item() == pytest.approx(expected, rel=1e-5)
            assert found[f"reference_{name}_log_probs"][i].item() == pytest.approx(expected, rel=1e-5)
    assert found["chosen_log_probs"].requires_grad
    assert found["chosen_log_probs"].dtype == torch.float32
    assert not found["reference_chosen_log_probs"].requires_grad


def test_scores_are_those_of_the_librarys_classifier_on_the_rendered_conversation(folder, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = make(folder, *SCORE)
    rows = rows_of(run.pipeline, UNEVEN)
    found = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
    run.pipeline.write(tmp_path / "out", "merged")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for i, slot in enumerate(UNEVEN):
        for name in ("chosen", "rejected"):
            messages = [
                {"role": "user", "content": slot.prompt.text},
                {"role": "assistant", "content": slot.prompt.meta[name]},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            expected = model(**tokenizer(text, return_tensors="pt")).logits.item()
            assert found[f"{name}_scores"][i].item() == pytest.approx(expected, abs=1e-5)
    assert found["chosen_scores"].requires_grad


@pytest.mark.parametrize("changes", [[], SCORE])
def test_a_row_does_not_depend_on_its_neighbours(folder, changes):
    run = make(folder, *changes)
    rows = rows_of(run.pipeline, UNEVEN)
    together = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
    for i in range(len(rows)):
        alone = run.pipeline.compare(rows.rows([i]), run.objective.needs, run.policy.using)
        for name, values in together.items():
            assert values[i].item() == pytest.approx(alone[name].item(), abs=1e-5), name
    assert run.pipeline.lengths(rows)[0] == run.pipeline.lengths(rows.rows([0]))[0]


def update_gradient(run):
    kept = {}
    apply = run.policy.apply

    def keep():
        kept.update({k: p.grad.clone() for k, p in run.policy.trainable.items() if p.grad is not None})
        return apply()

    run.policy.apply = keep
    row, _ = loop.train_step(run, 0, Clock(torch.device("cpu")))
    return torch.cat([g.flatten() for g in kept.values()]), row


@pytest.mark.parametrize("changes", [[], SCORE])
def test_any_micro_batch_gives_the_same_gradient(folder, changes):
    whole, row = update_gradient(make(folder, *changes))
    for other in (["train.micro_batch_size=3"], ["train.micro_batch_tokens=500"]):
        parts, again = update_gradient(make(folder, *changes, *other))
        assert (parts - whole).norm() <= 1e-5 * whole.norm()
        assert again["policy/loss"] == pytest.approx(row["policy/loss"], rel=1e-5)
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]


def test_the_reference_is_the_policy_that_began(folder):
    for changes in ([], [LORA]):
        run = make(folder, *changes)
        first = loop.train_step(run, 0, Clock(torch.device("cpu")))[0]
        assert first["policy/loss"] == pytest.approx(0.693147, abs=1e-5)
        assert first["dpo/margin"] == pytest.approx(0, abs=1e-5)
        rows = rows_of(run.pipeline, UNEVEN)
        found = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
        assert not torch.equal(found["chosen_log_probs"], found["reference_chosen_log_probs"])


def test_margins_reach_the_loss_of_a_reward_model(folder):
    run = make(folder, *SCORE)
    with_margin = [Slot(0, 0, 0, Prompt("m", "Hi", {"chosen": "a", "rejected": "b", "margin": 1.5}))]
    rows = rows_of(run.pipeline, [*with_margin, *UNEVEN[:1]])
    assert run.pipeline.recorded(rows, [0])["margins"].tolist() == [1.5, 0.0]


# -- data ---


def test_pairs_are_read_as_trl_writes_them(tmp_path):
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    rows = [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No", "margin": 2},
        {"prompt": [user], "chosen": [answer], "rejected": [{"role": "assistant", "content": "No"}]},
        {"prompt": "Hi", "chosen": [user, answer], "rejected": [user, {"role": "assistant", "content": "No"}]},
    ]
    for row in rows:
        row.setdefault("margin", None)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = mmrl.load("datasets", "jsonl:prompts")(
        "train", path=str(tmp_path / "rows.jsonl"), meta=["chosen", "rejected", "margin"], heldout=0
    )
    assert [pair_of(p) for p in made] == [Pair("Hello", "No", 2.0), Pair("Hello", "No"), Pair("Hello", "No")]
    assert [p.text for p in made] == ["Hi"] * 3


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({}, "no meta['chosen']"),
        ({"chosen": "a"}, "no meta['rejected']"),
        ({"chosen": "a", "rejected": 3}, "meta['rejected'] is a int, neither text nor messages"),
        ({"chosen": "a", "rejected": []}, "is a list"),
        ({"chosen": "a", "rejected": "a"}, "two responses are equal"),
        (
            {"chosen": "a", "rejected": [{"role": "user", "content": "b"}]},
            "does not end with a message of the assistant",
        ),
        (
            {"chosen": "a", "rejected": [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "b"}]},
            "answers another message",
        ),
        ({"chosen": "a", "rejected": [{"role": "assistant", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"chosen": "a", "rejected": "b", "margin": "much"}, "'much'"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "finite"),
    ],
)
def test_what_is_no_pair_is_named(meta, says):
    with pytest.raises(BadPromptError) as caught:
        pair_of(Prompt("p9", "Hi", meta))
    assert says in str(caught.value)
    assert caught.value.prompt == "p9"


def test_a_pair_that_cannot_be_trained_on_is_named(folder):
    run = make(folder)
    for chosen, says in (("x" * 300, "the model's context 256"), ("a<|im_end|>b", "control token '<|im_end|>'")):
        with pytest.raises(BadPromptError) as caught:
            run.pipeline.encode(slots_of(("Hi", chosen, "b")))
        assert says in str(caught.value)
    assert len(run.pipeline.features) == 0


def test_a_bad_pair_is_replaced_in_training_and_left_out_of_evaluation(folder, tmp_path):
    rows = list(pairs(40))
    for i in (3, 30):
        rows[i]["rejected"] = rows[i]["chosen"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"{{path: {tmp_path}/pairs.jsonl, meta: [chosen, rejected], heldout: 0}}"
    run = make(folder, f"data={{name: jsonl, train: {data}, heldout: {data}}}", "train.prompts_per_step=40")
    row, failures = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert [f.reward for f in failures] == ["prompt"] * 2
    assert all("are equal" in f.reason for f in failures)
    assert row["policy/loss"] == pytest.approx(0.693147, abs=1e-5)
    found, _, bad = Evaluator(run, run.prompts).score(40)
    assert (found["samples"], found["dropped"], len(bad)) == (38, 2, 2)


def test_pairs_of_a_mixture_are_measured_by_their_source(folder, tmp_path):
    sources = []
    for label, seed, n in (("one", 1, 30), ("two", 2, 20)):
        (tmp_path / f"{label}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(n, seed)))
        options = f"{{path: {tmp_path}/{label}.jsonl, heldout: 8}}"
        sources.append(f"{{name: jsonl, label: {label}, train: {options}, heldout: {options}}}")
    loaded = load(folder, f"data={{mixture: [{', '.join(sources)}]}}")
    run = build(loaded.recipe)
    loop.train_step(run, 0, Clock(torch.device("cpu")))
    row, _, bad = Evaluator(run, load_prompts(loaded.recipe, "heldout")).score(16)
    assert not bad
    assert row["source/one/samples"] == row["source/two/samples"] == 8
    for name in ("dpo/margin", "dpo/accuracy"):
        each = [row[f"source/{label}/{name}"] for label in ("one", "two")]
        assert row[name] == pytest.approx(sum(each) / 2)
    assert row["source/one/dpo/margin"] != row["source/two/dpo/margin"]


def test_prompts_without_pairs_stop_the_run_by_name(folder):
    run = make(folder, "data={name: shapes}")
    with pytest.raises(UserError, match=r"no meta\['chosen'\].*data\.train\.columns"):
        loop.train_step(run, 0, Clock(torch.device("cpu")))
    with pytest.raises(UserError, match=r"data\.heldout: none of its records can be used"):
        Evaluator(run, run.prompts).score(4)


def test_what_ends_a_response_is_the_templates(folder):
    conditioner = make(folder).pipeline.conditioner
    assert conditioner.saved.decode(ending(conditioner)) == "<|im_end|>\n"
    bare = tiny.tokenizer()
    bare.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    conditioner.saved = bare
    assert bare.decode(ending(conditioner)) == "\n<|im_end|>", "TRL too adds the end where the template has none"


# -- learning ---


@pytest.fixture(scope="module")
def trained(folder):
    """The directory of a finished run, by its name."""
    (folder / "even.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(s.text[-1:] in tuple('02468')) for s in samples]\n"
    )
    changes = {
        "dpo": ["eval.rewards=[{name: even.py}]", "optim.ema_decay=0.5"],
        "dpo-lora": [LORA, "optim.lr=1e-2"],
        "score": SCORE,
        "score-lora": [*SCORE, LORA, "optim.lr=1e-2", "train.steps=75", "eval.every=75"],
    }
    return functools.cache(lambda name: train(load(folder, *changes[name]), folder / name))


def heldout(run):
    return [json.loads(line) for line in (run / "heldout.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", pytest.param("dpo-lora", marks=pytest.mark.slow)])
def test_dpo_prefers_the_better_texts_of_pairs_it_has_not_seen(trained, name):
    before, after = heldout(trained(name))
    assert before["policy/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert after["dpo/accuracy"] > 0.9
    assert after["dpo/margin"] > 0.2
    assert after["policy/loss"] < 0.65
    assert after["samples"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["score", pytest.param("score-lora", marks=pytest.mark.slow)])
def test_a_reward_model_learns_the_rule(trained, name):
    before, after = heldout(trained(name))
    assert 0.2 < before["reward_model/accuracy"] < 0.8
    assert after["reward_model/accuracy"] > 0.9
    assert not any(key.startswith("reward/") for key in after)


def test_dpo_samples_for_the_rewards_of_evaluation(trained):
    rows = heldout(trained("dpo"))
    assert all("reward/even" in row for row in rows)
    listing = json.loads((trained("dpo") / "samples" / "step_000025.json").read_text())
    assert {"prompt", "text"} <= listing["samples"][0].keys()
    assert not (trained("score") / "samples" / "step_000025.json").exists()


def test_the_report_and_mmrl_eval_show_an_offline_run(trained):
    for name in ("dpo", "score"):
        assert (trained(name) / "report.html").stat().st_size > 10_000
    found = evaluate(trained("score"), 32)
    assert found["samples"] == 32
    assert found["reward_model/accuracy"] > 0.9
    assert evaluate(trained("dpo"), 16, "base")["dpo/margin"] == 0


# -- export, and the reward ---


def samples_of(texts, prompt=None):
    prompt = prompt or Prompt("p", "Say a number, not 5")
    return [Sample(prompt, SampleId(0, 0, 0, k), text=text) for k, text in enumerate(texts)]


TEXTS = ["12", "3", "7774", "7775", "0"]


def policy_scores(run, texts):
    slots = slots_of(*(("Say a number, not 5", text, "another") for text in texts))
    rows = rows_of(run.pipeline, slots)
    with torch.no_grad(), run.policy.for_evaluation():
        return run.pipeline.compare(rows, run.objective.needs, run.policy.using)["chosen_scores"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["score", "score-lora"])
def test_an_exported_reward_model_is_a_reward(trained, name, tmp_path):
    out = export(trained(name), tmp_path / "rm")
    reward = mmrl.load("rewards", "reward_model:score")(str(out), batch_size=2, dtype="float32")
    found = reward.score(samples_of(TEXTS), context=Context())
    run, _, _ = restored(trained(name), "latest")
    assert found == pytest.approx(policy_scores(run, TEXTS), abs=1e-4)
    assert sum(found[0::2]) / 3 > sum(found[1::2]) / 2 + 1, "even ends"
    long, control = reward.score(samples_of(["x" * 300, "a<|im_end|>"]), context=Context())
    assert isinstance(long, Failed)
    assert "context 256" in long.reason
    assert isinstance(control, Failed)


def test_the_code_on_the_card_computes_the_same_score(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, _, _ = restored(trained("score-lora"), "latest")
    for what in ("merged", "lora"):
        out = export(trained("score-lora"), tmp_path / what, what)
        usage = run.pipeline.usage(str(out), what, Prompt("a", "Say a number, not 5"))
        (code,) = usage.code.values()
        code = code.replace("'model'", repr(str(trained("score-lora").parent / "model")))
        left: dict = {}
        exec(code.replace("An answer.", "7774"), left)
        assert left["score"] == pytest.approx(policy_scores(run, ["7774"])[0], abs=1e-4)
        assert str(out.name) in (out / "README.md").read_text()


def test_a_recipe_trains_on_the_reward_model(trained, folder, tmp_path):
    out = export(trained("score"), tmp_path / "rm")
    reward = f"rewards=[{{name: reward_model, options: {{path: {out}}}, normalize: batch}}]"
    run = make(folder, "algorithm={type: grpo, kl_coef: 0}", "train.group_size=4", "train.prompts_per_step=2", reward)
    row, failures = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert not failures
    assert row["reward/reward_model"] != 0
    assert row["reward/dropped"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": "model"}, "lacks the weights score.weight"),
        ({"path": "nowhere"}, "nowhere"),
        ({"path": "model", "batch_size": 0}, "options.batch_size"),
        ({"path": "model", "dtype": "int8"}, "options.dtype"),
        ({"path": "model", "pipeline": "llm/chat"}, "options.pipeline"),
    ],
)
def test_what_is_no_reward_model_is_refused(folder, options, says):
    options = {**options, "path": str(folder / options["path"])}
    with pytest.raises(UserError) as caught:
        mmrl.load("rewards", "reward_model:score")(**options)
    assert says in str(caught.value)


def test_a_half_precision_base_takes_adapters_and_a_head(folder, tmp_path):
    run = make(folder, *SCORE, LORA, "model.dtype=bfloat16")
    row, _ = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert 0.4 < row["policy/loss"] < 1.0
    run.pipeline.write(tmp_path / "half", "merged")
    assert run.pipeline.policy.get_base_model().score.weight.dtype == torch.float32


# -- resumption ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="dpo", marks=pytest.mark.slow),
        pytest.param([LORA], id="dpo-lora"),
        pytest.param(SCORE, id="score"),
        pytest.param([*SCORE, LORA], id="score-lora", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(folder, tmp_path, monkeypatch, changes):
    changes = [*changes, "train.steps=5", "eval.every=2", "eval.samples=8", "checkpoint.every=2"]
    loaded = load(folder, *changes)
    train(loaded, tmp_path / "whole")
    step = Trainer._step

    def cut(session, metrics, progress):
        if session.done == 3:
            raise KeyboardInterrupt  # after the checkpoint of step 2 and a row that it does not know
        step(session, metrics, progress)

    monkeypatch.setattr(Trainer, "_step", cut)
    with pytest.raises(KeyboardInterrupt):
        train(loaded, tmp_path / "cut")
    monkeypatch.setattr(Trainer, "_step", step)
    train(loaded, tmp_path / "cut", resume=True)
    for name in ("metrics.jsonl", "heldout.jsonl"):
        a, b = (
            [
                {
                    k: v
                    for k, v in json.loads(line).items()
                    if not k.startswith(("time/", "perf/", "plan/", "features/"))
                }
                for line in (tmp_path / run / name).read_text().splitlines()
            ]
            for run in ("whole", "cut")
        )
        assert a == b


# -- pictures ---

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A folder with pictures of one colour; the better answer names it."""
    made, rng, rows = tmp_path_factory.mktemp("seen"), random.Random(0), []
    for i in range(96):
        right, wrong = rng.sample(sorted(COLOURS), 2)
        shade = tuple(max(0, v - rng.randint(0, 30)) for v in COLOURS[right])
        Image.new("RGB", (rng.choice([32, 48, 64]), rng.choice([32, 40])), shade).save(made / f"{i}.png")
        rows.append({"prompt": "Which colour?", "image": f"{i}.png", "chosen": right, "rejected": wrong})
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "recipe.yaml").write_text(RECIPE.replace("heldout: 64", "heldout: 32"))
    return made


@pytest.mark.parametrize(
    "kind",
    ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), pytest.param("smolvlm", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("changes", [[], [LORA]], ids=["full", "lora"])
def test_a_reward_model_that_sees_learns_is_exported_and_scores(seen, tmp_path, kind, changes):
    allow_cpu_only()
    pytest.importorskip("torchvision")
    pytest.importorskip("num2words" if kind == "smolvlm" else "torchvision")
    path = tiny.vision_model(tmp_path / kind, kind, sharp=0.1)
    small = ["train.steps=16", "optim.lr=5e-3", "eval.every=16", "eval.samples=32"]
    score = ["pipeline=vlm/score", "algorithm={type: reward_model}"]
    done = train(load(seen, f"model.path={path}", *small, *score, *changes), tmp_path / "run")
    assert heldout(done)[-1]["reward_model/accuracy"] > 0.9
    run, _, _ = restored(done, "latest")
    slots = [Slot(0, i, 0, prompt) for i, prompt in enumerate(list(run.prompts)[:5])]
    rows = rows_of(run.pipeline, slots)
    with torch.no_grad():
        whole = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
        alone = [run.pipeline.compare(rows.rows([i]), run.objective.needs, run.policy.using) for i in range(5)]
    for name, values in whole.items():
        assert values.tolist() == pytest.approx([a[name].item() for a in alone], abs=1e-5)
    reward = mmrl.load("rewards", "reward_model:score")(
        str(export(done, tmp_path / "rm")), batch_size=2, dtype="float32"
    )
    samples = [Sample(s.prompt, SampleId(0, i, 0, 0), text=s.prompt.meta["chosen"]) for i, s in enumerate(slots)]
    assert reward.score(samples, context=Context()) == pytest.approx(whole["chosen_scores"].tolist(), abs=1e-4)
    broken = Prompt("b", "Which colour?", media=(Media("image", data=b"no picture"),))
    (failed,) = reward.score(samples_of(["red"], broken), context=Context())
    assert isinstance(failed, Failed)


def test_dpo_of_a_model_that_sees(seen, tmp_path):
    allow_cpu_only()
    pytest.importorskip("torchvision")
    path = tiny.vision_model(tmp_path / "vlm", "qwen3_vl", sharp=0.1)
    run = make(seen, f"model.path={path}", "pipeline=vlm/chat")
    slots = [Slot(0, i, 0, prompt) for i, prompt in enumerate(list(run.prompts)[:4])]
    rows = rows_of(run.pipeline, slots)
    whole = run.pipeline.compare(rows, run.objective.needs, run.policy.using)
    for i in range(4):
        alone = run.pipeline.compare(rows.rows([i]), run.objective.needs, run.policy.using)
        for name, values in whole.items():
            assert values[i].item() == pytest.approx(alone[name].item(), rel=1e-5)
    losses = [loop.train_step(run, 0, Clock(torch.device("cpu")))[0]["policy/loss"] for _ in range(5)]  # the same pairs
    assert losses[0] == pytest.approx(0.693147, abs=1e-4)
    assert losses[-1] < 0.6


# -- the shipped pairs ---


@pytest.mark.parametrize("kind", ["steps", "slips"])
def test_pairs_of_sums_are_what_they_say(kind):
    sums, made = mmrl.load("datasets", "sums"), mmrl.load("datasets", "sum_pairs:prompts")
    for prompt in made("heldout", kind=kind, count=300):
        pair = pair_of(prompt)
        assert sums.is_held_out(prompt.text)
        assert sums.wrong_steps(prompt, pair.chosen) == []
        assert len(sums.wrong_steps(prompt, pair.rejected)) == (kind == "slips")
        assert pair.chosen.endswith(prompt.meta["answer"])
        if kind == "steps":
            assert pair.rejected.count("=") < pair.chosen.count("=")
    assert made("train", count=5) == made("train", count=5)
    for wrong in ({"kind": "no"}, {"operations": 1}):
        with pytest.raises(UserError):
            made("train", **wrong)


# -- refusals ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["train.group_size=2"], "train.group_size: dpo trains on one given pair per prompt"),
        (["rewards=[{name: answer:exact}]"], "rewards: dpo trains on given pairs and samples nothing"),
        ([*SCORE, "eval.rewards=[{name: answer:exact}]"], "eval.rewards: a reward model writes no text"),
        (["rollout.engine=vllm"], "rollout.engine: dpo samples nothing without eval.rewards"),
        (["train.updates_per_step=2"], "train.updates_per_step"),
    ],
)
def test_recipes_that_cannot_work_are_refused(folder, changes, says):
    with pytest.raises(RecipeError) as caught:
        load(folder, *changes)
    assert says in str(caught.value)


def test_all_others_need_a_reward_as_before(folder):
    for empty in ([], ["rewards=[]"]):
        with pytest.raises(RecipeError) as caught:
            load(folder, "algorithm={type: grpo}", "train.group_size=2", *empty)
        assert "rewards: " in str(caught.value)
        assert "1 or more, each a section with keys name" in str(caught.value)
    assert load(folder, "rewards=[]").recipe.rewards == []
    resolved = json.dumps(load(folder).resolved())
    assert Recipe.model_validate_json(resolved).rewards == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["pipeline=llm/score"], "llm/score is a model that scores, and dpo trains one that writes"),
        (
            ["pipeline=llm/score", "algorithm={type: grpo}", "train.group_size=2", "rewards=[{name: answer:exact}]"],
            "set pipeline: llm/chat",
        ),
        (["algorithm={type: reward_model}"], "pipeline: llm/score"),
    ],
)
def test_a_model_of_the_other_kind_is_refused(folder, changes, says):
    with pytest.raises(UserError) as caught:
        make(folder, *changes)
    assert says in str(caught.value)
