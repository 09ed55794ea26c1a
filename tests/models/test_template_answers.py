"""Chat templates of many kinds: given answers, system messages and contents are what the template itself renders."""

import itertools
import json
import random

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Turn
from mmrl.models.text.answered import answer_tokens
from mmrl.models.text.chat import check_template
from mmrl.planner.plan import plan
from mmrl.training import loop
from tests.support import tiny
from tests.support.sweeps import Sweep
from tests.support.template_answers import chat_of

allow_cpu_only()

LOOP = "{% for m in messages %}"
CHATML_GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THOUGHT = (
    "{% set r = m.reasoning_content if m.reasoning_content is string else '' %}{% set c = m.content %}"
    "{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n')"
    " %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
"""Qwen3's way of finding the thought of an answer, under its key or in its content."""
HEAD = "<|im_start|>{{ m.role }}\n"
TEMPLATES = {
    "chatml": tiny.CHATML,
    "chatml, lists too": (
        LOOP + HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}" + CHATML_GENERATION
    ),
    "only lists": tiny.SEES.replace("IMAGE", "").replace("VIDEO", ""),
    "empty thoughts": (  # Qwen3: earlier thoughts are left out, the last answer always has one
        "{% set ns = namespace(q=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.q = loop.index0 %}"
        "{% endif %}{% endfor %}"
        + LOOP
        + "{% if m.role == 'assistant' %}"
        + THOUGHT
        + HEAD
        + "{% if loop.index0 > ns.q %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ c }}<|im_end|>\n"
        "{% else %}"
        + HEAD
        + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + CHATML_GENERATION
        + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}"
    ),
    "begins to think": (  # Qwen3-2507, Qwen3.5
        LOOP
        + "{% if m.role == 'assistant' %}"
        + THOUGHT
        + HEAD
        + "<think>\n{{ r.strip('\n') }}\n</think>\n\n{{ c }}<|im_end|>\n{% else %}"
        + HEAD
        + "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "<think>\n{% endif %}"
    ),
    "begins to think, writes as given": (
        LOOP + HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "drops thoughts": (  # DeepSeek-R1
        "{{ bos_token }}" + LOOP + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<User>"
        "{{ m.content }}{% else %}<Assistant>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
    ),
    "begins without a thought": (  # GLM, Qwen3.5 without thinking
        LOOP + "{% if m.role == 'assistant' %}" + THOUGHT + "<|assistant|>\n<think>{{ r.strip() }}</think>\n"
        "{{ c.strip() }}<|im_end|>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n<think></think>\n{% endif %}"
    ),
    "trims": (  # Gemma 3, Llama 3
        "{{ bos_token }}" + LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "raises at a system message": (  # Gemma 2
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + LOOP
        + "<{{ m.role }}>\n{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>\n"
        "{% endif %}"
    ),
    "no system branch": (
        LOOP + "{% if m.role == 'user' %}[Q]{{ m.content }}{% elif m.role == 'assistant' %}[A]{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    ),
    "system before the last question only": (  # Mistral 7B v0.3
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        + LOOP
        + "{% if m.role == 'user' %}[INST] {% if loop.last and s %}{{ s + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    ),
    "system in the first question": (  # Llama 2
        "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ (s if loop.first else '') + m.content | trim }} [/INST]"
        "{% else %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
    ),
    "trims the first content": (
        "{% if messages[0].role == 'system' %}<|sys|>{{ messages[0]['content'] | trim }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        + HEAD
        + "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}" + CHATML_GENERATION
    ),
    "adds a text to the system message": (  # Pixtral
        "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}[INST]"
        "{% for c in m.content %}{{ c.text }}{% endfor %}[/INST]{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
        "{% endfor %}"
    ),
    "ends what is not asked": (  # Phi 3
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "channels": (  # gpt-oss
        LOOP + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}{% if m.thinking %}<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "reads reasoning": (
        LOOP
        + HEAD
        + "{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        + CHATML_GENERATION
    ),
    "no end": LOOP + "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "numbers its turns": (
        LOOP + "<{{ m.role }} {{ loop.revindex }}>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant 0>{% endif %}"
    ),
}
SYSTEM_LOST = {"raises at a system message", "no system branch", "system before the last question only"}
THOUGHT_LOST = {"drops thoughts"}
READS = {
    "empty thoughts": "reasoning_content",
    "begins to think": "reasoning_content",
    "begins without a thought": "reasoning_content",
    "channels": "thinking",
    "reads reasoning": "reasoning",
}
REFUSED = {"numbers its turns"}
"""Before an answer these write another prompt than before a question."""


def tokenizers():
    plain = tiny.tokenizer()
    merging = tiny.tokenizer(words=("ĊĊ", "ĊĊĊ", ">Ċ", "]Ġ", "Ġthe", "ink"))  # tokens may cross where an answer begins
    merging.bos_token = "<|endoftext|>"
    return {"bytes": plain, "merges": merging, "spaces": _spaced()}


def _spaced():
    """Llama's way: words begin with a mark of the space before them, and a text gets one too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*map(chr, range(33, 127)), "▁", "\n"})
    vocabulary = {"<unk>": 0, "<|im_end|>": 1, "<s>": 2} | {c: n + 3 for n, c in enumerate(letters)}
    made = Tokenizer(models.BPE(vocabulary | {"▁4": len(vocabulary)}, [("▁", "4")], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|im_end|>", bos_token="<s>", pad_token="<|im_end|>"
    )


def conversations(sweep):
    yield Prompt("p", "What is 2 + 2?")
    yield Prompt("p", "What is 2 + 2?", system="Be brief.")
    yield Prompt(
        "p",
        "And\n\nthen?",
        turns=(
            Turn("user", "Hi"),
            Turn("assistant", "Hello"),
        ),
    )
    rng = random.Random(1)
    for _ in range(sweep.size(1, 12)):
        text = lambda: "".join(rng.choices("ab 4\n<>'\"{}%[]/é漢\U0001f600", k=rng.randint(1, 12))).strip() or "a"  # noqa: E731
        turns = tuple(
            turn for _ in range(rng.randint(0, 3)) for turn in (Turn("user", text()), Turn("assistant", text()))
        )
        yield Prompt("p", text(), system=rng.choice([None, text()]), turns=turns)


def answers(sweep):
    yield from ("4", "<think>\nx\n</think>\n\n4", "", " 4", "4\n\n", "\n\n4", "a <think> b", "x</think>4")
    rng = random.Random(2)
    for _ in range(sweep.size(2, 20)):
        thought = rng.choice(["", "<think>{}</think>"]).format(rng.choice(["", "\n", "a\nb", " the "]))
        yield thought + rng.choice(["", "\n", " "]) + "".join(rng.choices("ab 4\n{}[]'\"é", k=rng.randint(0, 9)))


def said(prompt):
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [
        *system,
        *({"role": t.role, "content": t.text} for t in prompt.turns),
        {"role": "user", "content": prompt.text},
    ]


def library(tokenizer, messages, **variables):
    """The tokens of transformers, of messages with texts, lists, and texts for some roles."""
    roles = sorted({m["role"] for m in messages})
    for lists in itertools.chain.from_iterable(itertools.combinations(roles, n) for n in range(len(roles) + 1)):
        asked = [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] in lists else m for m in messages
        ]
        try:
            yield tokenizer.apply_chat_template(asked, tokenize=True, **variables)["input_ids"]
        except Exception:  # a template takes some of them
            continue


def row_of(chat, prompt, answer):
    """The tokens of prompt and answer, or None where they are refused by name."""
    try:
        tokens, cut = answer_tokens(chat, prompt, {"role": "assistant", **answer})
    except (BadPromptError, ValueError) as error:
        return None if "template" in str(error) else [-1]
    before = chat.encode(prompt)["input_ids"].tolist()
    return [*before[: len(before) - cut], *tokens]


@pytest.mark.slow
@pytest.mark.sweep("given answers in chat templates")
def test_an_answer_has_the_tokens_of_the_templates_own_rendering(sweep):
    for (kind, template), (name, tokenizer) in itertools.product(TEMPLATES.items(), tokenizers().items()):
        chat = chat_of(tokenizer, template)
        for prompt, text in itertools.product(conversations(sweep), answers(sweep)):
            found = row_of(chat, prompt, {"content": text})
            lost = (prompt.system and kind in SYSTEM_LOST) or kind in REFUSED
            may_lose = kind in THOUGHT_LOST and "</think>" in text
            whole = [*said(prompt), {"role": "assistant", "content": text}]
            right = list(library(tokenizer, whole))
            if kind == "no end":
                right = [[*ids, tokenizer.eos_token_id] for ids in right]
            ok = found is None if lost else found in right or (found is None and may_lose)
            sweep.check(ok, (kind, name, prompt, text, found and tokenizer.decode(found)))
    sweep.done()


@pytest.mark.sweep("reasoning of given answers in chat templates")
def test_reasoning_is_rendered_where_the_template_reads_it_and_refused_elsewhere(sweep):
    texts = ["x", "a\nb", "  x\n"][: sweep.size(2, 3)]
    for (kind, template), (name, tokenizer) in itertools.product(TEMPLATES.items(), tokenizers().items()):
        chat = chat_of(tokenizer, template)
        for key, thought in itertools.product(("reasoning_content", "reasoning", "thinking"), texts):
            prompt, answer = Prompt("p", "What?"), {"content": "4", key: thought}
            found = row_of(chat, prompt, answer)
            right = list(library(tokenizer, [*said(prompt), {"role": "assistant", **answer}]))
            ok = found in right if READS.get(kind) == key and kind not in REFUSED else found is None
            sweep.check(ok, (kind, name, key, thought, found and tokenizer.decode(found)))
    sweep.done()


def test_a_thought_of_an_earlier_turn_is_the_templates_to_show(tmp_path):
    tokenizer = tiny.tokenizer()
    chat = chat_of(tokenizer, TEMPLATES["begins to think"])
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello", (("reasoning_content", "x"),)))
    ids = chat.encode(Prompt("p", "And?", turns=turns))["input_ids"].tolist()
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "x"},
        {"role": "user", "content": "And?"},
    ]
    right = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert ids == right
    assert "<think>\nx\n</think>" in tokenizer.decode(ids)


@pytest.mark.parametrize("thinks", [True, False])
def test_variables_of_the_template_hold_for_answers_too(thinks):
    tokenizer = tokenizers()["merges"]
    chat = chat_of(tokenizer, TEMPLATES["empty thoughts"], enable_thinking=thinks)
    for prompt, text in itertools.product(
        conversations(Sweep("", long=False)), ("4", "<think>\nx\n</think>\n\n4", "\n4")
    ):
        whole = [*said(prompt), {"role": "assistant", "content": text}]
        assert row_of(chat, prompt, {"content": text}) in list(library(tokenizer, whole, enable_thinking=thinks))


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_answers_to_pictures_have_the_processors_tokens(tmp_path, kind):
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path / "model", kind)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("llm/chat", "vlm/chat"))
    write(tmp_path, [{"prompt": "What?", "image": "a.png", "answer": "red"}] * 2)
    begins = "{% if add_generation_prompt %}<|im_start|>assistant\n"
    for template in (None, begins):  # the second begins to think
        made = loaded(tmp_path)
        chat = (
            mmrl.load("pipelines", "vlm/chat")
            .build(made.recipe, str(tmp_path / "model"), torch.device("cpu"))
            .conditioner
        )
        if template:
            assert template in chat.saved.chat_template
            chat.saved.chat_template = chat.saved.chat_template.replace(template, template + "<think>\n")
        picture = Media("image", path=str(tmp_path / "a.png"))
        prompt = Prompt("p", "What is <image>?", media=(picture,), system="Look.")
        for text in ("red", "<think>\nx\n</think>\n\nred"):
            found = row_of(chat, prompt, {"content": text})
            messages = [
                {"role": "system", "content": [{"type": "text", "text": "Look."}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is "},
                        {"type": "image", "image": Image.open(tmp_path / "a.png")},
                        {"type": "text", "text": "?"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": text}]},
            ]
            right = chat.saved.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
            assert found == right["input_ids"][0].tolist()


# -- what templates do to messages ---


WRONG = {
    "division": LOOP + "{{ m.content }}{{ 1 // 0 }}{% endfor %}",
    "index": LOOP + "{{ m.content[99999] + 'a' }}{% endfor %}",
    "attribute": "{{ messages[0]['content'].nope() }}",
    "unsafe": LOOP + "{{ m.content }}{{ ''.__class__.__mro__ }}{% endfor %}",
    "range": LOOP + "{{ m.content }}{% for i in range(10**9) %}{% endfor %}{% endfor %}",
    "nothing": "{{ bos_token }}",
    "capitals": LOOP + "{{ m.role }}: {{ m.content | upper }}{% endfor %}",
    "printed": LOOP + "{{ m }}{% endfor %}",
    "json": LOOP + "{{ m | tojson }}{% endfor %}",
    "twice": LOOP + "{{ m.content }}{{ m.content }}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages[0].content) }}",
    "unfinished": "{% for m in messages %}{{ m.content }}",
}


@pytest.mark.sweep("system messages in chat templates")
def test_every_text_is_in_the_prompt_once_or_the_conversation_is_refused(sweep):
    tokenizer = tiny.tokenizer()
    for kind, template in (TEMPLATES | WRONG).items():
        chat = chat_of(tokenizer, template)
        for prompt in conversations(sweep):
            lost = kind in WRONG or (prompt.system and kind in SYSTEM_LOST - {"system before the last question only"})
            try:
                text = chat.render(prompt)
            except BadPromptError as error:
                sweep.check(bool(lost) and "chat template" in error.reason, (kind, prompt, error.reason))
                continue
            shown = all(m["content"] in text for m in said(prompt)) and "'type'" not in text
            right = list(library(tokenizer, said(prompt), add_generation_prompt=True))
            ids = chat.encode(prompt)["input_ids"].tolist()
            sweep.check(shown and ids in right and not lost, (kind, prompt, text))
    sweep.done()


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
SFT = ["algorithm={type: sft}", "rewards=[]", "train.group_size=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("answers")
    tiny.language_model(root / "model", max_position_embeddings=512)
    (root / "tiny.yaml").write_text(RECIPE)
    rows = [{"prompt": f"Say {c}.", "answer": c, "completion": f"<think>\nsay\n</think>\n\n{c}"} for c in "abcd"]
    write(root, rows)
    return root


def write(root, rows):
    (root / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def loaded(folder, *changes):
    return load_recipe([folder / "tiny.yaml"], list(changes))


def template_of(kind):
    return f"model.chat_template={json.dumps((TEMPLATES | WRONG)[kind])}"


def test_a_template_that_does_not_show_a_message_is_refused_by_name(folder):
    tokenizer = tiny.tokenizer()
    for kind in {*WRONG} - {"unfinished"}:
        recipe = loaded(folder, template_of(kind)).recipe
        with pytest.raises(UserError, match=r"^model\.chat_template: "):
            check_template(chat_of(tokenizer, WRONG[kind]), recipe)
    bare = loaded(folder, "sampling.system=Be brief.").recipe
    for kind, text in TEMPLATES.items():
        if kind in SYSTEM_LOST - {"system before the last question only"}:
            with pytest.raises(UserError, match=r"^sampling\.system: the chat template"):
                check_template(chat_of(tokenizer, text), bare)
        else:
            check_template(chat_of(tokenizer, text), bare)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("division", "model.chat_template"), ("no system branch", "sampling.system"), ("trims the first content", None)],
)
def test_the_plan_refuses_such_templates(folder, kind, key):
    problems = plan(loaded(folder, template_of(kind), "sampling.system=Be brief.")).problems
    assert [problem.partition(":")[0] for problem in problems] == ([key] if key else [])


def test_templates_with_names_and_no_default_are_refused_until_one_is_chosen(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = {"rag": tiny.CHATML, "tools": "{{ messages }}"}
    tiny.language_model(folder / "named", max_position_embeddings=512)
    (folder / "named" / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder / "named")
    (problem,) = plan(loaded(folder, "model.path=named")).problems
    assert "called rag, tools, and none default" in problem
    edit = "sampling.chat_template_kwargs={chat_template: rag}"
    assert edit in problem
    assert plan(loaded(folder, "model.path=named", edit)).problems == []
    assert plan(loaded(folder, "model.path=named", template_of("chatml"))).problems == []


@pytest.mark.parametrize("kind", ["drops thoughts", "numbers its turns"])
def test_answers_that_the_template_does_not_keep_are_refused_in_the_plan(folder, kind, says):
    (problem,) = plan(loaded(folder, template_of(kind), *SFT)).problems
    says(problem)
    assert plan(loaded(folder, template_of("chatml"), *SFT)).problems == []
    assert "none of 8 prompts can be used" in problem
    assert "meta['completion']" in problem


@pytest.mark.parametrize("kind", ["begins to think", "begins to think, writes as given", "begins without a thought"])
def test_the_loss_of_an_answer_is_the_librarys_of_the_whole_conversation(folder, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write(folder, [{"prompt": f"Say {c}.", "completion": f"<think>\nsay\n</think>\n\n{c}"} for c in "ab"])
    made = loaded(folder, template_of(kind), *SFT)
    run = build(made.recipe)
    row, failures = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert not failures
    model, tokenizer = (cls.from_pretrained(folder / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    tokenizer.chat_template, total, count = TEMPLATES[kind], 0.0, 0
    for prompt in run.prompts:
        messages = [{"role": "user", "content": prompt.text}]
        asked = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
        messages.append({"role": "assistant", "content": prompt.meta["completion"]})
        ids = tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
        same = next((n for n, (a, b) in enumerate(zip(asked, ids, strict=False)) if a != b), len(asked))
        labels = torch.tensor([[*[-100] * same, *ids[same:]]])
        with torch.no_grad():
            total += model(torch.tensor([ids]), labels=labels).loss.item() * (len(ids) - same)
        count += len(ids) - same
    assert row["policy/loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_mistake_of_a_template_is_no_traceback_for_a_vision_model(tmp_path):
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path / "model", "qwen3_vl")
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("llm/chat", "vlm/chat"))
    write(tmp_path, [{"prompt": "Say a.", "answer": "a"}] * 2)
    system = "sampling.system=Be brief."
    build = mmrl.load("pipelines", "vlm/chat").build
    for kind in ("trims the first content", "adds a text to the system message", "chatml, lists too", "only lists"):
        made = loaded(tmp_path, template_of(kind), system)
        with_system = mmrl.load("pipelines", "vlm/chat").build(
            made.recipe, str(tmp_path / "model"), torch.device("cpu")
        )
        text = with_system.conditioner.render(Prompt("p", "Hello", system="Be brief."))
        assert "Be brief." in text
        assert "'type'" not in text
    for kind in ("no system branch", "raises at a system message", "division"):
        made = loaded(tmp_path, template_of(kind), system)
        with pytest.raises(UserError, match=r"chat template|chat_template"):
            build(made.recipe, str(tmp_path / "model"), torch.device("cpu"))


# -- records that cannot be used ---


def test_prompts_without_an_answer_are_counted_in_the_plan(folder):
    write(folder, [{"prompt": f"Say {c}.", "answer": None if c == "d" else c} for c in "abcdefgh"])
    (problem,) = plan(loaded(folder)).problems
    assert "answer:exact compares responses with meta['answer'], and 1 of 16 prompts have none (q:4)" in problem
    edit = "rewards=[{name: answer:exact, on_failure: drop}]"
    assert "on_failure: drop" in problem
    assert plan(loaded(folder, edit)).problems == []
    (problem,) = plan(loaded(folder, "rewards=[{name: answer:exact, options: {key: truth}}]")).problems
    assert "meta['truth'], and 8 of 16 prompts have none" in problem


def test_the_plan_names_answers_and_reasoning_that_the_template_does_not_show(folder, says):
    rows = [{"prompt": f"Say {c}.", "completion": c} for c in "abc"]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "thinking": "x"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "4", "reasoning_content": "y"},
    ]
    write(folder, [*rows, {"messages": turns}])
    (problem,) = plan(loaded(folder, *SFT)).problems
    says(problem)
    assert "2 of 8 prompts looked at cannot be used (q:4, q:4)" in problem
    assert "raise data.max_bad_fraction" in problem
    made = plan(loaded(folder, *SFT, "data.max_bad_fraction=0.5"))
    assert made.problems == []
    said = "\n".join(made.notes)
    assert "2 of 8 prompts looked at cannot be used (q:4, q:4)" in said
    assert "does not show reasoning_content of message 4 (assistant)" in said
    assert "never reads thinking, which earlier turns of 2 of 8 prompts have" in said
    reads = plan(loaded(folder, template_of("begins to think"), *SFT))
    assert reads.problems == []
    assert not any("cannot be used" in note for note in reads.notes)


def test_system_messages_of_picture_recipes_are_not_shown_as_if_they_were_read(tmp_path):
    from mmrl.planner.data_check import check_recipe

    negative = [{"role": "system", "content": "Draw."}, {"role": "user", "content": " "}]
    asked = [{"role": "system", "content": "Draw."}, {"role": "user", "content": "a red circle"}]
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": asked, "negative_prompt": negative}) + "\n")
    data = f"{{path: {tmp_path}/q.jsonl, heldout: 0}}"
    changes = [f"data={{name: jsonl, train: {data}, heldout: {data}}}", "sampling.guidance_scale=4.5"]
    made = load_recipe(["shapes-full"], changes)
    found = check_recipe(made.recipe, 3, 10).splits["train"]
    (record,) = found.shown
    assert (record.text, record.system, record.settings["negative_prompt"]) == ("a red circle", None, "")
    assert found.notes == ["1 of 1 prompts looked at have a system message, and diffusion/sd3 reads none"]
    assert any("2 of 2 prompts looked at have a system message" in note for note in plan(made).notes)


def test_earlier_turns_are_not_shown_to_a_picture_recipe_as_if_they_were_read(tmp_path):
    from mmrl.planner.data_check import check_recipe

    said = [("user", "a red circle"), ("assistant", "Drawn."), ("user", "now a blue one")]
    rows = [{"prompt": [{"role": role, "content": text} for role, text in said]}, {"prompt": "a square"}]
    write(tmp_path, rows)
    data = f"{{path: {tmp_path}/q.jsonl, heldout: 0}}"
    made = load_recipe(["shapes-full"], [f"data={{name: jsonl, train: {data}, heldout: {data}}}"])
    found = check_recipe(made.recipe, 3, 10).splits["train"]
    assert {record.text for record in found.shown} == {"now a blue one", "a square"}
    assert found.notes == ["1 of 2 prompts looked at have earlier turns, and diffusion/sd3 reads none"]
    assert any("2 of 4 prompts looked at have earlier turns" in note for note in plan(made).notes)
