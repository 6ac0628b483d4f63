"""The predictor on a bus, under virtual time."""

import asyncio
import random

from quartet_bus import subjects
from quartet_bus.config.schema import Config, ModelSection
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    ControlReply,
    ControlRequest,
    Forecast,
    KvLayout,
    NodeInventory,
    Phase,
    PrefetchCommand,
    PrefetchVerb,
    RequestEvent,
    Role,
    StreamId,
    WorkerInfo,
)
from quartet_bus.service import Service
from quartet_core.catalogue import builtin
from quartet_prefetch_predictor.ports import Budget, NoBudget
from quartet_prefetch_predictor.service import PredictorService


class Listener(Service):
    """Hears what the predictor says, and says what agents and routers would."""

    name = "listener"

    async def start(self):
        await super().start()
        self.forecasts: list[Forecast] = []
        self.commands: list[PrefetchCommand] = []
        await self.hear(subjects.forecast(), self.forecasts.append)
        await self.hear(subjects.prefetch("n1"), self.commands.append)

    def event(self, phase, name, *, model="small", tenant="acme", **changes):
        self.say(subjects.request_event(phase), RequestEvent(phase, StreamId(name), tenant, model, **changes))

    def inventory(self, node, hardware, model):
        worker = WorkerInfo(
            f"{node}-0", 0, 1, hardware, model, "fp8", 1, (0,), 1000, 8192, 8, 2048,
            KvLayout(16, 1, "bf16"), "simulated",
        )  # fmt: skip
        self.say(subjects.inventory(node), NodeInventory(node, 1, 1, (worker,)))


class Links:
    """A coordinator that grants, refuses or is away."""

    def __init__(self, outcome="grant"):
        self.outcome = outcome
        self.asked = []

    async def ask(self, node, transfer_bytes, deadline_ms):
        self.asked.append((node, transfer_bytes, deadline_ms))
        if self.outcome == "away":
            raise NoBudget("nobody there")
        return Budget(self.outcome == "grant", 5.0, "" if self.outcome == "grant" else "links are full")


def play(scene, *, links=None, **prefetch):
    """Run ``scene(predictor, listener)`` with a started predictor; return what it returns."""

    async def main():
        config = Config(models={"small": ModelSection(spec="llama-3.1-8b")})
        for key, value in prefetch.items():
            setattr(config.prefetch, key, value)
        broker = MemoryBroker()
        listener = Listener(MemoryBus(broker), config, instance="l", random=random.Random(1))
        predictor = PredictorService(
            MemoryBus(broker), config, instance="p", random=random.Random(1), catalogue=builtin(), budget=links
        )  # fmt: skip
        await listener.start()
        await predictor.start()
        try:
            return await scene(predictor, listener)
        finally:
            await predictor.stop()
            await listener.stop()

    return run_virtual(main())


def test_a_forecast_is_said_on_every_tick_ready_or_not():
    async def scene(predictor, listener):
        assert predictor.not_ready() == "no forecast yet"
        await asyncio.sleep(3.5)
        assert predictor.not_ready() is None
        assert [(forecast.number, forecast.models) for forecast in listener.forecasts] == [(1, ()), (2, ()), (3, ())]

    play(scene)


def test_demand_is_forecast_per_class_and_horizon():
    async def scene(predictor, listener):
        listener.inventory("n1", "L40S_PCIE", "small")
        listener.inventory("n2", "H100_SXM5", "small")
        for number in range(120):
            listener.event(Phase.ACCEPTED, f"r{number}", prompt_tokens=200)
            hardware = "H100_SXM5" if number % 4 else "L40S_PCIE"
            listener.event(Phase.END, f"r{number}", status="ok", hardware=hardware, output_tokens=50)
            await asyncio.sleep(1.0)
        return listener.forecasts[-1]

    last = play(scene)
    assert last.seen == 120
    assert {(one.model, one.hardware, one.horizon_s) for one in last.models} == {
        ("small", hardware, horizon_s) for hardware in ("L40S_PCIE", "H100_SXM5") for horizon_s in (25.0, 300.0, 1800.0)
    }
    near = {one.hardware: one for one in last.models if one.horizon_s == 25.0}
    assert near["H100_SXM5"].probability > 0.9
    assert 0.6 < near["H100_SXM5"].requests_per_s / (near["L40S_PCIE"].requests_per_s * 3) < 1.6
    total = sum(one.requests_per_s for one in near.values())
    assert 0.8 < total < 1.25
    assert 0.9 < sum(one.prompt_tokens_per_s for one in near.values()) / (200 * total) < 1.1


