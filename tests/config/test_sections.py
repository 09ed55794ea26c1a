"""A section means the same from the shell, from a file over the recipe, and from Python."""

import json
import random
from contextlib import suppress

import pytest

from mmrl.api.recipes import Objects, read
from mmrl.config.algorithms import shipped_algorithms
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError

PLACEMENTS = ["colocate", "partial", "disaggregated", "greedy", "adaptive"]
KEYS = {"judges": 1, "sleep": True, "log": True, "staleness": 1, "lend": True, "split": "greedy"}


def sections(draw):
    """A recipe, a section of it with a ``type``, and what it is replaced by."""
    algorithms = [(one.name, one.settings) for one in shipped_algorithms()]
    while True:
        recipe = draw.choice(["sums", "sums-capo", "shapes-lora", "shapes-nft", "shapes-dpo", "scenes"])
        if draw.random() < 0.3:
            given = {key: KEYS[key] for key in draw.sample(sorted(KEYS), draw.randrange(3))}
            yield recipe, "placement", {"type": draw.choice(PLACEMENTS), **given}
            continue
        name, settings = draw.choice(algorithms)
        fields = {key: of.default for key, of in settings.model_fields.items() if key != "type"}
        plain = [key for key, of in fields.items() if isinstance(of, int | float | str | bool)]
        chosen = draw.sample(plain, min(len(plain), draw.randrange(3)))
        yield recipe, "algorithm", {"type": name, **{key: fields[key] for key in chosen}}


def found(load):
    try:
        return json.dumps(load().resolved(), sort_keys=True)
    except UserError as error:
        return sorted(line.partition("  ")[2] for line in str(error).splitlines())


def from_python(recipe, changes, objects=None):
    with read(recipe, changes, objects) as loaded:
        return loaded


@pytest.mark.sweep("sections from the shell, a file and Python")
def test_a_section_with_a_type_starts_anew_wherever_it_is_written(sweep, tmp_path):
    draw = random.Random(7)
    layer = tmp_path / "layer.yaml"
    for _, (recipe, section, value) in zip(range(sweep.size(40, 300)), sections(draw), strict=False):
        layer.write_text(json.dumps({section: value}))
        shell = found(lambda: load_recipe([recipe], [f"{section}={json.dumps(value)}"]))  # noqa: B023
        others = [
            found(lambda: load_recipe([recipe, layer])),  # noqa: B023
            found(lambda: from_python(recipe, {section: value})),  # noqa: B023
            found(lambda: from_python(recipe, [f"{section}={json.dumps(value)}"])),  # noqa: B023
            found(lambda: from_python(recipe, [str(layer)])),  # noqa: B023
        ]
        if section == "algorithm":
            others.append(found(lambda: from_python(recipe, None, Objects(algorithm=value))))  # noqa: B023
            settings = {key: of for key, of in value.items() if key != "type"}
            by_type = Objects(algorithm=value["type"])
            others.append(found(lambda: from_python(recipe, {"algorithm": settings}, by_type)))  # noqa: B023
            dotted = {f"algorithm.{key}": of for key, of in settings.items()}
            others.append(found(lambda: from_python(recipe, dotted, by_type)))  # noqa: B023
        sweep.check(all(other == shell for other in others), (recipe, section, value))
    sweep.done()


def test_a_section_without_a_type_merges_in_a_file_and_in_python(tmp_path):
    layer = tmp_path / "layer.yaml"
    layer.write_text("algorithm: {clip_low: 0.3}\ntrain: {steps: 5}")
    wanted = load_recipe(["sums"], ["algorithm.clip_low=0.3", "train.steps=5"]).resolved()
    assert load_recipe(["sums", layer]).resolved() == wanted
    changes = {"algorithm": {"clip_low": 0.3}, "train": {"steps": 5}}
    assert from_python("sums", changes).resolved() == wanted


@pytest.mark.parametrize(
    ("algorithm", "changes", "said"),
    [
        ({"clip_range": 0.1}, None, "the mapping has no type; write algorithm=MyClass"),
        (3, None, "3 is no class and no name"),
        ("grpo", {"algorithm": {"type": "dapo"}}, "changes name another one"),
    ],
)
def test_an_algorithm_that_cannot_be_read_is_refused_in_words_of_python(algorithm, changes, said):
    with pytest.raises(UserError, match="algorithm: ") as caught:
        from_python("sums", changes, Objects(algorithm=algorithm))
    assert said in str(caught.value)


@pytest.mark.parametrize("recipe", ["shapes-nft", "shapes-lora", "sums", "scenes", "sums-sft", "sums-tool"])
def test_every_algorithm_is_taken_by_a_recipe_or_refused_with_a_message(recipe):
    """Whatever the recipe makes: pictures, texts, texts of a model that sees, given responses, episodes."""
    for algorithm in shipped_algorithms():
        with suppress(UserError):
            load_recipe([recipe], [f"algorithm={{type: {algorithm}}}"])
