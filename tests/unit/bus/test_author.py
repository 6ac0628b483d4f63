"""Frames as an agent and a router write them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from quartet_bus import frames
from quartet_bus.author import RouterFrames, StreamAuthor
from quartet_bus.bus import PayloadTooLarge
from quartet_bus.loop import START_S, run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import StreamId
from quartet_core.openai import all_busy, invalid

STREAM = StreamId("r", 2, 3)


class Inbox:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.heard: list[tuple[float, frames.AnyFrame]] = []

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        await self.bus.subscribe(
            "in", lambda message: self.heard.append((round(loop.time() - START_S, 3), frames.decode(message.data)))
        )

    @property
    def frames(self) -> list[frames.AnyFrame]:
        return [frame for _, frame in self.heard]


def virtual(test: Callable[[Inbox], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def whole() -> None:
        inbox = Inbox()
        await inbox.listen()
        await test(inbox)

    def run() -> None:
        run_virtual(whole())

    run.__name__ = test.__name__
    return run


@virtual
async def test_an_agents_frames_are_numbered_from_0_and_say_whose_they_are(inbox: Inbox) -> None:
    author = StreamAuthor(inbox.bus, "in", STREAM)
    author.accepted("h1-0")
    author.chunk(b'{"a":  1}')
    author.end(prompt_tokens=1, cached_tokens=2, output_tokens=3)
    await asyncio.sleep(0.01)
    accepted, chunk, end = inbox.frames
    assert accepted == frames.Accepted(id="r", attempt=2, try_=3, seq=0, worker="h1-0")
    assert isinstance(chunk, frames.Chunk)
    assert (chunk.seq, bytes(chunk.data)) == (1, b'{"a":  1}')
    assert end == frames.End(id="r", attempt=2, try_=3, seq=2, prompt_tokens=1, cached_tokens=2, output_tokens=3)


@virtual
async def test_a_second_of_silence_is_broken_and_chunks_put_it_off(inbox: Inbox) -> None:
    author = StreamAuthor(inbox.bus, "in", STREAM)
    author.accepted("w")
    await asyncio.sleep(2.5)
    author.chunk(b"1")
    await asyncio.sleep(1.2)
    author.end()
    await asyncio.sleep(10.0)
    told = [(at, type(frame).__name__, frame.seq) for at, frame in inbox.heard if not isinstance(frame, frames.Held)]
    assert told == [
        (0.0, "Accepted", 0),
        (1.0, "Alive", 1),
        (2.0, "Alive", 2),
        (2.5, "Chunk", 3),
        (3.5, "Alive", 4),
        (3.7, "End", 5),
    ]


@pytest.mark.parametrize("last", ["end", "error", "close"])
def test_after_its_last_frame_an_author_is_mute(last: str) -> None:
    @virtual
    async def check(inbox: Inbox) -> None:
        author = StreamAuthor(inbox.bus, "in", STREAM)
        author.accepted("w")
        if last == "error":
            author.error(invalid("no"))
        else:
            getattr(author, last)()
        said = len(inbox.frames)
        await asyncio.sleep(0.01)
        said = len(inbox.frames)
        author.chunk(b"1")
        author.end()
        author.error(invalid("again"))
        author.close()
        await asyncio.sleep(10.0)
        assert author.ended
        assert len(inbox.frames) == said

    check()


@virtual
async def test_an_error_carries_status_body_and_retry(inbox: Inbox) -> None:
    RouterFrames(inbox.bus, "in", STREAM).error(all_busy("m", 2.0))
    StreamAuthor(inbox.bus, "in", STREAM).error(invalid("no", "prompt"))
    await asyncio.sleep(0.01)
    busy, wrong = inbox.frames
    assert isinstance(busy, frames.Error)
    assert isinstance(wrong, frames.Error)
    assert (busy.status, busy.error.code, busy.retry_after_s, busy.seq) == (429, "all_busy", 2.0, None)
    assert (wrong.status, wrong.error.param, wrong.retry_after_s, wrong.seq) == (400, "prompt", 0.0, 0)


@virtual
async def test_a_router_says_that_a_held_request_lives_until_it_is_dispatched(inbox: Inbox) -> None:
    router = RouterFrames(inbox.bus, "in", STREAM)
    router.held(5000.0)
    await asyncio.sleep(2.5)
    router.dispatched()
    await asyncio.sleep(10.0)
    assert [(at, type(frame).__name__) for at, frame in inbox.heard] == [(0.0, "Held"), (1.0, "Alive"), (2.0, "Alive")]
    assert inbox.frames[1] == frames.Alive(id="r", attempt=2, try_=3, seq=None)


@virtual
async def test_the_next_try_of_a_router_is_named_in_its_frames(inbox: Inbox) -> None:
    router = RouterFrames(inbox.bus, "in", STREAM)
    router.stream = StreamId("r", 2, 4)
    router.held(-1.0)
    router.dispatched()
    await asyncio.sleep(0.01)
    assert inbox.frames == [frames.Held(id="r", attempt=2, try_=4, remaining_ms=0.0)]


@virtual
async def test_what_cannot_be_sent_is_counted_and_what_is_too_large_is_the_callers_to_know(inbox: Inbox) -> None:
    author = StreamAuthor(inbox.bus, "in", STREAM)
    with pytest.raises(PayloadTooLarge):
        author.chunk(b'"%s"' % bytes(9_000_000))
    await inbox.bus.close()
    author.end()
    assert author.unsaid == 1
    assert msgspec.json.decode(frames.encode(frames.Alive(id="r", attempt=1, try_=1)))["try"] == 1
