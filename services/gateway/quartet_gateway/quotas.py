"""What tenants may use in a minute: this gateway's part of every limit, and what admitted requests hold of it."""

import math
from collections.abc import Callable, Mapping

from msgspec import structs

from quartet_bus.config.schema import LimitSection
from quartet_bus.messages import QuotaClaim, TenantClaim
from quartet_core.quota import Claim, Quota
from quartet_gateway.errors import too_many_per_minute, too_many_tokens_at_once

_NOTHING = Claim(0, 0, 0, 0)

MAX_TOLD = 4096
"""Tenants of whom one word to the other gateways tells, those with most use: some 400 kB, which any broker takes."""

Claims = Mapping[str, Mapping[str, TenantClaim]]
"""What the other gateways claim, by gateway and tenant."""


class Grant:
    """What an admitted request holds of its tenant's token limit, until it is ``settle``d."""

    __slots__ = ("_asked", "_at_s", "_quota")

    def __init__(self, quota: Quota, asked: int, at_s: int) -> None:
        self._quota = quota
        self._asked = asked
        self._at_s = at_s

    def settle(self, used_tokens: int, now_s: int) -> None:
        """The request has ended, and came to ``used_tokens``. Call it once."""
        self._quota.settle(used_tokens, self._asked, self._at_s, now_s)


class Quotas:
    """The limits of all tenants as the gateway ``name`` keeps them. Times are whole seconds of one steady clock.

    ``on_first`` is called when a tenant's quota comes into use, whose part must be told to the others at once.
    """

    def __init__(
        self, name: str, limits: Mapping[str, LimitSection], default: LimitSection, on_first: Callable[[], None]
    ) -> None:
        self.name = name
        self._on_first = on_first
        self._limits = limits
        self._default = default
        self._requests: dict[str, Quota] = {}
        self._tokens: dict[str, Quota] = {}
        self._others: Claims = {}
        self._fresh: set[str] = set()
        """Tenants whose first request is being looked at."""

    def replace(self, limits: Mapping[str, LimitSection]) -> None:
        """New limits, from now on. What was used in the last minute still counts."""
        self._limits = limits
        for quotas, field in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            for tenant, quota in list(quotas.items()):
                limit = getattr(self._limits.get(tenant, self._default), field)
                if limit:
                    quota.limit = limit
                else:
                    del quotas[tenant]

    def admit_request(self, tenant: str, now_s: int) -> None:
        """Count one request. Raises ``Refused`` (429) when the minute is full."""
        quota = self._of(self._requests, tenant, "requests_per_minute", now_s)
        if quota is None:
            return
        wait_s = quota.ask(1, now_s)
        if wait_s is not None:
            raise too_many_per_minute("requests", tenant, quota.limit, 1, wait_s)

    def admit_tokens(self, tenant: str, prompt_tokens: int, output_tokens: int, now_s: int) -> Grant | None:
        """Hold what a request may come to; None for a tenant without a limit.

        Raises ``Refused`` (429) when the minute is full, or when the prompt alone is more than any minute may have.
        """
        quota = self._of(self._tokens, tenant, "tokens_per_minute", now_s)
        if quota is None:
            return None
        if prompt_tokens > quota.limit:
            raise too_many_tokens_at_once(tenant, quota.limit, prompt_tokens)
        asked = min(prompt_tokens + output_tokens, quota.limit)
        wait_s = quota.ask(asked, now_s)
        if wait_s is not None:
            raise too_many_per_minute("tokens", tenant, quota.limit, asked, wait_s)
        return Grant(quota, asked, now_s)

    def headers(self, tenant: str, now_s: int) -> dict[str, str]:
        """The ``x-ratelimit-…`` headers of an answer, as OpenAI has them; none for a tenant without limits."""
        said: dict[str, str] = {}
        for what, quota in (("requests", self._requests.get(tenant)), ("tokens", self._tokens.get(tenant))):
            if quota is not None:
                said[f"x-ratelimit-limit-{what}"] = str(quota.limit)
                said[f"x-ratelimit-remaining-{what}"] = str(quota.remaining(now_s))
                said[f"x-ratelimit-reset-{what}"] = f"{math.ceil(quota.full_after_s(now_s))}s"
        return said

    def turn(self, others: Claims, now_s: int) -> dict[str, TenantClaim]:
        """Take this gateway's part for the coming second; ``others`` are the gateways that live besides it."""
        self._others = others
        claims: dict[str, TenantClaim] = {}
        for tenant in self._requests.keys() | self._tokens.keys():
            requests, tokens = (
                _NOTHING if (quota := quotas.get(tenant)) is None else quota.turn(self._claims(tenant, field), now_s)
                for quotas, field in ((self._requests, "requests"), (self._tokens, "tokens"))
            )
            claims[tenant] = TenantClaim(QuotaClaim(*structs.astuple(requests)), QuotaClaim(*structs.astuple(tokens)))
        self._forget(claims)
        if len(claims) <= MAX_TOLD:
            return claims
        by_use = sorted(claims, key=lambda tenant: -claims[tenant].tokens.asked - claims[tenant].requests.asked)
        return {tenant: claims[tenant] for tenant in by_use[:MAX_TOLD]}

    def _forget(self, claims: dict[str, TenantClaim]) -> None:
        """Leave out the tenants of whom nothing was heard for a minute."""
        silent = [tenant for tenant, claim in claims.items() if not (claim.requests.asked or claim.tokens.asked)]
        for tenant in silent:
            if tenant not in self._fresh:
                self._requests.pop(tenant, None)
                self._tokens.pop(tenant, None)
                del claims[tenant]
        self._fresh.clear()

    def _of(self, quotas: dict[str, Quota], tenant: str, field: str, now_s: int) -> Quota | None:
        quota = quotas.get(tenant)
        if quota is None:
            limit = getattr(self._limits.get(tenant, self._default), field)
            if not limit:
                return None
            quota = quotas[tenant] = Quota(self.name, limit)
            self._fresh.add(tenant)
            self._on_first()
        return quota

    def _claims(self, tenant: str, field: str) -> dict[str, Claim]:
        claims: dict[str, Claim] = {}
        for gateway, told in self._others.items():
            claim = told.get(tenant)
            claims[gateway] = _NOTHING if claim is None else Claim(*structs.astuple(getattr(claim, field)))
        return claims
