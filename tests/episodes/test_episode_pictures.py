"""Pictures in what an environment answers: their tokens, their pixels, and the faults of those who show them.

The oracle is the processor's own ``apply_chat_template`` on the whole conversation.
"""

import io
import json
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.loader import load_recipe
from mmrl.core.episode import Action, Episode, Exchange, Observation
from mmrl.core.errors import UserError
from mmrl.core.media import BadMediaError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot
from mmrl.episodes.environment import observations
from mmrl.episodes.journal import Journal
from mmrl.episodes.shown import content_of
from mmrl.logging.rundir import RunDir
from mmrl.logging.texts import write_texts
from mmrl.models.policy import Policy
from mmrl.models.text.features import with_told
from mmrl.models.text.retold import Past, Teller
from mmrl.models.text.template_probe import TemplateFaultError
from mmrl.planner.plan import plan
from mmrl.rewards.judging.rubric import Rubric
from tests.support import processors, tiny
from tests.support.episode_pictures import KINDS, chat, kind, path, picture, rows_of, tiny_recipe, worlds  # noqa: F401
from tests.support.episodes import SMALL, played, written

allow_cpu_only()
pytest.importorskip("torchvision")


def spelling(draw, saved, marks):
    """A text that may spell control tokens; not ``marks``: nor what stands for a picture or clip in a prompt."""
    names = {*(str(token) for token in saved.tokenizer.added_tokens_decoder.values()), "<image>", "<video>", "{{ x }}"}
    names = sorted(names if marks else names - {"<image>", "<video>"})
    return " ".join(draw.choice([*names, "a", "two words", "17", "<", "|>"]) for _ in range(draw.randint(1, 5)))


def message(draw, saved, role, neutral):
    """A message with up to three pictures: its parts, and as the oracle is given it, with a neutral word in place of
    each text; ``neutral``: the texts by their words."""
    parts, given = [], []
    for what in draw.choices(["text", "image"], k=draw.randint(1, 4)):
        if what == "image" and sum(not isinstance(part, str) for part in parts) < 3:
            parts.append(picture(draw))
            given.append({"type": "image", "image": parts[-1]})
        elif not (parts and isinstance(parts[-1], str)):
            word = f"zq{len(neutral)}zq"
            neutral[word] = spelling(draw, saved, marks=bool(neutral))
            parts.append(neutral[word])
            given.append({"type": "text", "text": word})
    return parts, {"role": role, "content": given}


def told_tokens(saved, ids, neutral):
    """``ids`` with the tokens of each text in place of its neutral word, a character at a time."""
    tokenizer = saved.tokenizer

    def letters(text):
        return [token for letter in text for token in tokenizer(letter, add_special_tokens=False).input_ids]

    for word, text in neutral.items():
        of = letters(word)
        at = [n for n in range(len(ids)) if ids[n : n + len(of)] == of]
        assert len(at) == 1
        ids = [*ids[: at[0]], *letters(text), *ids[at[0] + len(of) :]]
    return ids


def asked(draw, saved, neutral):
    """A prompt with a picture or none, and as the oracle is given it."""
    media, word = ([picture(draw)] if draw.random() < 0.6 else []), f"zq{len(neutral)}zq"
    neutral[word] = spelling(draw, saved, marks=False)
    made = tuple(content_of([one])[0] for one in media)
    given = [*({"type": "image", "image": one} for one in media), {"type": "text", "text": word}]
    return Prompt("p", "<image>" * len(media) + neutral[word], media=made), {"role": "user", "content": given}


def conversation(draw, made, neutral):
    """A random episode in tokens as the product makes them: the row, the row with one placeholder for each picture, the
    features; and the whole conversation as the oracle is given it."""
    saved, stop = made.saved, made.stop_tokens
    prompt, first = asked(draw, saved, neutral)
    features = made.encode(prompt)
    row, unexpanded, shown, said = features["input_ids"].tolist(), [*made.unexpanded(prompt)], [], [first]
    for turn in range(draw.randint(1, 4)):
        answer, role = f"said {turn}", draw.choice(["user", "tool"])
        wrote = written(saved.tokenizer, answer, stop=draw.random() < 0.7)
        row, unexpanded = [*row, *wrote], [*unexpanded, *wrote]
        messages = [message(draw, saved, role, neutral) for _ in range(draw.randint(1, 2))]
        said += [
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            *(given for _, given in messages),
        ]
        told = made.told(role, [content_of(parts) for parts, _ in messages]).behind(row, stop)
        if told.features:
            shown.append((len(row), told.features))
        row, unexpanded = [*row, *told.tokens], [*unexpanded, *told.unexpanded]
    return row, unexpanded, with_told(features, shown), said


