"""What one token costs a gateway between the broker's socket and its stream. ``make bench ONLY=message``.

``read``: a message is found in what the broker sent and handed to its handler, by our parser and by nats-py's own.
``take``: the handler (``quartet_bus.client``) decodes the frame, checks its place in the stream and delivers it. CPU
time in one process without any I/O, the best of many rounds: so it says the same on a machine that others use, too.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec
from nats.protocol.parser import Parser

from quartet_bus import frames
from quartet_bus.bus import Headers, Message, Subscription
from quartet_bus.client import Answer, Client
from quartet_bus.headers import RequestHeaders
from quartet_bus.nats_direct import DirectClient

MESSAGES, ROUNDS, READ_BYTES = 4_000, 40, 32_768
INBOX = f"_INBOX.public.{'a' * 32}.{'b' * 32}"
TOKEN = msgspec.json.encode(
    {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "bench",
     "choices": [{"index": 0, "text": " token", "finish_reason": None, "logprobs": None}]}
)  # fmt: skip


class _NoBus:
    """As much of a bus as an answer needs that only receives."""

    connected = True
    max_payload_bytes = 1 << 20
    unsent_bytes = 0

    def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "", urgent: bool = False
    ) -> None:
        """Keep nothing."""

    async def subscribe(self, subject: str, handler: Callable[[Message], None], *, queue: str = "") -> Subscription:
        """Nothing ever comes."""
        raise NotImplementedError


def _frame(seq: int) -> bytes:
    return frames.encode(frames.Chunk(id="c" * 32, attempt=1, try_=1, seq=seq, data=msgspec.Raw(TOKEN)))


async def _best_us(step: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """The least CPU time of a message, and by how much more the median round took."""
    rounds = []
    for _ in range(ROUNDS):
        started_ns = time.thread_time_ns()
        await step()
        rounds.append((time.thread_time_ns() - started_ns) / MESSAGES / 1e3)
    rounds.sort()
    return rounds[0], rounds[ROUNDS // 2] / rounds[0] - 1.0


async def _read(parser: str) -> tuple[float, float]:
    client = DirectClient()
    client._handlers[1] = lambda message: None
    if parser == "nats-py":
        client._ps = Parser(client)
    body = _frame(7)
    wire = b"".join([b"MSG %b 1 %d\r\n%b\r\n" % (INBOX.encode(), len(body), body)] * MESSAGES)

    async def step() -> None:
        for at in range(0, len(wire), READ_BYTES):
            await client._ps.parse(wire[at : at + READ_BYTES])

    return await _best_us(step)


async def _take() -> tuple[float, float]:
    client = Client(_NoBus(), "public")  # type: ignore[arg-type]  # all that is used of one
    answer = Answer(client, "s", b"{}", RequestHeaders(request_id="c" * 32), "c" * 32)
    client.send(answer, 1, "s", b"{}", RequestHeaders())
    inbox = answer.inboxes[0]
    answer._take = lambda data: None
    seq = 0

    async def step() -> None:
        nonlocal seq
        for message in [Message(inbox, _frame(seq + number)) for number in range(MESSAGES)]:
            client._on_message(message)
        seq += MESSAGES

    async def making() -> None:
        for number in range(MESSAGES):
            Message(inbox, _frame(number))

    made_us, _ = await _best_us(making)
    us, spread = await _best_us(step)
    if client.strays:
        raise RuntimeError(f"{client.strays} frames were not the answer's")
    return us - made_us, spread


def run() -> Iterator[dict[str, object]]:
    """Three lines, in some seconds."""
    for what, parser in (("read", "ours"), ("read", "nats-py"), ("take", "")):
        us, spread = asyncio.run(_read(parser) if what == "read" else _take())
        yield {
            "bench": "message",
            "config": {"what": what, "frame_bytes": len(_frame(7)), **({"parser": parser} if parser else {})},
            "cpu_us_each": round(us, 2),
            "runs": ROUNDS,
            "spread": round(spread, 3),
        }


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
