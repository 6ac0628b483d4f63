"""The gateway service: follows what the fleet serves, and holds what its HTTP door needs."""

import random
import time

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.client import Client
from quartet_bus.config.schema import Config
from quartet_bus.messages import ControlReply, ControlRequest, NodeInventory
from quartet_bus.service import Service
from quartet_gateway.metrics import GatewayMetrics
from quartet_gateway.models import ModelBook
from quartet_gateway.request_ids import RequestIds
from quartet_gateway.streams import Streams
from quartet_gateway.tenants import ApiKeys

_STALE_INVENTORIES = 3.5
"""A node is gone after this many inventory intervals of silence: three lost in a row, and some delay."""


class GatewayService(Service):
    """Hears inventories; asks agents for them at start; owns API keys, open streams and one bus client per tenant."""

    name = "gateway"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self.counts = GatewayMetrics(self.metrics)
        self.keys = ApiKeys(config.gateway.keys, config.gateway.anonymous_tenant)
        self.request_ids = RequestIds(random)
        self.streams = Streams(config.gateway.max_streams, config.gateway.open_bodies_bytes, self.counts.active.set)
        self.models = ModelBook(
            config.models,
            stale_ns=round(config.fleet.inventory_interval_ms * _STALE_INVENTORIES * 1e6),
            created_s=int(time.time()),
        )
        self.address = ""
        """Where the HTTP door listens, ``host:port``; "" while it does not."""
        self._clients: dict[str, Client] = {}

    async def start(self) -> None:
        await super().start()
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.controls({"status": self._on_status})
        self.every(self.config.fleet.inventory_interval_ms / 1e3, self._expire)
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())

    async def stop(self) -> None:
        for client in self._clients.values():
            await client.close()
        await super().stop()

    def not_ready(self) -> str | None:
        """A gateway is ready when a request for some model could be routed."""
        if not self.bus.connected:
            return "not connected to the broker"
        if not self.models.served:
            return "no worker is known"
        return None

    def client(self, tenant: str) -> Client:
        """The bus client that asks for ``tenant``; there are as many as tenants in the configuration."""
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = Client(
                self.bus, tenant, buffer_bytes=self.config.gateway.slow_client_bytes
            )
        return client

    def _on_inventory(self, inventory: NodeInventory) -> None:
        self.models.heard(inventory, self.now_ns())

    def _expire(self) -> None:
        self.models.expire(self.now_ns())

    def _on_status(self, _: ControlRequest) -> ControlReply:
        status = {
            "address": self.address,
            "open_streams": self.streams.open,
            "models": [model.id for model in self.models.served],
            "nodes": self.models.nodes,
            "keys_required": self.keys.required,
            "not_ready": self.not_ready(),
        }
        return ControlReply(True, payload=msgspec.json.encode(status))


def make(bus: Bus, config: Config, instance: str, random: random.Random) -> GatewayService:
    """A gateway as a process makes it (``quartet_bus.process.run``). Raises ``ConfigError``."""
    return GatewayService(bus, config, instance=instance, random=random)
