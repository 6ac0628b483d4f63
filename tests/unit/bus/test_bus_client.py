"""The client library against a router and workers played by the test, in virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.author import RouterFrames, StreamAuthor
from quartet_bus.bus import Headers, Message
from quartet_bus.client import Client, InferError
from quartet_bus.headers import RequestHeaders, parse_headers
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import Cancel, StreamId
from quartet_core.openai import all_busy, invalid, late, stopping

BODY = b'{"prompt":"hi"}'


class World:
    """A broker, a client, and everything that was said to routers."""

    def __init__(self, **options: Any) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.client = Client(MemoryBus(self.broker), "acme", source=random.Random(1), **options)
        self.requests: list[tuple[float, Message]] = []
        self.cancels: list[Cancel] = []

    async def listen(self, on_request: Callable[[StreamId, str], None]) -> None:
        """Play the router: ``on_request(stream, inbox)`` for every request."""
        loop = asyncio.get_running_loop()

        def hear(message: Message) -> None:
            self.requests.append((loop.time(), message))
            said = parse_headers(message.headers, trusted=False)
            on_request(StreamId(said.request_id, said.attempt, 1), message.reply)

        await self.bus.subscribe(subjects.infer("acme", "chat").subject, hear)
        await self.bus.subscribe(
            subjects.cancel_all().subject,
            lambda message: self.cancels.append(msgspec.msgpack.decode(message.data, type=Cancel)),
        )

    def author(self, stream: StreamId, inbox: str, try_: int = 1) -> StreamAuthor:
        return StreamAuthor(self.bus, inbox, StreamId(stream.id, stream.attempt, try_))


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on a virtual loop."""

    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    return run


@virtual
async def test_an_answer_is_its_chunks_as_they_came_and_then_its_end() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("h1-0")
        author.chunk(b'{"a": 1}')
        author.chunk(b'{"b":  [2]}')
        author.end(prompt_tokens=3, cached_tokens=1, output_tokens=2)

    await world.listen(on_request)
    async with await world.client.infer("chat", BODY) as answer:
        assert [chunk async for chunk in answer] == [b'{"a": 1}', b'{"b":  [2]}']
        assert answer.end is not None
        assert (answer.end.prompt_tokens, answer.end.cached_tokens, answer.end.output_tokens) == (3, 1, 2)
        assert answer.worker == "h1-0"
    assert world.cancels == []
    assert world.requests[0][1].data == BODY
    assert world.requests[0][1].reply.startswith("_INBOX.acme.")


@virtual
async def test_without_a_router_the_request_fails_with_503_at_once() -> None:
    world = World()
    started = asyncio.get_running_loop().time()
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", BODY)
    assert (caught.value.status, caught.value.body.code) == (503, "no_router")
    assert asyncio.get_running_loop().time() - started < 0.1


@virtual
async def test_a_refusal_carries_its_status_error_object_and_retry_time() -> None:
    world = World()
    await world.listen(lambda stream, inbox: RouterFrames(world.bus, inbox, stream).error(all_busy("chat", 2.5)))
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", BODY)
    assert (caught.value.status, caught.value.body.code, caught.value.retry_after_s) == (429, "all_busy", 2.5)
    assert world.cancels == []


@virtual
async def test_silence_sends_the_same_request_again_on_a_fresh_inbox_with_what_remains_of_the_deadline() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        if stream.attempt == 3:
            author = world.author(stream, inbox)
            author.accepted("w")
            author.chunk(b"{}")
            author.end()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY, headers=RequestHeaders(deadline_ms=10_000))
    assert [chunk async for chunk in answer] == [b"{}"]
    times = [at for at, _ in world.requests]
    assert [round(later - times[0], 2) for later in times] == [0.0, 2.0, 4.0]
    said = [parse_headers(message.headers, trusted=False) for _, message in world.requests]
    assert [headers.attempt for headers in said] == [1, 2, 3]
    assert [headers.deadline_ms for headers in said] == [10_000, 8_000, 6_000]
    assert len({headers.request_id for headers in said}) == 1
    assert len({message.reply for _, message in world.requests}) == 3
    await asyncio.sleep(0.01)
    assert [(cancel.attempt, cancel.try_) for cancel in world.cancels] == [(1, 0), (2, 0)]


@virtual
async def test_three_silent_attempts_are_an_error_and_cancelled() -> None:
    world = World()
    await world.listen(lambda stream, inbox: None)
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", BODY)
    assert (caught.value.status, caught.value.body.code) == (503, "no_answer")
    assert len(world.requests) == 3
    await asyncio.sleep(0.01)
    assert [(cancel.attempt, cancel.try_) for cancel in world.cancels] == [(0, 0)]


