"""What every mover must do, whatever carries its bytes: one suite, run for each by ``test_movers.py``.

The receiving side is a real lease table (``Arrivals``) over memory that keeps what it was given.
"""

import asyncio
import gc
import random

import pytest

from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.kv import wire
from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_bus.messages import KvCommand, KvVerb
from quartet_core.transfer_words import State

BLOCK_BYTES = 4096
CHUNK_BYTES = 32 * 1024
TOKENS_PER_BLOCK = 16


def prompt(blocks: int, seed: int = 1) -> list[bytes]:
    """Blocks of KV, the last one shorter."""
    source = random.Random(seed)
    return [source.randbytes(BLOCK_BYTES) for _ in range(blocks - 1)] + [source.randbytes(160)]


class Memory:
    """A KV pool that keeps bytes."""

    block_tokens = TOKENS_PER_BLOCK
    stands_in = False

    def __init__(self) -> None:
        self.leased: dict[str, int] = {}
        self.held: dict[str, list[bytes]] = {}
        self.readable: set[str] = set()

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        self.leased[transfer], self.held[transfer] = epoch, []
        return True

    def write(self, transfer, epoch, first_block, blocks) -> None:
        if self.leased.get(transfer) != epoch:
            raise BlocksFenced(transfer, "another epoch")
        assert first_block == len(self.held[transfer])
        self.held[transfer] += [bytes(block) for block in blocks]

    def commit(self, transfer: str, epoch: int) -> None:
        self.readable.add(transfer)

    def export(self, transfer: str):
        raise AssertionError("a receiver exports nothing")

    def release(self, transfer: str) -> None:
        self.leased.pop(transfer, None)
        self.held.pop(transfer, None)


class Receiver:
    """A mover that serves, and the leases of its agent."""

    def __init__(self, mover, loop) -> None:
        self.mover = mover
        self.memory = Memory()
        self.lost = []
        self.arrivals = Arrivals(
            loop, random.Random(7).randbytes, lambda *_: None, lambda *ended: self.lost.append(ended)
        )
        self.address = ""

    async def start(self) -> None:
        self.address = self.arrivals.address = await self.mover.serve(self.arrivals)

    def lease(self, transfer: str = "x", blocks: int = 40):
        command = KvCommand(
            KvVerb.RESERVE, transfer, 1, "c", "d-0", 1, tokens=blocks * TOKENS_PER_BLOCK, lease_ms=60_000.0
        )
        return self.arrivals.reserve(command, "d-0", 1, self.memory, wire.SECRET_BYTES)

    def state(self, transfer: str = "x") -> str:
        return {lease.transfer: lease.state for lease in self.arrivals.leases()}.get(transfer, "none")


async def settled(condition) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


