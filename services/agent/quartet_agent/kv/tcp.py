"""The TCP mover: real bytes over a stream, the secret first, every chunk with a checksum, every wait bounded.

A block is copied from the sender's memory into its kernel, from the receiver's kernel into one buffer a transfer, and
from there to where the lease says; nowhere else.
"""

import asyncio
import contextlib
import socket
from typing import Any

from quartet_agent.kv import sockets, wire
from quartet_agent.kv.door import Door
from quartet_agent.kv.mover import Blocks, Buffer, MoveError, MoveReason, Sent, Sink, chunks

_CONNECT_TIMEOUT_S = 2.0
_SILENCE_TIMEOUT_S = 5.0
_FOR_EVER_S = 24 * 3600.0
"""For whoever listens while it does something else, whose own waits are bounded."""
_MAX_INTAKES = 64


class TcpMover:
    """A ``Mover`` over TCP. ``listen`` is ``host:port``; port 0 takes a free one.

    ``silence_timeout_s`` bounds how long either side waits for the other's next bytes, ``max_intakes`` how many
    transfers are received at once: the next one is answered "busy". ``checksums`` must be alike on both sides.
    """

    kind = "tcp"

    def __init__(
        self,
        listen: str,
        *,
        silence_timeout_s: float = _SILENCE_TIMEOUT_S,
        max_intakes: int = _MAX_INTAKES,
        checksums: bool = True,
    ) -> None:
        self._silence_timeout_s = silence_timeout_s
        self._checksums = checksums
        self._door = Door(listen, self._receive, max_intakes=max_intakes)

    @property
    def intakes(self) -> int:
        """Connections from senders that are open."""
        return self._door.intakes

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``. Raises ``OSError`` when the address cannot be listened on."""
        return await self._door.open(sink)

    async def close(self) -> None:
        """As ``Mover.close``."""
        await self._door.close()

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Blocks, chunk_bytes: int
    ) -> Sent:
        """As ``Mover.send``."""
        chunk_bytes = min(chunk_bytes, wire.MAX_CHUNK_BYTES)
        hello = wire.encode_hello(transfer, epoch, secret, chunk_bytes)
        with await connected(address, hello, self._silence_timeout_s) as sock:
            return Sent(len(hello) + await self._send(sock, address, blocks, chunk_bytes), "TCP")

    async def _send(self, sock: socket.socket, address: str, blocks: Blocks, chunk_bytes: int) -> int:
        sent_bytes = len(wire.LAST_CHUNK)
        # A receiver that finds a chunk wrong says so at once, while we may still be writing: listen all the time.
        verdict = asyncio.ensure_future(sockets.received(sock, wire.ANSWER.size, _FOR_EVER_S))
        try:
            async with contextlib.aclosing(chunks(blocks, chunk_bytes)) as parts:
                async for first_block, group in parts:
                    if verdict.done():
                        break
                    header = wire.encode_chunk(first_block, group, checksums=self._checksums)
                    await self._write(sock, [header, *group] if group else [wire.STILL_HERE], verdict)
                    sent_bytes += len(header) + sum(map(len, group))
            if not verdict.done():
                await self._write(sock, [wire.LAST_CHUNK], verdict)
            async with asyncio.timeout(self._silence_timeout_s):
                wire.check_answer(await verdict)
            return sent_bytes
        except TimeoutError:
            raise MoveError(MoveReason.TIMEOUT, f"{address} takes no bytes") from None
        except OSError as error:
            raise MoveError(MoveReason.CONNECTION, f"{address}: {error}") from error
        finally:
            verdict.cancel()
            await asyncio.gather(verdict, return_exceptions=True)

    async def _write(self, sock: socket.socket, buffers: list[Buffer], verdict: "asyncio.Future[bytearray]") -> None:
        writing: asyncio.Future[None] = asyncio.ensure_future(sockets.send_all(sock, buffers, self._silence_timeout_s))
        try:
            waiting: set[asyncio.Future[Any]] = {writing, verdict}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                await self._written(writing, verdict)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _written(self, writing: "asyncio.Future[None]", verdict: "asyncio.Future[bytearray]") -> None:
        try:
            await writing
        except ConnectionError:
            # The receiver's reason, if it sent one before it hung up, says more than the broken pipe.
            if not (await asyncio.wait({verdict}, timeout=self._silence_timeout_s))[0] or verdict.exception():
                raise

    async def _receive(self, sock: socket.socket, sink: Sink, later: contextlib.ExitStack) -> None:
        silence_s = self._silence_timeout_s
        hello = wire.Hello(await sockets.received(sock, wire.HELLO.size, silence_s))
        transfer = wire.decode_name(await sockets.received(sock, hello.name_bytes, silence_s))
        intake = sink.open(transfer, hello.epoch, hello.secret)
        await sockets.send_all(sock, [wire.encode_answer(None)], silence_s)
        buffer = memoryview(bytearray(0))
        while True:
            header = wire.ChunkHeader(await sockets.received(sock, wire.CHUNK.size, silence_s))
            if header.last:
                intake.complete()
                return
            if header.waits:
                continue
            if header.payload_bytes > len(buffer):
                buffer = memoryview(bytearray(header.payload_bytes))
            payload = buffer[: header.payload_bytes]
            await sockets.receive(sock, payload, silence_s)
            intake.take(header.first_block, header.split(payload, checksums=self._checksums))


async def connected(address: str, hello: bytes, silence_timeout_s: float) -> socket.socket:
    """A connection whose receiver has accepted ``hello``: the lease is open. Raises ``MoveError``."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            sock = await sockets.connect(host.strip("[]"), int(port))
    except TimeoutError:
        raise MoveError(MoveReason.TIMEOUT, f"no connection to {address}", opened=False) from None
    except (OSError, ValueError) as error:
        raise MoveError(MoveReason.CONNECTION, f"{address}: {error}", opened=False) from error
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            await sockets.send_all(sock, [hello], silence_timeout_s)
            answer = await sockets.received(sock, wire.ANSWER.size, silence_timeout_s)
        except TimeoutError:
            raise MoveError(MoveReason.TIMEOUT, f"{address} does not answer") from None
        except OSError as error:
            raise MoveError(MoveReason.CONNECTION, f"{address}: {error}") from error
        wire.check_answer(answer, opened=False)
        undo.pop_all()
    return sock
