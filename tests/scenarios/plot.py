"""Plays a scenario: step by step, checking after each what must then hold."""

import asyncio

from scenarios.expectations import unmet
from scenarios.sent import Sent
from scenarios.story import Expect, Scenario, Step
from scenarios.world import World

_LONGEST_S = 120.0
"""No request of any scenario may be open for longer: nothing waits for ever."""


class Unmet(Exception):
    """After step ``number`` of a story not all of what it expects is so."""

    def __init__(self, number: int, story: str, wrong: list[str]) -> None:
        super().__init__("\n  ".join([f"step {number}: {story}", *wrong]))
        self.number = number
        self.wrong = wrong


async def play(told: Scenario) -> None:
    """The whole story. Raises ``Unmet`` at the first step after which something does not hold."""
    async with World(told) as world:
        for number, step in enumerate(told.step, 1):
            fresh = await _happen(world, step)
            if step.expect is not None:
                wrong = await _wait_for(world, step.expect, fresh, step.patience_ms)
                if wrong:
                    raise Unmet(number, step.story, wrong)


async def _wait_for(world: World, expect: Expect, fresh: list[Sent], patience_ms: float) -> list[str]:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_ms / 1e3
    while (wrong := unmet(world, expect, fresh)) and loop.time() < until_s:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.005)
    return wrong


async def _happen(world: World, step: Step) -> list[Sent]:
    fresh: list[Sent] = []
    if step.arrive is not None:
        fresh = await world.arrive(step.arrive)
    await _change_fleet(world, step)
    if step.passes_ms is not None:
        await asyncio.sleep(step.passes_ms / 1e3)
    await _change_requests(world, step)
    if step.all_answered:
        async with asyncio.timeout(_LONGEST_S):
            for sent in world.sent:
                await sent.answered()
    await world.settle()
    return fresh


async def _change_fleet(world: World, step: Step) -> None:
    if step.dies is not None and world.real is not None:
        await world.real.kill(step.dies)
    if step.renames is not None:
        world.engine(step.renames.node).renamed[step.renames.metric] = step.renames.to or step.renames.metric
    players = world.players
    if players is None:
        return
    for told, act in (
        (step.state, players.state),
        (step.caches, players.caches),
        (step.links, players.links),
        (step.flood, players.flood),
        (step.restarts, players.restart),
        (step.joins, players.announce),
    ):
        if told is not None:
            act(told)
    if step.becomes is not None:
        players.becomes(step.becomes.node, step.becomes.agent)


async def _change_requests(world: World, step: Step) -> None:
    players = world.players
    for pattern, what in ((step.first_token, "first_token"), (step.ends, "end")):
        if pattern is not None:
            assert players is not None, "real agents answer by themselves"
            for sent in world.named(pattern):
                for run in players.runs(sent.id):
                    getattr(run, what)()
    if step.late_ends is not None and players is not None:
        for sent in world.named(step.late_ends):
            for run in players.lost(sent.id):
                run.end()
    if step.transfers_fail is not None and players is not None:
        for sent in world.named(step.transfers_fail):
            for run in players.runs(sent.id):
                players.transfer_fails(run)
    if step.leaves is not None:
        for sent in world.named(step.leaves):
            await sent.leave()
    if step.resubmits is not None:
        for sent in world.named(step.resubmits):
            sent.resubmit(world.bus)
