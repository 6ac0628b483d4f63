"""The gateway service: follows what the fleet serves, and holds what its HTTP door needs."""

import asyncio
import random
import time

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.client import Client
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import Config
from quartet_bus.messages import ControlReply, ControlRequest, GatewayLife, NodeInventory, TenantClaim
from quartet_bus.service import Service
from quartet_core.quota import TURN_S
from quartet_gateway.metrics import GatewayMetrics
from quartet_gateway.models import ModelBook
from quartet_gateway.peers import Peers
from quartet_gateway.quotas import Quotas
from quartet_gateway.request_ids import RequestIds
from quartet_gateway.streams import Streams
from quartet_gateway.tenants_file import TenantsSource
from quartet_gateway.tokens.book import TokenizerBook

_STALE_INVENTORIES = 3.5
"""A node (or another gateway) is gone after this many intervals of silence: three lost in a row, and some delay."""

_BEFORE_THE_STREAM_BYTES = 1024 * 1024
"""What may arrive of an answer before its handler had a turn to begin the stream: no client is to blame for that."""

_TENANTS_CHECK_S = 1.0
"""How often the file of keys and limits is looked at."""


class GatewayService(Service):
    """Hears inventories and other gateways; asks agents for the former at start, and says once a second that it lives.

    Owns API keys, limits, open streams and one bus client per tenant.
    """

    name = "gateway"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self.counts = GatewayMetrics(self.metrics)
        self._tenants = TenantsSource(config.gateway)
        self._reading_tenants = False
        tenants = self._tenants.read()
        self.keys = tenants.keys
        life = f"{instance}.{random.getrandbits(32):08x}"  # a gateway that comes back is another one to its peers
        self.quotas = Quotas(life, tenants.limits, config.gateway.default_limit, self._take_turn)
        self._peers = Peers(life, round(TURN_S * _STALE_INVENTORIES * 1e9))
        self.leaving = False
        """Whether it was told to stop: it takes requests for a moment more, and wants no new connections."""
        self.request_ids = RequestIds(random)
        self.streams = Streams(config.gateway.max_streams, config.gateway.open_bodies_bytes, self.counts.active.set)
        self.models = ModelBook(
            config.models,
            stale_ns=round(config.fleet.inventory_interval_ms * _STALE_INVENTORIES * 1e6),
            created_s=int(time.time()),
        )
        self.tokenizers = TokenizerBook(config.models)
        self.address = ""
        """Where the HTTP door listens, ``host:port``; "" while it does not."""
        self._clients: dict[str, Client] = {}

    async def start(self) -> None:
        await super().start()
        await self._load_tokenizers()
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.hear(subjects.gateway_life(), self._on_life)
        await self.controls({"status": self._on_status})
        self.every(self.config.fleet.inventory_interval_ms / 1e3, self._expire)
        self.every(TURN_S, self._take_turn)
        self._take_turn()
        if self.config.gateway.tenants_file:
            self.every(_TENANTS_CHECK_S, self._look_for_tenants)
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())

    async def stop(self) -> None:
        self.leave()
        for client in self._clients.values():
            await client.close()
        await super().stop()

    def leave(self) -> None:
        """Be ready no more, and leave this gateway's part of the limits to the others. Twice does nothing."""
        if not self.leaving:
            self.leaving = True
            self.say(subjects.gateway_life(), GatewayLife(self.quotas.name, leaving=True))

    def now_s(self) -> int:
        """The clock of limits, in whole seconds."""
        return self.now_ns() // 1_000_000_000

    def not_ready(self) -> str | None:
        """A gateway is ready when a request for some model could be routed."""
        if self.leaving:
            return "shutting down"
        if not self.bus.connected:
            return "not connected to the broker"
        if not self.models.served:
            return "no worker is known"
        return None

    def client(self, tenant: str) -> Client:
        """The bus client that asks for ``tenant``; there are as many as tenants in the configuration."""
        client = self._clients.get(tenant)
        if client is None:
            buffer_bytes = self.config.gateway.slow_client_bytes + _BEFORE_THE_STREAM_BYTES
            client = self._clients[tenant] = Client(self.bus, tenant, buffer_bytes=buffer_bytes)
        return client

    async def _load_tokenizers(self) -> None:
        if any(section.tokenizer for section in self.config.models.values()):
            await asyncio.to_thread(self.tokenizers.load)  # a vocabulary of 250,000 takes seconds
        else:
            self.tokenizers.load()
        for model, reason in self.tokenizers.degraded.items():
            self.counts.degraded.labels(model).set(1)
            self.log.warning(
                "prompts are sketched from text, which matches no engine's blocks", model=model, why=reason
            )

    def _on_inventory(self, inventory: NodeInventory) -> None:
        self.models.heard(inventory, self.now_ns())

    def _expire(self) -> None:
        self.models.expire(self.now_ns())

    def _on_life(self, life: GatewayLife) -> None:
        if self._peers.heard(life, self.now_ns()):
            # At once: until its next turn, each would take the limits for its own.
            self._take_turn()

    def _take_turn(self) -> None:
        if self.leaving:
            return
        others = self._peers.alive(self.now_ns())
        claims: dict[str, TenantClaim] = self.quotas.turn(others, self.now_s())
        self.counts.gateways.set(len(others) + 1)
        self.say(subjects.gateway_life(), GatewayLife(self.quotas.name, claims))

    def _look_for_tenants(self) -> None:
        if not self._reading_tenants and self._tenants.changed():
            self._reading_tenants = True
            self.spawn(self._read_tenants(), "read tenants")

    async def _read_tenants(self) -> None:
        try:
            tenants = await asyncio.to_thread(self._tenants.read)  # a hundred thousand keys take a while
        except ConfigError as error:
            self.counts.tenants_reads.labels("failed").inc()
            self.log.error("keys and limits stay as they are", error=str(error))
            return
        finally:
            self._reading_tenants = False
        self.keys = tenants.keys
        self.quotas.replace(tenants.limits)
        self.counts.tenants_reads.labels("ok").inc()
        self.log.info("keys and limits read again", file=self.config.gateway.tenants_file)

    def _on_status(self, _: ControlRequest) -> ControlReply:
        status = {
            "address": self.address,
            "open_streams": self.streams.open,
            "models": [model.id for model in self.models.served],
            "nodes": self.models.nodes,
            "gateways": len(self._peers.alive(self.now_ns())) + 1,
            "keys_required": self.keys.required,
            "degraded": self.tokenizers.degraded,
            "not_ready": self.not_ready(),
        }
        return ControlReply(True, payload=msgspec.json.encode(status))


def make(bus: Bus, config: Config, instance: str, random: random.Random) -> GatewayService:
    """A gateway as a process makes it (``quartet_bus.process.run``). Raises ``ConfigError``."""
    return GatewayService(bus, config, instance=instance, random=random)
