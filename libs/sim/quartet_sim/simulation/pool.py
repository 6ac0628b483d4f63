"""KV blocks as counts, and the prefix cache by whole units: what ``quartet_core.block_cache`` does block by block.

A unit is what a trace gives an id to: 512 tokens of Mooncake, 64 of a session. Blocks of prompts that a trace knows
nothing of, and of answers, are *own* blocks: nobody else can use them, so a count will do. When their job leaves they
stay in the cache as one entry, in their place among the least recently used, because they cost others room there.

Only where a chunk ends inside a unit does it differ from blocks of their own: a part of a unit is never cached.
"""

from collections import OrderedDict

from quartet_sim.simulation.work import Work


class UnitPool:
    """``total`` blocks of ``block_tokens``. ``free`` hold nothing; ``idle`` are cached and held by nobody.

    Invariant: free + idle + held = total, where held counts every cached unit with references once, and own blocks.
    ``turned_on`` and ``turned_off`` collect (unit, its place in the prompt, unit tokens) for whoever drains them.
    """

    __slots__ = ("_cached", "_idle", "block_tokens", "free", "idle", "total", "turned_off", "turned_on")

    def __init__(self, total: int, block_tokens: int = 16) -> None:
        if total < 1:
            raise ValueError("a KV pool needs at least one block")
        self.total = total
        self.block_tokens = block_tokens
        self.free = total
        self.idle = 0
        self._cached: dict[int, list[int]] = {}  # unit → [references, blocks, place, unit tokens]
        # Units by their id, own blocks of a job by −1 − its key; values are blocks. Oldest first.
        self._idle: OrderedDict[int, int] = OrderedDict()
        self.turned_on: list[tuple[int, int, int]] = []
        self.turned_off: list[tuple[int, int, int]] = []

    @property
    def available(self) -> int:
        """Blocks that can be had without taking one from anybody."""
        return self.free + self.idle

    @property
    def referenced(self) -> int:
        """Blocks of cached units that somebody holds."""
        return sum(blocks for references, blocks, _, _ in self._cached.values() if references)

    def match(self, work: Work, limit_tokens: int) -> int:
        """How many leading units are cached, of those that end within ``limit_tokens``."""
        cached = self._cached
        most = limit_tokens // work.unit_tokens
        found = 0
        for unit in work.units[:most]:
            if unit not in cached:
                break
            found += 1
        return found

    def kept(self, work: Work, matched: int) -> int:
        """How many own blocks of a preempted job are still there behind ``matched`` units."""
        if not work.kept or matched != work.kept_behind:
            return 0
        return self._idle.get(-1 - work.key, 0)

    def take(self, work: Work, matched: int, blocks: int) -> bool:
        """Hold the first ``matched`` units, what was kept behind them, and so many other blocks that it is ``blocks``
        in all. False, and nothing changed, when they do not fit."""
        unit_blocks = work.unit_tokens // self.block_tokens
        cached = self._cached
        kept = self.kept(work, matched)
        from_idle = kept
        for unit in work.units[:matched]:
            if not cached[unit][0]:
                from_idle += unit_blocks
        needed = blocks - matched * unit_blocks - kept
        if needed > self.free + self.idle - from_idle:
            return False
        self._hold(work.units[:matched])
        if kept:
            del self._idle[-1 - work.key]
            self.idle -= kept
        work.kept = 0
        work.shared = matched
        self.own(needed)
        return True

    def own(self, blocks: int) -> None:
        """Take ``blocks`` (at most ``available``), evicting the least recently used where free ones do not do."""
        self.free -= blocks
        while self.free < 0:
            self._evict()

    def keep(self, work: Work, through: int) -> None:
        """All units up to number ``through`` of ``work`` are computed: they can be found from now on."""
        cached = self._cached
        unit_blocks = work.unit_tokens // self.block_tokens
        for place in range(work.shared, through):
            unit = work.units[place]
            entry = cached.get(unit)
            if entry is None:
                cached[unit] = [1, unit_blocks, place, work.unit_tokens]
                self.turned_on.append((unit, place, work.unit_tokens))
                continue
            # Somebody else computed it, too: one copy is enough.
            if not entry[0]:
                del self._idle[unit]
                self.idle -= unit_blocks
            entry[0] += 1
            self.free += unit_blocks
        work.shared = max(work.shared, through)

    def release(self, work: Work, blocks: int, full: int) -> int:
        """Let go of all that ``work`` holds: ``blocks`` in all, of which ``full`` are full and stay to be found.

        Returns how many own blocks stay.
        """
        unit_blocks = work.unit_tokens // self.block_tokens
        shared_blocks = work.shared * unit_blocks
        own = blocks - shared_blocks
        stays = max(0, min(own, full - shared_blocks))
        self.free += own - stays
        if stays:
            self._idle[-1 - work.key] = stays
            self.idle += stays
        self._drop(work.units[: work.shared], unit_blocks)
        work.shared = 0
        return stays

    def pin(self, work: Work, matched: int) -> None:
        """Hold the first ``matched`` units, which are cached, for a transfer."""
        self._hold(work.units[:matched])
        work.shared = matched

    def adopt(self, work: Work, units: int, blocks: int) -> None:
        """A transfer brought the first ``units`` units into ``blocks`` own blocks: cache them, most recently used."""
        self.keep(work, units)
        self.release(work, blocks, 0)

    def clear(self) -> None:
        """Forget everything: the engine died."""
        self._cached.clear()
        self._idle.clear()
        self.free, self.idle = self.total, 0
        self.turned_on.clear()
        self.turned_off.clear()

    def _hold(self, units: tuple[int, ...]) -> None:
        cached = self._cached
        for unit in units:
            entry = cached[unit]
            if not entry[0]:
                self.idle -= self._idle.pop(unit)
            entry[0] += 1

    def _drop(self, units: tuple[int, ...], unit_blocks: int) -> None:
        cached = self._cached
        for unit in reversed(units):  # the deepest first, so that no unit is evicted before those behind it
            entry = cached[unit]
            entry[0] -= 1
            if not entry[0]:
                self._idle[unit] = unit_blocks
                self.idle += unit_blocks

    def _evict(self) -> None:
        key, blocks = next(iter(self._idle.items()))
        if key < 0 and blocks > -self.free:
            taken = -self.free  # the deepest own blocks first; the rest keeps its place
            self._idle[key] = blocks - taken
            self.idle -= taken
            self.free = 0
            return
        del self._idle[key]
        self.idle -= blocks
        self.free += blocks
        if key >= 0:
            _, _, place, unit_tokens = self._cached.pop(key)
            self.turned_off.append((key, place, unit_tokens))
