"""One request in a simulation, from its arrival to its end."""

from typing import TYPE_CHECKING, NamedTuple

from quartet_core.hold import HoldKey
from quartet_core.ledger import Key
from quartet_core.plan import Ask
from quartet_sim.simulation.lanes import Transfer
from quartet_sim.simulation.spec import Request
from quartet_sim.simulation.work import Work

if TYPE_CHECKING:
    from quartet_sim.simulation.site import Site


class Job(NamedTuple):
    """A flight's work at one worker, and the worker's life it is part of."""

    site: "Site"
    incarnation: int
    work: Work


class Flight:
    """A request and where it stands. ``try_`` counts dispatches; ``jobs``, ``keys`` (of the ledger, by slot), ``sites``
    (that it was sent to, whether it has arrived or not), and, of a split, the ``transfer`` of its KV and how many
    tokens' it was given so far, are those of the last.

    Times are milliseconds, −1 for what has not happened. ``outcome`` is empty until the end.
    """

    __slots__ = (
        "arrived_ms", "ask", "cached_tokens", "ended_ms", "first_ms", "held", "held_ms", "jobs", "key", "keys",
        "lag_ms", "moved_tokens", "outcome", "request", "sites", "transfer", "tried", "try_",
    )  # fmt: skip

    def __init__(self, request: Request, ask: Ask, arrived_ms: float) -> None:
        self.request = request
        self.ask = ask
        self.arrived_ms = arrived_ms
        self.key: HoldKey = (request.tenant, str(request.number), 1)
        self.try_ = 0
        self.tried: list[str] = []
        self.keys: dict[int, Key] = {}
        self.jobs: list[Job] = []
        self.sites: tuple[Site, ...] = ()
        self.held = False
        self.held_ms = -1.0
        self.lag_ms = 0.0
        self.first_ms = -1.0
        self.ended_ms = -1.0
        self.cached_tokens = 0
        self.outcome = ""
        self.transfer: Transfer | None = None
        self.moved_tokens = 0

    @property
    def model(self) -> str:
        """The model that it asks for."""
        return self.request.model

    def ledger_key(self, try_: int, worker: str, incarnation: int) -> Key:
        """The key of a try of this request on a worker."""
        tenant, number, attempt = self.key
        return tenant, number, attempt, try_, worker, incarnation
