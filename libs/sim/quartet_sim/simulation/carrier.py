"""Carries plans out: dispatches work to sites, runs their engines, moves KV for splits and fetches, and tells of it."""

from collections.abc import Callable
from typing import Final

from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.links import LINK_CLASSES
from quartet_core.plan import Plan
from quartet_core.routing import Routing
from quartet_sim.simulation.engine import IDLE
from quartet_sim.simulation.flight import Flight, Job
from quartet_sim.simulation.lanes import Lanes, Transfer
from quartet_sim.simulation.site import Site
from quartet_sim.simulation.spec import Settings
from quartet_sim.simulation.timeline import Timeline
from quartet_sim.simulation.wire import Wire
from quartet_sim.simulation.work import COMPUTED, FINISHED, FIRST, LENT, PREFILLED, Stage, Work, WorkKind

_LINKS_MS: Final = 100.0

SENT, FIRST_TOKEN, ENDED = 1, 2, 3
"""What the log notes of a request here."""


class Carrier:
    """``finished`` is called when an answer's end reaches the router, ``failed`` when a try came to nothing.

    Whoever takes a closure along for later asks ``_on(job)``: whether the worker still lives the same life and the
    flight is still on the same try.
    """

    def __init__(
        self, timeline: Timeline, settings: Settings, routing: Routing, links: LinkBook, wire: Wire,
        site_of: Callable[[str], Site], finished: Callable[[Flight], None],
        failed: Callable[[Flight, int], None],
    ) -> None:  # fmt: skip
        self.lanes = Lanes(timeline)
        self.splits = self.fetches = self.retries = 0
        self._timeline = timeline
        self._settings = settings
        self._routing = routing
        self._links = links
        self._links_due = False
        self._wire = wire
        self._site_of = site_of
        self._finished = finished
        self._failed = failed
        self._works = 0

    # Dispatch

    def send(self, flight: Flight, plan: Plan) -> None:
        """Dispatch a plan: it is in the ledger at once, and with its workers ``dispatch_ms`` later."""
        fleet = self._routing.fleet
        other = plan.prefill if plan.split else plan.source
        sites = {plan.decode: self._site_of(fleet.at(plan.decode).id)}
        if plan.split or plan.fetches:
            sites[other] = self._site_of(fleet.at(other).id)
        flight.tried.extend(site.facts.id for site in sites.values())
        flight.keys = {
            slot: flight.ledger_key(flight.try_, site.facts.id, site.facts.incarnation) for slot, site in sites.items()
        }
        flight.jobs = []
        flight.transfer, flight.moved_tokens = None, 0
        self.splits += plan.split
        self.fetches += plan.fetches
        self.retries += flight.try_ > 1
        if self._settings.ledger:
            self._routing.sent(flight.keys, plan, flight.ask, self._timeline.now_ms)
        target = sites[plan.decode]
        self._timeline.note(SENT, flight.request.number << 16 | target.number)
        flight.sites = tuple(sites.values())
        for site in flight.sites:
            site.flights[flight.request.number] = flight
        self._timeline.later(
            self._settings.dispatch_ms, self._arrived, flight, flight.try_, plan, target, sites.get(other)
        )

    def _arrived(self, flight: Flight, try_: int, plan: Plan, target: Site, giver: Site | None) -> None:
        if flight.outcome or flight.try_ != try_ or not target.alive or (giver is not None and not giver.alive):
            return  # nobody answers: whoever learns of the death tries again
        self._wire.tell(self._routing.accepted, flight, target)
        if giver is None:
            self._submit(self._job(flight, target, "whole"))
            return
        self._wire.tell(self._routing.accepted, flight, giver)
        if plan.split:
            self._begin_split(flight, target, giver)
        else:
            self._begin_fetch(flight, plan, target, giver)

    def _job(
        self, flight: Flight, site: Site, kind: WorkKind, units: tuple[int, ...] | None = None, prompt_tokens: int = 0
    ) -> Job:
        request = flight.request
        self._works += 1
        work = Work(
            self._works,
            prompt_tokens or request.prompt_tokens,
            request.output_tokens,
            units=request.units if units is None else units,
            unit_tokens=request.unit_tokens,
            kind=kind,
            flight=flight,
        )
        job = Job(site, site.facts.incarnation, work)
        flight.jobs.append(job)
        return job

    def _submit(self, job: Job) -> None:
        job.site.engine.submit(job.work, self._timeline.now_ms)
        self.touch(job.site)

    @staticmethod
    def _alive(job: Job) -> bool:
        return job.site.alive and job.site.facts.incarnation == job.incarnation

    # Splits

    def _begin_split(self, flight: Flight, target: Site, giver: Site) -> None:
        decode = self._job(flight, target, "decode", ())
        if not target.engine.reserve(decode.work, flight.request.prompt_tokens, self._timeline.now_ms):
            flight.jobs.clear()
            self._timeline.later(self._settings.event_ms, self._failed, flight, flight.try_)
            return
        self._submit(self._job(flight, giver, "prefill"))
        self.touch(target)

    def _move(self, flight: Flight, tokens: int, *, more: bool) -> None:
        """The first ``tokens`` tokens of a split's prompt are computed: their KV moves. A prefill that lost its blocks
        computes some again, which are over already."""
        prefill = flight.jobs[1]
        parted, flight.moved_tokens = flight.moved_tokens, max(flight.moved_tokens, tokens)
        size_bytes = (flight.moved_tokens - parted) * prefill.site.kv_bytes_per_token
        if flight.transfer is not None:
            self.lanes.feed(flight.transfer, size_bytes, more=more)
        else:
            flight.transfer = self._set_out(flight, size_bytes, more=more)

    def _set_out(self, flight: Flight, size_bytes: int, *, more: bool) -> Transfer:
        decode, prefill = flight.jobs
        try_ = flight.try_

        def there() -> None:
            now_ms = self._timeline.now_ms
            if self._alive(prefill):
                prefill.site.engine.release(prefill.work, now_ms)
                self.touch(prefill.site)
            if not self._alive(decode):
                return
            if flight.outcome or flight.try_ != try_:
                decode.site.engine.unreserve(decode.work, now_ms)
                self.touch(decode.site)
            else:
                self._submit(decode)

        return self._start(prefill.site, decode.site, size_bytes, there, more=more)

    # Fetches

    def _begin_fetch(self, flight: Flight, plan: Plan, target: Site, giver: Site) -> None:
        request, try_ = flight.request, flight.try_
        units = request.units[: plan.fetched_tokens // request.unit_tokens]
        tokens = len(units) * request.unit_tokens
        run = self._job(flight, target, "whole")
        waits = True
        lent_units = 0  # as many as were still cached at the lender
        target.unread_ms += plan.prefill_ms

        def begin() -> None:
            nonlocal waits
            if not waits:
                return
            waits = False
            if self._alive(run):
                target.unread_ms = max(0.0, target.unread_ms - plan.prefill_ms)
                if not flight.outcome and flight.try_ == try_:
                    self._submit(run)

        lease = self._job(flight, target, "decode", units, tokens)
        lend = self._job(flight, giver, "lend", units, tokens)
        del flight.jobs[1:]  # lease and loan see to themselves, whatever becomes of the flight
        if not tokens or not target.engine.reserve(lease.work, tokens, self._timeline.now_ms):
            self._lent(flight, giver)
            begin()
            return

        def lent() -> None:
            nonlocal lent_units
            self._lent(flight, giver)
            lent_units = lend.work.shared
            self._start(giver, target, lent_units * request.unit_tokens * giver.kv_bytes_per_token, there)

        def there() -> None:
            now_ms = self._timeline.now_ms
            if self._alive(lend):
                giver.engine.release(lend.work, now_ms)
                self.touch(giver)
            if not self._alive(lease):
                return
            if waits:
                target.engine.adopt(lease.work, lent_units)
            else:
                target.engine.unreserve(lease.work, now_ms)
            self.touch(target)
            begin()

        lend.work.flight = lent
        self._submit(lend)
        self.touch(target)
        self._timeline.later(plan.fetch_wait_ms, begin)

    def _lent(self, flight: Flight, giver: Site) -> None:
        giver.flights.pop(flight.request.number, None)
        self._wire.tell(self._routing.ended, flight, giver)

    # Transfers

    def _start(
        self, giver: Site, target: Site, size_bytes: int, there: Callable[[], None], *, more: bool = False
    ) -> Transfer:
        transfer = self.lanes.start(
            giver.place, giver.facts.id, target.place, target.facts.id, size_bytes, there, more=more
        )
        if not self._links_due:
            self._links_due = True
            self._timeline.later(_LINKS_MS, self._tell_links)
        return transfer

    def _tell_links(self) -> None:
        """The coordinator's table, ten times a second while anything moves."""
        self._links.clear()
        for (source, target, kind), size_bytes in self.lanes.in_flight().items():
            known = LINK_CLASSES[kind]
            self._links.put(source, target, PricedLink(kind, known.gb_per_s, known.setup_ms, size_bytes))
        self._links_due = len(self.lanes) > 0
        if self._links_due:
            self._timeline.later(_LINKS_MS, self._tell_links)

    # Engines

    def touch(self, site: Site) -> None:
        """A site's engine was given or relieved of something: look at it when it wants to be; say what changed."""
        due_ms = site.engine.next_ms
        if due_ms != site.scheduled_ms:
            site.scheduled_ms = due_ms
            if due_ms < IDLE:
                self._timeline.at(due_ms, self._advance, site, due_ms)
        self._wire.word(site)
        self._wire.affinity(site)

    def _advance(self, site: Site, due_ms: float) -> None:
        if site.scheduled_ms != due_ms or site.engine.next_ms != due_ms:
            return
        site.scheduled_ms = -1.0
        for what, work in site.engine.advance():
            if what == LENT:
                lent = work.flight
                assert callable(lent)
                lent()
                continue
            flight = work.flight
            assert isinstance(flight, Flight)
            if what == FIRST:
                self._on_first(flight, site, work)
            elif what == FINISHED:
                site.flights.pop(flight.request.number, None)
                self._timeline.note(ENDED, flight.request.number)
                self._wire.tell(self._routing.ended, flight, site)
                self._timeline.later(self._settings.event_ms, self._finished, flight)
            elif what == COMPUTED:
                if self._settings.overlap:
                    self._move(flight, work.computed, more=True)
            elif what == PREFILLED:
                flight.cached_tokens = work.cached_tokens
                site.flights.pop(flight.request.number, None)
                self._wire.tell(self._routing.prefilled, flight, site)
                self._move(flight, work.prompt_tokens, more=False)
        self.touch(site)

    def _on_first(self, flight: Flight, site: Site, work: Work) -> None:
        flight.first_ms = self._timeline.now_ms + self._settings.event_ms
        if work.kind == "whole":
            flight.cached_tokens = work.cached_tokens
        self._timeline.note(FIRST_TOKEN, flight.request.number)
        self._wire.tell(self._routing.prefilled, flight, site)

    # Ends that are no ends of answers

    def cancel(self, flight: Flight) -> None:
        """Take back the last try's work wherever it still is."""
        now_ms = self._timeline.now_ms
        moving = any(job.work.kind == "prefill" and job.work.stage is Stage.GONE for job in flight.jobs)
        if flight.transfer is not None and not moving:
            self.lanes.stop(flight.transfer)  # its prefill ends unfinished
        for site in flight.sites:
            site.flights.pop(flight.request.number, None)
        for job in flight.jobs:
            if not self._alive(job):
                continue
            if job.work.stage not in (Stage.OUTSIDE, Stage.GONE):
                job.site.engine.cancel(job.work, now_ms)
            elif job.work.kind == "decode" and not moving:
                job.site.engine.unreserve(job.work, now_ms)
            self.touch(job.site)
