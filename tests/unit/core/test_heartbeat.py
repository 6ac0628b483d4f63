import contextlib
from hashlib import blake2b, blake2s

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.heartbeat import (
    HEADER,
    MAX_WORKERS,
    TAG_BYTES,
    TAG_OFFSET,
    WORKER,
    WORKERS_OFFSET,
    Beat,
    BeatWorker,
    BeatWriter,
    MalformedBeat,
    Reason,
    beat_tag,
    claimed_node,
    decode,
    encode,
    node_hash,
    node_key,
)

U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
WORKERS = st.lists(st.builds(BeatWorker, U8, U16, U32), max_size=12).map(tuple)
BEATS = st.builds(Beat, U64, U32, U64, U64, WORKERS)
KEYS = st.binary(min_size=1, max_size=32)
BEAT = Beat(node_hash("h100-0"), 7, 42, 1_000, (BeatWorker(0, 3, 0xDEADBEEF), BeatWorker(5, 1, 9)))


@given(BEATS, st.none() | KEYS)
def test_a_beat_survives_the_wire(beat, key):
    assert decode(encode(beat, key), [key] if key else ()) == beat


def test_the_layout_is_the_documented_one():
    datagram = encode(BEAT)
    assert (TAG_OFFSET, TAG_BYTES, WORKERS_OFFSET, HEADER.size, WORKER.size) == (32, 8, 40, 32, 8)
    assert datagram == (
        b"QB\x01\x02"
        + (7).to_bytes(4, "little")
        + blake2b(b"h100-0").digest()[:8]
        + (42).to_bytes(8, "little")
        + (1_000).to_bytes(8, "little")
        + bytes(8)
        + bytes.fromhex("0000 0300 efbeadde")
        + bytes.fromhex("0500 0100 09000000")
    )


@given(st.binary(max_size=400), st.lists(KEYS, max_size=2))
def test_random_bytes_are_malformed_and_nothing_worse(data, keys):
    with pytest.raises(MalformedBeat) as caught:
        decode(data, keys)
    assert caught.value.reason in Reason


@given(BEATS, st.data())
def test_a_mutated_beat_is_a_beat_or_malformed_and_nothing_worse(beat, data):
    datagram = bytearray(encode(beat))
    for _ in range(data.draw(st.integers(1, 4))):
        datagram[data.draw(st.integers(0, len(datagram) - 1))] = data.draw(U8)
    del datagram[data.draw(st.integers(0, len(datagram))) :]
    with contextlib.suppress(MalformedBeat):
        again = decode(datagram)
        assert encode(again)[:TAG_OFFSET] == datagram[:TAG_OFFSET]


@given(BEATS, KEYS, st.data())
def test_no_changed_bit_passes_a_tag(beat, key, data):
    datagram = bytearray(encode(beat, key))
    bit = data.draw(st.integers(0, 8 * len(datagram) - 1))
    datagram[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedBeat):
        decode(datagram, [key])


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", Reason.LENGTH),
        (encode(BEAT)[:39], Reason.LENGTH),
        (encode(BEAT)[:-1], Reason.LENGTH),
        (encode(BEAT) + b"\0", Reason.LENGTH),
        (b"XX" + encode(BEAT)[2:], Reason.MAGIC),
        (b"QB\x02" + encode(BEAT)[3:], Reason.VERSION),
        (encode(BEAT), Reason.TAG),
        (encode(BEAT, b"other"), Reason.TAG),
    ],
)
def test_each_fault_has_its_reason(datagram, reason):
    with pytest.raises(MalformedBeat) as caught:
        decode(datagram, [b"key"])
    assert caught.value.reason is reason


def test_while_the_master_key_changes_beats_of_both_pass_and_those_of_a_third_do_not():
    old, new, third = (node_key(master, "n1") for master in (b"old", b"new", b"third"))
    for key in (old, new):
        assert decode(encode(BEAT, key), [old, new]) == BEAT
    with pytest.raises(MalformedBeat):
        decode(encode(BEAT, third), [old, new])


def test_a_node_s_key_is_its_own_and_comes_from_the_master():
    assert node_key(b"master", "n1") == blake2s(b"n1", key=b"master").digest()
    assert node_key(b"master", "n1") != node_key(b"master", "n2")


@pytest.mark.parametrize("key", [b"", bytes(33)])
def test_a_key_of_no_length_or_too_much_is_refused_wherever_it_is_given(key):
    for use in (
        lambda: node_key(key, "n1"),
        lambda: encode(BEAT, key),
        lambda: BeatWriter(1, 1, key),
        lambda: decode(encode(BEAT, b"key"), [key]),
    ):
        with pytest.raises(ValueError, match="1 to 32 bytes"):
            use()


@pytest.mark.parametrize(
    "beat",
    [
        Beat(1 << 64, 0, 0, 0, ()),
        Beat(0, 1 << 32, 0, 0, ()),
        Beat(0, 0, -1, 0, ()),
        Beat(0, 0, 0, 0, (BeatWorker(0, 1 << 16, 0),)),
        Beat(0, 0, 0, 0, (BeatWorker(0, 0, 0),) * (MAX_WORKERS + 1)),
    ],
)
def test_a_value_without_room_is_refused_by_the_writer(beat):
    with pytest.raises(ValueError, match="no room"):
        encode(beat)


@given(st.lists(BEATS, min_size=2, max_size=4), st.none() | KEYS)
def test_one_writer_s_beats_do_not_leak_into_each_other(beats, key):
    writer = BeatWriter(1, 2, key)
    for beat in beats:
        same = Beat(1, 2, beat.sequence, beat.emit_ns, beat.workers)
        written = bytes(writer.write(same.sequence, same.emit_ns, same.workers))
        assert written == encode(same, key)


def test_who_sent_a_datagram_can_be_asked_before_it_is_believed():
    assert claimed_node(encode(BEAT)) == BEAT.node
    assert claimed_node(b"short") is None


def test_the_tag_does_not_depend_on_the_tag_in_place():
    assert beat_tag(encode(BEAT), b"key") == beat_tag(encode(BEAT, b"key"), b"key")


@given(st.lists(st.tuples(st.none() | WORKERS, st.integers(0, 2**64 - 1)), max_size=8))
def test_a_writer_that_is_given_no_workers_says_those_of_before(calls):
    writer, last = BeatWriter(1, 2, b"key"), []
    for sequence, (workers, emit_ns) in enumerate(calls):
        last = last if workers is None else workers
        written = bytes(writer.write(sequence, emit_ns, workers))
        assert written == encode(Beat(1, 2, sequence, emit_ns, tuple(last)), b"key")
