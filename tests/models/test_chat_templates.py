"""What surrounds a prompt: a chat template of the recipe's own, its variables, and a system message."""

import json
from contextlib import nullcontext

import pytest
import torch

import mmrl
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.data.loading import load_prompts
from mmrl.data.mixture import Interleaved, Mixture
from mmrl.families.text.export import usage
from mmrl.planner.plan import plan
from tests.support import tiny

allow_cpu_only()

PLAIN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ mark | default('.') }}\n{% endfor %}[me] "
RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: q.jsonl, heldout: 0}, heldout: {path: q.jsonl, heldout: 0}}
sampling: {max_new_tokens: 8}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
eval: {every: null}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("templates")
    tiny.language_model(root / "model")
    (root / "tiny.yaml").write_text(RECIPE)
    (root / "plain.jinja").write_text(PLAIN)
    rows = [{"prompt": "Say a.", "answer": "a"}, {"prompt": "Say b.", "answer": "b", "system": "Own words."}]
    (root / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def loaded(folder, *changes):
    return load_recipe([folder / "tiny.yaml"], changes)


def pipeline_of(folder, *changes):
    made = loaded(folder, *changes)
    return mmrl.load("pipelines", "llm/chat").build(made.recipe, str(folder / "model"), torch.device("cpu"))


def test_a_template_of_the_recipe_takes_the_place_of_the_checkpoints(folder, tmp_path):
    asked = Prompt("p", "Hello", system="Be brief.")
    before = pipeline_of(folder).conditioner.render(asked)
    pipeline = pipeline_of(folder, "model.chat_template=plain.jinja")
    assert pipeline.conditioner.render(asked) == "[system] Be brief..\n[user] Hello.\n[me] " != before
    with_variable = pipeline_of(
        folder, "model.chat_template=plain.jinja", "sampling.chat_template_kwargs={mark: '!'}"
    ).conditioner
    assert with_variable.render(asked) == "[system] Be brief.!\n[user] Hello!\n[me] "
    pipeline.write(tmp_path / "out", "merged")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == PLAIN
    code = usage(pipeline.policy, with_variable, pipeline.recipe, "merged", "out", asked).code["With transformers"]
    assert '{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}' in code


def test_a_run_keeps_the_text_of_the_file(folder, tmp_path):
    made = loaded(folder, "model.chat_template=plain.jinja")
    assert made.resolved()["model"]["chat_template"] == PLAIN
    again = Recipe.model_validate(made.resolved())
    assert again.model.chat_template == PLAIN
    written = loaded(folder, f"model.chat_template={json.dumps(PLAIN)}")
    assert written.recipe == made.recipe


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("gone.jinja", r"model\.chat_template: there is no file 'gone\.jinja'"),
        ("{% for m in messages %}{{ m }}", r"line 1 of the template: Unexpected end of template"),
        ("{{ messages | nope }}\n{{ m", "line 2 of the template"),
    ],
)
def test_what_is_no_template_is_refused_when_the_recipe_is_read(folder, template, why):
    with pytest.raises(RecipeError, match=why):
        loaded(folder, f"model.chat_template={json.dumps(template)}")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ bos_token }}{% generation %}{% endgeneration %}", "of the message 'Hi' it makes"),
        ("{{ messages[0]['content'].nope() }}", "rendering a message fails"),
        ("{{ ''.__class__.__mro__ }}{{ messages[0]['content'] }}", "rendering a message fails.*unsafe"),
    ],
)
def test_a_template_that_fails_is_refused_in_the_plan(folder, template, why):
    made = loaded(folder, f"model.chat_template={json.dumps(template)}")
    with pytest.raises(UserError, match=f"model.chat_template: {why}"):
        pipeline_of(folder, *made.overrides)
    assert any("model.chat_template: " in str(problem) for problem in plan(made).problems)


def test_a_template_in_the_wrong_section_is_answered_with_the_right_key(folder):
    with pytest.raises(RecipeError, match=r"sampling\.chat_template: .*chat_template"):
        loaded(folder, "sampling.chat_template=plain.jinja")


def test_a_system_message_is_for_prompts_without_one(folder):
    made = loaded(folder, "sampling.system=Answer in one letter.")
    for split in ("train", "heldout"):
        prompts = load_prompts(made.recipe, split)
        assert [prompt.system for prompt in prompts] == ["Answer in one letter.", "Own words."]
    bare = loaded(folder)
    assert [p.system for p in load_prompts(bare.recipe, "train")] == [None, "Own words."]
    sums = loaded(folder, "data={name: sums}", "sampling.system=Think.")
    assert {p.system for p in load_prompts(sums.recipe, "heldout")} == {"Think."}
    mixed = loaded(folder, "data={mixture: [{name: sums}]}", "sampling.system=Think.")
    for split, kind in (("train", Mixture), ("heldout", Interleaved)):
        prompts = load_prompts(mixed.recipe, split)
        assert isinstance(prompts, kind)
        assert {p.system for p in prompts[:5]} == {"Think."}


def test_a_vision_model_takes_a_template_too(tmp_path):
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path / "model", "qwen3_vl")
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("llm/chat", "vlm/chat"))
    template = tiny.QWEN.replace("<|im_start|>{{", "<|im_start|>the {{")
    made = load_recipe([tmp_path / "tiny.yaml"], [f"model.chat_template={json.dumps(template)}"])
    pipeline = mmrl.load("pipelines", "vlm/chat").build(made.recipe, str(tmp_path / "model"), torch.device("cpu"))
    assert "<|im_start|>the user" in pipeline.conditioner.render(Prompt("p", "Hello"))
    bare = tmp_path / "model" / "chat_template.jinja"
    kept = bare.read_text()
    bare.unlink()
    for words, lacks in (([], True), ([f"model.chat_template={json.dumps(template)}"], False)):
        with pytest.raises(UserError, match="has no chat template") if lacks else nullcontext():
            made = load_recipe([tmp_path / "tiny.yaml"], words).recipe
            mmrl.load("pipelines", "vlm/chat").build(made, str(tmp_path / "model"), torch.device("cpu"))
    bare.write_text(kept)
    made = load_recipe([tmp_path / "tiny.yaml"], []).recipe
    mmrl.load("pipelines", "vlm/chat").build(made, str(tmp_path / "model"), torch.device("cpu"))
