"""A simulated inference engine: continuous batching over paged KV, with time handed in.

An iteration decodes one token for every running sequence, and fills the rest of its token budget with prefill chunks,
first come first served. Its duration comes from the profile of the hardware. The driver asks ``begin`` for the next
iteration's duration, lets that much time pass, and calls ``finish`` for what came of it; everything the engine does,
it does at the end of an iteration. Same calls, same events: no clock, no randomness.

A driver calls ``begin`` after every ``finish``, and, while the engine is idle, after every ``submit``, ``cancel`` and
release of a transfer's blocks: idle may mean that the next job waits for room.
"""

from quartet_core.openai import invalid, too_long
from quartet_core.profile import Profile
from quartet_sim.iteration import Backlog, Iteration, price
from quartet_sim.job import (
    KV_MISMATCH,
    Computed,
    EngineEvent,
    Failed,
    Finished,
    FirstToken,
    Job,
    Kind,
    Preempted,
    Prefilled,
    Token,
)
from quartet_sim.outcome import Outcome
from quartet_sim.pool import Fenced, KvPool
from quartet_sim.schedule import Schedule
from quartet_sim.sequence import EngineSequence, Place

__all__ = [
    "KV_MISMATCH",
    "Computed",
    "EngineEvent",
    "Failed",
    "Fenced",
    "Finished",
    "FirstToken",
    "Job",
    "Kind",
    "Preempted",
    "Prefilled",
    "SimulatedEngine",
    "Token",
]


