"""Text runs as others see them: the report's samples, judge transcripts and charts, the card, and exports that load."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import mmrl
from mmrl.app.build import restored
from mmrl.app.export import export
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.episode import Action, Call, Episode, Exchange, Observation
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot
from mmrl.families.text.export import write
from mmrl.logging.card import Usage, write_card
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.pictures import extremes, pairs, read_evaluations
from mmrl.logging.rundir import RunDir
from mmrl.logging.texts import LONGEST, cell, fold, shorten, visible, write_texts
from mmrl.report.html import write_report
from mmrl.rewards.judging.store import TRANSCRIPTS
from mmrl.rewards.learned.labels.items import items_of
from mmrl.runtime.start import train
from tests.support import tiny
from tests.support.label_page import serving
from tests.support.report import HOSTILE, Page

allow_cpu_only()  # before anything imports torchvision

REWARD = """
import mmrl


@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [sum(c in "aeiou" for c in s.text) / 12 for s in samples]
"""
RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: tinylm, lora: {rank: 4, alpha: 12}}
data: {name: sums, train: {count: 20, operations: 1}, heldout: {count: 4, operations: 1}}
sampling: {max_new_tokens: 12}
rewards: [{name: "vowels.py"}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 0.05}
eval: {every: 1, samples: 4, temperature: 0.0}
checkpoint: {every: 1}
"""


# ---- what is kept and how it is shown


def samples(prompts: list[Prompt], texts: list[str], cut: tuple[int, ...] = ()) -> list[Sample]:
    pairs = enumerate(zip(prompts, texts, strict=True))
    return [Sample(p, SampleId(-1, i, 0, 0), text=t, truncated=i in cut) for i, (p, t) in pairs]


