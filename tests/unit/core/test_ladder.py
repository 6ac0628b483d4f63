from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from quartet_core.ladder import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_STEP_BLOCKS,
    RUNGS,
    Ladder,
    Sketch,
    covered_tokens,
    decode_sketch,
    encode_sketch,
    rungs_within,
    sketch_text,
    sketch_tokens,
    token_bytes,
)


def ids(count, seed=0):
    """Token ids that look random and cost nothing to draw."""
    return [(seed * 7919 + i * 2654435761) % 150_000 for i in range(count)]


def test_rungs_stand_eight_to_the_octave_and_then_at_equal_steps():
    assert RUNGS[:12] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert RUNGS[53:60] == (262, 285, 310, 338, 368, 400, 432)
    steps = [deeper - rung for rung, deeper in pairwise(RUNGS)]
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert set(steps[57:]) == {MAX_STEP_BLOCKS} == {32}
    assert RUNGS[-1] <= MAX_BLOCKS < RUNGS[-1] + MAX_STEP_BLOCKS


@pytest.mark.parametrize(("tokens", "rungs"), [(4_096, 37), (32_768, 62), (131_072, 110), (262_144, 174)])
def test_how_many_hashes_a_prompt_takes(tokens, rungs):
    assert rungs_within(tokens) == rungs


@given(st.integers(BLOCK_TOKENS, MAX_BLOCKS * BLOCK_TOKENS))
def test_a_match_is_rounded_down_by_an_eighth_or_a_block_and_by_2048_tokens_at_most(tokens):
    covered = covered_tokens(rungs_within(tokens) - 1)
    assert covered <= tokens
    assert tokens - covered < min(tokens / 8 + BLOCK_TOKENS, 2_048)


def test_without_a_rung_nothing_is_covered():
    assert rungs_within(63) == 0
    assert covered_tokens(-1) == 0


def test_a_rung_is_the_plain_hash_of_the_prompt_so_far():
    tokens = array("I", ids(700))
    data = tokens.tobytes()
    sketch = sketch_tokens(tokens)
    assert sketch == Sketch(tuple(xxh3_64_intdigest(data[: rung * 256]) for rung in RUNGS[:10]), 700)


@given(st.integers(0, 3000), st.binary(max_size=8))
def test_all_ways_to_hand_in_tokens_give_one_sketch(count, salt):
    tokens = ids(count)
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = sketch_tokens(data, salt=salt)
    assert expected.tokens == count
    for given_as in (tokens, tuple(tokens), array("I", tokens), array("q", tokens), bytearray(data), memoryview(data)):
        assert sketch_tokens(given_as, salt=salt) == expected
    assert bytes(token_bytes(tokens)) == data


@given(st.integers(64, 3000), st.integers(0, 2999), st.binary(max_size=8))
def test_equal_prefixes_have_equal_rungs_and_any_change_shows_from_there_on(count, at, salt):
    at %= count
    tokens = ids(count)
    changed = [*tokens]
    changed[at] += 1
    before, after = sketch_tokens(tokens, salt=salt), sketch_tokens(changed, salt=salt)
    for index, (one, other) in enumerate(zip(before.rungs, after.rungs, strict=True)):
        assert (one == other) == (covered_tokens(index) <= at)


@given(st.integers(64, 2000), st.integers(64, 2000))
def test_the_longer_of_two_prompts_with_one_beginning_starts_with_the_rungs_of_the_shorter(one, other):
    short, long = sorted((one, other))
    assert sketch_tokens(ids(long)).rungs[: rungs_within(short)] == sketch_tokens(ids(short)).rungs


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_salts_part_all_rungs(one, other):
    rungs, others = sketch_tokens(ids(640), salt=one).rungs, sketch_tokens(ids(640), salt=other).rungs
    assert (set(rungs) == set(others)) == (one == other)
    assert not (set(rungs) & set(others)) or one == other


def test_a_salt_cannot_be_imitated_by_what_the_prompt_begins_with():
    data = bytes(range(256)) * 4
    assert not set(sketch_text(data[4:], salt=data[:4]).rungs) & set(sketch_text(data).rungs)


def test_256_bytes_of_text_stand_for_64_tokens():
    sketch = sketch_text(b"x" * 1030)
    assert len(sketch.rungs) == 4
    assert sketch.tokens == 257


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"], [1.5], b"12345"])
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(ValueError, match="token ids"):
        sketch_tokens(bad)


def test_beyond_the_last_rung_a_prompt_is_only_counted():
    data = bytes(MAX_BLOCKS * 256 + 4096)
    sketch = sketch_tokens(data)
    assert len(sketch.rungs) == len(RUNGS)
    assert sketch.tokens == MAX_BLOCKS * 64 + 1024
    ladder = Ladder()
    assert len(ladder.extend(data)) == len(RUNGS)
    assert ladder.extend(data) == []
    assert ladder.tokens == 2 * sketch.tokens


@given(st.integers(0, 3000), st.lists(st.integers(0, 900), max_size=12), st.binary(max_size=4))
def test_a_ladder_climbed_in_pieces_is_the_sketch_made_at_once(count, pieces, salt):
    data = array("I", ids(count)).tobytes()
    ladder, completed, start = Ladder(salt=salt), [], 0
    for end in [*sorted(4 * piece for piece in pieces), len(data)]:
        completed += ladder.extend(data[start:end])
        start = max(start, min(end, len(data)))
    expected = sketch_tokens(data, salt=salt)
    assert completed == list(enumerate(expected.rungs))
    assert ladder.rungs == len(expected.rungs)
    assert ladder.tokens == count


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_forked_ladder_goes_its_own_way(common, further):
    stem, one, other = ids(common), ids(further, seed=1), ids(further, seed=2)
    ladder = Ladder(salt=b"s")
    before = ladder.extend(token_bytes(stem))
    fork = ladder.fork()
    for branch, tail in ((ladder, one), (fork, other)):
        rungs = before + branch.extend(token_bytes(tail))
        assert tuple(rung for _, rung in rungs) == sketch_tokens(stem + tail, salt=b"s").rungs


@given(st.integers(0, 20_000), st.integers(0, 5))
def test_a_sketch_survives_its_header(count, seed):
    sketch = sketch_tokens(ids(count, seed))
    assert decode_sketch(encode_sketch(sketch)) == sketch


def test_the_sketch_of_the_longest_ladder_fits_its_header():
    sketch = Sketch(tuple(range(len(RUNGS))), MAX_BLOCKS * BLOCK_TOKENS)
    assert decode_sketch(encode_sketch(sketch)) == sketch


@given(st.text(max_size=200))
def test_a_header_that_is_no_sketch_is_refused_with_a_value_error(text):
    with pytest.raises(ValueError, match="a sketch"):
        decode_sketch(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "8-byte"),
        ("AAAA", "8-byte"),
        ("!!!!", "base64"),
        ("A" * 22_352, "characters"),
        (encode_sketch(Sketch((1, 2), 64)), "has 1 rungs"),
        (encode_sketch(Sketch((), 64)), "has 1 rungs"),
    ],
)
def test_each_fault_of_a_header_is_told(text, what):
    with pytest.raises(ValueError, match=what):
        decode_sketch(text)
