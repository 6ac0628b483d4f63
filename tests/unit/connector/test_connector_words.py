"""Frames between agent and connector, and what an engine is known to have cached."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_connector.contents import Root, blocks_of, chain, token_bytes
from quartet_connector.known import Known
from quartet_connector.words import (
    MAX_FRAME_BYTES,
    Ask,
    BadFrame,
    Drop,
    Frames,
    Keep,
    Pin,
    Release,
    Return,
    Stored,
    Want,
    agent_word,
    engine_word,
    frame,
)

u64 = st.integers(0, 2**64 - 1)
ids = st.lists(u64, max_size=5)
slots = st.lists(st.integers(0, 2**31), max_size=5)
words = st.one_of(
    st.builds(Ask, st.integers(0, 99)),
    st.builds(Want, st.integers(0, 99)),
    st.builds(Pin, st.text(max_size=9), ids, st.booleans()),
    st.builds(Keep, st.text(max_size=9), slots),
    st.builds(Return, slots),
    st.builds(Release, st.text(max_size=9)),
    st.builds(Drop, st.text(max_size=9)),
)


@given(st.lists(words, max_size=6), st.lists(st.integers(1, 40), max_size=40))
def test_words_come_as_they_were_said_however_the_stream_is_cut(said, cuts):
    data = b"".join(frame(word) for word in said)
    frames, heard = Frames(), []
    for cut in [*cuts, len(data)]:
        heard += [agent_word(body) for body in frames.feed(data[:cut])]
        data = data[cut:]
    assert heard == said


@given(st.binary(max_size=60))
def test_noise_is_a_bad_frame_or_no_word(data):
    try:
        for body in Frames().feed(data):
            with pytest.raises(msgspec.DecodeError):
                agent_word(body)
            with pytest.raises(msgspec.DecodeError):
                engine_word(body)
    except BadFrame:
        assert int.from_bytes(data[:4], "little") > MAX_FRAME_BYTES


def test_an_agents_word_is_not_an_engines():
    assert engine_word(frame(Stored(1, 2, b"", ("s", "")))[4:]) == Stored(1, 2, b"", ("s", ""))
    with pytest.raises(msgspec.ValidationError, match="ask"):
        engine_word(frame(Ask(1))[4:])


def seen(known, tokens, now_ms, root=None):
    root = root or Root()
    blocks = blocks_of(token_bytes(tokens), 2)
    named = chain(root, blocks)
    known.see(root, named, blocks, [str(each).encode() for each in named], now_ms)
    return named


def test_the_coldest_are_chains_ends_and_a_longer_chain_takes_the_shorter_ones_place():
    known = Known(100)
    seen(known, [1, 2, 3, 4], 1.0)
    other = seen(known, [9, 9], 2.0)
    longer = seen(known, [1, 2, 3, 4, 5, 6], 3.0)
    assert [block.id for block in known.coldest(9)] == [other[-1], longer[-1]]
    assert [block.id for block in known.chain(longer[-1])] == longer
    assert known.drain_returns() == [2.0]
    assert known.get(longer[0]).uses == 1
    assert known.chain(5) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=40), st.integers(1, 12))
def test_it_is_bounded_and_every_chain_is_whole(history, most):
    known = Known(most)
    for now_ms, (seed, blocks) in enumerate(history):
        seen(known, [seed if index > 3 else 0 for index in range(2 * blocks)], float(now_ms))
        assert len(known) <= most
        for block in known.coldest(99):
            assert not block.children
            chained = known.chain(block.id)
            assert chained[0].root is not None
            assert [each.parent for each in chained[1:]] == chained[:-1]
            assert known.by_hash(block.hash) is block
