"""Writing frames to a client's inbox: a decode agent's numbered stream, and what a router says before there is one."""

import asyncio

import msgspec

from quartet_bus import frames
from quartet_bus.bus import Bus, Disconnected
from quartet_bus.messages import StreamId
from quartet_core.openai import Refused

ALIVE_S = 1.0
"""Longest silence of an author; receivers give up after twice that (``quartet_core.stream.SILENCE_MS``)."""


class _Voice:
    """Publishes frames of one stream to one inbox, and calls ``_on_silence`` when there was none for ``ALIVE_S``."""

    def __init__(self, bus: Bus, inbox: str, stream: StreamId, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.stream = stream
        self.unsaid = 0
        """Frames dropped because the broker is away; the receiver finds the gap."""
        self._bus = bus
        self._inbox = inbox
        self._loop = loop or asyncio.get_running_loop()
        self._said_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Say nothing more, not even that it is alive. Closing twice does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, frame: frames.AnyFrame) -> None:
        self._said_s = self._loop.time()
        try:
            self._bus.publish(self._inbox, frames.encode(frame))
        except Disconnected:
            self.unsaid += 1

    def _keep_alive(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(ALIVE_S, self._on_timer)

    def _on_timer(self) -> None:
        # One timer a second, however many frames were sent in it.
        silent_s = self._loop.time() - self._said_s
        if silent_s >= ALIVE_S - 0.002:  # uvloop's timers are whole milliseconds
            self._say(self._alive())
            silent_s = 0.0
        self._timer = self._loop.call_later(ALIVE_S - silent_s, self._on_timer)

    def _alive(self) -> frames.Alive:
        raise TypeError("a voice is an agent's or a router's")


class StreamAuthor(_Voice):
    """The one writer of a decode agent's frames for one try. Frames are numbered from 0; ``end`` or ``error`` is last.

    From ``accepted`` until it ends or is closed, a second of silence is broken by an ``Alive``. All calls may raise
    ``PayloadTooLarge``; what cannot be sent because the broker is away is dropped and counted in ``unsaid``.
    """

    def __init__(self, bus: Bus, inbox: str, stream: StreamId, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(bus, inbox, stream, loop)
        self._seq = 0
        self.ended = False
        """Whether ``end``, ``error`` or ``close`` was called; the author is mute since."""

    def accepted(self, worker: str) -> None:
        """The first frame: ``worker`` has the request."""
        stream = self.stream
        if not self.ended:
            self._say(
                frames.Accepted(id=stream.id, attempt=stream.attempt, try_=stream.try_, seq=self._next(), worker=worker)
            )
            self._keep_alive()

    def chunk(self, raw: bytes) -> None:
        """The engine's next JSON object, as it is."""
        stream = self.stream
        if not self.ended:
            self._say(
                frames.Chunk(
                    id=stream.id, attempt=stream.attempt, try_=stream.try_, seq=self._next(), data=msgspec.Raw(raw)
                )
            )

    def end(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """The stream is whole."""
        stream = self.stream
        if not self.ended:
            self._say(
                frames.End(
                    id=stream.id,
                    attempt=stream.attempt,
                    try_=stream.try_,
                    seq=self._next(),
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    output_tokens=output_tokens,
                )
            )
            self.close()

    def error(self, refused: Refused) -> None:
        """The request failed; ``refused`` is what the client is told."""
        if not self.ended:
            self._say(_error(self.stream, refused, self._next()))
            self.close()

    def close(self) -> None:
        """Be silent from now on, as after a cancel."""
        self.ended = True
        super().close()

    def _next(self) -> int:
        seq = self._seq
        self._seq = seq + 1
        return seq

    def _alive(self) -> frames.Alive:
        stream = self.stream
        return frames.Alive(id=stream.id, attempt=stream.attempt, try_=stream.try_, seq=self._next())


class RouterFrames(_Voice):
    """What a router tells a client: that it is held, that it lives while held, or that it failed. Nothing is numbered.

    ``stream`` may be set to the next try.
    """

    def held(self, remaining_ms: float) -> None:
        """The request waits for at most ``remaining_ms`` more; ``Alive`` follows every second until ``dispatched``."""
        stream = self.stream
        self._say(
            frames.Held(id=stream.id, attempt=stream.attempt, try_=stream.try_, remaining_ms=max(remaining_ms, 0.0))
        )
        self._keep_alive()

    def dispatched(self) -> None:
        """From here on the agent speaks."""
        self.close()

    def error(self, refused: Refused) -> None:
        """The request failed; ``refused`` is what the client is told."""
        self._say(_error(self.stream, refused, None))
        self.close()

    def _alive(self) -> frames.Alive:
        stream = self.stream
        return frames.Alive(id=stream.id, attempt=stream.attempt, try_=stream.try_)


def _error(stream: StreamId, refused: Refused, seq: int | None) -> frames.Error:
    return frames.Error(
        id=stream.id,
        attempt=stream.attempt,
        try_=stream.try_,
        status=refused.status,
        error=refused.body,
        seq=seq,
        retry_after_s=refused.retry_after_s,
    )
