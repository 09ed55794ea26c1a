"""What endpoints send back: structured answers, parts, filters, cut answers, packed bodies, long waits."""

import asyncio
import gzip
import json
import time
import tracemalloc
import zlib

import pytest

import mmrl
from mmrl.core.reply_bytes import ReplyBytes, ReplyError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging import remote
from mmrl.rewards.judging.answers import Json, Ranking, WrongSteps, schema_of
from mmrl.rewards.judging.remote import response_format
from tests.support import judging

NUMBER = {"type": "number", "min": 0, "max": 10}
SCHEMA = {"properties": {"score": {"type": "integer", "minimum": 0, "maximum": 10}}, "required": ["score"]}
JSON = {"type": "json", "schema": SCHEMA}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_BACKOFF_S", 0.01)


def choice(content, end="stop", **more):
    return {"message": {"role": "assistant", "content": content}, "finish_reason": end, **more}


def saying(*choices, refuses=()):
    """An endpoint that answers with the choices in turn, the last one for ever; 400 for a form that it ``refuses``."""
    left = list(choices)

    def before(handler, body):
        if body is None:
            return False
        form = body.get("response_format", {}).get("type")
        if form in refuses:
            handler.say(400, json.dumps({"error": {"message": "bad request"}}))
            return True
        handler.say(200, json.dumps({"choices": [left.pop(0) if len(left) > 1 else left[0]]}))
        return True

    return before


def judge(server, rubric="{{ response }}", **options):
    return mmrl.load("rewards", "judge:score")({"url": server.url, "name": "tiny"}, rubric, **options)


def score(one, *texts, **context):
    made = [Sample(Prompt("p", "what"), SampleId(3, 1, 0, k), text=text) for k, text in enumerate(texts)]
    return asyncio.run(one.score(made, context=Context(**context)))["score"]


def reason(before, **options):
    with judging.Served(before=before) as server:
        (failed,) = score(judge(server, **{"answer": NUMBER, "retries": 2, **options}), "a")
        assert isinstance(failed, Failed)
        return failed.reason, len(server.requests)


# ---- structured answers


@pytest.mark.parametrize(
    ("refuses", "forms"),
    [
        ((), ["json_schema", "json_schema"]),
        (("json_schema",), ["json_schema", "json_object", "json_object"]),
        (("json_schema", "json_object"), ["json_schema", "json_object", None, None]),
    ],
)
def test_an_object_is_asked_for_by_its_schema_and_what_is_refused_is_remembered(refuses, forms):
    with judging.Served(before=saying(choice('{"score": 7}'), refuses=refuses)) as server:
        one = judge(server, answer=JSON, cache=False)
        assert [score(one, text) for text in ("a", "b")] == [[0.7], [0.7]]
        asked = [body.get("response_format") for body in server.requests]
    assert [form and form["type"] for form in asked] == forms
    named = asked[0]["json_schema"]
    assert named == {"name": "verdict", "schema": {"type": "object", **SCHEMA}, "strict": False}


def test_a_refusal_for_another_reason_is_told_and_not_remembered():
    def before(handler, body):
        if body is None:
            return False
        long = body["messages"][0]["content"] == "long"
        text = '{"error": "too long"}' if long else json.dumps({"choices": [choice('{"score": 7}')]})
        handler.say(400 if long else 200, text)
        return True

    with judging.Served(before=before) as server:
        one = judge(server, answer=JSON, cache=False)
        (failed,) = score(one, "long")
        assert "answered 400: " in failed.reason
        assert "too long" in failed.reason
        assert score(one, "short") == [0.7]
        assert server.requests[-1]["response_format"]["type"] == "json_schema"


def test_extra_fields_decide_over_the_schema_and_numbers_are_asked_for_plainly():
    with judging.Served(before=saying(choice('{"score": 7}'))) as server:
        model = {"url": server.url, "name": "tiny", "extra": {"response_format": None}}
        assert score(mmrl.load("rewards", "judge:score")(model, "{{ response }}", answer=JSON), "a") == [0.7]
        assert score(judge(server, answer=NUMBER), "b") == [0.7]
    assert not any("response_format" in body for body in server.requests)


def test_the_schemas_of_rankings_and_steps():
    ranking, steps = schema_of(Ranking(), 3), schema_of(WrongSteps(), 2)
    assert ranking["properties"]["ranking"]["minItems"] == ranking["properties"]["ranking"]["maxItems"] == 3
    assert steps["properties"]["wrong"] == {
        "type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 2}, "minItems": 0, "maxItems": 2,
    }  # fmt: skip
    assert response_format("json_schema", ranking)["response_format"]["json_schema"]["strict"]
    inner = {**SCHEMA, "additionalProperties": False, "properties": {"a": SCHEMA}, "required": ["a"]}
    assert not response_format("json_schema", schema_of(Json(inner), 0))["response_format"]["json_schema"]["strict"]


# ---- texts


def test_content_in_parts_is_read_without_its_thoughts():
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}, {"type": "text", "text": "Score: "}]
    with judging.Served(before=saying(choice([*parts, {"type": "text", "text": "7"}]))) as server:
        assert score(judge(server, answer=NUMBER), "a") == [0.7]
    why, asked = reason(saying(choice([{"type": "refusal", "refusal": "no"}])))
    assert "a choice without text" in why
    assert asked == 1


