"""What a simulation is given: the fleet, the requests, their targets, and how the control plane is set up.

Times are milliseconds of the simulation's clock, which begins at 0. All of it is data: nothing here changes in a run.
"""

import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from quartet_core.catalogue import Catalogue, UnknownProfile

GPUS_PER_NODE = 8

_GROUP = re.compile(
    r"(?P<count>\d+)(?:\.\.(?P<most>\d+))?x(?P<hardware>[A-Za-z0-9_]+?)(?:x(?P<tp>\d+))?:(?P<model>[A-Za-z0-9_.-]+)"
    r"(?:/(?P<precision>[a-z0-9]+))?(?:@(?P<role>both|prefill|decode))?"
)
_GRAMMAR = (
    "COUNT[..MOST]xCLASS[xTP]:MODEL[/PRECISION][@ROLE], e.g. 4xH100_SXM5:llama-3.1-8b/fp8"
    " or 2xL40S_PCIEx4:llama-3.1-70b"
)


class WrongFleet(ValueError):
    """A fleet that cannot be built: ``what`` is wrong, ``allowed`` says what would do."""

    def __init__(self, what: str, allowed: str) -> None:
        super().__init__(f"fleet: {what}; {allowed}")
        self.what = what
        self.allowed = allowed

    def __reduce__(self) -> tuple[type["WrongFleet"], tuple[str, str]]:
        return type(self), (self.what, self.allowed)  # it may be raised in another process


class Group(Struct, frozen=True, kw_only=True):
    """``count`` workers that are alike: each runs ``model`` on ``tp`` cards of class ``hardware``.

    ``slowdown`` is how much slower than their profile they really run (2: half as fast), which routers know only by
    drift. ``least`` and ``most`` bound ``count`` where ``Settings.autoscale`` is on; ``None``: ``count`` itself.
    """

    hardware: str
    model: str
    precision: str = "fp8"
    tp: int = 1
    count: int = 1
    role: Literal["both", "prefill", "decode"] = "both"
    slowdown: float = 1.0
    chunk_tokens: int = 2048
    max_batch: int = 256
    least: int | None = None
    most: int | None = None


class FleetSpec(Struct, frozen=True):
    """All workers, group by group. The order of groups and workers is that of the router's slots."""

    groups: tuple[Group, ...]

    def check(self, catalogue: Catalogue) -> None:
        """Raises ``WrongFleet`` for a group that ``catalogue`` has no profile for, or whose model leaves no KV room."""
        if not self.groups or all(group.count < 1 for group in self.groups):
            raise WrongFleet("no workers", _GRAMMAR)
        for group in self.groups:
            try:
                catalogue.hardware_class(group.hardware)
                catalogue.model(group.model)
                catalogue.profile(group.hardware, group.model, group.precision, group.tp)
            except UnknownProfile as error:
                raise WrongFleet(f"no {error.what}", f"known: {', '.join(error.allowed)}") from error
            if not catalogue.kv_capacity_tokens(group.hardware, group.model, group.precision, group.tp):
                raise WrongFleet(
                    f"{group.model} in {group.precision} leaves no memory for KV on {group.tp} {group.hardware}",
                    "use more cards per worker or a smaller precision",
                )
            if not group.slowdown > 0 or group.count < 0 or not 1 <= group.max_batch <= group.chunk_tokens:
                raise WrongFleet(
                    f"{group.hardware}: slowdown {group.slowdown}, count {group.count}, max_batch {group.max_batch}",
                    "slowdown must be positive, count at least 0, max_batch from 1 to chunk_tokens",
                )

    def price_per_hour(self, catalogue: Catalogue) -> float:
        """USD per hour of all cards."""
        return sum(g.count * g.tp * catalogue.hardware_class(g.hardware).price_per_hour for g in self.groups)

    @property
    def models(self) -> tuple[str, ...]:
        """The models it serves, sorted."""
        return tuple(sorted({group.model for group in self.groups if group.count}))


def parse_fleet(text: str) -> FleetSpec:
    """The fleet that ``text`` names: groups ``COUNT[..MOST]xCLASS[xTP]:MODEL[/PRECISION][@ROLE]``, commas between.

    Precision is fp8 unless given. With ``MOST``, autoscaling keeps the group between the two. Raises ``WrongFleet``.
    """
    groups = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        if found is None:
            raise WrongFleet(f"cannot read {part.strip()!r}", f"it is {_GRAMMAR}")
        role = found["role"] or "both"
        groups.append(
            Group(
                hardware=found["hardware"],
                model=found["model"],
                precision=found["precision"] or "fp8",
                tp=int(found["tp"] or 1),
                count=int(found["count"]),
                most=int(found["most"]) if found["most"] else None,
                role="prefill" if role == "prefill" else "decode" if role == "decode" else "both",
            )
        )
    return FleetSpec(tuple(groups))


