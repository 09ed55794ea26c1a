"""Secrets are found by their forms, wherever they stand; what only looks a little like one is left alone."""

import json
import random
import string

import pytest
import yaml

from mmrl.config.masked_text import masked_document, masked_override
from mmrl.core import secrets
from mmrl.core.secrets import MASK, hidden, masked, masks, remember
from mmrl.logging.rundir import RunDir

_RNG = random.Random(0)


def drawn(n, letters=string.ascii_letters + string.digits):
    """Random text with a digit and a letter in it; nothing real."""
    return "7a" + "".join(_RNG.choice(letters) for _ in range(n - 2))


HEX, UPPER = string.hexdigits[:16], string.ascii_uppercase + string.digits
TOKENS = {
    "AWS key": "AKIA" + drawn(16, UPPER).upper(),
    "AWS session": "ASIA" + drawn(16, UPPER).upper(),
    "Google API": "AIza" + drawn(35),
    "Google OAuth": "ya29." + drawn(60),
    "Google client": "GOCSPX-" + drawn(28),
    "GitHub": "ghp_" + drawn(36),
    "GitHub app": "ghs_" + drawn(36),
    "GitHub fine": "github_pat_" + drawn(22) + "_" + drawn(59),
    "GitLab": "glpat-" + drawn(20),
    "Atlassian": "ATATT3" + drawn(60),
    "PyPI": "pypi-" + drawn(90),
    "npm": "npm_" + drawn(36),
    "Docker": "dckr_pat_" + drawn(27),
    "OpenAI": "sk-" + drawn(48),
    "OpenAI project": "sk-proj-" + drawn(74) + "-" + drawn(30),
    "OpenAI service": "sk-svcacct-" + drawn(60),
    "Anthropic": "sk-ant-api03-" + drawn(93) + "-AA",
    "OpenRouter": "sk-or-v1-" + drawn(64, HEX),
    "DeepSeek": "sk-" + drawn(32, HEX),
    "Hugging Face": "hf_" + drawn(34),
    "Groq": "gsk_" + drawn(52),
    "Replicate": "r8_" + drawn(37),
    "xAI": "xai-" + drawn(80),
    "NVIDIA": "nvapi-" + drawn(64),
    "Perplexity": "pplx-" + drawn(48),
    "Databricks": "dapi" + drawn(32, HEX),
    "W&B": "wandb_v1_" + drawn(60),
    "Slack bot": f"xoxb-{drawn(12, '0123456789')}-{drawn(24)}",
    "Slack app": "xapp-1-" + drawn(40),
    "Telegram": "123456789:AA" + drawn(33),
    "SendGrid": f"SG.{drawn(22)}.{drawn(43)}",
    "Mailgun": "key-" + drawn(32, HEX),
    "Twilio": "SK" + drawn(32, HEX),
    "Stripe": "sk_live_" + drawn(24),
    "Shopify": "shpat_" + drawn(32, HEX),
    "DigitalOcean": "dop_v1_" + drawn(64, HEX),
    "Vault": "hvs." + drawn(90),
    "Notion": "ntn_" + drawn(46),
    "Postman": f"PMAK-{drawn(24, HEX)}-{drawn(34, HEX)}",
    "JWT": f"eyJ{drawn(30)}.eyJ{drawn(50)}.{drawn(43)}",
    "age": "AGE-SECRET-KEY-1" + drawn(58, UPPER).upper(),
}
"""Tokens by the service: they are masked under any name, alone or inside a text."""
ODD = drawn(24)
PLACES = {
    "?api_key=": (f"https://judge.example/v1?api_key={ODD}&n=1", f"https://judge.example/v1?api_key={MASK}&n=1"),
    "?key=": (f"https://x.example/?key={ODD}", f"https://x.example/?key={MASK}"),
    "&token=": (f"https://x.example/a?b=1&token={ODD}", f"https://x.example/a?b=1&token={MASK}"),
    "&amp;token=": (f"https://x.example/a?b=1&amp;token={ODD}", f"https://x.example/a?b=1&amp;token={MASK}"),
    "access_token": (f"https://x.example/?access_token={ODD}#top", f"https://x.example/?access_token={MASK}#top"),
    "sig": (
        f"https://a.blob.example/c?sv=2024-01-01&sig={ODD}%3D",
        f"https://a.blob.example/c?sv=2024-01-01&sig={MASK}",
    ),
    "X-Amz-Signature": (f"https://s3.example/b?X-Amz-Signature={ODD}", f"https://s3.example/b?X-Amz-Signature={MASK}"),
    "pwd": (f"https://x.example/?user=me&pwd={ODD}", f"https://x.example/?user=me&pwd={MASK}"),
    "client_secret": (f"https://x.example/?client_secret={ODD}", f"https://x.example/?client_secret={MASK}"),
    "basic address": (f"https://me:{ODD}@x.example/v1", f"https://{MASK}@x.example/v1"),
    "data base": (f"postgresql://me:{ODD}@db.example:5432/x", f"postgresql://{MASK}@db.example:5432/x"),
    "Cookie": (f"Cookie: session={ODD}; theme=dark", f"Cookie: {MASK}"),
    "Set-Cookie": (f"Set-Cookie: id={ODD}; Path=/", f"Set-Cookie: {MASK}"),
    "Authorization": (f"Authorization: Bearer {ODD}", f"Authorization: Bearer {MASK}"),
    "basic header": ("Authorization: Basic bWU6b3Blbi1zZXNhbWU=", f"Authorization: Basic {MASK}"),
    "X-Api-Key": (f"X-Api-Key: {ODD}", f"X-Api-Key: {MASK}"),
    "bearer in words": (f"401 for the bearer {ODD}!", f"401 for the bearer {MASK}!"),
    "password=": (f"connect(host='x', password='{ODD}')", f"connect(host='x', password='{MASK}')"),
    "Azure": (
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={ODD}==;EndpointSuffix=x",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={MASK};EndpointSuffix=x",
    ),
    "Slack webhook": (f"https://hooks.slack.example/services/T0/B0/{ODD}", f"https://hooks.slack.example/{MASK}"),
    "Discord webhook": (
        f"https://discord.example/api/webhooks/123/{ODD}",
        f"https://discord.example/api/webhooks/{MASK}",
    ),
    "Teams webhook": (f"https://a.webhook.office.example/webhookb2/{ODD}", f"https://a.webhook.office.example/{MASK}"),
    "Telegram address": (f"https://api.telegram.org/bot12:{ODD}/getMe", f"https://api.telegram.org/bot{MASK}/getMe"),
    "PGPASSWORD=": ("PGPASSWORD=pw psql -h db", f"PGPASSWORD={MASK} psql -h db"),
    "export": ('export DB_SECRET="pw" HF_TOKEN=ab', f'export DB_SECRET="{MASK}" HF_TOKEN={MASK}'),
    "curl -u": ("curl -s -u me:pw https://x.example", f"curl -s -u {MASK} https://x.example"),
    "curl -su": ("curl -su 'me:p w' x.example", f"curl -su '{MASK}' x.example"),
    "--user": ("wget --proxy-user=me:pw x.example", f"wget --proxy-user={MASK} x.example"),
    "--password": ("run --password pw --token ab --n 5", f"run --password {MASK} --token {MASK} --n 5"),
    "--api-key=": ("run --api-key=ab --db-password='pw' x", f"run --api-key={MASK} --db-password='{MASK}' x"),
    "?password=": ("https://x.example/?password=ab&n=1", f"https://x.example/?password={MASK}&n=1"),
    "?user_key=": ("https://x.example/?n=1&user_key=ab", f"https://x.example/?n=1&user_key={MASK}"),
    "?apiKey=": ("https://x.example/?apiKey=ab", f"https://x.example/?apiKey={MASK}"),
    "X-Token": ("X-Token: ab", f"X-Token: {MASK}"),
    "X-Api-Key, short": ("X-Api-Key: ab", f"X-Api-Key: {MASK}"),
    "X-Gitlab-Token": ("X-Gitlab-Token: ab", f"X-Gitlab-Token: {MASK}"),
    "netrc": ("machine h login u password p", f"machine h login u password {MASK}"),
    "netrc, lines": ("machine h\n  login u\n  password p\n", f"machine h\n  login u\n  password {MASK}\n"),
    "netrc, other order": ("machine h password p login u", f"machine h password {MASK} login u"),
    "netrc, default": ("default login u password p", f"default login u password {MASK}"),
    "JSON": ('{"api_key": "ab", "n": 5}', f'{{"api_key": "{MASK}", "n": 5}}'),
    "JSON, camel case": ('{"a":{"clientSecret":"a b"}}', f'{{"a":{{"clientSecret":"{MASK}"}}}}'),
    "JSON in JSON": ('{\\"password\\": \\"ab\\"}', f'{{\\"password\\": \\"{MASK}\\"}}'),
    "a dictionary": ("{'access_token': 'ab'}", f"{{'access_token': '{MASK}'}}"),
    "private key": (
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{ODD}\n{ODD}\n-----END OPENSSH PRIVATE KEY-----",
        MASK,
    ),
}
"""Texts with a secret in a place, and as they are shown."""
NAMES = [
    *("pwd", "pass", "bearer", "jwt", "pat", "github_pat", "cookie", "Cookie", "webhook", "webhook_url", "dsn", "sas"),
    *("apiKey", "clientSecret", "accessToken", "privateKey", "hfToken", "dbPassword", "webhookUrl", "connectionString"),
    *(
        "APIKey",
        "PGPASSWORD",
        "X-Token",
        "user_key",
        "api_keys",
        "tokens",
        "accessTokens",
        "passwords",
        "secrets",
        "auth",
    ),
    *("db_pass", "otp", "connection_string", "private_key", "ssh_key", "auth_token", "id_token", "proxy_pass"),
]
SHORT = [
    *(
        {name: value}
        for name in ("clientSecret", "apiKey", "PGPASSWORD", "X-Token", "user_key")
        for value in ("abc", "5")
    ),
    *({name: ["ab", "cd"]} for name in ("tokens", "api_keys", "apiKeys", "passwords", "secrets", "auth", "basicAuth")),
    *({name: "me:pw"} for name in ("auth", "basic_auth", "httpAuth")),
]
"""Options whose values are secrets however short they are."""
NAMED = [
    *({name: 5} for name in ("tokens", "max_tokens", "maxTokens", "maxToken", "num_secrets", "auth")),
    *({"auth": value} for value in ("none", "basic", "Bearer", "oauth2", True, None, "$AUTH")),
    *({"tokens": value} for value in ("5", [1, 2], ["</s>", "<|im_end|>"], [], ["$A"])),
    *(
        {"keys": ["question", "answer"]},
        {"stop_tokens": ["end"]},
        {"sortKey": "name"},
        {"keyName": "x"},
        {"author": "me"},
    ),
]
"""Options that only look like those."""
ORDINARY = [
    *("run --tokens 5", "--max-token 5", "--password-file pw.txt", "--token --n 5", "give --token to the command"),
    *("password-free text", "auth: none", "a login form, password field", "this machine has password protection"),
    *("docker run -u 1000:1000 x", "python -u run.py", "sort -u a:b", "PASSWORD=$PW", "PAD_TOKEN=pad", "TOKENS=5"),
    *("https://x.example/?sort_key=name&pass=2&tokens=5", "x-axis: left", "X-Trace-Id: 12"),
    *(
        '{"token": "the", "logprob": -1}',
        '{"eos_token": "</s>", "tokens": 5}',
        '{"password": "$PW"}',
        '{"sort_key": "a"}',
    ),
    *(
        "stabilityai/stable-diffusion-3.5-medium",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "/data/runs/2026-01-01T10-11-12/step_000400",
    ),
    *(
        "s3://bucket/models/sk-learn-classifiers-of-2024",
        "hf_models/sd3",
        "meta-llama/Llama-3.1-8B",
        "runs/task-12345678901234567890",
    ),
    *("d41d8cd98f00b204e9800998ecf8427e", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    *("2fd4e1c67a2d28fced849ee1bb76e7391b93eb12", "550e8400-e29b-41d4-a716-446655440000", "sha256:" + "ab12" * 16),
    *(
        "a cookie: chocolate, with 2 chips",
        "a bearer of torches, oil on canvas",
        "a basic skeleton key, 1890s engraving",
    ),
    *(
        "the password is written on the wall",
        "Who has the key? the pass over the Alps = 2000 m",
        "token: 12",
        "eos_token: <|im_end|>",
    ),
    *(
        "https://example.org/a?page=2&sort=asc&monkey=1#top",
        "https://github.com/org/hooks/tree/main",
        "http://localhost:8000/v1",
    ),
    *(
        "answer:math",
        "1e-5",
        "0.7",
        "$OPENAI_API_KEY",
        "Authorization: $TOKEN",
        "https://x.example/?api_key=$KEY",
        "key=answer",
    ),
    *(
        "max_tokens=512",
        "sampling.steps=28",
        "rewards[0].options.token=$HF",
        "skirt-1234567890abcdef1234",
        "ask-me-1234567890abcdefgh",
    ),
    *(
        "transformer.blocks.0.attn.to_q",
        "def score(samples, *, context): return [1.0]",
        "x" * 100_000,
        "data:image/png;base64," + "QUtJQTEy" * 500,
    ),
]


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.sweep("secrets by their form, in values, texts, recipes and files of a run")
def test_secrets_are_masked_by_their_form(tmp_path, sweep):
    for name, token in TOKENS.items():
        for text in (
            token,
            f"refused: {token}",
            f"({token})",
            f"x={token}",
            f'{{"a": "{token}"}}',
            f"see {token}, twice {token}",
        ):
            sweep.check(token not in hidden(text) and MASK in hidden(text), f"{name}: {hidden(text)}")
        settings = {"rewards": [{"options": {"anything": token, "text": f"use {token} there"}}]}
        shown = masked(settings)
        sweep.check(token not in json.dumps(shown) and len(masks(shown)) == 2, f"{name}: {shown}")
        text = yaml.safe_dump(settings)
        sweep.check(token not in masked_document(text, settings), f"{name} in a recipe")
        sweep.check(token not in masked_override(f"a.b={token}", {"b": token}), f"{name} in an override")
    for name, (text, right) in PLACES.items():
        sweep.check(hidden(text) == right, f"{name}: {hidden(text)}")
        sweep.check(masked({"anything": text}) == {"anything": right}, f"{name}: {masked({'anything': text})}")
    for name in NAMES:
        sweep.check(masked({name: ODD}) == {name: MASK}, f"the option {name}")
        sweep.check(masked({name: "$NAME"}) == {name: "$NAME"}, f"the option {name} with a variable")
    for options in SHORT:
        ((name, value),) = options.items()
        shown = [MASK] * len(value) if isinstance(value, list) else MASK
        sweep.check(masked(options) == {name: shown}, f"{options}: {masked(options)}")
        text = masked_document(yaml.safe_dump(options), options)
        sweep.check(yaml.safe_load(text) == {name: shown}, f"{options} in a recipe: {text}")
        text = masked_override(f"{name}={json.dumps(value)}", options)
        sweep.check(yaml.safe_load(text.partition("=")[2]) == shown, f"{options} in an override: {text}")
    recipe = tmp_path / "recipe.yaml"
    settings = {"options": {name: value for name, (value, _) in PLACES.items()} | TOKENS | dict.fromkeys(NAMES, ODD)}
    recipe.write_text(yaml.safe_dump(settings))
    run = RunDir(tmp_path)
    run.path = tmp_path / "run"
    (tmp_path / "run").mkdir()
    run = RunDir(tmp_path / "run")
    run.write_recipe(
        [recipe], [f"options.{name.replace(' ', '_')}={value}" for name, value in TOKENS.items()], settings
    )
    for file in (run.recipe, run.resolved):
        found = [value for value in (*TOKENS.values(), ODD) if value in file.read_text()]
        sweep.check(not found, f"{file.name}: {found}")
    sweep.done()


@pytest.mark.sweep("values that are no secrets")
def test_ordinary_values_are_left_alone(sweep):
    for value in ORDINARY:
        sweep.check(hidden(value) == value, f"{value[:200]}: {hidden(value)[:200]}")
        sweep.check(masked({"a": value, "prompt": value}) == {"a": value, "prompt": value}, value[:200])
    for options in NAMED:
        sweep.check(masked(options) == options, options)
    for value in (1, 0.5, True, None, 12345678901234567890):
        sweep.check(masked({"a": value, "pass": value}) == {"a": value, "pass": value}, value)
    sweep.done()


def test_a_secret_inside_a_text_is_hidden_alone_too():
    remember({"url": f"https://x.example/?token={ODD}"})
    assert hidden(f"the server refuses {ODD}") == f"the server refuses {MASK}"
