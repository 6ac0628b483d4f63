"""Explanations: why each of the last decisions is what it is."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from quartet_core.plan import FILTERS, Decision, Plan
from quartet_router.flight import Flight

NameOf = Callable[[int], str]
"""The worker in a slot; "" for none."""

_Names = tuple[str, str, str]
"""Prefill, decode, and whoever lends a prefix."""

_Record = tuple[float, Flight, Decision, str, tuple[_Names, ...]]
"""When, on what, what, by which policy, and the names of the workers in its plans."""


class Explanations:
    """The last ``most`` decisions, newest last, by request id."""

    def __init__(self, most: int, name_of: NameOf) -> None:
        self._most = most
        self._name_of = name_of
        self._records: OrderedDict[str, list[_Record]] = OrderedDict()

    def note(self, flight: Flight, decision: Decision, policy: str, now_ms: float) -> None:
        """Keep a decision; a request that is decided again keeps its last eight."""
        if not self._most:
            return
        records = self._records.setdefault(flight.id, [])
        # Names now: a slot may belong to another worker by the time somebody asks.
        name_of = self._name_of
        names = tuple((name_of(p.prefill), name_of(p.decode), name_of(p.source)) for p in decision.considered)
        records.append((now_ms, flight, decision, policy, names))
        del records[:-8]
        self._records.move_to_end(flight.id)
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """All decisions on a request, as JSON-able objects; empty when it is not among the last."""
        return [
            {
                "at_ms": round(at_ms, 3),
                "policy": policy,
                "reason": decision.reason.value,
                "hold": decision.hold,
                "model": flight.model,
                "tenant": flight.tenant,
                "prompt_tokens": flight.ask.prompt_tokens,
                "expected_output_tokens": round(flight.ask.output_tokens, 1),
                "targets_ms": {"ttft": flight.ask.ttft_ms, "tpot": flight.ask.tpot_ms},
                "candidates_left": dict(zip(FILTERS, decision.left, strict=False)),
                "plans": [_plan(*each) for each in zip(decision.considered, names, strict=True)],
            }
            for at_ms, flight, decision, policy, names in self._records.get(request_id, [])
        ]


def _plan(plan: Plan, names: _Names) -> dict[str, Any]:
    return {
        "prefill": names[0],
        "decode": names[1],
        "source": names[2],
        "cached_tokens": plan.cached_tokens,
        "fetched_tokens": plan.fetched_tokens,
        "ahead_ms": round(plan.ahead_ms, 3),
        "prefill_ms": round(plan.prefill_ms, 3),
        "kv_ms": round(plan.kv_ms, 3),
        "ttft_ms": round(plan.ttft_ms, 3),
        "tpot_ms": round(plan.tpot_ms, 3),
        "total_ms": round(plan.total_ms, 3),
        "cost": round(plan.cost, 6),
    }
