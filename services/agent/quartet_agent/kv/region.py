"""Memory with an address, for libraries that want one: mapped pages of our own, never a piece of a shared heap; and
slots in it, on both sides, of a library that writes from one process's registered memory into another's.
"""

import asyncio
import contextlib
import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

from quartet_agent.kv.mover import Buffer

_ADDRESS_BYTES = 8


class Region:
    """``size`` bytes at ``address``. ``view`` is all of them."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)

    def gather(self, at: int, blocks: Sequence[Buffer]) -> int:
        """Copy ``blocks`` to ``at``, one after the other; return how many bytes that were."""
        start = at
        for block in blocks:
            self.view[at : at + len(block)] = block
            at += len(block)
        return at - start

    def close(self) -> None:
        """Give the pages back, or leave that to whoever still looks at them."""
        self._anchor = None
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class RegisteredLanding:
    """As ``Landing``: slots in ``region``, which a library has registered. ``how`` is what else a sender must know."""

    def __init__(self, region: Region, slot_bytes: int, how: bytes) -> None:
        self._region = region
        self._slot_bytes = slot_bytes
        self._how = how

    @property
    def description(self) -> bytes:
        """As ``Landing.description``."""
        return self._region.address.to_bytes(_ADDRESS_BYTES, "little") + self._how

    def view(self, slot: int, size: int) -> memoryview:
        """As ``Landing.view``."""
        start = slot * self._slot_bytes
        return self._region.view[start : start + size]

    def close(self) -> None:
        """As ``Landing.close``."""
        self._region.close()


def described(description: bytes) -> tuple[int, bytes]:
    """The address of another's slots, and what else it said, from its `RegisteredLanding.description`."""
    return int.from_bytes(description[:_ADDRESS_BYTES], "little"), description[_ADDRESS_BYTES:]


class RegisteredReach(ABC):
    """As ``Reach``: blocks are gathered in registered memory of our own, and written from there to ``there``."""

    def __init__(self, region: Region, there: int, slot_bytes: int) -> None:
        self._here = region
        self._there = there
        self._slot_bytes = slot_bytes

    async def put(self, slot: int, blocks: Sequence[Buffer]) -> None:
        """As ``Reach.put``."""
        start = slot * self._slot_bytes
        size = self._here.gather(start, blocks)
        writing = asyncio.ensure_future(self._write(self._here.address + start, self._there + start, size))
        try:
            await asyncio.shield(writing)
        finally:
            if not writing.done():  # we were cancelled, and the library still reads and writes
                await asyncio.wait({writing})

    @abstractmethod
    async def _write(self, here: int, there: int, size: int) -> None:
        """Copy ``size`` bytes; they are there when it returns. Raises ``OSError``, ``MoveError``. Never cancelled."""

    def close(self) -> None:
        """As ``Reach.close``."""
        self._here.close()
