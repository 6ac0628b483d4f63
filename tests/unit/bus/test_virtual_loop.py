"""Virtual time jumps, and nothing else about the loop changes."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.loop import START_S, Deadlock, VirtualLoop, clock_of, run_virtual


def test_an_hour_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main()) == START_S + 3600
    assert time.monotonic() - began < 5.0


@given(st.lists(st.floats(0, 1000, allow_subnormal=False), min_size=1, max_size=30))
def test_timers_fire_in_order_each_at_its_time(delays_s: list[float]) -> None:
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        fired: list[tuple[float, float]] = []
        for delay_s in delays_s:
            loop.call_later(delay_s, lambda d: fired.append((d, loop.time() - began)), delay_s)
        await asyncio.sleep(1001)
        return fired

    fired = run_virtual(main())
    assert sorted(delay_s for delay_s, _ in fired) == sorted(delays_s)
    assert all(abs(at - delay_s) < 1e-6 for delay_s, at in fired)
    assert [at for _, at in fired] == sorted(at for _, at in fired)


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(1.0, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time() - began

    assert run_virtual(main()) == 0.0


def test_waiting_for_what_can_never_happen_is_an_error_that_names_the_waiting() -> None:
    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="waits for nothing")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    assert "waits for nothing" in caught.value.waiting


def test_a_virtual_loop_runs_no_threads() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(RuntimeError, match="no threads"):
        run_virtual(main())


def test_the_clock_of_a_virtual_loop_is_virtual_and_of_others_monotonic() -> None:
    async def main() -> int:
        return clock_of(asyncio.get_running_loop())()

    assert run_virtual(main()) == START_S * 1e9
    assert abs(asyncio.run(main()) - time.monotonic_ns()) < 5e9


def test_a_timeout_ends_in_virtual_time() -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(main())


def test_a_loop_may_start_at_any_time() -> None:
    loop = VirtualLoop(5.0)
    assert loop.time() == 5.0
    loop.close()
