"""Every mover keeps the same contract; those whose library is not here say so and are skipped."""

import asyncio
import sys
import time

import pytest
from contract.mover_contract import MoverContract, Receiver, prompt

from quartet_agent.kv import mooncake, nixl
from quartet_agent.kv.choice import MoverChoice, make_movers, parse_ways
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork, TimedLink
from quartet_agent.kv.mooncake import MooncakeMemory
from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_agent.kv.nixl import NixlMemory
from quartet_agent.kv.shm import ShmMemory
from quartet_agent.kv.slots import SlotMover
from quartet_agent.kv.tcp import TcpMover
from quartet_bus.config.schema import KvSection
from quartet_sim.sharing import SharedLink

SILENCE_S = 5.0


class TestTcp(MoverContract):
    @pytest.fixture
    def movers(self):
        return lambda: TcpMover("127.0.0.1:0", silence_timeout_s=SILENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous shared memory through /proc is Linux's")
class TestShm(MoverContract):
    @pytest.fixture
    def movers(self):
        return lambda: SlotMover(ShmMemory(), "127.0.0.1:0", silence_timeout_s=SILENCE_S)


@pytest.mark.skipif(nixl.importable() is not None, reason=f"no NIXL here (make nixl): {nixl.importable()}")
class TestNixl(MoverContract):
    @pytest.fixture
    def movers(self):
        return lambda: SlotMover(NixlMemory(), "127.0.0.1:0", silence_timeout_s=SILENCE_S)


@pytest.mark.skipif(mooncake.importable() is not None, reason=f"no Mooncake here: {mooncake.importable()}")
class TestMooncake(MoverContract):
    @pytest.fixture
    def movers(self):
        return lambda: SlotMover(MooncakeMemory("127.0.0.1", "tcp"), "127.0.0.1:0", silence_timeout_s=SILENCE_S)


class TestMemory(MoverContract):
    @pytest.fixture
    def movers(self):
        network, numbers = MemoryNetwork(), iter(range(1000))
        return lambda: MemoryMover(network, f"agent-{next(numbers)}")


class TestSimulated(MoverContract):
    """Over links of 1 MB/ms that are shared."""

    @pytest.fixture
    def movers(self):
        links = {f"agent-{n}": TimedLink(SharedLink(1.0), lambda: time.monotonic() * 1e3) for n in range(4)}
        network, numbers = MemoryNetwork(links), iter(range(1000))
        return lambda: MemoryMover(network, f"agent-{next(numbers)}")


class TestChoice(MoverContract):
    @pytest.fixture
    def movers(self):
        return lambda: make_movers(KvSection())


def tcp() -> TcpMover:
    return TcpMover("127.0.0.1:0", silence_timeout_s=SILENCE_S)


def shm() -> SlotMover:
    return SlotMover(ShmMemory(), "127.0.0.1:0", silence_timeout_s=SILENCE_S)


async def one(receiver: Receiver, sender: MoverChoice):
    blocks, lease = prompt(10), receiver.lease(blocks=10)
    sent = await sender.send(lease.address, lease.secret, "x", lease.epoch, blocks, 8192)
    assert receiver.memory.held["x"] == blocks
    await receiver.mover.close()
    await sender.close()
    return sent


async def served(choice: MoverChoice) -> Receiver:
    receiver = Receiver(choice, asyncio.get_running_loop())
    await receiver.start()
    return receiver


async def test_the_first_way_that_both_have_is_taken_and_told():
    receiver = await served(make_movers(KvSection(movers=("tcp", "shm"))))
    sender = make_movers(KvSection(movers=("shm", "tcp")))
    assert (await one(receiver, sender)).link == "SHM"
    assert sender.sends == {"shm": 1, "tcp": 0}


async def test_shared_memory_is_for_one_host_only():
    receiver = await served(MoverChoice({"shm": shm(), "tcp": tcp()}, {"shm": "another-host"}))
    sender = make_movers(KvSection(movers=("shm", "tcp")))
    assert [way.kind for way in sender.ways(receiver.address)] == ["tcp"]
    assert (await one(receiver, sender)).link == "TCP"


async def test_a_way_that_fails_before_the_lease_leaves_it_to_the_next():
    here = ShmMemory().place()
    gone, receiver = shm(), None
    receiver = await served(MoverChoice({"shm": gone, "tcp": tcp()}, {"shm": here}))
    await gone.close()
    assert (await one(receiver, make_movers(KvSection(movers=("shm", "tcp"))))).link == "TCP"


async def test_a_refused_lease_is_not_tried_another_way():
    receiver = await served(make_movers(KvSection(movers=("shm", "tcp"))))
    sender = make_movers(KvSection(movers=("shm", "tcp")))
    lease = receiver.lease(blocks=10)
    with pytest.raises(MoveError) as error:
        await sender.send(lease.address, b"?" * 16, "x", lease.epoch, prompt(10), 8192)
    assert error.value.reason is MoveReason.LEASE
    assert sum(sender.sends.values()) == 0
    await receiver.mover.close()
    await sender.close()


async def test_nothing_in_common_is_an_error():
    sender = make_movers(KvSection(movers=("tcp",)))
    with pytest.raises(MoveError) as error:
        await sender.send("carrier-pigeon=roof;;nonsense=", b"?" * 16, "x", 1, prompt(10), 8192)
    assert (error.value.reason, error.value.opened) == (MoveReason.CONNECTION, False)


def test_an_address_without_names_is_tcp():
    assert [(way.kind, way.address) for way in parse_ways("10.0.0.1:7460")] == [("tcp", "10.0.0.1:7460")]


async def test_shared_memory_of_another_size_or_of_nobody_is_not_mapped():
    memory = ShmMemory()
    landing = memory.land(3, 4096)
    with pytest.raises(OSError, match="size"):
        memory.reach(landing.description, 3, 8192)
    landing.close()
    with pytest.raises(OSError):
        memory.reach(landing.description, 3, 4096)
    with pytest.raises(OSError):
        memory.reach(b"?", 3, 4096)
