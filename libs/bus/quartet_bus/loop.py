"""Time: a loop whose clock jumps, for whole fleets in one process, and the one way services read a clock.

``VirtualLoop`` is an ordinary selector loop, except that waiting takes no time: when nothing is ready, its clock jumps
to the next timer. What happens is then a function of the program and its seeds alone. Sockets still work on it, but
nothing waits for them, so whatever talks to other processes is an edge that virtual fleets leave off.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

START_S = 1000.0
"""What ``VirtualLoop.time()`` says first. Not 0, so that "never" and "at the start" cannot be mixed up."""


class Deadlock(RuntimeError):
    """A virtual loop has nothing ready and no timer left, so nothing can ever happen again."""

    def __init__(self, waiting: tuple[str, ...]) -> None:
        super().__init__(f"nothing will ever happen again; still waiting: {', '.join(waiting) or 'nobody'}")
        self.waiting = waiting


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting ``timeout``, tells the clock to jump by it."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose ``time()`` starts at ``start_s`` and jumps to the next timer whenever nothing is ready.

    Raises ``Deadlock`` out of ``run_until_complete`` when nothing is ready and no timer is left. Threads would bring
    real time back in, so ``run_in_executor`` refuses.
    """

    def __init__(self, start_s: float = START_S) -> None:
        self._now_s = start_s
        super().__init__(_JumpingSelector(self._advance))
        # Rounding when a jump is added to a large clock must not leave its own timer a hair in the future.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Refused: a thread would finish at some real time."""
        raise RuntimeError("a virtual loop runs no threads")

    def _advance(self, by_s: float | None) -> None:
        if by_s is None:
            raise Deadlock(tuple(sorted(task.get_name() for task in asyncio.all_tasks(self))))
        self._now_s += by_s


def run_virtual(main: Coroutine[Any, Any, T], *, start_s: float = START_S) -> T:
    """Run ``main`` to its end on a fresh ``VirtualLoop`` and return its result; like ``asyncio.run``."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_s)) as runner:
        return runner.run(main)


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """A function that reads the time of ``loop`` in nanoseconds.

    On a virtual loop that is its virtual time, else the monotonic clock itself: uvloop's ``time()`` is that same clock
    in whole milliseconds, read once an iteration, which is too coarse for latencies.
    """
    if isinstance(loop, VirtualLoop):
        return lambda: round(loop.time() * 1e9)
    return time.monotonic_ns
