"""Fetching a cached prefix: only where moving it beats computing it, and beats waiting for who has it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from quartet_core.affinity import rows_of
from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.plan import Reason
from quartet_core.policy.fetching import FETCH_TOKENS, GAIN
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, free_kv_level, pack, queue_level

_spec = importlib.util.spec_from_file_location("fleets", Path(__file__).parents[2] / "perf" / "fleets.py")
fleets = sys.modules.get("fleets") or importlib.util.module_from_spec(_spec)
if "fleets" not in sys.modules:
    sys.modules["fleets"] = fleets
    _spec.loader.exec_module(fleets)

KV_BYTES = 131_072  # of llama-3.1-8b, a token
PROMPT = [(7 * i) % 100_000 for i in range(16_000)]


def fleet(gb_per_s=46.6, *hardware, **more):
    """Workers on nodes of their own, links of ``gb_per_s`` between all of them (0: no coordinator told of any)."""
    links = LinkBook(500.0)
    if gb_per_s:
        links.hear(1, "k", 0.0)
    routing = fleets.routing([], links=links)
    hardware = hardware or ("H100_SXM5", "H100_SXM5")
    for number, name in enumerate(hardware):
        routing.learn(f"n{number}", [fleets.facts(f"w{number}", name, **more)], 0.0, {"RDMA_ROCE": 46.6})
    if gb_per_s:
        for a in range(len(hardware)):
            for b in range(len(hardware)):
                links.put(f"n{a}", f"n{b}", PricedLink("RDMA_ROCE", gb_per_s, 0.4, 0))
    return routing


def word(routing, number, *, queue=0.0, batch=0, accepting=True, free=1.0):
    told = pack(
        free_kv=free_kv_level(free), queue=queue_level(queue), batch=batch_level(batch), drift=0, accepting=accepting
    )
    routing.hear("c", f"w{number}", 1, told, 1, Verdict.UP, 0.0)


def hold(routing, slot, tokens=PROMPT):
    for rung in fleets.ask(tokens).sketch.rungs:
        routing.affinity.turn_on(slot, rows_of(rung, 1 << 17, 4))


def ask(**more):
    return fleets.ask(PROMPT, **({"plans_fetch": True} | more))


def test_the_prefix_of_a_busy_holder_is_moved_to_an_idle_worker():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    decision = routing.decide(ask())
    plan = decision.plan
    assert decision.reason is Reason.FETCH
    assert (plan.source, plan.prefill, plan.decode, plan.split) == (0, 1, 1, False)
    assert plan.fetched_tokens % 16 == 0
    assert 16_000 - 16_000 // 8 <= plan.fetched_tokens < 16_000
    assert plan.kv_bytes == plan.fetched_tokens * KV_BYTES
    assert plan.kv_ms == pytest.approx(0.4 + plan.kv_bytes / 46.6e6, rel=1e-6)
    kind = routing.fleet.at(1).kind
    assert plan.prefill_ms == pytest.approx(kind.profile.prefill_ms(plan.fetched_tokens, 16_000 - plan.fetched_tokens))
    # half a chunk of the holder's, the transfer, the rest of the prompt: no decode runs at the target
    lender = routing.board.loads[0]
    lent_ms = 0.5 * lender.drift * (lender.step_ms + kind.profile.prefill_ms(0, 2048))
    assert plan.ttft_ms == pytest.approx(lent_ms + plan.kv_ms + plan.prefill_ms)
    assert plan.fetch_wait_ms == pytest.approx(kind.profile.prefill_ms(0, 16_000) - plan.prefill_ms)
    without = decision.considered[1]
    assert plan.cost < without.cost
    assert plan.ttft_ms < GAIN * without.ttft_ms


def test_an_idle_holder_keeps_its_conversation():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, batch=2)
    decision = routing.decide(ask())
    assert (decision.reason, decision.plan.prefill, decision.plan.fetches) == (Reason.BEST, 0, False)


@pytest.mark.parametrize("gb_per_s", [0.0, 1.0, 2.0])
def test_over_a_slow_link_or_none_it_is_computed(gb_per_s):
    routing = fleet(gb_per_s)
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    plan = routing.decide(ask()).plan
    assert (plan.prefill, plan.fetches) == (1, False)


def test_the_crossover_is_where_moving_takes_as_long_as_computing():
    """Wherever it fetches, moving is quicker than computing; wherever that is clearly so, it fetches."""
    found = {}
    for gb_per_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        routing = fleet(gb_per_s)
        hold(routing, 0)
        word(routing, 0, queue=900.0, batch=20)
        found[gb_per_s] = routing.decide(ask()).plan
    fetches = [plan.fetches for plan in found.values()]
    assert fetches == sorted(fetches)
    assert not fetches[0]
    assert fetches[-1]
    profile = routing.fleet.at(1).kind.profile
    computed_ms = profile.prefill_ms(0, 14_000)
    for gb_per_s, plan in found.items():
        moved_ms = 0.4 + 14_000 * KV_BYTES / (gb_per_s * 1e6)
        if plan.fetches:
            assert moved_ms < computed_ms
        elif moved_ms < 0.3 * computed_ms:
            raise AssertionError(f"{moved_ms} ms to move against {computed_ms} ms to compute, and not moved")


def test_what_is_in_flight_on_the_link_counts():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    routing.links.put("n0", "n1", PricedLink("RDMA_ROCE", 46.6, 0.4, 100_000_000_000))
    assert not routing.decide(ask()).plan.fetches


def test_it_is_not_thought_of_without_a_coordinator():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    assert not routing.decide(ask(plans_fetch=False)).plan.fetches


def test_a_short_prefix_is_not_worth_it():
    routing = fleet()
    hold(routing, 0, PROMPT[: FETCH_TOKENS - 64])
    word(routing, 0, queue=900.0, batch=20)
    assert not routing.decide(ask()).plan.fetches


def test_layouts_that_differ_are_never_paired():
    links = LinkBook(500.0)
    links.hear(1, "k", 0.0)
    routing = fleets.routing([], links=links)
    for number, version in enumerate(("1", "2")):
        worker = fleets.facts(f"w{number}", "H100_SXM5", engine_version=version)
        routing.learn(f"n{number}", [worker], 0.0, {"RDMA_ROCE": 46.6})
    links.put("n0", "n1", PricedLink("RDMA_ROCE", 46.6, 0.4, 0))
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    plan = routing.decide(ask()).plan
    assert (plan.prefill, plan.fetches) == (1, False)


def test_what_the_target_holds_itself_is_told_and_shortens_the_wait():
    routing = fleet()
    hold(routing, 0)
    hold(routing, 1, PROMPT[:4_000])
    word(routing, 0, queue=900.0, batch=20)
    plan = routing.decide(ask()).plan
    assert plan.fetches
    assert 3_000 < plan.cached_tokens <= 4_000
    profile = routing.fleet.at(1).kind.profile
    assert plan.fetch_wait_ms == pytest.approx(
        profile.prefill_ms(plan.cached_tokens, 16_000 - plan.cached_tokens) - plan.prefill_ms
    )


def test_targets_are_spread_over_equals():
    routing = fleet(46.6, *["H100_SXM5"] * 5)
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    assert {routing.decide(ask()).plan.prefill for _ in range(4)} == {1, 2, 3, 4}


def test_a_busy_target_with_a_fetched_prefix_may_still_be_waited_for():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, queue=6_000.0, batch=60)
    word(routing, 1, queue=1_500.0)
    decision = routing.decide(ask())
    assert decision.plan.fetches
    assert (decision.hold, decision.reason) == (True, Reason.HELD)
    assert decision.plan.ttft_ms >= routing.board.loads[1].wait_ms


def test_the_lenders_entry_in_the_ledger_weighs_nothing():
    routing = fleet()
    hold(routing, 0)
    word(routing, 0, queue=900.0, batch=20)
    request = ask()
    plan = routing.decide(request).plan
    known = ("t", "earlier", 1, 1, "w0", 1)  # a worker that had work of ours: its load is no mere level any more
    routing.opened(known, 0, prefill_ms=1.0, tokens=1, decodes=False, tpot_ms=60.0, total_ms=1.0, now_ms=0.0)
    routing.ended(known, 0, 0.0)
    before = routing.board.loads[0]
    keys = {slot: ("t", "r", 1, 1, f"w{slot}", 1) for slot in (1, 0)}
    routing.sent(keys, plan, request, 0.0)
    after = routing.board.loads[0]
    assert (after.queue_ms, after.batch) == (before.queue_ms, before.batch)
    assert routing.board.loads[1].queue_ms == pytest.approx(plan.prefill_ms)
    for key in keys.values():
        routing.ended(key, 0, 1.0)
    assert len(routing.ledger) == 0


def with_store(gb_per_s=46.6, **more):
    """One H100, and a store in another node's memory that has the prompt."""
    routing = fleet(gb_per_s, "H100_SXM5", **more)
    routing.learn("s", [fleets.facts("s0", "L40S_PCIE", role="store", kv_tokens=200_000)], 0.0, {"RDMA_ROCE": 46.6})
    routing.links.put("s", "n0", PricedLink("RDMA_ROCE", gb_per_s, 0.4, 0))
    hold(routing, routing.fleet.slot_of("s0"))
    return routing


