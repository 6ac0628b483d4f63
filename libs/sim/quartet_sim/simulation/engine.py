"""An engine that skips ahead: the rules of ``quartet_sim.engine``, a stretch of equal iterations at a time.

An iteration with prefill chunks in it is one event, as there. While sequences only decode, nothing can happen but that
one ends, a block is missing, or a job comes; so all steps until then are one event, whose time is a closed form
(``pace``). A job that comes meanwhile ends the stretch with the iteration under way. A stretch also ends where the free
share of memory reaches another level of the state word, so that whoever reads the word after each event misses none.

Tokens have no text here and blocks no content. Otherwise the two engines are the same: same jobs, same times
(``tests/unit/sim/test_skipping_engine.py``).
"""

import math
from collections import deque

from quartet_core.profile import Profile
from quartet_core.word import free_kv_fraction, free_kv_level
from quartet_sim.iteration import Backlog
from quartet_sim.simulation.batch import DecodeBatch
from quartet_sim.simulation.pace import Pace
from quartet_sim.simulation.pool import UnitPool
from quartet_sim.simulation.work import COMPUTED, FINISHED, FIRST, LENT, PREEMPTED, PREFILLED, EngineEvent, Stage, Work

IDLE = math.inf


class SkippingEngine:
    """One engine replica. ``next_ms`` is when it wants ``advance`` called, ``IDLE`` when it has nothing to do.

    ``next_ms`` may change at every ``submit``, ``cancel``, ``release`` and ``join``: drivers look at it after each
    call. ``iterations``, ``busy_ms`` and ``prefill_busy_ms`` count what has ended.
    """

    def __init__(
        self, profile: Profile, *, kv_tokens: int, block_tokens: int = 16, chunk_tokens: int = 2048,
        max_batch: int = 256, time_scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.profile = profile
        self.pool = UnitPool(kv_tokens // block_tokens, block_tokens)
        self.time_scale = time_scale
        self.next_ms = IDLE
        self.iterations = 0
        self.busy_ms = 0.0
        self.prefill_busy_ms = 0.0
        self.preemptions = 0
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._backlog = Backlog(profile, chunk_tokens)
        self._orders = 0
        self._waiting: deque[Work] = deque()
        self._ready: deque[Work] = deque()
        self._lending: list[Work] = []
        self._prefilling: list[Work] = []
        self._decoding = DecodeBatch(block_tokens)
        # The stretch under way: ``steps`` iterations from ``start_ms`` on, the last one's end at ``next_ms``.
        self._steps = 0
        self._start_ms = 0.0
        self._batch = 0
        self._taken = False  # whether the blocks of all its steps were taken already
        self._pace: Pace | None = None
        self._chunks: list[tuple[Work, int]] = []
        self._prefill_ms = 0.0
        self._joined: list[Work] = []
        self._cancelled: list[Work] = []
        self._events: list[EngineEvent] = []
        self._told_busy_ms = 0.0
        self._told_prefill_ms = 0.0

    # Load

    @property
    def running(self) -> int:
        """Sequences in the decode batch."""
        return len(self._decoding)

    @property
    def waiting(self) -> int:
        """Jobs that were not admitted yet, or not again."""
        return len(self._waiting) + len(self._ready)

    @property
    def empty(self) -> bool:
        """Whether no job is here, but for what is pinned."""
        return not (self._waiting or self._ready or self._prefilling or len(self._decoding) or self._lending)

    @property
    def free_kv_fraction(self) -> float:
        """The share of blocks that are free or can be evicted at once."""
        return self.pool.available / self.pool.total

    def queued_prefill_ms(self) -> float:
        """The time that prompts not wholly computed take by the profile."""
        return self._backlog.ms()

    def busy_until(self, now_ms: float) -> tuple[float, float]:
        """(busy ms, those of them spent on prefill) since the last call, with the stretch under way up to
        ``now_ms``."""
        passed_ms = max(0.0, min(now_ms, self.next_ms) - self._start_ms) if self._steps else 0.0
        whole_ms = self.next_ms - self._start_ms if self._steps else 1.0
        busy_ms = self.busy_ms + passed_ms
        prefill_ms = self.prefill_busy_ms + self._prefill_ms * passed_ms / whole_ms
        found = busy_ms - self._told_busy_ms, prefill_ms - self._told_prefill_ms
        self._told_busy_ms, self._told_prefill_ms = busy_ms, prefill_ms
        return found

    # Work

    def submit(self, work: Work, now_ms: float) -> None:
        """Queue a job behind all others. A ``lend`` job's units are pinned now, as far as they are cached."""
        work.order = self._orders
        self._orders += 1
        if work.kind == "lend":
            self._catch_up(now_ms)
            self.pool.pin(work, self.pool.match(work, work.prompt_tokens))
            self._lending.append(work)
        elif work.kind == "decode":
            work.stage = Stage.READY
            self._ready.append(work)
        else:
            work.stage = Stage.WAITING
            self._waiting.append(work)
            self._expect(work)
            if len(self._waiting) > 1 and self._steps:
                return  # it waits behind one that found no place in the iteration under way
        self._wake(now_ms)

    def reserve(self, work: Work, tokens: int, now_ms: float) -> bool:
        """Blocks for ``tokens`` tokens that a transfer will bring for ``work``; False when there are not as many."""
        self._catch_up(now_ms)
        blocks = -(-tokens // self._block_tokens)
        if blocks > self.pool.available:
            return False
        self.pool.own(blocks)
        work.goal = tokens
        return True

    def unreserve(self, work: Work, now_ms: float) -> None:
        """Give the blocks of ``reserve`` back."""
        self.pool.free += -(-work.goal // self._block_tokens)
        self._wake(now_ms)

    def adopt(self, work: Work, units: int) -> None:
        """A transfer brought ``units`` units into the blocks of ``reserve``: they are cached, and nobody's."""
        self.pool.adopt(work, units, -(-work.goal // self._block_tokens))

    def release(self, work: Work, now_ms: float) -> None:
        """Unpin what a ``prefill`` or ``lend`` job left pinned."""
        if work.kind == "lend":
            self.pool.release(work, work.shared * (work.unit_tokens // self._block_tokens), 0)
        else:
            self.pool.release(work, self._blocks(work.goal), work.computed // self._block_tokens)
        self._wake(now_ms)

    def cancel(self, work: Work, now_ms: float) -> None:
        """End a job without further events, with the iteration under way if that computes it."""
        if work in self._lending:
            self._lending.remove(work)
            self.release(work, now_ms)
            return
        in_flight = work.stage is Stage.DECODE or any(chunk[0] is work for chunk in self._chunks)
        if in_flight and self._steps:
            self._cancelled.append(work)
            self._cut(now_ms)
        else:
            self._drop(work)
            self._wake(now_ms)

    def advance(self) -> list[EngineEvent]:
        """The stretch under way ends at ``next_ms``: say what came of it, and begin the next."""
        now_ms = self.next_ms
        self._settle(now_ms)
        events, self._events = self._events, []
        self._begin(now_ms)
        return events

    def _wake(self, now_ms: float) -> None:
        if self.next_ms == IDLE:
            self._begin(now_ms)
        else:
            self._cut(now_ms)

    def _cut(self, now_ms: float) -> None:
        """Let the stretch end with the iteration that is under way at ``now_ms``."""
        if self._steps > 1 and self._pace is not None:
            steps = self._pace.steps(now_ms - self._start_ms)
            if steps < self._steps:
                self._steps = steps
                self.next_ms = self._start_ms + self._pace.ms(steps)

    def _catch_up(self, now_ms: float) -> None:
        """Take the blocks of the steps made and under way now, before somebody else takes any: a stretch was planned
        with what was available when it began."""
        self._cut(now_ms)
        if self._steps > 1 and not self._taken:
            self.pool.own(self._decoding.blocks_for(self._steps))
            self._taken = True

    # Planning

    def _begin(self, now_ms: float) -> None:
        """Plan the next stretch; go idle when nothing can run."""
        if len(self._decoding):
            self._make_room()
        self._joined = []
        while self._ready and self._places():
            work = self._ready.popleft()
            self._joined.append(work)
            self._decoding.enter(work)
        batch = len(self._decoding)
        self._chunks = self._plan_chunks(batch)
        self._batch = batch
        self._start_ms = now_ms
        self._taken = False
        self._pace = None
        self._prefill_ms = 0.0
        if self._chunks:
            self._steps = 1
            self.next_ms = now_ms + self._price(batch)
        elif batch:
            most = 1 if self._joined or self._lending or self._events else self._most_steps()
            self._pace = Pace(self.profile, batch, self._decoding.context_tokens, self.time_scale, most)
            self._steps = most
            self.next_ms = now_ms + self._pace.ms(most)
        else:
            self._steps = 0
            self.next_ms = now_ms if self._lending or self._events else IDLE

    def _plan_chunks(self, batch: int) -> list[tuple[Work, int]]:
        budget = self._chunk_tokens - batch
        chunks: list[tuple[Work, int]] = []
        for work in self._prefilling:
            if budget <= 0:
                return chunks
            tokens = min(work.goal - work.computed, budget)
            budget -= tokens
            chunks.append((work, tokens))
        while budget > 0 and self._waiting and self._places() and self._admit(self._waiting[0]):
            work = self._waiting.popleft()
            self._prefilling.append(work)
            tokens = min(work.goal - work.computed, budget)
            budget -= tokens
            chunks.append((work, tokens))
        return chunks

    def _price(self, batch: int) -> float:
        """The time of an iteration with chunks: see ``quartet_sim.iteration.price``."""
        tokens = attention = 0
        for work, new in self._chunks:
            tokens += new
            attention += new * (new + 2 * work.computed)
        cached = round((attention / tokens - tokens) / 2)
        profile = self.profile
        context = self._decoding.context_tokens / batch if batch else 0.0
        duration = profile.iteration_ms(tokens, cached, batch, context) * self.time_scale
        self._prefill_ms = duration
        if batch:
            alone = profile.iteration_ms(tokens, cached, 0, 0)
            self._prefill_ms *= alone / (alone + profile.step_ms_at(batch, context))
        return duration

    def _most_steps(self) -> int:
        """How many decode steps may pass before anything must be looked at."""
        decoding = self._decoding
        pool = self.pool
        within_memory = decoding.steps_within(pool.available)
        lowest = math.ceil(free_kv_fraction(free_kv_level(pool.available / pool.total)) * pool.total)
        within_level = decoding.steps_within(pool.available - lowest) + 1 if lowest else within_memory
        return max(1, min(decoding.steps_to_end, within_memory, within_level))

    def _admit(self, work: Work) -> bool:
        block_tokens = self._block_tokens
        limit_tokens = (work.goal - 1) // block_tokens * block_tokens  # one token is always left to compute
        pool = self.pool
        matched = pool.match(work, limit_tokens)
        kept = pool.kept(work, matched)
        if not pool.take(work, matched, self._blocks(work.goal)):
            return False
        work.computed = matched * work.unit_tokens + kept * block_tokens
        work.stage = Stage.PREFILL
        if work.cached_tokens < 0:
            work.cached_tokens = work.computed
        self._backlog.put(work, work.computed, work.goal - work.computed)
        return True

    def _expect(self, work: Work) -> None:
        block_tokens = self._block_tokens
        matched = self.pool.match(work, (work.goal - 1) // block_tokens * block_tokens)
        hit = matched * work.unit_tokens + self.pool.kept(work, matched) * block_tokens
        self._backlog.put(work, hit, work.goal - hit)

    def _make_room(self) -> None:
        """A block for each sequence that needs one for this step, the oldest first."""
        needed = self._decoding.short
        if needed <= self.pool.available:
            if needed:
                self.pool.own(needed)
            return
        for work in sorted(self._decoding.short_works(), key=_order):
            while work.stage is Stage.DECODE:
                if self.pool.available:
                    self.pool.own(1)
                    break
                self._preempt(max((*self._decoding.works, *self._prefilling), key=_order))

    def _preempt(self, victim: Work) -> None:
        if victim.stage is Stage.DECODE:
            self._decoding.leave(victim)
            computed = victim.computed
            blocks = self._blocks(computed)
        else:
            self._prefilling.remove(victim)
            computed = victim.computed
            blocks = self._blocks(victim.goal)
        shared = victim.shared
        victim.kept = self.pool.release(victim, blocks, computed // self._block_tokens)
        victim.kept_behind = shared
        victim.goal = victim.prompt_tokens + victim.generated
        victim.computed = 0
        victim.stage = Stage.WAITING
        self._waiting.appendleft(victim)
        self._expect(victim)
        self.preemptions += 1
        self._events.append((PREEMPTED, victim))

    # What came of it

    def _settle(self, now_ms: float) -> None:
        steps = self._steps
        lent, self._lending = self._lending, []
        self._events += [(LENT, work) for work in lent]
        if not steps:
            return
        duration = now_ms - self._start_ms
        self.iterations += steps
        self.busy_ms += duration
        self.prefill_busy_ms += self._prefill_ms
        self._steps = 0
        if self._batch:
            if steps > 1 and not self._taken:
                self.pool.own(self._decoding.blocks_for(steps))
            self._decoding.make(steps)
            if self._cancelled:
                self._end_cancelled()
            self._events += [(FIRST, work) for work in self._joined if work.stage is Stage.DECODE]
            for work in self._decoding.complete():
                self._end(work, self._blocks(work.computed), FINISHED)
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            for work, tokens in chunks:
                self._end_chunk(work, tokens)
        self._cancelled.clear()

    def _end_cancelled(self) -> None:
        for work in self._cancelled:
            if work.stage is Stage.DECODE:
                self._drop(work)

    def _end_chunk(self, work: Work, tokens: int) -> None:
        work.computed += tokens
        self.pool.keep(work, min(len(work.units), work.computed // work.unit_tokens))
        if self._cancelled and work in self._cancelled:
            self._drop(work)
            return
        remaining = work.goal - work.computed
        self._backlog.put(work, work.computed, remaining)
        if remaining:
            if work.kind == "prefill":
                self._events.append((COMPUTED, work))
            return
        self._prefilling.remove(work)
        if work.kind == "prefill":
            work.stage = Stage.GONE
            self._events.append((PREFILLED, work))
            return
        if not work.generated:
            self._events.append((FIRST, work))
        work.generated += 1
        if work.generated >= work.output_tokens:
            self._end(work, self._blocks(work.goal), FINISHED)
        else:
            self._decoding.enter(work)

    def _end(self, work: Work, blocks: int, event: int) -> None:
        self._backlog.put(work, 0, 0)
        self.pool.release(work, blocks, work.computed // self._block_tokens)
        work.stage = Stage.GONE
        self._events.append((event, work))

    def _drop(self, work: Work) -> None:
        """End a job that no iteration computes, wherever it is."""
        stage = work.stage
        self._backlog.put(work, 0, 0)
        work.stage = Stage.GONE
        if stage is Stage.WAITING:
            self._waiting.remove(work)
        elif stage is Stage.READY:
            self._ready.remove(work)
            self.pool.free += self._blocks(work.prompt_tokens)
        elif stage is Stage.PREFILL:
            self._prefilling.remove(work)
            self.pool.release(work, self._blocks(work.goal), work.computed // self._block_tokens)
        elif stage is Stage.DECODE:
            self._decoding.leave(work)
            self.pool.release(work, self._blocks(work.computed), work.computed // self._block_tokens)

    def _places(self) -> int:
        return self._max_batch - len(self._decoding) - len(self._prefilling)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)


def _order(work: Work) -> int:
    return work.order
