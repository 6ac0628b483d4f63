"""Runs that fetch: whole requests whose prompt's first part is cached on another worker, which lends its KV.

A fetch saves time or is given up: it never fails a request. The run waits for the KV as long as its router found
worth it, and is given to the engine then, with the prefix or without.
"""

from asyncio import TimerHandle
from enum import StrEnum

from quartet_agent.answers import AnswerRun
from quartet_agent.engines.base import EngineEvent, Finished
from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.kv.arrivals import LeaseEnd
from quartet_agent.runs import RunPorts, RunState
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import Run as RunDispatch
from quartet_bus.messages import Split
from quartet_core.openai import Inference


class FetchEnd(StrEnum):
    """How a run's wait for a prefix ended."""

    USED = "used"
    RELEASED = "kv_released"
    EXPIRED = "kv_expired"
    FENCED = "kv_fenced"
    LATE = "late"
    ABANDONED = "abandoned"
    """The run itself ended first: cancelled, past its deadline, or the agent stopped."""


class FetchingRun(AnswerRun):
    """A whole request that waits a while for the KV of its prompt's first part."""

    def __init__(self, ports: RunPorts, worker: HostedWorker, dispatch: RunDispatch, fetch: Split) -> None:
        super().__init__(ports, worker, dispatch)
        self._fetch = fetch
        self._lost: FetchEnd | None = None
        self._waits = True
        self._patience: TimerHandle | None = None

    @property
    def transfer(self) -> str:
        """The transfer that brings the prefix."""
        return self._fetch.transfer

    def _on_kv(self) -> None:
        self._decided(FetchEnd.USED)

    def _on_kv_lost(self, end: LeaseEnd) -> None:
        if self._waits:
            self._decided(FetchEnd(end.value))

    def _on_engine(self, event: EngineEvent) -> None:
        if isinstance(event, Finished) and event.usage.dropped_blocks:
            self._ports.fetches.dropped(event.usage.dropped_blocks)
        super()._on_engine(event)

    def _continue(self, inference: Inference) -> None:
        self._inference = inference
        wait_ms = self._dispatch.fetch_wait_ms - self._since_accepted_ms()
        if self._lost is not None:
            self._begin(inference, self._lost)
        elif self._ports.arrivals.committed(self.worker.id, self.transfer):
            self._begin(inference, FetchEnd.USED)
        elif wait_ms > 0.0:
            self._patience = self._ports.loop.call_later(wait_ms / 1e3, self._guarded, self._decided, FetchEnd.LATE)
            self._timers.append(self._patience)
        else:
            self._begin(inference, FetchEnd.LATE)

    def _decided(self, end: FetchEnd) -> None:
        """Nothing is left to wait for: begin, or once the body is read."""
        if self.state is RunState.READ and self._inference is not None:
            self._begin(self._inference, end)
        elif self.state is RunState.READING and end is not FetchEnd.USED:
            self._lost = end

    def _begin(self, inference: Inference, end: FetchEnd) -> None:
        """Give it to the engine, with the prefix if it came."""
        self._waits = False
        self._fetch_ms = self._since_accepted_ms()
        if self._patience is not None:
            self._patience.cancel()
        transfer = self.transfer if end is FetchEnd.USED else ""
        try:
            taken = self._submit(inference, transfer)
        except BlocksFenced:
            end, transfer = FetchEnd.FENCED, ""
            taken = self._submit(inference)
        self._ports.fetches.over(end, self._fetch_ms)
        if not transfer:
            self._ports.arrivals.decline(self.transfer)
        elif taken:
            self._ports.arrivals.hand_over(transfer)

    def _give_back(self) -> None:
        if self._waits:
            self._waits = False
            self._ports.fetches.over(FetchEnd.ABANDONED, self._since_accepted_ms())
        self._ports.arrivals.decline(self.transfer)
        super()._give_back()
