"""One job on an engine's server: from the POST to the last event, whatever goes wrong between."""

from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from quartet_agent.engines import bodies
from quartet_agent.engines.base import EngineEvent, Failed, Finished, FirstToken, Output, Prefilled, Usage, Work
from quartet_agent.engines.bodies import Order
from quartet_agent.engines.server import AnswerTooLarge, EngineServer, whole
from quartet_agent.engines.sse import DONE, EventSplitter, EventTooLarge
from quartet_bus.messages import Role
from quartet_core.openai import Endpoint, Refused, upstream

MAX_ERROR_BYTES = 256 * 1024

Emit = Callable[[Sequence[EngineEvent]], None]


class Call:
    """One job. ``emit`` takes its events, in batches as they came; ``ready`` is awaited between batches: what the bus
    cannot take yet is not read from the engine either."""

    def __init__(
        self, work: Work, order: Order, server: EngineServer, emit: Emit, ready: Callable[[], Awaitable[None]]
    ) -> None:
        self.work = work
        self.queue_ms = 0.0
        """How long it was queued, where that had to be guessed before its first token was seen."""
        self.kept_tokens = 0
        """How much of its prompt came for it in pages."""
        self._told_first = False
        self._order = order
        self._server = server
        self._emit = emit
        self._ready = ready
        self._usage: Usage | None = None
        self._outputs = 0

    async def run(self) -> None:
        """Do it. Cancelling this coroutine closes the connection, and by that ends the request on the engine."""
        try:
            async with self._server.stream(path_of(self.work.inference.endpoint), self._order.body) as response:
                if response.status != 200:
                    data = await whole(response, MAX_ERROR_BYTES)
                    self._emit([failure(self.work.job, response.status, data)])
                elif self.work.inference.stream and self.work.role is not Role.PREFILL:
                    await self._read_stream(response)
                else:
                    await self._read_whole(response)
        except aiohttp.ClientConnectorError as error:
            self._broke("engine_unreachable", f"The engine cannot be reached: {error.strerror or error}.")
        except TimeoutError:
            self._broke("engine_silent", "The engine was silent for too long.")
        except (AnswerTooLarge, EventTooLarge) as error:
            self._emit([Failed(self.work.job, "too_large", upstream(f"The engine sent {error}.", "answer_too_large"))])
        except (aiohttp.ClientError, OSError) as error:
            self._broke("engine_lost", f"The engine broke off: {type(error).__name__}.")

    async def _read_stream(self, response: aiohttp.ClientResponse) -> None:
        splitter = EventSplitter()
        async for piece in response.content.iter_any():
            events: list[EngineEvent] = []
            done = False
            for data in splitter.feed(piece):
                if data == DONE:
                    done = True
                    break
                if not self._take(data, events):
                    self._emit(events)
                    return
            if done:
                events.append(Finished(self.work.job, self._used()))
            if events:
                self._emit(events)
            if done:
                return
            await self._ready()
        self._broke("engine_cut", "The engine's stream ended in the middle.")

    def _take(self, data: bytes, events: list[EngineEvent]) -> bool:
        """One object of the stream; False when it was an error, which is the last one."""
        job = self.work.job
        if bodies.is_error(data):
            failed = failure(job, bodies.error_status(data), data)
            events.append(failed)
            return False
        if not self._told_first:
            self._told_first = True
            events.append(FirstToken(job))
        if bodies.has_usage(data):
            told = bodies.told(data)
            self._usage = told.usage or self._usage
            if told.usage_only and self._order.hides_usage:
                return True
        self._outputs += 1
        events.append(Output(job, data))
        return True

    async def _read_whole(self, response: aiohttp.ClientResponse) -> None:
        data = await whole(response)
        job, told = self.work.job, bodies.told(data)
        self._usage = told.usage
        if self.work.role is Role.PREFILL:
            if told.parameters:
                self._emit([Prefilled(job, self._used(), parameters=told.parameters)])
            else:
                error = upstream("The engine keeps no KV for others: it gave no kv_transfer_params.", "no_handshake")
                self._emit([Failed(job, "no_handshake", error)])
            return
        self._outputs = 1
        self._emit([FirstToken(job), Output(job, data), Finished(job, self._used())])

    def _used(self) -> Usage:
        if self._usage is not None:
            return self._usage
        # An engine that tells no usage: nearly every object of a stream is one token.
        return Usage(self.work.prompt_tokens, 0, self._outputs if self.work.inference.stream else 0)

    def _broke(self, reason: str, message: str) -> None:
        self._emit([Failed(self.work.job, reason, upstream(message, reason), elsewhere=True)])


def path_of(endpoint: Endpoint) -> str:
    """Where an engine answers requests of this kind: ``chat.completions`` at ``/v1/chat/completions``."""
    return "/v1/" + endpoint.value.replace(".", "/")


def failure(job: str, status: int, data: bytes) -> Failed:
    """What an engine's answer other than 200 means for its job.

    Its word on the request (400, 413, 422, ...) is the client's. Its word on itself is not: busy means later, or
    elsewhere; a wrong key, a model it has not, a crash mean elsewhere.
    """
    if status in (429, 503, 408):
        busy = Refused(503, "The engine is busy.", kind="service_unavailable", code="engine_busy", retry_after_s=1.0)
        return Failed(job, "engine_busy", busy, elsewhere=True)
    if status in (401, 403):
        error = upstream("The engine does not take this agent's key.", "engine_key")
        return Failed(job, "engine_key", error, elsewhere=True)
    if status == 404:
        error = upstream("The engine does not serve this model, or not this API.", "engine_model")
        return Failed(job, "engine_model", error, elsewhere=True)
    if 400 <= status < 500:
        return Failed(job, "invalid", bodies.refusal(status, data))
    return Failed(job, "engine_error", bodies.refusal(max(status, 500), data), elsewhere=True)
