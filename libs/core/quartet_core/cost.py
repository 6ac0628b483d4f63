"""What tokens cost: GPU time, money and energy per tenant, model and hardware class.

A second of a GPU costs its price whether it works or waits, so both are counted and told apart: the busy part is what
a request caused, the whole is what the fleet pays.
"""

from collections.abc import Mapping

from msgspec import Struct, structs

from quartet_core.catalogue import HardwareClass, UnknownProfile

OTHER = "other"
"""Tenant and model under which a full ledger counts whatever is new."""


class TokenCost(Struct, frozen=True, kw_only=True):
    """One row of the ledger: what a tenant's use of a model on a class has cost so far.

    ``prompt_tokens`` counts all of the prompt, ``cached_tokens`` those of it that no GPU computed. ``busy_usd`` is the
    busy GPU time at the class's price, ``usd`` busy and idle; ``energy_j`` counts busy time at TDP and idle time at
    idle power: an upper bound, as a decoding card stays below its TDP.
    """

    tenant: str
    model: str
    hardware: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_gpu_s: float = 0.0
    idle_gpu_s: float = 0.0
    busy_usd: float = 0.0
    usd: float = 0.0
    energy_j: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens

    @property
    def usd_per_million_output(self) -> float | None:
        """USD per million output tokens, idle time included; None before the first token."""
        return self.usd / self.output_tokens * 1e6 if self.output_tokens else None

    @property
    def usd_per_million_total(self) -> float | None:
        """USD per million prompt and output tokens, idle time included; None before the first token."""
        return self.usd / self.total_tokens * 1e6 if self.total_tokens else None

    @property
    def busy_usd_per_million_output(self) -> float | None:
        """The same from busy time alone: what a token costs on a fleet that is never idle."""
        return self.busy_usd / self.output_tokens * 1e6 if self.output_tokens else None

    @property
    def utilisation(self) -> float | None:
        """Share of the paid GPU time that was busy; None when none was paid."""
        paid_s = self.busy_gpu_s + self.idle_gpu_s
        return self.busy_gpu_s / paid_s if paid_s > 0 else None


class CostLedger:
    """Adds up `TokenCost` rows at the prices and powers of ``hardware``.

    Holds at most ``max_rows`` rows, and one more per class, called `OTHER`, for all that comes after: no tenant can
    make it grow without end, and no cost is lost.
    """

    __slots__ = ("_hardware", "_rows", "max_rows")

    def __init__(self, hardware: Mapping[str, HardwareClass], max_rows: int = 10_000) -> None:
        self._hardware = hardware
        self._rows: dict[tuple[str, str, str], TokenCost] = {}
        self.max_rows = max_rows

    def add(
        self,
        model: str,
        hardware: str,
        *,
        tenant: str = "",
        requests: int = 0,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        busy_gpu_s: float = 0.0,
        idle_gpu_s: float = 0.0,
    ) -> None:
        """Count work, or paid idle time (a worker's own: ``tenant`` "").

        GPU seconds are over all cards: a second of a TP4 worker is four. Raises `UnknownProfile` for a class without a
        price and ``ValueError`` for anything negative.
        """
        card = self._hardware.get(hardware)
        if card is None:
            raise UnknownProfile(f"hardware class {hardware}", tuple(sorted(self._hardware)))
        if min(requests, prompt_tokens, cached_tokens, output_tokens, busy_gpu_s, idle_gpu_s) < 0:
            raise ValueError("costs only ever grow")
        key = (tenant, model, hardware)
        if key not in self._rows and len(self._rows) >= self.max_rows:
            key = (OTHER, OTHER, hardware)
        usd_per_s = card.price_per_hour / 3600.0
        more = TokenCost(
            tenant=key[0],
            model=key[1],
            hardware=hardware,
            requests=requests,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            busy_gpu_s=busy_gpu_s,
            idle_gpu_s=idle_gpu_s,
            busy_usd=busy_gpu_s * usd_per_s,
            usd=(busy_gpu_s + idle_gpu_s) * usd_per_s,
            energy_j=busy_gpu_s * card.tdp_w + idle_gpu_s * card.idle_w,
        )
        known = self._rows.get(key)
        self._rows[key] = more if known is None else _sum(known, more)

    def rows(self) -> list[TokenCost]:
        """All rows, by tenant, model and class."""
        return [self._rows[key] for key in sorted(self._rows)]

    def by_model_and_class(self) -> list[TokenCost]:
        """The rows added up over tenants, idle time with them: what a model's tokens cost on a class."""
        sums: dict[tuple[str, str], TokenCost] = {}
        for row in self._rows.values():
            key = (row.model, row.hardware)
            known = sums.get(key)
            sums[key] = structs.replace(row, tenant="") if known is None else _sum(known, row)
        return [sums[key] for key in sorted(sums)]


def _sum(row: TokenCost, more: TokenCost) -> TokenCost:
    """``row`` with everything that is counted in ``more`` added."""
    return TokenCost(
        tenant=row.tenant,
        model=row.model,
        hardware=row.hardware,
        requests=row.requests + more.requests,
        prompt_tokens=row.prompt_tokens + more.prompt_tokens,
        cached_tokens=row.cached_tokens + more.cached_tokens,
        output_tokens=row.output_tokens + more.output_tokens,
        busy_gpu_s=row.busy_gpu_s + more.busy_gpu_s,
        idle_gpu_s=row.idle_gpu_s + more.idle_gpu_s,
        busy_usd=row.busy_usd + more.busy_usd,
        usd=row.usd + more.usd,
        energy_j=row.energy_j + more.energy_j,
    )
