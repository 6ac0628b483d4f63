"""The collector as it is deployed: a process, a broker, multicast on loopback, and a ring."""

import asyncio
import os
import random
import signal
import socket
import sys

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.messages import ControlReply, FleetDelta, FleetSnapshot, KvLayout, NodeInventory, WorkerInfo
from quartet_bus.nats_bus import NatsBus
from quartet_bus.ring import RingReader
from quartet_core.heartbeat import Beat, BeatWorker, encode, node_hash, node_key
from quartet_core.verdict import Verdict
from quartet_core.word import STATE_MASK, pack

NODE = "collector-test"
GENEROUS_S = 10.0
IDLE = pack(free_kv=15, queue=0, batch=0, drift=0, accepting=True)
BUSY = pack(free_kv=9, queue=12, batch=4, drift=1, accepting=True)


def _inventory() -> NodeInventory:
    worker = WorkerInfo(
        id=f"{NODE}-0",
        ordinal=0,
        incarnation=77,
        hardware="L40S_PCIE",
        model="llama-8b",
        precision="fp8",
        tp=1,
        gpus=(0,),
        kv_tokens=100_000,
        max_context=32_768,
        max_batch=256,
        chunk_tokens=2048,
        layout=KvLayout(16, 65_536, "fp8"),
        engine="simulated",
    )
    return NodeInventory(NODE, 5, 0, (worker,))


class Scene:
    """One agent played by hand, and what is heard of it on the bus."""

    def __init__(self, bus: NatsBus, nats_url: str, directory):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("", 0))
            self.port = probe.getsockname()[1]
        self.bus, self.url = bus, nats_url
        self.ring = str(directory / "ring")
        self.processes: list[asyncio.subprocess.Process] = []
        self.deltas: list[FleetDelta] = []
        self.snapshots: list[FleetSnapshot] = []
        self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        self.sequence = 0
        self.key: bytes | None = None

    async def listen(self) -> None:
        def to(messages, kind):
            def heard(message):
                decoded = msgspec.msgpack.decode(message.data, type=kind)
                if decoded.collector.startswith("it-"):
                    messages.append(decoded)

            return heard

        await self.bus.subscribe(subjects.fleet_delta().subject, to(self.deltas, FleetDelta))
        await self.bus.subscribe(subjects.fleet_snapshot().subject, to(self.snapshots, FleetSnapshot))

    async def start(self, instance: str, **fleet: str) -> asyncio.subprocess.Process:
        settings = {"PORT": str(self.port), "RING_PATH": self.ring} | fleet
        environment = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
        environment |= {f"QUARTET_FLEET__{key}": value for key, value in settings.items()}
        environment |= {"QUARTET_NATS__URL": self.url, "QUARTET_SERVICE__INSTANCE": instance}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet_heartbeat_collector"),
            env=environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    async def ready(self, instance: str) -> None:
        """Return when the collector of this name has heard our inventory, saying it as often as it takes."""
        async with asyncio.timeout(GENEROUS_S):
            while True:
                self.bus.publish(subjects.inventory(NODE).subject, msgspec.msgpack.encode(_inventory()))
                try:
                    status = await self.status(instance)
                except Exception:  # nobody listens yet
                    await asyncio.sleep(0.05)
                    continue
                if NODE in [node["node"] for node in status["nodes"]]:
                    return

    async def status(self, instance: str) -> dict:
        topic = subjects.control("collector", instance, "status")
        answer = await self.bus.request(topic.subject, b"", timeout_s=1.0)
        return msgspec.json.decode(msgspec.msgpack.decode(answer.data, type=ControlReply).payload)

    def beat(self, word: int) -> bytes:
        self.sequence += 1
        beat = Beat(node_hash(NODE), 5, self.sequence, 0, (BeatWorker(0, 77, word),))
        datagram = encode(beat, self.key)
        self.send(datagram)
        return datagram

    def send(self, datagram: bytes) -> None:
        self._sender.sendto(datagram, ("239.7.7.7", self.port))

    async def beat_until(self, word: int, done) -> None:
        async with asyncio.timeout(GENEROUS_S):
            while not done():
                self.beat(word)
                await asyncio.sleep(0.001)

    async def until(self, done) -> None:
        async with asyncio.timeout(GENEROUS_S):
            while True:
                if done():
                    return
                await asyncio.sleep(0.005)

    def ring_is_there(self) -> bool:
        return os.path.exists(self.ring)

    def told(self, state=None, verdict=None, collector=None) -> bool:
        return any(
            state in (None, change.state) and verdict in (None, change.verdict)
            for delta in self.deltas
            if collector in (None, delta.collector)
            for change in delta.changes
        )

    async def close(self) -> None:
        self._sender.close()
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.fixture
async def scene(nats_section, nats_url, tmp_path):
    bus = NatsBus(nats_section, name="collector-test")
    await bus.open()
    scene = Scene(bus, nats_url, tmp_path)
    await scene.listen()
    yield scene
    await scene.close()
    await bus.close()


async def test_beats_become_deltas_on_the_bus_and_the_same_records_in_the_ring(scene):
    await scene.start("it-one")
    await scene.ready("it-one")
    reader = RingReader(scene.ring)
    records = []
    await scene.beat_until(IDLE, lambda: scene.told(IDLE & STATE_MASK, Verdict.UP))
    await scene.beat_until(BUSY, lambda: scene.told(BUSY & STATE_MASK, Verdict.UP))
    records += [msgspec.msgpack.decode(record, type=FleetDelta) for record in reader.poll()]
    heard = {delta.number: delta for delta in scene.deltas}
    both = [record for record in records if record.number in heard]
    assert any(change.state == BUSY & STATE_MASK for record in both for change in record.changes)
    assert [record for record in both if record != heard[record.number]] == []
    assert [record.number for record in records] == list(range(records[0].number, records[-1].number + 1))