class SimulatedEngine:
    """One engine replica. ``kv_tokens`` is its KV capacity, rounded down to whole blocks of ``block_tokens``.

    ``time_scale`` multiplies every iteration (2 is half as fast); it may be changed at any time, which is how a card
    that throttles is played. ``pool`` is where transfers reserve, write, commit, export and release.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        kv_tokens: int,
        block_tokens: int = 16,
        chunk_tokens: int = 2048,
        max_batch: int = 256,
        max_context: int,
        time_scale: float = 1.0,
    ) -> None:
        if not 1 <= max_batch <= chunk_tokens:
            raise ValueError(
                "max_batch must be from 1 to chunk_tokens: every running sequence decodes in each iteration"
            )
        self.profile = profile
        self.pool = KvPool(kv_tokens // block_tokens, block_tokens)
        self.chunk_tokens = chunk_tokens
        self.max_batch = max_batch
        self.max_context = max_context
        self.time_scale = time_scale
        self.steps = 0
        self.busy_ms = 0.0
        self.prefill_busy_ms = 0.0
        self._block_tokens = block_tokens
        self._jobs: dict[str, EngineSequence] = {}
        self._backlog = Backlog(profile, chunk_tokens)
        self._schedule = Schedule(self.pool, self._backlog, max_batch)
        self._outcome = Outcome(self.pool, self._schedule, self._backlog, self._jobs)
        self._iteration: Iteration | None = None
        self._events: list[EngineEvent] = []
        self._orders = 0

    # Load ------------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the decode batch."""
        return len(self._schedule.decoding)

    @property
    def prefilling(self) -> int:
        """Sequences that were admitted and whose prompt is not wholly computed."""
        return len(self._schedule.prefilling)

    @property
    def waiting(self) -> int:
        """Jobs that are not in the batch: new ones, and those that were preempted."""
        return len(self._schedule.waiting) + len(self._schedule.ready)

    @property
    def busy(self) -> bool:
        """Whether an iteration is under way."""
        return self._iteration is not None

    @property
    def free_kv_fraction(self) -> float:
        """The share of blocks that are free or can be evicted at once."""
        blocks = self.pool.blocks
        return blocks.available / blocks.total

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens to be computed before they can decode, of jobs that wait or are partly computed."""
        return self._backlog.tokens

    def queued_prefill_ms(self) -> float:
        """The time that these take by the profile (``time_scale`` is not in it: that is drift)."""
        return self._backlog.ms()

    def gpu_ms(self, job_id: str) -> float:
        """A live job's share of the busy time so far; 0 for an unknown or ended one (end events carry it)."""
        sequence = self._jobs.get(job_id)
        return self._schedule.gpu_ms(sequence) if sequence is not None else 0.0

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """Rung hashes whose blocks became cached, and those evicted, since the last call. A rung may be in both."""
        blocks = self.pool.blocks
        on, off = blocks.rungs_on, blocks.rungs_off
        blocks.rungs_on, blocks.rungs_off = [], []
        return on, off

    # Work ------------------------------------------------------------------------------------------------------------

    def submit(self, job: Job, now_ms: float) -> None:
        """Queue a job behind all others.

        Raises ``Refused`` (400) for an empty prompt, or one that with its output can never fit context or pool;
        ``Fenced`` for a decode job without a committed lease of its prompt's size, and for a whole job whose transfer
        has no committed lease; ``ValueError`` for an id in use.
        """
        self.pool.blocks.now_ms = now_ms
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is here already")
        if job.max_tokens < 1:
            raise invalid("`max_tokens` must be an integer of at least 1.", "max_tokens")
        prompt_tokens = len(job.tokens)
        if not prompt_tokens:
            raise invalid("`prompt` must not be empty.", "prompt")
        needed = prompt_tokens if job.kind == "prefill" else prompt_tokens + job.max_tokens
        limit = min(self.max_context, self.pool.blocks.total * self._block_tokens)
        if needed > limit:
            raise too_long(needed, limit)
        sequence = EngineSequence(job, self._block_tokens, self._orders, now_ms)
        if job.kind == "decode":
            self._adopt(sequence)
            self._schedule.enqueue_ready(sequence)
        elif job.kind == "whole" or not self._schedule.lend(sequence):
            if job.kind == "whole" and job.transfer:
                self._adopt_prefix(sequence)
            self._schedule.enqueue(sequence)
        self._orders += 1
        self._jobs[job.id] = sequence

    def cancel(self, job_id: str) -> bool:
        """End a job without further events; False when it is unknown.

        Its blocks are free at once, unless the iteration under way computes it: then at that one's end.
        """
        sequence = self._jobs.pop(job_id, None)
        if sequence is None:
            return False
        if self._in_flight(sequence):
            sequence.cancelled = True
        else:
            self._schedule.drop(sequence)
        return True

    def begin(self, now_ms: float) -> float | None:
        """Start the next iteration; return its duration in milliseconds, or None when nothing can run."""
        if self._iteration is not None:
            raise RuntimeError("an iteration is under way")
        self.pool.blocks.now_ms = now_ms
        schedule = self._schedule
        iteration, preempted = schedule.plan(self.chunk_tokens, now_ms)
        # told at the end of the iteration, as everything is
        self._events += [Preempted(sequence.id) for sequence in preempted]
        if iteration is None:
            return None
        context = schedule.context_tokens / iteration.batch if iteration.batch else 0.0
        price(iteration, self.profile, context, self.time_scale)
        self._iteration = iteration
        return iteration.duration_ms

    def finish(self, now_ms: float) -> list[EngineEvent]:
        """End the iteration that ``begin`` started; return what came of it, in order."""
        iteration = self._iteration
        if iteration is None:
            raise RuntimeError("no iteration is under way")
        self.pool.blocks.now_ms = now_ms
        self._iteration = None
        self.steps += 1
        self.busy_ms += iteration.duration_ms
        self.prefill_busy_ms += iteration.duration_ms - iteration.each_ms * iteration.batch
        events = self._events
        self._events = []
        self._outcome.take(iteration, events, now_ms)
        return events

    def _in_flight(self, sequence: EngineSequence) -> bool:
        if self._iteration is None:
            return False
        if sequence.place is Place.DECODE:
            return True
        return any(chunk.sequence is sequence for chunk in self._iteration.chunks)

    def _adopt(self, sequence: EngineSequence) -> None:
        """Take over the lease's blocks. A wrong one is told when the first step that reads it ends."""
        tail = sequence.tail_content(self._block_tokens)
        contents = sequence.keys if tail is None else [*sequence.keys, tail]
        adopted = self.pool.adopt(sequence.job.transfer, sequence.prompt_tokens, contents)
        sequence.blocks = adopted.blocks
        sequence.verified_blocks = adopted.verified
        sequence.cached_tokens = 0
        if adopted.verified == len(adopted.blocks):
            sequence.computed = sequence.prompt_tokens
            sequence.fill(self.pool)

    def _adopt_prefix(self, sequence: EngineSequence) -> None:
        """Put the lease's blocks into the prefix cache, up to the first wrong one.

        They are not kept for the job until its turn comes: who holds blocks while others wait for room may stop
        everybody. As the most recently used they are the last to be evicted.
        """
        adopted = self.pool.adopt_prefix(sequence.job.transfer, sequence.keys)
        right = adopted.verified
        sequence.verified_blocks, sequence.dropped_blocks = right, adopted.dropped
        sequence.arrived = range(self.pool.blocks.match(sequence.keys, right), right)
        sequence.blocks = adopted.blocks
        sequence.computed = right * self._block_tokens
        sequence.fill(self.pool)
        self.pool.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.filled = sequence.computed = 0
