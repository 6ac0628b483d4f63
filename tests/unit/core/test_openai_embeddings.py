"""Embeddings bodies: what is an input, what is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.openai import Endpoint, Refused, parse

TEXTS = st.text(min_size=1).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


def body(inputs: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "input": inputs, **fields}).encode()


@given(st.one_of(TEXTS, st.lists(TEXTS, min_size=1, max_size=5)))
def test_texts_are_one_prompt_together(inputs):
    inference = parse(body(inputs))
    assert inference.endpoint is Endpoint.EMBEDDINGS
    assert not inference.stream
    whole = inputs if isinstance(inputs, str) else "\0".join(inputs)
    assert inference.prompt_text == whole.encode()


@given(st.one_of(IDS, st.lists(IDS, min_size=1, max_size=5)))
def test_token_ids_are_one_prompt_together(inputs):
    flat = inputs if isinstance(inputs[0], int) else [token for each in inputs for token in each]
    inference = parse(body(inputs))
    assert inference.prompt_ids == flat
    assert inference.prompt_tokens == len(flat)


NO_INPUTS = ["", [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, "a"], [-1], [2**32], [[1], "a"], 7, {}, None]


@pytest.mark.parametrize("inputs", NO_INPUTS)
def test_what_is_no_input_is_400_and_named(inputs):
    with pytest.raises(Refused) as refused:
        parse(body(inputs))
    assert (refused.value.status, refused.value.body.param) == (400, "input")


def test_embeddings_do_not_stream():
    with pytest.raises(Refused) as refused:
        parse(body("x", stream=True))
    assert refused.value.body.param == "stream"
