from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core import heartbeat
from quartet_core.heartbeat import Beat, BeatWorker, MalformedBeat
from quartet_heartbeat_collector.batch import from_beats

u8, u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
workers = st.lists(st.builds(BeatWorker, u8, u16, u32), max_size=9).map(tuple)
beats = st.builds(Beat, u64, u32, u64, u64, workers)


@st.composite
def damaged(draw):
    """Datagrams: genuine, cut, prolonged, with a changed byte, or noise."""
    data = heartbeat.encode(draw(beats))
    kind = draw(st.sampled_from(("genuine", "genuine", "cut", "longer", "changed", "noise", "huge")))
    if kind == "cut":
        return data[: draw(st.integers(0, len(data) - 1))]
    if kind == "longer":
        return data + draw(st.binary(min_size=1, max_size=20))
    if kind == "changed":
        at = draw(st.integers(0, min(len(data), 8) - 1))
        return data[:at] + bytes([draw(u8)]) + data[at + 1 :]
    if kind == "noise":
        return draw(st.binary(max_size=200))
    if kind == "huge":
        return data + bytes(5000)
    return data


def _rebuilt(batch):
    """The beats in a batch, by way of its columns and rows."""
    return [heartbeat.decode(batch.datagram(position)) for position in range(batch.nodes.size)]


@settings(deadline=None)
@given(st.lists(damaged(), max_size=40))
def test_a_batch_is_what_decoding_one_by_one_gives(received, datagrams):
    expected, malformed = [], Counter()
    for data in datagrams:
        try:
            expected.append(heartbeat.decode(data))
        except MalformedBeat as error:
            malformed[error.reason] += 1
    batch = received(*datagrams)
    assert batch.malformed == malformed
    assert batch.received == len(datagrams)
    assert _rebuilt(batch) == expected
    columns = (batch.nodes, batch.incarnations, batch.sequences, batch.emits_ns, batch.counts)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (beat.node, beat.incarnation, (beat.sequence ^ 1 << 63) - (1 << 63), beat.emit_ns, len(beat.workers))
        for beat in expected
    ]


@given(st.lists(beats, max_size=10))
def test_beats_that_were_never_datagrams_make_the_same_batch(beats):
    batch = from_beats(beats)
    assert _rebuilt(batch) == beats
    assert not batch.tagged
