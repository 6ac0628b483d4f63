"""The pool as its workers tell of it: how full each one's KV is, by tier, and how prefixes of each model are reused."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct, structs

from quartet_bus.messages import KvPressure, PoolState, Role
from quartet_core.reuse import ReuseGaps
from quartet_kv_coordinator.roster import Replica, Roster

FRESH_NS = 5_000_000_000
"""A worker that said nothing for so long (five calm intervals) is no destination, and nothing is paged out of it."""

HOST = "host"
"""The tier of stores; that of a worker is its hardware class."""

MAX_MODELS = 1024
"""Models whose reuse is learned; the one longest unheard of is forgotten first."""


@dataclass(slots=True)
class Told:
    """The last word of one worker."""

    replica: Replica
    state: PoolState
    heard_ns: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a block there."""
        return self.replica.info.layout.block_tokens

    @property
    def tier(self) -> str:
        """Where its KV lies."""
        return HOST if self.replica.info.role is Role.STORE else self.replica.info.hardware

    @property
    def referenced_blocks(self) -> int:
        """Blocks that are in use."""
        return self.state.total_blocks - self.state.empty_blocks - self.state.idle_blocks


class PoolView(Struct, frozen=True):
    """One worker's or store's part of the pool, in tokens, as an operator sees it."""

    worker: str
    node: str
    tier: str
    model: str
    total_tokens: int
    empty_tokens: int
    idle_tokens: int
    pressed: bool
    in_tokens: int
    out_tokens: int
    hit_tokens: int
    leaving: int
    coming: int
    age_ms: float


class Pools:
    """The last word of every worker that has pages, and the reuse of every model."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._told: dict[str, Told] = {}
        self._reuse: dict[str, ReuseGaps] = {}

    def __iter__(self) -> Iterator[Told]:
        return iter(self._told.values())

    def hear(self, pressure: KvPressure, now_ns: int) -> list[Told]:
        """Take a node's word; return what it says of workers that are known here."""
        heard = []
        for state in pressure.pools:
            replica = self._roster.find(state.worker)
            if replica is None or replica.info.incarnation != state.incarnation or not state.total_blocks:
                continue
            told = self._told[state.worker] = Told(replica, state, now_ns)
            heard.append(told)
            if state.returns or state.losses:
                self.reuse(replica.info.model).see(state.returns, state.losses, now_ns / 1e9)
        return heard

    def paged(self, source: str, target: str, tokens: int) -> None:
        """A page has gone from ``source`` to ``target`` ("": it was there already): until both say so, their last words
        are taken to say it, so that nothing is paged twice over for the same want of room."""
        for worker, sign in ((source, 1), (target, -1)):
            told = self._told.get(worker)
            if told is None:
                continue
            state, blocks = told.state, -(-tokens // told.block_tokens)
            emptied = min(blocks, state.idle_blocks) if sign > 0 else -min(blocks, state.empty_blocks)
            told.state = structs.replace(
                state, empty_blocks=state.empty_blocks + emptied, idle_blocks=state.idle_blocks - emptied
            )

    def find(self, worker: str, now_ns: int) -> Told | None:
        """The last word of ``worker``, while it is fresh and the worker lives."""
        told = self._told.get(worker)
        return told if told is not None and self._counts(told, now_ns) else None

    def others(self, model: str, but: str, now_ns: int) -> list[Told]:
        """Workers and stores of ``model`` that live and spoke lately, ``but`` left out."""
        return [
            told for told in self._told.values()
            if told.replica.info.model == model and told.replica.info.id != but and self._counts(told, now_ns)
        ]  # fmt: skip

    def reuse(self, model: str) -> ReuseGaps:
        """How long prefixes of ``model`` stay unused until they are used again."""
        known = self._reuse.pop(model, None) or ReuseGaps()
        self._reuse[model] = known
        while len(self._reuse) > MAX_MODELS:
            del self._reuse[next(iter(self._reuse))]
        return known

    def forget(self, now_ns: int) -> None:
        """Drop the words of workers that are gone."""
        for worker in [name for name, told in self._told.items() if now_ns - told.heard_ns > 12 * FRESH_NS]:
            del self._told[worker]

    def _counts(self, told: Told, now_ns: int) -> bool:
        replica = self._roster.find(told.replica.info.id)
        if replica is None or replica.dead or replica.info.incarnation != told.state.incarnation:
            return False
        told.replica = replica
        return now_ns - told.heard_ns <= FRESH_NS
