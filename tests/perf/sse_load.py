"""A load of streams over HTTP that costs little itself: bytes are looked at only for where events begin and end.

A closed loop: so many streams are always open, each of which asks again as soon as its answer is whole.
"""

import asyncio
import statistics
import sys
import time
from typing import cast

from msgspec import Struct

_EVENT = b"data: "
_DONE = b"data: [DONE]\n\n"
PATIENCE_S = 60.0
_TAIL = len(_DONE) + 16
"""What is kept of the last bytes, so that a mark cut in two is found: a chunk's frame may stand behind it."""


class Measured(Struct):
    """What a run came to; times are medians over requests unless they say otherwise."""

    requests: int
    tokens: int
    wall_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    per_token_us: float
    """From the first token to the last, by the tokens between them."""
    errors: int


class _Stream(asyncio.Protocol):
    """One connection, asking one request after the other."""

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._sent_ns = 0
        self._first_ns = 0
        self._answered = False
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        self._run.transports.append(self._transport)
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._run.over:
            self._run.errors += 1
            self._run.complaint = self._run.complaint or f"connection lost after {self._tail!r}".encode()

    def data_received(self, data: bytes) -> None:
        if not self._answered:
            self._answered = True
            if not data.startswith(b"HTTP/1.1 200") and self._transport is not None:
                self._run.complaint = data[:400]
                self._transport.abort()  # counted as an error where it is lost
                return
        whole = self._tail + data
        # Marks in the kept tail alone were counted before.
        events = whole.count(_EVENT) - self._tail.count(_EVENT)
        if events and not self._first_ns:  # an engine may send its headers long before its first token
            self._first_ns = time.perf_counter_ns()
        self._events += events
        self._run.tokens += events
        self._tail = whole[-_TAIL:]
        if _DONE in self._tail and whole.endswith(b"0\r\n\r\n"):
            self._run.done(self._sent_ns, self._first_ns, self._events - 1)
            self._ask()

    def _ask(self) -> None:
        if self._run.over or self._transport is None:
            return
        self._tail = b""
        self._answered = False
        self._first_ns = self._events = 0
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(self._run.next_request())


class _Run:
    def __init__(self, requests: list[bytes]) -> None:
        self.over = False
        self.errors = 0
        self.complaint = b""
        self.transports: list[asyncio.Transport] = []
        self.ttft_ms: list[float] = []
        self.per_token_us: list[float] = []
        self.tokens = 0
        self._requests = requests
        self._next = 0

    def next_request(self) -> bytes:
        self._next += 1
        return self._requests[self._next % len(self._requests)]

    def done(self, sent_ns: int, first_ns: int, events: int) -> None:
        now_ns = time.perf_counter_ns()
        self.tokens -= 1  # the last event is no token
        self.ttft_ms.append((first_ns - sent_ns) / 1e6)
        if events > 1:
            self.per_token_us.append((now_ns - first_ns) / 1e3 / (events - 1))


def request(address: str, body: bytes) -> bytes:
    """The bytes of one inference request."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"x-quartet-no-hold: 1\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _until_whole(run: _Run, answers: int, at_least_s: float) -> None:
    started_s = time.monotonic()
    await asyncio.sleep(at_least_s)
    while len(run.ttft_ms) < answers:
        await asyncio.sleep(0.1)
        if run.errors == len(run.transports):
            raise RuntimeError(f"no answer was a stream: {run.complaint!r}")
        if time.monotonic() - started_s > PATIENCE_S:
            raise RuntimeError(f"{len(run.ttft_ms)} answers of {answers} were whole within {PATIENCE_S} s")


async def load(address: str, bodies: list[bytes], streams: int, warm_up_s: float, measured_s: float) -> Measured:
    """Keep ``streams`` streams open for a while, and say what came of the part behind the warm-up.

    Both parts last longer than asked where it takes longer until as many answers as streams are whole. Raises
    ``RuntimeError`` when that takes more than ``PATIENCE_S``. A stream that is refused ends, and is counted.
    """
    host, _, port = address.rpartition(":")
    run = _Run([request(address, body) for body in bodies])
    loop = asyncio.get_running_loop()
    for _ in range(streams):
        await loop.create_connection(lambda: _Stream(run), host, int(port))
    await _until_whole(run, streams, warm_up_s)
    run.ttft_ms.clear()
    run.per_token_us.clear()
    run.tokens = 0
    started_s = time.monotonic()
    await _until_whole(run, streams, measured_s)
    wall_s = time.monotonic() - started_s
    requests, tokens = len(run.ttft_ms), run.tokens
    ttft_ms, per_token_us = sorted(run.ttft_ms), run.per_token_us
    run.over = True
    if run.errors:
        print(f"{run.errors} streams failed, one with {run.complaint.decode(errors='replace')}", file=sys.stderr)
    for transport in run.transports:
        transport.abort()
    return Measured(
        requests=requests,
        tokens=tokens,
        wall_s=wall_s,
        ttft_p50_ms=ttft_ms[requests // 2],
        ttft_p99_ms=ttft_ms[requests * 99 // 100],
        per_token_us=statistics.median(per_token_us) if per_token_us else 0.0,
        errors=run.errors,
    )
