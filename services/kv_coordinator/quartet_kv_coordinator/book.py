"""The transfers that a coordinator carries: what was planned, the machine, the path, and how it went."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct

from quartet_bus.messages import StreamId, TransferPlan, TransferReport
from quartet_core.transfer import Side, State, Transfer
from quartet_kv_coordinator.lanes import Route

MAX_TRANSFERS = 4096
"""Transfers under way at once; a plan beyond them is refused as overloaded."""

MAX_HISTORY = 1024
"""Ended transfers that are remembered: for the door, and so that a plan heard twice is not carried out twice."""


Ask = tuple[str, StreamId]
"""(tenant, stream): one try of one tenant's request. Clients choose the ids, so two tenants may have the same."""


def ask_of(plan: TransferPlan) -> Ask:
    """Which try of which request ``plan`` belongs to."""
    return plan.tenant, plan.stream


class TransferView(Struct, frozen=True):
    """One transfer as an operator sees it. ``took_ms`` is what the bytes took, 0 until they arrived; ``overlap_ms`` of
    it passed while the prefill still computed."""

    transfer: str
    reason: str
    state: str
    request_id: str
    source: str
    target: str
    tokens: int
    kv_bytes: int
    wire_bytes: int
    age_ms: float
    predicted_ms: float
    took_ms: float
    epoch: int
    link: str
    detail: str
    live: bool
    overlap_ms: float


@dataclass(slots=True, eq=False)
class Entry:
    """One transfer under way. ``route`` is None for one that was refused before a path was looked for.

    ``left_bytes`` had not crossed when its source was through, as far as that is known; ``settled_bytes`` is what the
    lane was told of it. ``manifest`` is what a page's source said of its blocks, for its target.
    """

    plan: TransferPlan
    machine: Transfer
    nodes: dict[Side, str]
    heard_ns: int
    route: Route | None = None
    reserved_ns: int = 0
    predicted_ms: float = 0.0
    took_ms: float = 0.0
    overlap_ms: float = 0.0
    wire_bytes: int = 0
    link: str = ""
    detail: str = ""
    trickled: bool = False
    left_bytes: int = 0
    settled_bytes: int = -1
    manifest: bytes = b""

    def side_of(self, worker: str, incarnation: int) -> Side | None:
        """Which end of the transfer this worker is, if any."""
        if (worker, incarnation) == (self.plan.source, self.plan.source_incarnation):
            return Side.SOURCE
        if (worker, incarnation) == (self.plan.target, self.plan.target_incarnation):
            return Side.TARGET
        return None

    def worker(self, side: Side) -> tuple[str, int]:
        """(worker, incarnation) of one end."""
        plan = self.plan
        if side is Side.SOURCE:
            return plan.source, plan.source_incarnation
        return plan.target, plan.target_incarnation

    def report(self) -> TransferReport:
        """How it stands, as told on ``kv.done`` and ``kv.failed``."""
        plan = self.plan
        return TransferReport(
            transfer=plan.transfer,
            stream=plan.stream,
            reason=plan.reason,
            state=self.machine.state.value,
            source=plan.source,
            target=plan.target,
            epoch=self.machine.epoch,
            tokens=plan.tokens,
            wire_bytes=self.wire_bytes,
            kv_bytes=plan.kv_bytes,
            took_ms=self.took_ms,
            predicted_ms=self.predicted_ms,
            link=self.link,
            detail=self.detail,
            router=plan.router,
            overlap_ms=self.overlap_ms,
        )

    def view(self, now_ns: int) -> TransferView:
        """How it stands, for the door."""
        plan, machine = self.plan, self.machine
        return TransferView(
            transfer=plan.transfer,
            reason=plan.reason.value,
            state=machine.state.value,
            request_id=plan.stream.id,
            source=plan.source,
            target=plan.target,
            tokens=plan.tokens,
            kv_bytes=plan.kv_bytes,
            wire_bytes=self.wire_bytes,
            age_ms=(now_ns - self.heard_ns) / 1e6,
            predicted_ms=self.predicted_ms,
            took_ms=self.took_ms,
            epoch=machine.epoch,
            link=self.link,
            detail=self.detail,
            live=not machine.ended,
            overlap_ms=self.overlap_ms,
        )


class Book:
    """Transfers under way, by name and by stream, and those that ended lately."""

    def __init__(self) -> None:
        self._live: dict[str, Entry] = {}
        self._streams: dict[Ask, list[Entry]] = {}
        self._history: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Entry]:
        """Those under way, oldest first; the book may change meanwhile."""
        return iter(list(self._live.values()))

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._live or transfer in self._history

    @property
    def full(self) -> bool:
        """Whether there is no room for another transfer."""
        return len(self._live) >= MAX_TRANSFERS

    def live(self, transfer: str) -> Entry | None:
        """The transfer under way of that name."""
        return self._live.get(transfer)

    def of(self, tenant: str, stream: StreamId) -> list[Entry]:
        """Transfers under way for one try of a tenant's request, and those whose plan does not say whose they are.

        A router of an older version does not; its transfers must still hear of their prefills.
        """
        return [*self._streams.get((tenant, stream), ()), *(self._streams.get(("", stream), ()) if tenant else ())]

    def open(self, entry: Entry) -> None:
        """Take an entry up."""
        self._live[entry.plan.transfer] = entry
        self._streams.setdefault(ask_of(entry.plan), []).append(entry)

    def end(self, entry: Entry) -> None:
        """Nothing is left to do for it: it becomes history."""
        self._drop(entry)
        self._history[entry.plan.transfer] = entry
        while len(self._history) > MAX_HISTORY:
            self._history.popitem(last=False)

    def abandon(self) -> list[Entry]:
        """Another coordinator leads: let go of everything, and return what had no outcome yet."""
        entries = list(self._live.values())
        for entry in entries:
            if entry.machine.announced:
                self.end(entry)
            else:
                self._drop(entry)
        return [entry for entry in entries if not entry.machine.announced]

    def views(self, now_ns: int) -> list[TransferView]:
        """All of them, newest first."""
        entries = [*self._history.values(), *self._live.values()]
        return [entry.view(now_ns) for entry in sorted(entries, key=lambda entry: -entry.heard_ns)]

    def count(self, state: State) -> int:
        """How many are in ``state``."""
        return sum(entry.machine.state is state for entry in self._live.values())

    def _drop(self, entry: Entry) -> None:
        if self._live.pop(entry.plan.transfer, None) is None:
            return
        mates = self._streams[ask_of(entry.plan)]
        mates.remove(entry)
        if not mates:
            del self._streams[ask_of(entry.plan)]
