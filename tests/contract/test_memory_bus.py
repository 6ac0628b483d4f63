"""The memory bus keeps the contract, on a real loop and on a virtual one."""

from contextlib import AbstractAsyncContextManager

from contract.bus_contract import BusContract, Buses, closing

from quartet_bus.bus import Bus
from quartet_bus.memory import MemoryBroker, MemoryBus


class TestMemoryBus(BusContract):
    def clients(self) -> AbstractAsyncContextManager[Buses]:
        broker = MemoryBroker()

        async def make() -> Bus:
            return MemoryBus(broker)

        return closing(make)


class TestMemoryBusWithDelay(BusContract):
    def clients(self) -> AbstractAsyncContextManager[Buses]:
        broker = MemoryBroker(delay_s=0.002)

        async def make() -> Bus:
            return MemoryBus(broker)

        return closing(make)