class MoverContract:
    """Inherit it, and give ``movers``: a fixture that returns a function which makes a mover on one network."""

    @pytest.fixture
    async def receiver(self, movers):
        receiver = Receiver(movers(), asyncio.get_running_loop())
        await receiver.start()
        yield receiver
        receiver.arrivals.close()
        await receiver.mover.close()

    @pytest.fixture
    async def sender(self, movers):
        mover = movers()
        yield mover
        await mover.close()

    async def test_every_byte_arrives_in_order_and_is_counted(self, receiver, sender):
        blocks, lease = prompt(40), receiver.lease()
        sent = await sender.send(lease.address, lease.secret, "x", lease.epoch, blocks, CHUNK_BYTES)
        assert receiver.memory.held["x"] == blocks
        assert receiver.state() == State.MOVED
        payload = sum(map(len, blocks))
        assert payload <= sent.wire_bytes < payload * 1.02

    async def test_blocks_may_be_views_of_memory(self, receiver, sender):
        blocks, lease = prompt(40), receiver.lease()
        memory = memoryview(bytearray(b"".join(blocks)))
        views = [memory[start : start + BLOCK_BYTES] for start in range(0, len(memory), BLOCK_BYTES)]
        await sender.send(lease.address, lease.secret, "x", lease.epoch, views, CHUNK_BYTES)
        assert receiver.memory.held["x"] == blocks

    async def test_what_comes_to_be_while_it_is_sent_is_sent_as_it_comes(self, receiver, sender):
        blocks, lease = prompt(40), receiver.lease()
        seen = []

        async def batches():
            for first, last in ((0, 3), (3, 20), (20, 20), (20, 40)):
                yield iter(blocks[first:last])
                await settled(lambda last=last: len(receiver.memory.held["x"]) == last)
                seen.append((last, receiver.state()))

        sent = await sender.send(lease.address, lease.secret, "x", lease.epoch, batches(), CHUNK_BYTES)
        assert receiver.memory.held["x"] == blocks
        assert seen == [(last, State.MOVING) for last in (3, 20, 20, 40)]
        assert receiver.state() == State.MOVED
        assert sent.wire_bytes >= sum(map(len, blocks))

    async def test_a_source_that_fails_in_mid_way_leaves_the_rest_unsent(self, receiver, sender):
        lease = receiver.lease()

        async def batches():
            yield prompt(40)[:10]
            raise BlocksFenced("x", "its prefill failed")

        with pytest.raises(BlocksFenced):
            await sender.send(lease.address, lease.secret, "x", lease.epoch, batches(), CHUNK_BYTES)
        assert len(receiver.memory.held["x"]) <= 10
        assert receiver.state() == State.MOVING

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [("secret", MoveReason.LEASE), ("transfer", MoveReason.LEASE), ("epoch", MoveReason.FENCED)],
    )
    async def test_without_the_lease_not_a_byte_is_sent(self, receiver, sender, wrong, reason):
        lease = receiver.lease()
        secret = b"?" * wire.SECRET_BYTES if wrong == "secret" else lease.secret
        drawn = []

        def blocks():
            for block in prompt(40):
                drawn.append(block)
                yield block

        with pytest.raises(MoveError) as error:
            await sender.send(
                lease.address, secret, "y" if wrong == "transfer" else "x",
                lease.epoch + (wrong == "epoch"), blocks(), CHUNK_BYTES,
            )  # fmt: skip
        assert error.value.reason is reason
        assert (drawn, receiver.memory.held["x"], receiver.state()) == ([], [], State.RESERVED)

    async def test_a_secret_opens_its_lease_once(self, receiver, sender):
        blocks, lease = prompt(40), receiver.lease()
        await sender.send(lease.address, lease.secret, "x", lease.epoch, blocks, CHUNK_BYTES)
        with pytest.raises(MoveError) as error:
            await sender.send(lease.address, lease.secret, "x", lease.epoch, blocks, CHUNK_BYTES)
        assert error.value.reason is MoveReason.LEASE
        assert receiver.memory.held["x"] == blocks

    async def test_a_damaged_chunk_is_refused_and_not_written(self, receiver, sender, monkeypatch):
        right = wire.checksum
        monkeypatch.setattr(wire, "checksum", lambda first, blocks: right(first, blocks) ^ (first == 16))
        lease = receiver.lease()
        with pytest.raises(MoveError) as error:
            await sender.send(lease.address, lease.secret, "x", lease.epoch, prompt(40), CHUNK_BYTES)
        assert error.value.reason is MoveReason.CHECKSUM
        assert receiver.memory.held["x"] == prompt(40)[:16]
        assert receiver.state() == State.MOVING

    @pytest.mark.parametrize(("sent", "reason"), [(39, MoveReason.INCOMPLETE), (41, MoveReason.RANGE)])
    async def test_ranges_come_from_the_lease_alone(self, receiver, sender, sent, reason):
        lease = receiver.lease(blocks=40)
        with pytest.raises(MoveError) as error:
            await sender.send(lease.address, lease.secret, "x", lease.epoch, prompt(sent), CHUNK_BYTES)
        assert error.value.reason is reason
        assert receiver.state() != State.MOVED

    async def test_a_lease_that_ends_while_bytes_come_fences_its_writer(self, receiver, sender):
        lease = receiver.lease(blocks=400)

        def blocks():
            for number, block in enumerate(prompt(400)):
                if number == 200:
                    receiver.arrivals.release("x")
                    receiver.lease("x", blocks=400)  # the same transfer, a later epoch
                yield block

        with pytest.raises(MoveError) as error:
            await sender.send(lease.address, lease.secret, "x", lease.epoch, blocks(), CHUNK_BYTES)
        assert error.value.reason is MoveReason.FENCED
        assert receiver.memory.held["x"] == []

    async def test_a_cancelled_send_ends_at_both_sides(self, receiver, sender):
        lease = receiver.lease(blocks=100_000)
        endless = prompt(2)[0]

        def blocks():
            while True:
                yield endless

        task = asyncio.create_task(sender.send(lease.address, lease.secret, "x", lease.epoch, blocks(), CHUNK_BYTES))
        await settled(lambda: len(receiver.memory.held["x"]) >= 16)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(lambda: getattr(receiver.mover, "intakes", 0) == 0)
        assert receiver.state() == State.MOVING  # nothing says that it came; its coordinator ends it

    async def test_a_receiver_that_goes_away_is_an_error(self, receiver, sender):
        lease = receiver.lease(blocks=100_000)
        endless = prompt(2)[0]

        def blocks():
            while True:
                yield endless

        task = asyncio.create_task(sender.send(lease.address, lease.secret, "x", lease.epoch, blocks(), CHUNK_BYTES))
        await settled(lambda: len(receiver.memory.held["x"]) >= 16)
        await receiver.mover.close()
        with pytest.raises(MoveError) as error:
            await task
        assert error.value.reason in (MoveReason.CONNECTION, MoveReason.TIMEOUT)

    async def test_nobody_there_is_an_error_that_leaves_the_lease_shut(self, receiver, sender):
        lease = receiver.lease()
        await receiver.mover.close()
        with pytest.raises(MoveError) as error:
            await sender.send(lease.address, lease.secret, "x", lease.epoch, prompt(40), CHUNK_BYTES)
        assert error.value.reason is MoveReason.CONNECTION
        assert not error.value.opened
        assert receiver.state() == State.RESERVED

    async def test_transfers_at_once_do_not_get_into_each_other(self, receiver, sender):
        names = [f"t{number}" for number in range(6)]
        leases = {name: receiver.lease(name, blocks=60) for name in names}
        await asyncio.gather(
            *(
                sender.send(leases[name].address, leases[name].secret, name, leases[name].epoch,
                            prompt(60, seed=number), CHUNK_BYTES)
                for number, name in enumerate(names)
            )
        )  # fmt: skip
        for number, name in enumerate(names):
            assert receiver.memory.held[name] == prompt(60, seed=number)

    async def test_closing_twice_is_closing_once(self, movers):
        mover = movers()
        await mover.serve(Receiver(mover, asyncio.get_running_loop()).arrivals)
        await mover.close()
        await mover.close()
        gc.collect()
