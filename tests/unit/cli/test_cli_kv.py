"""``quartet kv``, against a real coordinator behind its door."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.bus import Message
from quartet_bus.config.schema import Config, KvSection, ModelSection
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    ColdPrefix,
    KvCommand,
    KvLayout,
    KvPressure,
    KvReply,
    LinkInfo,
    NodeInventory,
    PoolState,
    StreamId,
    TransferPlan,
    TransferReason,
    WorkerInfo,
)
from quartet_cli.__main__ import main
from quartet_cli.kv_costs import rows
from quartet_kv_coordinator.book import TransferView
from quartet_kv_coordinator.door import CoordinatorDoor, serve
from quartet_kv_coordinator.service import CoordinatorService
from quartet_rpc.v1 import coordinator_pb2 as pb

PAGE = Path(__file__).parents[3] / "docs" / "kv-costs.md"


def inventory(node: str, hardware: str) -> NodeInventory:
    info = WorkerInfo(
        id=f"{node}-0", ordinal=0, incarnation=1, hardware=hardware, model="chat", precision="fp8", tp=1, gpus=(0,),
        kv_tokens=100_000, max_context=131_072, max_batch=8, chunk_tokens=2048,
        layout=KvLayout(16, 131_072, "bf16"), engine="simulated", capabilities=("export", "import", "reserve"),
    )  # fmt: skip
    return NodeInventory(node, 1, 1, (info,), links=(LinkInfo("TCP", 9.0, 1.0),))


async def _commanded(*commands: tuple[str, ...], seconds: float = 20.0) -> list[tuple[int, str, str]]:
    """Each command's exit code and output, while a coordinator knows two nodes and one transfer."""
    broker = MemoryBroker()
    config = Config(kv=KvSection(grpc="127.0.0.1:0", coordinator_silence_ms=50.0, lease_ms=60_000.0))
    config.models["chat"] = ModelSection("llama-3.1-8b")
    service = CoordinatorService(MemoryBus(broker), config, instance="c0", random=Random(1))
    bus = MemoryBus(broker)

    def grant(message: Message) -> None:
        command = msgspec.msgpack.decode(message.data, type=KvCommand)
        bus.publish(message.reply, msgspec.msgpack.encode(KvReply(True, command.transfer, "", 1, "b:1", b"secret")))

    await bus.subscribe(subjects.kv_command("b").subject, grant)
    await service.start()
    for node in (inventory("a", "H100_SXM5"), inventory("b", "L40S_PCIE")):
        bus.publish(subjects.inventory(node.node).subject, msgspec.msgpack.encode(node))
    await asyncio.sleep(1.5)
    plan = TransferPlan(
        "t1", TransferReason.SPLIT, StreamId("r"), "chat", "a-0", 1, "b-0", 1, 64, 8_388_608, 60_000.0, tenant="acme"
    )
    bus.publish(subjects.kv_plan().subject, msgspec.msgpack.encode(plan))
    await asyncio.sleep(0.05)
    found = []
    async with serve(service) as door:
        for command in commands:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "quartet_cli", "kv", *command, "--coordinator", door.address,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            async with asyncio.timeout(seconds):
                out, err = await child.communicate()
            found.append((child.returncode, out.decode(), err.decode()))
    await service.stop()
    return found


async def test_links_are_listed_and_moving_is_weighed_against_computing():
    links, quick, slow, wrong = await _commanded(
        ("links",), ("plan", "a-0", "b-0", "4096"), ("plan", "a-0", "b-0", "64", "--deadline-ms", "0.5"),
        ("plan", "a-0", "nobody", "64"),
    )  # fmt: skip
    assert links[0] == 0
    assert "not measured yet" in links[1]
    assert " TCP " in links[1]
    assert (quick[0], quick[1]) == (0, "537 MB over TCP: 60.7 ms; computed: 208.7 ms. Move it.\n")
    assert slow[0] == 1
    assert "would_miss_deadline" in slow[1]
    assert wrong[0] == 1
    assert "unknown_worker: nobody" in wrong[1]


