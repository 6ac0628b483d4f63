"""Who runs in the next iteration of a simulated engine, and who must make room.

Every sequence in the decode batch takes part. What is left of the token budget goes to prefill, first come first
served: first the prompts that are partly computed, then waiting ones, which are admitted when all blocks of their
prompt fit; the first that does not fit holds up those behind it, so that long prompts are not starved. When a decoding
sequence needs a block and none can be had, the youngest admitted one loses its blocks and will be computed again
(much of it from the cache, if it is still there); it waits at the head of the queue.

Jobs whose KV came by transfer queue apart, and first: they hold blocks already, and behind a prompt that waits for just
these they would wait for ever.
"""

from collections import deque

from quartet_sim.iteration import Backlog, Chunk, Iteration
from quartet_sim.pool import KvPool
from quartet_sim.sequence import EngineSequence, Place


class Schedule:
    """The queues and the batch of one engine. Changed only between iterations, but for jobs that come or are cancelled.

    ``context_tokens`` is the sum over the decode batch of what each next step reads; ``decode_ms`` the time that one
    sequence would have been charged if it had decoded in every iteration so far, from which each one's share follows
    without touching it in every iteration.
    """

    def __init__(self, pool: KvPool, backlog: Backlog, max_batch: int) -> None:
        self.waiting: deque[EngineSequence] = deque()
        self.ready: deque[EngineSequence] = deque()
        self.lending: list[EngineSequence] = []
        self.prefilling: list[EngineSequence] = []
        self.decoding: list[EngineSequence] = []
        self.joined: list[EngineSequence] = []
        self.context_tokens = 0
        self.decode_ms = 0.0
        self._short: list[EngineSequence] = []
        self._pool = pool
        self._backlog = backlog
        self._max_batch = max_batch

    def enqueue(self, sequence: EngineSequence) -> None:
        """A new job to be computed: it waits behind the others. What the cache holds of it now is not backlog."""
        self.waiting.append(sequence)
        self._expect(sequence)

    def enqueue_ready(self, sequence: EngineSequence) -> None:
        """A new job whose prompt's blocks came by transfer and are its own already."""
        sequence.place = Place.READY
        self.ready.append(sequence)

    def lend(self, sequence: EngineSequence) -> bool:
        """Take a new job that is wholly cached out of the cache, for the end of the next iteration; False if it is not.

        It waits for nobody: a prefix is lent just because this engine has no time to compute for it.
        """
        blocks = self._pool.blocks
        count = len(sequence.keys)
        if count * self._pool.block_tokens != sequence.prompt_tokens:
            return False
        if blocks.match(sequence.keys, count) < count:
            return False
        taken = blocks.take(sequence.keys, count, count)
        assert taken is not None  # all of it is there
        sequence.blocks = taken
        sequence.filled = count
        sequence.computed = sequence.cached_tokens = sequence.prompt_tokens
        sequence.place = Place.LENT
        self.lending.append(sequence)
        return True

    def plan(self, budget_tokens: int, now_ms: float) -> tuple[Iteration | None, list[EngineSequence]]:
        """The next iteration (None when nothing can run), and who lost their blocks for it.

        ``joined`` is then who came from the ready queue into this iteration.
        """
        preempted = self._make_room() if self._short else []
        self.joined = []
        while self.ready and self._places():
            sequence = self.ready.popleft()
            sequence.start(now_ms)
            self.joined.append(sequence)
            self.enter_batch(sequence)
        batch = len(self.decoding)
        chunks = self._chunks(budget_tokens - batch, now_ms)
        return (Iteration(chunks, batch) if batch or chunks or self.lending else None), preempted

    def enter_batch(self, sequence: EngineSequence) -> None:
        """The prompt has its KV: from the next iteration on the sequence decodes."""
        sequence.place = Place.DECODE
        sequence.decode_mark_ms = self.decode_ms
        self.context_tokens += sequence.context()
        self.decoding.append(sequence)
        if sequence.generated:
            self.need_block(sequence)
        sequence.set_checkpoint(self._pool.block_tokens)

    def need_block(self, sequence: EngineSequence) -> None:
        """Remember that the sequence's next step needs a block, if it does."""
        if sequence.computed == len(sequence.blocks) * self._pool.block_tokens:
            self._short.append(sequence)

    def leave_batch(self, sequence: EngineSequence) -> None:
        """Charge a decoding sequence for its steps. The caller takes it out of ``decoding``."""
        sequence.gpu_ms = self.gpu_ms(sequence)
        self.context_tokens -= sequence.context()
        sequence.place = Place.GONE

    def gpu_ms(self, sequence: EngineSequence) -> float:
        """The sequence's share of the time of all ended iterations."""
        if sequence.place is Place.DECODE:
            return sequence.gpu_ms + self.decode_ms - sequence.decode_mark_ms
        return sequence.gpu_ms

    def free(self, sequence: EngineSequence) -> None:
        """Let go of everything that a sequence holds, once it is in no queue and no batch."""
        self._backlog.put(sequence, 0, 0)
        if sequence.job.kind == "prefill":
            self._pool.stop_growing(sequence.job.transfer)
        self._pool.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.place = Place.GONE

    def drop(self, sequence: EngineSequence) -> None:
        """End a sequence that no running iteration computes, wherever it is."""
        if sequence.place is Place.WAITING:
            self.waiting.remove(sequence)
        elif sequence.place is Place.READY:
            self.ready.remove(sequence)
        elif sequence.place is Place.LENT:
            self.lending.remove(sequence)
        elif sequence.place is Place.PREFILL:
            self.prefilling.remove(sequence)
        elif sequence.place is Place.DECODE:
            self.leave_batch(sequence)
            self.decoding.remove(sequence)
        self.free(sequence)

    def _places(self) -> int:
        return self._max_batch - len(self.decoding) - len(self.prefilling)

    def _expect(self, sequence: EngineSequence) -> None:
        block_tokens = self._pool.block_tokens
        hits = self._pool.blocks.match(sequence.keys, sequence.hit_limit(block_tokens))
        self._backlog.put(sequence, hits * block_tokens, sequence.goal - hits * block_tokens)

    def _chunks(self, budget_tokens: int, now_ms: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget_tokens <= 0:
                return chunks
            tokens = min(sequence.goal - sequence.computed, budget_tokens)
            budget_tokens -= tokens
            chunks.append(Chunk(sequence, tokens))
        while budget_tokens > 0 and self.waiting and self._places() and self._admit(self.waiting[0], now_ms):
            sequence = self.waiting.popleft()
            self.prefilling.append(sequence)
            tokens = min(sequence.goal - sequence.computed, budget_tokens)
            budget_tokens -= tokens
            chunks.append(Chunk(sequence, tokens))
        return chunks

    def _admit(self, sequence: EngineSequence, now_ms: float) -> bool:
        pool = self._pool
        hits = pool.blocks.match(sequence.keys, sequence.hit_limit(pool.block_tokens))
        blocks = pool.blocks.take(sequence.keys, hits, pool.blocks_for(sequence.goal))
        if blocks is None:
            return False
        if sequence.cached_tokens < 0:
            sequence.start(now_ms)
        sequence.admit(blocks, hits, pool.block_tokens)
        self._backlog.put(sequence, sequence.computed, sequence.goal - sequence.computed)
        return True

    def _make_room(self) -> list[EngineSequence]:
        """A block for each sequence that needs one, the oldest first."""
        preempted: list[EngineSequence] = []
        for sequence in sorted(self._short, key=_order):
            while sequence.place is Place.DECODE:
                blocks = self._pool.blocks.allocate(1)
                if blocks is not None:
                    sequence.blocks += blocks
                    break
                victim = max((*self.decoding, *self.prefilling), key=_order)
                self._preempt(victim)
                preempted.append(victim)
        self._short = []
        return preempted

    def _preempt(self, victim: EngineSequence) -> None:
        if victim.place is Place.DECODE:
            self.leave_batch(victim)
            self.decoding.remove(victim)
        else:
            self.prefilling.remove(victim)
            if victim.job.kind == "prefill":
                self._pool.grow(victim.job.transfer, victim.prompt_tokens, [], 0)
        self._pool.blocks.release(victim.blocks)
        victim.start_over(self._pool.block_tokens)
        self.waiting.appendleft(victim)
        self._expect(victim)


def _order(sequence: EngineSequence) -> int:
    return sequence.order
