"""Running a command's coroutine until it is done or somebody wants it to end."""

import asyncio
import signal
import sys
from collections.abc import Coroutine

import uvloop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def until_done(work: Coroutine[None, None, int], *, interrupted: int | None = None) -> int:
    """The exit code of ``work``, which is cancelled (once) by a signal: then ``interrupted``, or 128 + its number.

    Further signals change nothing: what ``work`` has started must be stopped, and stopping is bounded.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_done(work, interrupted))


async def _until_done(work: Coroutine[None, None, int], interrupted: int | None) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[int] = []

    def on_signal(number: int) -> None:
        if received:
            print("stopping already", file=sys.stderr)
        else:
            task.cancel()
        received.append(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0] if interrupted is None else interrupted
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
