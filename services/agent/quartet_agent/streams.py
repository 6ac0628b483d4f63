"""All streams of this agent: which dispatches it takes, which it refuses and why, whom an engine's events are for."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from quartet_agent.answers import AnswerRun
from quartet_agent.beats.words import WordBoard
from quartet_agent.cancels import CancelMemory, matches
from quartet_agent.engines.base import EngineEvent
from quartet_agent.events import EventAuthor
from quartet_agent.fetches import FetchingRun
from quartet_agent.handshakes import HandshakeAnswer, HandshakePrefill, Handshakes
from quartet_agent.kv.arrivals import LeaseEnd
from quartet_agent.prefills import PrefillRun
from quartet_agent.runs import Dispatch, Run, RunPorts
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import Cancel, Prefill, Split, StreamId
from quartet_bus.messages import Run as RunDispatch
from quartet_core.openai import Refused

_REMEMBER_ENDED_MS = 10_000.0
_MAX_ENDED = 65_536

_INBOX = "_INBOX."
"""Whatever a router says, an answer goes to an inbox and nowhere else."""

_IMPATIENCE = frozenset(("ack_timeout", "trial_failed"))
"""Reasons of a router that heard nothing of a try in time, and sends another one."""

_Key = tuple[str, str, StreamId]


class Refusal(StrEnum):
    """Why a dispatch is not taken; said before anything was done for it, so that it may go elsewhere at once."""

    NOT_HERE = "not_here"
    ENGINE_DOWN = "engine_down"
    FENCED = "fenced"
    MODEL_NOT_HERE = "model_not_here"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"
    FULL = "full"
    NOT_CAPABLE = "not_capable"
    INBOX = "inbox"


class Streams:
    """Takes dispatches and cancels, and hands engine events to their runs. At most ``max_running`` streams at once.

    ``idle`` is called when the last running stream has ended.
    """

    def __init__(
        self,
        workers: Mapping[str, HostedWorker],
        board: WordBoard,
        events: EventAuthor,
        now_ms: Callable[[], float],
        idle: Callable[[], None],
        handshakes: Handshakes,
        *,
        max_running: int,
    ) -> None:
        self._workers = workers
        self._board = board
        self._events = events
        self._now_ms = now_ms
        self._idle = idle
        self._handshakes = handshakes
        self._max_running = max_running
        self._cancels = CancelMemory()
        self._jobs: dict[str, Run] = {}
        # A late copy of a dispatch must never run a second time: what has ended is remembered for a while.
        self._ended: OrderedDict[_Key, float] = OrderedDict()
        self._waiting_kv: dict[str, AnswerRun] = {}
        self.running = 0
        """Streams accepted and not ended."""
        self.stopping = False
        """Whether the agent takes no more work at all."""

    def take(self, ports: RunPorts, dispatch: Dispatch) -> None:
        """Accept ``dispatch``, or say why not. One that runs already is acknowledged again, and nothing else."""
        worker = self._workers.get(dispatch.worker)
        key = (dispatch.tenant, dispatch.stream)
        if worker is not None and dispatch.incarnation == worker.incarnation and key in worker.runs:
            worker.runs[key].acknowledge()
            return
        reason = self._reason_against(worker, dispatch)
        run = self._run(ports, worker, dispatch) if worker is not None and reason is None else None
        if run is None:
            self._events.refuse(dispatch, worker, reason or Refusal.DUPLICATE)
            return
        run.worker.runs[key] = run
        self.running += 1
        self._board.touch(run.worker)
        run.accept()

    def cancel(self, cancel: Cancel) -> None:
        """End every stream that ``cancel`` means, and remember it: it may have overtaken its dispatch."""
        self._cancels.remember(cancel, self._now_ms() / 1e3)
        for worker in self._workers.values():
            for run in [run for run in worker.runs.values() if matches(cancel, run.tenant, run.stream)]:
                run.cancel(cancel.reason)

    def cancel_on(self, worker: HostedWorker, cancel: Cancel) -> None:
        """As ``cancel``, for one worker: the other half of a split may be on another one of this node.

        A router that gave up waiting is not obeyed once a chunk is out: the client keeps the first try that it hears
        one of, and ends the others itself. FIRST_TOKEN was said, so the router learns that its cancel came too late.
        """
        self._cancels.remember(cancel, self._now_ms() / 1e3)
        for run in [run for run in worker.runs.values() if matches(cancel, run.tenant, run.stream)]:
            if not (run.answering and cancel.reason in _IMPATIENCE):
                run.cancel(cancel.reason)

    def on_engine(self, worker: HostedWorker, events: Sequence[EngineEvent]) -> None:
        """One batch of an engine's events. The word is rewritten before the first of them is told."""
        self._board.touch(worker)
        self._board.write()
        jobs = self._jobs
        for event in events:
            run = jobs.get(event.job)
            if run is not None:
                run.on_engine(event)
        self._board.write()

    def kv_committed(self, worker: str, transfer: str) -> None:
        """The KV of ``transfer`` is there: its decode may begin."""
        run = self._waiting_kv.get(transfer)
        if run is not None and run.worker.id == worker:
            run.kv_ready()

    def kv_lost(self, worker: str, transfer: str, end: LeaseEnd) -> None:
        """The lease of ``transfer`` ended unused."""
        hosted = self._workers.get(worker)
        if hosted is not None:
            self._board.touch(hosted)
        run = self._waiting_kv.get(transfer)
        if run is not None and run.worker.id == worker:
            run.kv_lost(end)

    def started(self, run: Run) -> None:
        """Its job is with the engine: events for it may come."""
        self._jobs[run.job] = run
        self._board.touch(run.worker)

    def end(self, run: Run) -> None:
        """Forget ``run``, which has ended."""
        worker = run.worker
        del worker.runs[(run.tenant, run.stream)]
        self.running -= 1
        self._jobs.pop(run.job, None)
        if isinstance(run, AnswerRun) and self._waiting_kv.get(run.transfer) is run:
            del self._waiting_kv[run.transfer]
        self._board.touch(worker)
        if not self.running:
            self._idle()
        now_ms = self._now_ms()
        ended = self._ended
        ended[(worker.id, run.tenant, run.stream)] = now_ms + _REMEMBER_ENDED_MS
        while len(ended) > _MAX_ENDED or next(iter(ended.values())) <= now_ms:
            ended.popitem(last=False)

    def fail_all(self, error: Refused, reason: str) -> None:
        """End every stream with ``error``."""
        for worker in self._workers.values():
            for run in list(worker.runs.values()):
                run.fail(error, reason)

    def _reason_against(self, worker: HostedWorker | None, dispatch: Dispatch) -> Refusal | None:
        if worker is None:
            return Refusal.NOT_HERE
        if dispatch.incarnation != worker.incarnation:
            return Refusal.FENCED
        if not worker.up:
            return Refusal.ENGINE_DOWN
        if not worker.serves(dispatch.model):
            return Refusal.MODEL_NOT_HERE
        if worker.draining or self.stopping:
            return Refusal.DRAINING
        now_ms = self._now_ms()
        if self._cancels.covers(dispatch.tenant, dispatch.stream, now_ms / 1e3):
            return Refusal.CANCELLED
        if dispatch.deadline_ms < 0:
            return Refusal.DEADLINE
        if self._ended.get((worker.id, dispatch.tenant, dispatch.stream), 0.0) > now_ms:
            return Refusal.DUPLICATE
        if isinstance(dispatch, RunDispatch) and not dispatch.inbox.startswith(_INBOX):
            return Refusal.INBOX
        if dispatch.split is not None and worker.adapter.kv is None and not worker.adapter.handshake:
            return Refusal.NOT_CAPABLE
        return Refusal.FULL if self.running >= self._max_running else None

    def _run(self, ports: RunPorts, worker: HostedWorker, dispatch: Dispatch) -> Run | None:
        """A run of ``dispatch``; None when its transfer has another one already."""
        if dispatch.split is not None and worker.adapter.handshake:
            return self._half(ports, worker, dispatch, dispatch.split)
        if isinstance(dispatch, RunDispatch):
            # A worker whose engine takes part in no transfer computes what it was offered.
            fetch = dispatch.fetch if dispatch.split is None and worker.adapter.kv is not None else None
            answer = (
                AnswerRun(ports, worker, dispatch) if fetch is None else FetchingRun(ports, worker, dispatch, fetch)
            )
            if not answer.transfer:
                return answer
            if answer.transfer in self._waiting_kv:
                return None
            self._waiting_kv[answer.transfer] = answer
            return answer
        return self._prefill(ports, worker, dispatch)

    def _half(self, ports: RunPorts, worker: HostedWorker, dispatch: Dispatch, split: Split) -> Run | None:
        """Half of a split whose KV engines hand over by themselves."""
        run: HandshakeAnswer | HandshakePrefill
        if isinstance(dispatch, RunDispatch):
            run = HandshakeAnswer(ports, worker, dispatch, split, self._handshakes)
        else:
            run = HandshakePrefill(ports, worker, dispatch, self._handshakes)
        return run if self._handshakes.expect(run, split.transfer) else None

    @staticmethod
    def _prefill(ports: RunPorts, worker: HostedWorker, dispatch: Prefill) -> PrefillRun | None:
        pool = worker.adapter.kv
        assert pool is not None  # looked at in _reason_against
        run = PrefillRun(ports, worker, dispatch)
        split = dispatch.split
        expected = ports.departures.expect(
            split.transfer, worker.id, worker.incarnation, dispatch.stream, split.tokens, pool, run
        )
        return run if expected else None
