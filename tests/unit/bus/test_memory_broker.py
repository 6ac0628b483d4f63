"""What the memory broker promises beyond the contract of a bus: the same run every time, and a log of it."""

import asyncio
import random

from quartet_bus.bus import LogSpec, Message
from quartet_bus.loop import START_S, run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus


def test_the_tap_sees_every_message_when_it_is_published() -> None:
    seen: list[tuple[float, str]] = []

    async def main() -> None:
        bus = MemoryBus(MemoryBroker(tap=lambda at, message: seen.append((at, message.subject)), delay_s=0.5))
        await bus.subscribe("a", lambda message: bus.publish("b", b""))
        bus.publish("a", b"")
        await asyncio.sleep(1.0)

    run_virtual(main())
    assert seen == [(START_S, "a"), (START_S + 0.5, "b")]


def test_messages_arrive_after_the_delay_in_the_order_they_were_published_by_anybody() -> None:
    async def main() -> list[tuple[float, bytes]]:
        loop = asyncio.get_running_loop()
        broker = MemoryBroker(delay_s=0.25)
        buses = [MemoryBus(broker) for _ in range(3)]
        heard: list[tuple[float, bytes]] = []
        for bus in buses:
            await bus.subscribe("a", lambda message: heard.append((loop.time() - START_S, message.data)))
        for number in range(4):
            buses[number % 3].publish("a", b"%d" % number)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        return heard

    heard = run_virtual(main())
    assert [data for _, data in heard] == [b"%d" % number for number in range(4) for _ in range(3)]
    assert [round(at, 6) for at, _ in heard[::3]] == [0.25, 0.35, 0.45, 0.55]


def test_members_of_a_queue_group_take_turns() -> None:
    async def main() -> list[str]:
        broker = MemoryBroker()
        heard: list[str] = []
        for name in ("a", "b", "c"):
            await MemoryBus(broker).subscribe("s.*", lambda message, name=name: heard.append(name), queue="q")
        publisher = MemoryBus(broker)
        for number in range(6):
            publisher.publish(f"s.{number}", b"")
        await asyncio.sleep(0.01)
        return heard

    assert run_virtual(main()) == ["a", "b", "c"] * 2


def test_the_same_program_gives_the_same_log() -> None:
    def run() -> list[tuple[float, Message]]:
        log: list[tuple[float, Message]] = []

        async def main() -> None:
            source = random.Random(7)
            broker = MemoryBroker(delay_s=0.001, tap=lambda at, message: log.append((at, message)))
            buses = [MemoryBus(broker) for _ in range(5)]
            for bus in buses:

                def on_message(message: Message, bus: MemoryBus = bus) -> None:
                    if len(message.data) < 6:
                        bus.publish(f"t.{source.randrange(3)}", message.data + b"x")

                await bus.subscribe("t.*", on_message, queue=source.choice(["", "q"]))
            buses[0].publish("t.0", b"")
            await asyncio.sleep(1.0)

        run_virtual(main())
        return log

    first = run()
    assert len(first) > 10
    assert first == run()


def test_a_kept_log_forgets_what_is_too_old() -> None:
    async def main() -> list[bytes]:
        bus = MemoryBus(MemoryBroker())
        log = LogSpec("l", ("a.>",), max_age_s=10.0, max_bytes=1000)
        await bus.keep(log)
        for number in range(4):
            bus.publish("a.b", b"%d" % number)
            await asyncio.sleep(4.0)
        return [message.data async for message in bus.replay(log, "a.*")]

    assert run_virtual(main()) == [b"2", b"3"]