def png(colour: str, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def page_of(run: RunDir) -> tuple[str, Page]:
    html = write_report(run.path).read_text()
    return html, Page(html)


def recorded(path: Path, prompts: list[Prompt], answers: dict[int, list[str]], **more: Any) -> RunDir:
    """A run of text that was evaluated at the steps of ``answers``."""
    with RunDir.create(path) as run, MetricsLog(run.metrics) as metrics:
        for step, texts in answers.items():
            scores = [{"right": i / 10 + step / 100, "right/short": 1.0} for i in range(len(prompts))]
            write_texts(run, step, samples(prompts, texts, **more), scores)
            if step:
                metrics.write(step, {"reward/mean": 0.5, "text/length": 7.0})
    return run


def test_a_text_is_folded_where_it_is_long_and_shortened_where_it_is_endless():
    assert fold("two\n  lines").whole is None
    many = fold("\n".join(map(str, range(40))))
    assert many.beginning == "0\n1\n2\n3\n4\n5"
    assert many.whole is not None
    assert many.whole.endswith("39")
    endless = fold("a" * 10**6 + "the end")
    assert endless.whole is not None
    assert len(endless.whole) < LONGEST + 50
    assert endless.whole.endswith("the end")
    assert endless.length == 10**6 + 7
    assert shorten("abcdefgh", 4) == "abc [... 4 characters ...] h"


def test_what_cannot_be_seen_or_encoded_is_shown():
    assert visible("a\x00b\x1b[0m\r\nc\td\x7f") == "a␀b␛[0m\nc\td␡"
    assert visible("half \ud83d pair") == "half ? pair"
    assert cell(" a|b\n\n<i>\x07 ") == "a|b<br><br>&lt;i&gt;␇"


def test_texts_survive_writing_and_reading(tmp_path):
    """Also half a surrogate pair, which a remote engine's JSON may hold, and pictures larger than are kept."""
    big = Media("image", data=png("red", (1500, 300)))
    prompts = [
        Prompt("a", "same", media=(big, Media("image", data=b"broken"))),
        Prompt("b", "same"),
        Prompt("c", "\ud83d"),
    ]
    run = recorded(tmp_path / "run", prompts, {0: ["x", " y\n", "\udc00"], 3: ["z", "", "w"]}, cut=(1,))
    first, last = read_evaluations(run.samples)
    assert [(s.text, s.truncated) for s in first.samples.values()] == [("x", False), (" y\n", True), ("?", False)]
    assert list(last.samples) == [("same", 0), ("same", 1), ("?", 0)]
    assert last.texts
    (kept,) = last.samples["same", 0].media
    with Image.open(kept) as picture:
        assert picture.size == (512, 102)
    shown, ends = pairs([first, last]), extremes([first, last], {"right": 1.0})
    assert shown is not None
    assert shown["steps"] == [0, 3]
    assert [f["text"].beginning for f in shown["cells"][0]["frames"]] == ["x", "z"]
    assert shown["cells"][0]["media"][0]["src"].startswith("data:image/jpeg;base64,")
    assert ends is not None
    assert ends["lowest"][0]["text"].beginning == "z"
    assert ends["highest"][0]["text"].beginning == "w"


def test_a_clip_is_kept_as_a_few_frames(tmp_path):
    pytest.importorskip("av")
    prompt = mmrl.load("datasets", "clips").prompts("heldout")[0]
    run = recorded(tmp_path / "run", [prompt], {0: ["up"]})
    ((shown,),) = [e.samples.values() for e in read_evaluations(run.samples)]
    assert [path.name for path in shown.media] == [f"000_0_{k}.png" for k in range(4)]
    frames = []
    for path in shown.media:
        with Image.open(path) as frame:
            frames.append(frame.tobytes())
    assert len(set(frames)) == 4, "the shape moves"


# ---- the report


def test_the_report_sets_responses_side_by_side(tmp_path):
    prompts = [Prompt("a", "What is\n  in it?", media=(Media("image", data=png("red")),)), Prompt("b", "long " * 300)]
    answers = {step: [f"  answer {step}\n\tand more", "word " * 300 + f"end {step}"] for step in (0, 5, 9)}
    html, page = page_of(recorded(tmp_path / "run", prompts, answers, cut=(1,)))
    for step in answers:
        assert f'<div class="text ">  answer {step}\n\tand more</div>' in html, "whitespace is kept"
        assert f"end {step}</div></details>" in html, "the whole of a long response unfolds"
    frames = [(a["data-frame"], "hidden" in a) for tag, a in page.tags if tag == "div" and "data-frame" in a]
    assert frames == [("0", True), ("1", True), ("2", False)] * 2
    steps = json.loads(re.findall(r'id="frames">(.*?)</script>', html, re.S)[0])
    assert steps == {"steps": [0, 5, 9], "cells": []}
    assert html.count('<span class="cut"') == 5, "at first, in three frames, and on the card of the last"
    assert '<details class="fold"><summary><span class="text asked">long long' in html
    sources = [a["src"] or "" for tag, a in page.tags if tag == "img"]
    assert len(sources) == 2, "in the pair and in the card"
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "Lowest" in page.text
    assert "picture" not in page.text.lower(), "nothing is said of pictures where the samples are texts"


def test_hostile_texts_stay_texts(tmp_path):
    prompts = [Prompt(str(i), f"{HOSTILE}{i}") for i in range(3)]
    texts = [HOSTILE, f"</script></details>{HOSTILE}" * 40, "{{ 7 * 7 }}\x00\u202e"]
    run = recorded(tmp_path / "run", prompts, {0: texts, 4: texts})
    judged = {"step": 1, "judge": HOSTILE, "prompt": HOSTILE, "responses": [HOSTILE], "request": HOSTILE}
    judged |= {"answers": [HOSTILE], "scores": [0.5], "pictures": ['" onerror="alert(1)'], "system": HOSTILE}
    (run.path / TRANSCRIPTS).write_text(
        json.dumps(judged) + "\n" + json.dumps({**judged, "scores": [], "reason": HOSTILE})
    )
    plain = recorded(tmp_path / "plain", [Prompt(str(i), f"p{i}") for i in range(3)], {0: ["a"] * 3, 4: ["b"] * 3})
    page, clean = page_of(run)[1], page_of(plain)[1]
    kinds = [[a for tag, a in p.tags if tag == "script"] for p in (page, clean)]
    assert kinds[0] == kinds[1], "a script came in"
    assert not [a for tag, a in page.tags if tag == "img"]
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    assert "<script>alert('x')</script>" in page.text
    assert "{{ 7 * 7 }}␀" in page.text


def acted(n: int = 1) -> Episode:
    """An episode whose every text is hostile, with ``n`` pictures, the second of which cannot be read."""
    call, odd = Call("a", f"look{HOSTILE}", {"where": HOSTILE, "n": [1]}), Call("b", "", error=f"no JSON {HOSTILE}")
    shown = [Media("image", data=png("red") if k != 1 else b"no picture") for k in range(n)]
    told = Observation((f"seen {HOSTILE}", *shown), call_id="a")
    turns = (Exchange(Action(f"I look {HOSTILE}", (call, odd)), (told, Observation(f"error {HOSTILE}", call_id="b"))),)
    last = Exchange(Action("It is \ud800red", finish="length"))
    return Episode((*turns, last), 1.0, "failed", f"no more {HOSTILE}")


def episodes_of(path: Path) -> RunDir:
    with RunDir.create(path) as run, MetricsLog(run.metrics) as metrics:
        for step in (0, 4):
            prompts = [Prompt(str(i), f"p{i}", media=(Media("image", data=png("blue")),)) for i in range(2)]
            played = zip(samples(prompts, ["It is red", "x"]), (3, 12), strict=True)
            kept = [replace(sample, episode=acted(n)) for sample, n in played]
            write_texts(run, step, kept, [{"right": 0.1}, {"right": 0.2}])
        metrics.write(4, {"reward/mean": 0.5})
    return run


def test_an_episode_is_shown_by_turns(tmp_path):
    html, page = page_of(episodes_of(tmp_path / "run"))
    (lines, _), *_ = re.findall(r'<ol class="turns">(.*?)</ol>(.)', html, re.S)
    who = [" ".join(line.split()) for line in re.findall(r"<li class=\"\w+\"><small>(.*?)</small>", lines, re.S)]
    look = " ".join(f"look{escape(HOSTILE)}".replace("&#x27;", "&#39;").replace("&quot;", "&#34;").split())
    tools = ["model", f"calls {look}", "calls", *[f"is told {look}"] * 4, "is told", "model", "end"]
    assert who == tools
    assert lines.count("<img") == 2, "one of its three pictures cannot be read"
    assert "(no picture)" in lines
    assert '{"where": ' in page.text
    assert "It is ?red [cut]" in page.text
    assert "4 more pictures" not in page.text, "three of twelve are left out, and one cannot be read"
    assert "3 more pictures" in page.text
    assert not [a for tag, a in page.tags if tag == "script" and a.get("src")]
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    sources = [a["src"] or "" for tag, a in page.tags if tag == "img"]
    assert all(source.startswith("data:image/") for source in sources)
    asked = [a for tag, a in page.tags if tag == "img" and a["alt"] == "picture 1 of the prompt"]
    assert len(asked) == 2 + 2, "its prompt's picture in each pair and card, and none that it was told"


def test_turns_of_somebody_else_are_shown_as_far_as_they_go(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    run = recorded(tmp_path / "run", [Prompt("a", "p")], {0: ["x"]})
    draw = random.Random(0)
    values = [None, 3, [], {}, "model", "told", "call", "end", "../../secret.png", "\x00", HOSTILE, {"by": "model"}]
    keys = ("by", "text", "name", "picture", "src", "pixelated")
    rows = [{key: draw.choice(values) for key in keys} for _ in range(200)]
    turns = [*rows, *values]
    listed = [{"prompt": "p", "text": "kept", "turns": one} for one in [turns, *values]]
    (run.samples / "step_000002.json").write_text(json.dumps({"step": 2, "samples": listed}))
    _, page = page_of(run)
    assert not [a for tag, a in page.tags if tag == "img"]
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    (item, *_) = [item for item in items_of(run.samples) if item.turns]
    assert item.pictures == ()
    assert {line.by for line in item.turns} == {"model", "told", "call", "end"}


@pytest.mark.slow
def test_in_a_browser_an_episode_is_read_in_the_report_and_on_the_page_of_labels(tmp_path, browser):
    run = episodes_of(tmp_path / "run")
    browser.tell("Page.enable")
    browser.tell("Page.navigate", url=write_report(run.path).as_uri())
    browser.until("document.querySelectorAll('.pair .turns img').length > 0", True)
    assert browser.value("[...document.querySelectorAll('.turns img')].every(one => one.naturalWidth > 0)")
    assert browser.value("document.querySelector('.turns .model .text').textContent") == f"I look {HOSTILE}"
    assert browser.value("document.querySelectorAll('.turns script, .turns .text *').length") == 0
    with serving(run.samples) as server:
        browser.tell("Page.navigate", url=server.url)
        browser.until("document.querySelectorAll('#shown .turn img').length", 2)
        browser.until("[...document.querySelectorAll('#shown img')].every(one => one.naturalWidth === 40)", True)
        assert browser.value("document.querySelector('#shown .call pre').textContent").startswith('{"where": ')
        assert browser.value("document.querySelectorAll('#pictures img').length") == 1
        assert browser.value("document.querySelectorAll('#shown pre *').length") == 0
        assert browser.value("document.title") == "Labels"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 5, "text": "kept"},
        {"prompt": "p", "text": "kept", "pictures": "x", "scores": [1], "truncated": "yes"},
        {
            "prompt": "p",
            "text": "kept",
            "pictures": ["../../secret.png", 3, "\x00", "step_000002"],
            "scores": {"a": "b"},
        },
    ],
)
def test_a_listing_that_is_not_ours_is_shown_as_far_as_it_goes(tmp_path, row):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    run = recorded(tmp_path / "run", [Prompt("a", "p")], {0: ["x"], 1: ["y"]})
    others = [{"prompt": "p", "text": None}, {"prompt": "p", "text": 3}, "p", None]
    (run.samples / "step_000002.json").write_text(json.dumps({"step": 2, "samples": [row, *others]}))
    html, page = page_of(run)
    assert '<div class="text ">kept</div>' in html
    assert not [a for tag, a in page.tags if tag == "img"]


