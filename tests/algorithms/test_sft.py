"""SFT on given responses: transformers' own loss and gradient, slices, data, a run with its evaluation, resumption."""

import functools

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build, evaluate
from mmrl.app.export import export
from mmrl.app.trainer import Trainer
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.logging.metrics import describe
from mmrl.models.text.given import Responses
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from mmrl.training import loop
from mmrl.training.evaluation import Evaluator
from tests.support import tiny
from tests.support.sft import RECIPE, SLICES, answers, flat, gradient_of, lines, write

LORA = "model.lora={rank: 4, alpha: 8}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sft")
    tiny.language_model(made / "model", sharp=0.05)
    write(made / "answers.jsonl", answers(200))
    (made / "recipe.yaml").write_text(RECIPE)
    (made / "even.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(s.text[-1:] in tuple('02468')) for s in samples]\n"
    )
    return made


def load(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], list(changes))


def make(folder, *changes):
    loaded = load(folder, *changes)
    return build(loaded.recipe)


# -- what is computed ---


def librarys(model, rows):
    """The loss of transformers on ``rows`` of (input_ids of the prompt, of the response), padded on the right, with the
    prompt's labels at -100; its gradient is in ``model``."""
    longest = max(len(given) + len(answer) for given, answer in rows)
    ids, labels, mask = [], [], []
    for given, answer in rows:
        rest = longest - len(given) - len(answer)
        ids.append([*given, *answer, *[0] * rest])
        labels.append([*[-100] * len(given), *answer, *[-100] * rest])
        mask.append([1] * (longest - rest) + [0] * rest)
    out = model(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    out.loss.backward()
    return out.loss.item()


@pytest.mark.parametrize("changes", [[], *SLICES])
def test_loss_and_gradient_are_the_librarys_with_labels_on_the_response_alone(folder, changes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make(folder, "sampling.temperature=0.5", *changes)
    found, row = gradient_of(run)
    slots = run.controller.slots(0, run.prompts, 16)
    model, tokenizer = (cls.from_pretrained(folder / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    rows = []
    for slot in slots:
        messages = [{"role": "user", "content": slot.prompt.text}]
        given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rows.append((tokenizer(given).input_ids, tokenizer(slot.prompt.meta["completion"] + "<|im_end|>\n").input_ids))
    assert len({len(answer) for _, answer in rows}) > 3, "a mean of means would differ"
    assert row["policy/loss"] == pytest.approx(librarys(model, rows), rel=1e-5)
    assert row["sft/log_prob"] == pytest.approx(-row["policy/loss"])
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert (flat(found) - flat(expected)).norm() <= 1e-5 * flat(expected).norm()


@pytest.mark.parametrize("changes", SLICES)
def test_any_micro_batch_gives_the_same_gradient_with_lora(folder, changes):
    whole, row = gradient_of(make(folder, LORA))
    parts, again = gradient_of(make(folder, LORA, *changes))
    assert (flat(parts) - flat(whole)).norm() <= 1e-5 * flat(whole).norm()
    assert again["policy/loss"] == pytest.approx(row["policy/loss"], rel=1e-5)
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]


# -- data ---


def texts_of(record, tmp_path, **options):
    write(tmp_path / "rows.jsonl", [record])
    (prompt,) = mmrl.load("datasets", "jsonl:prompts")("train", path=str(tmp_path / "rows.jsonl"), heldout=0, **options)
    return prompt


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": "Hi", "completion": "Hello"}, {}),
        (
            {
                "prompt": [{"role": "user", "content": "Hi"}],
                "completion": [{"role": "assistant", "content": "Hello"}],
            },
            {"meta": ["completion"]},
        ),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, {}),
    ],
)
def test_responses_are_read_as_trl_writes_them(folder, tmp_path, record, options):
    prompt = texts_of(record, tmp_path, **options)
    given = make(folder).pipeline.pairs
    assert isinstance(given, Responses)
    assert (prompt.text, given.texts(prompt)) == ("Hi", {"completion": "Hello"})


