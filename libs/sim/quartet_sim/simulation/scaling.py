"""Autoscaling, by the rule that ``spec.Autoscale`` states, and nothing cleverer."""

import math
from typing import TYPE_CHECKING

from quartet_sim.simulation.site import Site
from quartet_sim.simulation.spec import Autoscale, FleetSpec, Group

if TYPE_CHECKING:
    from quartet_sim.simulation.world import World


class Scaling:
    """Looks at every group each ``period_ms``, starts workers, and takes away those that are not needed."""

    def __init__(self, world: "World", fleet: FleetSpec, rule: Autoscale) -> None:
        self._world = world
        self._groups = fleet.groups
        self._rule = rule
        self._coming = [0] * len(fleet.groups)
        self._fewer_since_ms: list[float | None] = [None] * len(fleet.groups)
        self._started = 0
        world.timeline.later(rule.period_ms, self._look)

    def _look(self) -> None:
        for number, group in enumerate(self._groups):
            self._fit(number, group)
        self._world.timeline.later(self._rule.period_ms, self._look)

    def _fit(self, number: int, group: Group) -> None:
        world, rule = self._world, self._rule
        now_ms = world.timeline.now_ms
        here = [site for site in world.sites if site.group_number == number and site.alive]
        for site in [site for site in here if site.draining]:
            if not site.flights and site.engine.empty:
                world.retire(site)
                here.remove(site)
        serving = [site for site in here if not site.draining]
        of_model = sum(s.alive and s.facts.model == group.model and not s.draining for s in world.sites) or 1
        held = len(world.desk.holds.first(group.model, 1 << 30)) * len(serving) / of_model
        under_way = sum(len(site.flights) for site in serving) + held
        least = group.count if group.least is None else group.least
        most = group.count if group.most is None else group.most
        wanted = min(most, max(least, 1 if least else 0, math.ceil(under_way / rule.requests_per_worker)))
        more = wanted - len(serving) - self._coming[number]
        if more >= 0:
            self._fewer_since_ms[number] = None
            for _ in range(more):
                self._start(number, group)
            return
        since_ms = self._fewer_since_ms[number]
        if since_ms is None:
            self._fewer_since_ms[number] = now_ms
        elif now_ms - since_ms >= rule.patience_ms and len(serving) > wanted:
            self._drain(serving[wanted:])

    def _start(self, number: int, group: Group) -> None:
        """A new worker's cold start begins, and is paid for from now on."""
        self._coming[number] += 1
        self._started += 1
        node = f"{group.hardware.lower()}-{number}-more-{self._started}"
        self._world.timeline.later(self._rule.cold_start_ms, self._up, number, group, node, self._world.timeline.now_ms)

    def _up(self, number: int, group: Group, node: str, since_ms: float) -> None:
        self._coming[number] -= 1
        self._world.add_site(number, group, node).since_ms = since_ms

    def _drain(self, sites: list[Site]) -> None:
        for site in sites:
            site.draining = True
            self._world.say(site)
