"""Recipes: every kind of mistake is shown as the line a user reads; layers and overrides do what they say."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mmrl.config.algorithms import algorithm_names
from mmrl.config.drop_ins import entries
from mmrl.config.layers import parse_key, parse_value
from mmrl.config.loader import LoadedRecipe, RecipeError, find_recipe, load_recipe, shipped_recipes
from mmrl.config.names import resolve, resolve_drop_in
from mmrl.core.errors import UserError

RECIPE = """\
name: t
pipeline: diffusion/sd3
model:
  path: org/tiny
  lora: {rank: 4}
data: {name: shapes}
sampling: {height: 32, width: 32, window: {size: 2}}
rewards:
  - name: mine.py:score
    weight: 2
algorithm:
  type: flow_grpo
  clip_range: 1e-5
train: {steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
optim:
  lr: 1e-4
"""
REWARD = """\
import not_installed_anywhere
from math import floor

def score(samples, *, context):
    return [0.0 for _ in samples]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path


def load(*overrides: str, overlays: tuple[str, ...] = ()) -> LoadedRecipe:
    return load_recipe([Path("recipe.yaml"), *map(Path, overlays)], overrides)


def lines_of(error: RecipeError) -> list[str]:
    return [str(problem) for problem in error.problems]


OPTIM = (
    "lr, betas, eps, weight_decay, max_grad_norm, warmup_steps, schedule, min_lr_ratio, held, earlier, "
    "ema_decay, ema_every"
)
QUOTES = "YAML reads {{ as a mapping; put quotes into those of the shell, as in '\"{{ ... }}\"', or name a file"
REWARD_KEYS = "name, label, weight, modality, normalize, batch_size, timeout, retries, on_failure, process, options"
TYPES = ", ".join(algorithm_names())
TOP = (
    "name, seed, pipeline, model, data, sampling, rollout, rewards, scoring, midway, environment, algorithm, teacher, "
    "warm_start, train, optim, performance, eval, checkpoint, features, controllers, devices_per_controller, "
    "placement, ray, env, runtime, device, threads, profile, log, architecture"
)

# (what, text of RECIPE, what replaces it, the line shown)
IN_FILE = [
    (
        "slip in a list",
        "    weight: 2",
        "    wieght: 2",
        f"recipe.yaml:10  rewards[0].wieght: unknown key; did you mean 'weight'?  (keys: {REWARD_KEYS})",
    ),
    (
        "key of another section",
        "name: t",
        "name: t\nlr: 1",
        f"recipe.yaml:2  lr: unknown key; did you mean 'optim.lr'?  (keys: {TOP})",
    ),
    (
        "slip of a key of another section",
        "name: t",
        "name: t\nlearning_rate: 1\ngroupsize: 4",
        "recipe.yaml:3  groupsize: unknown key; did you mean 'midway.group_size' or 'train.group_size'?"
        f"  (keys: {TOP})",
    ),
    (
        "key in several other sections",
        "name: t",
        "name: t\nheight: 4\nevery: 4",
        "recipe.yaml:3  every: unknown key; did you mean 'sampling.window.every' or 'eval.every' or 'checkpoint.every'?"
        f"  (keys: {TOP})",
    ),
    (
        "dotted key in a file",
        "name: t",
        "name: t\noptim.lr: 1",
        "recipe.yaml:2  optim.lr: unknown key; in a file keys are nested, without dots: write lr inside optim  "
        f"(keys: {TOP})",
    ),
    ("wrong type", "lr: 1e-4", "lr: abc", "recipe.yaml:16  optim.lr: expected a positive number, got 'abc'"),
    ("out of range", "lr: 1e-4", "lr: 0", "recipe.yaml:16  optim.lr: expected a positive number, got 0"),
    ("not finite", "lr: 1e-4", "lr: .inf", "recipe.yaml:16  optim.lr: expected a positive number, got inf"),
    ("fraction", "steps: 4", "steps: 1.5", "recipe.yaml:14  train.steps: expected a positive whole number, got 1.5"),
    ("true as a number", "weight: 2", "weight: true", "recipe.yaml:10  rewards[0].weight: expected a number, got true"),
    (
        "number as text",
        "name: t",
        "name: 12",
        "recipe.yaml:1  name: expected text that matches ^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$, got 12",
    ),
    (
        "choice",
        "window: {size: 2}",
        "window: {size: 2, strategy: progresive}",
        "recipe.yaml:7  sampling.window.strategy: expected one of random, progressive, decay, exp_decay, "
        "got 'progresive'; did you mean 'progressive'?",
    ),
    (
        "pair",
        "lr: 1e-4",
        "betas: [0.9, 2]",
        "recipe.yaml:16  optim.betas[1]: expected a number from 0 to below 1, got 2",
    ),
    (
        "empty section",
        "optim:\n  lr: 1e-4",
        "optim:",
        f"recipe.yaml:15  optim: expected a section with keys {OPTIM}, got null (remove the line to take the defaults)",
    ),
    (
        "section as text",
        "optim:\n  lr: 1e-4",
        "optim: fast",
        f"recipe.yaml:15  optim: expected a section with keys {OPTIM}, got 'fast'",
    ),
    (
        "list as mapping",
        "rewards:\n  - name: mine.py:score\n    weight: 2",
        "rewards: {name: a}",
        f"recipe.yaml:8  rewards: expected a list (1 or more, each a section with keys {REWARD_KEYS}), "
        "got a mapping; put [ ] around it",
    ),
    ("missing in a section", "  path: org/tiny\n", "", "recipe.yaml:3  model.path: missing; add it (text)"),
    ("missing section", "pipeline: diffusion/sd3\n", "", "recipe.yaml  pipeline: missing; add it (text)"),
    (
        "missing type",
        "  type: flow_grpo\n",
        "",
        f"recipe.yaml:11  algorithm.type: missing; write one of {TYPES}",
    ),
    (
        "unknown type",
        "type: flow_grpo",
        "type: flow_grop",
        f"recipe.yaml:12  algorithm.type: unknown type 'flow_grop'; did you mean 'flow_grpo'?  (types: {TYPES})",
    ),
    (
        "type that is settings of another",
        "type: flow_grpo",
        "type: ddpo",
        "recipe.yaml:12  algorithm.type: unknown type 'ddpo'; DDPO is type: flow_grpo, sampling.sde: {kind: ddim, "
        "noise_level: 1.0}, algorithm: {kl_coef: 0, advantage_std: group}  (types: " + TYPES + ")",
    ),
    (
        "key of another type",
        "  type: flow_grpo",
        "  type: draft",
        "recipe.yaml:13  algorithm.clip_range: belongs to type awm and dgpo and flow_grpo and grpo_guard and "
        "stepwise_flow_grpo and v_grpo, this section's type is draft; remove it, "
        "or replace the whole section with 'algorithm={type: draft}'  (keys: type, kl_coef, last_steps, renoise)",
    ),
    (
        "duplicate",
        "  lr: 1e-4",
        "  lr: 1e-4\n  lr: 1e-5",
        "recipe.yaml:17  optim.lr: written twice (first on line 16); keep one of them",
    ),
    (
        "tab",
        "  lr: 1e-4",
        "\tlr: 1e-4",
        "recipe.yaml:16  not YAML: while scanning for the next token, found character '\\t' that "
        "cannot start any token; indent with spaces",
    ),
    (
        "merge key",
        "optim:",
        "optim:\n  <<: {}",
        "recipe.yaml:16  optim: '<<' (merging) is not understood as a key; write the keys out",
    ),
    (
        "tag",
        "lr: 1e-4",
        "lr: !!python/object:os.system 1",
        "recipe.yaml:16  optim.lr: the tag 'tag:yaml.org,2002:python/object:os.system' is not "
        "understood; write a plain value",
    ),
    (
        "alias of itself",
        "data: {name: shapes}",
        "data: {name: shapes, train: &a {a: *a}}",
        "recipe.yaml  nested more than 32 levels deep (an alias inside its own anchor?); write the values out",
    ),
    (
        "contradiction",
        "group_size: 4",
        "group_size: 1",
        "recipe.yaml:14  train.group_size: a group of 1 has no advantage (its reward minus its own mean is 0); "
        "set train.group_size to 2 or more",
    ),
    (
        "contradiction of a default",
        "window: {size: 2}",
        "window: {size: 12}",
        "recipe.yaml:7  sampling.window: 12 steps do not fit into [0, 9); lower sampling.window.size "
        "or raise sampling.steps",
    ),
    (
        "model that is not there",
        "org/tiny",
        "../models/tiny",
        "recipe.yaml:4  model.path: there is no '../models/tiny' (looked in the current folder); "
        "correct the path, or name a model of the hub (org/name)",
    ),
    (
        "pipeline that is not there",
        "diffusion/sd3",
        "diffusion/sd33",
        "recipe.yaml:2  pipeline: there is no pipeline 'diffusion/sd33'; did you mean 'diffusion/sd3'?  "
        f"(there are {', '.join(entry.name for entry in entries('pipelines'))}; "
        "a file of your own is path/to/file.py:name)",
    ),
    (
        "reward file that is not there",
        "mine.py:score",
        "mien.py:score",
        "recipe.yaml:9  rewards[0].name: there is no file 'mien.py' (looked in the current folder); correct the path",
    ),
    (
        "reward function that is not there",
        "mine.py:score",
        "mine.py:scroe",
        "recipe.yaml:9  rewards[0].name: mine.py has no 'scroe'; did you mean 'score'?  (it has score)",
    ),
    (
        "format in place of a data set",
        "data: {name: shapes}",
        "data: {name: csv}",
        "recipe.yaml:6  data.name: there is no data set 'csv'; jsonl reads csv: write name: jsonl, train: {path: FILE}"
        f"  (there are {', '.join(entry.name for entry in entries('datasets'))}; "
        "a file of your own is path/to/file.py:name)",
    ),
    (
        "reward file that is not Python",
        "mine.py:score",
        "recipe.py:score",
        "recipe.yaml:9  rewards[0].name: recipe.py:2 is not valid Python: invalid syntax",
    ),
    (
        "architecture that is not there",
        "name: t",
        "name: t\narchitecture: a.json",
        "recipe.yaml:2  architecture: there is no file 'a.json' (looked in the current folder); correct the path",
    ),
]


@pytest.mark.parametrize(("old", "new", "line"), [case[1:] for case in IN_FILE], ids=[case[0] for case in IN_FILE])
def test_mistake_in_the_file(folder: Path, old: str, new: str, line: str) -> None:
    assert RECIPE.count(old) >= 1
    (folder / "recipe.yaml").write_text(RECIPE.replace(old, new, 1))
    (folder / "recipe.py").write_text("x = 1\nname: =\n")
    with pytest.raises(RecipeError) as caught:
        load()
    assert line in lines_of(caught.value)
    assert "pydantic" not in str(caught.value)


ON_COMMAND_LINE = [
    ("optim.lrr=1", f"command line  optim.lrr: unknown key; did you mean 'lr'?  (keys: {OPTIM})"),
    ("optim.lr=abc", "command line  optim.lr: expected a positive number, got 'abc'"),
    ("optim.lr", "command line  'optim.lr' is no override; write key=value, as in optim.lr=1e-5"),
    ("optim..lr=1", "command line  'optim..lr=1' is no override; write key=value, as in optim.lr=1e-5"),
    (
        "optim.lr=[1",
        "command line  optim.lr: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
    ),
    ("optim.lr.x=1", "command line  optim.lr.x: 'optim.lr' is 0.0001, not a section; nothing can be set inside it"),
    (
        "rewards[1].weight=2",
        "command line  rewards[1].weight: the list 'rewards' has items 0 to 0; index one of them, or "
        "write rewards=[...] for the whole list",
    ),
    (
        "rewards.weight=2",
        "command line  rewards.weight: the list 'rewards' has items 0 to 0; index one of them, or "
        "write rewards=[...] for the whole list",
    ),
    (
        "eval.rewards[0].weight=2",
        "command line  eval.rewards[0].weight: there is no 'eval.rewards' to index; write "
        "eval.rewards=[...] for the whole list",
    ),
    ("optim[0]=2", "command line  optim[0]: 'optim' is a section, not a list; write a key instead of 0"),
    ("model={path: a, path: b}", "command line  model.path: written twice; keep one of them"),
    ("model={lora: null}", "command line  model.path: missing; add it (text)"),
    (
        "train.updates_per_step=3",
        "command line  train.updates_per_step: 4 samples of a group do not divide into 3 updates; "
        "use a divisor of train.group_size",
    ),
    (
        "rewards[0].name=gone.py:score",
        "command line  rewards[0].name: there is no file 'gone.py' (looked in the current folder); correct the path",
    ),
    (
        "rewards=mine.py:score",
        f"command line  rewards: expected a list (1 or more, each a section with keys {REWARD_KEYS}), "
        "got 'mine.py:score'; write a list: [{name: mine.py:score}]",
    ),
    (
        "rewards={name: mine.py:score}",
        f"command line  rewards: expected a list (1 or more, each a section with keys {REWARD_KEYS}), "
        "got a mapping; put [ ] around it",
    ),
    *(
        (f"rewards[0].options.rubric={text}", f"command line  rewards[0].options.rubric: {QUOTES}")
        for text in ("{{ media }}{{ response }}", "{{ response }}")
    ),
    ("eval.rewards=[{name: zzz}]", "command line  eval.rewards[0].name: there is no reward 'zzz'  (there are "),
]


@pytest.mark.parametrize(("override", "line"), ON_COMMAND_LINE, ids=[case[0] for case in ON_COMMAND_LINE])
def test_mistake_on_the_command_line(folder: Path, override: str, line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(override)
    (shown,) = lines_of(caught.value)
    assert shown.startswith(line) if line.endswith("there are ") else shown == line


def test_all_mistakes_at_once_in_reading_order(folder: Path) -> None:
    broken = RECIPE.replace("weight", "wieght").replace("lr: 1e-4", "lr: no").replace("mine.py", "gone.py")
    (folder / "recipe.yaml").write_text(broken)
    (folder / "over.yaml").write_text("# more\ntrain:\n  step: 5\n")
    with pytest.raises(RecipeError) as caught:
        load("seed=-1", overlays=("over.yaml",))
    assert [(p.where, p.key) for p in caught.value.problems] == [
        ("recipe.yaml:9", "rewards[0].name"),
        ("recipe.yaml:10", "rewards[0].wieght"),
        ("recipe.yaml:16", "optim.lr"),
        ("over.yaml:3", "train.step"),
        ("command line", "seed"),
    ]
    assert str(caught.value).startswith("5 problems in the recipe\nrecipe.yaml:9  ")
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ValueError)


def test_broken_yaml_is_one_problem_not_a_missing_key_each(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("name: t\nmodel: {path: x\n")
    with pytest.raises(RecipeError) as caught:
        load()
    (line,) = lines_of(caught.value)
    assert line.startswith("recipe.yaml:3  not YAML: while parsing a flow mapping, expected ',' or '}'")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\xff\xfe\x00", "recipe.yaml  not text in UTF-8; save it as UTF-8"),
        (b"- a\n", "recipe.yaml  a recipe is sections of `key: value`, not a list"),
        (
            b"name: a\n---\nseed: 1\n",
            "recipe.yaml:2  not YAML: a file is one document, and here a second one begins; make files of "
            "them, or name a run's resolved.json",
        ),
        (b"name: \x00", "recipe.yaml  not YAML: unacceptable character #x0000: special characters are not allowed"),
        (
            b"a: &a [x,x,x,x,x,x,x,x]\n"
            + b"".join(
                b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % ((98 + i, 98 + i) + (97 + i,) * 8) for i in range(8)
            ),
            "recipe.yaml  a recipe has at most 5,000 values (aliases of aliases?); put data into a file and name it",
        ),
    ],
    ids=["binary", "list", "two documents", "null byte", "bomb"],
)
def test_not_a_recipe_at_all(folder: Path, content: bytes, line: str) -> None:
    (folder / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load()
    assert lines_of(caught.value) == [line]


def test_layers_merge_and_lists_replace(folder: Path) -> None:
    (folder / "over.yaml").write_text("optim: {eps: 1e-6}\nrewards: [{name: shapes}]\nmodel: {lora: null}\n")
    loaded = load("optim.warmup_steps=3", overlays=("over.yaml",))
    assert (loaded.recipe.optim.lr, loaded.recipe.optim.eps, loaded.recipe.optim.warmup_steps) == (1e-4, 1e-6, 3)
    assert [(reward.name, reward.weight) for reward in loaded.recipe.rewards] == [("shapes", 1.0)]
    assert loaded.recipe.model.lora is None
    sources = {key: loaded.source(key) for key in ("optim.lr", "optim.eps", "optim.warmup_steps", "rewards[0].weight")}
    assert sources == {
        "optim.lr": "recipe.yaml:16",
        "optim.eps": "over.yaml:1",
        "optim.warmup_steps": "command line",
        "rewards[0].weight": "default",
    }


def test_a_layer_that_names_another_data_set_starts_its_options_anew(folder: Path) -> None:
    table = "{path: t.jsonl}"
    (folder / "base.yaml").write_text("data: {name: sums, train: {count: 8}, heldout: {count: 8}, overlong: cut}\n")
    (folder / "over.yaml").write_text(f"data:\n  name: jsonl\n  train: {table}\n")
    (folder / "same.yaml").write_text("data: {name: jsonl, heldout: {path: h.jsonl}}\n")
    (folder / "mixed.yaml").write_text("data: {mixture: [{name: sums}, {name: shapes}]}\n")
    loaded = load(overlays=("base.yaml", "over.yaml"))
    assert (loaded.recipe.data.name, loaded.recipe.data.train, loaded.recipe.data.heldout) == (
        "jsonl",
        {"path": "t.jsonl"},
        {},
    )
    assert loaded.recipe.data.overlong == "cut"  # of the run, not of the data set
    assert (loaded.source("data.train.path"), loaded.source("data.train.count")) == ("over.yaml:3", "default")
    again = load(overlays=("base.yaml", "over.yaml", "same.yaml")).recipe.data
    assert (again.train, again.heldout) == ({"path": "t.jsonl"}, {"path": "h.jsonl"})
    mixed = load(overlays=("base.yaml", "mixed.yaml")).recipe.data
    assert (mixed.names, mixed.name, mixed.train) == (["sums", "shapes"], "", {})
    assert load(overlays=("mixed.yaml", "over.yaml")).recipe.data.names == ["jsonl"]


def test_an_override_that_names_another_data_set_starts_its_options_anew(folder: Path) -> None:
    """Options of the files go; those of the command line stay, wherever they stand beside the name."""
    (folder / "base.yaml").write_text("data: {name: sums, train: {count: 8}, heldout: {count: 8}, overlong: cut}\n")
    for overrides in (
        ["data.train.path=t.jsonl", "data.name=jsonl"],
        ["data.name=jsonl", "data.train={path: t.jsonl}"],
    ):
        loaded = load(*overrides, overlays=("base.yaml",))
        data = loaded.recipe.data
        assert (data.name, data.train, data.heldout, data.overlong) == ("jsonl", {"path": "t.jsonl"}, {}, "cut")
        assert (loaded.source("data.train.path"), loaded.source("data.heldout.count")) == ("command line", "default")
    same = load("data.name=sums", "data.train.count=9", overlays=("base.yaml",)).recipe.data
    assert (same.train, same.heldout) == ({"count": 9}, {"count": 8})
    several = "data.mixture=[{name: sums}, {name: shapes}]"
    mixed = load(several, overlays=("base.yaml",)).recipe.data
    assert (mixed.names, mixed.name, mixed.train) == (["sums", "shapes"], "", {})
    with pytest.raises(RecipeError, match=r"remove data\.name"):
        load(several, "data.name=sums")


def test_overrides(folder: Path) -> None:
    recipe = load(
        "model.lora=null",
        "sampling.window=null",
        "rewards[0].weight=3",
        "rewards.0.label=mine",
        "rewards[0].options={threshold: 1e-5, day: 2024-01-01, on: no}",
        "algorithm={type: diffusion_nft, beta: 1e-1}",
        "eval.rewards=[{name: shapes}]",
        "optim.ema_decay=9e-1",
    ).recipe
    assert recipe.model.lora is None
    assert recipe.sampling.window is None
    assert (recipe.rewards[0].weight, recipe.rewards[0].label) == (3.0, "mine")
    assert recipe.rewards[0].options == {"threshold": 1e-5, "day": "2024-01-01", "on": "no"}
    assert (recipe.algorithm.type, recipe.algorithm.model_dump()["beta"]) == ("diffusion_nft", 0.1)
    assert recipe.eval.rewards[0].name == "shapes"
    assert recipe.optim.ema_decay == 0.9


def test_override_opens_a_section_that_is_absent_or_null(folder: Path) -> None:
    recipe = load("model.lora=null", "model.lora.rank=7", "checkpoint.keep=5").recipe
    assert recipe.model.lora is not None
    assert recipe.model.lora.rank == 7
    assert recipe.checkpoint.keep == 5


def test_later_overrides_win(folder: Path) -> None:
    assert load("seed=1", "seed=2").recipe.seed == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-2E+3", -2e3),
        ("1.", 1.0),
        (".5", 0.5),
        ("012", 12),
        ("0x1f", 31),
        ("12:30", "12:30"),
        ("", None),
        ("~", None),
        ("true", True),
        ("yes", "yes"),
        ("'1'", "1"),
        ("1_000", "1_000"),
        ("-.inf", -math.inf),
        ("e5", "e5"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_parse_key() -> None:
    assert parse_key("rewards[0].weight") == parse_key("rewards.0.weight") == ("rewards", 0, "weight")
    for wrong in ("", ".a", "a.", "a[x]", "a[0", "a b", "[0]"):
        assert parse_key(wrong) is None, wrong


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(st.text(), st.from_regex(r"[a-z]{1,9}([.\[][a-z0-9\]]{1,9}){0,3}=.{0,12}", fullmatch=True)),
        max_size=3,
    ),
    st.one_of(st.just(RECIPE), st.text(), st.text(alphabet="ab:- \n\t{}[]&*!'\",.0"), st.binary()),
)
@example(["rewards=[null]", "rewards[0].name=x"], RECIPE)
@example(["algorithm=3"], RECIPE)
@example(["²"], RECIPE)
@example(["rewards.².name=x"], RECIPE)
@example(["algorithm.type=[1]"], RECIPE)
@example(["data.name=:"], RECIPE)
@example(["rewards[0].name=.py"], RECIPE)
@example(["model.path=~"], RECIPE)
@example([f"model.path={'x' * 5000}"], RECIPE)
@example([f"rewards[0].name={'x' * 5000}.py"], RECIPE)
@example([f"data.name={'x' * 5000}"], RECIPE)
@example(["model.path=~nosuchuser/x"], RECIPE)
@example(['rewards[0].name="a\\0b.py"'], RECIPE)
def test_whatever_is_written_the_answer_is_a_recipe_or_problems(
    folder: Path, overrides: list[str], content: str | bytes
) -> None:
    encoded = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    (folder / "recipe.yaml").write_bytes(encoded)
    try:
        loaded = load(*overrides)
        json.dumps(loaded.resolved())
        problems = []
    except RecipeError as error:
        problems = [problem for problem in error.problems if not problem.message] or [None] * (not error.problems)
    assert not problems


