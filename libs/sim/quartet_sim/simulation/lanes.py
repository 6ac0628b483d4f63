"""Links that transfers share: every transfer gets an equal part of each thing it passes, and the least part counts.

What a transfer passes: the NICs of both nodes and the host links of both workers' cards, or, inside a node, the direct
links between cards. Rates and set-up times are those of ``quartet_core.links``. A transfer whose bytes are computed
bit by bit passes nothing while none of them are there.
"""

from collections.abc import Callable

from msgspec import Struct

from quartet_core.links import LINK_CLASSES, Place, best_path, ceiling_gb_per_s
from quartet_sim.simulation.timeline import Timeline

_BYTES_PER_MS = 1e6  # of one GB/s


class Transfer(Struct, eq=False):
    """Bytes on their way. ``passes`` are names of what it shares, each with its GB/s. ``more``: others will follow."""

    source: Place
    target: Place
    kind: str
    left_bytes: float
    passes: tuple[tuple[tuple[str, str], float], ...]
    top_gb_per_s: float
    done: Callable[[], None]
    rate: float = 0.0
    more: bool = False
    set_up: bool = False


class Lanes:
    """All transfers under way. ``done`` of each is called when its last byte is there."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._active: list[Transfer] = []
        self._at_ms = 0.0
        self._turn = 0
        self.moved_bytes = 0

    def __len__(self) -> int:
        return len(self._active)

    def start(
        self, source: Place, source_id: str, target: Place, target_id: str, size_bytes: int, done: Callable[[], None],
        *, more: bool = False,
    ) -> Transfer:  # fmt: skip
        """Move ``size_bytes`` from one worker to another, and with ``more`` what `feed` adds until it says that this
        was all. The first byte leaves after the link's set-up time."""
        kind = best_path(source, target)
        known = LINK_CLASSES[kind]
        top = min(known.gb_per_s, ceiling_gb_per_s(kind, source, target))
        passes: tuple[tuple[tuple[str, str], float], ...]
        if source.node == target.node:
            passes = (
                (("out", source_id), source.gpus * source.gpu_gb_per_s),
                (("in", target_id), target.gpus * target.gpu_gb_per_s),
            )
        else:
            passes = (
                (("out", source_id), source.gpus * source.host_gb_per_s),
                (("in", target_id), target.gpus * target.host_gb_per_s),
                (("nic out", source.node), source.nic_gb_per_s or known.gb_per_s),
                (("nic in", target.node), target.nic_gb_per_s or known.gb_per_s),
            )
        transfer = Transfer(source, target, kind, float(size_bytes), passes, top, done, more=more)
        self.moved_bytes += size_bytes
        self._timeline.later(known.setup_ms, self._join, transfer)
        return transfer

    def feed(self, transfer: Transfer, size_bytes: int, *, more: bool) -> None:
        """So many bytes of it were computed since; ``more`` says whether others will be. The last are never none."""
        self._pass_time()
        transfer.left_bytes = max(transfer.left_bytes, 0.0) + size_bytes
        transfer.more = more
        self.moved_bytes += size_bytes
        if transfer.set_up:
            if transfer not in self._active:
                self._active.append(transfer)
            self._share()

    def stop(self, transfer: Transfer) -> None:
        """It is not wanted any more."""
        self._pass_time()
        transfer.more, transfer.set_up, transfer.done = False, True, _nothing
        if transfer in self._active:
            self._active.remove(transfer)
            self._share()

    def in_flight(self) -> dict[tuple[str, str, str], int]:
        """Bytes not there yet, by (source node, target node, link class)."""
        self._pass_time()
        found: dict[tuple[str, str, str], int] = {}
        for transfer in self._active:
            key = transfer.source.node, transfer.target.node, transfer.kind
            found[key] = found.get(key, 0) + int(transfer.left_bytes)
        return found

    def _join(self, transfer: Transfer) -> None:
        if transfer.set_up:
            return  # stopped meanwhile
        self._pass_time()
        transfer.set_up = True
        self._active.append(transfer)
        self._share()

    def _pass_time(self) -> None:
        now_ms = self._timeline.now_ms
        passed_ms = now_ms - self._at_ms
        self._at_ms = now_ms
        for transfer in self._active:
            transfer.left_bytes -= transfer.rate * passed_ms

    def _share(self) -> None:
        """Divide everything anew, and wake when the first will be through."""
        users: dict[tuple[str, str], int] = {}
        for transfer in self._active:
            for name, _ in transfer.passes:
                users[name] = users.get(name, 0) + 1
        first_ms = float("inf")
        for transfer in self._active:
            parts = [gb_per_s / users[name] for name, gb_per_s in transfer.passes]
            transfer.rate = min(transfer.top_gb_per_s, *parts) * _BYTES_PER_MS
            first_ms = min(first_ms, max(transfer.left_bytes, 0.0) / transfer.rate)
        self._turn += 1
        if self._active:
            self._timeline.later(first_ms, self._look, self._turn)

    def _look(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._pass_time()
        through = [transfer for transfer in self._active if transfer.left_bytes < 1.0]
        self._active = [transfer for transfer in self._active if transfer.left_bytes >= 1.0]
        self._share()
        for transfer in through:
            if not transfer.more:
                transfer.done()


def _nothing() -> None:
    pass
