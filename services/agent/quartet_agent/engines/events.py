"""KV events of one engine, heard over ZMQ: a subscription, replays of what was missed, and the mirrors they keep."""

import asyncio
import errno
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from quartet_core.block_mirror import BlockMirror, SaltOf
from quartet_core.event_sequence import Apply, EventSequence, Replay, Reset, Step
from quartet_core.kv_events import MalformedEvents, decode

_HIGH_WATER: Final = 100_000
"""Batches that ZMQ keeps for us at most; beyond, it drops, and the numbers tell."""

_REPLAY_TIMEOUT_S: Final = 5.0
_REPLAY_END: Final = b"\xff" * 8


class Source(NamedTuple):
    """Where one publisher of KV events is. ``binds``: the engine connects to it, so that we must be there, unless the
    engine is there itself after all."""

    endpoint: str
    replay: str = ""
    binds: bool = False


def sources_of(told: tuple[tuple[str, str], ...], url: str) -> tuple[Source, ...]:
    """The publishers that an engine at ``url`` told of, as they are reached from here.

    vLLM binds an endpoint with ``*`` in it, and connects to any other: that one is where a subscriber must listen. But
    of ``tcp://*:0`` it tells the address that it has got, and SGLang binds ``0.0.0.0``, too; so that for an address of
    this kind only trying shows who listens.
    """
    host = urlsplit(url).hostname or "127.0.0.1"
    return tuple(
        Source(_reachable(endpoint, host), _reachable(replay, host), binds=not _engine_binds(endpoint))
        for endpoint, replay in told
    )


def sources_in(events: str, replay: str) -> tuple[Source, ...]:
    """The publishers that the configuration names, comma-separated, each with its replay endpoint if there are any."""
    replays = [part.strip() for part in replay.split(",")] if replay else []
    found = [part.strip() for part in events.split(",") if part.strip()]
    return tuple(
        Source(endpoint, replays[index] if index < len(replays) else "") for index, endpoint in enumerate(found)
    )


def _engine_binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _reachable(endpoint: str, host: str) -> str:
    return endpoint.replace("*", host).replace("0.0.0.0", host)


def _bound(socket: zmq.asyncio.Socket, endpoint: str) -> bool:
    """Listen at ``endpoint``; False where somebody does already. Raises ``zmq.ZMQError``."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        # EADDRNOTAVAIL: an address of another host is not ours to listen at.
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return False
        raise
    return True


class EventLine:
    """Follows one publisher and keeps its mirror. ``malformed`` and ``batches`` count what came."""

    def __init__(self, source: Source, salt_of: SaltOf, moved: Callable[[], None]) -> None:
        self.source = source
        self.mirror = BlockMirror(salt_of)
        self.batches = 0
        self.malformed = 0
        self.unknown = 0
        self.unheard = 0
        """Replays that were asked for and not answered."""
        self.problem = ""
        """Why there is no subscription, "" while there is."""
        self._moved = moved
        self._sequence = EventSequence(replays=bool(source.replay))

    async def run(self) -> None:
        """Follow until cancelled."""
        context = zmq.asyncio.Context()
        try:
            await self._follow(context)
        except zmq.ZMQError as error:
            self.problem = f"{self.source.endpoint}: {error}"
        finally:
            context.destroy(linger=0)

    def figures(self) -> dict[str, int]:
        """What came of this publisher."""
        return {
            "batches": self.batches,
            "malformed": self.malformed,
            "unknown": self.unknown,
            "gaps": self._sequence.gaps,
            "resets": self._sequence.resets,
            "unheard_replays": self.unheard,
            "held_blocks": self.mirror.held_blocks,
            "block_tokens": self.mirror.block_tokens,
            "orphans": self.mirror.orphans,
            "unattributed": self.mirror.unattributed,
            "overflows": self.mirror.overflows,
        }

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        if not self.source.binds or not _bound(socket, self.source.endpoint):
            socket.connect(self.source.endpoint)
        # Subscribed first, asked for the past then: nothing falls between the two.
        await self._do(context, self._sequence.connected())
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                self.malformed += 1
                continue
            await self._do(context, self._sequence.live(int.from_bytes(frames[1], "big"), frames[2]))

    async def _do(self, context: zmq.asyncio.Context, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case Apply(payload):
                    self._apply(payload)
                case Reset():
                    self.mirror.clear()
                case Replay(start):
                    await self._replay(context, start)

    def _apply(self, payload: bytes) -> None:
        self.batches += 1
        self._moved()
        try:
            batch = decode(payload)
        except MalformedEvents:
            # What it said of the cache is lost, as if it had not come.
            self.malformed += 1
            self.mirror.clear()
            return
        self.unknown += batch.unknown
        for event in batch.events:
            self.mirror.apply(event)

    async def _replay(self, context: zmq.asyncio.Context, start: int) -> None:
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                frames = await asyncio.wait_for(socket.recv_multipart(), _REPLAY_TIMEOUT_S)
                # Newer engines put the topic before the number; number and payload are always the last two.
                if len(frames) < 3 or len(frames[-2]) != 8:
                    self.malformed += 1
                    continue
                if frames[-2] == _REPLAY_END:
                    break
                await self._do(context, self._sequence.replayed(int.from_bytes(frames[-2], "big"), frames[-1]))
        except (TimeoutError, zmq.ZMQError):
            self.unheard += 1
        finally:
            socket.close(linger=0)
        await self._do(context, self._sequence.replay_ended())
