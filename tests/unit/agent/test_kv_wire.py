"""The bytes of a transfer."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_agent.kv import wire
from quartet_agent.kv.mover import MoveError, MoveReason, chunks

SECRET = b"0123456789abcdef"


@given(st.text(min_size=1, max_size=60), st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))
def test_a_hello_says_what_it_was_told(transfer, epoch, secret):
    hello = wire.encode_hello(transfer, epoch, secret, 4096)
    read = wire.Hello(hello[: wire.HELLO.size])
    assert (read.epoch, read.secret, read.chunk_bytes) == (epoch, secret, 4096)
    assert wire.decode_name(hello[wire.HELLO.size :][: read.name_bytes]) == transfer


def test_something_else_than_a_hello_is_no_transfer():
    with pytest.raises(MoveError) as error:
        wire.Hello(b"GET / HTTP/1.1\r\n".ljust(wire.HELLO.size, b" "))
    assert error.value.reason is MoveReason.PROTOCOL


def test_names_secrets_and_chunks_of_a_wrong_size_are_not_sent():
    with pytest.raises(ValueError, match="name"):
        wire.encode_hello("", 1, SECRET, 1)
    with pytest.raises(ValueError, match="secret"):
        wire.encode_hello("t", 1, b"short", 1)
    with pytest.raises(ValueError, match="chunk"):
        wire.encode_hello("t", 1, SECRET, wire.MAX_CHUNK_BYTES + 1)


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 20))
def test_a_chunk_comes_apart_into_the_blocks_it_was_made_of(first, size, count):
    blocks = [bytes([index % 256]) * size for index in range(count)]
    read = wire.ChunkHeader(wire.encode_chunk(first, blocks, slot=2))
    assert (read.first_block, read.blocks, read.slot, read.last) == (first, count, 2, False)
    assert [bytes(block) for block in read.split(memoryview(b"".join(blocks)))] == blocks


@given(st.integers(0, 255), st.integers(0, 7))
def test_one_flipped_bit_is_noticed(byte, bit):
    header = wire.ChunkHeader(wire.encode_chunk(3, [bytes(range(256))]))
    damaged = bytearray(range(256))
    damaged[byte] ^= 1 << bit
    with pytest.raises(MoveError) as error:
        header.split(memoryview(damaged))
    assert error.value.reason is MoveReason.CHECKSUM


def test_a_chunk_in_another_place_is_as_wrong_as_a_damaged_one():
    checksum = wire.CHUNK.unpack(wire.encode_chunk(3, [b"block"]))[4]
    moved = wire.ChunkHeader(wire.CHUNK.pack(4, 1, 5, 0, checksum))
    with pytest.raises(MoveError) as error:
        moved.split(memoryview(b"block"))
    assert error.value.reason is MoveReason.CHECKSUM


def test_without_checksums_nothing_is_summed_or_compared():
    header = wire.ChunkHeader(wire.encode_chunk(0, [b"block"], checksums=False))
    assert [bytes(block) for block in header.split(memoryview(b"other"), checksums=False)] == [b"other"]
    with pytest.raises(MoveError):
        header.split(memoryview(b"block"))


@pytest.mark.parametrize(("blocks", "size"), [(1, wire.MAX_CHUNK_BYTES + 1), (3, 2), (3, 10)])
def test_impossible_sizes_are_refused_before_anything_is_read(blocks, size):
    with pytest.raises(MoveError) as error:
        wire.ChunkHeader(wire.CHUNK.pack(0, blocks, size, 0, 0))
    assert error.value.reason is MoveReason.RANGE


@pytest.mark.parametrize("reason", [None, *MoveReason])
def test_answers_arrive_as_they_were_meant(reason):
    answer = wire.encode_answer(reason)
    if reason is None:
        wire.check_answer(answer)
    else:
        with pytest.raises(MoveError) as error:
            wire.check_answer(answer)
        assert error.value.reason is reason


async def cut(blocks, chunk_bytes):
    return [chunk async for chunk in chunks(blocks, chunk_bytes)]


SIZES = st.lists(st.integers(1, 9), max_size=40)


@given(SIZES, st.integers(1, 20))
def test_chunks_hold_every_block_once_in_order_and_within_bounds(sizes, chunk_bytes):
    blocks = [bytes(size) for size in sizes]
    seen = []
    for first, group in asyncio.run(cut(blocks, chunk_bytes)):
        assert first == len(seen)
        assert len({len(block) for block in group}) == 1
        assert len(group) == 1 or sum(map(len, group)) <= chunk_bytes
        seen.extend(group)
    assert seen == blocks


@given(st.lists(SIZES, max_size=6), st.integers(1, 20))
def test_no_chunk_waits_for_the_next_batch_and_an_empty_one_is_a_sign_of_life(batches, chunk_bytes):
    async def source():
        for sizes in batches:
            yield [bytes(size) for size in sizes]

    seen, at = asyncio.run(cut(source(), chunk_bytes)), 0
    ends = set()
    for sizes in batches:
        at += len(sizes)
        ends.add(at)
    assert sum(not group for _, group in seen) == sum(not sizes for sizes in batches)
    sent = 0
    for first, group in seen:
        assert first == sent
        assert not ends & set(range(first + 1, first + len(group)))
        sent += len(group)
    assert [len(block) for _, group in seen for block in group] == [size for sizes in batches for size in sizes]


def test_a_sender_that_waits_is_told_from_one_that_is_done():
    waits, last = wire.ChunkHeader(wire.STILL_HERE), wire.ChunkHeader(wire.LAST_CHUNK)
    assert (waits.waits, waits.last, last.waits, last.last) == (True, False, False, True)
    chunk = wire.ChunkHeader(wire.encode_chunk(3, [b"x"], slot=1))
    assert (chunk.waits, chunk.last) == (False, False)
