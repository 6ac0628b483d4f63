"""Mooncake's transfer engine as slots. Only where ``mooncake`` can be imported (it wants libibverbs, too).

Its writes block, so each runs in a thread; its protocol is ``[kv] mooncake_protocol``: tcp, or rdma.
"""

import asyncio
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

from quartet_agent.kv.mover import Buffer, MoveError, MoveReason
from quartet_agent.kv.region import Region

_MODULE = "mooncake.engine"
_ports = itertools.count(17_400)


def importable() -> str | None:
    """None when Mooncake can be used here, else why not."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return str(error)
    return None


class _Registered(Region):
    """Memory that Mooncake knows."""

    def __init__(self, engine: Any, size: int) -> None:
        super().__init__(size)
        self._engine = engine
        if engine.register_memory(self.address, size):
            super().close()
            raise OSError("mooncake: memory cannot be registered")

    def close(self) -> None:
        """Forgotten by the engine, and given back."""
        self._engine.unregister_memory(self.address)
        super().close()


class MooncakeLanding:
    """As ``Landing``."""

    def __init__(self, engine: Any, host: str, slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._region = _Registered(engine, slots * slot_bytes)
        self._peer = f"{host}:{engine.get_rpc_port()}"

    @property
    def description(self) -> bytes:
        """As ``Landing.description``."""
        return self._region.address.to_bytes(8, "little") + self._peer.encode()

    def view(self, slot: int, size: int) -> memoryview:
        """As ``Landing.view``."""
        start = slot * self._slot_bytes
        return self._region.view[start : start + size]

    def close(self) -> None:
        """As ``Landing.close``."""
        self._region.close()


class MooncakeReach:
    """As ``Reach``."""

    def __init__(self, engine: Any, description: bytes, slots: int, slot_bytes: int) -> None:
        self._engine = engine
        self._slot_bytes = slot_bytes
        self._there = int.from_bytes(description[:8], "little")
        self._peer = description[8:].decode()
        self._here = _Registered(engine, slots * slot_bytes)

    async def put(self, slot: int, blocks: Sequence[Buffer]) -> None:
        """As ``Reach.put``."""
        start = slot * self._slot_bytes
        size = self._here.gather(start, blocks)
        write = self._engine.transfer_sync_write
        writing = asyncio.ensure_future(
            asyncio.to_thread(write, self._peer, self._here.address + start, self._there + start, size)
        )
        try:
            failed = await asyncio.shield(writing)
        finally:
            if not writing.done():  # we were cancelled, and the thread still reads and writes
                await asyncio.wait({writing})
        if failed:
            raise MoveError(MoveReason.CONNECTION, "mooncake: the write failed")

    def close(self) -> None:
        """As ``Reach.close``."""
        self._here.close()


class MooncakeMemory:
    """As ``SlotMemory``. Raises ``ImportError`` without the library, ``OSError`` when it does not start."""

    kind = "mooncake"
    link = ""

    def __init__(self, host: str, protocol: str) -> None:
        self._host = host
        self._engine: Any = importlib.import_module(_MODULE).TransferEngine()
        if self._engine.initialize(f"{host}:{next(_ports)}", "P2PHANDSHAKE", protocol, ""):
            raise OSError(f"mooncake: no {protocol} on {host}")

    def place(self) -> str:
        """Everybody with Mooncake can be reached."""
        return ""

    def land(self, slots: int, slot_bytes: int) -> MooncakeLanding:
        """As ``SlotMemory.land``."""
        return MooncakeLanding(self._engine, self._host, slots, slot_bytes)

    def reach(self, description: bytes, slots: int, slot_bytes: int) -> MooncakeReach:
        """As ``SlotMemory.reach``."""
        return MooncakeReach(self._engine, description, slots, slot_bytes)

    def close(self) -> None:
        """The engine goes with its last reference."""
        self._engine = None
