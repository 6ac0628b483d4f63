"""The TCP mover: real bytes over a stream, the secret first, every chunk with a checksum, every wait bounded."""

import asyncio
import contextlib
from collections.abc import Iterable

from quartet_agent.kv import wire
from quartet_agent.kv.mover import Intake, MoveError, MoveReason, Sink, chunks

_CONNECT_TIMEOUT_S = 2.0
_SILENCE_TIMEOUT_S = 5.0
_MAX_INTAKES = 64
_READ_AHEAD_BYTES = 1024 * 1024


class TcpMover:
    """A ``Mover`` over asyncio streams. ``listen`` is ``host:port``; port 0 takes a free one.

    ``silence_timeout_s`` bounds how long either side waits for the other's next bytes, ``max_intakes`` how many
    transfers are received at once: the next one is answered "busy".
    """

    def __init__(
        self, listen: str, *, silence_timeout_s: float = _SILENCE_TIMEOUT_S, max_intakes: int = _MAX_INTAKES
    ) -> None:
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._silence_timeout_s = silence_timeout_s
        self._max_intakes = max_intakes
        self._server: asyncio.Server | None = None
        self._sink: Sink | None = None
        self._intakes: set[asyncio.Task[None]] = set()

    @property
    def intakes(self) -> int:
        """Connections from senders that are open."""
        return len(self._intakes)

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``. Raises ``OSError`` when the address cannot be listened on."""
        self._sink = sink
        self._server = await asyncio.start_server(
            self._on_connection, self._host or "127.0.0.1", self._port, limit=_READ_AHEAD_BYTES
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """As ``Mover.close``."""
        if self._server is not None:
            self._server.close()
            self._server = None
        intakes = list(self._intakes)
        for task in intakes:
            task.cancel()
        await asyncio.gather(*intakes, return_exceptions=True)

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Iterable[bytes], chunk_bytes: int
    ) -> int:
        """As ``Mover.send``."""
        hello = wire.encode_hello(transfer, epoch, secret)
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except TimeoutError:
            raise MoveError(MoveReason.TIMEOUT, f"no connection to {address}") from None
        except (OSError, ValueError) as error:
            raise MoveError(MoveReason.CONNECTION, f"{address}: {error}") from error
        try:
            return await self._send(reader, writer, hello, blocks, min(chunk_bytes, wire.MAX_CHUNK_BYTES))
        except TimeoutError:
            raise MoveError(MoveReason.TIMEOUT, f"{address} takes no bytes") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise MoveError(MoveReason.CONNECTION, f"{address}: {error}") from error
        finally:
            writer.close()

    async def _send(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: bytes,
        blocks: Iterable[bytes],
        chunk_bytes: int,
    ) -> int:
        writer.write(hello)
        async with asyncio.timeout(self._silence_timeout_s):
            wire.check_answer(await reader.readexactly(wire.ANSWER.size))
        sent_bytes = len(hello)
        # A receiver that finds a chunk wrong says so at once, while we may still be writing: listen all the time.
        verdict = asyncio.ensure_future(reader.readexactly(wire.ANSWER.size))
        try:
            for first_block, group in chunks(blocks, chunk_bytes):
                if verdict.done():
                    break
                header, payload = wire.encode_chunk(first_block, group)
                writer.write(header)
                writer.write(payload)
                sent_bytes += len(header) + len(payload)
                await self._drain(writer, verdict)
            if not verdict.done():
                writer.write(wire.LAST_CHUNK)
                await self._drain(writer, verdict)
            async with asyncio.timeout(self._silence_timeout_s):
                wire.check_answer(await verdict)
            return sent_bytes + len(wire.LAST_CHUNK)
        finally:
            verdict.cancel()
            await asyncio.gather(verdict, return_exceptions=True)

    async def _drain(self, writer: asyncio.StreamWriter, verdict: "asyncio.Future[bytes]") -> None:
        try:
            async with asyncio.timeout(self._silence_timeout_s):
                await writer.drain()
        except ConnectionError:
            # The receiver's reason, if it sent one before it hung up, says more than the broken pipe.
            if not (await asyncio.wait({verdict}, timeout=self._silence_timeout_s))[0] or verdict.exception():
                raise

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # asyncio runs connection callbacks in tasks of their own
        busy = len(self._intakes) >= self._max_intakes
        self._intakes.add(task)
        try:
            if busy:
                raise MoveError(MoveReason.BUSY)
            await self._receive(reader, writer)
            writer.write(wire.encode_answer(None))
        except MoveError as error:
            writer.write(wire.encode_answer(error.reason))
        except TimeoutError:
            writer.write(wire.encode_answer(MoveReason.TIMEOUT))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the sender is gone: nobody is left to tell, and its own agent reports the transfer as failed
        finally:
            self._intakes.discard(task)
            await _hang_up(writer)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        intake = await self._open(reader)
        writer.write(wire.encode_answer(None))
        while True:
            header = wire.ChunkHeader(await self._read(reader, wire.CHUNK.size))
            if header.last:
                intake.complete()
                return
            intake.take(header.first_block, header.split(await self._read(reader, header.payload_bytes)))

    async def _open(self, reader: asyncio.StreamReader) -> Intake:
        epoch, length, secret = wire.decode_hello(await self._read(reader, wire.HELLO.size))
        name = await self._read(reader, length)
        assert self._sink is not None  # set before the server listens
        try:
            transfer = name.decode()
        except UnicodeDecodeError:
            raise MoveError(MoveReason.PROTOCOL, "the transfer's name is not text") from None
        return self._sink.open(transfer, epoch, secret)

    async def _read(self, reader: asyncio.StreamReader, size: int) -> bytes:
        async with asyncio.timeout(self._silence_timeout_s):
            return await reader.readexactly(size)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close, giving an answer just written a moment to leave."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):
            await writer.wait_closed()
