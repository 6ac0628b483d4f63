"""Runs that answer a client: a whole request, or the decode half of a split."""

from quartet_agent.engines.base import Computed, EngineEvent, Failed, Finished, FirstToken, Output, Prefilled, Usage
from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.kv.arrivals import LeaseEnd
from quartet_agent.runs import Run, RunPorts, RunState
from quartet_agent.worker import HostedWorker
from quartet_bus.config.schema import KvSection
from quartet_bus.messages import Phase
from quartet_bus.messages import Run as RunDispatch
from quartet_core.openai import Inference, Refused
from quartet_core.transfer_words import KvLost

_REBUILT_MS = 500.0
"""What a standby takes to ask the agents of a fleet what they hold, before it takes up plans."""


def unleased_ms(kv: KvSection) -> float:
    """How long a decode half waits for a lease that nobody asked for: until a standby coordinator would have.

    Twice the silence after which it takes over (plans may have come at its beginning, and ticks are coarse), and what
    it takes to find out what was under way; at most a lease.
    """
    return min(kv.lease_ms, 2 * kv.coordinator_silence_ms + _REBUILT_MS)


class AnswerRun(Run):
    """A run that answers the client: a whole request, or the decode half of a split."""

    def __init__(self, ports: RunPorts, worker: HostedWorker, dispatch: RunDispatch) -> None:
        super().__init__(ports, worker, dispatch)
        self._dispatch = dispatch
        self._author = ports.author(dispatch.inbox, dispatch.stream)
        self._inference: Inference | None = None
        self._received_tokens = 0
        self._fetch_ms = 0.0  # waited for a prefix, in which the engine knew nothing of it
        self._outputs = 0

    @property
    def dispatch(self) -> RunDispatch:
        """What was asked."""
        return self._dispatch

    @property
    def transfer(self) -> str:
        """The transfer that brings its KV, "" for a whole request."""
        return self._dispatch.split.transfer if self._dispatch.split is not None else ""

    def accept(self) -> None:
        """As ``Run.accept``; the client is told as well."""
        super().accept()
        self._author.accepted(self.worker.id)

    def kv_ready(self) -> None:
        """The KV it waits for is committed."""
        self._guarded(self._on_kv)

    def kv_lost(self, end: LeaseEnd) -> None:
        """The lease it waits for is gone. Nothing was said to the client yet, so the router may try elsewhere."""
        self._guarded(self._on_kv_lost, end)

    @property
    def answering(self) -> bool:
        """As ``Run.answering``."""
        return self._outputs > 0

    def _on_kv(self) -> None:
        if self.state is RunState.READ and self._inference is not None:
            self._decode(self._inference)

    def _on_kv_lost(self, end: LeaseEnd) -> None:
        if self.state in (RunState.READING, RunState.READ):
            self._turn_back(end.value)

    def _on_engine(self, event: EngineEvent) -> None:
        match event:
            case Output(data=data):
                self._author.chunk(data)
                self._outputs += 1
            case FirstToken(cached_tokens=cached_tokens, queue_ms=queue_ms, transferred_tokens=transferred_tokens):
                self._ttft_ms = self._since_accepted_ms()
                self._queue_ms = queue_ms + self._fetch_ms
                self._received_tokens = self._received_tokens or transferred_tokens
                self._usage = Usage(self._usage.prompt_tokens, cached_tokens)
                self._ports.events.say(
                    Phase.FIRST_TOKEN,
                    self.worker,
                    self._dispatch,
                    usage=self._usage,
                    transferred_tokens=self._received_tokens,
                    queue_ms=self._queue_ms,
                    ttft_ms=self._ttft_ms,
                )
            case Finished(usage=usage):
                self._usage = usage
                self._in_engine = False
                self._author.end(
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    output_tokens=usage.output_tokens,
                )
                self._end("ok", 200)
            case Failed(reason=reason, error=error, usage=usage, elsewhere=elsewhere):
                self._usage = usage
                self._in_engine = False
                if (elsewhere or reason == KvLost.MISMATCH) and self._outputs == 0:
                    # Done elsewhere, it can still be answered right. What the engine did wrong counts against it.
                    self._turn_back(reason, error.status if elsewhere else 503)
                else:
                    self.fail(error, reason)
            case Prefilled() | Computed():
                raise AssertionError("an engine reported a prefill for an answer")

    def fail(self, error: Refused, reason: str) -> None:
        """As ``Run.fail``; the client is told."""
        if self.state is not RunState.ENDED:
            self._author.error(error)
        super().fail(error, reason)

    def _new_prefill_ms(self) -> float:
        return 0.0 if self._dispatch.split is not None else self._dispatch.predicted_prefill_ms

    def _continue(self, inference: Inference) -> None:
        if not self.transfer:
            self._submit(inference)
            return
        self._inference = inference
        if self._ports.arrivals.committed(self.worker.id, self.transfer):
            self._decode(inference)
        elif not self._ports.arrivals.holds(self.worker.id, self.transfer):
            # No coordinator has asked for its blocks yet. One that lives does so at once, or refuses the plan: a word
            # that may be lost.
            patience_s = self._ports.unleased_ms / 1e3
            self._timers.append(self._ports.loop.call_later(patience_s, self._guarded, self._no_lease))

    def _no_lease(self) -> None:
        if self.state is RunState.READ and not self._ports.arrivals.holds(self.worker.id, self.transfer):
            self._turn_back(LeaseEnd.EXPIRED.value)

    def _decode(self, inference: Inference) -> None:
        try:
            taken = self._submit(inference, self.transfer)
        except BlocksFenced:
            self._turn_back(KvLost.FENCED.value)
            return
        if taken:
            self._received_tokens = self._ports.arrivals.hand_over(self.transfer)

    def _not_taken(self, error: Refused) -> None:
        """As ``Run._not_taken``; what only this engine cannot do, another one may."""
        if error.status < 500:
            super()._not_taken(error)
        else:
            self._turn_back(error.body.code or "engine", error.status)

    def _turn_back(self, reason: str, code: int = 503) -> None:
        """Give the request back to its router, which may still send it elsewhere; the client hears nothing of it."""
        self._stop_work()
        self._ports.events.refuse(self._dispatch, self.worker, reason)
        self._end("error", code, reason)

    def _give_back(self) -> None:
        self._author.close()
        if self.transfer:
            self._ports.arrivals.release(self.transfer)

    def _transferred_tokens(self) -> int:
        return self._received_tokens
