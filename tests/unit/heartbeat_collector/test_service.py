import asyncio
import math
import random

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.config.schema import Config
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import ControlReply, ControlRequest, FleetDelta, FleetSnapshot, NodeInventory
from quartet_bus.ring import RingReader, RingWriter
from quartet_core.verdict import Verdict
from quartet_heartbeat_collector.service import CollectorService


class Stage:
    """Collectors and one agent, played by hand, on a bus in memory."""

    def __init__(self, inventory, beat, state_word):
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.deltas: list[FleetDelta] = []
        self.snapshots: list[FleetSnapshot] = []
        self.asked: list[str] = []
        self.collectors: list[CollectorService] = []
        self.inventory, self.beat, self.word = inventory, beat, state_word
        self.sequence = 0

    async def collector(self, instance="c1", **fleet) -> CollectorService:
        config = Config(fleet=msgspec.convert(fleet, type(Config().fleet)))
        service = CollectorService(MemoryBus(self.broker), config, instance=instance, random=random.Random(instance))
        self.collectors.append(service)
        await service.start()
        return service

    async def listen(self) -> None:
        def to(messages, kind):
            return lambda message: messages.append(msgspec.msgpack.decode(message.data, type=kind))

        await self.bus.subscribe(subjects.fleet_delta().subject, to(self.deltas, FleetDelta))
        await self.bus.subscribe(subjects.fleet_snapshot().subject, to(self.snapshots, FleetSnapshot))
        topic = subjects.control("agent", "_all", "inventory")
        await self.bus.subscribe(topic.subject, lambda message: self.asked.append(message.subject))
        topic = subjects.control("agent", "a", "inventory")
        await self.bus.subscribe(topic.subject, lambda message: self.asked.append(message.subject))

    async def announce(self, inventory: NodeInventory) -> None:
        self.bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
        await asyncio.sleep(0.001)

    async def beats(self, for_ms, *words, node="a", every_ms=1.0, incarnation=1) -> None:
        for _ in range(round(for_ms / every_ms)):
            self.sequence += 1
            for collector in self.collectors:
                collector.heard_beats([self.beat(node, self.sequence, *words, incarnation=incarnation)])
            await asyncio.sleep(every_ms / 1000)

    def changes(self):
        return [change for delta in self.deltas for change in delta.changes]

    async def stop(self) -> None:
        for collector in self.collectors:
            await collector.stop()


@pytest.fixture
def on_stage(inventory, beat, state_word):
    """Runs a scene with a fresh stage under virtual time."""

    def run(scene, listening=True):
        async def play():
            stage = Stage(inventory, beat, state_word)
            if listening:
                await stage.listen()
            try:
                await scene(stage)
            finally:
                await stage.stop()

        run_virtual(play())

    return run


def test_deltas_are_said_only_for_changes_and_numbered_without_gaps(on_stage):
    async def scene(stage):
        idle, busy = stage.word(), stage.word(batch=3)
        await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.beats(30, idle, idle)
        await stage.beats(200, idle, idle)
        await stage.beats(10, idle, busy)
        assert [(c.worker, c.verdict) for c in stage.changes()] == [("a-0", 0), ("a-1", 0), ("a-1", 0)]
        assert [delta.number for delta in stage.deltas] == list(range(1, len(stage.deltas) + 1))
        assert {(delta.collector, delta.incarnation) for delta in stage.deltas} == {
            ("c1", stage.collectors[0].incarnation)
        }

    on_stage(scene)


def test_changes_are_said_at_most_once_an_interval_and_the_last_one_wins(on_stage):
    async def scene(stage):
        await stage.collector(delta_interval_ms=20.0)
        await stage.announce(stage.inventory("a"))
        await stage.beats(45, stage.word(), stage.word())
        stage.deltas.clear()
        for size in range(1, 41):
            await stage.beats(1, stage.word(batch=size % 30), stage.word())
        await stage.beats(25, stage.word(batch=29), stage.word())
        changing = [delta for delta in stage.deltas if delta.changes]
        assert 2 <= len(changing) <= 6
        assert changing[-1].changes[-1].state & 0xFC00 == stage.word(batch=29) & 0xFC00

    on_stage(scene)


def test_every_living_node_is_stamped_every_interval_with_its_newest_beat(on_stage):
    async def scene(stage):
        await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.announce(stage.inventory("never-heard"))
        await stage.beats(500, stage.word(), stage.word())
        stamps = [stamp for delta in stage.deltas for stamp in delta.stamps]
        assert {stamp.node for stamp in stamps} == {"a"}
        assert 9 <= len(stamps) <= 10
        assert [s.sequence for s in stamps] == sorted({s.sequence for s in stamps})
        assert stamps[-1].emit_ns == stamps[-1].sequence * 500_000

    on_stage(scene)


