"""One pass of the demo: a fresh fleet, the whole workload, and what was seen of it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from msgspec import Struct

from quartet_bus import catalogue, nats_bus
from quartet_bus.client import Client
from quartet_bus.config.load import load
from quartet_bus.config.schema import Config, EngineSection, NatsSection
from quartet_cli.commands.options import DEFAULT_TENANT
from quartet_cli.demo.capacity import Pool, PoolCapacity, capacities
from quartet_cli.demo.figures import PassFigures, PassRecord, Targets, figures_of
from quartet_cli.demo.replay import Replay
from quartet_cli.demo.witness import RouterStatus, Witness
from quartet_cli.demo.workload import Arrival
from quartet_cli.errors import CommandFailed
from quartet_cli.fleet.launch import Fleet
from quartet_cli.fleet.layout import NODES, shipped

_SETTLE_S = 20.0
_POLL_S = 0.1
_TICK_S = 0.5
_STRAGGLERS_S = 1.0
"""How long the last END events may come after their end frames."""

Tell = Callable[[Replay], None]


class PassPlan(Struct, frozen=True):
    """``grace_s`` after the last arrival, what has not ended is given up."""

    policy: str
    arrivals: list[Arrival]
    seconds: float
    grace_s: float


async def run_pass(fleet: Fleet, plan: PassPlan, tell: Tell) -> PassFigures:
    """Replay ``plan`` on ``fleet``, which is fresh. ``tell`` is called twice a second.

    Raises ``CommandFailed`` when a process of the fleet dies, or the fleet does not come to know itself.
    """
    bus = await nats_bus.connect(NatsSection(url=fleet.nats_url, connect_timeout_ms=5_000), name="quartet-demo")
    try:
        witness = Witness(bus)
        await witness.begin()
        config = fleet.config
        engines = engines_of(fleet.options.configs)
        await _settled(witness, fleet, sum(engine.count for engine in engines))
        client = Client(bus, DEFAULT_TENANT)
        replay = Replay(client, plan.arrivals, grace_s=plan.grace_s)
        record = await _while_alive(fleet, _replay(replay, witness, fleet, plan), replay, tell)
        await client.close()
        await witness.stop()
    finally:
        await bus.close()
    return _figures(record, config, engines)


def engines_of(configs: tuple[Path, ...]) -> list[EngineSection]:
    """The engines of all nodes."""
    return [
        engine for node in NODES for engine in load([shipped("fleet"), *configs, shipped(node)], env={}).agent.engines
    ]


async def _replay(replay: Replay, witness: Witness, fleet: Fleet, plan: PassPlan) -> PassRecord:
    before = await _busy(witness)
    await replay.send_all()
    # The last arrival is before the end of the time in which requests come.
    await asyncio.sleep(plan.seconds - replay.running_s)
    arriving = await _busy(witness)
    await replay.finish()
    took_s = replay.running_s
    after = await _busy(witness)
    await _stragglers(replay, witness)
    return PassRecord(
        policy=plan.policy,
        seconds=plan.seconds,
        grace_s=plan.grace_s,
        took_s=took_s,
        outcomes=replay.outcomes,
        ends=witness.ends,
        answers=witness.answers,
        moved=witness.moved,
        failed_moves=witness.failed_moves,
        routers=await _routers(witness, fleet),
        busy_arriving_ms=_less(arriving, before),
        busy_ms=_less(after, before),
    )


async def _while_alive(fleet: Fleet, work: Coroutine[None, None, PassRecord], replay: Replay, tell: Tell) -> PassRecord:
    """What ``work`` returns, unless a process of the fleet dies before."""
    working = asyncio.create_task(work)
    dying = asyncio.create_task(fleet.first_death())
    try:
        while not working.done():
            await asyncio.wait([working, dying], timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            tell(replay)
            if dying.done():
                raise CommandFailed(dying.result().obituary())
        return working.result()
    finally:
        dying.cancel()
        working.cancel()
        await replay.abandon()
        await asyncio.wait([working, dying])


async def _settled(witness: Witness, fleet: Fleet, workers: int) -> None:
    """Return when every router knows every worker to be up, and an active coordinator."""
    try:
        async with asyncio.timeout(_SETTLE_S):
            while True:
                statuses = await _routers(witness, fleet)
                if all(status.up == workers and status.coordinator for status in statuses):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CommandFailed(
            f"after {_SETTLE_S:g} s the routers do not know all {workers} workers: {statuses}"
        ) from None


async def _stragglers(replay: Replay, witness: Witness) -> None:
    """Give the END events of right answers a moment to arrive."""
    right = {outcome.id for outcome in replay.outcomes if not outcome.fault}
    for _ in range(round(_STRAGGLERS_S / _POLL_S)):
        if right <= witness.answers.keys():
            return
        await asyncio.sleep(_POLL_S)


async def _routers(witness: Witness, fleet: Fleet) -> list[RouterStatus]:
    return [await witness.router(f"router-{number}") for number in range(fleet.options.routers)]


async def _busy(witness: Witness) -> dict[Pool, float]:
    """Busy milliseconds of every pool's workers, added up."""
    busy: dict[Pool, float] = {}
    for node in NODES:
        for worker in await witness.workers(node):
            pool = Pool(worker.model, worker.hardware)
            busy[pool] = busy.get(pool, 0.0) + worker.busy_ms
    return busy


def _less(later: dict[Pool, float], earlier: dict[Pool, float]) -> dict[Pool, float]:
    return {pool: busy_ms - earlier.get(pool, 0.0) for pool, busy_ms in later.items()}


def _figures(record: PassRecord, config: Config, engines: list[EngineSection]) -> PassFigures:
    kinds = catalogue.load(config)
    pools: dict[Pool, PoolCapacity] = capacities(
        kinds,
        engines,
        {name: model.tpot_ms for name, model in config.models.items()},
        {name: model.spec for name, model in config.models.items()},
    )
    targets = {name: Targets(model.ttft_ms, model.tpot_ms) for name, model in config.models.items()}
    (block_tokens,) = {kinds.model(model.spec).block_tokens for model in config.models.values()}
    return figures_of(record, pools, kinds.hardware, targets, block_tokens)
