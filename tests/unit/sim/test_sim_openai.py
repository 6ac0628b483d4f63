"""The simulated engine answers in OpenAI's shapes, whatever is in the text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.openai import Refused, parse
from quartet_sim.openai import AnswerWriter, read_options

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": [1, 2, 3]}


def writer(body, model="m", id="x-1"):
    data = json.dumps(body).encode()
    inference = parse(data)
    return AnswerWriter(inference, model, id, 1_700_000_000, read_options(data, inference))


@given(st.text(), st.text(), st.text())
def test_a_chat_streams_role_then_text_then_reason(text, model, id):
    answer = writer(CHAT | {"stream": True}, model, id)
    chunks = [json.loads(chunk) for chunk in (answer.first(), answer.token(text), *answer.last("stop", 5, 0, 1))]
    head = {"id": id, "object": "chat.completion.chunk", "created": 1_700_000_000, "model": model}
    bare = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks == [
        head | {"choices": [bare | {"delta": {"role": "assistant", "content": ""}}]},
        head | {"choices": [bare | {"delta": {"content": text}}]},
        head | {"choices": [bare | {"delta": {}, "finish_reason": "stop"}]},
    ]


def test_a_completion_streams_text_and_no_role():
    answer = writer(COMPLETION | {"stream": True})
    assert answer.first() is None
    head = {"id": "x-1", "object": "text_completion", "created": 1_700_000_000, "model": "m"}
    assert json.loads(answer.token(" the")) == head | {
        "choices": [{"index": 0, "text": " the", "logprobs": None, "finish_reason": None}]
    }
    (last,) = answer.last("length", 3, 0, 1)
    assert json.loads(last)["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
def test_usage_comes_last_when_asked_for_and_is_null_before(body):
    answer = writer(body | {"stream": True, "stream_options": {"include_usage": True}})
    before = [chunk for chunk in (answer.first(), answer.token("a")) if chunk]
    *ends, usage = answer.last("stop", 48, 32, 7)
    assert all(json.loads(chunk)["usage"] is None for chunk in before + ends)
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"] == {
        "prompt_tokens": 48,
        "completion_tokens": 7,
        "total_tokens": 55,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (CHAT, "chat.completion", {"message": {"role": "assistant", "content": ' a"b'}}),
        (COMPLETION, "text_completion", {"text": ' a"b'}),
    ],
)
def test_a_whole_answer_is_one_object(body, kind, said):
    answer = json.loads(writer(body).whole([" a", '"b'], "stop", 3, 0, 2))
    assert answer["object"] == kind
    assert answer["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "stop"} | said]
    assert answer["usage"]["total_tokens"] == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("echo", True),
        ("logprobs", True),
        ("logprobs", 5),
        ("stream_options", {"include_usage": True}),  # without stream
        ("stream_options", 7),
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(field, value):
    with pytest.raises(Refused) as refused:
        writer(COMPLETION | {field: value})
    assert refused.value.status == 400
    assert field in refused.value.body.message


def test_a_client_that_set_a_limit_is_known():
    for body, limited in ((COMPLETION, False), (COMPLETION | {"max_tokens": 3}, True)):
        data = json.dumps(body).encode()
        assert read_options(data, parse(data)).limited is limited