def test_another_column_may_have_the_response(folder):
    given = make(folder, "algorithm.completion=chosen").pipeline.pairs
    assert given is not None
    assert given.texts(Prompt("p", "Hi", {"chosen": "yes", "completion": "no"})) == {"completion": "yes"}


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({}, r"no meta\['completion'\].*the columns completion"),
        ({"completion": 3}, "neither text nor messages"),
        ({"completion": "x" * 300}, "the model's context 256"),
        ({"completion": "a<|im_end|>b"}, "control token '<|im_end|>'"),
        ({"completion": [{"role": "user", "content": "b"}]}, "does not end with a message of the assistant"),
    ],
)
def test_what_is_no_response_is_named(folder, meta, says):
    given = make(folder).pipeline.pairs
    assert given is not None
    with pytest.raises(BadPromptError, match=says.replace("|", r"\|")) as caught:
        given.encoded(Prompt("p9", "Hi", meta), 10)
    assert caught.value.prompt == "p9"


def test_a_bad_record_is_replaced_in_training_and_left_out_of_evaluation(folder, tmp_path):
    rows = list(answers(40))
    rows[3]["completion"] = rows[30]["completion"] = "a<|im_end|>b"
    write(tmp_path / "answers.jsonl", rows)
    data = f"{{path: {tmp_path}/answers.jsonl, meta: [completion], heldout: 0}}"
    run = make(folder, f"data={{name: jsonl, train: {data}, heldout: {data}}}", "train.prompts_per_step=40")
    row, failures = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert [f.reward for f in failures] == ["prompt"] * 2
    assert row["policy/loss"] > 0
    whole = Evaluator(run, run.prompts).score(40)[0]
    assert (whole["samples"], whole["dropped"]) == (38, 2)
    halves = [Evaluator(run, list(run.prompts)[part]).score(20)[0] for part in (slice(20), slice(20, 40))]
    means = [half["policy/loss"] for half in halves]
    assert min(means) < whole["policy/loss"] < max(means)


# -- a run ---


SHORT = [LORA, "optim.lr=1e-2", "train.steps=8", "eval.every=8", "eval.samples=8", "checkpoint.every=4"]


@pytest.fixture(scope="module")
def trained(folder):
    changes = {
        "full": ["eval.rewards=[{name: even.py}]", "optim.lr=8e-3", "train.steps=25", "eval.every=25"],
        "lora": SHORT,
    }
    return functools.cache(lambda name: train(load(folder, *changes[name]), folder / name))


def test_a_run_learns_to_answer_and_its_samples_are_scored(trained):
    before, after = lines(trained("full"))
    assert after["policy/loss"] < 0.5 * before["policy/loss"]
    assert after["reward/even"] > before["reward/even"] + 0.3
    assert after["samples"] == 16
    assert evaluate(trained("full"), 16)["policy/loss"] == pytest.approx(after["policy/loss"], rel=1e-4)
    card = (export(trained("full"), trained("full") / "out") / "README.md").read_text()
    assert "16 responses a step" in card
    assert "sft/log_prob" in card


@pytest.mark.slow
def test_a_run_with_lora_goes_on_where_it_was_cut(folder, trained, tmp_path, monkeypatch):
    step = Trainer._step

    def cut(session, metrics, progress):
        if session.done == 6:
            raise KeyboardInterrupt  # after the checkpoint of step 4 and rows that it does not know
        step(session, metrics, progress)

    loaded = load(folder, *SHORT)
    monkeypatch.setattr(Trainer, "_step", cut)
    with pytest.raises(KeyboardInterrupt):
        train(loaded, tmp_path / "cut")
    monkeypatch.setattr(Trainer, "_step", step)
    train(loaded, tmp_path / "cut", resume=True)
    for name in ("metrics.jsonl", "heldout.jsonl"):
        assert lines(tmp_path / "cut", name) == lines(trained("lora"), name)
    first, last = lines(trained("lora"))
    assert last["policy/loss"] < first["policy/loss"]