def test_the_lowest_and_highest_verdicts_of_a_judge_are_shown(tmp_path):
    """Rows as a judge writes them: only the ends of a batch have pictures, and some questions have no verdict."""
    import base64

    run = recorded(tmp_path / "run", [Prompt("a", "p")], {0: ["x"], 1: ["y"]})
    row = {"judge": "quality", "system": None, "request": "Grade it.", "answers": ['{"score": 1}'], "cached": False}
    rows: list[Any] = [
        {
            **row,
            "step": 2,
            "samples": [[0, 0, i]],
            "prompt": "Is it red?",
            "responses": [f"reply {i}"],
            "scores": [i / 9],
        }
        | {"reason": None, "seconds": 0.5, "verdicts": [i]}
        for i in range(10)
    ]
    rows[0]["pictures"] = [base64.b64encode(png("red")).decode()]
    rows.append(
        {**rows[0], "samples": [[1, 0, 0]], "scores": [None], "reason": "answered prose", "answers": ["Well..."]}
    )
    rows += [[], 5, {"judge": "odd", "scores": "?"}, {"judge": "odd", "scores": [1.0], "responses": 3, "step": "x"}]
    text = "\n".join(json.dumps(r) for r in rows) + '\n{"torn'
    (run.path / TRANSCRIPTS).write_text(text)
    html, page = page_of(run)
    section = html[html.index("<h2>Judge quality</h2>") : html.index("<h2>Judge odd</h2>")]
    assert "11 questions" in section
    assert "1 times: answered prose" in section
    lowest, highest = section.split("<h3>Highest verdicts</h3>")
    assert re.findall(r"reply (\d)<", lowest) == ["0", "1", "2", "3"]
    assert re.findall(r"reply (\d)<", highest) == ["9", "8", "7", "6"]
    assert "score 0.1111 · step 2" in " ".join(lowest.split())
    assert lowest.count("data:image/png;base64,") == 1
    assert '{"score": 1}' in page.text
    assert "Grade it." in page.text


