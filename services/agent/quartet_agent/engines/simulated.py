"""The simulated engine as a worker's engine: ``quartet_sim``'s iterations, driven by the loop's timers.

Real time and virtual time alike: an iteration that takes 12 ms ends 12 ms later on the loop's clock. Iterations are
planned end to end, each from the planned end of the one before, so that a late timer shifts nothing: the engine
catches up, and loses no work.
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterator, Sequence

from quartet_agent.engines.base import (
    Computed,
    EngineAdapter,
    EngineEvent,
    EngineLoad,
    Failed,
    Finished,
    FirstToken,
    Listener,
    Output,
    Prefilled,
    Usage,
    Work,
)
from quartet_agent.engines.pools import BlocksFenced, Exportable
from quartet_agent.engines.simulated_pages import SimulatedPages
from quartet_agent.kv.mover import Buffer
from quartet_bus.messages import Role
from quartet_core.openai import Endpoint, Refused, upstream
from quartet_sim import engine as sim
from quartet_sim.embeddings import embed
from quartet_sim.job import Kind
from quartet_sim.openai import AnswerWriter, read_options
from quartet_sim.pool import KvPool
from quartet_sim.tokens import prompt_ids

_KINDS: dict[Role, Kind] = {Role.BOTH: "whole", Role.PREFILL: "prefill", Role.DECODE: "decode"}


class _Answer:
    """The job that is under way, and the text of it that was not told yet."""

    __slots__ = ("embedded", "prompt_tokens", "stream", "texts", "writer")

    def __init__(
        self, prompt_tokens: int, stream: bool, writer: AnswerWriter | None, embedded: bytes | None = None
    ) -> None:
        self.embedded = embedded
        """The whole answer of an embeddings job, whose time alone is simulated."""
        self.prompt_tokens = prompt_tokens
        self.stream = stream
        self.writer = writer
        self.texts: list[str] = []


class SimulatedKv:
    """The simulated engine's KV memory, in the words of ``quartet_agent.engines.base.KvPool``.

    ``freed`` is called when blocks came free: an idle engine may have a job that waits for them.
    """

    def __init__(self, pool: KvPool, freed: Callable[[], None]) -> None:
        self._pool = pool
        self._freed = freed

    @property
    def block_tokens(self) -> int:
        """As ``KvPool.block_tokens``."""
        return self._pool.block_tokens

    @property
    def stands_in(self) -> bool:
        """As ``KvPool.stands_in``: a token has 64 bytes here (``quartet_sim.content``)."""
        return True

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """As ``KvPool.reserve``."""
        return self._pool.reserve(transfer, tokens, epoch)

    def write(self, transfer: str, epoch: int, first_block: int, blocks: Sequence[Buffer]) -> None:
        """As ``KvPool.write``."""
        try:
            for index, block in enumerate(blocks, first_block):
                self._pool.write(transfer, epoch, index, bytes(block))
        except sim.Fenced as error:
            raise BlocksFenced(transfer, error.reason) from error

    def commit(self, transfer: str, epoch: int) -> None:
        """As ``KvPool.commit``."""
        try:
            self._pool.commit(transfer, epoch)
        except sim.Fenced as error:
            raise BlocksFenced(transfer, error.reason) from error

    async def ready(self, transfer: str) -> None:
        """As ``KvPool.ready``: what is there can be read at once."""

    def exportable(self, transfer: str) -> Exportable:
        """As ``KvPool.exportable``."""
        try:
            return Exportable(*self._pool.exportable(transfer))
        except sim.Fenced as error:
            raise BlocksFenced(transfer, error.reason) from error

    def export(self, transfer: str, first_block: int = 0) -> Iterator[bytes]:
        """As ``KvPool.export``."""
        try:
            yield from self._pool.export(transfer, first_block)
        except sim.Fenced as error:
            raise BlocksFenced(transfer, error.reason) from error

    def release(self, transfer: str) -> None:
        """As ``KvPool.release``."""
        if self._pool.release(transfer):
            self._freed()


class SimulatedAdapter(EngineAdapter):
    """Drives one ``SimulatedEngine``. ``now_ms`` is the loop's clock, ``wall_s`` the Unix time that answers carry.

    With ``overlap`` it tells how its prefills get on, so that their KV can leave meanwhile.
    """

    def __init__(
        self,
        engine: sim.SimulatedEngine,
        loop: AbstractEventLoop,
        now_ms: Callable[[], float],
        wall_s: Callable[[], float],
        *,
        overlap: bool = True,
    ) -> None:
        self._overlap = overlap
        self._engine = engine
        self._loop = loop
        self._now_ms = now_ms
        self._wall_s = wall_s
        self._answers: dict[str, _Answer] = {}
        self._listener: Listener | None = None
        self._timer: TimerHandle | None = None
        self._woken = False
        self._stopped = False
        self._kv = SimulatedKv(engine.pool, self._wake)
        self._pages = SimulatedPages(engine.pool, now_ms, self._wake)

    async def start(self, listener: Listener) -> None:
        """As ``EngineAdapter.start``."""
        self._listener = listener

    async def stop(self) -> None:
        """As ``EngineAdapter.stop``."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def submit(self, work: Work) -> None:
        """As ``EngineAdapter.submit``."""
        inference = work.inference
        tokens = prompt_ids(inference)
        if inference.endpoint is Endpoint.EMBEDDINGS:
            self._embed(work, len(tokens))
            return
        options = read_options(work.body, inference)
        if work.prefix_tokens:
            tokens = tokens[: work.prefix_tokens]
        room = max(1, self._engine.max_context - len(tokens))
        job = sim.Job(
            id=work.job,
            tokens=tokens,
            # A client that sets no limit asks for what fits, not for an error.
            max_tokens=inference.max_tokens or min(work.default_max_tokens, room),
            salt=work.salt,
            kind=_KINDS[work.role],
            transfer=work.transfer,
            may_stop=not options.limited,
        )
        try:
            self._engine.submit(job, self._now_ms())
        except sim.Fenced as error:
            raise BlocksFenced(work.transfer, error.reason) from error
        writer = None
        if work.role is not Role.PREFILL:
            writer = AnswerWriter(inference, work.model, work.answer_id, int(self._wall_s()), options)
        self._answers[work.job] = _Answer(len(tokens), inference.stream, writer)
        self._wake()

    def _embed(self, work: Work, prompt_tokens: int) -> None:
        """One pass over all inputs, as over a prompt that is answered with a single token, which nobody is told."""
        answer = embed(work.body, work.model, prompt_tokens)
        # Inputs fit a context one by one; the engine is asked for as much of them as one of its prompts may have.
        tokens = prompt_ids(work.inference)[: self._engine.max_context - 1]
        self._engine.submit(sim.Job(id=work.job, tokens=tokens, max_tokens=1, salt=work.salt), self._now_ms())
        self._answers[work.job] = _Answer(prompt_tokens, False, None, answer)
        self._wake()

    def cancel(self, job: str) -> float:
        """As ``EngineAdapter.cancel``."""
        self._answers.pop(job, None)
        busy_ms = self._engine.gpu_ms(job)
        if self._engine.cancel(job):
            self._wake()
        return busy_ms

    def load(self) -> EngineLoad:
        """As ``EngineAdapter.load``. A slowed engine shows as drift: its profile does not know ``time_scale``."""
        engine = self._engine
        return EngineLoad(
            free_kv_fraction=engine.free_kv_fraction,
            queued_prefill_ms=engine.queued_prefill_ms(),
            running=engine.running,
            waiting=engine.waiting,
            steps=engine.steps,
            busy_ms=engine.busy_ms,
            drift=engine.time_scale,
        )

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """As ``EngineAdapter.drain_rungs``."""
        return self._engine.drain_rungs()

    @property
    def kv(self) -> SimulatedKv:
        """As ``EngineAdapter.kv``."""
        return self._kv

    @property
    def pages(self) -> SimulatedPages:
        """As ``EngineAdapter.pages``."""
        return self._pages

    # Inside

    def _wake(self) -> None:
        """Have an idle engine look for work, once all that comes in this turn of the loop has come."""
        if self._timer is None and not self._woken and not self._stopped:
            self._woken = True
            self._loop.call_soon(self._begin_idle)

    def _begin_idle(self) -> None:
        self._woken = False
        if self._timer is None and not self._stopped:
            self._begin(self._now_ms())

    def _begin(self, start_ms: float) -> None:
        duration_ms = self._engine.begin(start_ms)
        if duration_ms is None:
            self._timer = None
            return
        end_ms = start_ms + duration_ms
        delay_s = max(0.0, (end_ms - self._now_ms()) / 1e3)
        self._timer = self._loop.call_later(delay_s, self._end, end_ms)

    def _end(self, end_ms: float) -> None:
        events = self._translate(self._engine.finish(end_ms))
        try:
            if self._listener is not None:
                self._listener(events)
        finally:
            if not self._stopped:
                self._begin(end_ms)

    def _translate(self, events: Sequence[sim.EngineEvent]) -> list[EngineEvent]:
        told: list[EngineEvent] = []
        for event in events:
            answer = self._answers.get(event.job_id)
            if answer is None:
                continue  # cancelled while the iteration ran
            match event:
                case sim.Token():
                    self._on_token(event, answer, told)
                case sim.FirstToken():
                    told.append(FirstToken(event.job_id, event.cached_tokens, event.queue_ms, event.transferred_tokens))
                    if answer.stream and answer.writer is not None and (opening := answer.writer.first()) is not None:
                        told.append(Output(event.job_id, opening))
                case sim.Finished():
                    self._on_finished(event, answer, told)
                case sim.Computed():
                    if self._overlap:
                        told.append(Computed(event.job_id, event.tokens))
                case sim.Prefilled():
                    del self._answers[event.job_id]
                    usage = Usage(answer.prompt_tokens, event.cached_tokens, busy_ms=event.gpu_ms)
                    told.append(Prefilled(event.job_id, usage, event.queue_ms))
                case sim.Failed():
                    del self._answers[event.job_id]
                    usage = Usage(answer.prompt_tokens, verified_blocks=event.verified_blocks, busy_ms=event.gpu_ms)
                    told.append(Failed(event.job_id, event.reason, _failure(event.reason), usage))
                case sim.Preempted():
                    pass  # its tokens so far stand, and it goes on by itself
        return told

    @staticmethod
    def _on_token(event: sim.Token, answer: _Answer, told: list[EngineEvent]) -> None:
        if not answer.stream:
            answer.texts.append(event.text)
        elif answer.writer is not None:
            told.append(Output(event.job_id, answer.writer.token(event.text)))

    def _on_finished(self, event: sim.Finished, answer: _Answer, told: list[EngineEvent]) -> None:
        del self._answers[event.job_id]
        writer = answer.writer
        if answer.embedded is not None:
            told.append(Output(event.job_id, answer.embedded))
            usage = Usage(answer.prompt_tokens, event.cached_tokens, busy_ms=event.gpu_ms)
            told.append(Finished(event.job_id, usage))
            return
        if writer is None:
            return
        counts = (event.reason, answer.prompt_tokens, event.cached_tokens, event.output_tokens)
        if answer.stream:
            told.extend(Output(event.job_id, chunk) for chunk in writer.last(*counts))
        else:
            told.append(Output(event.job_id, writer.whole(answer.texts, *counts)))
        usage = Usage(
            answer.prompt_tokens,
            event.cached_tokens,
            event.output_tokens,
            event.verified_blocks,
            event.gpu_ms,
            event.transferred_tokens,
            event.dropped_blocks,
        )
        told.append(Finished(event.job_id, usage))


def _failure(reason: str) -> Refused:
    if reason == sim.KV_MISMATCH:
        return upstream("The KV cache that was received is not this prompt's.", reason)
    return upstream(f"The engine gave up: {reason}.", reason)
