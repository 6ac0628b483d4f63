"""A whole fleet in one process under virtual time: every service as it is, its edges replaced by calls."""

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quartet_admin.service import AdminService
from quartet_agent.beats.virtual import VirtualBeats
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork
from quartet_agent.service import AgentService
from quartet_bus import catalogue
from quartet_bus.bus import Message
from quartet_bus.client import Client
from quartet_bus.config.schema import Config
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.service import Service
from quartet_core.heartbeat import Beat
from quartet_heartbeat_collector.service import CollectorService
from quartet_kv_coordinator.service import CoordinatorService, UnknownNode
from quartet_prefetch_predictor.ports import Budget
from quartet_prefetch_predictor.service import PredictorService
from quartet_router.service import RouterService

BEAT_S = 0.02
"""Beats of a virtual fleet are slower than real ones, and the limits of silence with them: time costs events."""

MODELS = {
    "llama-8b": {"spec": "llama-3.1-8b", "ttft_ms": 2000.0, "tpot_ms": 60.0, "sketch": "tokens"},
    "llama-70b": {"spec": "llama-3.1-70b", "ttft_ms": 3000.0, "tpot_ms": 120.0, "sketch": "tokens"},
}


def node(name: str, hardware: str) -> dict[str, Any]:
    """A node of eight workers: four of each model."""
    seventy = {"kind": "simulated", "model": "llama-70b", "hardware": hardware, "tp": 4, "count": 4}
    eight = {"kind": "simulated", "model": "llama-8b", "hardware": hardware, "count": 4, "first_gpu": 16}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [seventy, eight]}


NODES = (node("h100-0", "H100_SXM5"), node("l40s-0", "L40S_PCIE"), node("l40s-1", "L40S_PCIE"))


def config(agent: dict[str, Any] | None = None, **sections: Any) -> Config:
    """The fleet's configuration, for one node if ``agent`` is given."""
    base: dict[str, Any] = {
        "fleet": {
            "beat_interval_us": int(BEAT_S * 1e6), "suspect_ms": 60.0, "dead_ms": 200.0, "delta_interval_ms": 10.0,
        },
        "models": MODELS,
        "router": {"long_prompt_tokens": 1 << 20},
        **sections,
    }  # fmt: skip
    if agent is not None:
        base["agent"] = agent
    return msgspec.convert(base, Config)


class EventLog:
    """Everything that crossed the bus, as one running hash."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b()

    def tap(self, now_s: float, message: Message) -> None:
        """Note one message."""
        self.count += 1
        headers = sorted((message.headers or {}).items())
        self._hash.update(repr((round(now_s, 9), message.subject, message.reply, headers)).encode())
        self._hash.update(message.data)

    @property
    def digest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()


class DirectBudget:
    """The predictor's link budget, as a call."""

    def __init__(self, coordinator: CoordinatorService) -> None:
        self._coordinator = coordinator

    async def ask(self, node: str, transfer_bytes: int, deadline_ms: float) -> Budget:
        """As ``LinkBudget.ask``."""
        try:
            predicted_ms = self._coordinator.budget(node, transfer_bytes)
        except UnknownNode as error:
            return Budget(False, detail=str(error))
        return Budget(predicted_ms <= deadline_ms, predicted_ms)


class VirtualFleet:
    """Services by name. ``routers`` replicas share the queue group; ``sections`` go into every configuration.

    ``nodes`` are the hosts, each as ``[agent]`` has it.
    """

    def __init__(
        self,
        seed: int,
        *,
        routers: int = 1,
        collectors: int = 1,
        coordinators: int = 1,
        nodes: Sequence[dict[str, Any]] = NODES,
        **sections: Any,
    ) -> None:
        self.log = EventLog()
        self.broker = MemoryBroker(delay_s=0.0002, tap=self.log.tap)
        self._random = random.Random(seed)
        self._network = MemoryNetwork()
        self.buses: dict[str, MemoryBus] = {}
        self.services: dict[str, Service] = {}
        self._dying: list[asyncio.Future[None]] = []
        shared = config(**sections)
        known = catalogue.load(shared)
        for number in range(collectors):
            self._add(CollectorService, f"collector-{number}", shared)
        for number in range(routers):
            self._add(RouterService, f"router-{number}", shared)
        coordinator, *_ = [
            self._add(CoordinatorService, f"coordinator-{number}", shared) for number in range(coordinators)
        ]
        self._add(PredictorService, "predictor-0", shared, catalogue=known, budget=DirectBudget(coordinator))
        self._add(AdminService, "admin-0", shared, catalogue=known)
        self._sections, self._nodes = sections, {each["node"]: each for each in nodes}
        for name in self._nodes:
            self._agent(name)
        self.client = Client(self._bus("client"), "acme", source=self._seeded())

    async def __aenter__(self) -> "VirtualFleet":
        for service in self.services.values():
            await service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        for service in reversed(list(self.services.values())):
            await service.stop()
        await asyncio.gather(*self._dying)

    def router(self, number: int = 0) -> RouterService:
        """A router replica."""
        service = self.services[f"router-{number}"]
        assert isinstance(service, RouterService)
        return service

    async def kill(self, name: str) -> None:
        """End a service as a crash would: off the bus at once, nothing said."""
        service = self.services.pop(name)
        await self.buses[name].close()
        if isinstance(service, AgentService):
            service._beats.stop()  # they do not go over the bus
        self._dying.append(asyncio.ensure_future(service.stop()))

    async def revive(self, name: str) -> None:
        """Start an agent or a coordinator again that was killed."""
        if name in self._nodes:
            self._agent(name)
        else:
            self._add(CoordinatorService, name, config(**self._sections))
        await self.services[name].start()

    def agents(self) -> dict[str, AgentService]:
        """The agents that live, by node."""
        return {name: each for name, each in self.services.items() if isinstance(each, AgentService)}

    def _agent(self, name: str) -> None:
        self._add(
            AgentService, name, config(self._nodes[name], **self._sections),
            beats=VirtualBeats(self._deliver, BEAT_S), mover=MemoryMover(self._network, f"{name}:1"),
        )  # fmt: skip

    def _add(self, make: Callable[..., Any], instance: str, configured: Config, **more: Any) -> Any:
        service = make(self._bus(instance), configured, instance=instance, random=self._seeded(), **more)
        self.services[instance] = service
        return service

    def _bus(self, name: str) -> MemoryBus:
        self.buses[name] = MemoryBus(self.broker)
        return self.buses[name]

    def _seeded(self) -> random.Random:
        return random.Random(self._random.getrandbits(64))

    def _deliver(self, beat: Beat) -> None:
        for service in self.services.values():
            if isinstance(service, CollectorService):
                service.heard_beats([beat])
