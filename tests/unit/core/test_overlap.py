"""What is left of a transfer when its prefill ends, where KV leaves as it is computed; and where that is priced."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.links import choose, crossing_ms, left_after_prefill_ms
from quartet_core.pairing import OVERLAP
from quartet_core.plan import Reason
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, free_kv_level, pack

_spec = importlib.util.spec_from_file_location("fleets", Path(__file__).parents[2] / "perf" / "fleets.py")
fleets = sys.modules.get("fleets") or importlib.util.module_from_spec(_spec)
if "fleets" not in sys.modules:
    sys.modules["fleets"] = fleets
    _spec.loader.exec_module(fleets)

CAPABILITIES = ("export", "import", "reserve")
KV_BYTES = 327_680  # of llama-3.1-70b, a token
PROMPT = list(range(14_000))
FIRST, LAST = 2_048, 14_000 % 2_048


@given(
    st.floats(0.1, 1_000.0),  # what the whole takes on the link
    st.floats(0.1, 100.0),  # what a chunk takes to compute
    st.integers(1, 40),
    st.floats(0.01, 1.0),  # the last chunk, beside a full one
    st.floats(0.0, 5.0),  # what was cached, in chunks: it leaves with the first
)
def test_what_is_left_is_what_a_link_that_works_off_each_chunk_has_left(move_ms, chunk_ms, chunks, last, cached):
    parts = [1.0] * (chunks - 1) + [last]
    parts[0] += cached
    whole = sum(parts)
    free_ms = 0.0
    for number, part in enumerate(parts, 1):
        free_ms = max(free_ms, number * chunk_ms) + move_ms * part / whole
    left_ms = free_ms - chunks * chunk_ms
    expected = left_after_prefill_ms(move_ms, parts[-1] / whole, (chunks - 1) * chunk_ms)
    assert left_ms == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.floats(0.0, 1e4), st.floats(0.0, 1.0), st.floats(0.0, 1e4))
def test_it_is_never_more_than_all_and_never_less_than_the_last_chunks_part(move_ms, last_share, meanwhile_ms):
    left_ms = left_after_prefill_ms(move_ms, last_share, meanwhile_ms)
    assert move_ms * last_share <= left_ms <= move_ms


def pair(gb_per_s, *capabilities, margin=1.0):
    """A prefill half and a decode half of a 70B on nodes of their own."""
    links = LinkBook(500.0)
    links.hear(1, "k", 0.0)
    routing = fleets.routing([], links=links, split_margin=margin)
    for name, role, hardware in (("p", "prefill", "H100_SXM5"), ("d", "decode", "H100_SXM5")):
        facts = fleets.facts(name, hardware, "llama-3.1-70b", tp=4, role=role, capabilities=capabilities)
        routing.learn(f"n-{name}", [facts], 0.0, {"RDMA_ROCE": 46.6})
    links.put("n-p", "n-d", PricedLink("RDMA_ROCE", gb_per_s, 0.4, 0))
    return routing


def split_of(routing):
    decision = routing.decide(fleets.ask(PROMPT, model="llama-3.1-70b", plans_split=True))
    assert decision.reason is Reason.SPLIT
    return decision.plan


@pytest.mark.parametrize("gb_per_s", [46.6, 2.0])
def test_an_engine_that_does_not_say_that_it_overlaps_is_priced_with_all_of_the_transfer_after_its_prefill(gb_per_s):
    plan = split_of(pair(gb_per_s, *CAPABILITIES))
    assert plan.kv_wait_ms == plan.kv_ms == pytest.approx(0.4 + len(PROMPT) * KV_BYTES / (gb_per_s * 1e6))


def test_on_a_quick_link_the_last_chunks_part_is_left():
    routing = pair(46.6, *CAPABILITIES, OVERLAP)
    plan, before = split_of(routing), split_of(pair(46.6, *CAPABILITIES))
    assert plan.kv_ms == before.kv_ms
    assert plan.kv_wait_ms == pytest.approx(plan.kv_ms * LAST / len(PROMPT))
    assert before.ttft_ms - plan.ttft_ms == pytest.approx(plan.kv_ms - plan.kv_wait_ms)


def test_on_a_slow_link_what_did_not_fit_beside_the_prefill_is_left():
    routing = pair(2.0, *CAPABILITIES, OVERLAP)
    plan = split_of(routing)
    meanwhile_ms = routing.fleet.at(0).kind.profile.prefill_ms(FIRST, len(PROMPT) - FIRST)
    assert plan.kv_wait_ms == pytest.approx(plan.kv_ms - meanwhile_ms)
    assert plan.kv_wait_ms > plan.kv_ms * LAST / len(PROMPT)


def test_a_prompt_of_one_chunk_leaves_nothing_to_overlap():
    routing = pair(46.6, *CAPABILITIES, OVERLAP)
    plan = routing.decide(fleets.ask(PROMPT[:2_000], model="llama-3.1-70b", plans_split=True)).plan
    assert plan.split
    assert plan.kv_wait_ms == plan.kv_ms


def crowded(margin, batch):
    """One worker that can do all of it and has others to answer, and one beside it that only decodes."""
    links = LinkBook(500.0)
    links.hear(1, "k", 0.0)
    routing = fleets.routing([], links=links, split_margin=margin)
    for name, role in (("w", "both"), ("d", "decode")):
        facts = fleets.facts(name, "H100_SXM5", "llama-3.1-70b", tp=4, role=role, capabilities=(*CAPABILITIES, OVERLAP))
        routing.learn(f"n-{name}", [facts], 0.0, {"RDMA_ROCE": 46.6})
    told = pack(free_kv=free_kv_level(1.0), queue=0, batch=batch_level(batch), drift=0, accepting=True)
    routing.hear("c", "w", 1, told, 1, Verdict.UP, 0.0)
    return routing


@pytest.mark.parametrize("batch", range(0, 257, 32))
@pytest.mark.parametrize("margin", [1.0, 0.7, 0.3])
def test_a_split_costs_less_than_the_margins_share_of_the_best_plan_for_one_worker(batch, margin):
    asked = {"model": "llama-3.1-70b", "tpot_ms": 60.0, "output_tokens": 400.0}
    whole = crowded(margin, batch).decide(fleets.ask(PROMPT[:3_000], plans_split=False, **asked)).plan
    free = crowded(1.0, batch).decide(fleets.ask(PROMPT[:3_000], plans_split=True, **asked)).plan
    plan = crowded(margin, batch).decide(fleets.ask(PROMPT[:3_000], plans_split=True, **asked)).plan
    assert plan.split is (free.split and free.cost < margin * whole.cost)


def test_where_no_worker_may_do_all_no_margin_is_asked():
    assert split_of(pair(0.5, *CAPABILITIES, margin=0.1)).split


def test_moving_or_computing_counts_what_both_have_to_wait_for():
    profile = fleets.catalogue.builtin().profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)
    move_ms = crossing_ms(1.0, 0.4, 4_096 * 131_072)
    compute_ms = choose(move_ms, profile, 0, 4_096).recompute_ms
    tie_ms = move_ms - compute_ms
    assert tie_ms > 0.0  # on this link computing is quicker, until it has to wait
    assert not choose(move_ms, profile, 0, 4_096, wait_ms=tie_ms - 0.1).move
    assert choose(move_ms, profile, 0, 4_096, wait_ms=tie_ms + 0.1).move
    assert not choose(move_ms, profile, 0, 4_096, wait_ms=tie_ms + 0.1, lend_ms=0.2).move
    choice = choose(move_ms, profile, 0, 4_096, 2.0, wait_ms=5.0, lend_ms=3.0)
    assert (choice.move_ms, choice.recompute_ms) == pytest.approx((move_ms + 3.0, 2 * compute_ms + 5.0))
