"""What stands for a worker in a replay: a simple engine, its cache, and its agent's side of affinity.

It computes one prompt at a time, first come first served, in the time that its profile says, decode steps carried
along; a decode runs at the step time of the batch that it joined. Its KV is an LRU of the trace's blocks, of which
those in use stay.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import fleets
from affinity_index import Prompt, Workload

from quartet_agent.affinity import AffinityAuthor
from quartet_bus.messages import AffinityUpdate
from quartet_core.profile import Profile
from quartet_core.word import batch_level, free_kv_level, pack, queue_level


class PrefixCache:
    """An LRU of ``capacity`` blocks. Blocks in use stay; a prefix leaves from its end, so what is left is whole."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._uncached = 0  # blocks of answers, and of prompts that are being computed
        self.gained: list[int] = []
        self.lost: list[int] = []

    @property
    def free_fraction(self) -> float:
        """Free, or to be had by forgetting."""
        return 1.0 - (len(self._uses) - len(self._idle) + self._uncached) / self.capacity

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` blocks are cached."""
        uses = self._uses
        return bisect_left(blocks, True, 0, limit, key=lambda block: block not in uses)

    def take(self, blocks: Sequence[int], hits: int, more: int) -> bool:
        """Use the first ``hits`` blocks and room for ``more``; False, and nothing changed, when that does not fit."""
        uses, idle = self._uses, self._idle
        found = blocks[:hits]
        available = self.capacity - len(uses) + len(idle) - self._uncached
        if more > available - sum(block in idle for block in found):
            return False
        for block in found:
            if not uses[block]:
                del idle[block]
            uses[block] += 1
        self._uncached += more
        for _ in range(len(uses) + self._uncached - self.capacity):
            block, _unused = idle.popitem(last=False)
            del uses[block]
            self.lost.append(block)
        return True

    def keep(self, blocks: Sequence[int]) -> None:
        """Blocks were computed in room that was taken. One that is cached already gives its room back."""
        uses, idle = self._uses, self._idle
        for block in blocks:
            others = uses.get(block)
            if others is None:
                self.gained.append(block)
            elif not others:
                del idle[block]
            uses[block] = (others or 0) + 1
        self._uncached -= len(blocks)

    def leave(self, blocks: Sequence[int], answer_blocks: int) -> None:
        """A request no longer uses its blocks."""
        uses, idle = self._uses, self._idle
        for block in reversed(blocks):
            left = uses[block] = uses[block] - 1
            if not left:
                idle[block] = None
        self._uncached -= answer_blocks


@dataclass(slots=True)
class Run:
    """A request on its worker."""

    number: int
    prompt: Prompt
    arrived_ms: float
    guess_ms: float
    hits: int = 0
    answer_blocks: int = 0


class Server:
    """What stands for a worker: its engine, its cache, and its agent's side of affinity."""

    def __init__(self, slot: int, facts: Any, profile: Profile, workload: Workload, block_tokens: int) -> None:
        self.slot = slot
        self.id = facts.id
        self.incarnation = facts.incarnation
        self.hardware = facts.hardware
        self.beat = 0
        self.cache = PrefixCache(facts.kv_tokens // block_tokens)
        self.queue: deque[Run] = deque()
        self.computing: Run | None = None
        self.batch = 0
        self.context_tokens = 0
        self.updates: list[AffinityUpdate] = []
        self.author = AffinityAuthor(
            SimpleNamespace(id=facts.id, incarnation=facts.incarnation, adapter=self),
            fleets.AFFINITY_ROWS, fleets.AFFINITY_HASHES, lambda _, update: self.updates.append(update),
        )  # fmt: skip
        self._rungs_in = workload.rungs_in
        self._profile = profile
        self._chunk_tokens = facts.chunk_tokens
        self._until_ms = 0.0

    def submit(self, run: Run) -> None:
        """Queue a request."""
        prompt = run.prompt
        run.guess_ms = self._profile.prefill_ms(*self._parts(prompt, self._hits(prompt)))
        every = -(-(prompt.tokens + prompt.output_tokens) // prompt.block_tokens)
        # An answer that outgrows the memory ends there.
        run.answer_blocks = min(every, self.cache.capacity) - len(prompt.blocks)
        self.queue.append(run)

    def cached_tokens(self, prompt: Prompt) -> int:
        """How many tokens of a prompt need not be computed here."""
        return self._parts(prompt, self._hits(prompt))[0]

    def start(self, now_ms: float) -> float | None:
        """Begin the next prompt, if one waits and fits; return when its first token is there."""
        if self.computing is not None or not self.queue:
            return None
        run = self.queue[0]
        blocks = run.prompt.blocks
        run.hits = self._hits(run.prompt)
        if not self.cache.take(blocks, run.hits, len(blocks) - run.hits + run.answer_blocks):
            return None
        self.queue.popleft()
        self.computing = run
        cached, new = self._parts(run.prompt, run.hits)
        iterations = -(-new // self._chunk_tokens)
        carried_ms = self._step_ms() - self._profile.weight_read_ms if self.batch else 0.0
        self._until_ms = now_ms + self._profile.prefill_ms(cached, new) + iterations * carried_ms
        return self._until_ms

    def computed(self, now_ms: float) -> tuple[Run, float]:
        """The prompt is computed; return it, and when its answer will be complete."""
        run = self.computing
        assert run is not None
        self.computing = None
        self.cache.keep(run.prompt.blocks[run.hits :])
        self.batch += 1
        self.context_tokens += run.prompt.tokens
        return run, now_ms + run.prompt.output_tokens * self._step_ms()

    def ended(self, run: Run) -> None:
        """An answer is complete."""
        self.batch -= 1
        self.context_tokens -= run.prompt.tokens
        self.cache.leave(run.prompt.blocks, run.answer_blocks)

    def word(self, now_ms: float) -> int:
        """What its beats say."""
        waiting_ms = sum(run.guess_ms for run in self.queue)
        if self.computing is not None:
            waiting_ms += self._until_ms - now_ms
        self.beat += 1
        return pack(
            free_kv=free_kv_level(self.cache.free_fraction), queue=queue_level(waiting_ms),
            batch=batch_level(self.batch), drift=0, accepting=True,
        )  # fmt: skip

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """As an engine adapter does for its agent."""
        rungs_in = self._rungs_in
        cache = self.cache
        return (
            [rung for block in cache.gained for rung in rungs_in[block]],
            [rung for block in cache.lost for rung in rungs_in[block]],
        )

    def _hits(self, prompt: Prompt) -> int:
        # An engine computes at least one token, to have something to begin the answer with.
        limit = min(len(prompt.blocks), (prompt.tokens - 1) // prompt.block_tokens)
        return self.cache.match(prompt.blocks, limit)

    @staticmethod
    def _parts(prompt: Prompt, hits: int) -> tuple[int, int]:
        cached = hits * prompt.block_tokens
        return cached, prompt.tokens - cached

    def _step_ms(self) -> float:
        return self._profile.step_ms_at(self.batch, self.context_tokens / self.batch)
