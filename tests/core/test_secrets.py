"""Secrets of a recipe: in no file of a run and not on the terminal, and asked for where they are needed again."""

import io
import json

import pytest
import yaml
from rich.console import Console

from mmrl.app.build import open_run
from mmrl.app.resume import same_run
from mmrl.config.loader import load_recipe
from mmrl.config.masked_text import masked_document, masked_override
from mmrl.config.schema import Recipe
from mmrl.core import secrets
from mmrl.core.errors import UserError
from mmrl.core.secrets import MASK, given_again, hidden, is_secret, masked
from mmrl.logging.rundir import RunDir
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.runtime import start
from tests.support.recipes import SMALL

SECRETS = {"api_key": "k-5f1", "hf_token": "hf_abcdefgh", "password": "tr0ub4dor", "client_secret": "12345678"}
URL = "https://me:open-sesame@example.org/v1"
REWARD = """
import mmrl
from mmrl.core.reward_contract import Failed
@mmrl.reward(inputs=("image",))
def score(samples, *, context, api_key, hf_token, password, client_secret, url, key):
    assert (api_key, password, url) == ("k-5f1", "tr0ub4dor", "https://me:open-sesame@example.org/v1")
    last = len(samples) - 1
    return [Failed(f"{url} refuses {hf_token}") if i == last else float(i) for i in range(len(samples))]
"""


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *((name, value, True) for name, value in SECRETS.items()),
        ("token", "sk-proj-0123456789abcdef", True),
        ("wandb_token", "x", True),
        ("Authorization", "Bearer x", True),
        ("openai_api_key", 12345678, True),
        ("signing_key", "x", True),
        ("api_key", "$OPENAI", False),
        ("api_key", None, False),
        ("password", "", False),
        ("key", "answer", False),
        ("eos_token", "<|im_end|>", False),
        ("caption_key", "long_caption_of_the_picture", False),
        ("some_key", "AIzaSyD4f8a9b2c3d4e5f6", True),
        ("max_tokens", 512, False),
        ("keyword", "AIzaSyD4f8a9b2c3d4e5f6", False),
    ],
)
def test_the_name_of_an_option_tells_a_secret(name, value, secret):
    assert is_secret(name, value) == secret
    assert masked({"options": [{name: value}]}) == {"options": [{name: MASK if secret else value}]}


TEXTS = {
    "options: {token: 'a1#b2c3d4e5f6a7b8c9', n: 1}": "options: {token: '<secret>', n: 1}",
    "# why\noptions:\n  token: a1#b2c3d4e5f6a7b8c9 # mine": "# why\noptions:\n  token: <secret> # mine",
    "a: [https://a:b@x/, {token: a1#b2c3d4e5f6a7b8c9}]": "a: [https://<secret>@x/, {token: <secret>}]",
    "token: !!str a1#b2c3d4e5f6a7b8c9": "token: <secret>\n",
    'api_token: "\\x61bc"': "api_token: <secret>\n",
    "password: >-\n  one\n  two": "password: <secret>\n",
    "url: https://a:b@x/": "url: https://<secret>@x/",
}
VALUES = {"token": "a1#b2c3d4e5f6a7b8c9", "api_token": "abc", "password": "one two", "url": "https://a:b@x/"}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_recipe_keeps_all_but_the_secret(text):
    assert masked_document(text, VALUES) == TEXTS[text]


def test_settings_of_the_command_line_are_masked():
    shown = [masked_override(f"a[0].b.{text}", VALUES) for text in ("password=one two", 'api_token="\\x61bc"', "n=1")]
    assert shown == ["a[0].b.password=<secret>", 'a[0].b.api_token="<secret>"', "a[0].b.n=1"]
    assert masked_override("a={api_token: !!str abc}", VALUES) == 'a={"api_token": "<secret>"}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step, its recipe and what it printed."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "mine.py").write_text(REWARD)
    options = json.dumps({**SECRETS, "url": URL, "key": "answer"})
    small = "\n".join(f"# {line}" for line in SMALL)
    (folder / "over.yaml").write_text(
        f"{small}\nrewards: [{{name: {folder}/mine.py, label: mine, on_failure: drop, options: {options}}}]\n"
    )
    words = [*SMALL, "eval.every=null", "train.steps=1", "rewards[0].options.password=tr0ub4dor"]
    loaded = load_recipe(["shapes-lora", folder / "over.yaml"], words)
    return start.train(loaded, folder / "run"), loaded