def test_charts_appear_where_their_metrics_do(tmp_path):
    run = recorded(tmp_path / "run", [Prompt("a", "p")], {0: ["x"], 1: ["y"]})
    metrics = {"mismatch/kl": -1e-4, "mismatch/log_prob_gap": 1e-3, "mismatch/log_prob_gap_max": 0.1}
    metrics |= {"text/truncated": 0.25, "sampling/groups": 9.0, "value/explained_variance": 0.5, "policy/entropy": 1.5}
    metrics |= {"value/lr": 2e-3, "optim/lr": 1e-3, "time/prepare": 0.5, "time/train": 1.0, "time/other": 2.0}

    def lines() -> dict[str, list[list[Any]]]:
        charts = [a for tag, a in page_of(run)[1].tags if tag == "figure"]
        html = (run.path / "report.html").read_text()
        titles = re.findall(r"<figcaption><b>(.*?)</b>", html)
        return {t: json.loads(a["data-chart"] or "")["series"] for t, a in zip(titles, charts, strict=True)}

    assert lines().keys() == {"reward", "response length"}
    with MetricsLog(run.metrics) as log:
        log.write(2, {"reward/mean": 0.5, **metrics})
    found = {title: {name: ys[-1] for name, _, ys in series} for title, series in lines().items()}
    assert found["KL of sampler and trainer"] == {"k1": -1e-4}
    assert found["sampler against trainer"] == {"largest": 0.1, "mean": 1e-3}
    assert found["learning rate"] == {"policy": 1e-3, "critic": 2e-3}
    assert found["responses cut"] == {"cut at the limit": 0.25}
    assert found["critic"] == {"variance explained": 0.5}
    assert found["dynamic sampling"] == {"groups": 9.0}
    assert found["entropy of the policy"] == {"entropy": 1.5}
    assert list(found["time per phase"]) == ["prepare", "train", "other"]
    assert "loss of the critic" not in found


