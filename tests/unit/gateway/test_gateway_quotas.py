"""Quotas and peers of one gateway, without a bus."""

import pytest

from quartet_bus.config.schema import LimitSection
from quartet_bus.messages import GatewayLife, QuotaClaim, TenantClaim
from quartet_core.openai import Refused
from quartet_gateway.peers import Peers
from quartet_gateway.quotas import MAX_TOLD, Quotas


class Gateway:
    """Quotas that take their turn when a tenant is first heard of, as a gateway's do."""

    def __init__(self, others=None, **limits: int) -> None:
        self.others = others or {}
        self.turns = 0
        self.quotas = Quotas("g", {"acme": LimitSection(**limits)}, LimitSection(), self.turn)

    def turn(self, now_s: int = 0) -> dict[str, TenantClaim]:
        self.turns += 1
        return self.quotas.turn(self.others, now_s)


def refused(admit, *arguments: object) -> Refused:
    with pytest.raises(Refused) as error:
        admit(*arguments)
    return error.value


def test_a_tenant_without_a_limit_is_never_counted():
    gateway = Gateway(requests_per_minute=1)
    for _ in range(5):
        gateway.quotas.admit_request("beta", 0)
        assert gateway.quotas.admit_tokens("beta", 10**9, 10**9, 0) is None
    assert gateway.quotas.headers("beta", 0) == {}
    assert gateway.turns == 0


def test_a_first_request_is_told_to_the_others_at_once_and_a_minute_of_silence_forgets_the_tenant():
    gateway = Gateway(requests_per_minute=3)
    gateway.quotas.admit_request("acme", 100)
    assert gateway.turns == 1
    assert gateway.turn(101)["acme"].requests.used == 1
    assert gateway.turn(200) == {}
    gateway.quotas.admit_request("acme", 201)
    assert gateway.turns == 4


def test_what_another_gateway_claims_is_not_there_to_be_used():
    others = {"h": {"acme": TenantClaim(QuotaClaim(used=6, taken=3, asked=9))}}
    gateway = Gateway(others, requests_per_minute=10)
    error = refused(gateway.quotas.admit_request, "acme", 0)  # one is left, and asked for by the other
    assert (error.status, error.retry_after_s) == (429, 1.0)
    gateway.turn(1)
    gateway.turn(2)
    gateway.quotas.admit_request("acme", 2)
    assert refused(gateway.quotas.admit_request, "acme", 2).status == 429


def test_of_more_tenants_than_a_message_should_carry_those_with_most_use_are_told():
    gateway = Gateway()
    gateway.quotas.replace({f"t{number}": LimitSection(requests_per_minute=9) for number in range(MAX_TOLD + 10)})
    gateway.quotas._on_first = lambda: None  # a turn for each of them would take its time
    for number in range(MAX_TOLD + 10):
        for _ in range(2 if number < 5 else 1):
            gateway.quotas.admit_request(f"t{number}", 0)
    told = gateway.turn(1)
    assert len(told) == MAX_TOLD
    assert all(told[f"t{number}"].requests.used == 2 for number in range(5))


def test_limits_that_change_count_what_was_used_before():
    gateway = Gateway(requests_per_minute=5)
    for _ in range(4):
        gateway.quotas.admit_request("acme", 0)
    gateway.quotas.replace({"acme": LimitSection(requests_per_minute=4)})
    assert refused(gateway.quotas.admit_request, "acme", 1).body.code == "rate_limit_exceeded"
    gateway.quotas.replace({})
    gateway.quotas.admit_request("acme", 1)


def test_a_gateway_that_falls_silent_or_leaves_is_no_peer_and_its_own_echo_is_none():
    peers = Peers("me", silence_ns=10)
    assert not peers.heard(GatewayLife("me"), 0)
    assert peers.heard(GatewayLife("you"), 0)
    assert not peers.heard(GatewayLife("you", {"t": TenantClaim()}), 5)
    assert peers.alive(15) == {"you": {"t": TenantClaim()}}
    assert peers.alive(16) == {}
    peers.heard(GatewayLife("you"), 20)
    assert peers.heard(GatewayLife("you", leaving=True), 21)
    assert not peers.heard(GatewayLife("you", leaving=True), 22)
    assert peers.alive(22) == {}
