"""A flight: one request in this router, from its arrival to its end."""

from collections.abc import Iterator

from quartet_bus.messages import StreamId
from quartet_core.dispatch import Dispatch, Stage
from quartet_core.hold import HoldKey
from quartet_core.ledger import Key as LedgerKey
from quartet_core.plan import Ask, Decision


class Flight:
    """All that the router keeps of a request. ``body`` is dropped at the first token: then nothing is resent.

    ``arrival`` numbers the flights of this router, from 1 on.
    """

    __slots__ = (
        "arrival", "arrived_ms", "ask", "attempt", "body", "deadline_at_ms", "decided_us", "decision", "dispatch",
        "expires_ms", "frames_at_ms", "held_at_ms", "id", "inbox", "lag_ms", "ledger_keys", "model", "no_hold",
        "priority", "salt", "session", "streams", "tenant", "transfer",
    )  # fmt: skip

    def __init__(
        self, *, tenant: str, model: str, id: str, attempt: int, inbox: str, body: bytes, ask: Ask, max_tries: int,
        arrived_ms: float, deadline_at_ms: float, priority: int, session: str, no_hold: bool, salt: bytes,
        streams: bool = True,
    ) -> None:  # fmt: skip
        self.tenant = tenant
        self.model = model
        self.id = id
        self.attempt = attempt
        self.inbox = inbox
        self.body: bytes | None = body
        self.ask = ask
        self.dispatch = Dispatch(max_tries)
        self.arrival = 0
        self.arrived_ms = arrived_ms
        self.deadline_at_ms = deadline_at_ms
        self.priority = priority
        self.session = session
        self.no_hold = no_hold
        self.salt = salt
        self.streams = streams
        self.decision: Decision | None = None
        self.decided_us = 0.0
        """What that decision took, by the process's clock."""
        self.transfer = ""
        self.held_at_ms = 0.0
        self.expires_ms = 0.0
        """When it is given up if its events stopped coming; 0 before its first dispatch."""
        self.lag_ms = 0.0
        """How much later than its deadline it ranks among held requests: its tenant's backlog when it was held."""
        self.frames_at_ms = arrived_ms
        self.ledger_keys: dict[int, LedgerKey] = {}

    @property
    def key(self) -> HoldKey:
        """What tells this flight from all others."""
        return (self.tenant, self.id, self.attempt)

    @property
    def stream(self) -> StreamId:
        """The stream of the current try."""
        return StreamId(self.id, self.attempt, self.dispatch.try_)

    @property
    def frame_try(self) -> int:
        """The try that the router's own frames speak for: the current one, or while none runs the one to come."""
        waiting = self.dispatch.stage in (Stage.NEW, Stage.HELD)
        return max(1, self.dispatch.try_ + waiting)

    def ledger_key(self, try_: int, worker: str, incarnation: int) -> LedgerKey:
        """The ledger's key of a try of this request on a worker."""
        return (self.tenant, self.id, self.attempt, try_, worker, incarnation)


class Flights:
    """All flights of a router, found by key, by request, by worker and by transfer."""

    def __init__(self) -> None:
        self._by_key: dict[HoldKey, Flight] = {}
        self._by_worker: dict[str, dict[HoldKey, Flight]] = {}
        self._by_transfer: dict[str, Flight] = {}
        self.body_bytes = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._by_key.values()))

    def add(self, flight: Flight) -> bool:
        """Take a new flight; False when there is one with its key."""
        if flight.key in self._by_key:
            return False
        self._arrivals += 1
        flight.arrival = self._arrivals
        self._by_key[flight.key] = flight
        self.body_bytes += len(flight.body or b"")
        return True

    def get(self, key: HoldKey) -> Flight | None:
        """The flight with ``key``."""
        return self._by_key.get(key)

    def of_request(self, tenant: str, id: str, attempt: int) -> list[Flight]:
        """The flights of a request; ``attempt`` 0 means all of its attempts."""
        if attempt:
            flight = self._by_key.get((tenant, id, attempt))
            return [] if flight is None else [flight]
        return [flight for key, flight in list(self._by_key.items()) if key[0] == tenant and key[1] == id]

    def on_worker(self, worker: str) -> list[Flight]:
        """The flights of which a half is on ``worker``."""
        return list(self._by_worker.get(worker, {}).values())

    def of_transfer(self, transfer: str) -> Flight | None:
        """The flight that waits for a KV transfer."""
        return self._by_transfer.get(transfer)

    def placed(self, flight: Flight) -> None:
        """A try of ``flight`` went out: index its workers and its transfer."""
        for half in flight.dispatch.involved:
            self._by_worker.setdefault(half.worker, {})[flight.key] = flight
        if flight.transfer:
            self._by_transfer[flight.transfer] = flight

    def lifted(self, flight: Flight) -> None:
        """The current try of ``flight`` is over: it is on no worker any more."""
        for worker in flight.dispatch.tried:
            there = self._by_worker.get(worker)
            if there is not None and there.pop(flight.key, None) is not None and not there:
                del self._by_worker[worker]
        if flight.transfer:
            self._by_transfer.pop(flight.transfer, None)
            flight.transfer = ""

    def drop_body(self, flight: Flight) -> None:
        """Keep ``flight`` without its body."""
        if flight.body is not None:
            self.body_bytes -= len(flight.body)
            flight.body = None

    def remove(self, flight: Flight) -> None:
        """Forget ``flight``."""
        self.lifted(flight)
        self.drop_body(flight)
        self._by_key.pop(flight.key, None)
