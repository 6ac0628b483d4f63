import json
import threading

import pytest

from quartet_bus.config.schema import ModelSection
from quartet_core import openai
from quartet_core.ladder import sketch_text, sketch_tokens
from quartet_core.openai import Endpoint, Refused
from quartet_core.salt import salt_of
from quartet_gateway.prompt import THREAD_FROM_BYTES, Inexact, read_inference, sketch_prompt

TEXT = ModelSection(spec="s")
TOKENS = ModelSection(spec="s", sketch="tokens")


def chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


@pytest.mark.parametrize(
    "text",
    [rb"cut \ud83d", rb"\uDE00 alone", rb"\ud83d\ude00 whole, \ud83d\u0041 not", rb"\\ud83d escaped, \\\ud83d not"],
)
async def test_half_a_surrogate_pair_is_named_with_its_place(text):
    body = b'{"model":"m","prompt":"' + text + b'"}'
    with pytest.raises(Refused, match=r"at byte [0-9]+ is half of a surrogate pair") as refused:
        await read_inference(body, Endpoint.COMPLETIONS)
    place = int(str(refused.value).split("at byte ")[1].split()[0])
    with pytest.raises(UnicodeEncodeError):
        json.loads(b'"' + body[place : place + 6] + b'"').encode()
    whole = body[:place] + body[place + 6 :]
    assert (await read_inference(whole, Endpoint.COMPLETIONS)).prompt_text == json.loads(whole)["prompt"].encode()


async def test_what_looks_like_half_a_pair_behind_a_backslash_is_text():
    body = rb'{"model":"m","prompt":"\\ud83d \ud83d\ude00"}'
    assert (await read_inference(body, Endpoint.COMPLETIONS)).prompt_text == b"\\ud83d " + "\U0001f600".encode()
    with pytest.raises(Refused, match="truncated"):
        await read_inference(body[:-1], Endpoint.COMPLETIONS)


async def refusal(body: bytes, endpoint: Endpoint) -> tuple[int, str | None]:
    with pytest.raises(Refused) as refused:
        await read_inference(body, endpoint)
    return refused.value.status, refused.value.body.param


async def test_a_body_is_read_for_its_own_endpoint_only():
    assert (await read_inference(chat("hello"), Endpoint.CHAT)).model == "m"
    assert await refusal(chat("hello"), Endpoint.COMPLETIONS) == (400, "prompt")
    assert await refusal(b'{"model": "m", "prompt": "hello"}', Endpoint.CHAT) == (400, "messages")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "", "messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (chat("x", stream="yes"), "stream"),
        (chat("x", max_tokens=0), "max_tokens"),
    ],
)
async def test_a_wrong_body_is_400_and_names_the_field(body, field):
    assert await refusal(body, Endpoint.CHAT) == (400, field)


async def test_text_is_sketched_as_text_and_ids_as_ids():
    inference = openai.parse(chat("x" * 4000))
    prompt = await sketch_prompt(inference, b"", "t", "m", TEXT)
    assert prompt.sketch == sketch_text(inference.prompt_text)
    assert prompt.tokens == inference.prompt_tokens
    assert not prompt.inexact
    ids = list(range(500))
    body = json.dumps({"model": "m", "prompt": ids}).encode()
    prompt = await sketch_prompt(openai.parse(body), body, "t", "m", TOKENS)
    assert prompt.sketch == sketch_tokens(ids)
    assert prompt.tokens == 500
    assert not prompt.inexact


async def test_text_for_a_model_that_wants_tokens_is_marked_inexact():
    body = chat("x" * 4000)
    prompt = await sketch_prompt(openai.parse(body), body, "t", "m", TOKENS)
    assert prompt.inexact is Inexact.NO_TOKENIZER


async def test_isolated_tenants_and_adapters_share_no_rung():
    inference = openai.parse(chat("x" * 4000))
    isolated = ModelSection(spec="s", isolation=True)
    adapter = ModelSection(spec="s", base="b")
    sketches = [
        (await sketch_prompt(inference, b"", tenant, model, section)).sketch
        for tenant, model, section in (
            ("t1", "m", TEXT),
            ("t1", "m", isolated),
            ("t2", "m", isolated),
            ("t1", "a", adapter),
        )
    ]
    rungs = [rung for sketch in sketches for rung in sketch.rungs]
    assert len(set(rungs)) == len(rungs)
    assert sketches[0] == (await sketch_prompt(inference, b"", "t2", "m", TEXT)).sketch


def test_the_salt_is_empty_exactly_when_everything_may_be_shared():
    assert salt_of("t", "m", isolated=False, adapter=False) == b""
    salts = [
        salt_of("t", "m", isolated=True, adapter=False),
        salt_of("t", "m", isolated=False, adapter=True),
        salt_of("t", "m", isolated=True, adapter=True),
        salt_of("m", "t", isolated=True, adapter=True),
    ]
    assert len({*salts, b""}) == 5


async def test_long_bodies_are_read_in_a_thread_and_short_ones_are_not(monkeypatch):
    where = []

    def parse(body: bytes) -> openai.Inference:
        where.append(threading.current_thread() is threading.main_thread())
        return original(body)

    original = openai.parse
    monkeypatch.setattr(openai, "parse", parse)
    await read_inference(chat("x"), Endpoint.CHAT)
    await read_inference(chat("x" * THREAD_FROM_BYTES), Endpoint.CHAT)
    assert where == [True, False]
