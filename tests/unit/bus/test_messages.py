"""What is decoded is in range, whoever sent it; what our own services may say is never refused."""

import math
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus import messages
from quartet_bus.messages import (
    ColdPrefix,
    FleetDelta,
    KvCommand,
    KvLayout,
    LinkInfo,
    NodeInventory,
    NodeStamp,
    WorkerInfo,
    WorkerState,
)

LAYOUT = KvLayout(16, 131_072, "bf16")
WORKER = WorkerInfo("n-0", 0, 1, "H100", "m", "bf16", 1, (0,), 1000, 1000, 8, 512, LAYOUT, "e", step_ms=8.5)
NODE = NodeInventory("n", 7, 2, (WORKER,), links=(LinkInfo("rdma", 40.0, 0.1),))

STRUCTS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
]
UNBOUNDED = {(NodeStamp, "emit_ns"), (KvCommand, "prefix"), (ColdPrefix, "prefix"), (ColdPrefix, "paged")}


def _decoded(message, kind=None):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind or type(message))


def _numbers(kind):
    """Name and bare type of every number of ``kind``, and whether it has a range."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        if bare in (int, float):
            yield name, bare, hint is not bare


def _bounds(kind, name):
    [meta] = typing.get_args(typing.get_type_hints(kind, include_extras=True)[name])[1:]
    return meta.ge, meta.le


NUMBERS = [(kind, name, bare) for kind in STRUCTS for name, bare, _ in _numbers(kind) if (kind, name) not in UNBOUNDED]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_number_on_the_bus_has_a_range(kind):
    assert [name for name, _, ranged in _numbers(kind) if not ranged and (kind, name) not in UNBOUNDED] == []


@pytest.mark.parametrize(("kind", "name", "bare"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_number_out_of_its_range_is_refused_and_its_ends_are_not(kind, name, bare):
    hint = typing.get_type_hints(kind, include_extras=True)[name]
    decode = msgspec.msgpack.Decoder(hint).decode
    low, high = _bounds(kind, name)
    for good in (low, high):
        assert decode(msgspec.msgpack.encode(good)) == good
    bad = [low - 1, high + 1] if bare is int else [math.nan, math.inf, -math.inf, math.nextafter(high, math.inf)]
    for value in bad:
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "inventory",
    [
        msgspec.structs.replace(NODE, incarnation=-1),
        msgspec.structs.replace(NODE, epoch=-1),
        msgspec.structs.replace(NODE, workers=(msgspec.structs.replace(WORKER, step_ms=math.nan),)),
        msgspec.structs.replace(NODE, workers=(msgspec.structs.replace(WORKER, ordinal=256),)),
        msgspec.structs.replace(NODE, workers=(msgspec.structs.replace(WORKER, gpus=(0, -1)),)),
        msgspec.structs.replace(NODE, workers=(msgspec.structs.replace(WORKER, kv_tokens=1 << 63),)),
        msgspec.structs.replace(NODE, links=(LinkInfo("rdma", math.inf, 0.1),)),
    ],
)
def test_an_inventory_that_nobody_can_use_is_unreadable(inventory):
    assert _decoded(NODE) == NODE
    with pytest.raises(msgspec.ValidationError):
        _decoded(inventory)


@given(st.integers(0, 2**64 - 1))
def test_a_nodes_own_clock_never_costs_a_delta(emit_ns):
    """It comes from a datagram, and is relayed: whatever it is, the others' states beside it must arrive."""
    delta = FleetDelta("c", 1, 1, (WorkerState("n-0", 1, 5, 9, 0),), (NodeStamp("n", 7, 9, emit_ns),))
    assert _decoded(delta) == delta