async def test_the_pool_is_shown_or_said_to_be_off():
    off, parts, as_json = await _pool(False), *(await _pool(True, "", "--json"))
    assert off == ["the pool is off: [kv] pool = true turns it on (docs/pool.md)\n"]
    assert "pressed" in parts
    assert "stayed: no_room 1" in parts
    (part,) = json.loads(as_json)["parts"]
    assert (part["worker"], part["tier"], part["empty_tokens"], part["cached_tokens"]) == (
        "a-0", "H100_SXM5", "160", "80000",
    )  # fmt: skip


async def _pool(on: bool, *options: str) -> list[str]:
    """What ``quartet kv pool`` prints of one worker that is nearly full, with nowhere to go."""
    config = Config(kv=KvSection(grpc="127.0.0.1:0", coordinator_silence_ms=50.0, pool=on))
    config.models["chat"] = ModelSection("llama-3.1-8b")
    broker = MemoryBroker()
    service, bus = CoordinatorService(MemoryBus(broker), config, instance="c0", random=Random(1)), MemoryBus(broker)
    await service.start()
    await asyncio.sleep(1.5)
    bus.publish(subjects.inventory("a").subject, msgspec.msgpack.encode(inventory("a", "H100_SXM5")))
    if on:
        state = PoolState("a-0", 1, 5100, 10, 5000, True, (ColdPrefix(7, 32_000, 9e4),))
        bus.publish(subjects.kv_pressure().subject, msgspec.msgpack.encode(KvPressure("a", 1, (state,))))
    await asyncio.sleep(0.2)
    printed = []
    async with serve(service) as door:
        for option in options or ("",):
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "quartet_cli", "kv", "pool", *option.split(), "--coordinator", door.address,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            async with asyncio.timeout(20.0):
                printed.append((await child.communicate())[0].decode())
    await service.stop()
    return printed


async def test_transfers_are_listed_cancelled_once_and_no_more():
    listed, cancelled, again = await _commanded(("transfers",), ("cancel", "t1"), ("cancel", "none-such"))
    assert listed[0] == 0, listed
    assert "t1" in listed[1]
    assert "a-0" in listed[1]
    assert (cancelled[0], cancelled[1]) == (0, "t1 is aborted\n")
    assert again[0] == 1
    assert "none-such" in again[2]


async def test_a_watcher_is_told_of_every_state(monkeypatch):
    service = _coordinator()
    views = [[], [_view("t1", "reserved")], [_view("t1", "moving"), _view("t2", "reserved")], [_view("t1", "released")]]
    monkeypatch.setattr(service, "transfers", lambda: views.pop(0) if len(views) > 1 else views[0])
    monkeypatch.setattr("quartet_kv_coordinator.door.WATCH_S", 0.001)
    seen = []
    async with asyncio.timeout(10):
        async for view in CoordinatorDoor(service).WatchTransfers(pb.WatchTransfersRequest(), None):
            seen.append((view.transfer, view.state))
            if len(seen) == 4:
                break
    assert seen == [("t1", "reserved"), ("t2", "reserved"), ("t1", "moving"), ("t1", "released")]


def _view(transfer: str, state: str) -> TransferView:
    return TransferView(
        transfer, "split", state, "r", "a-0", "b-0", 64, 1, 1, 0.0, 0.0, 0.0, 1, "TCP", "", state != "released", 0.0
    )


def _coordinator() -> CoordinatorService:
    return CoordinatorService(MemoryBus(MemoryBroker()), Config(), instance="c0", random=Random(1))


def test_a_coordinator_that_is_not_there_is_said_so(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["kv", "links", "--coordinator", "127.0.0.1:1"])
    assert ending.value.code == 1
    assert "no coordinator at 127.0.0.1:1" in capsys.readouterr().err


def test_the_page_has_the_table_that_the_command_prints():
    assert "\n".join(rows()) in PAGE.read_text()
