"""The jobs on one server: what runs there, what each has told, and what the agent learns of the engine by it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from quartet_agent.engines.base import (
    Computed,
    EngineEvent,
    Failed,
    Finished,
    FirstToken,
    Listener,
    Output,
    Prefilled,
    Work,
)
from quartet_agent.engines.bodies import Order
from quartet_agent.engines.call import Call
from quartet_agent.engines.estimate import LoadEstimate
from quartet_agent.engines.lending import Lending, of_pages
from quartet_agent.engines.page_pool import ServedPages
from quartet_agent.engines.prefixes import CachedPrefixes
from quartet_agent.engines.server import EngineServer
from quartet_bus.messages import Role
from quartet_core.openai import Refused, upstream

_PRESSURE_PAUSE_S = 0.002


class Jobs:
    """Those of one worker. ``listener`` hears their events, none of a job that was forgotten.

    ``congested`` is as ``ServedAdapter``'s; ``failed`` is told of faults of ours.
    """

    def __init__(
        self,
        server: EngineServer,
        estimate: LoadEstimate,
        prefixes: CachedPrefixes,
        lending: Lending,
        now_ms: Callable[[], float],
        congested: Callable[[], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self.listener: Listener | None = None
        self.prompts: Counter[str] = Counter()
        """Prompts by their form, and tokens as answers told of them."""
        self.answered = False
        """Whether the engine has answered any in its present life."""
        self._server = server
        self._estimate = estimate
        self._prefixes = prefixes
        self._lending = lending
        self._now_ms = now_ms
        self._congested = congested
        self._failed = failed
        self._calls: dict[str, Call] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, work: Work, order: Order, model: str, pool: ServedPages | None) -> None:
        """Send a job's body to the server, which calls the model ``model``; ``pool`` has the KV of its transfer."""
        call = Call(work, order, self._server, self._emit_for(work.job), self._ready)
        self.prompts["prompts_as_text" if work.inference.prompt_ids is None else "prompts_as_ids"] += 1
        tokens = work.prompt_tokens or work.inference.prompt_tokens
        self._estimate.began(work.job, tokens, 0.1 if work.role is Role.DECODE else work.prefill_ms, self._now_ms())
        self._calls[work.job] = call
        self._tasks[work.job] = asyncio.get_running_loop().create_task(self._run(call, order, model, pool))

    def cancel(self, job: str) -> tuple[float, bool]:
        """Forget a job and close its connection; returns its share of the engine's busy time, and whether it ran."""
        busy_ms = self._forget(job)
        task = self._tasks.pop(job, None)
        if task is not None:
            task.cancel()
        return busy_ms, task is not None

    def fail_all(self, reason: str, error: Refused) -> None:
        """The engine is gone: none of its jobs will be done there."""
        for job in list(self._tasks):
            self._tasks.pop(job).cancel()
            self._emit_for(job)([Failed(job, reason, error, elsewhere=True)])

    def end(self) -> list[asyncio.Task[None]]:
        """Cancel all of them; returns what is to be waited for."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        return tasks

    def assume_first_tokens(self) -> None:
        """A job that does not stream tells no first token. When it was due and the engine moves, its prompt is taken as
        read, and is no work that is queued any more. Nobody is told: it can still be done elsewhere."""
        now_ms = self._now_ms()
        for job, call in self._calls.items():
            whole = not call.work.inference.stream and call.work.role is not Role.PREFILL
            if whole and self._estimate.overdue(job, now_ms):
                call.queue_ms = self._estimate.first_token(job, now_ms, seen=False)
                return  # one a look, since the next one's prompt begins only now

    async def _run(self, call: Call, order: Order, model: str, pool: ServedPages | None) -> None:
        work = call.work
        try:
            if pool is not None and work.transfer and work.role is Role.PREFILL:
                self._emit_for(work.job)([await self._lending.lend(work, order, pool, model)])
                return
            if pool is not None and work.transfer:
                call.kept_tokens = await pool.kept(work.transfer)
            await call.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # our own fault, and still the job's end
            self._failed(error)
            self._emit_for(work.job)([Failed(work.job, "engine_error", upstream("The engine failed.", "engine_error"))])

    def _emit_for(self, job: str) -> Callable[[Sequence[EngineEvent]], None]:
        def emit(events: Sequence[EngineEvent]) -> None:
            call = self._calls.get(job)
            if call is None or self.listener is None:
                return  # it was cancelled
            told = [of_pages(self._account(call, event), call.kept_tokens) for event in events]
            self.listener(told)

        return emit

    def _account(self, call: Call, event: EngineEvent) -> EngineEvent:
        """Keep the estimate in step with what is told, and add what only the estimate knows."""
        job, now_ms = call.work.job, self._now_ms()
        match event:
            case FirstToken():
                self._prefixes.read(call.work)
                waited_ms = self._estimate.first_token(job, now_ms, seen=call.work.inference.stream)
                return FirstToken(job, queue_ms=call.queue_ms or waited_ms)
            case Output():
                if call.work.inference.stream:
                    self._estimate.output(job, 1)
                return event
            case Finished(usage=usage):
                self.answered = True
                self.prompts["prompt_tokens"] += usage.prompt_tokens
                self.prompts["cached_tokens_told"] += usage.cached_tokens
                return Finished(job, msgspec.structs.replace(usage, busy_ms=self._forget(job)))
            case Computed():
                return event
            case Prefilled(usage=usage):
                self._prefixes.read(call.work)
                queue_ms = self._estimate.first_token(job, now_ms)
                return msgspec.structs.replace(
                    event, usage=msgspec.structs.replace(usage, busy_ms=self._forget(job)), queue_ms=queue_ms
                )
            case Failed(usage=usage):
                return msgspec.structs.replace(event, usage=msgspec.structs.replace(usage, busy_ms=self._forget(job)))

    def _forget(self, job: str) -> float:
        self._calls.pop(job, None)
        task = self._tasks.get(job)
        if task is not None and task is asyncio.current_task():
            del self._tasks[job]
        return self._estimate.ended(job, self._now_ms())

    async def _ready(self) -> None:
        while self._congested():  # noqa: ASYNC110 - the bus tells how much waits, not when less does
            await asyncio.sleep(_PRESSURE_PAUSE_S)
