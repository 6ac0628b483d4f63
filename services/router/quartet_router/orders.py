"""Orders: the messages that a dispatch consists of, made from a flight and its plan. Pure."""

from quartet_bus.messages import Prefill, Run, Split, TransferPlan, TransferReason
from quartet_core.dispatch import Half
from quartet_core.plan import Plan
from quartet_router.flight import Flight

_PATIENCE_FACTOR, _PATIENCE_MS = 3.0, 10_000.0
"""A split without a deadline of its own waits so many times its predicted TTFT, and so many ms, for its KV."""


def run(flight: Flight, plan: Plan, target: Half, giver: Half | None, router: str, now_ms: float) -> Run:
    """To the worker that answers. ``giver`` computes the prompt's KV for it (a split) or lends part of it (a fetch)."""
    kv = None
    if giver is not None:
        kv = Split(flight.transfer, giver.worker, giver.incarnation, _moved_tokens(flight, plan))
    return Run(
        stream=flight.stream,
        tenant=flight.tenant,
        model=flight.model,
        worker=target.worker,
        incarnation=target.incarnation,
        inbox=flight.inbox,
        body=flight.body or b"",
        router=router,
        prompt_tokens=flight.ask.prompt_tokens,
        deadline_ms=_remaining_ms(flight, now_ms),
        ttft_ms=flight.ask.ttft_ms,
        tpot_ms=flight.ask.tpot_ms,
        predicted_ttft_ms=plan.ttft_ms,
        predicted_prefill_ms=plan.prefill_ms,
        predicted_total_ms=plan.total_ms,
        waited_ms=now_ms - flight.arrived_ms,
        priority=flight.priority,
        session=flight.session,
        salt=flight.salt,
        split=None if plan.fetches else kv,
        fetch=kv if plan.fetches else None,
        fetch_wait_ms=plan.fetch_wait_ms,
    )


def prefill(flight: Flight, plan: Plan, target: Half, giver: Half, router: str, now_ms: float) -> Prefill:
    """To the giver. A loan has no deadline: it ends with its transfer, and the request's own would be its failure."""
    return Prefill(
        stream=flight.stream,
        tenant=flight.tenant,
        model=flight.model,
        worker=giver.worker,
        incarnation=giver.incarnation,
        body=flight.body or b"",
        router=router,
        prompt_tokens=flight.ask.prompt_tokens,
        split=Split(flight.transfer, target.worker, target.incarnation, _moved_tokens(flight, plan)),
        deadline_ms=0 if plan.fetches else _remaining_ms(flight, now_ms),
        predicted_prefill_ms=0.0 if plan.fetches else plan.prefill_ms,
        salt=flight.salt,
    )


def transfer(flight: Flight, plan: Plan, target: Half, giver: Half, router: str, now_ms: float) -> TransferPlan:
    """To the coordinators: what is to be moved, and how long that is of use."""
    patience_ms = _remaining_ms(flight, now_ms) or _PATIENCE_FACTOR * plan.ttft_ms + _PATIENCE_MS
    return TransferPlan(
        transfer=flight.transfer,
        tenant=flight.tenant,
        reason=TransferReason.FETCH if plan.fetches else TransferReason.SPLIT,
        stream=flight.stream,
        model=flight.model,
        source=giver.worker,
        source_incarnation=giver.incarnation,
        target=target.worker,
        target_incarnation=target.incarnation,
        tokens=_moved_tokens(flight, plan),
        kv_bytes=plan.kv_bytes,
        deadline_ms=plan.fetch_wait_ms if plan.fetches else patience_ms,
        predicted_ms=plan.kv_ms,
        router=router,
    )


def _moved_tokens(flight: Flight, plan: Plan) -> int:
    return plan.fetched_tokens if plan.fetches else flight.ask.prompt_tokens


def _remaining_ms(flight: Flight, now_ms: float) -> int:
    return max(1, int(flight.deadline_at_ms - now_ms)) if flight.deadline_at_ms else 0