class Slo(Struct, frozen=True):
    """A class of service: both targets must be met. ``share`` is how large a part of the requests is of this class."""

    name: str
    ttft_ms: float
    tpot_ms: float
    share: float = 1.0


INTERACTIVE = Slo("interactive", 2_000.0, 50.0, 0.5)
RELAXED = Slo("relaxed", 10_000.0, 150.0, 0.5)


class Request(Struct, frozen=True, kw_only=True):
    """One request. ``output_tokens`` is what the answer will have, which no router knows; ``max_tokens`` what the
    client allows (0: no limit given).

    ``units`` are ids of the prompt's whole units of ``unit_tokens`` tokens: an equal id is an equal prefix up to and
    including it. A request that ``follows`` another (a number) arrives ``think_ms`` after that one's end; ``at_ms``
    then only orders. ``session`` names requests of one conversation.
    """

    number: int
    at_ms: float
    model: str
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    max_tokens: int = 0
    tenant: str = "public"
    units: tuple[int, ...] = ()
    unit_tokens: int = 512
    follows: int = -1
    think_ms: float = 0.0
    session: int = -1


class Failure(Struct, frozen=True, kw_only=True):
    """Worker number ``worker`` (in the fleet's order, from 0) dies at ``at_ms`` and is back, empty, ``for_ms``
    later."""

    worker: int
    at_ms: float
    for_ms: float


class Autoscale(Struct, frozen=True, kw_only=True):
    """The rule, for every group by itself: each ``period_ms``, the workers wanted are the requests under way on the
    group and its share of those held, over ``requests_per_worker``, rounded up, within the group's bounds.

    More are started at once and serve ``cold_start_ms`` later. Fewer are wanted for ``patience_ms`` on end: the last
    workers take nothing new, and go when they are empty. Paid from the start's beginning to the end.
    """

    requests_per_worker: float = 16.0
    period_ms: float = 5_000.0
    cold_start_ms: float = 60_000.0
    patience_ms: float = 60_000.0


class Settings(Struct, frozen=True, kw_only=True):
    """The control plane. Defaults are those of ``[router]``, with links as in a RoCE pod.

    ``view_age_ms``: how old a worker's word is when the router has it; ``view_loss``: the share of words that never
    come (the next one says the same). ``dispatch_ms``: from a decision to the worker; ``event_ms``: from a worker's
    event to the router. ``affinity_ms``: how often workers say what they cache. ``detect_ms``: from a worker's death to
    the router's knowing. ``hold``, ``ledger``, ``affinity``, ``drift``, ``split``, ``fetch``, ``overlap`` (a split's KV
    leaves while its prompt is computed): whether these parts are on. ``drain_ms``: how long after the last arrival to
    wait for ends; what has not ended then is unfinished.
    """

    view_age_ms: float = 0.5
    view_loss: float = 0.0
    dispatch_ms: float = 0.3
    event_ms: float = 0.3
    affinity_ms: float = 20.0
    detect_ms: float = 100.0
    hold: bool = True
    hold_max_ms: float = 2_000.0
    hold_ahead_chunks: float = 2.0
    ledger: bool = True
    affinity: bool = True
    drift: bool = True
    split: bool = True
    fetch: bool = True
    overlap: bool = True
    kappa: float = 1.0
    split_margin: float = 0.7
    long_prompt_tokens: int = 4096
    long_context_tokens: int = 65_536
    long_prefill_ms: float = 3000.0
    long_prefill_share: float = 0.5
    link: Literal["RDMA_ROCE", "RDMA_IB", "TCP"] = "RDMA_ROCE"
    nic_gb_per_s: float = 46.6
    max_tries: int = 3
    failures: tuple[Failure, ...] = ()
    autoscale: Autoscale | None = None
    drain_ms: float = 120_000.0


def span_ms(requests: Sequence[Request]) -> float:
    """The time of the last arrival that is known beforehand."""
    return max((request.at_ms for request in requests if request.follows < 0), default=0.0)
