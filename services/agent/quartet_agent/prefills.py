"""Runs that have KV for another worker: the prefill half of a split, and prefixes that are lent."""

from quartet_agent.engines.base import Computed, EngineEvent, Failed, Prefilled
from quartet_agent.kv.departures import DepartureEnd
from quartet_agent.runs import Run, RunPorts, RunState
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import Phase, Prefill
from quartet_core.openai import Inference, Refused


class PrefillRun(Run):
    """Has the KV of a prompt, or of its first part, and keeps it until its transfer is over.

    Of all of the prompt it is a split's first half, and computes it; of less it is a loan, and finds it in the cache.
    """

    def __init__(self, ports: RunPorts, worker: HostedWorker, dispatch: Prefill) -> None:
        super().__init__(ports, worker, dispatch)
        self._dispatch = dispatch

    @property
    def dispatch(self) -> Prefill:
        """What was asked."""
        return self._dispatch

    def _on_engine(self, event: EngineEvent) -> None:
        match event:
            case Computed():
                self._ports.departures.grew(self._dispatch.split.transfer)
            case Prefilled(usage=usage, queue_ms=queue_ms):
                self._usage = usage
                self._queue_ms = queue_ms
                self._ttft_ms = self._since_accepted_ms()
                self.state = RunState.KEPT
                self._in_engine = False
                self._ports.events.say(
                    Phase.PREFILLED,
                    self.worker,
                    self._dispatch,
                    usage=usage,
                    queue_ms=queue_ms,
                    ttft_ms=self._ttft_ms,
                )
                self._ports.departures.pinned(self._dispatch.split.transfer)
            case Failed(reason=reason, error=error, usage=usage):
                self._usage = usage
                self._in_engine = False
                self.fail(error, reason)
            case _:
                raise AssertionError("an engine answered a prefill")

    def departed(self, end: DepartureEnd) -> None:
        """Its KV is not kept any more, as ``DepartureOwner``."""
        self._stop_work()
        match end:
            case DepartureEnd.MOVED:
                self._end("ok", 200)
            case DepartureEnd.RELEASED | DepartureEnd.CANCELLED:
                self._end("cancelled", 499, end.value)
            case DepartureEnd.EXPIRED | DepartureEnd.FAILED:
                self._end("error", 503, end.value)

    def cancel(self, reason: str) -> None:
        """As ``Run.cancel``; whoever waits for the KV is told."""
        self._stop_work()
        self._ports.departures.failed(self._dispatch.split.transfer, DepartureEnd.CANCELLED, reason)
        super().cancel(reason)

    def fail(self, error: Refused, reason: str) -> None:
        """As ``Run.fail``; whoever waits for the KV is told."""
        self._stop_work()
        self._ports.departures.failed(self._dispatch.split.transfer, DepartureEnd.FAILED, reason)
        super().fail(error, reason)

    def _continue(self, inference: Inference) -> None:
        split = self._dispatch.split
        lent = split.tokens if split.tokens < self._dispatch.prompt_tokens else 0
        self._submit(inference, split.transfer, prefix_tokens=lent)

    def _give_back(self) -> None:
        self._ports.departures.release(self._dispatch.split.transfer)