async def test_a_node_that_falls_silent_is_told_dead_and_snapshots_say_so(scene):
    await scene.start("it-one")
    await scene.ready("it-one")
    await scene.beat_until(IDLE, lambda: scene.told(IDLE & STATE_MASK, Verdict.UP))
    await scene.until(lambda: scene.told(verdict=Verdict.DEAD))
    scene.snapshots.clear()
    await scene.until(lambda: scene.snapshots)
    (worker,) = [state for state in scene.snapshots[0].workers if state.worker == f"{NODE}-0"]
    assert (worker.verdict, worker.incarnation, worker.state) == (Verdict.DEAD, 77, IDLE & STATE_MASK)


async def test_a_stopped_collector_exits_cleanly_and_leaves_no_ring(scene):
    process = await scene.start("it-one")
    await scene.ready("it-one")
    await scene.until(scene.ring_is_there)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), GENEROUS_S) == 0
    assert not scene.ring_is_there()


async def test_a_killed_collectors_ring_is_taken_over_and_its_readers_go_on(scene):
    first = await scene.start("it-one")
    await scene.ready("it-one")
    reader = RingReader(scene.ring)
    await scene.until(scene.ring_is_there)
    first.kill()
    await first.wait()
    assert scene.ring_is_there()
    await scene.start("it-two")
    await scene.ready("it-two")
    records = []

    def heard_in_the_ring():
        records.extend(msgspec.msgpack.decode(record, type=FleetDelta) for record in reader.poll())
        return any(change.state == BUSY & STATE_MASK for record in records for change in record.changes)

    await scene.beat_until(BUSY, heard_in_the_ring)
    assert {record.collector for record in records} == {"it-two"}
    assert reader.reopened == 1


async def test_two_collectors_of_one_host_tell_the_same_but_cannot_share_a_ring(scene):
    await scene.start("it-one")
    await scene.ready("it-one")
    refused = await scene.start("it-two")
    _, errors = await asyncio.wait_for(refused.communicate(), GENEROUS_S)
    assert refused.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert scene.ring in last
    assert "ring_path" in last
    assert "Traceback" not in errors.decode()
    await scene.start("it-three", RING_PATH="")
    await scene.ready("it-three")
    await scene.beat_until(
        BUSY, lambda: all(scene.told(BUSY & STATE_MASK, Verdict.UP, name) for name in ("it-one", "it-three"))
    )


@pytest.mark.parametrize("keys", ["", "6d" * 16], ids=["without keys", "with a key"])
async def test_noise_and_forged_beats_on_the_wire_are_counted_and_change_nothing(scene, keys):
    await scene.start("it-one", MASTER_KEYS=f'["{keys}"]' if keys else "[]")
    await scene.ready("it-one")
    scene.key = node_key(bytes.fromhex(keys), NODE) if keys else None
    await scene.beat_until(IDLE, lambda: scene.told(IDLE & STATE_MASK, Verdict.UP))
    noise = random.Random(7)
    genuine = scene.beat(IDLE)
    sent = 0
    for _ in range(200):
        for _ in range(100):
            scene.send(_forged(noise, genuine, keyed=bool(keys)))
            sent += 1
        scene.beat(IDLE)
        await asyncio.sleep(0.001)
    async with asyncio.timeout(GENEROUS_S):
        while (status := await scene.status("it-one"))["received"] < sent + scene.sequence:
            pass
    dropped = status["dropped"]
    assert (status["received"], status["kernel_drops"]) == (sent + scene.sequence, 0)
    assert status["received"] == status["taken"] + status["superseded"] + sum(dropped.values())
    assert status["taken"] <= scene.sequence
    # A copy in one batch with its original is not dropped, but superseded by it.
    assert sum(dropped.values()) + status["superseded"] >= sent
    wanted = {"magic", "version", "length", "unknown_node", "incarnation", "replay"} | ({"tag"} if keys else set())
    assert {reason for reason, number in dropped.items() if number} >= wanted
    assert not scene.told(BUSY & STATE_MASK)
    await scene.beat_until(BUSY, lambda: scene.told(BUSY & STATE_MASK, Verdict.UP))


def _forged(noise: random.Random, genuine: bytes, *, keyed: bool) -> bytes:
    """Random bytes, or a beat that was heard once with something changed that must not pass."""
    kind = noise.randrange(6 if keyed else 5)
    if kind == 0:
        return noise.randbytes(noise.randrange(200))
    if kind == 1:
        return genuine[: noise.randrange(len(genuine))]
    if kind == 2:
        return genuine
    data = bytearray(genuine)
    if kind == 5:  # a later beat with other words, by somebody without the key
        data[17] ^= 0x10
        data[-4:] = BUSY.to_bytes(4, "little")
    else:  # magic, version, count, incarnation; or the node
        data[noise.randrange(8) if kind == 3 else 8 + noise.randrange(8)] ^= noise.randrange(1, 256)
    return bytes(data)


async def test_a_wrong_master_key_stops_the_start_with_one_line(scene):
    process = await scene.start("it-one", MASTER_KEYS='["not hex"]')
    _, errors = await asyncio.wait_for(process.communicate(), GENEROUS_S)
    assert process.returncode == 2
    assert "master_keys" in errors.decode().strip().splitlines()[-1]
