"""What an ended iteration brought: tokens, ends, failures; and where each of its sequences goes from there."""

from quartet_sim.iteration import Backlog, Chunk, Iteration
from quartet_sim.job import KV_MISMATCH, Computed, EngineEvent, Failed, Finished, FirstToken, Prefilled, Token
from quartet_sim.pool import KvPool
from quartet_sim.schedule import Schedule
from quartet_sim.sequence import EngineSequence, Place
from quartet_sim.tokens import PIECE_IDS, PIECES


class Outcome:
    """Applies ended iterations to one engine's schedule, pool and live jobs."""

    def __init__(self, pool: KvPool, schedule: Schedule, backlog: Backlog, jobs: dict[str, EngineSequence]) -> None:
        self._pool = pool
        self._schedule = schedule
        self._backlog = backlog
        self._jobs = jobs

    def take(self, iteration: Iteration, events: list[EngineEvent], now_ms: float) -> None:
        """Append the events of ``iteration``, ended at ``now_ms``: what was lent meanwhile, its decodes in batch order,
        its chunks."""
        schedule = self._schedule
        lent, schedule.lending = schedule.lending, []
        for sequence in lent:
            self._end_prefill(sequence, events, now_ms)
        if iteration.batch:
            schedule.decode_ms += iteration.each_ms
            for sequence in [sequence for sequence in schedule.decoding if sequence.cancelled]:
                schedule.drop(sequence)
            for sequence in schedule.joined:
                self._end_join(sequence, events, now_ms)
            self._end_decodes(events)
        for chunk in iteration.chunks:
            self._end_chunk(chunk, events, now_ms)

    def _end_join(self, sequence: EngineSequence, events: list[EngineEvent], now_ms: float) -> None:
        """The first step of a job whose KV came by transfer: say its first token, or that the KV is wrong."""
        if sequence.place is not Place.DECODE:
            return  # cancelled
        if sequence.verified_blocks == len(sequence.blocks):
            events.append(self._first_token(sequence, now_ms))
            return
        self._schedule.drop(sequence)
        del self._jobs[sequence.id]
        events.append(Failed(sequence.id, KV_MISMATCH, sequence.verified_blocks, sequence.gpu_ms))

    def _end_decodes(self, events: list[EngineEvent]) -> None:
        """One token for every sequence of the batch. The hot loop of the whole simulator: keep it flat."""
        append = events.append
        schedule = self._schedule
        schedule.context_tokens += len(schedule.decoding)
        ended = False
        for sequence in schedule.decoding:
            index = sequence.generated
            piece = sequence.pieces[index]
            append(Token(sequence.id, index, PIECE_IDS[piece], PIECES[piece]))
            index += 1
            sequence.generated = index
            if index >= sequence.checkpoint:
                sequence.computed = sequence.prompt_tokens + index - 1
                sequence.fill(self._pool)
                if index >= sequence.limit:
                    ended = True
                    schedule.leave_batch(sequence)
                    self._complete(sequence, events)
                else:
                    schedule.need_block(sequence)
                    sequence.set_checkpoint(self._pool.block_tokens)
        if ended:
            schedule.decoding = [sequence for sequence in schedule.decoding if sequence.place is Place.DECODE]

    def _end_chunk(self, chunk: Chunk, events: list[EngineEvent], now_ms: float) -> None:
        sequence = chunk.sequence
        sequence.gpu_ms += chunk.gpu_ms
        sequence.computed += chunk.tokens
        sequence.fill(self._pool)
        if sequence.cancelled:
            self._schedule.drop(sequence)
            return
        remaining = sequence.goal - sequence.computed
        self._backlog.put(sequence, sequence.computed, remaining)
        if remaining:
            if sequence.job.kind == "prefill":
                self._pool.grow(sequence.job.transfer, sequence.prompt_tokens, sequence.blocks, sequence.filled)
                events.append(Computed(sequence.id, sequence.computed))
            return
        self._schedule.prefilling.remove(sequence)
        if sequence.job.kind == "prefill":
            self._end_prefill(sequence, events, now_ms)
            return
        index = sequence.generated
        if not index:
            events.append(self._first_token(sequence, now_ms))
        piece = sequence.pieces[index]
        events.append(Token(sequence.id, index, PIECE_IDS[piece], PIECES[piece]))
        sequence.generated = index + 1
        if index + 1 >= sequence.limit:
            self._complete(sequence, events)
        else:
            self._schedule.enter_batch(sequence)

    def _end_prefill(self, sequence: EngineSequence, events: list[EngineEvent], now_ms: float) -> None:
        self._pin(sequence)
        queue_ms, took_ms = sequence.started_ms - sequence.submitted_ms, now_ms - sequence.submitted_ms
        events.append(Prefilled(sequence.id, sequence.cached_tokens, queue_ms, took_ms, sequence.gpu_ms))

    def _pin(self, sequence: EngineSequence) -> None:
        tail = sequence.tail_content(self._pool.block_tokens)
        if tail is not None:
            self._pool.blocks.mark(sequence.blocks[-1], tail)
        self._pool.pin(sequence.job.transfer, sequence.prompt_tokens, sequence.blocks)
        sequence.blocks = []
        self._schedule.free(sequence)
        del self._jobs[sequence.id]

    def _complete(self, sequence: EngineSequence, events: list[EngineEvent]) -> None:
        self._schedule.free(sequence)
        del self._jobs[sequence.id]
        events.append(
            Finished(
                sequence.id,
                sequence.reason,
                sequence.cached_tokens,
                sequence.generated,
                sequence.verified_blocks,
                sequence.gpu_ms,
                sequence.transferred_tokens,
                sequence.dropped_blocks,
            )
        )

    def _first_token(self, sequence: EngineSequence, now_ms: float) -> FirstToken:
        queue_ms = sequence.started_ms - sequence.submitted_ms
        return FirstToken(
            sequence.id, sequence.cached_tokens, queue_ms, now_ms - sequence.submitted_ms, sequence.transferred_tokens
        )
