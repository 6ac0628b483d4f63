"""The TCP mover with real sockets: what arrives, what is refused, and that nothing leaks whoever goes away."""

import asyncio
import sys
from dataclasses import dataclass, field

import pytest

from quartet_agent.kv import wire
from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_agent.kv.tcp import TcpMover

SECRET = b"0123456789abcdef"
BLOCKS = [bytes([index % 251]) * 1024 for index in range(500)] + [b"tail" * 40]
CHUNK_BYTES = 64 * 1024


@dataclass
class Pool:
    """A sink with one lease, for as many blocks as come."""

    received: list[bytes] = field(default_factory=list)
    completed: int = 0
    opened: int = 0

    def open(self, transfer: str, epoch: int, secret: bytes) -> "Pool":
        if (transfer, secret) != ("x", SECRET):
            raise MoveError(MoveReason.LEASE)
        if epoch != 7:
            raise MoveError(MoveReason.FENCED)
        self.opened += 1
        return self

    def take(self, first_block: int, blocks) -> None:
        if first_block != len(self.received):
            raise MoveError(MoveReason.RANGE)
        self.received += [bytes(block) for block in blocks]

    def complete(self) -> None:
        self.completed += 1


@pytest.fixture
async def receiver():
    pool, mover = Pool(), TcpMover("127.0.0.1:0", silence_timeout_s=0.3)
    address = await mover.serve(pool)
    yield pool, mover, address
    await mover.close()


@pytest.fixture
async def sender():
    mover = TcpMover("127.0.0.1:0", silence_timeout_s=0.3)
    yield mover
    await mover.close()


async def settled(condition) -> None:
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_every_byte_arrives_in_order(receiver, sender):
    pool, _, address = receiver
    sent_bytes = (await sender.send(address, SECRET, "x", 7, BLOCKS, CHUNK_BYTES)).wire_bytes
    assert pool.received == BLOCKS
    assert pool.completed == 1
    payload = sum(map(len, BLOCKS))
    assert payload < sent_bytes < payload * 1.01


@pytest.mark.parametrize(
    ("secret", "transfer", "epoch", "reason"),
    [
        (b"x" * 16, "x", 7, MoveReason.LEASE),
        (SECRET, "y", 7, MoveReason.LEASE),
        (SECRET, "x", 6, MoveReason.FENCED),
    ],
)
async def test_without_the_lease_nothing_is_written_and_nothing_even_sent(
    receiver, sender, secret, transfer, epoch, reason
):
    pool, _, address = receiver
    drawn = []

    def blocks():
        for block in BLOCKS:
            drawn.append(block)
            yield block

    with pytest.raises(MoveError) as error:
        await sender.send(address, secret, transfer, epoch, blocks(), CHUNK_BYTES)
    assert error.value.reason is reason
    assert (pool.received, pool.completed, drawn) == ([], 0, [])


def _chunk(first_block: int, blocks: list[bytes]) -> tuple[bytes, bytes]:
    return wire.encode_chunk(first_block, blocks), b"".join(blocks)


async def _raw(address: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


async def test_bytes_sent_before_the_secret_was_accepted_are_not_taken(receiver):
    pool, _, address = receiver
    header, payload = _chunk(0, BLOCKS[:3])
    hello = wire.encode_hello("x", 7, b"w" * 16, CHUNK_BYTES)
    reader, writer = await _raw(address, hello + header + payload + wire.LAST_CHUNK)
    with pytest.raises(MoveError) as error:
        wire.check_answer(await reader.readexactly(1))
    assert error.value.reason is MoveReason.LEASE
    assert await reader.read() == b""
    assert (pool.opened, pool.received) == (0, [])
    writer.close()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda header, payload: header + payload[:-1] + b"?", MoveReason.CHECKSUM),
        (lambda header, payload: wire.CHUNK.pack(9, 3, len(payload), 0, 1) + payload, MoveReason.CHECKSUM),
        (lambda header, payload: wire.CHUNK.pack(0, 1, 2**31, 0, 0), MoveReason.RANGE),
    ],
)
async def test_a_damaged_chunk_is_refused_and_not_written(receiver, spoil, reason):
    pool, _, address = receiver
    good_header, good = _chunk(0, BLOCKS[:2])
    header, payload = _chunk(2, BLOCKS[2:5])
    reader, writer = await _raw(
        address, wire.encode_hello("x", 7, SECRET, CHUNK_BYTES) + good_header + good + spoil(header, payload)
    )
    wire.check_answer(await reader.readexactly(1))
    with pytest.raises(MoveError) as error:
        wire.check_answer(await reader.readexactly(1))
    assert error.value.reason is reason
    assert pool.received == BLOCKS[:2]
    assert pool.completed == 0
    writer.close()


