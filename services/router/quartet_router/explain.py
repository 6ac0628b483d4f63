"""Explanations: why each of the last decisions is what it is."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from quartet_core.plan import FILTERS, Decision, Plan
from quartet_router.flight import Flight

NameOf = Callable[[int], str]
"""The worker in a slot; "" for none."""

_Names = tuple[str, str, str]
"""Prefill, decode, and whoever lends a prefix."""


class _Record(Struct, array_like=True):
    """One decision. It is kept encoded, in some 300 bytes; as objects it would weigh four times as much."""

    at_ms: float
    policy: str
    decision: Decision
    names: tuple[_Names, ...]
    model: str
    tenant: str
    prompt_tokens: int
    output_tokens: float
    ttft_ms: float
    tpot_ms: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class Explanations:
    """The last ``most`` decisions, newest last, by request id."""

    def __init__(self, most: int, name_of: NameOf) -> None:
        self._most = most
        self._name_of = name_of
        self._records: OrderedDict[str, list[bytes]] = OrderedDict()

    def note(self, flight: Flight, decision: Decision, policy: str, now_ms: float) -> None:
        """Keep a decision; a request that is decided again keeps its last eight."""
        if not self._most:
            return
        records = self._records.setdefault(flight.id, [])
        # Names now: a slot may belong to another worker by the time somebody asks.
        name_of = self._name_of
        names = tuple((name_of(p.prefill), name_of(p.decode), name_of(p.source)) for p in decision.considered)
        ask = flight.ask
        record = _Record(
            now_ms, policy, decision, names, flight.model, flight.tenant, ask.prompt_tokens, ask.output_tokens,
            ask.ttft_ms, ask.tpot_ms,
        )  # fmt: skip
        records.append(_encode(record))
        del records[:-8]
        self._records.move_to_end(flight.id)
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """All decisions on a request, as JSON-able objects; empty when it is not among the last."""
        return [
            {
                "at_ms": round(record.at_ms, 3),
                "policy": record.policy,
                "reason": record.decision.reason.value,
                "hold": record.decision.hold,
                "model": record.model,
                "tenant": record.tenant,
                "prompt_tokens": record.prompt_tokens,
                "expected_output_tokens": round(record.output_tokens, 1),
                "targets_ms": {"ttft": record.ttft_ms, "tpot": record.tpot_ms},
                "candidates_left": dict(zip(FILTERS, record.decision.left, strict=False)),
                "plans": [_plan(*each) for each in zip(record.decision.considered, record.names, strict=True)],
            }
            for record in map(_decode, self._records.get(request_id, []))
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
        "kv_wait_ms": round(plan.kv_wait_ms, 3),
        "ttft_ms": round(plan.ttft_ms, 3),
        "tpot_ms": round(plan.tpot_ms, 3),
        "total_ms": round(plan.total_ms, 3),
        "cost": round(plan.cost, 6),
    }
