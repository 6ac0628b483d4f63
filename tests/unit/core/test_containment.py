"""Containment: long prefills keep to a share of the workers while there are others to protect."""

import importlib.util
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.affinity import rows_of
from quartet_core.ledger import Ledger
from quartet_core.plan import FILTERS, Reason
from quartet_core.planes import slots

_spec = importlib.util.spec_from_file_location("fleets", Path(__file__).parents[2] / "perf" / "fleets.py")
fleets = importlib.util.module_from_spec(_spec)
sys.modules["fleets"] = fleets
_spec.loader.exec_module(fleets)

LONG = 60_000  # tokens: some 2.5 s on an H100, more than a second
SLOT = 3


def fleet(count=4, *, share=0.5, long_ms=1_000.0, hardware="H100_SXM5"):
    workers = [fleets.facts(f"w{number}", hardware) for number in range(count)]
    return fleets.routing(workers, long_prefill_ms=long_ms, long_prefill_share=share)


def ask(tokens, seed, at_ms=0.0):
    made = fleets.ask([(seed * 1_000_003 + i) % 100_000 for i in range(tokens)])
    made.at_ms = at_ms
    return made


def send(routing, number, tokens, at_ms=0.0):
    """Decide and dispatch; return (slot, the decision)."""
    asked = ask(tokens, number, at_ms)
    decision = routing.decide(asked)
    plan = decision.plan
    routing.sent({plan.prefill: ("t", f"r{number}", 1, 1, f"w{plan.prefill}", 1)}, plan, asked, at_ms)
    return plan.prefill, decision


def test_no_more_than_the_share_of_the_workers_have_long_prefills_ahead():
    routing = fleet(4)
    send(routing, 0, 100)
    places = [send(routing, number, LONG) for number in range(1, 9)]
    assert len({slot for slot, _ in places}) == 2
    assert routing.ledger.long.bit_count() == 2
    assert dict(zip(FILTERS, places[-1][1].left, strict=False))["contained"] == 2
    assert len(places[0][1].left) == len(FILTERS) - 1
    taken = routing.ledger.long
    assert all(not taken >> send(routing, number, 300)[0] & 1 for number in range(10, 30))


def test_a_worker_that_computed_its_long_prefill_is_free_of_it():
    routing = fleet(4)
    send(routing, 0, 100)
    slot, _ = send(routing, 1, LONG)
    key = ("t", "r1", 1, 1, f"w{slot}", 1)
    routing.accepted(key, 1, 0.0)
    assert routing.ledger.long == 1 << slot
    routing.prefilled(key, 2, 0.0)
    assert routing.ledger.long == 0


def test_one_worker_may_always_have_one():
    routing = fleet(1, share=0.1)
    send(routing, 0, 100)
    assert [send(routing, number, LONG)[0] for number in (1, 2)] == [0, 0]


def test_where_nobody_else_is_to_be_protected_nothing_is_contained():
    routing = fleet(4)
    assert len({send(routing, number, LONG)[0] for number in range(4)}) == 4


def test_others_are_protected_for_ten_seconds_after_they_were_last_seen():
    routing = fleet(4)
    send(routing, 0, 100, at_ms=1_000.0)
    assert len({send(routing, number, LONG, at_ms=11_000.0)[0] for number in range(1, 5)}) == 2
    assert len({send(routing, number, LONG, at_ms=11_001.0)[0] for number in range(5, 13)}) == 4


def test_who_has_most_of_the_prompt_cached_may_take_it():
    routing = fleet(4)
    send(routing, 0, 100)
    for number in range(1, 4):
        send(routing, number, LONG)
    free = next(slots(((1 << 4) - 1) ^ routing.ledger.long))
    warm = ask(LONG, 99)
    for rung in warm.sketch.rungs:
        routing.affinity.turn_on(free, rows_of(rung, fleets.AFFINITY_ROWS, fleets.AFFINITY_HASHES))
    assert routing.decide(warm).plan.prefill == free


def test_the_last_candidate_is_never_taken_out():
    routing = fleet(3, share=0.34)
    send(routing, 0, 100)
    slot, _ = send(routing, 1, LONG)
    refused = ask(LONG, 2)
    refused.excluded = 1 << slot
    assert routing.decide(refused).plan is not None


def test_share_one_contains_nothing_and_costs_nothing():
    routing = fleet(4, share=1.0)
    send(routing, 0, 100)
    assert len({send(routing, number, LONG)[0] for number in range(1, 5)}) == 4
    assert routing.ledger.long == 0


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 9), st.floats(0.0, 0.99), st.sampled_from([500.0, 2_000.0]),
    st.lists(st.sampled_from([100, 20_000, LONG, 110_000]), max_size=12),
)  # fmt: skip
def test_long_prefills_never_spread_beyond_the_share_and_everybody_gets_a_worker(count, share, long_ms, prompts):
    routing = fleet(count, share=share, long_ms=long_ms, hardware="L40S_PCIE")
    for number, tokens in enumerate([100, *prompts]):
        _, decision = send(routing, number, tokens)
        assert decision.reason in (Reason.BEST, Reason.HELD)
    assert routing.ledger.long.bit_count() <= max(1, int(share * count))


steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "reserve", "accepted", "prefilled", "ended", "heard", "fence", "expire"]),
        st.integers(0, 5), st.integers(0, 9),
    ),
    max_size=40,
)  # fmt: skip


@given(steps, st.booleans())
def test_the_plane_of_long_prefills_is_what_a_look_at_all_entries_would_find(history, decodes):
    ledger = Ledger(long_prefill_ms=50.0)
    key = [("t", f"r{number}", 1, 1, "w", 1) for number in range(6)]
    for what, number, beat in history:
        if what in ("open", "reserve"):
            ledger.open(
                key[number], SLOT, prefill_ms=20.0 * (number + 1), tokens=10, decodes=decodes, tpot_ms=50.0,
                total_ms=100.0, now_ms=0.0, reserved_for_ms=100.0 if what == "reserve" else 0.0,
            )  # fmt: skip
        elif what == "heard":
            ledger.heard(SLOT, beat)
        elif what == "fence":
            ledger.fence(SLOT)
        elif what == "expire":
            ledger.expire(150.0)
        else:
            getattr(ledger, what)(key[number], beat)
        ahead = [e for e in ledger.entries(SLOT) if e.prefill_ms > 50.0 and not e.prefilled_beat and not e.ended_beat]
        assert bool(ledger.long >> SLOT & 1) is bool(ahead)
        assert ledger.long in (0, 1 << SLOT)
