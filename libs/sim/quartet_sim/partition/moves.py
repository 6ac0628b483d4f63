"""From one placement to another: what goes where, in an order in which no card ever holds more than it may.

What moves is a *piece*: one layer with its KV, or the embedding, or the output head. A piece that keeps its precision
is copied from the cards that have it; one that changes it comes from the store, and only its KV is copied. The old
holders drop it once the new ones have it, so that it is never nowhere, except when nothing can move because all are
full: then pieces are parked in host memory, and fetched from there once there is room.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from quartet_sim.partition.machines import Hop, Pool, hop
from quartet_sim.partition.placement import Placement
from quartet_sim.partition.precision import PrecisionTable
from quartet_sim.partition.shape import Shape
from quartet_sim.partition.timing import layer_bytes

STORE_GB_PER_S = 7.0
"""Judged: one NVMe drive, through a loader that keeps it busy."""

Piece = str
"""``embedding``, ``head``, or ``layer <number>``."""


class Holding(Struct, frozen=True):
    """Who has a piece: cards that share it evenly, its precision, its weights and KV over all of them."""

    gpus: tuple[str, ...]
    precision: str
    weight_bytes: int
    kv_bytes: int

    @property
    def each_bytes(self) -> int:
        """What each card has of it, rounded up."""
        return -(-(self.weight_bytes + self.kv_bytes) // len(self.gpus))


class Move(Struct, frozen=True, kw_only=True):
    """One step: ``copy`` from card to card, ``load`` from the store, ``park`` in host memory, ``fetch`` from there.

    ``sent_bytes`` cross the link ``path``, ``store_bytes`` come from the store. After it ``source`` no longer has the
    piece; no source has a piece that is fetched.
    """

    kind: Literal["copy", "load", "park", "fetch"]
    piece: Piece
    source: tuple[str, ...]
    target: tuple[str, ...]
    precision: str
    path: str
    sent_bytes: int
    store_bytes: int
    ms: float


class MovePlan(Struct, frozen=True, kw_only=True):
    """All steps in order. ``ms`` is one after the other. ``peak_bytes`` is the most that each card ever held, of
    ``limit_bytes``."""

    moves: tuple[Move, ...]
    stays: int
    sent_bytes: int
    store_bytes: int
    ms: float
    peak_bytes: dict[str, int]
    limit_bytes: dict[str, int]


def holdings(placement: Placement, shape: Shape, table: PrecisionTable, kv_tokens: int, kv_element: int) -> dict[
    Piece, Holding
]:  # fmt: skip
    """Who has what, with KV of ``kv_tokens`` tokens at ``kv_element`` bytes an element."""
    found: dict[Piece, Holding] = {}
    for stage in placement.stages:
        weights = layer_bytes(shape, table.precisions[stage.precision])
        replicas = max(1, stage.tp // shape.kv_heads)  # beyond its heads, KV is repeated
        kv = kv_tokens * shape.kv_layer_bytes * kv_element // 2 * replicas
        for layer in range(stage.first_layer, stage.end_layer):
            found[f"layer {layer}"] = Holding(stage.gpus, stage.precision, weights, kv)
        if stage.embedding:
            found["embedding"] = Holding(stage.gpus, "bf16", shape.table_bytes, 0)
        if stage.head:
            found["head"] = Holding(stage.gpus, "bf16", shape.table_bytes, 0)
    return found


def move_plan(
    current: Placement, wanted: Placement, shape: Shape, pools: Sequence[Pool], table: PrecisionTable,
    *, kv_element: int = 2, store_gb_per_s: float = STORE_GB_PER_S,
) -> MovePlan:  # fmt: skip
    """How ``current`` becomes ``wanted``. Sequences keep as much KV as both placements have room for.

    Raises ``ValueError`` when one of the two does not fit its cards by itself.
    """
    kv_tokens = min(current.workload.kv_tokens, wanted.workload.kv_tokens)
    before = holdings(current, shape, table, kv_tokens, kv_element)
    after = holdings(wanted, shape, table, kv_tokens, kv_element)
    ledger = _Ledger((current, wanted))
    for holding in before.values():
        ledger.add(holding)
    ledger.check("the current placement")
    ground = _Ground(pools, store_gb_per_s)
    pending = {piece: after[piece] for piece, holding in before.items() if _moves(holding, after[piece])}
    stays = len(before) - len(pending)
    parked: set[Piece] = set()
    moves: list[Move] = []
    while pending:
        ready = [piece for piece, holding in pending.items() if ledger.has_room(holding)]
        if ready:
            piece = _next(ready, before, after, parked, moves, ledger)
            holding = pending.pop(piece)
            ledger.add(holding)
            if piece in parked:
                moves.append(ground.fetch(piece, before[piece], holding))
            else:
                ledger.drop(before[piece])
                moves.append(ground.move(piece, before[piece], holding))
            continue
        fullest = max(
            (each for each in pending if each not in parked), key=lambda each: ledger.fullness(before[each].gpus),
            default=None,
        )  # fmt: skip
        if fullest is None:
            raise ValueError("the wanted placement does not fit its cards")
        parked.add(fullest)
        ledger.drop(before[fullest])
        moves.append(ground.park(fullest, before[fullest]))
    return MovePlan(
        moves=tuple(moves),
        stays=stays,
        sent_bytes=sum(move.sent_bytes for move in moves),
        store_bytes=sum(move.store_bytes for move in moves),
        ms=sum(move.ms for move in moves),
        peak_bytes=dict(ledger.peak),
        limit_bytes=dict(ledger.limit),
    )


def _next(
    ready: Sequence[Piece], before: Mapping[Piece, Holding], after: Mapping[Piece, Holding], parked: set[Piece],
    moves: Sequence[Move], ledger: "_Ledger",
) -> Piece:  # fmt: skip
    """The piece that goes the way of the last one, so that a plan reads as few runs; else the one whose leaving helps
    the fullest card most; a parked one last, it is in nobody's way."""
    if moves:
        last = moves[-1]
        for piece in ready:
            if piece not in parked and (last.source, last.target) == (before[piece].gpus, after[piece].gpus):
                return piece
    return max(ready, key=lambda each: 0.0 if each in parked else 1.0 + ledger.fullness(before[each].gpus))


