"""Mooncake's transfer engine as slots. Only where ``mooncake`` can be imported (it wants libibverbs, too).

Its writes block, so each runs in a thread; its protocol is ``[kv] mooncake_protocol``: tcp, or rdma.
"""

import asyncio
import importlib
import itertools
from typing import Any

from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_agent.kv.region import Region, RegisteredLanding, RegisteredReach, described

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


class MooncakeReach(RegisteredReach):
    """As ``Reach``."""

    def __init__(self, engine: Any, description: bytes, slots: int, slot_bytes: int) -> None:
        there, peer = described(description)
        super().__init__(_Registered(engine, slots * slot_bytes), there, slot_bytes)
        self._engine = engine
        self._peer = peer.decode()

    async def _write(self, here: int, there: int, size: int) -> None:
        if await asyncio.to_thread(self._engine.transfer_sync_write, self._peer, here, there, size):
            raise MoveError(MoveReason.CONNECTION, "mooncake: the write failed")


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

    def land(self, slots: int, slot_bytes: int) -> RegisteredLanding:
        """As ``SlotMemory.land``."""
        region = _Registered(self._engine, slots * slot_bytes)
        return RegisteredLanding(region, slot_bytes, f"{self._host}:{self._engine.get_rpc_port()}".encode())

    def reach(self, description: bytes, slots: int, slot_bytes: int) -> MooncakeReach:
        """As ``SlotMemory.reach``."""
        return MooncakeReach(self._engine, description, slots, slot_bytes)

    def close(self) -> None:
        """The engine goes with its last reference."""
        self._engine = None