async def test_a_receiver_that_finds_a_fault_midway_is_heard_while_we_still_send(receiver, sender):
    pool, _, address = receiver

    def take(first_block, blocks):
        if first_block >= 128:
            raise MoveError(MoveReason.FENCED, "released meanwhile")
        Pool.take(pool, first_block, blocks)

    pool.take = take
    endless = (b"z" * 1024 for _ in range(1_000_000))
    with pytest.raises(MoveError) as error:
        await sender.send(address, SECRET, "x", 7, endless, CHUNK_BYTES)
    assert error.value.reason is MoveReason.FENCED
    assert len(pool.received) == 128


async def test_a_sender_that_dies_midway_leaves_no_task_and_no_completed_lease(receiver):
    pool, mover, address = receiver
    header, payload = _chunk(0, BLOCKS[:3])
    reader, writer = await _raw(address, wire.encode_hello("x", 7, SECRET, CHUNK_BYTES) + header + payload + header[:5])
    wire.check_answer(await reader.readexactly(1))
    writer.close()
    await settled(lambda: mover.intakes == 0)
    assert (len(pool.received), pool.completed) == (3, 0)


async def test_a_silent_sender_is_given_up(receiver):
    _, mover, address = receiver
    reader, writer = await _raw(address, wire.encode_hello("x", 7, SECRET, CHUNK_BYTES)[:10])
    with pytest.raises(MoveError) as error:
        wire.check_answer(await reader.readexactly(1))
    assert error.value.reason is MoveReason.TIMEOUT
    await settled(lambda: mover.intakes == 0)
    writer.close()


async def test_a_receiver_that_dies_midway_is_an_error_at_once(sender):
    async def half(reader, writer):
        await reader.readexactly(wire.HELLO.size + 1)
        writer.write(wire.encode_answer(None))
        await reader.readexactly(50_000)
        writer.transport.abort()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(MoveError) as error:
        await sender.send(f"127.0.0.1:{port}", SECRET, "x", 7, BLOCKS * 200, CHUNK_BYTES)
    assert error.value.reason is MoveReason.CONNECTION
    server.close()


async def test_a_receiver_that_takes_nothing_is_given_up(sender):
    hold = asyncio.Event()

    async def stuck(reader, writer):
        await reader.readexactly(wire.HELLO.size + 1)
        writer.write(wire.encode_answer(None))
        await hold.wait()
        writer.close()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0, limit=1024)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(MoveError) as error:
        await sender.send(f"127.0.0.1:{port}", SECRET, "x", 7, BLOCKS * 100, CHUNK_BYTES)
    assert error.value.reason is MoveReason.TIMEOUT
    hold.set()
    server.close()


async def test_nobody_there_is_a_connection_error(receiver, sender):
    _, mover, address = receiver
    await mover.close()
    with pytest.raises(MoveError) as error:
        await sender.send(address, SECRET, "x", 7, BLOCKS, CHUNK_BYTES)
    assert error.value.reason is MoveReason.CONNECTION


async def test_a_cancelled_send_ends_at_both_sides(receiver, sender):
    pool, mover, address = receiver

    def slow():
        yield from BLOCKS[:64]
        while True:
            yield b"q" * 1024

    task = asyncio.create_task(sender.send(address, SECRET, "x", 7, slow(), CHUNK_BYTES))
    await settled(lambda: len(pool.received) >= 64)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(lambda: mover.intakes == 0)
    assert pool.completed == 0


async def test_more_transfers_than_allowed_are_told_busy():
    pool, mover = Pool(), TcpMover("127.0.0.1:0", max_intakes=1)
    address = await mover.serve(pool)
    _, first = await _raw(address, b"")
    await settled(lambda: mover.intakes == 1)
    with pytest.raises(MoveError) as error:
        await TcpMover("127.0.0.1:0").send(address, SECRET, "x", 7, BLOCKS, CHUNK_BYTES)
    assert error.value.reason is MoveReason.BUSY
    first.close()
    await mover.close()


SENDER = """
import asyncio, sys
from quartet_agent.kv.tcp import TcpMover

blocks = [bytes([index % 251]) * 1024 for index in range(500)] + [b"tail" * 40]
send = TcpMover("127.0.0.1:0").send(sys.argv[1], b"0123456789abcdef", "x", 7, blocks, 65536)
print(asyncio.run(send).wire_bytes)
"""


async def test_bytes_cross_between_two_processes(receiver):
    pool, _, address = receiver
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, address, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    assert int(out) > sum(map(len, BLOCKS))
    assert pool.received == BLOCKS
    assert pool.completed == 1