def test_a_store_lends_at_once_and_any_gain_will_do():
    plan = with_store().decide(ask()).plan
    assert (plan.source, plan.prefill, plan.decode) == (1, 0, 0)
    assert plan.ttft_ms == pytest.approx(plan.kv_ms + plan.prefill_ms)


@pytest.mark.parametrize("gb_per_s", [0.2, 1.0])
def test_over_a_slow_link_a_store_is_left_alone(gb_per_s):
    assert not with_store(gb_per_s).decide(ask()).plan.fetches


def test_a_store_is_never_asked_to_compute_and_serves_no_model_alone():
    routing = with_store()
    word(routing, 0, accepting=False)
    assert routing.decide(ask()).reason is Reason.ALL_BUSY
    alone = fleet(46.6, "H100_SXM5")
    alone.learn("n0", [], 0.0, {})
    alone.learn("s", [fleets.facts("s0", "H100_SXM5", role="store")], 0.0, {})
    assert alone.decide(ask()).reason is Reason.NO_WORKER
    assert alone.longest_context(fleets.MODEL) == 0


def test_a_dead_cordoned_or_leaving_store_lends_nothing_and_comes_back_empty():
    for change in ("dead", "cordoned", "leaving", "gone"):
        routing = with_store()
        told = fleets.facts("s0", "L40S_PCIE", role="store", kv_tokens=200_000, cordoned=change == "cordoned")
        if change in ("dead", "leaving"):
            verdict = Verdict.DEAD if change == "dead" else Verdict.UP
            told_word = pack(free_kv=15, queue=0, batch=0, drift=0, accepting=change == "dead")
            routing.hear("c", "s0", 1, told_word, 1, verdict, 0.0)
        else:
            routing.learn("s", [] if change == "gone" else [told], 0.0, {"RDMA_ROCE": 46.6})
        assert not routing.decide(ask()).plan.fetches, change
        if change == "gone":
            while routing.sweeping:
                routing.sweep()
            routing.learn("s", [told], 0.0, {"RDMA_ROCE": 46.6})
            assert not routing.decide(ask()).plan.fetches


def test_long_prompts_are_fetched_from_stores_too():
    routing = with_store()
    routing._filters._long_prompt_tokens = routing._filters._least_long_tokens = 4096
    assert routing.decide(ask()).plan.fetches


def test_a_page_comes_back_from_an_l40s_to_an_h100_where_that_pays_and_is_used_in_place_where_not():
    def decided(gb_per_s, queue_ms, h100_queue_ms=0.0):
        routing = fleet(gb_per_s, "H100_SXM5", "L40S_PCIE")
        hold(routing, 1)
        word(routing, 0, queue=h100_queue_ms, batch=20 if h100_queue_ms else 0)
        word(routing, 1, queue=queue_ms, batch=4 if queue_ms else 0)
        plan = routing.decide(ask()).plan
        return plan.prefill, plan.fetches

    assert decided(46.6, 900.0) == (0, True)
    assert decided(0.5, 900.0) == (0, False), "computed on the H100: the link is slow"
    assert decided(46.6, 0.0, 900.0) == (1, False), "used in place: the H100 is busy"
