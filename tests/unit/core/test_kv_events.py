"""KV events as they were received from vLLM, and the older form."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.kv_events import Cleared, MalformedEvents, Removed, Stored, decode

pack = msgspec.msgpack.encode

# As received from vLLM 0.32.0 on the CPU.
STORED = {
    "type": "BlockStored", "block_hashes": [16426678413101807475], "parent_block_hash": None,
    "token_ids": list(range(268, 300)), "block_size": 32, "lora_id": None, "medium": "GPU", "lora_name": None,
    "extra_keys": [["tenant-a"]], "group_idx": 0, "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
REMOVED = {"type": "BlockRemoved", "block_hashes": [16524746590368483791], "medium": "GPU", "group_idx": 0}


def test_events_as_maps_are_read():
    batch = decode(pack([1795955403.758, [STORED, REMOVED, {"type": "AllBlocksCleared"}], 3]))
    assert batch.rank == 3
    assert batch.unknown == 0
    stored, removed, cleared = batch.events
    assert isinstance(stored, Stored)
    assert stored.hashes == [16426678413101807475]
    assert (stored.parent, stored.block_tokens, stored.medium, stored.keys) == (None, 32, "GPU", [["tenant-a"]])
    assert removed == Removed([16524746590368483791], "GPU", 0)
    assert cleared == Cleared()


def test_events_as_arrays_of_older_engines_are_read_the_same():
    stored = ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"]
    batch = decode(pack([1.0, [stored, ["BlockRemoved", [7]], ["AllBlocksCleared"]]]))
    assert batch.rank == 0
    assert [type(event) for event in batch.events] == [Stored, Removed, Cleared]
    assert batch.events[0].token_ids == [1, 2, 3, 4]


def test_hashes_may_be_bytes_and_fields_may_be_unknown():
    event = STORED | {"block_hashes": [b"\x01" * 32], "locality": "LOCAL", "session_id": "s"}
    assert decode(pack([1.0, [event], None])).events[0].hashes == [b"\x01" * 32]


def test_events_that_say_nothing_to_us_are_counted():
    odd = [
        {"type": "BlockMoved", "x": 1},
        ["BlockMoved", 1],
        STORED | {"token_ids": [1, 2]},
        STORED | {"extra_keys": []},
    ]
    batch = decode(pack([1.0, [*odd, REMOVED]]))
    assert batch.unknown == 4
    assert len(batch.events) == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", pack("text"), pack([1.0]), pack([1.0, 5]), pack([1.0, [5]]), pack([1.0, [REMOVED], "rank"]),
     pack([1.0, [{"type": "BlockRemoved", "block_hashes": "no"}]]), pack([1.0, [["BlockStored", [1]]]]),
     pack([1.0, [{"block_hashes": [1]}]])],
)  # fmt: skip
def test_what_is_no_batch_is_malformed(payload):
    with pytest.raises(MalformedEvents):
        decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_malformed(payload):
    with contextlib.suppress(MalformedEvents):
        decode(payload)