@pytest.mark.sweep("pictures that are told, in the processors of three families")
def test_a_row_is_what_the_processor_makes_of_the_whole_conversation(sweep):
    pytest.importorskip("num2words")
    for family in KINDS:
        draw, saved = random.Random(0), processors.processor(family)
        of = saved.image_token_id
        made = chat.Chat(saved, [saved.tokenizer.eos_token_id], {}, forbidden=[of])
        for n in range(sweep.size(8, 500)):
            neutral = {}
            row, unexpanded, features, said = conversation(draw, made, neutral)
            whole = saved.apply_chat_template(
                said, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            expected = told_tokens(saved, whole["input_ids"][0].tolist(), neutral)
            show = saved.tokenizer.decode
            sweep.check(row == expected, f"{family} {n}: {show(row)!r}, not {show(expected)!r}")
            for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
                alike = name not in whole or torch.equal(features[name], whole[name])
                sweep.check(alike, f"{family} {n}: other {name}")
            if "mm_token_type_ids" in whole:
                kinds = features["mm_token_type_ids"].tolist()
                kinds += [0] * (len(row) - len(kinds))
                sweep.check(kinds == [int(token == of) for token in row], f"{family} {n}: kinds of tokens")
            pictures = sum(part["type"] == "image" for one in said for part in one["content"])
            sweep.check(sum(token == of for token in unexpanded) == pictures, f"{family} {n}: placeholders")
    sweep.done()


def anew(draw, made, prompt, neutral, teller, role):
    """A random episode whose turns may have thoughts, as it is told anew: its row and features; and what was said
    behind the prompt, as the oracle is given it."""
    saved, past, said = made.saved, [], []
    for turn in range(draw.randint(1, 4)):
        answer, thought = f"said {turn}", draw.choice(["", f"so {turn} </think>", "</think> "])
        wrote = written(saved.tokenizer, thought + answer, stop=draw.random() < 0.7)
        messages = [message(draw, saved, role, neutral) for _ in range(draw.randint(1, 2))]
        contents = [content_of(parts) for parts, _ in messages]
        past.append(Past(wrote, thought + answer, contents, teller.told(contents)))
        shown = (thought + answer).split("</think>")[-1]
        said.append({"role": "assistant", "content": [{"type": "text", "text": shown}]})
        said += [given for _, given in messages]
    features, found, shown = made.encode(prompt), teller.retold(prompt, past), []
    ids = features["input_ids"].tolist()
    row = ids[: len(ids) - found.gone]
    for _, told in found.parts:
        shown += [(len(row), told.features)] if told.features else []
        row += told.tokens
    return row, with_told(features, shown), said


@pytest.mark.sweep("episodes with pictures told anew, in the processors of three families")
def test_a_row_that_is_told_anew_is_what_the_processor_makes_without_thoughts(sweep):
    pytest.importorskip("num2words")
    for family in KINDS:
        draw, saved = random.Random(1), processors.processor(family)
        plain = saved.chat_template
        saved.chat_template = plain.replace("c['text']", "c['text'].split('</think>')[-1]")
        assert saved.chat_template != plain
        made = chat.Chat(saved, [saved.tokenizer.eos_token_id], {}, forbidden=[saved.image_token_id])
        for n in range(sweep.size(6, 500)):
            neutral, role = {}, draw.choice(["user", "tool"])
            prompt, first = asked(draw, saved, neutral)
            teller = Teller(made, role, partial(made.told, role), renews=True)
            row, features, said = anew(draw, made, prompt, neutral, teller, role)
            whole = saved.apply_chat_template(
                [first, *said],
                chat_template=plain,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            expected, show = told_tokens(saved, whole["input_ids"][0].tolist(), neutral), saved.tokenizer.decode
            sweep.check(row == expected, f"{family} {n}: {show(row)!r}, not {show(expected)!r}")
            for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
                alike = name not in whole or torch.equal(features[name], whole[name])
                sweep.check(alike, f"{family} {n}: other {name}")
    sweep.done()


def replayed(pipeline, rows):
    return pipeline.replay(rows, [0], frozenset({"log_probs"}), None)["log_probs"]


def test_the_same_log_probs_in_sampling_and_in_training(path, worlds):
    pipeline, rows = rows_of(path, worlds)
    assert [len(one.pictures) for one in rows.episodes] == [3] * 4  # the last of them behind the last turn
    mask = rows.padded("action_mask")
    assert ((replayed(pipeline, rows) - rows.padded("log_probs")) * mask).abs().max() < 2e-5
    pipeline.features.close()  # as on another device of the controller: made again of the episode
    pipeline.encode(rows.slots)
    again = replayed(pipeline, rows)
    assert ((again - rows.padded("log_probs")) * mask).abs().max() < 2e-5
    for number in range(4):
        alone = rows.rows([number])
        assert (replayed(pipeline, alone)[0] - again[number, : alone.width]).abs().max() < 2e-5


def test_log_probs_are_those_of_the_whole_conversation(path, worlds):
    pipeline, rows = rows_of(path, worlds, ["I look", "And on", "Once more", "It is red"])
    found = replayed(pipeline, rows)
    for number, episode in enumerate(rows.episodes):
        whole = inputs_of(pipeline, rows.slots[number].prompt, episode)
        row = rows.rows([number])
        assert gap_to_whole(pipeline, whole, row, found[number]) < 2e-5


def gap_to_whole(pipeline, whole, row, found):
    """By how much log-probs of a row are off those of the model on ``whole``, what the processor made."""
    ids, n = whole["input_ids"][0], row.prompts[0]
    assert torch.equal(ids[: len(row.tokens)], row.tokens)
    with torch.no_grad():
        logits = pipeline.policy(**whole).logits[0].float()
    logits[:, pipeline.conditioner.forbidden] = -torch.inf
    expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[n - 1 : len(row.tokens) - 1, 0]
    return (found[: row.responses[0]] - expected)[row.action_mask[n:]].abs().max()


def test_pictures_are_shown_again_where_thoughts_are_left_out(path, worlds):
    """Every text of an episode is what the processor makes of the conversation until its last turn, without the
    thoughts before that one."""
    plain = chat.build(tiny_recipe(path, worlds), str(path), torch.device("cpu"))
    template = str(plain.conditioner.saved.chat_template)
    assert "c['text']" in template
    template = template.replace("c['text']", "c['text'].split('</think>')[-1]")
    written = ["so </think>I look", "And on", "no </think>Once more", "It is red"]
    pipeline, rows = rows_of(path, worlds, written, template=template, new=30, history="template")
    texts = rows.sequences
    assert len(texts) == 3 * len(rows)
    pipeline.features.close()  # as on another device of the controller: made again of the episode
    pipeline.encode(rows.slots)
    found = replayed(pipeline, texts)
    for number in range(len(texts)):
        episode, row = texts.episodes[number], texts.rows([number])
        *before, last = episode.turns[: (1, 3, 4)[number % 3]]
        short = [replace(one, action=Action(one.action.text.split("</think>")[-1])) for one in before]
        whole = inputs_of(plain, rows.slots[number // 3].prompt, replace(episode, turns=(*short, last)))
        assert gap_to_whole(pipeline, whole, row, found[number]) < 2e-5
    mask = rows.padded("action_mask")
    assert torch.equal(replayed(pipeline, rows)[mask], rows.rejoined(found)[mask])


def test_of_earlier_turns_only_the_last_are_seen(path, worlds):
    written = ["I look", "And on", "Once more", "It is red"]
    pipeline, rows = rows_of(path, worlds, written, history_length=1)
    texts = rows.sequences
    assert len(texts) == 3 * len(rows)
    assert [len(row.tokens) < rows.responses[0] for row in (texts.rows([1]), texts.rows([2]))] == [True, True]
    found = replayed(pipeline, texts)
    for number in range(len(texts)):
        episode, row, first = texts.episodes[number], texts.rows([number]), number % 3
        seen = replace(episode, turns=episode.turns[first : first + 2])
        assert (
            gap_to_whole(pipeline, inputs_of(pipeline, rows.slots[number // 3].prompt, seen), row, found[number]) < 2e-5
        )
        assert len(row.tokens[row.action_mask]) == sum(len(t.action.tokens) for t in seen.turns[first > 0 :])


def inputs_of(pipeline, prompt, episode):
    """The model's arguments for the whole conversation, by its processor."""

    def parts(content):
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": Image.open(io.BytesIO(part.data)).convert("RGB")}
            for part in content
        ]

    text = re.sub("^(<image>)+", "", prompt.text)
    said = [{"role": "user", "content": parts([*prompt.media, text])}]
    for one in episode.turns:
        said.append({"role": "assistant", "content": parts([one.action.text])})
        told = one.told if one is not episode.turns[-1] else ()
        said += [{"role": pipeline.world.role, "content": parts(observation.parts)} for observation in told]
    return pipeline.conditioner.saved.apply_chat_template(said, tokenize=True, return_dict=True, return_tensors="pt")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("bomb", "12000 x 12000 pixels"),
        ("bytes", "12000 x 12000 pixels"),
        ("broken", "not a readable picture|none of PNG"),
        ("type", "an environment answers with a text, a picture"),
        ("many", "it showed 9 pictures|showed 9 pictures, and environment.max_pictures is 4"),
    ],
)
def test_a_picture_that_cannot_be_shown_ends_its_episode(tmp_path, worlds, how, why):
    path = tiny.vision_model(tmp_path / "model", "qwen2_5_vl")
    _, rows = rows_of(path, worlds, ["I look"], options={"how": how}, max_pictures=4)
    assert [one.end for one in rows.episodes] == ["failed"] * 4
    assert all(re.search(why, one.failure) for one in rows.episodes), rows.episodes[0].failure


def test_what_reset_shows_is_in_the_prompt(tmp_path, worlds):
    path = tiny.vision_model(tmp_path / "model", "qwen2_5_vl")
    _, rows = rows_of(path, worlds, ["I look"], options={"how": "first"}, max_turns=1)
    first, second = rows.slots[0].prompt, rows.slots[2].prompt
    assert (first.text, len(first.media)) == ("<image>What is it?\n\nLook.<image>", 2)
    assert (second.text, len(second.media)) == ("No picture yet.\n\nLook.<image>", 1)


def test_a_picture_for_a_model_of_text_is_refused_in_the_plan_or_ends_the_episode(worlds):
    section = f"environment={{name: '{worlds}:World', max_tokens: 90}}"
    llm = mmrl.load("pipelines", "llm/chat")
    for name in (section, section.replace(":World", ":draw")):
        loaded = load_recipe(["sums"], [*SMALL, name])
        recipe = loaded.recipe
        with pytest.raises(UserError, match="shows pictures, and the model reads only text; take a vision-language"):
            llm.describe(recipe, recipe.model.path, None)
        assert "shows pictures, and the model reads only text" in "\n".join(plan(loaded).problems)
    silent = worlds.with_name("silent.py")
    silent.write_text(worlds.read_text().replace("pictures = True", ""))
    section = section.replace("worlds.py", "silent.py")
    _, _, rows = played(load_recipe(["sums"], [*SMALL, section]), [("4", True, "stop")])
    assert rows.episodes[0].end == "failed"
    assert "the model reads only text" in rows.episodes[0].failure


def test_families_whose_pictures_are_not_known_are_refused(tmp_path, worlds):
    saved = processors.processor("llava_onevision")
    made = chat.Chat(saved, [saved.tokenizer.eos_token_id], {}, forbidden=[saved.image_token_id])
    made.no_pictures = chat.untested("llava_onevision")
    with pytest.raises(
        BadMediaError, match="models of type llava_onevision; take one of qwen2_5_vl, qwen3_vl, smolvlm"
    ):
        made.told("user", [content_of([Image.new("RGB", (32, 32))])])


def test_a_template_that_leaves_pictures_out_is_refused():
    saved = processors.processor("qwen2_5_vl")
    saved.chat_template = saved.chat_template.replace("<|image_pad|>", "")
    made = chat.Chat(saved, [saved.tokenizer.eos_token_id], {}, forbidden=[saved.image_token_id])
    with pytest.raises(TemplateFaultError, match="shows 0 of 1 pictures"):
        made.told("user", [content_of([Image.new("RGB", (32, 32)), "x"])])


def test_contents_are_texts_and_pictures():
    red = Image.new("RGB", (4, 4), "red")
    (made,) = content_of([{"type": "image", "image": red}])
    assert made == content_of(red)[0] == content_of([made])[0]
    assert content_of(["a", {"type": "text", "text": "b"}]) == "ab"
    (one,) = observations(["a", red])
    assert (one.text, one.pictures) == ("a<image>", [made])
    assert observations(Observation(red)) == observations([Observation([red])]) == observations(red)
    for wrong in (17, [red, 17], {"type": "image"}, {"type": "image", "image": "/etc/passwd"}):
        with pytest.raises(TypeError, match="an environment answers with"):
            observations(wrong)
    with pytest.raises(ValueError, match="data: URL"):
        observations({"type": "image", "image": "data:image/png;base64,?"})


def test_check_plays_it(worlds):
    def failed(options):
        found = results(environments.checks(environments.case_of(f"{worlds}:World", options)), None)
        return {one.name: one.said for one in found if one.outcome == "FAILED"}

    assert not failed({})
    assert "12000 x 12000" in failed({"how": "bomb"})["every turn is answered"]
    assert "readable picture" in failed({"how": "broken"})["every turn is answered"]


def test_judges_and_saved_samples_show_what_was_seen(tmp_path):
    red, blue = (content_of(Image.new("RGB", (4, 4), colour)) for colour in ("red", "blue"))
    turns = (
        Exchange(Action("zoom"), (Observation(("a ", *red, " b")), Observation(blue))),
        Exchange(Action("circle"), (Observation(reward=1.0, done=True),)),
    )
    episode = Episode(turns)
    assert episode.text == "zoom\n-> a <image> b\n-> <image>\ncircle"
    assert episode.pictures == [*red, *blue]
    one = Sample(Prompt("p", "What?"), SampleId(0, 0, 0, 0), text="circle", episode=episode)
    shown = Rubric("{{ prompt }} {{ response }}", "pointwise").render([one])
    assert [part if isinstance(part, str) else part.getpixel((0, 0)) for part in shown] == [
        "What? zoom\n-> a ", (255, 0, 0), " b\n-> ", (0, 0, 255), "\ncircle",
    ]  # fmt: skip
    assert Rubric("{{ response_text }}", "pointwise").render([one]) == (episode.text.replace("<image>", "< image>"),)
    with RunDir.create(tmp_path / "run") as run:
        write_texts(run, 0, [one], [{"x": 1.0}])
        (row,) = json.loads((run.samples / "step_000000.json").read_text())["samples"]
        assert row["text"] == episode.text
        assert [Image.open(run.samples / name).getpixel((0, 0)) for name in row["pictures"]] == [
            (255, 0, 0),
            (0, 0, 255),
        ]


SHORT = [*SMALL[:-2], "train.micro_batch_size=4", "data.train={size: 16}", "data.heldout={size: 16}"]


def test_a_run_trains_on_what_it_was_shown(tmp_path, worlds):
    for row in figures_of(tmp_path / "run", worlds):
        assert row["policy/first_ratio_max_dev"] <= 1e-5
        assert row["mismatch/log_prob_gap_max"] < 1e-4
        assert row["episode/turns"] == 3
        assert row["episode/failed"] == 0


@pytest.mark.slow
def test_vllm_is_shown_the_same(tmp_path, worlds):
    pytest.importorskip("vllm")
    for row in figures_of(tmp_path / "run", worlds, "rollout.engine=vllm"):
        assert row["mismatch/log_prob_gap_max"] < 5e-4
        assert row["episode/turns"] == 3
        assert row["episode/failed"] == 0


@pytest.mark.slow
@pytest.mark.sweep("episodes with pictures through vLLM")
def test_rows_of_vllm_are_whole_conversations(sweep, worlds):
    """Tokens and log-probs of what vLLM sampled, against the processor and the model on the whole conversation."""
    pytest.importorskip("vllm")
    changes = [f"environment={{name: '{worlds}:World', max_turns: 4, max_tokens: 400}}", "rollout.engine=vllm"]
    changes += ["sampling={max_new_tokens: 10, temperature: 1.5}", "model.dtype=float32"]
    loaded = load_recipe(["scenes"], changes)
    pipeline = chat.build(loaded.recipe, loaded.recipe.model.path, torch.device("cpu"))
    policy = Policy(pipeline.policy, loaded.recipe.optim, 1)
    prompts = mmrl.load("datasets", loaded.recipe.data.name).prompts("train", size=50)
    try:
        pipeline.sync(policy)
        for part in range(sweep.size(1, 50)):
            slots = [Slot(part, n, 0, prompt) for n, prompt in enumerate(prompts[:20])]
            pipeline.encode(slots)
            rows = pipeline.sample(slots, [SampleId(part, n, 0, 0) for n in range(20)], [], part)
            for n, episode in enumerate(rows.episodes):
                compare_whole(sweep, pipeline, rows.rows([n]), episode)
    finally:
        pipeline.close()
    sweep.done()


def compare_whole(sweep, pipeline, row, episode):
    saved, stop = pipeline.conditioner.saved, pipeline.conditioner.stop_tokens
    neutral = [replace(one, action=Action(f"zq{n}zq")) for n, one in enumerate(episode.turns)]
    whole = inputs_of(pipeline, row.slots[0].prompt, replace(episode, turns=tuple(neutral)))
    ids = whole.pop("input_ids")[0].tolist()
    for n, one in enumerate(episode.turns):
        of = saved.tokenizer(f"zq{n}zq", add_special_tokens=False).input_ids
        (at,) = [k for k in range(len(ids)) if ids[k : k + len(of)] == of]
        wrote = [*one.action.tokens]
        ids = [*ids[:at], *(wrote[:-1] if wrote[-1] in stop else wrote), *ids[at + len(of) :]]
    tokens, told = row.tokens.tolist(), sum(segment.features is not None for segment in row.segments[0][1:])
    sweep.check(ids[: len(tokens)] == tokens, f"{row.ids}: {saved.tokenizer.decode(tokens)!r}")
    sweep.check(
        told + len(row.slots[0].prompt.media) >= 2 or len(episode.turns) < 4, f"{row.ids}: {told} pictures told"
    )
    if ids[: len(tokens)] != tokens:
        return
    kinds = {"mm_token_type_ids": torch.isin(row.tokens, torch.tensor(pipeline.conditioner.forbidden)).long()[None]}
    shown = {name: of for name, of in whole.items() if name not in ("attention_mask", "mm_token_type_ids")}
    with torch.no_grad():
        more = kinds if "mm_token_type_ids" in whole else {}
        logits = pipeline.policy(input_ids=row.tokens[None], **shown, **more).logits[0].float()
    logits[:, pipeline.conditioner.forbidden] = -torch.inf
    found = (logits / 1.5).log_softmax(-1)[:-1].gather(1, row.tokens[1:, None])[:, 0]
    apart = (found - row.log_probs[1:])[row.action_mask[1:]].abs().max()
    sweep.check(apart <= 5e-4, f"{row.ids}: log-probs {apart:.1e} apart")


@pytest.mark.slow
def test_two_devices_train_on_the_same(tmp_path, worlds):
    pytest.importorskip("ray")
    alone = figures_of(tmp_path / "one", worlds)
    both = figures_of(tmp_path / "two", worlds, "devices_per_controller=2")
    for row, other in zip(alone, both, strict=True):
        for name in ("reward/mean", "episode/turns", "text/length", "policy/loss", "mismatch/log_prob_gap"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name


def figures_of(run, worlds, *changes):
    """The metrics of two steps of ``scenes`` in which an environment shows pictures."""
    section = f"environment={{name: '{worlds}:World', max_turns: 3, max_tokens: 400}}"
    mmrl.train("scenes", changes=[*SHORT, section, *changes], rewards=["environment"], out=run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    return rows


def test_a_journal_keeps_pictures(tmp_path):
    told = observations([Observation(["a ", Image.new("RGB", (4, 4), "red")], reward=0.5), Observation("b")])
    key = SampleId(0, 1, 0, 2)
    journal = Journal(tmp_path / "run")
    journal.tells(key, 1, "x", told, "")
    kept = Journal(tmp_path / "run").answer(key, 1, "x")
    assert kept is not None
    assert kept.told == told


@pytest.mark.slow
def test_a_model_learns_to_look_closer(tmp_path):
    """The short form of the proof: the whole recipe over three seeds is in benchmarks/log."""
    mmrl.train("scenes-zoom", changes=["train.steps=5", "eval.every=5", "eval.samples=128"], out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert rows[-1]["reward/exact"] > rows[0]["reward/exact"] + 0.05
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["policy/first_ratio_max_dev"] <= 1e-5 for row in figures)
