"""NIXL as slots: RDMA, GPUDirect, shared memory or TCP, whatever UCX finds between two agents.

The optional extra ``quartet-agent[nixl]`` has the library; nothing here imports it before a mover is made. Transfers
are one-sided writes into registered memory, as in production; polls sleep in between, since NIXL's own spin.
"""

import asyncio
import importlib
import itertools
import logging
import os
from typing import Any

from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_agent.kv.region import Region, RegisteredLanding, RegisteredReach, described

_MODULE = "nixl._api"
_POLL_S = 0.0001
"""Between two looks at a write: 1 MiB takes about that long through shared memory, 16 MiB a few milliseconds."""
_POLL_MOST_S = 0.001
_WRITE_TIMEOUT_S = 10.0

_numbers = itertools.count()


def importable() -> str | None:
    """None when NIXL can be used here, else why not."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return str(error)
    return None


class _Registered(Region):
    """Memory that NIXL knows."""

    def __init__(self, agent: Any, size: int) -> None:
        super().__init__(size)
        self._agent = agent
        self.registered = agent.register_memory([(self.address, size, 0, "")], "DRAM")

    def close(self) -> None:
        """Out of every peer's reach (as far as its path asks at all), and given back."""
        self._agent.deregister_memory(self.registered)
        super().close()


class NixlReach(RegisteredReach):
    """As ``Reach``."""

    def __init__(self, agent: Any, description: bytes, slots: int, slot_bytes: int) -> None:
        there, metadata = described(description)
        super().__init__(_Registered(agent, slots * slot_bytes), there, slot_bytes)
        self._agent = agent
        try:
            self._peer = agent.add_remote_agent(metadata)
        except Exception as error:  # the library has a class for each, and no base of its own
            self.close()
            raise OSError(f"nixl: {error}") from error

    async def _write(self, here: int, there: int, size: int) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(here, size, 0)], "DRAM"),
            agent.get_xfer_descs([(there, size, 0)], "DRAM"),
            self._peer,
            b"",
        )
        try:
            await self._done(handle)
        finally:
            agent.release_xfer_handle(handle)

    async def _done(self, handle: Any) -> None:
        state = self._agent.transfer(handle)
        pause_s, waited_s = _POLL_S, 0.0
        while state != "DONE":
            if state == "ERR":
                raise MoveError(MoveReason.CONNECTION, "nixl: the write failed")
            if waited_s > _WRITE_TIMEOUT_S:
                raise TimeoutError("nixl: the write takes too long")
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(pause_s * 1.5, _POLL_MOST_S)
            state = self._agent.check_xfer_state(handle)


class NixlMemory:
    """As ``SlotMemory``. Raises ``ImportError`` without the library, ``OSError`` when its backend does not start."""

    kind = "nixl"
    link = ""  # UCX chooses: a link that turns out slow is noticed by its measured rate

    def __init__(self) -> None:
        api = importlib.import_module(_MODULE)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells standard output what it starts
        name = f"quartet-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # as above
            raise OSError(f"nixl: {error}") from error

    def place(self) -> str:
        """Everybody with NIXL can be reached."""
        return ""

    def land(self, slots: int, slot_bytes: int) -> RegisteredLanding:
        """As ``SlotMemory.land``."""
        try:
            region = _Registered(self._agent, slots * slot_bytes)
            # of these slots alone, and how to connect: other transfers' memory is none of this sender's business
            metadata = self._agent.get_partial_agent_metadata(region.registered, True, ["UCX"])
        except (MemoryError, RuntimeError) as error:
            raise OSError(f"nixl: {error}") from error
        return RegisteredLanding(region, slot_bytes, metadata)

    def reach(self, description: bytes, slots: int, slot_bytes: int) -> NixlReach:
        """As ``SlotMemory.reach``."""
        return NixlReach(self._agent, description, slots, slot_bytes)

    def close(self) -> None:
        """The agent goes with its last reference."""
        self._agent = None