# ---- export


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model that ends at one token of two, and a run of LoRA and of all weights."""
    folder = tmp_path_factory.mktemp("texts")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    wishes = folder / "tinylm" / "generation_config.json"
    wishes.write_text(json.dumps(json.loads(wishes.read_text()) | {"eos_token_id": 257}))
    (folder / "vowels.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    train(load_recipe([folder / "recipe.yaml"]), folder / "lora-run")
    train(load_recipe([folder / "recipe.yaml"], ["model.lora=null", "optim.lr=0.01"]), folder / "full-run")
    return folder


@pytest.fixture(scope="module")
def exported(root: Path) -> SimpleNamespace:
    return SimpleNamespace(
        merged=export(root / "lora-run", root / "lora-merged", "merged"),
        lora=export(root / "lora-run", root / "lora-adapter", "lora"),
        full=export(root / "full-run", root / "full-merged", "merged"),
    )


def of_run(run: Path, checkpoint: str = "latest") -> str:
    """What the run's own sampler answers to its first prompt, greedily."""
    restored_run, _, _ = restored(run, checkpoint)
    slots, ids = [Slot(-1, 0, 0, restored_run.prompts[0])], [SampleId(-1, 0, 0, 0)]
    restored_run.pipeline.encode(slots)
    with restored_run.policy.for_evaluation():
        drawn = restored_run.pipeline.sample(slots, ids, [], 0, evaluate=True)
    return restored_run.pipeline.samples(drawn, frozenset({"text"}))[0].text or ""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40).unsqueeze(0)).logits.float()


def policy_logits(run: Path) -> torch.Tensor:
    restored_run, _, _ = restored(run, "latest")
    with restored_run.policy.for_evaluation():
        return logits(restored_run.pipeline.policy)


def test_the_runs_changed_the_model_so_that_equal_texts_mean_something(root: Path) -> None:
    for name in ("lora-run", "full-run"):
        assert of_run(root / name) != of_run(root / name, "base")


def test_merged_weights_are_the_policys(root: Path, exported: SimpleNamespace) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(exported.merged)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    ours = policy_logits(root / "lora-run")
    assert (logits(merged) - ours).abs().max() < 1e-4
    assert (logits(AutoModelForCausalLM.from_pretrained(root / "tinylm")) - ours).abs().max() > 0.1
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(root / "tinylm"), exported.lora)
    assert torch.equal(logits(adapted), ours)
    full = AutoModelForCausalLM.from_pretrained(exported.full)
    assert torch.equal(logits(full), policy_logits(root / "full-run"))


def test_merged_weights_take_the_models_dtype_and_are_rounded_once(root: Path, tmp_path: Path) -> None:
    run, _, _ = restored(root / "lora-run", "latest")
    policy: Any = run.pipeline.policy
    write(policy, run.pipeline.conditioner.saved, _in(run.recipe, "bfloat16"), tmp_path, "merged")  # type: ignore[attr-defined]
    written = load_file(tmp_path / "model.safetensors")
    layer = policy.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight + 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.equal(written["model.layers.0.self_attn.q_proj.weight"], exact.bfloat16())
    assert {t.dtype for t in written.values()} == {torch.bfloat16}


