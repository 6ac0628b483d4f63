"""What the agent says about requests: every event with the worker it is of, and the beat that includes it."""

from collections.abc import Callable

from quartet_agent.beats.words import WordBoard
from quartet_agent.engines.base import Usage
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import Phase, Prefill, RequestEvent, Role, Run


class EventAuthor:
    """Writes request events and hands them to ``publish``."""

    def __init__(self, board: WordBoard, agent_incarnation: int, publish: Callable[[RequestEvent], None]) -> None:
        self._board = board
        self._agent_incarnation = agent_incarnation
        self._publish = publish

    def say(
        self,
        phase: Phase,
        worker: HostedWorker,
        dispatch: Run | Prefill,
        *,
        status: str = "",
        code: int = 0,
        reason: str = "",
        usage: Usage | None = None,
        transferred_tokens: int = 0,
        queue_ms: float = 0.0,
        ttft_ms: float = 0.0,
        e2e_ms: float = 0.0,
    ) -> None:
        """Say ``phase`` of ``dispatch``. The word that the event refers to is written first.

        ``ttft_ms`` and ``e2e_ms`` count from acceptance here; what the request waited before is ``waited_ms``.
        """
        facts = worker.facts
        usage = usage or Usage(dispatch.prompt_tokens)
        # A TP group works as one, so each GPU of it is busy for the job's whole share.
        gpu_ms = usage.busy_ms * facts.tp
        run = dispatch if isinstance(dispatch, Run) else None
        self._publish(
            RequestEvent(
                phase=phase,
                stream=dispatch.stream,
                tenant=dispatch.tenant,
                model=dispatch.model,
                worker=worker.id,
                incarnation=worker.incarnation,
                role=role_of(dispatch),
                hardware=facts.hardware,
                agent_incarnation=self._agent_incarnation,
                beat=self._board.next_beat(),
                router=dispatch.router,
                reason=reason,
                status=status,
                code=code,
                prompt_tokens=usage.prompt_tokens or dispatch.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                transferred_tokens=transferred_tokens,
                verified_blocks=usage.verified_blocks,
                waited_ms=run.waited_ms if run is not None else 0.0,
                queue_ms=queue_ms,
                ttft_ms=ttft_ms,
                e2e_ms=e2e_ms,
                predicted_ttft_ms=run.predicted_ttft_ms if run is not None else 0.0,
                predicted_total_ms=(run.predicted_total_ms if run is not None else dispatch.predicted_prefill_ms),
                gpu_ms=gpu_ms,
                joules=gpu_ms / 1e3 * facts.watts_per_gpu,
            )
        )

    def refuse(self, dispatch: Run | Prefill, worker: HostedWorker | None, reason: str) -> None:
        """Say that ``dispatch`` is not done here; ``worker`` is None when there is none of that name."""
        if worker is not None:
            self.say(Phase.REFUSED, worker, dispatch, reason=reason)
            return
        self._publish(
            RequestEvent(
                phase=Phase.REFUSED,
                stream=dispatch.stream,
                tenant=dispatch.tenant,
                model=dispatch.model,
                worker=dispatch.worker,
                incarnation=dispatch.incarnation,
                role=role_of(dispatch),
                agent_incarnation=self._agent_incarnation,
                router=dispatch.router,
                reason=reason,
            )
        )


def role_of(dispatch: Run | Prefill) -> Role:
    """Which part of a request ``dispatch`` asks for."""
    if isinstance(dispatch, Prefill):
        return Role.PREFILL
    return Role.BOTH if dispatch.split is None else Role.DECODE