@virtual
async def test_a_held_request_is_not_silent_and_its_deadline_counts() -> None:
    world = World()
    await world.listen(lambda stream, inbox: RouterFrames(world.bus, inbox, stream).held(60_000.0))
    started = asyncio.get_running_loop().time()
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", BODY, headers=RequestHeaders(deadline_ms=7_000))
    assert (caught.value.status, caught.value.body) == (504, late().body)
    assert asyncio.get_running_loop().time() - started == pytest.approx(7.0, abs=0.01)
    assert len(world.requests) == 1


@virtual
async def test_a_slow_prefill_lives_on_the_agents_signs_of_life() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")

        def finish() -> None:
            author.chunk(b"{}")
            author.end()

        asyncio.get_running_loop().call_later(30.0, finish)

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert [chunk async for chunk in answer] == [b"{}"]
    assert len(world.requests) == 1


@virtual
async def test_a_worker_that_falls_silent_after_the_first_chunk_is_a_lost_stream() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"1")
        author.close()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert await anext(answer) == b"1"
    with pytest.raises(InferError) as caught:
        await anext(answer)
    assert (caught.value.status, caught.value.body.code) == (502, "stream_lost")
    assert len(world.requests) == 1


@virtual
async def test_a_lost_frame_is_an_error_after_what_came_before_it() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"1")

        lost = StreamAuthor(world.bus, "lost.on.the.way", stream)
        author._inbox, kept = lost._inbox, author._inbox
        author.chunk(b"2")
        author._inbox = kept
        author.chunk(b"3")

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert await anext(answer) == b"1"
    with pytest.raises(InferError) as caught:
        await anext(answer)
    assert caught.value.body.code == "stream_gap"
    await asyncio.sleep(0.01)
    assert [(cancel.attempt, cancel.try_) for cancel in world.cancels] == [(0, 0)]


@virtual
async def test_of_two_tries_the_first_chunk_wins_and_the_other_is_cancelled() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        slow, quick = world.author(stream, inbox, 1), world.author(stream, inbox, 2)
        slow.accepted("slow")
        quick.accepted("quick")
        quick.chunk(b'"q1"')
        slow.chunk(b'"s1"')
        quick.chunk(b'"q2"')
        slow.end()
        quick.end()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert [chunk async for chunk in answer] == [b'"q1"', b'"q2"']
    assert answer.worker == "quick"
    await asyncio.sleep(0.01)
    assert [(cancel.attempt, cancel.try_) for cancel in world.cancels] == [(1, 1)]


@virtual
async def test_leaving_an_answer_early_cancels_it_everywhere_once() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"1")

    await world.listen(on_request)
    async with await world.client.infer("chat", BODY, headers=RequestHeaders(request_id="mine")) as answer:
        assert await anext(answer) == b"1"
    await answer.aclose()
    await asyncio.sleep(10.0)
    assert world.cancels == [Cancel("mine", 0, 0, "client")]
    assert len(world.requests) == 1


@virtual
async def test_cancelling_the_call_before_the_answer_begins_cancels_the_request() -> None:
    world = World()
    await world.listen(lambda stream, inbox: None)
    call = asyncio.ensure_future(world.client.infer("chat", BODY))
    await asyncio.sleep(0.5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(10.0)
    assert len(world.cancels) == 1
    assert len(world.requests) == 1


@virtual
async def test_an_answer_that_nobody_reads_fails_when_its_buffer_is_full() -> None:
    world = World(buffer_bytes=100)
    authors: list[StreamAuthor] = []

    def on_request(stream: StreamId, inbox: str) -> None:
        authors.append(world.author(stream, inbox))
        authors[0].accepted("w")
        for _ in range(5):
            authors[0].chunk(b'"%s"' % (b"x" * 38))

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    await asyncio.sleep(0.01)
    assert [await anext(answer), await anext(answer)] == [b'"%s"' % (b"x" * 38)] * 2
    with pytest.raises(InferError) as caught:
        await anext(answer)
    assert caught.value.body.code == "slow_reader"
    assert len(world.cancels) == 1


@virtual
async def test_one_chunk_larger_than_the_buffer_is_taken() -> None:
    world = World(buffer_bytes=100)

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b'"%s"' % (b"x" * 5000))
        author.end()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert [len(chunk) async for chunk in answer] == [5002]


@virtual
async def test_an_engines_400_reaches_the_caller_and_nothing_is_sent_again() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.error(invalid("no such field", "messages"))

    await world.listen(on_request)
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", BODY)
    assert (caught.value.status, caught.value.body.param) == (400, "messages")
    await asyncio.sleep(10)
    assert len(world.requests) == 1


@virtual
async def test_garbage_and_frames_of_other_requests_on_an_inbox_are_counted_and_ignored() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        world.bus.publish(inbox, b"\xff\x00 no frame")
        world.author(StreamId("another", 1, 1), inbox).accepted("w")
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"{}")
        author.end()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert [chunk async for chunk in answer] == [b"{}"]
    assert world.client.strays == 2


@virtual
async def test_a_request_too_large_for_the_broker_is_a_413() -> None:
    world = World()
    await world.listen(lambda stream, inbox: None)
    with pytest.raises(InferError) as caught:
        await world.client.infer("chat", bytes(9 * 1024 * 1024))
    assert caught.value.status == 413


