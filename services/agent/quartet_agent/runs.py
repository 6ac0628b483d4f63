"""Runs: what becomes of one accepted dispatch, as a state machine that ends exactly once.

    reading ─► read ─► working ─► ended            an answer; it waits in "read" for KV that comes from elsewhere
    reading ─► read ─► working ─► kept ─► ended    a prefill, whose KV is kept until its transfer is over

Every way out (done, cancelled, failed, past its deadline, the agent stopping) goes through ``_end``, which says END,
stops the timers, and gives back what is held.
"""

from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVarTuple

from msgspec import structs

from quartet_agent.engines.base import EngineEvent, Usage, Work
from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.events import EventAuthor, role_of
from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.departures import Departures
from quartet_agent.kv.figures import FetchFigures
from quartet_agent.worker import HostedWorker
from quartet_bus.author import StreamAuthor
from quartet_bus.bus import PayloadTooLarge
from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import Phase, Prefill, StreamId
from quartet_bus.messages import Run as RunDispatch
from quartet_core.openai import Inference, Refused, late, parse, upstream

Dispatch = RunDispatch | Prefill

ENGINE_ERROR = "engine_error"
"""Code and reason of a run whose engine, or our own handling of it, raised what nobody foresaw."""

_Arguments = TypeVarTuple("_Arguments")


class RunState(StrEnum):
    """Where a run is."""

    READING = "reading"
    READ = "read"
    WORKING = "working"
    KEPT = "kept"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPorts:
    """What runs need of their agent.

    ``started`` is called when a run's job is with the engine and may get events, ``ended`` when the run has ended,
    ``broken`` when what happened to it is our own fault and belongs into the log. ``fetches`` counts what became of
    prefixes that other workers lend. ``unleased_ms`` is how long a decode half waits for its lease.
    """

    loop: AbstractEventLoop
    now_ms: Callable[[], float]
    events: EventAuthor
    author: Callable[[str, StreamId], StreamAuthor]
    arrivals: Arrivals
    departures: Departures
    models: Mapping[str, ModelSection]
    lease_ms: float
    unleased_ms: float
    fetches: FetchFigures
    started: Callable[["Run"], None]
    ended: Callable[["Run"], None]
    broken: Callable[["Run", Exception], None]


