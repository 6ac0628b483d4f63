"""Shared memory between two agents of one host, as slots: the receiver's anonymous memory, opened by the sender.

The file has no name and is gone with its last user, however that ends. A sender opens it through the receiver's
``/proc`` entry, which the kernel allows to the same user in the same pid namespace: there, and nowhere else, two places
are equal. Linux only.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from quartet_agent.kv.mover import Buffer

_DESCRIPTION = struct.Struct("<II")  # pid, descriptor


class _Slots:
    """Both ends: a mapping, cut into slots."""

    def __init__(self, descriptor: int, slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._map = mmap.mmap(descriptor, slots * slot_bytes)

    def view(self, slot: int, size: int) -> memoryview:
        """As ``Landing.view``."""
        start = slot * self._slot_bytes
        return memoryview(self._map)[start : start + size]

    async def put(self, slot: int, blocks: Sequence[Buffer]) -> None:
        """As ``Reach.put``."""
        at = slot * self._slot_bytes
        for block in blocks:
            self._map[at : at + len(block)] = block
            at += len(block)

    def close(self) -> None:
        """As ``Reach.close``."""
        with contextlib.suppress(BufferError):  # whoever still holds a view of it unmaps it
            self._map.close()


class ShmLanding(_Slots):
    """As ``Landing``."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._descriptor = os.memfd_create("quartet-kv", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, slots * slot_bytes)  # now, and not by a signal at the first write
            super().__init__(self._descriptor, slots, slot_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def description(self) -> bytes:
        """As ``Landing.description``."""
        return _DESCRIPTION.pack(os.getpid(), self._descriptor)

    def close(self) -> None:
        """As ``Landing.close``."""
        os.close(self._descriptor)
        super().close()


class ShmMemory:
    """As ``SlotMemory``."""

    kind = "shm"
    link = "SHM"

    def place(self) -> str:
        """Boot, pid namespace and user. Raises ``OSError`` on a system without ``/proc``."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}.{os.geteuid()}"

    def land(self, slots: int, slot_bytes: int) -> ShmLanding:
        """As ``SlotMemory.land``."""
        return ShmLanding(slots, slot_bytes)

    def reach(self, description: bytes, slots: int, slot_bytes: int) -> _Slots:
        """As ``SlotMemory.reach``."""
        try:
            pid, number = _DESCRIPTION.unpack(description)
        except struct.error as error:
            raise OSError(f"no description of shared memory: {error}") from error
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != slots * slot_bytes:
                raise OSError("shared memory of another size than offered")
            return _Slots(descriptor, slots, slot_bytes)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Nothing is kept beyond a transfer."""
