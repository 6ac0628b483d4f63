"""The voice: what a router says of its flights, to clients (frames), to everybody (events), to its replicas (notes)."""

from quartet_bus import frames, subjects
from quartet_bus.messages import LedgerAction, LedgerNote, Phase, RequestEvent, Role, StreamId
from quartet_bus.service import Service
from quartet_core.ledger import Key, Ledger
from quartet_core.openai import Refused
from quartet_core.plan import Plan
from quartet_router.flight import Flight

ALIVE_MS = 900.0
"""After how long a silence clients are told that they wait; looked at four times a second, it is never two seconds."""


class Voice:
    """Says things in the name of one router."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def held(self, flight: Flight, remaining_ms: float, now_ms: float) -> None:
        """To the client: its request waits here."""
        frame = frames.Held(id=flight.id, attempt=flight.attempt, try_=flight.frame_try, remaining_ms=remaining_ms)
        self._frame(flight, frame, now_ms)
        self.event(flight, Phase.HELD, now_ms)

    def alive(self, flight: Flight, now_ms: float) -> None:
        """To the client: it still does, unless it was told so lately."""
        if now_ms - flight.frames_at_ms >= ALIVE_MS:
            frame = frames.Alive(id=flight.id, attempt=flight.attempt, try_=flight.frame_try)
            self._frame(flight, frame, now_ms)

    def error(self, flight: Flight, error: Refused, now_ms: float) -> None:
        """To the client: there will be no (further) answer."""
        frame = frames.Error(
            id=flight.id, attempt=flight.attempt, try_=flight.frame_try, status=error.status, error=error.body,
            retry_after_s=error.retry_after_s,
        )  # fmt: skip
        self._frame(flight, frame, now_ms)

    def event(
        self, flight: Flight, phase: Phase, now_ms: float, *, worker: str = "", reason: str = "", code: int = 0
    ) -> None:
        """To everybody: what became of a request here."""
        plan = flight.dispatch.plan
        self._service.say(
            subjects.request_event(phase),
            RequestEvent(
                phase=phase,
                stream=flight.stream,
                tenant=flight.tenant,
                model=flight.model,
                worker=worker,
                router=self._service.instance,
                reason=reason or ("" if flight.decision is None else flight.decision.reason.value),
                code=code,
                prompt_tokens=flight.ask.prompt_tokens,
                cached_tokens=0 if plan is None else plan.cached_tokens,
                waited_ms=now_ms - flight.arrived_ms,
                predicted_ttft_ms=0.0 if plan is None else plan.ttft_ms,
                predicted_total_ms=0.0 if plan is None else plan.total_ms,
            ),
        )

    def note(self, flight: Flight, action: LedgerAction, plan: Plan, ledger: Ledger, expires_ms: float = 0.0) -> None:
        """To the replicas: predicted work was put on the workers of ``plan``, or is reserved there, just as it stands
        in our own ledger."""
        for slot, key in flight.ledger_keys.items():
            entry = ledger.get(key)
            if entry is None:
                continue
            prefills, decodes = slot == plan.prefill, slot == plan.decode
            self._service.say(
                subjects.routed(),
                LedgerNote(
                    router=self._service.instance,
                    action=action,
                    stream=StreamId(key[1], key[2], key[3]),
                    tenant=key[0],
                    worker=key[4],
                    incarnation=key[5],
                    role=Role.BOTH if prefills and decodes else Role.DECODE if decodes else Role.PREFILL,
                    prefill_ms=entry.prefill_ms,
                    prompt_tokens=entry.tokens,
                    total_ms=plan.total_ms,
                    expires_ms=expires_ms,
                    tpot_ms=flight.ask.tpot_ms,
                ),
            )

    def ended(self, key: Key) -> None:
        """To the replicas: work that no event of its worker will end is over."""
        tenant, request, attempt, try_, worker, incarnation = key
        self._service.say(
            subjects.routed(),
            LedgerNote(
                router=self._service.instance,
                action=LedgerAction.ENDED,
                stream=StreamId(request, attempt, try_),
                tenant=tenant,
                worker=worker,
                incarnation=incarnation,
            ),
        )

    def _frame(self, flight: Flight, frame: frames.AnyFrame, now_ms: float) -> None:
        flight.frames_at_ms = now_ms
        self._service.say(subjects.inbox(flight.inbox), frames.encode(frame))