def test_resolved_is_json_and_loads_to_the_same_recipe_from_anywhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tiny").mkdir()
    (folder / "tiny/model_index.json").write_text("{}")
    loaded = load("model.path=tiny", "optim.lr=1e-7")
    resolved = json.loads(json.dumps(loaded.resolved()))
    assert resolved["model"]["path"] == str(folder / "tiny")
    assert resolved["rewards"][0]["name"] == f"{folder / 'mine.py'}:score"
    assert (resolved["data"]["name"], resolved["pipeline"]) == ("shapes", "diffusion/sd3")
    elsewhere = tmp_path_factory.mktemp("run")
    monkeypatch.chdir(elsewhere)
    (elsewhere / "resolved.json").write_text(json.dumps(resolved))
    assert load_recipe(["resolved.json"]).resolved() == resolved


def test_resolved_holds_the_paths_in_the_options_of_rewards(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each reward declares them: ours, and a user's behind an alias, whose file cannot even be imported here."""
    (folder / "judges" / "small").mkdir(parents=True)
    (folder / "judges" / "small" / "config.json").write_text("{}")
    (folder / "rubric.md").write_text("{{ response }}?")
    (folder / "aliased.py").write_text(
        "import mmrl, not_installed_anywhere\n@mmrl.reward(paths=('table',))\nclass Looks:\n"
        "    def score(self, samples, *, context): ...\nscore = Looks\n"
    )
    path, rubric = str(folder / "judges" / "small"), str(folder / "rubric.md")
    cases = {
        "judge": ({"model": "judges/small", "rubric": "rubric.md"}, {"model": path, "rubric": rubric}),
        "judge:Judge": ({"model": {"path": "judges/small", "batch": 2}}, {"model": {"path": path, "batch": 2}}),
        "judge:score": ({"model": {"vllm": "judges/small"}, "system": "x"}, {"model": {"vllm": path}, "system": "x"}),
        "reward_model": ({"path": "judges/small"}, {"path": path}),
        "clip": ({"path": "org/clip"}, {"path": "org/clip"}),
        "pickscore": ({"path": "org/clip", "processor": "judges/small"}, {"path": "org/clip", "processor": path}),
        "aliased.py": ({"table": "rubric.md", "other": "rubric.md"}, {"table": rubric, "other": "rubric.md"}),
        "mine.py": ({"path": "rubric.md"}, {"path": "rubric.md"}),
    }  # fmt: skip
    listed = json.dumps([{"name": n, "label": f"r{i}", "options": o} for i, (n, (o, _)) in enumerate(cases.items())])
    resolved = load(f"rewards={listed}", "eval.rewards=" + listed.replace('"label": "r', '"label": "e')).resolved()
    for rewards in (resolved["rewards"], resolved["eval"]["rewards"]):
        assert {name: reward["options"] for name, reward in zip(cases, rewards, strict=True)} == {
            name: expected for name, (_, expected) in cases.items()
        }
    (elsewhere := tmp_path_factory.mktemp("run") / "resolved.json").write_text(json.dumps(resolved))
    monkeypatch.chdir(elsewhere.parent)
    assert load_recipe([elsewhere]).resolved() == resolved


def test_a_folder_takes_nothing_from_the_drop_in_of_its_name(folder: Path) -> None:
    for name in ("judge", "shapes", "diffusion/sd3"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
    (folder / "clip").write_text("")
    resolved = load("rewards[0].name=judge", "eval.rewards=[{name: clip}]").resolved()
    assert [resolved["rewards"][0]["name"], resolved["eval"]["rewards"][0]["name"]] == ["judge", "clip"]
    assert (resolved["data"]["name"], resolved["pipeline"]) == ("shapes", "diffusion/sd3")
    assert resolve_drop_in(folder, "mine.py:score") == f"{folder / 'mine.py'}:score"


def test_resolve(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert resolve(folder, "mine.py:score") == f"{folder / 'mine.py'}:score"
    assert resolve(folder, "mine.py") == str(folder / "mine.py")
    assert resolve(folder, "gone.py:score") == "gone.py:score"
    for name in ("jpeg", "org/model"):
        (folder / name).mkdir(parents=True)
        assert resolve(folder, name) == name, "a folder of pictures is not what a name means"
        (folder / name / "config.json").write_text("{}")
        assert resolve(folder, name) == str(folder / name)
    assert resolve(folder, "http:score") == "http:score"
    shipped = next(iter(shipped_recipes().values()))
    assert resolve(folder, f"../recipes/{shipped.name}") == str(shipped.resolve()), "a copied recipe still finds it"


def test_a_local_folder_beats_the_hub_only_where_its_parent_is_there(folder: Path) -> None:
    load("model.path=models/tiny")
    (folder / "models").mkdir()
    with pytest.raises(RecipeError, match=r"model.path: there is no 'models/tiny'"):
        load("model.path=models/tiny")


def test_star_imports_and_conditional_definitions_are_not_called_missing(folder: Path) -> None:
    (folder / "star.py").write_text("from elsewhere import *\n")
    (folder / "cond.py").write_text(
        "try:\n    import x\nexcept ImportError:\n    def score(samples, *, context): ...\n"
    )
    (folder / "taken.py").write_text("from elsewhere import thing as score\n")
    for name in ("star.py:anything", "cond.py", "taken.py:score"):
        load(f"rewards[0].name={name}")


def test_find_recipe(folder: Path) -> None:
    for name, path in shipped_recipes().items():
        assert find_recipe(name) == path
    name = next(iter(shipped_recipes()))
    with pytest.raises(RecipeError, match=f"{name}x  there is no such file or recipe; did you mean '{name}'"):
        find_recipe(f"{name}x")
    with pytest.raises(RecipeError, match="is a folder; name a recipe in it"):
        find_recipe(".")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_load_and_say_what_they_are(name: str) -> None:
    loaded = load_recipe([name])
    assert loaded.path.read_text().startswith("# ")
    assert yaml.safe_load(json.dumps(loaded.resolved()))["name"] == loaded.recipe.name


def test_entries_are_what_a_recipe_may_name_and_not_the_core() -> None:
    found = {kind: [entry.name for entry in entries(kind)] for kind in ("pipelines", "rewards", "datasets")}
    assert "diffusion/sd3" in found["pipelines"]
    assert "shapes" in found["rewards"]
    assert "shapes" in found["datasets"]
    core = {path.stem for kind in found for path in (Path(__file__).parents[2] / "mmrl" / kind).glob("*.py")}
    assert not {name.partition(":")[0] for names in found.values() for name in names} & core
    assert all(entry.summary for entry in entries("rewards"))


@pytest.mark.slow
def test_reading_a_recipe_imports_its_algorithm_and_not_the_reward(folder: Path) -> None:
    code = (
        "import sys, mmrl.config.loader as x; x.load_recipe(['recipe.yaml'])\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('mmrl.rewards.', 'mmrl.algorithms.', 'diffusers'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    imported = done.stdout.split()
    assert "mmrl.algorithms.flow_grpo" in imported
    assert not {"mmrl.algorithms.grpo", "mmrl.rewards.shapes", "mmrl.rewards.jpeg", "diffusers"} & {*imported}


IGNORED = {
    "sums": ["model.min_pixels=100", "model.max_pixels=900", "data.fps=2", "rollout.update_bucket_mib=7"],
    "shapes-lora": ["rollout.max_gap=0.5", "rollout.sampling={a: 1}", "eval.temperature=0.5", "data.max_frames=4"],
}
IGNORED["sums"] += ["rollout.importance_cap=3.5", "rollout.importance_mode=mask", "rollout.weight_transport=files"]
IGNORED["shapes-lora"] += ["rollout.importance_cap=3.5", "model.min_pixels=100", "train.micro_batch_tokens=64"]


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, of in IGNORED.items() for change in of])
def test_a_key_that_nothing_would_read_is_refused(name, change):
    with pytest.raises(UserError, match=f"{re.escape(change.partition('=')[0])}: .*remove it"):
        load_recipe([name], [change])


@pytest.mark.parametrize("strategy", ["random", "progressive", "decay", "exp_decay"])
@pytest.mark.parametrize(("key", "value"), [("every", 3), ("decay_from", 2), ("decay_rate", 0.5)])
def test_a_window_takes_the_keys_that_its_strategy_reads(strategy, key, value):
    change = f"sampling.window={{size: 2, strategy: {strategy}, {key}: {value}}}"
    if strategy == "exp_decay" or (key == "every" and strategy != "random"):
        assert getattr(load_recipe(["shapes-lora"], [change]).recipe.sampling.window, key) == value
    else:
        with pytest.raises(UserError, match=f"sampling.window.{key}: the strategy {strategy} does not read it"):
            load_recipe(["shapes-lora"], [change])
