"""What the router is told, and how late: events of requests, state words, and which prefixes are cached where."""

from collections.abc import Callable
from random import Random

from quartet_core.ledger import Key
from quartet_core.routing import Routing
from quartet_core.verdict import Verdict
from quartet_sim.simulation.flight import Flight
from quartet_sim.simulation.site import BEAT_MS, Site
from quartet_sim.simulation.spec import Settings
from quartet_sim.simulation.timeline import Timeline

COLLECTOR = "collector"

Told = Callable[[Key, int, float], None]
"""A method of ``Routing`` that takes a ledger key, a beat and the time."""


class Wire:
    """Brings ``routing`` what sites say. ``after`` is called after each message, as a router then looks at its
    holds."""

    def __init__(
        self, timeline: Timeline, settings: Settings, routing: Routing, random: Random, after: Callable[[], None]
    ) -> None:
        self._timeline = timeline
        self._settings = settings
        self._routing = routing
        self._random = random
        self._after = after

    def beat(self) -> int:
        """The number of the next beat: the first that includes what happens now."""
        return int(self._timeline.now_ms / BEAT_MS) + 1

    def tell(self, what: Told, flight: Flight, site: Site) -> None:
        """An event of a request on a worker, with the beat that includes it."""
        if self._settings.ledger:
            key = flight.ledger_key(flight.try_, site.facts.id, site.facts.incarnation)
            self._timeline.later(self._settings.event_ms, self._told, what, key, self.beat())

    def word(self, site: Site) -> None:
        """A worker's state may have changed: if so, its next beat says so.

        Beats that say what the last one said are no events: they change nothing at the router.
        """
        state = site.state(with_drift=self._settings.drift)
        if state == site.said:
            return
        site.said = state
        beat = self.beat()
        words = site.words
        if words and words[-1][0] == beat:
            words[-1][1] = state
            return
        words.append([beat, state])
        delay_ms = self._settings.view_age_ms
        while self._settings.view_loss and self._random.random() < self._settings.view_loss:
            delay_ms += BEAT_MS  # the next beat says the same
        self._timeline.later(delay_ms, self._heard, site, site.facts.incarnation)

    def affinity(self, site: Site) -> None:
        """A worker's cache may have changed: if so, it says so at its next tick."""
        pool = site.engine.pool
        if not pool.turned_on and not pool.turned_off:
            return
        if not self._settings.affinity:
            pool.turned_on.clear()
            pool.turned_off.clear()
        elif not site.affinity_due:
            site.affinity_due = True
            period_ms = self._settings.affinity_ms
            self._timeline.at((self._timeline.now_ms // period_ms + 1.0) * period_ms, self._affinity_tick, site)

    def dead(self, site: Site, incarnation: int) -> None:
        """The collector's verdict on a worker that fell silent."""
        now_ms = self._timeline.now_ms
        self._routing.hear(COLLECTOR, site.facts.id, incarnation, 0, self.beat(), Verdict.DEAD, now_ms)

    def _told(self, what: Told, key: Key, beat: int) -> None:
        what(key, beat, self._timeline.now_ms)
        self._after()

    def _heard(self, site: Site, incarnation: int) -> None:
        if site.facts.incarnation != incarnation or not site.alive or not site.words:
            return
        beat, state = site.words.popleft()
        now_ms = self._timeline.now_ms
        self._routing.hear(COLLECTOR, site.facts.id, incarnation, state, beat, Verdict.UP, now_ms)
        self._after()

    def _affinity_tick(self, site: Site) -> None:
        site.affinity_due = False
        on, off = site.turned_rows()
        if on or off:
            self._timeline.later(self._settings.event_ms, self._affinity_heard, site, site.facts.incarnation, on, off)

    def _affinity_heard(self, site: Site, incarnation: int, on: list[int], off: list[int]) -> None:
        slot = self._routing.fleet.slot_of(site.facts.id)
        if slot is None or not site.alive or site.facts.incarnation != incarnation:
            return
        self._routing.affinity.turn_on(slot, on)
        self._routing.affinity.turn_off(slot, off)
