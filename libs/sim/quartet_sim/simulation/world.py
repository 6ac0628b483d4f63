"""One simulated fleet with its router, from the first arrival to the last end."""

from collections.abc import Callable, Sequence
from random import Random

from quartet_core.catalogue import Catalogue
from quartet_core.linkbook import LinkBook
from quartet_core.routing import Routing
from quartet_sim.simulation.carrier import Carrier
from quartet_sim.simulation.desk import Desk
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.flight import Flight
from quartet_sim.simulation.policies import KNOWN
from quartet_sim.simulation.sampler import Sampler
from quartet_sim.simulation.scaling import Scaling
from quartet_sim.simulation.site import Site
from quartet_sim.simulation.spec import GPUS_PER_NODE, Failure, FleetSpec, Group, Request, Settings, span_ms
from quartet_sim.simulation.tally import Tally
from quartet_sim.simulation.timeline import Timeline
from quartet_sim.simulation.wire import Wire

AFFINITY_ROWS, AFFINITY_HASHES = 1 << 17, 4
_TEND_MS = 1_000.0
_ARRIVED, _REFUSED, _DIED = 0, 4, 5


class World:
    """One run. ``run`` lets it pass; then ``tally``, ``sites`` and the counters say how it went."""

    def __init__(
        self, catalogue: Catalogue, fleet: FleetSpec, requests: Sequence[Request], *, policy: str, seed: int,
        settings: Settings,
    ) -> None:  # fmt: skip
        random = Random(seed)
        self.timeline = Timeline()
        self.tally = Tally()
        self.sites: list[Site] = []
        self.open: dict[int, Flight] = {}
        self._settings = settings
        self._catalogue = catalogue
        self._site_of: dict[str, Site] = {}
        self._nodes: dict[str, list[Site]] = {}
        self._fabrics: dict[str, float] = {settings.link: settings.nic_gb_per_s}
        self._leaders = [request for request in requests if request.follows < 0]
        self._next = 0
        self._thinking = 0  # requests that will follow one that has ended
        self._followers: dict[int, list[Request]] = {}
        for request in requests:
            if request.follows >= 0:
                self._followers.setdefault(request.follows, []).append(request)
        self.span_ms = span_ms(requests)
        links = LinkBook(float("inf"))
        links.hear(1, "simulated", 0.0)
        self.routing = Routing(
            lambda fact: catalogue.profile(fact.hardware, fact.model, fact.precision, fact.tp),
            catalogue.hardware_class,
            KNOWN,
            policy=policy,
            links=links,
            long_context=[name for name, each in catalogue.hardware.items() if each.long_context],
            long_prompt_tokens=settings.long_prompt_tokens,
            long_context_tokens=settings.long_context_tokens,
            kappa=settings.kappa,
            split_margin=settings.split_margin,
            hold_ahead_chunks=settings.hold_ahead_chunks,
            long_prefill_ms=settings.long_prefill_ms,
            long_prefill_share=settings.long_prefill_share,
            affinity_rows=AFFINITY_ROWS,
            affinity_hashes=AFFINITY_HASHES,
            max_workers=10_000,
            begin=random.getrandbits(16),
        )
        wire = Wire(self.timeline, settings, self.routing, random, lambda: self.desk.look())
        self._wire = wire
        self.carrier = Carrier(
            self.timeline, settings, self.routing, links, wire, self._site_of.__getitem__, self._finished, self._failed
        )
        self.desk = Desk(self.routing, settings, self.timeline, self.carrier.send, self._refused)
        for number, group in enumerate(fleet.groups):
            per_node = max(1, GPUS_PER_NODE // group.tp)
            for index in range(group.count):
                self.add_site(number, group, f"{group.hardware.lower()}-{number}-{index // per_node}")
        for failure in settings.failures:
            if failure.worker < len(self.sites):
                self.timeline.at(failure.at_ms, self._die, self.sites[failure.worker], failure)
        if settings.autoscale is not None:
            self._scaling = Scaling(self, fleet, settings.autoscale)
        self.timeline.later(_TEND_MS, self._tend)
        self.sampler = Sampler(self.timeline, self.sites)

    def run(self, progress: Callable[[float], None] | None = None, most_misses: float = float("inf")) -> None:
        """Let everything happen. ``progress`` is told the share of the span that has passed, now and then.

        With more than ``most_misses`` requests outside their targets it is cut short: the rest are unfinished.
        """
        timeline = self.timeline
        self._arrive_next()
        # Where arrivals wait for ends, the span is as long as it takes.
        follows = bool(self._followers)
        deadline_ms = float("inf") if follows else self.span_ms + self._settings.drain_ms
        counted = follows
        steps = 0
        while self.open or self._thinking or self._next < len(self._leaders):
            at_ms = timeline.next_ms()
            if at_ms is None or at_ms > deadline_ms or self.tally.misses > most_misses:
                break
            if not counted and at_ms > self.span_ms:
                self._close(self.span_ms)
                counted = True
            timeline.step()
            steps += 1
            if progress is not None and not steps & 0x3FFF:
                progress(min(1.0, timeline.now_ms / self.span_ms) if self.span_ms else 0.0)
        if follows:
            self.span_ms = timeline.now_ms
        if follows or not counted:
            self._close(self.span_ms)
        for flight in list(self.open.values()):
            self._over(flight, "unfinished")

    def outcome(self, policy: str, seed: int) -> Outcome:
        """All figures of the run, once it is over."""
        return self.tally.outcome(
            self.sites,
            span_ms=self.span_ms,
            policy=policy,
            seed=seed,
            held=self.desk.held,
            splits=self.carrier.splits,
            fetches=self.carrier.fetches,
            retries=self.carrier.retries,
            decisions=self.desk.decisions,
            events=self.timeline.events,
            series=self.sampler.samples(self.span_ms),
            log_hash=self.timeline.log_hash(),
        )

    def _close(self, now_ms: float) -> None:
        for site in self.sites:
            site.close(now_ms)

    # The fleet

    def add_site(self, group_number: int, group: Group, node: str) -> Site:
        """Put a worker into the fleet; the router knows it at once."""
        neighbours = self._nodes.setdefault(node, [])
        site = Site(
            len(self.sites), group_number, group, node, len(neighbours), self._catalogue, dict(self._fabrics),
            AFFINITY_ROWS, AFFINITY_HASHES, overlap=self._settings.overlap,
        )  # fmt: skip
        site.since_ms = self.timeline.now_ms
        self.sites.append(site)
        neighbours.append(site)
        self._site_of[site.facts.id] = site
        self.announce(node)
        return site

    def announce(self, node: str) -> None:
        """A node's inventory reaches the router."""
        facts = [site.facts for site in self._nodes[node] if site.alive]
        _, refused = self.routing.learn(node, facts, self.timeline.now_ms, self._fabrics)
        if refused:
            raise refused[0]

    def say(self, site: Site) -> None:
        """A site's word may have changed."""
        self._wire.word(site)

    def retire(self, site: Site) -> None:
        """Take an empty site out of the fleet."""
        site.count(self.timeline.now_ms)
        site.alive = False
        self.announce(site.node)

    def _die(self, site: Site, failure: Failure) -> None:
        if not site.alive:
            return
        timeline = self.timeline
        timeline.note(_DIED, site.number)
        incarnation = site.facts.incarnation
        site.die(timeline.now_ms)
        timeline.later(min(self._settings.detect_ms, failure.for_ms), self._learn_death, site, incarnation)
        timeline.later(failure.for_ms, self._back, site)

    def _learn_death(self, site: Site, incarnation: int) -> None:
        lost = list(site.flights.values())
        site.flights.clear()
        self._wire.dead(site, incarnation)
        for flight in lost:
            self._failed(flight, flight.try_)

    def _back(self, site: Site) -> None:
        site.live(self.timeline.now_ms)
        self.announce(site.node)

    def _tend(self) -> None:
        self.routing.tend(self.timeline.now_ms)
        while self.routing.sweeping:
            self.routing.sweep()
        self.desk.look()
        self.timeline.later(_TEND_MS, self._tend)

    # Requests

    def _arrive_next(self) -> None:
        if self._next < len(self._leaders):
            request = self._leaders[self._next]
            self.timeline.at(request.at_ms, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        if request.follows < 0:
            self._next += 1
            self._arrive_next()
        else:
            self._thinking -= 1
        self.timeline.note(_ARRIVED, request.number)
        flight = self.desk.receive(request)
        self.open[request.number] = flight
        self.desk.take(flight)

    def _refused(self, flight: Flight, why: str) -> None:
        self.timeline.note(_REFUSED, flight.request.number)
        self._over(flight, why)

    def _failed(self, flight: Flight, try_: int) -> None:
        """A try came to nothing: try elsewhere, unless the client has seen a part of the answer."""
        if flight.outcome or flight.try_ != try_:
            return
        self.carrier.cancel(flight)
        for key in flight.keys.values():
            self.routing.ended(key, 0, self.timeline.now_ms)
        flight.keys = {}
        if flight.first_ms >= 0.0:
            self._refused(flight, "failed")
        else:
            self.desk.again(flight)
        self.desk.look()

    def _finished(self, flight: Flight) -> None:
        request = flight.request
        self.desk.lengths.observe(request.tenant, request.model, request.output_tokens)
        self.tally.served(flight)
        self._over(flight, "finished")

    def _over(self, flight: Flight, outcome: str) -> None:
        """A flight's one end."""
        if flight.outcome:
            raise AssertionError(f"request {flight.request.number} ended twice: {flight.outcome}, then {outcome}")
        flight.outcome = outcome
        flight.ended_ms = self.timeline.now_ms
        del self.open[flight.request.number]
        self.desk.drop(flight)
        self.tally.add(flight)
        for request in self._followers.pop(flight.request.number, ()):
            self._thinking += 1
            self.timeline.later(request.think_ms, self._arrive, request)
