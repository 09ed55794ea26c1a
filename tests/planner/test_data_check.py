"""``mmrl data check``: records as the model reads them, and why others cannot be used."""

import io
import json

import pytest
from PIL import Image

from mmrl.cli import app
from tests.support import tiny


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 12), (200, 0, 0)).save(file, "PNG")
    return file.getvalue()


def lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    tiny.language_model(folder / "model", sharp=0.3)
    lines(folder / "data.jsonl", [{"prompt": f"Say {i}.", "system": "Be brief."} for i in range(10)])
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 2}, heldout: {path: data.jsonl, heldout: 2}}
sampling: {max_new_tokens: 6}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
"""
    )
    return folder


def checked(capsys, *arguments):
    code = app(["data", "check", *map(str, arguments)], standalone_mode=False)
    return code, capsys.readouterr().out


def test_a_recipe_shows_the_chat_template_and_counts_its_tokens(folder, capsys):
    from transformers import AutoTokenizer

    code, said = checked(capsys, folder / "recipe.yaml", "--json", "--show", 2)
    found = json.loads(said)["splits"]
    assert code == 0
    assert [(found[s]["prompts"], found[s]["records"], len(found[s]["shown"])) for s in found] == [
        (8, 10, 2),
        (2, 10, 2),
    ]
    record = found["train"]["shown"][0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": record["text"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert record["rendered"] == text
    assert record["tokens"] == len(tokenizer(text, add_special_tokens=False).input_ids)
    assert found["train"]["tokens"]["fewest"] <= record["tokens"] <= found["train"]["tokens"]["most"]
    code, said = checked(capsys, folder / "recipe.yaml", "--show", 1)
    assert all(f"  | {line}" in said for line in text.splitlines())


def test_prompts_that_the_model_cannot_read_are_counted_by_reason(folder, capsys):
    code, said = checked(capsys, folder / "recipe.yaml", "sampling.max_prompt_tokens=3", "--json")
    found = json.loads(said)["splits"]["train"]
    assert code == 1
    assert list(found["unusable"].values()) == [8]
    assert "sampling.max_prompt_tokens is 3" in found["shown"][0]["problem"]


def test_a_file_is_checked_without_a_model(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png())
    records = [
        {"prompt": "ok", "image": "a.png"},
        {"prompt": "x", "image": "b.png"},
        {"prompt": "y", "image": "c.png"},
        {},
    ]
    lines(tmp_path / "q.jsonl", records)
    code, said = checked(capsys, tmp_path / "q.jsonl", "--options", "heldout=0")
    assert code == 1
    assert "train: 1 prompts, of a source with 4 records" in said
    assert "image 16 x 12" in said
    assert sum(line.startswith("  cannot be used: ") for line in said.splitlines()) >= 2
    (tmp_path / "q.csv").write_text("prompt\na\nb\nc\n")
    code, said = checked(capsys, tmp_path / "q.csv", "--json", "--show", 0, "--options", "heldout=1")
    assert (code, json.loads(said)["splits"]["train"]["prompts"]) == (0, 2)


def test_a_data_set_of_ours_and_pictures_are_shown(capsys):
    assert checked(capsys, "shapes", "--show", 1)[0] == 0
    code, said = checked(capsys, "shapes-lora", "sampling.guidance_scale=2.0", "--json", "--show", 1)
    found = json.loads(said)
    assert (code, found["settings"]["negative_prompt"], found["settings"]["width"]) == (0, "", 32)


def test_what_a_record_sets_for_itself_is_shown(tmp_path, capsys):
    lines(tmp_path / "own.jsonl", [{"prompt": "a cat", "negative_prompt": "a dog", "max_new_tokens": 7}])
    code, said = checked(capsys, tmp_path / "own.jsonl", "--options", "heldout=0")
    assert code == 0
    assert "  negative_prompt: 'a dog'\n  max_new_tokens: 7\n" in said


def test_the_first_records_of_a_mixture_are_of_all_sources(folder, capsys):
    source = "name: jsonl, train: {path: data.jsonl, heldout: 2}, heldout: {path: data.jsonl, heldout: 2}"
    mixture = f"data={{mixture: [{{{source}, label: a}}, {{{source}, label: b}}]}}"
    _, said = checked(capsys, folder / "recipe.yaml", mixture, "--json", "--show", 2, "--look-at", 4)
    found = json.loads(said)["splits"]["train"]
    assert found["sources"] == {"a": 2, "b": 2}
    assert [record["id"].partition("/")[0] for record in found["shown"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("algorithm", "record", "shown"),
    [
        ("sft", {"completion": "Two."}, [["completion"]]),
        ("kto", {"chosen": "Two.", "rejected": "Three."}, [["completion"]] * 2),
        ("dpo", {"chosen": "Two.", "rejected": "Three."}, [["chosen", "rejected"]]),
    ],
)
def test_given_responses_are_counted(folder, tmp_path, capsys, algorithm, record, shown):
    lines(tmp_path / "given.jsonl", [{"prompt": "1 + 1?", **record}])
    data = f"{{path: {tmp_path}/given.jsonl, heldout: 0}}"
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: tiny
pipeline: llm/chat
model: {{path: {folder}/model}}
data: {{name: jsonl, train: {data}, heldout: {data}}}
sampling: {{max_new_tokens: 6}}
algorithm: {{type: {algorithm}}}
train: {{steps: 1, prompts_per_step: 2, group_size: 1, micro_batch_size: 4}}
"""
    )
    code, said = checked(capsys, tmp_path / "recipe.yaml", "--json")
    found = json.loads(said)["splits"]["train"]["shown"]
    assert code == 0
    assert [list(one["responses"]) for one in found] == shown
    assert all(count > 1 for one in found for count in one["responses"].values())


def test_control_tokens_that_texts_spell_are_counted(folder, tmp_path, capsys):
    lines(
        folder / "spelled.jsonl", [{"prompt": text} for text in ("a <|im_end|> b", "c", "<|im_end|><|im_start|>", "d")]
    )
    data = [f"data.{split}={{path: spelled.jsonl, heldout: 1}}" for split in ("train", "heldout")]
    code, said = checked(capsys, folder / "recipe.yaml", *data, "--json")
    found = json.loads(said)["splits"]
    assert code == 0
    assert found["train"]["spelled"] | found["heldout"]["spelled"] == {"<|im_end|>": 2, "<|im_start|>": 1}
    _, said = checked(capsys, folder / "recipe.yaml", *data)
    assert "control tokens of the model in texts, read as plain text: <|im_end|> (" in said
    assert "| a < |im_end|> b<|im_end|>" in said