@virtual
async def test_a_closed_bus_is_a_503() -> None:
    world = World()
    bus = MemoryBus(world.broker)
    client = Client(bus, "acme")
    await bus.close()
    with pytest.raises(InferError) as caught:
        await client.infer("chat", BODY)
    assert (caught.value.status, caught.value.body.code) == (503, "no_broker")


class _Away(MemoryBus):
    """The broker has gone, and what is published waits for it."""

    @property
    def connected(self) -> bool:
        return False

    def publish(self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "") -> None:
        pass


@virtual
async def test_silence_while_the_broker_is_away_is_blamed_on_it() -> None:
    with pytest.raises(InferError) as caught:
        await Client(_Away(World().broker), "acme").infer("chat", BODY)
    assert (caught.value.status, caught.value.body.code, caught.value.retry_after_s) == (503, "no_broker", 1.0)


@virtual
async def test_closing_the_client_cancels_every_open_answer() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"1")

    await world.listen(on_request)
    for _ in range(3):
        await world.client.infer("chat", BODY)
    await world.client.close()
    await asyncio.sleep(0.01)
    assert len(world.cancels) == 3


@virtual
async def test_two_thousand_answers_at_once_share_one_subscription() -> None:
    world = World()
    loop = asyncio.get_running_loop()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        for number in range(3):
            loop.call_later(0.5 * (number + 1), author.chunk, b"%d" % number)
        loop.call_later(2.5, author.end)

    await world.listen(on_request)

    async def one() -> list[bytes]:
        return [chunk async for chunk in await world.client.infer("chat", BODY)]

    answers = await asyncio.gather(*(one() for _ in range(2000)))
    assert answers == [[b"0", b"1", b"2"]] * 2000
    assert world.client.strays == 0
    assert len(world.client._inboxes) == 0


@virtual
async def test_a_request_that_a_stopping_router_gives_back_is_answered_by_the_next_one() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        if stream.attempt == 1:
            RouterFrames(world.bus, inbox, stream).error(stopping())
            return
        author = world.author(stream, inbox)
        author.accepted("w")
        author.chunk(b"1")
        author.end()

    await world.listen(on_request)
    answer = await world.client.infer("chat", BODY)
    assert [chunk async for chunk in answer] == [b"1"]
    assert (len(world.requests), world.client.resends) == (2, 1)
    assert world.requests[1][0] - world.requests[0][0] < 0.1


@virtual
async def test_an_engine_that_says_the_routers_code_is_not_obeyed() -> None:
    world = World()

    def on_request(stream: StreamId, inbox: str) -> None:
        author = world.author(stream, inbox)
        author.accepted("w")
        author.error(stopping())

    await world.listen(on_request)
    with pytest.raises(InferError):
        await world.client.infer("chat", BODY)
    assert len(world.requests) == 1


@virtual
async def test_an_answer_that_is_poured_out_comes_chunk_by_chunk_and_fills_no_buffer() -> None:
    world = World(buffer_bytes=100)
    authors: list[StreamAuthor] = []

    def on_request(stream: StreamId, inbox: str) -> None:
        authors.append(world.author(stream, inbox))
        authors[0].accepted("w")
        authors[0].chunk(b'"first"')

    await world.listen(on_request)
    got: list[bytes] = []
    answer = await world.client.infer("chat", BODY)
    pouring = asyncio.create_task(answer.pour(got.append))
    await asyncio.sleep(0.01)
    assert got == [b'"first"']
    for number in range(20):
        authors[0].chunk(b'"%030d"' % number)
    await asyncio.sleep(0.01)
    assert len(got) == 21
    assert not pouring.done()
    authors[0].end(output_tokens=21)
    await pouring
    assert answer.end is not None
    assert world.cancels == []


@virtual
async def test_pouring_ends_with_the_error_that_breaks_the_answer_off_and_leaving_it_cancels() -> None:
    world = World()
    authors: list[StreamAuthor] = []

    def on_request(stream: StreamId, inbox: str) -> None:
        authors.append(world.author(stream, inbox))
        authors[-1].accepted("w")
        authors[-1].chunk(b"1")

    await world.listen(on_request)
    got: list[bytes] = []
    answer = await world.client.infer("chat", BODY)
    pouring = asyncio.create_task(answer.pour(got.append))
    await asyncio.sleep(0.01)
    authors[0].error(invalid("broken"))
    with pytest.raises(InferError, match="broken"):
        await pouring
    async with await world.client.infer("chat", BODY) as left:
        pouring = asyncio.create_task(left.pour(got.append))
        await asyncio.sleep(0.01)
        pouring.cancel()
    await asyncio.sleep(0.01)
    assert [(cancel.id, cancel.reason) for cancel in world.cancels] == [(left.id, "client")]
    assert got == [b"1", b"1"]
    for author in authors:
        author.close()
