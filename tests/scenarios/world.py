"""The world of a scenario: routers and clients as they are, and workers that are real or played."""

import asyncio
import contextlib
import random
from fnmatch import fnmatchcase

from router_stage import Stage
from scenarios.players import Players
from scenarios.sent import Sent
from scenarios.story import Arrive, Node, Scenario
from scenarios.witness import Witness
from structlog.testing import CapturingLogger
from virtual.virtual_fleet import VirtualFleet, config
from wire_engine import WireEngine

from quartet_agent.service import AgentService
from quartet_bus.bus import Bus
from quartet_bus.client import Client
from quartet_bus.config.schema import Config
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_gateway.service import GatewayService
from quartet_gateway.site import http_site
from quartet_router.service import RouterService

MODELS = {
    "llama-8b": {"spec": "llama-3.1-8b", "ttft_ms": 2000.0, "tpot_ms": 100.0, "sketch": "tokens"},
    "llama-70b": {"spec": "llama-3.1-70b", "ttft_ms": 3000.0, "tpot_ms": 120.0, "sketch": "tokens"},
}


class World:
    """Everything there is, from the first service's start to the last one's stop."""

    def __init__(self, told: Scenario) -> None:
        self.told = told
        self.witness = Witness()
        self.sent: list[Sent] = []
        self.routers: list[RouterService] = []
        self.players: Players | None = None
        self.real: VirtualFleet | None = None
        self.engines: list[WireEngine] = []
        self.agents_log = CapturingLogger()
        self.gateway: GatewayService | None = None
        self.bus: Bus
        self._clients: dict[str, Client] = {}
        self._stack = contextlib.AsyncExitStack()
        self._broker: MemoryBroker

    async def __aenter__(self) -> "World":
        await (self._open_real() if self.told.real else self._open_played())
        self.bus = MemoryBus(self._broker)
        await self.witness.listen(self.bus)
        if self.told.real or self.told.real_time:
            await self._open_gateway()
        return self

    async def __aexit__(self, *_: object) -> None:
        for sent in self.sent:
            await sent.leave()
        for client in self._clients.values():
            await client.close()
        await self._stack.aclose()
        assert self._broker.handler_errors == 0

    async def settle(self) -> None:
        """Until what was said has been heard, and what follows from it, too."""
        for _ in range(20):
            await asyncio.sleep(self._broker.delay_s)

    async def arrive(self, told: Arrive) -> list[Sent]:
        """Send what is told; return it."""
        fresh: list[Sent] = []
        for number in range(told.count):
            if number and told.every_ms:
                await asyncio.sleep(told.every_ms / 1e3)
            name = f"{told.name}-{number}" if told.count > 1 else told.name
            sent = Sent(told, name if told.name else f"request-{len(self.sent)}")
            self.sent.append(sent)
            fresh.append(sent)
            sent.send(self.client(told.tenant), "" if self.gateway is None else f"http://{self.gateway.address}")
        return fresh

    def named(self, pattern: str) -> list[Sent]:
        """The requests called so: by their name, or all of a name that stands for many."""
        found = [sent for sent in self.sent if fnmatchcase(sent.id, pattern) or sent.told.name == pattern]
        if not found:
            raise AssertionError(f"the story has no request {pattern!r}")
        return found

    def client(self, tenant: str) -> Client:
        """The client library of a tenant."""
        if tenant not in self._clients:
            self._clients[tenant] = Client(MemoryBus(self._broker), tenant, source=random.Random(tenant))
        return self._clients[tenant]

    def services(self) -> dict[str, RouterService | GatewayService]:
        """What can be ready or not."""
        named: dict[str, RouterService | GatewayService] = {"router": self.routers[0]}
        return named if self.gateway is None else {**named, "gateway": self.gateway}

    def agents(self) -> list[AgentService]:
        """The real agents, none of a played fleet."""
        return [] if self.real is None else list(self.real.agents().values())

    def engine(self, node: str) -> WireEngine:
        """The server behind a node."""
        behind = [each.name for each in self.told.fleet if each.engine != "simulated"]
        return self.engines[behind.index(node)]

    def metrics(self) -> list[str]:
        """What the routers, the gateway and the real agents expose."""
        services = [*self.routers, *([] if self.gateway is None else [self.gateway]), *self.agents()]
        return [service.metrics.exposition().decode() for service in services]

    # Opening

    async def _open_played(self) -> None:
        told = self.told
        self._broker = MemoryBroker(delay_s=told.bus_delay_ms / 1e3)
        configured = config(models={**MODELS, **told.models}, hardware=told.hardware, router=told.router)
        stage = await self._stack.enter_async_context(Stage(configured, broker=self._broker))
        self.routers = [stage.router]
        for number in range(1, told.routers):
            router = RouterService(
                MemoryBus(self._broker), configured, instance=f"r{number}", random=random.Random(number + 1)
            )
            await router.start()
            self._stack.push_async_callback(router.stop)
            self.routers.append(router)
        rows, hashes = configured.router.affinity_rows, configured.router.affinity_hashes
        self.players = Players(stage, told.fleet, affinity_rows=rows, affinity_hashes=hashes)
        await self.players.start()
        await self.settle()

    async def _open_real(self) -> None:
        told = self.told
        self.real = VirtualFleet(
            1, routers=told.routers, nodes=[await self._agent(node) for node in told.fleet],
            models={**MODELS, **told.models}, hardware=told.hardware, router=told.router,
        )  # fmt: skip
        self._broker = self.real.broker
        for agent in self.agents():
            agent.log = self.agents_log
        await self._stack.enter_async_context(self.real)
        self.routers = [self.real.router(number) for number in range(told.routers)]
        await asyncio.sleep(1.0)  # every beat and inventory was heard once

    async def _agent(self, node: Node) -> dict[str, object]:
        engine: dict[str, object] = {
            "kind": node.engine, "model": node.model, "hardware": node.hardware, "precision": node.precision,
            "tp": node.tp, "count": node.count, "role": node.role, "time_scale": node.time_scale,
            "kv_tokens": node.kv_tokens,
        }  # fmt: skip
        if node.engine != "simulated":
            server = WireEngine(
                node.engine, generation=node.metrics, model=node.model, token_s=node.token_ms / 1e3,
                max_model_len=node.max_context,
            )  # fmt: skip
            server.others, server.others_kv = (12 if node.kv_used_by_others else 0), node.kv_used_by_others
            server.fault = "hang" if node.hangs else None
            self.engines.append(await self._stack.enter_async_context(server))
            engine |= {"url": server.url, "kv_connector": node.connector, "probe_interval_ms": 50}
        beside = [{**engine, "role": role, "first_gpu": 8 + n} for n, role in enumerate(node.beside)]
        return {"node": node.name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine, *beside]}

    async def _open_gateway(self) -> None:
        configured = Config(models=self.routers[0].config.models)
        configured.gateway.listen = "127.0.0.1:0"
        configured.service.stop_timeout_ms = 500
        self.gateway = GatewayService(MemoryBus(self._broker), configured, instance="g0", random=random.Random(2))
        await self.gateway.start()
        self._stack.push_async_callback(self.gateway.stop)
        if self.told.real_time:
            await self._stack.enter_async_context(http_site(self.gateway))
        if self.players is not None:
            for node in self.told.fleet:
                if not node.joins:
                    self.players.announce(node.name)
        await asyncio.sleep(0.05)
