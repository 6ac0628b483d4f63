"""Calls that may never come back: made in a thread of their own, and given up after a while.

A thread that is stuck in a driver cannot be ended; being a daemon it does not keep the process alive, either.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """A call did not come back within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.seconds = seconds


class _Call(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.results: list[T] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            self.results.append(self._call())
        except BaseException as error:
            self.errors.append(error)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns. Raises what it raises, or ``Stuck``: then it still runs, and nobody waits for it."""
    calling = _Call(call)
    thread = threading.Thread(target=calling.run, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if calling.errors:
        raise calling.errors[0]
    if not calling.results:
        raise Stuck(seconds)
    return calling.results[0]
