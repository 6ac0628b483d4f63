"""What every bus must do, told once. A bus is tested by a subclass that overrides ``clients``."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from quartet_bus.bus import Bus, Disconnected, LogSpec, Message, NoResponders, PayloadTooLarge, RequestTimeout

Buses = Callable[[], Awaitable[Bus]]

_numbers = itertools.count(1)


async def until(met: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Let the loop run until ``met``; fails the test when it does not happen."""
    async with asyncio.timeout(timeout_s):
        while not met():  # noqa: ASYNC110 - what is waited for happens in plain calls
            await asyncio.sleep(0.005)


async def held(bus: Bus, log: LogSpec, subject: str, last: bytes) -> list[Message]:
    """What ``log`` holds once ``last`` is in it: a broker may file messages a moment after it took them."""
    async with asyncio.timeout(5.0):
        while True:
            messages = [message async for message in bus.replay(log, subject)]
            if messages and messages[-1].data.startswith(last):
                return messages
            await asyncio.sleep(0.02)


class BusContract:
    """Each test gets ``connect``, which makes one more client of the same broker, and a ``base`` subject of its own."""

    def clients(self) -> AbstractAsyncContextManager[Buses]:
        raise TypeError("a contract is for subclasses")

    @pytest.fixture
    async def connect(self) -> AsyncIterator[Buses]:
        async with self.clients() as connect:
            yield connect

    @pytest.fixture
    def base(self) -> str:
        return f"contract.{next(_numbers)}"

    async def test_messages_of_one_publisher_arrive_in_order(self, connect: Buses, base: str) -> None:
        publisher, subscriber = await connect(), await connect()
        heard: list[bytes] = []
        await subscriber.subscribe(base, lambda message: heard.append(message.data))
        sent = [b"%d" % number for number in range(2000)]
        for data in sent:
            publisher.publish(base, data)
        await until(lambda: len(heard) == len(sent))
        assert heard == sent

    async def test_a_subscription_is_known_to_the_broker_when_subscribe_returns(
        self, connect: Buses, base: str
    ) -> None:
        publisher, subscriber = await connect(), await connect()
        heard: list[Message] = []
        await subscriber.subscribe(base, heard.append)
        publisher.publish(base, b"at once")
        await until(lambda: bool(heard))

    async def test_subject_data_headers_and_reply_arrive_as_sent(self, connect: Buses, base: str) -> None:
        publisher, subscriber = await connect(), await connect()
        heard: list[Message] = []
        await subscriber.subscribe(f"{base}.*", heard.append)
        publisher.publish(
            f"{base}.full", b"\x00\xff", headers={"Quartet-Session": "a b", "X": "1"}, reply=f"{base}.back"
        )
        publisher.publish(f"{base}.bare", b"")
        await until(lambda: len(heard) == 2)
        full, bare = (next(m for m in heard if m.subject == f"{base}.{name}") for name in ("full", "bare"))
        assert (full.data, dict(full.headers or {}), full.reply) == (
            b"\x00\xff",
            {"Quartet-Session": "a b", "X": "1"},
            f"{base}.back",
        )
        assert (bare.data, bare.headers, bare.reply) == (b"", None, "")

    @pytest.mark.parametrize(
        ("pattern", "hits", "misses"),
        [
            ("{b}.a", ("{b}.a",), ("{b}.b", "{b}.a.c", "{b}")),
            ("{b}.*", ("{b}.a", "{b}.b"), ("{b}", "{b}.a.b")),
            ("{b}.*.c", ("{b}.a.c",), ("{b}.a", "{b}.c", "{b}.a.d")),
            ("{b}.>", ("{b}.a", "{b}.a.b.c"), ("{b}",)),
        ],
    )
    async def test_wildcards_stand_for_one_token_or_for_the_rest(
        self, connect: Buses, base: str, pattern: str, hits: tuple[str, ...], misses: tuple[str, ...]
    ) -> None:
        bus = await connect()
        heard: list[str] = []
        await bus.subscribe(pattern.format(b=base), lambda message: heard.append(message.subject))
        await bus.subscribe(f"{base}-end", lambda message: heard.append("end"))
        for subject in (*misses, *hits):
            bus.publish(subject.format(b=base), b"")
        bus.publish(f"{base}-end", b"")
        await until(lambda: "end" in heard and len(heard) >= len(hits) + 1)
        assert sorted(heard) == sorted([*(hit.format(b=base) for hit in hits), "end"])

    async def test_everyone_hears_but_only_one_of_a_queue_group(self, connect: Buses, base: str) -> None:
        publisher = await connect()
        heard: dict[str, int] = {"a": 0, "b": 0, "plain": 0}

        def count(name: str) -> Callable[[Message], None]:
            def on_message(_: Message) -> None:
                heard[name] += 1

            return on_message

        await (await connect()).subscribe(base, count("a"), queue="workers")
        await (await connect()).subscribe(base, count("b"), queue="workers")
        await (await connect()).subscribe(base, count("plain"))
        for _ in range(200):
            publisher.publish(base, b"")
        await until(lambda: heard["plain"] == 200 and heard["a"] + heard["b"] >= 200)
        assert heard["a"] + heard["b"] == 200
        assert min(heard["a"], heard["b"]) > 20

    async def test_a_request_gets_the_first_answer(self, connect: Buses, base: str) -> None:
        asker, answerer = await connect(), await connect()
        await answerer.subscribe(base, lambda message: answerer.publish(message.reply, b"re: " + message.data))
        answers = await asyncio.gather(
            *(asker.request(base, b"%d" % number, timeout_s=5.0, headers={"N": "1"}) for number in range(50))
        )
        assert [answer.data for answer in answers] == [b"re: %d" % number for number in range(50)]

    async def test_a_request_that_nobody_hears_fails_at_once(self, connect: Buses, base: str) -> None:
        bus = await connect()
        with pytest.raises(NoResponders) as caught:
            await bus.request(base, b"", timeout_s=60.0)
        assert caught.value.subject == base

    async def test_a_publisher_with_a_reply_subject_is_told_that_nobody_listens(
        self, connect: Buses, base: str
    ) -> None:
        bus = await connect()
        heard: list[Message] = []
        await bus.subscribe(f"{base}.back", heard.append)
        bus.publish(f"{base}.nobody", b"x", reply=f"{base}.back")
        await until(lambda: bool(heard))
        assert heard[0].data == b""
        assert (heard[0].headers or {})["Status"] == "503"

    async def test_a_request_without_an_answer_times_out(self, connect: Buses, base: str) -> None:
        bus = await connect()
        await bus.subscribe(base, lambda message: None)
        with pytest.raises(RequestTimeout):
            await bus.request(base, b"", timeout_s=0.05)

    async def test_what_is_too_large_is_refused_and_the_bus_lives_on(self, connect: Buses, base: str) -> None:
        bus = await connect()
        heard: list[Message] = []
        await bus.subscribe(base, heard.append)
        limit = bus.max_payload_bytes
        with pytest.raises(PayloadTooLarge) as caught:
            bus.publish(base, bytes(limit + 1))
        assert (caught.value.size_bytes, caught.value.limit_bytes) == (limit + 1, limit)
        with pytest.raises(PayloadTooLarge):
            bus.publish(base, bytes(limit), headers={"Counts": "too"})
        bus.publish(base, bytes(limit))
        await until(lambda: bool(heard))
        assert len(heard[0].data) == limit

    async def test_a_handler_that_fails_does_not_end_its_subscription(self, connect: Buses, base: str) -> None:
        bus = await connect()
        heard: list[bytes] = []

        def on_message(message: Message) -> None:
            heard.append(message.data)
            if message.data == b"bad":
                raise ValueError("no")

        await bus.subscribe(base, on_message)
        for data in (b"good", b"bad", b"good again"):
            bus.publish(base, data)
        await until(lambda: len(heard) == 3)

    async def test_a_stopped_subscription_hears_no_more(self, connect: Buses, base: str) -> None:
        bus = await connect()
        heard: list[Message] = []
        subscription = await bus.subscribe(base, heard.append)
        await subscription.stop()
        await subscription.stop()
        later: list[Message] = []
        await bus.subscribe(base, later.append)
        bus.publish(base, b"")
        await until(lambda: bool(later))
        assert heard == []

    async def test_a_handler_may_publish_and_subscribers_may_come_from_handlers(
        self, connect: Buses, base: str
    ) -> None:
        bus = await connect()
        heard: list[bytes] = []
        await bus.subscribe(f"{base}.2", lambda message: heard.append(message.data))
        await bus.subscribe(f"{base}.1", lambda message: bus.publish(f"{base}.2", message.data * 2))
        bus.publish(f"{base}.1", b"ab")
        await until(lambda: heard == [b"abab"])

    async def test_flush_returns_when_everything_is_at_the_broker(self, connect: Buses, base: str) -> None:
        publisher, subscriber = await connect(), await connect()
        heard: list[Message] = []
        await subscriber.subscribe(base, heard.append)
        for _ in range(100):
            publisher.publish(base, b"x" * 1000)
        await publisher.flush()
        await publisher.close()
        await until(lambda: len(heard) == 100)

    async def test_nothing_is_unsent_once_it_is_at_the_broker(self, connect: Buses, base: str) -> None:
        bus = await connect()
        for _ in range(100):
            bus.publish(f"{base}.x", b"x" * 1000)
        assert 0 <= bus.unsent_bytes <= 200_000
        await bus.flush()
        assert bus.unsent_bytes == 0

    async def test_closing_sends_what_is_queued(self, connect: Buses, base: str) -> None:
        publisher, subscriber = await connect(), await connect()
        heard: list[Message] = []
        await subscriber.subscribe(base, heard.append)
        for _ in range(100):
            publisher.publish(base, b"x")
        await publisher.close()
        await until(lambda: len(heard) == 100)

    async def test_a_closed_bus_refuses_and_closing_twice_does_nothing(self, connect: Buses, base: str) -> None:
        bus = await connect()
        await bus.subscribe(base, lambda message: None)
        assert bus.connected
        await bus.close()
        await bus.close()
        assert not bus.connected
        with pytest.raises(Disconnected):
            bus.publish(base, b"")
        with pytest.raises(Disconnected):
            await bus.subscribe(base, lambda message: None)

    async def test_an_open_request_fails_when_its_bus_is_closed(self, connect: Buses, base: str) -> None:
        bus, other = await connect(), await connect()
        asked: list[Message] = []
        await other.subscribe(base, asked.append)
        request = asyncio.ensure_future(bus.request(base, b"", timeout_s=60.0))
        await until(lambda: bool(asked))
        await bus.close()
        with pytest.raises(Disconnected):
            await request

    async def test_a_kept_log_replays_what_it_holds_oldest_first_and_ends(self, connect: Buses, base: str) -> None:
        bus = await connect()
        log = LogSpec(base.replace(".", "-"), (f"{base}.>",), max_age_s=3600.0, max_bytes=1 << 20)
        await bus.keep(log)
        await bus.keep(log)
        sent = [b"%d" % number for number in range(600)]
        for data in sent:
            bus.publish(f"{base}.a", data, headers={"K": "v"})
        bus.publish(f"{base}.b", b"other")
        await bus.flush()
        other = await connect()
        replayed = await held(other, log, f"{base}.a", sent[-1])
        assert [message.data for message in replayed] == sent
        assert (replayed[0].subject, dict(replayed[0].headers or {})) == (f"{base}.a", {"K": "v"})
        assert [message.data for message in await held(other, log, f"{base}.b", b"other")] == [b"other"]
        assert [message.data async for message in other.replay(log, f"{base}.never")] == []

    async def test_a_kept_log_is_bounded_in_bytes_and_takes_a_new_spec(self, connect: Buses, base: str) -> None:
        bus = await connect()
        log = LogSpec(base.replace(".", "-"), (base,), max_age_s=3600.0, max_bytes=10_000)
        await bus.keep(log)
        for number in range(100):
            bus.publish(base, b"%03d" % number + bytes(997))
        await bus.flush()
        assert len(await held(bus, log, base, b"099")) <= 10
        wider = LogSpec(log.name, (base, f"{base}.more"), max_age_s=3600.0, max_bytes=100_000)
        await bus.keep(wider)
        bus.publish(f"{base}.more", b"new")
        await bus.flush()
        assert [message.data for message in await held(bus, wider, f"{base}.more", b"new")] == [b"new"]

    async def test_a_log_that_was_never_kept_holds_nothing(self, connect: Buses, base: str) -> None:
        bus = await connect()
        log = LogSpec("never-kept", (base,), max_age_s=1.0, max_bytes=1)
        assert [message async for message in bus.replay(log, base)] == []


def closing(make: Callable[[], Awaitable[Bus]]) -> AbstractAsyncContextManager[Buses]:
    """Clients that are closed when the test is over."""

    @asynccontextmanager
    async def clients() -> AsyncIterator[Buses]:
        made: list[Bus] = []

        async def connect() -> Bus:
            made.append(await make())
            return made[-1]

        try:
            yield connect
        finally:
            for bus in made:
                await bus.close()

    return clients()