def test_a_request_counts_once_whatever_its_tries_and_halves():
    async def scene(predictor, listener):
        listener.event(Phase.ACCEPTED, "r1")
        listener.event(Phase.ACCEPTED, "r1")
        listener.event(Phase.ACCEPTED, "r2", role=Role.PREFILL)
        listener.event(Phase.ACCEPTED, "r2", role=Role.DECODE)
        listener.event(Phase.ACCEPTED, "r1", tenant="other")  # another request: ids are a tenant's own
        await asyncio.sleep(0.1)
        return predictor.demand.seen

    assert play(scene) == 3


def test_refused_for_want_of_a_worker_is_demand_and_refused_for_good_is_none():
    async def scene(predictor, listener):
        for number, code in enumerate((503, 429, 400, 404, 413)):
            listener.event(Phase.REJECTED, f"r{number}", code=code)
        await asyncio.sleep(0.1)
        return predictor.demand.seen

    assert play(scene) == 2


def test_models_that_nobody_configured_or_serves_are_not_followed():
    async def scene(predictor, listener):
        listener.event(Phase.ACCEPTED, "r1", model="made-up")
        await asyncio.sleep(0.1)
        assert len(predictor.demand) == 0
        listener.inventory("n1", "L40S_PCIE", "made-up")
        await asyncio.sleep(0.1)
        listener.event(Phase.ACCEPTED, "r2", model="made-up")
        await asyncio.sleep(0.1)
        assert len(predictor.demand) == 1

    play(scene)


async def hourly_need(predictor, listener, hours=20):
    """A model that is needed every half hour, and resident nowhere."""
    for half_hour in range(2 * hours):
        listener.inventory("n1", "L40S_PCIE", "other")
        listener.event(Phase.REJECTED, f"r{half_hour}", code=503)
        for _ in range(60):
            await asyncio.sleep(30.0)
            listener.inventory("n1", "L40S_PCIE", "other")


ACTING = {"act": True, "min_requests": 10, "min_seen_s": 3600.0, "tick_ms": 10_000.0}


def test_it_orders_weights_ahead_of_a_need_it_has_learned():
    links = Links()

    async def scene(predictor, listener):
        await hourly_need(predictor, listener)
        assert predictor.standing_down() == ""
        return listener.commands

    commands = play(scene, links=links, **ACTING)
    assert commands
    first = commands[0]
    assert (first.model, first.hardware, first.predictor) == ("small", "L40S_PCIE", "p")
    assert first.verb in (PrefetchVerb.WARM, PrefetchVerb.LOAD)
    assert first.weight_bytes == builtin().model("llama-3.1-8b").weights("fp8")
    assert 0.0 < first.confidence <= 1.0
    assert len(links.asked) == len(commands)
    assert all(deadline_ms == first.deadline_ms for _, _, deadline_ms in links.asked)


def test_links_that_are_full_or_unknown_stop_orders():
    for outcome in ("refuse", "away"):
        links = Links(outcome)

        async def scene(predictor, listener):
            await hourly_need(predictor, listener)
            return listener.commands

        assert play(scene, links=links, **ACTING) == []
        assert links.asked


def test_it_only_watches_until_it_may_act():
    async def scene(predictor, listener):
        reasons = [predictor.standing_down()]
        for number in range(20):
            listener.event(Phase.ACCEPTED, f"r{number}")
        await asyncio.sleep(11.0)
        reasons.append(predictor.standing_down())
        return reasons

    reasons = play(scene, **ACTING)
    assert reasons[0] == "seen 0 of 10 requests"
    assert reasons[1].startswith("watched for 11 of 3600 s")
    assert play(scene)[0] == "prefetch.act is false"


def test_operators_can_ask_for_its_status():
    async def scene(predictor, listener):
        await asyncio.sleep(1.5)
        topic = subjects.control("predictor", "p", "status")
        return await listener.ask(topic, ControlRequest(), ControlReply, timeout_s=1.0)

    reply = play(scene)
    assert reply.ok
    assert b'"standing_down":"prefetch.act is false"' in reply.payload


def test_its_own_forecasts_are_scored_in_its_metrics():
    async def scene(predictor, listener):
        for number in range(100):
            listener.event(Phase.ACCEPTED, f"r{number}")
            await asyncio.sleep(1.0)
        return predictor.metrics.exposition().decode()

    exposition = play(scene)
    assert 'quartet_predictor_scored{horizon_s="25"} ' in exposition
    scored = next(
        line for line in exposition.splitlines() if line.startswith('quartet_predictor_scored{horizon_s="25"}')
    )
    assert float(scored.split()[-1]) > 5


def test_equal_runs_say_equal_forecasts():
    async def scene(predictor, listener):
        for number in range(50):
            listener.event(Phase.ACCEPTED, f"r{number}", tenant=f"t{number % 3}")
            await asyncio.sleep(0.7)
        return listener.forecasts

    assert play(scene) == play(scene)
