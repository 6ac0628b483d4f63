"""Who asks for what next: per tenant a Markov chain over models.

A global chain over models buys nothing on public traces, but a tenant repeats its own model 72 to 99 % of the time. So
each tenant that was active lately keeps its last model and a few decayed counts of what followed what, and the demand
for a model is the sum, over tenants, of how fast each one asks times how likely it is to ask for that model next.
"""

from collections import OrderedDict
from typing import Final

from quartet_core.demand_rates import FAST_S, Ewma

ACTIVE_S: Final = 3600.0
"""A tenant silent for an hour is forgotten: measured gain comes from those active in the last hour."""

_MAX_PAIRS: Final = 32
_FORGET: Final = 0.98
_PRIOR: Final = 0.5


class _Tenant:
    """One tenant's chain: decayed counts of (model, next model), the least recent pair dropped beyond 32."""

    __slots__ = ("last_model", "last_s", "pairs", "rate")

    def __init__(self, since_s: float) -> None:
        self.rate = Ewma(FAST_S, since_s)
        self.last_s = since_s
        self.last_model = ""
        self.pairs: OrderedDict[tuple[str, str], float] = OrderedDict()

    def asked(self, model: str, now_s: float) -> None:
        self.rate.add(now_s)
        if self.last_model:
            pair = (self.last_model, model)
            for known in self.pairs:
                if known[0] == self.last_model:
                    self.pairs[known] *= _FORGET
            self.pairs[pair] = self.pairs.get(pair, 0.0) + 1.0
            self.pairs.move_to_end(pair)
            if len(self.pairs) > _MAX_PAIRS:
                self.pairs.popitem(last=False)
        self.last_model = model
        self.last_s = now_s

    def next(self) -> list[tuple[str, float]]:
        """(model, chance that it is the next one). Smoothed towards asking for the same model again."""
        counts = {self.last_model: _PRIOR}
        for (before, after), count in self.pairs.items():
            if before == self.last_model:
                counts[after] = counts.get(after, 0.0) + count
        total = sum(counts.values())
        return [(model, count / total) for model, count in counts.items()]


class TenantChains:
    """The chains of at most ``max_tenants`` tenants; beyond that the one longest silent is forgotten."""

    def __init__(self, since_s: float, max_tenants: int = 2_000) -> None:
        """``since_s``: when the watch began; a tenant that then was silent was silent, not unknown."""
        self._since_s = since_s
        self._max_tenants = max_tenants
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # longest silent first

    def __len__(self) -> int:
        return len(self._tenants)

    def asked(self, tenant: str, model: str, now_s: float) -> None:
        """``tenant`` sent a request for ``model``."""
        known = self._tenants.get(tenant)
        if known is None:
            if len(self._tenants) >= self._max_tenants:
                self._tenants.popitem(last=False)
            known = self._tenants[tenant] = _Tenant(max(self._since_s, now_s - ACTIVE_S))
        else:
            self._tenants.move_to_end(tenant)
        known.asked(model, now_s)

    def next_of(self, tenant: str) -> list[tuple[str, float]]:
        """What a tenant will ask for next, with chances that sum to 1; empty for one that is not known."""
        known = self._tenants.get(tenant)
        return known.next() if known else []

    def intensities(self, now_s: float) -> dict[str, float]:
        """Requests per second for each model, as the tenants active in the last hour let expect."""
        while self._tenants:
            tenant, known = next(iter(self._tenants.items()))
            if now_s - known.last_s <= ACTIVE_S:
                break
            del self._tenants[tenant]
        found: dict[str, float] = {}
        for known in self._tenants.values():
            rate = known.rate.per_s(now_s)
            for model, chance in known.next():
                found[model] = found.get(model, 0.0) + rate * chance
        return found
