"""Lanes: directed links between nodes, what they are measured to carry, and who may use them next.

A lane is one (source node, target node, link class). At most so many transfers send at once, on a lane and through the
root complexes at its ends; who of the others is next, ``admission`` says. Those that send share the lane equally, so
what one of them took is scaled to what it would have taken alone before the link learns from it.

A transfer whose source still computes *trickles*: it sends what there is, and has the lane now and then. It takes no
place of those that may send at once, and its bytes are not in anybody's way; when its source is through, what is left
of it is like any other transfer's. As many may trickle on a lane as may send.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from quartet_bus.config.schema import KvSection
from quartet_bus.messages import LinkState
from quartet_core.links import LINK_CLASSES, Link, LinkClass, Place, best_path, ceiling_gb_per_s, crossing_ms
from quartet_kv_coordinator.admission import Root, Waiting, first_of

_DUTY_WEIGHT = 0.2
"""Of the newest transfer in the mean share of its time in which one that trickles sends."""

MAX_ANNOUNCED = 2048
"""Links in one announcement, the last planned ones (readers derive the others), or in one listing."""

MAX_LANES = 8192
"""Lanes kept at most, twice as many as there can be transfers. Beyond, the one longest unplanned is forgotten."""


@dataclass(slots=True)
class Sending:
    """One transfer's use of a lane. ``begun_ns`` and ``shared_ns`` are when, and at how much of a share's time."""

    kv_bytes: int
    in_flight_bytes: int
    predicted_ms: float
    begun_ns: int
    shared_ns: float
    roots: tuple[Root, ...]
    trickles: bool = False


class Lane:
    """One directed link: its `Link`, the transfers that send, and those that are ready to."""

    def __init__(self, source: str, target: str, link: Link, limit: int) -> None:
        self.source = source
        self.target = target
        self.link = link
        self.measured = False
        self.warned = False
        """Whether it was said that this link is slowed."""
        self._limit = limit
        self._trickles = 0
        self._duty = 1.0  # the share of its time in which a transfer that trickles sends, of those that did
        self._sending: dict[str, Sending] = {}
        self._waiting: dict[str, tuple[Waiting, Route]] = {}
        self._yielding: set[str] = set()
        self._shared_ns = 0.0  # how long a transfer that was always there would have had the lane to itself
        self._at_ns = 0

    @property
    def sending(self) -> int:
        """Transfers on the wire, those that trickle left out."""
        return len(self._sending) - self._trickles

    @property
    def trickling(self) -> int:
        """Transfers whose source still computes, and that send what there is."""
        return self._trickles

    @property
    def busy(self) -> bool:
        """Whether any transfer sends or waits."""
        return bool(self._sending or self._waiting)

    @property
    def waiting(self) -> int:
        """Transfers that could send if there were room."""
        return len(self._waiting)

    def is_sending(self, transfer: str) -> bool:
        """Whether ``transfer`` is on the wire."""
        return transfer in self._sending

    def is_waiting(self, transfer: str) -> bool:
        """Whether ``transfer`` waits."""
        return transfer in self._waiting

    def queued_bytes(self, deadline_ns: int) -> int:
        """Bytes that go before a newcomer with this deadline, beyond those on the wire."""
        return sum(each.kv_bytes for each, _ in self._waiting.values() if each.deadline_ns <= deadline_ns)

    def wait(self, transfer: str, deadline_ns: int, kv_bytes: int, route: "Route", *, yields: bool = False) -> None:
        """Queue a transfer that is ready to send. One that ``yields`` (nobody waits for it) goes when nobody else can,
        and beside fewer than half of those that may send at once."""
        self._waiting[transfer] = Waiting(transfer, deadline_ns, kv_bytes), route
        if yields:
            self._yielding.add(transfer)

    def grant(self, now_ns: int) -> str | None:
        """The transfer that may send now, taken from the queue; None when nobody waits or there is no room."""
        if not self._waiting or self.sending >= self._limit:
            return None
        able = [each for each, route in self._waiting.values() if not any(root.full for root in route.roots)]
        if self._yielding:
            urgent = [each for each in able if each.transfer not in self._yielding]
            yielding = sum(transfer in self._yielding for transfer in self._sending)
            able = urgent or (able if yielding < max(1, self._limit // 2) else [])
        if not able:
            return None
        granted = first_of(able, now_ns, lambda kv_bytes: self.predict_ms(self.link.bytes_in_flight, kv_bytes, 1.0))
        del self._waiting[granted.transfer]
        return granted.transfer

    @property
    def takes_trickle(self) -> bool:
        """Whether another transfer may begin while its source computes."""
        return self._trickles < self._limit

    def trickle(self, transfer: str, kv_bytes: int, route: "Route", now_ns: int) -> Sending:
        """``transfer`` sends from now on what its source computes."""
        sending = self.enter(transfer, kv_bytes, route, now_ns)
        self._rest(sending)
        sending.trickles = True
        self._trickles += 1
        return sending

    def is_trickling(self, transfer: str) -> bool:
        """Whether ``transfer`` sends what its source still computes."""
        sending = self._sending.get(transfer)
        return sending is not None and sending.trickles

    def settle(self, transfer: str, left_bytes: int, now_ns: int) -> None:
        """The source of one that trickled is through, and ``left_bytes`` of it are still to cross: it sends.

        Told again, only the bytes change."""
        sending = self._sending.get(transfer)
        if sending is None:
            return
        self._advance(now_ns)
        if sending.trickles:
            sending.trickles = False
            self._trickles -= 1
        else:
            self._rest(sending)
        sending.in_flight_bytes = left_bytes
        self.link.begin(left_bytes)
        for root in sending.roots:
            root.begin(left_bytes)

    def _rest(self, sending: Sending) -> None:
        """Take what is in flight of it off the link."""
        self.link.end(sending.in_flight_bytes)
        for root in sending.roots:
            root.end(sending.in_flight_bytes)

    def enter(self, transfer: str, kv_bytes: int, route: "Route", now_ns: int) -> Sending:
        """``transfer`` sends from now on."""
        self._advance(now_ns)
        self._waiting.pop(transfer, None)
        # of a larger one beside it, only as much is in its way as it has itself
        beside = sum(min(other.kv_bytes, kv_bytes) for other in self._sending.values() if not other.trickles)
        predicted_ms = max(
            self.predict_ms(beside, kv_bytes, route.share),
            *(self.link.setup_ms + root.ready_ms(kv_bytes) for root in route.roots),
            0.0,
        )
        self.link.begin(kv_bytes)
        for root in route.roots:
            root.begin(kv_bytes)
        self._sending[transfer] = sending = Sending(
            kv_bytes, kv_bytes, predicted_ms, now_ns, self._shared_ns, route.roots
        )
        return sending

    def leave(
        self, transfer: str, now_ns: int, took_ms: float = 0.0, share: float = 1.0, *, trickled: bool = False
    ) -> None:
        """``transfer`` neither sends nor waits any more; ``took_ms`` > 0 is what sending took, when it came through,
        without the waits of one that ``trickled``."""
        self._advance(now_ns)
        self._waiting.pop(transfer, None)
        self._yielding.discard(transfer)
        sending = self._sending.pop(transfer, None)
        if sending is None:
            return
        if sending.trickles:
            self._trickles -= 1
        else:
            self._rest(sending)
        if took_ms > 0:
            # The ends may be slower than the link (one L40S behind a fast NIC), and others have had their share of it:
            # what this transfer alone would have taken on the link itself.
            there_ns = now_ns - sending.begun_ns
            alone = (self._shared_ns - sending.shared_ns) / there_ns if there_ns > 0 else 1.0
            setup_ms = min(self.link.setup_ms, took_ms)
            if trickled:
                self._duty += _DUTY_WEIGHT * (min(1.0, took_ms * 1e6 / there_ns if there_ns > 0 else 1.0) - self._duty)
            self.link.observe(sending.kv_bytes, 0, setup_ms + (took_ms - setup_ms) * share * alone)
            self.measured = True

    def predict_ms(self, ahead_bytes: int, kv_bytes: int, share: float) -> float:
        """Setup + (bytes ahead + bytes) / what link and ends carry together."""
        link = self.link
        return crossing_ms(link.gb_per_s * share / link.numa_penalty, link.setup_ms, kv_bytes, ahead_bytes)

    def charge_gb_per_s(self, share: float) -> float:
        """The rate at which a simulated mover is to charge a transfer that has the lane to itself.

        What link and ends promise. Measured rates stay out of it: what is charged would otherwise be measured again,
        and never recover.
        """
        return self.link.promised_gb_per_s * share / self.link.numa_penalty

    def _advance(self, now_ns: int) -> None:
        if self._sending:
            self._shared_ns += (now_ns - self._at_ns) / max(1.0, self.sending + self._duty * self._trickles)
        self._at_ns = now_ns

    def state(self) -> LinkState:
        """As announced on ``kv.links``: what bytes get of it, whoever computes with that knows no penalty."""
        link = self.link
        gb_per_s = link.gb_per_s / link.numa_penalty
        return LinkState(
            self.source, self.target, link.kind, gb_per_s, link.setup_ms, link.bytes_in_flight, len(self._sending)
        )


@dataclass(slots=True, frozen=True)
class Route:
    """How one transfer goes: its lane, what its two workers can use of it, and the root complexes on the way."""

    lane: Lane
    share: float
    roots: tuple[Root, ...] = ()

    def predict_ms(self, kv_bytes: int, deadline_ns: int) -> float:
        """When ``kv_bytes`` would have arrived if they were ready now, behind all that goes before them."""
        lane = self.lane
        on_link_ms = lane.predict_ms(lane.link.bytes_in_flight + lane.queued_bytes(deadline_ns), kv_bytes, self.share)
        return max([on_link_ms, *(lane.link.setup_ms + root.ready_ms(kv_bytes) for root in self.roots)])


class Lanes:
    """The lanes in use. One is made when a transfer is first planned over it: of N nodes, few of all N x N pairs."""

    def __init__(self, config: KvSection) -> None:
        self._limit = config.transfers_per_link
        self._root_limit = config.transfers_per_root
        self._roots: dict[tuple[str, str, str], Root] = {}
        configured = {
            name: LinkClass(name, link.gb_per_s, link.setup_ms, "configuration") for name, link in config.links.items()
        }
        self._classes: Mapping[str, LinkClass] = dict(LINK_CLASSES) | configured
        self._class_rows = tuple(
            LinkState("", "", known.name, known.gb_per_s, known.setup_ms) for known in configured.values()
        )
        self._lanes: OrderedDict[tuple[str, str, str], Lane] = OrderedDict()  # the last planned ones at the end

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def route(self, source: Place, target: Place) -> Route:
        """The best path between two workers, over the fabric that both their nodes have, for a transfer to take."""
        key = (source.node, target.node, best_path(source, target))
        lane = self._lanes.get(key)
        if lane is None:
            self._make_room()
            lane = self._lanes[key] = self._fresh(key[2], source, target)
        else:
            self._lanes.move_to_end(key)
        return Route(lane, _share(lane, source, target), self._roots_of(lane, source, target))

    def look(self, source: Place, target: Place) -> Route:
        """The same route, for whoever only asks: a lane that nobody used is told as its class says, and not kept."""
        path = best_path(source, target)
        lane = self._lanes.get((source.node, target.node, path))
        lane = lane or self._fresh(path, source, target)
        return Route(lane, _share(lane, source, target))

    def states(self) -> tuple[LinkState, ...]:
        """The table for ``kv.links``: configured class figures, then what is measured or busy, last planned first."""
        known = [lane for lane in reversed(self._lanes.values()) if lane.measured or lane.busy]
        return (*self._class_rows, *(lane.state() for lane in known[:MAX_ANNOUNCED]))

    def listing(self, pairs: Iterable[tuple[Place, Place]]) -> tuple[Lane, ...]:
        """For people: what is measured or busy, then the links of ``pairs`` as their classes say; bounded."""
        known = [lane for lane in reversed(self._lanes.values()) if lane.measured or lane.busy]
        found = {(lane.source, lane.target, lane.link.kind): lane for lane in known[:MAX_ANNOUNCED]}
        for source, target in pairs:
            if len(found) >= MAX_ANNOUNCED:
                break
            lane = self.look(source, target).lane
            found.setdefault((lane.source, lane.target, lane.link.kind), lane)
        return tuple(found.values())

    def _fresh(self, path: str, source: Place, target: Place) -> Lane:
        known = self._classes[path]
        rate, penalty = known.gb_per_s, 1.0
        if source.node != target.node:
            rate = min([rate, *(nic for nic in (source.nic_gb_per_s, target.nic_gb_per_s) if nic > 0)])
            penalty = max(source.numa_penalty, target.numa_penalty)
        return Lane(source.node, target.node, Link(path, rate, known.setup_ms, penalty), self._limit)

    def _roots_of(self, lane: Lane, source: Place, target: Place) -> tuple[Root, ...]:
        """What a transfer shares with other lanes: the way out of its source's cards and into its target's.

        NVLink passes no root complex. Bounded by the roots that hosts name, at most one a card.
        """
        if lane.link.kind == "NVLINK":
            return ()
        found = []
        for place, way in ((source, "out"), (target, "in")):
            if place.root:
                key = (place.node, place.root, way)
                if key not in self._roots:
                    self._roots[key] = Root(place.gpus * place.host_gb_per_s, self._root_limit)
                root = self._roots[key]
                root.gb_per_s = max(root.gb_per_s, place.gpus * place.host_gb_per_s)
                found.append(root)
        return tuple(found)

    def _make_room(self) -> None:
        """Forget the lane longest unplanned. Busy ones get another turn: there are fewer transfers than lanes."""
        while len(self._lanes) >= MAX_LANES:
            key, lane = self._lanes.popitem(last=False)
            if lane.busy:
                self._lanes[key] = lane


def _share(lane: Lane, source: Place, target: Place) -> float:
    return min(1.0, ceiling_gb_per_s(lane.link.kind, source, target) / lane.link.promised_gb_per_s)