def _in(recipe: Recipe, dtype: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def test_the_cards_code_answers_as_the_run_does(
    root: Path, exported: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    said = {}
    for name in ("lora-merged", "lora-adapter", "full-merged"):
        (block,) = re.findall(r"```python\n(.*?)```", (root / name / "README.md").read_text(), re.DOTALL)
        namespace: dict[str, Any] = {}
        exec(compile(block, name, "exec"), namespace)
        said[name] = namespace["text"]
    assert said["lora-merged"] == said["lora-adapter"] == of_run(root / "lora-run")
    assert said["full-merged"] == of_run(root / "full-run")


def test_the_code_gives_the_system_message_too(
    root: Path, exported: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    run, _, _ = restored(root / "full-run", "latest")
    said = []
    for system in ("Answer in French.", None):
        prompt = Prompt("a", "1 + 1", system=system)
        (code,) = run.pipeline.usage("full-merged", "merged", prompt).code.values()
        namespace: dict[str, Any] = {}
        exec(compile(code, "card", "exec"), namespace)
        slots, ids = [Slot(-1, 0, 0, prompt)], [SampleId(-1, 0, 0, 0)]
        run.pipeline.encode(slots)
        drawn = run.pipeline.sample(slots, ids, [], 0, evaluate=True)
        assert namespace["text"] == run.pipeline.samples(drawn, frozenset({"text"}))[0].text
        said.append(namespace["text"])
    assert said[0] != said[1], "else the message would prove nothing"


def test_exports_end_where_training_did(exported: SimpleNamespace) -> None:
    """The checkpoint named one token, the tokenizer another; an export that forgot it would run on to its limit."""
    for folder in (exported.merged, exported.full):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [256, 257]
    assert "eos_token_id=[256, 257]" in (exported.lora / "README.md").read_text()
    assert "eos_token_id" not in (exported.merged / "README.md").read_text()


@pytest.mark.parametrize("name", ["lora-run", "full-run"])
def test_writing_leaves_the_policy_as_it_was(root: Path, tmp_path: Path, name: str) -> None:
    run, _, _ = restored(root / name, "latest")
    before = {key: value.clone() for key, value in run.pipeline.policy.state_dict().items()}
    for what in ["merged", "lora"] if name == "lora-run" else ["merged"]:
        run.pipeline.write(tmp_path / what, what)  # type: ignore[arg-type]
    after = run.pipeline.policy.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert {n for n, p in run.pipeline.policy.named_parameters() if p.requires_grad} == set(run.policy.trainable)


def test_the_card_shows_texts_before_and_after(root: Path, exported: SimpleNamespace) -> None:
    card = (exported.lora / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["library_name"], head["pipeline_tag"]) == ("tinylm", "peft", "text-generation")
    table = card[card.index("<table>") : card.index("</table>")]
    assert "\n\n" not in table, "a blank line would end the HTML, and Markdown in a text would be read"
    assert table.count("<tr>") == 1 + 4
    assert "<th>step 0</th><th>step 2</th>" in table
    for step in (0, 2):
        for sample in json.loads((root / "lora-run" / "samples" / f"step_{step:06d}.json").read_text())["samples"]:
            assert f"<td>{cell(sample['text'])}<br><sub>vowels={sample['scores']['vowels']:.3g}" in table
    assert "each time the likeliest tokens" in card
    assert "noise" not in card
    assert not list(exported.lora.glob("before_after*"))


def test_a_hostile_text_and_a_picture_in_a_card(root: Path, tmp_path: Path) -> None:
    prompts = [Prompt("a", f"![x](http://evil.example/x.png)\n\n# {HOSTILE}", media=(Media("image", data=png("red")),))]
    run = recorded(tmp_path / "run", prompts, {0: [f"```\n\n{HOSTILE}"], 5: ["</table>\n\n---\nlicense: x"]})
    recipe = load_recipe([root / "recipe.yaml"]).recipe
    (tmp_path / "out").mkdir()
    write_card(tmp_path / "out", "out", recipe, run, 5, "merged", Usage("transformers", "text-generation", [], {}))
    card = (tmp_path / "out" / "README.md").read_text()
    table = card[card.index("<table>") : card.index("\n</table>")]
    assert "\n\n" not in table
    page = Page(table)
    assert {tag for tag, _ in page.tags} == {"table", "tr", "th", "td", "br", "sub", "img"}
    assert [a["src"] for tag, a in page.tags if tag == "img"] == ["before_after/0_0.png"]
    with Image.open(tmp_path / "out" / "before_after" / "0_0.png") as picture:
        assert picture.getpixel((0, 0)) == (255, 0, 0)


def test_nothing_exported_names_this_machines_folders(root: Path, exported: SimpleNamespace) -> None:
    for folder in vars(exported).values():
        for path in folder.rglob("*"):
            assert path.is_dir() or str(root).encode() not in path.read_bytes(), path


# ---- vision-language


@pytest.mark.parametrize(
    ("kind", "what"), [("qwen2_5_vl", "merged"), ("qwen2_5_vl", "lora"), ("qwen3_vl", "lora"), ("smolvlm", "merged")]
)
def test_the_code_of_a_vision_language_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: Any
) -> None:
    """It answers what the pipeline answers to the same white pictures; a clip it sees, too."""
    pytest.importorskip("torchvision")
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    tiny.vision_model(tmp_path / "tinyvlm", kind)
    (tmp_path / "vowels.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    changes = ["pipeline=vlm/chat", f"model.path={tmp_path / 'tinyvlm'}", "sampling.max_new_tokens=6"]
    recipe = load_recipe([tmp_path / "recipe.yaml"], changes).recipe
    built = mmrl.load("pipelines", "vlm/chat").build(recipe, str(tmp_path / "tinyvlm"), torch.device("cpu"))
    for name, parameter in built.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    (tmp_path / "out").mkdir()
    built.write(tmp_path / "out", what)
    monkeypatch.chdir(tmp_path)
    white = Media("image", data=png("white", (224, 224)))
    asked = [Prompt("a", "What colour?", media=(white,)), Prompt("b", "<image>And <image>?", media=(white, white))]
    asked.append(Prompt("c", "The same?", media=(white, white), system="Say \"yes\" or 'no'."))
    for prompt in asked:
        (code,) = built.usage("out", what, prompt).code.values()
        namespace: dict[str, Any] = {}
        exec(compile(code, what, "exec"), namespace)
        slots, ids = [Slot(-1, 0, 0, prompt)], [SampleId(-1, 0, 0, 0)]
        built.encode(slots)
        ours = built.samples(built.sample(slots, ids, [], 0, evaluate=True), frozenset({"text"}))[0].text
        assert namespace["text"] == ours
    clip = Media("video", path="clip.mp4")
    for prompt in (Prompt("a", "<video>What moves?", media=(clip,)), Prompt("b", "What moves?", media=(clip,))):
        (code,) = built.usage("out", what, prompt).code.values()
        assert code.count('"type": "video"') == 1
        assert '"type": "image"' not in code
        exec(compile(code, what, "exec"), {})


def test_an_exported_vision_language_model_samples_no_placeholder(tmp_path: Path) -> None:
    """Training never samples them, so an export that did would answer otherwise, and ask for pictures again."""
    pytest.importorskip("torchvision")
    from transformers import AutoModelForImageTextToText

    tiny.vision_model(tmp_path / "tinyvlm", "qwen2_5_vl")
    wishes = json.loads((tmp_path / "tinyvlm" / "generation_config.json").read_text())
    (tmp_path / "tinyvlm" / "generation_config.json").write_text(json.dumps(wishes | {"suppress_tokens": [5]}))
    (tmp_path / "vowels.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    changes = ["pipeline=vlm/chat", f"model.path={tmp_path / 'tinyvlm'}"]
    recipe = load_recipe([tmp_path / "recipe.yaml"], changes).recipe
    built = mmrl.load("pipelines", "vlm/chat").build(recipe, str(tmp_path / "tinyvlm"), torch.device("cpu"))
    forbidden = built.conditioner.forbidden
    assert len(forbidden) == 2, "one for pictures, one for clips"
    for what in ("merged", "lora"):
        (tmp_path / what).mkdir()
        built.write(tmp_path / what, what)
    merged: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert merged.generation_config.suppress_tokens == [5, *forbidden]
    (code,) = built.usage("lora", "lora", Prompt("a", "What?")).code.values()
    assert f"suppress_tokens={forbidden}" in code
    with torch.no_grad():  # weights that want nothing but the placeholder
        merged.get_output_embeddings().weight.zero_()
        merged.get_output_embeddings().weight[forbidden[0]] = 1.0
        merged.get_output_embeddings().weight[forbidden[1]] = -1.0
    drawn = merged.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert not {*drawn[0, 3:].tolist()} & {*forbidden}