def test_no_file_of_a_run_holds_a_secret(trained):
    out, _ = trained
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"recipe.yaml", "resolved.json", "failures.jsonl", "report.html"} <= {path.name for path in files}
    for path in files:
        found = [s for s in (*SECRETS.values(), "open-sesame") if s.encode() in path.read_bytes()]
        assert not found, path
    assert "refuses <secret>" in (out / "failures.jsonl").read_text()
    options = json.loads((out / "resolved.json").read_text())["rewards"][0]["options"]
    assert options == {**dict.fromkeys(SECRETS, MASK), "url": "https://<secret>@example.org/v1", "key": "answer"}
    assert "# override: rewards[0].options.password=<secret>" in (out / "recipe.yaml").read_text()


def test_a_run_resumes_with_its_recipe_and_is_opened_with_the_environment(trained, monkeypatch):
    out, loaded = trained
    same_run(RunDir(out), loaded)  # does not take a mask for another value
    assert "tr0ub4dor" not in start.command(loaded, out)
    with pytest.raises(UserError, match=r"environment variables .*MMRL_REWARDS_0_OPTIONS_API_KEY, "):
        open_run(out)
    for name, value in {**SECRETS, "url": URL}.items():
        monkeypatch.setenv(f"MMRL_REWARDS_0_OPTIONS_{name.upper()}", value)
    recipe, _ = open_run(out)
    assert isinstance(recipe, Recipe)
    assert recipe.rewards[0].options == {**SECRETS, "url": URL, "key": "answer"}
    assert hidden("refused: tr0ub4dor") == "refused: <secret>"


def test_a_masked_recipe_asks_for_its_secrets(trained, tmp_path):
    out, _ = trained
    kept = yaml.safe_load_all((out / "recipe.yaml").read_text())
    (tmp_path / "again.yaml").write_text(yaml.safe_dump([*kept][-1]))
    with pytest.raises(UserError, match=r"rewards\[0\]\.options\.api_key: the secret is masked here"):
        load_recipe(["shapes-lora", tmp_path / "again.yaml"])


def test_a_run_without_secrets_asks_for_none():
    settings = {"rewards": [{"options": {"token": "$NAME", "n": 3}}]}
    assert given_again(masked(settings)) == settings


def test_messages_of_a_recipe_that_cannot_run_hold_no_secret(tmp_path):
    (tmp_path / "r.yaml").write_text("rewards: [{name: jpeg, options: {password: tr0ub4dor}, weight: tr0ub4dor}]\n")
    with pytest.raises(UserError) as found:
        load_recipe(["shapes-lora", tmp_path / "r.yaml"])
    assert "tr0ub4dor" in str(found.value)
    assert "tr0ub4dor" not in hidden(str(found.value))


def test_a_plan_shows_no_secret(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "rewards: [{name: jpeg:compressibility}, {name: http:score, options: {password: tr0ub4dor, token: $NO_SUCH}}]\n"
    )
    planned = plan(load_recipe(["shapes-lora", tmp_path / "r.yaml"], SMALL))
    planned.problems.append("the reward refuses tr0ub4dor for https://me:open-sesame@example.org")
    for short in (False, True):
        planned.notes.append("tr0ub4dor")
        console = Console(file=io.StringIO(), width=200)
        render(planned, console, short=short)
        assert "tr0ub4dor" not in console.file.getvalue()
        assert "open-sesame" not in console.file.getvalue()
        assert MASK in console.file.getvalue()
