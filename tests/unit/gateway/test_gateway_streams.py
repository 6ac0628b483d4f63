"""Under a virtual clock: nothing here waits for real time."""

import asyncio

import pytest

from quartet_bus.loop import run_virtual
from quartet_core.openai import Refused
from quartet_gateway.streams import Streams


def streams(limit: int = 10) -> tuple[Streams, list[int]]:
    heard: list[int] = []
    return Streams(limit, 1000, heard.append), heard


async def answering(of: Streams, seconds: float, *, timeout_ms: float = 60_000) -> str:
    try:
        async with of.admit(timeout_ms):
            await asyncio.sleep(seconds)
            return "done"
    except Refused as refused:
        return f"{refused.status} {refused.body.code}"


def test_one_more_than_the_limit_is_429_with_a_time_to_retry():
    async def main():
        open_streams, _ = streams(2)
        busy = [asyncio.create_task(answering(open_streams, 5)) for _ in range(2)]
        await asyncio.sleep(1)
        with pytest.raises(Refused) as refused:
            async with open_streams.admit(1000):
                pass
        assert refused.value.status == 429
        assert refused.value.retry_after_s > 0
        assert [await task for task in busy] == ["done", "done"]
        assert await answering(open_streams, 1) == "done"

    run_virtual(main())


def test_the_count_is_given_back_on_every_path():
    async def main():
        open_streams, heard = streams()
        gone = asyncio.create_task(answering(open_streams, 100))
        await asyncio.sleep(1)
        gone.cancel()
        await asyncio.wait([gone])
        assert await answering(open_streams, 100, timeout_ms=500) == "504 request_timeout"
        with pytest.raises(ValueError, match="ours"):
            async with open_streams.admit(1000):
                raise ValueError("ours")
        assert open_streams.open == 0
        assert heard == [1, 0] * 3

    run_virtual(main())


def test_a_timeout_inside_is_not_taken_for_the_streams_own():
    async def main():
        open_streams, _ = streams()
        with pytest.raises(TimeoutError):
            async with open_streams.admit(60_000), asyncio.timeout(1):
                await asyncio.sleep(5)

    run_virtual(main())


def test_a_drain_waits_for_open_streams_and_admits_no_new_one():
    async def main():
        loop = asyncio.get_running_loop()
        open_streams, _ = streams()
        busy = asyncio.create_task(answering(open_streams, 3))
        await asyncio.sleep(1)
        drain = asyncio.create_task(open_streams.drain(10))
        await asyncio.sleep(1)
        assert await answering(open_streams, 1) == "503 shutting_down"
        began = loop.time()
        assert await drain == 0
        assert loop.time() - began == pytest.approx(1)
        assert await busy == "done"

    run_virtual(main())


def test_a_drain_ends_what_does_not_finish_in_time():
    async def main():
        loop = asyncio.get_running_loop()
        open_streams, _ = streams()
        endless = [asyncio.create_task(answering(open_streams, 1000, timeout_ms=1e6)) for _ in range(3)]
        await asyncio.sleep(1)
        began = loop.time()
        assert await open_streams.drain(5) == 3
        assert loop.time() - began == pytest.approx(5, abs=0.1)
        assert [await task for task in endless] == ["503 shutting_down"] * 3

    run_virtual(main())


def test_bodies_have_room_until_their_answers_begin():
    async def main():
        open_streams, _ = streams()
        async with open_streams.admit(1000) as first, open_streams.admit(1000) as second:
            first.hold(400)
            first.hold(300)
            with pytest.raises(Refused) as refused:
                second.hold(301)
            assert (refused.value.status, refused.value.body.code) == (429, "too_many_bytes")
            second.hold(300)
            first.release()
            second.hold(700)
            assert open_streams.held_bytes == 1000
        assert open_streams.held_bytes == 0

    run_virtual(main())