def _moves(old: Holding, new: Holding) -> bool:
    return old.gpus != new.gpus or old.precision != new.precision


class _Ledger:
    """What each card holds now, and may hold: its engine's own memory counts all the time."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.limit: dict[str, int] = {}
        self.held: dict[str, int] = {}
        for placement in placements:
            for stage in placement.stages:
                own = stage.memory.activations + stage.memory.runtime
                for gpu in stage.gpus:
                    self.limit[gpu] = stage.memory.limit
                    self.held[gpu] = max(own, self.held.get(gpu, 0))
        self.peak = dict(self.held)

    def add(self, holding: Holding) -> None:
        for gpu in holding.gpus:
            self.held[gpu] += holding.each_bytes
            self.peak[gpu] = max(self.peak[gpu], self.held[gpu])

    def drop(self, holding: Holding) -> None:
        for gpu in holding.gpus:
            self.held[gpu] -= holding.each_bytes

    def has_room(self, holding: Holding) -> bool:
        return all(self.held[gpu] + holding.each_bytes <= self.limit[gpu] for gpu in holding.gpus)

    def fullness(self, gpus: Sequence[str]) -> float:
        return max(self.held[gpu] / self.limit[gpu] for gpu in gpus)

    def check(self, whose: str) -> None:
        for gpu, held in self.held.items():
            if held > self.limit[gpu]:
                raise ValueError(f"{whose} needs {held / 1e9:.1f} GB of {gpu}, which has {self.limit[gpu] / 1e9:.1f}")


class _Ground:
    """The machines as moves see them: which pool a card belongs to, and what its links take."""

    def __init__(self, pools: Sequence[Pool], store_gb_per_s: float) -> None:
        self._pools: Mapping[str, Pool] = {
            f"{pool.node.name}:{ordinal}": pool
            for pool in pools
            for ordinal in range(pool.first, pool.first + pool.gpus)
        }
        self._store_per_ms = store_gb_per_s * 1e6

    def move(self, piece: Piece, old: Holding, new: Holding) -> Move:
        """From card to card, or from the store where the precision changes."""
        keeps = old.precision == new.precision
        sent = old.kv_bytes + (old.weight_bytes if keeps else 0)
        stored = 0 if keeps else new.weight_bytes
        link = self._hop(old.gpus, new.gpus)
        ms = (link.ms(sent) if sent else 0.0) + stored / self._store_per_ms
        return Move(
            kind="copy" if keeps else "load", piece=piece, source=old.gpus, target=new.gpus, precision=new.precision,
            path=link.path, sent_bytes=sent, store_bytes=stored, ms=ms,
        )  # fmt: skip

    def park(self, piece: Piece, old: Holding) -> Move:
        """Into the memory of its host."""
        size = old.weight_bytes + old.kv_bytes
        ms = size / (self._host_gb_per_s(old.gpus) * 1e6)
        return Move(
            kind="park", piece=piece, source=old.gpus, target=(), precision=old.precision, path="HOST",
            sent_bytes=size, store_bytes=0, ms=ms,
        )  # fmt: skip

    def fetch(self, piece: Piece, old: Holding, new: Holding) -> Move:
        """From where it was parked."""
        keeps = old.precision == new.precision
        sent = old.kv_bytes + (old.weight_bytes if keeps else 0)
        stored = 0 if keeps else new.weight_bytes
        same_node = self._pools[old.gpus[0]].node == self._pools[new.gpus[0]].node
        if same_node:
            path, ms = "HOST", sent / (self._host_gb_per_s(new.gpus) * 1e6)
        else:
            link = self._hop(old.gpus, new.gpus)
            path, ms = link.path, link.ms(sent)
        return Move(
            kind="fetch", piece=piece, source=(), target=new.gpus, precision=new.precision, path=path,
            sent_bytes=sent, store_bytes=stored, ms=ms + stored / self._store_per_ms,
        )  # fmt: skip

    def _hop(self, source: Sequence[str], target: Sequence[str]) -> Hop:
        return hop(self._pools[source[0]].place(len(source)), self._pools[target[0]].place(len(target)))

    def _host_gb_per_s(self, gpus: Sequence[str]) -> float:
        return self._pools[gpus[0]].hardware.host_link.gb_per_s * len(gpus)