def test_a_silent_node_is_told_dead_within_150_ms_of_its_last_beat_and_up_within_50_ms_of_its_return(on_stage):
    async def scene(stage):
        loop = asyncio.get_running_loop()
        await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.beats(50, stage.word(), stage.word())

        async def until(verdict, limit_ms):
            stage.deltas.clear()
            begin = loop.time()
            while verdict not in {change.verdict for change in stage.changes()}:
                assert loop.time() - begin <= limit_ms / 1000
                if verdict is Verdict.UP:
                    await stage.beats(0.5, stage.word(), stage.word(), every_ms=0.5)
                else:
                    await asyncio.sleep(0.001)

        await until(Verdict.DEAD, 150)
        await until(Verdict.UP, 50)

    on_stage(scene)


def test_snapshots_hold_every_worker_and_the_number_of_the_last_delta(on_stage):
    async def scene(stage):
        await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.announce(stage.inventory("b"))
        await stage.beats(60, stage.word(batch=2), stage.word())
        await stage.beats(400, stage.word(), stage.word(), node="b")
        snapshot = stage.snapshots[-1]
        verdicts = {state.worker: state.verdict for state in snapshot.workers}
        assert verdicts == {"a-0": Verdict.DEAD, "a-1": Verdict.DEAD, "b-0": Verdict.UP, "b-1": Verdict.UP}
        assert snapshot.number in {delta.number for delta in stage.deltas}
        assert [stamp.node for stamp in snapshot.stamps] == ["b"]

    on_stage(scene)


def test_a_snapshot_on_request_comes_at_once_but_many_requests_get_one(on_stage):
    async def scene(stage):
        await stage.collector(snapshot_interval_ms=60_000.0)
        await stage.announce(stage.inventory("a"))
        await stage.beats(10, stage.word(), stage.word())
        topic = subjects.control("collector", "_all", "snapshot")
        for _ in range(20):
            stage.bus.publish(topic.subject, msgspec.msgpack.encode(ControlRequest()))
        await asyncio.sleep(0.005)
        assert len(stage.snapshots) == 1
        await asyncio.sleep(0.1)
        assert len(stage.snapshots) == 2

    on_stage(scene)


def test_a_router_that_takes_a_snapshot_and_then_the_deltas_behind_it_knows_the_fleet(on_stage):
    async def scene(stage):
        await stage.collector()
        await stage.announce(stage.inventory("a"))
        noise = random.Random(5)
        for _ in range(300):
            await stage.beats(1, stage.word(batch=noise.randrange(40)), stage.word(queue=noise.randrange(60)))
        snapshot = stage.snapshots[0]
        known = {state.worker: state.state for state in snapshot.workers}
        number = snapshot.number
        for delta in stage.deltas:
            if delta.number <= snapshot.number:
                continue
            assert delta.number == number + 1
            number = delta.number
            known.update({change.worker: change.state for change in delta.changes})
        final = {state.worker: state.state for state in stage.collectors[0].fleet.states()}
        assert known == final

    on_stage(scene)


def test_a_collector_asks_for_inventories_at_its_start_and_when_strangers_beat_but_not_for_every_beat(on_stage):
    async def scene(stage):
        await stage.collector()
        await asyncio.sleep(0.01)
        assert stage.asked == ["quartet.v1.ctl.agent._all.inventory"]
        await stage.beats(1000, stage.word())
        assert 4 <= len(stage.asked) <= 7
        assert stage.changes() == []
        await stage.announce(stage.inventory("a"))
        await asyncio.sleep(0.3)
        asked = len(stage.asked)
        await stage.beats(600, stage.word(), stage.word())
        assert len(stage.asked) == asked
        await stage.beats(300, stage.word(epoch=3), stage.word(epoch=3))
        assert stage.asked[asked:] == ["quartet.v1.ctl.agent.a.inventory"]

    on_stage(scene)


def test_two_collectors_say_the_same_each_under_its_own_name_and_numbers(on_stage):
    async def scene(stage):
        await stage.collector("c1")
        await stage.collector("c2")
        await stage.announce(stage.inventory("a"))
        await stage.beats(60, stage.word(), stage.word(batch=1))
        by_name = {
            name: [
                (c.worker, c.state, c.beat, c.verdict) for d in stage.deltas if d.collector == name for c in d.changes
            ]
            for name in ("c1", "c2")
        }
        assert len(by_name["c1"]) == 2
        assert by_name["c1"] == by_name["c2"]
        assert len({delta.incarnation for delta in stage.deltas}) == 2

    on_stage(scene)