def test_the_plan_knows_the_rows(folder):
    made = plan(load(folder))
    assert made.problems == []
    assert made.counts is not None
    run = make(folder)
    run.pipeline.encode(run.controller.slots(0, run.prompts, 184))
    texts = [(len(p.text), len(p.meta["completion"])) for p in run.prompts]
    longest = max(prompt + answer for prompt, answer in texts)
    around = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n")
    assert longest < made.counts.row_tokens < longest + around, "prompt and response once"
    assert made.counts.slices == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["train.group_size=2"], "train.group_size: sft trains on one given response per prompt"),
        (["rewards=[{name: answer:exact}]"], "rewards: sft trains on given responses and samples nothing"),
        (
            ["eval.early_stopping={metric: policy/loss}"],
            "eval.early_stopping.metric: policy/loss falls as the model gets better",
        ),
    ],
)
def test_recipes_that_cannot_work_are_refused(folder, changes, says):
    with pytest.raises(RecipeError) as caught:
        load(folder, *changes)
    assert says in str(caught.value)


def test_a_model_that_scores_is_refused(folder):
    with pytest.raises(UserError, match="llm/score is a model that scores, and sft trains one that writes"):
        make(folder, "pipeline=llm/score")


# -- pictures ---


@pytest.mark.parametrize(
    "changes", [pytest.param([], id="full"), pytest.param([LORA], id="lora", marks=pytest.mark.slow)]
)
def test_a_model_that_sees_learns_from_responses(tmp_path, changes):
    allow_cpu_only()
    pytest.importorskip("torchvision")
    path, colours = tiny.vision_model(tmp_path / "vlm", "qwen3_vl", sharp=0.1), {"red": (220, 30, 30), "no": (0, 0, 9)}
    rows = []
    for i, (name, colour) in enumerate([*colours.items()] * 8):
        Image.new("RGB", (32 + 16 * (i % 3), 32), colour).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "Which colour?", "image": f"{i}.png", "completion": name})
    write(tmp_path / "answers.jsonl", rows)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("heldout: 16", "heldout: 0"))
    common = [f"model.path={path}", "pipeline=vlm/chat", "optim.lr=5e-3", *changes]
    whole, row = gradient_of(make(tmp_path, *common))
    parts, again = gradient_of(make(tmp_path, *common, "train.micro_batch_size=3"))
    assert (flat(parts) - flat(whole)).norm() <= 1e-4 * flat(whole).norm()
    assert again["policy/loss"] == pytest.approx(row["policy/loss"], rel=1e-5)
    run = make(tmp_path, *common)
    slots = run.controller.slots(0, run.prompts, 16)
    run.pipeline.encode(slots)
    processor, total, tokens = run.pipeline.conditioner.saved, 0.0, 0
    for slot in slots:  # one row at a time, by the library's loss
        text = run.pipeline.conditioner.render(slot.prompt) + slot.prompt.meta["completion"] + "<|im_end|>\n"
        made = processor(text=[text], images=run.pipeline.conditioner.media(slot.prompt)[0], return_tensors="pt")
        answer = processor.tokenizer(slot.prompt.meta["completion"] + "<|im_end|>\n").input_ids
        labels = made["input_ids"].clone()
        labels[0, : -len(answer)] = -100
        with torch.no_grad():
            total += run.policy.module(**made, labels=labels).loss.item() * len(answer)
        tokens += len(answer)
    assert row["policy/loss"] == pytest.approx(total / tokens, rel=1e-4)
    losses = [loop.train_step(run, 0, Clock(torch.device("cpu")))[0]["policy/loss"] for _ in range(5)]
    assert losses[-1] < losses[0] - 0.3
