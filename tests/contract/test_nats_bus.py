"""The NATS bus keeps the contract against a real broker."""

from contextlib import AbstractAsyncContextManager

import pytest
from contract.bus_contract import BusContract, Buses, closing

from quartet_bus.bus import Bus
from quartet_bus.config.schema import NatsSection
from quartet_bus.nats_bus import connect


class TestNatsBus(BusContract):
    section: NatsSection

    @pytest.fixture(autouse=True)
    def _broker(self, nats_section: NatsSection) -> None:
        self.section = nats_section

    def clients(self) -> AbstractAsyncContextManager[Buses]:
        async def make() -> Bus:
            return await connect(self.section)

        return closing(make)