def test_a_restarted_collector_knows_the_fleet_again_as_soon_as_it_is_announced(on_stage):
    async def scene(stage):
        first = await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.beats(20, stage.word(), stage.word(batch=1))
        await first.stop()
        stage.collectors.clear()
        stage.deltas.clear()
        await stage.collector("c1b")
        await stage.beats(20, stage.word(), stage.word(batch=1))
        assert stage.changes() == []
        await stage.announce(stage.inventory("a"))
        await stage.beats(10, stage.word(), stage.word(batch=1))
        assert [(c.worker, c.verdict) for c in stage.changes()] == [("a-0", 0), ("a-1", 0)]
        assert Verdict.DEAD not in {c.verdict for c in stage.changes()}

    on_stage(scene)


def test_status_counts_what_was_heard_and_names_the_nodes(on_stage):
    async def scene(stage):
        collector = await stage.collector()
        await stage.announce(stage.inventory("a"))
        await stage.beats(20, stage.word(), stage.word())
        await stage.beats(5, stage.word(), node="ghost")
        await stage.beats(5, stage.word(), stage.word())
        topic = subjects.control("collector", "c1", "status")
        answer = await stage.bus.request(topic.subject, b"", timeout_s=1.0)
        reply = msgspec.msgpack.decode(answer.data, type=ControlReply)
        status = msgspec.json.decode(reply.payload)
        assert reply.ok
        assert status["received"] == 30
        assert (status["dropped"]["unknown_node"], status["lost"]) == (5, 5)
        (node,) = status["nodes"]
        assert (node["node"], node["verdict"], node["sequence"]) == ("a", "up", 30)
        await asyncio.sleep(1.1)
        text = collector.metrics.exposition().decode()
        assert 'quartet_collector_dropped_total{reason="unknown_node"} 5.0' in text
        assert 'quartet_collector_nodes{verdict="dead"} 1.0' in text
        assert "quartet_collector_lost_total 5.0" in text

    on_stage(scene)


def test_the_ring_carries_the_deltas_byte_for_byte(on_stage, tmp_path):
    path = str(tmp_path / "ring")

    async def scene(stage):
        collector = await stage.collector()
        with RingWriter(path, 1 << 16, collector.incarnation) as ring:
            collector.ring = ring
            reader = RingReader(path)
            await stage.announce(stage.inventory("a"))
            for size in range(100):
                await stage.beats(2, stage.word(batch=size % 20), stage.word())
            records = [msgspec.msgpack.decode(record, type=FleetDelta) for record in reader.poll()]
            assert records == stage.deltas
            assert len(records) > 90
            assert reader.lost == 0

    on_stage(scene)


def test_a_delta_that_no_ring_record_takes_is_still_published(on_stage, tmp_path):
    async def scene(stage):
        collector = await stage.collector()
        with RingWriter(str(tmp_path / "ring"), 4096, 1) as ring:
            collector.ring = ring
            names = [f"node-with-a-long-name-{number}" for number in range(100)]
            for name in names:
                await stage.announce(stage.inventory(name))
            collector.heard_beats([stage.beat(name, 1, stage.word(), stage.word()) for name in names])
            await asyncio.sleep(0.006)
        assert {change.worker for change in stage.changes()} == {f"{name}-{n}" for name in names for n in (0, 1)}
        assert "quartet_collector_ring_refused_total 1.0" in collector.metrics.exposition().decode()

    on_stage(scene)


@pytest.mark.parametrize("wrong", [{"incarnation": -1}, {"step_ms": math.nan}])
def test_an_inventory_with_impossible_numbers_is_counted_and_leaves_the_node_as_it_was(on_stage, wrong):
    async def scene(stage):
        collector = await stage.collector()
        await stage.announce(stage.inventory("a"))
        inventory = stage.inventory("a", workers=((0, 2), (1, 2)))
        if "step_ms" in wrong:
            first, second = inventory.workers
            inventory.workers = (first, msgspec.structs.replace(second, **wrong))
        else:
            inventory = msgspec.structs.replace(inventory, **wrong)
        await stage.announce(inventory)
        exposition = collector.metrics.exposition().decode()
        assert 'quartet_collector_malformed_total{subject="quartet.v1.node.*.inventory"} 1.0' in exposition
        assert "quartet_collector_failures_total{" not in exposition
        node = collector.fleet.nodes["a"]
        assert node.incarnation == 1
        assert [worker.incarnation for worker in node.workers.values()] == [1, 1]

    on_stage(scene)


def test_what_has_arrived_is_read_before_anybody_is_judged(on_stage):
    async def scene(stage):
        collector = await stage.collector()
        await stage.announce(stage.inventory("a"))
        collector.receive = lambda: collector.heard_beats([stage.beat("a", _next(stage), stage.word(), stage.word())])
        await asyncio.sleep(0.5)
        assert {change.verdict for change in stage.changes()} == {Verdict.UP}

    on_stage(scene)


def _next(stage):
    stage.sequence += 1
    return stage.sequence
