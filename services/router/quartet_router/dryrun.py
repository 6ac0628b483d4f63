"""Dry runs: another policy decides every new request too, nothing of it is dispatched, and where it differs is told."""

from collections import OrderedDict
from typing import Any

from msgspec import Struct

from quartet_core.plan import Ask, Decision
from quartet_core.routing import Routing

_MODELS = 256


class _Tally(Struct):
    decisions: int = 0
    differ: int = 0
    refused: int = 0
    ttft_ms: float = 0.0
    other_ttft_ms: float = 0.0
    total_ms: float = 0.0
    other_total_ms: float = 0.0


class DryRun:
    """Compares the policy in use with ``policy``, "" for none. Predictions are the same model's for both, so they tell
    how the two would differ, not which of them is right."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._tallies: OrderedDict[str, _Tally] = OrderedDict()
        self._since_ms = 0.0
        self.policy = ""

    def start(self, policy: str, now_ms: float) -> None:
        """Compare with ``policy`` from now on. Raises ``UnknownPolicy``; then an earlier run goes on."""
        self._routing.known(policy)
        self.policy = policy
        self._tallies.clear()
        self._since_ms = now_ms

    def stop(self) -> None:
        """Compare no more; what was found stays until the next start."""
        self.policy = ""

    def note(self, ask: Ask, decision: Decision) -> None:
        """A new request was decided for real."""
        tally = self._tallies.get(ask.model)
        if tally is None:
            if len(self._tallies) >= _MODELS:
                return
            tally = self._tallies[ask.model] = _Tally()
        other = self._routing.would(self.policy, ask)
        tally.decisions += 1
        if decision.plan is None or other.plan is None:
            tally.refused += (decision.plan is None) != (other.plan is None)
            return
        ours, theirs = decision.plan, other.plan
        tally.differ += (ours.prefill, ours.decode) != (theirs.prefill, theirs.decode)
        tally.ttft_ms += ours.ttft_ms
        tally.other_ttft_ms += theirs.ttft_ms
        tally.total_ms += ours.total_ms
        tally.other_total_ms += theirs.total_ms

    def report(self, now_ms: float) -> dict[str, Any]:
        """What was found so far, by model."""
        return {
            "dry_run": self.policy,
            "seconds": round((now_ms - self._since_ms) / 1e3, 1) if self._tallies else 0.0,
            "models": {
                model: {
                    "decisions": tally.decisions,
                    "differ": tally.differ,
                    "only_one_had_a_plan": tally.refused,
                    "mean_ttft_ms": _mean(tally.ttft_ms, tally),
                    "mean_ttft_ms_dry": _mean(tally.other_ttft_ms, tally),
                    "mean_total_ms": _mean(tally.total_ms, tally),
                    "mean_total_ms_dry": _mean(tally.other_total_ms, tally),
                }
                for model, tally in self._tallies.items()
            },
        }


def _mean(total_ms: float, tally: _Tally) -> float:
    return round(total_ms / max(1, tally.decisions - tally.refused), 2)