@pytest.mark.parametrize("end", ["length", "max_tokens", "MAX_TOKENS", "abort"])
def test_an_answer_that_was_cut_is_no_verdict(end):
    why, asked = reason(saying(choice("7", end)))
    assert "was not finished, cut " in why
    assert asked == 3, "asked again"
    with judging.Served(before=saying(choice('{"score": 9}', end), choice('{"score": 2}'))) as server:
        assert score(judge(server, answer=JSON), "a") == [0.2]


def test_a_content_filter_is_asked_once_and_says_what_it_found():
    found = {"hate": {"filtered": False, "severity": "safe"}, "violence": {"filtered": True, "severity": "high"}}
    for answer in (NUMBER, JSON, {"type": "yes_no"}):
        why, asked = reason(saying(choice("7", "content_filter", content_filter_results=found)), answer=answer)
        assert asked == 1
        assert "stopped the answer by its content filter" in why
        assert '"violence": {"filtered": true, "severity": "high"}' in why
        assert "hate" not in why
    why, asked = reason(saying(choice("", "content_filter")))
    assert (asked, "content filter (finish_reason content_filter)" in why) == (1, True)


def test_a_thought_in_place_of_yes_and_no_is_no_verdict():
    said = [("So", -0.58), ("Got", -0.83), ("Okay", -9.9), ("Yes", -13.1), ("No", -15.0)]
    top = [{"token": token, "logprob": log_prob} for token, log_prob in said]
    before = saying(choice("So", "length", logprobs={"content": [{**top[0], "top_logprobs": top}]}))
    why, asked = reason(before, answer={"type": "yes_no"})
    assert "with a probability of only 2.4e-06" in why
    assert "'So' -0.5800" in why
    assert asked == 1


# ---- bodies


def packed(body, **headers):
    def before(handler, asked):
        if asked is not None:
            assert handler.headers["Accept-Encoding"] == "identity"
            handler.say(200, body, **headers)
        return asked is not None

    return before


def test_a_packed_reply_that_is_too_long_is_refused_without_being_unpacked():
    packer, zeros = zlib.compressobj(1, wbits=31), bytes(1 << 20)
    body = b"".join([*(packer.compress(zeros) for _ in range(400)), packer.flush()])
    assert len(body) < 4 << 20
    with judging.Served(before=packed(body, Content_Encoding="gzip")) as server:
        one = judge(server, answer=NUMBER, retries=0)
        tracemalloc.start()
        (failed,) = score(one, "a")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "a reply of more than 8,388,608 bytes" in failed.reason
    assert most < 4 * remote.MAX_BYTES


def in_two(body):
    return gzip.compress(body[:9]) + gzip.compress(body[9:])


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, in_two])
def test_a_packed_reply_is_read(pack):
    name = "deflate" if pack is zlib.compress else "gzip"
    body = pack(json.dumps({"choices": [choice("7")]}).encode())
    with judging.Served(before=packed(body, Content_Encoding=name)) as server:
        assert score(judge(server, answer=NUMBER), "a") == [0.7]


@pytest.mark.parametrize(
    ("body", "encoding", "why"),
    [(b"7", "gzip", "cannot be unpacked"), (b"7", "br", "in the encoding 'br', which was not asked for")],
)
def test_a_reply_in_another_packing_is_a_named_failure(body, encoding, why):
    assert why in reason(packed(body, Content_Encoding=encoding))[0]


def test_a_list_of_models_has_the_same_limit():
    def before(handler, body):
        handler.say(200, gzip.compress(bytes(64 << 20)), Content_Encoding="gzip")
        return True

    with judging.Served(before=before) as server, pytest.raises(mmrl.UserError, match="more than 8,388,608 bytes"):
        judge(server, answer=NUMBER)


def test_pieces_of_any_size_give_the_same_body():
    body = bytes(range(256)) * 50
    for size in (1, 7, 4096):
        for encoding, sent in (("", body), ("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
            reply = ReplyBytes(encoding, len(body) + 1000)
            for at in range(0, len(sent), size):
                reply.add(sent[at : at + size])
            assert reply.whole() == body
    short = ReplyBytes("gzip", len(body) - 1)
    with pytest.raises(ReplyError, match="more than"):
        short.add(gzip.compress(body))


# ---- waits


def test_an_endpoint_that_asks_for_a_longer_wait_than_the_run_has_fails_at_once(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    def busy(handler, body):
        if body is not None:
            handler.say(429, "slow down", Retry_After="99999999")
        return body is not None

    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    with judging.Served(before=busy) as server:
        began = time.monotonic()
        (failed,) = score(judge(server, answer=NUMBER, retries=3), "a", patience=4.0)
        assert time.monotonic() - began < 500
        assert len(server.requests) == 1
    assert "it asks to wait 1e+08 s, over scoring.patience" in failed.reason
    assert not slept
    with judging.Served(before=busy) as server:
        score(judge(server, answer=NUMBER, retries=1), "a", patience=600.0)
        assert len(server.requests) == 2
    assert 60.0 in slept
