"""Memory with an address, for libraries that want one: mapped pages of our own, never a piece of a shared heap."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

from quartet_agent.kv.mover import Buffer


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