class Run(ABC):
    """One accepted dispatch on one worker. Made after every reason to refuse was looked at; ``accept`` begins it."""

    def __init__(self, ports: RunPorts, worker: HostedWorker, dispatch: Dispatch) -> None:
        self.worker = worker
        self.state = RunState.READING
        self.tenant = dispatch.tenant
        self.stream = dispatch.stream
        stream = dispatch.stream
        # unique on the whole node, since all its engines' events are told apart by it
        self.job = f"{worker.ordinal}/{dispatch.tenant}/{stream.id}/{stream.attempt}/{stream.try_}"
        self._ports = ports
        self._accepted_ms = ports.now_ms()
        self._usage = Usage(dispatch.prompt_tokens)
        self._queue_ms = 0.0
        self._ttft_ms = 0.0
        self._unread_ms = 0.0
        self._in_engine = False
        self._parameters = b""  # what another engine says to this one, where they hand KV over by themselves
        self._timers: list[TimerHandle] = []

    @property
    @abstractmethod
    def dispatch(self) -> Dispatch:
        """What was asked."""

    def accept(self) -> None:
        """Say that the dispatch was taken, at once; its body is read in the loop's next turn."""
        dispatch, loop = self.dispatch, self._ports.loop
        self._unread_ms = self._new_prefill_ms()
        self.worker.unread_ms += self._unread_ms
        self.acknowledge()
        if dispatch.deadline_ms > 0:
            self._timers.append(loop.call_later(dispatch.deadline_ms / 1e3, self.expire))
        loop.call_soon(self._guarded, self._read)

    def acknowledge(self) -> None:
        """Say ACCEPTED; again when the same dispatch comes again, because the first word may have been lost."""
        self._ports.events.say(Phase.ACCEPTED, self.worker, self.dispatch)

    @abstractmethod
    def _on_engine(self, event: EngineEvent) -> None:
        """The engine said something about the run's job."""

    def on_engine(self, event: EngineEvent) -> None:
        """The engine said something about the run's job. What goes wrong with it is this run's end and no other's."""
        self._guarded(self._on_engine, event)

    @property
    def answering(self) -> bool:
        """Whether a part of the answer is on its way to the client."""
        return False

    def cancel(self, reason: str) -> None:
        """Nobody wants it any more. No frame says so: whoever cancelled knows, and other tries may go on."""
        self._stop_work()
        self._end("cancelled", 499, reason)

    def expire(self) -> None:
        """Its deadline has passed."""
        self.fail(late(), "deadline")

    def fail(self, error: Refused, reason: str) -> None:
        """It ends with an error that is final."""
        self._stop_work()
        self._end("error", error.status, reason)

    # Inside

    def _guarded(self, step: Callable[[*_Arguments], None], *arguments: *_Arguments) -> None:
        """The one way into a run for whatever may touch its engine or speak for it: what raises ends this run."""
        try:
            step(*arguments)
        except PayloadTooLarge as error:
            self.fail(upstream(f"The answer is too large: {error}.", "answer_too_large"), "too_large")
        except Exception as error:
            self._ports.broken(self, error)
            self.fail(Refused(500, "The engine failed.", kind="server_error", code=ENGINE_ERROR), ENGINE_ERROR)

    def _read(self) -> None:
        if self.state is not RunState.READING:
            return
        try:
            inference = parse(self.dispatch.body)
        except Refused as error:
            self.fail(error, "invalid")
            return
        self.state = RunState.READ
        self._continue(inference)

    @abstractmethod
    def _continue(self, inference: Inference) -> None:
        """The body was read, and the run has left READING."""

    def _new_prefill_ms(self) -> float:
        return self.dispatch.predicted_prefill_ms

    def _stop_reading(self) -> None:
        # Two floats added and taken away in any order leave a crumb; nothing unread is nothing at all.
        left_ms = self.worker.unread_ms - self._unread_ms
        self.worker.unread_ms = left_ms if left_ms > 1e-6 else 0.0
        self._unread_ms = 0.0

    def _submit(self, inference: Inference, transfer: str = "", *, prefix_tokens: int = 0) -> bool:
        """Give it to the engine. False when it ended instead."""
        self._stop_reading()
        dispatch = self.dispatch
        model = self._ports.models.get(dispatch.model)
        work = Work(
            job=self.job,
            answer_id=dispatch.stream.id,
            model=dispatch.model,
            body=dispatch.body,
            inference=inference,
            role=role_of(dispatch),
            default_max_tokens=model.max_tokens if model is not None else ModelSection("").max_tokens,
            salt=dispatch.salt,
            transfer=transfer,
            prefix_tokens=prefix_tokens,
            prompt_tokens=dispatch.prompt_tokens,
            prefill_ms=dispatch.predicted_prefill_ms,
            parameters=self._parameters,
        )
        self._in_engine = True  # an engine that raises may hold a part of the job, which is then taken back
        try:
            self.worker.adapter.submit(work)
        except BlocksFenced:
            self._in_engine = False
            raise
        except Refused as error:
            self._in_engine = False
            self._not_taken(error)
            return False
        self.state = RunState.WORKING
        self._ports.started(self)
        return True

    def _not_taken(self, error: Refused) -> None:
        """Its engine does not take it: for what it is, or (5xx) for how the engine is."""
        self.fail(error, "invalid" if error.status < 500 else "engine")

    def _stop_work(self) -> None:
        if self._in_engine:
            self._in_engine = False
            try:
                busy_ms = self.worker.adapter.cancel(self.job)
            except Exception as error:  # the run ends all the same
                self._ports.broken(self, error)
                return
            self._usage = structs.replace(self._usage, busy_ms=busy_ms)

    def _since_accepted_ms(self) -> float:
        return self._ports.now_ms() - self._accepted_ms

    def _end(self, status: str, code: int, reason: str = "") -> None:
        if self.state is RunState.ENDED:
            return
        self._stop_reading()
        self.state = RunState.ENDED
        for timer in self._timers:
            timer.cancel()
        self._give_back()
        self._ports.ended(self)
        self._ports.events.say(
            Phase.END,
            self.worker,
            self.dispatch,
            status=status,
            code=code,
            reason=reason,
            usage=self._usage,
            transferred_tokens=self._transferred_tokens(),
            queue_ms=self._queue_ms,
            ttft_ms=self._ttft_ms,
            e2e_ms=self._since_accepted_ms(),
        )

    @abstractmethod
    def _give_back(self) -> None:
        """Free what the run holds besides its job. Called once, at its end."""

    def _transferred_tokens(self) -> int:
        return 0
