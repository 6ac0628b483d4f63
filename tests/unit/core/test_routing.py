"""Routing: filters, the objective, ties, holds and splits, on small fleets whose right answer is plain."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.affinity import rows_of
from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.plan import Reason
from quartet_core.planes import slots
from quartet_core.policy.base import lateness
from quartet_core.routing import UnknownPolicy
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, drift_level, free_kv_level, pack, queue_level

_spec = importlib.util.spec_from_file_location("fleets", Path(__file__).parents[2] / "perf" / "fleets.py")
fleets = importlib.util.module_from_spec(_spec)
sys.modules["fleets"] = fleets
_spec.loader.exec_module(fleets)


def word(*, queue=0.0, batch=0, free=1.0, drift=1.0, accepting=True, **flags):
    return pack(
        free_kv=free_kv_level(free), queue=queue_level(queue), batch=batch_level(batch), drift=drift_level(drift),
        accepting=accepting, **flags,
    )  # fmt: skip


def fleet(*hardware, **more):
    return fleets.routing([fleets.facts(f"w{i}", each) for i, each in enumerate(hardware)], **more)


def hear(routing, number, told, verdict=Verdict.UP, beat=1):
    return routing.hear("c", f"w{number}", 1, told, beat, verdict, 0.0)


def prompt(tokens, seed=0):
    return [(seed * 1_000_003 + i) % 100_000 for i in range(tokens)]


def hold(routing, slot, tokens):
    """Have the worker in ``slot`` cache all of a prompt."""
    for rung in fleets.ask(tokens).sketch.rungs:
        routing.affinity.turn_on(slot, rows_of(rung, 1 << 17, 4))


def chosen(routing, ask):
    decision = routing.decide(ask)
    assert decision.plan is not None, decision
    return decision.plan


def test_a_model_nobody_ever_served_is_unknown_and_one_whose_workers_died_has_no_worker():
    routing = fleet("H100_SXM5")
    assert routing.decide(fleets.ask(prompt(100), model="nope")).reason is Reason.UNKNOWN_MODEL
    hear(routing, 0, word(), Verdict.DEAD)
    assert routing.decide(fleets.ask(prompt(100))).reason is Reason.NO_WORKER


def test_all_full_is_busy_and_not_absent():
    routing = fleet("H100_SXM5", "L40S_PCIE")
    for number in (0, 1):
        hear(routing, number, word(accepting=False))
    assert routing.decide(fleets.ask(prompt(100))).reason is Reason.ALL_BUSY


def test_a_prompt_longer_than_every_context_is_too_long():
    routing = fleet("H100_SXM5")
    assert routing.decide(fleets.ask(prompt(64), prompt_tokens=200_000)).reason is Reason.TOO_LONG
    assert routing.longest_context(fleets.MODEL) == 131_072


def test_embeddings_go_to_engines_that_make_them_however_many_inputs_there_are():
    embeds = fleets.facts("w1", "L40S_PCIE", capabilities=("embeddings",))
    routing = fleets.routing([fleets.facts("w0", "H100_SXM5"), embeds])
    assert chosen(routing, fleets.ask(prompt(64), embeds=True)).prefill == 1
    assert chosen(routing, fleets.ask(prompt(64), prompt_tokens=500_000, embeds=True)).prefill == 1
    hear(routing, 1, word(), Verdict.DEAD)
    assert routing.decide(fleets.ask(prompt(64), embeds=True)).reason is Reason.NO_WORKER
    assert fleet("H100_SXM5").decide(fleets.ask(prompt(64), embeds=True)).reason is Reason.NO_EMBEDDINGS


def test_prompt_and_allowed_answer_must_fit_the_worker_together():
    routing = fleets.routing(
        [fleets.facts("w0", "H100_SXM5", kv_tokens=20_000), fleets.facts("w1", "L40S_PCIE", kv_tokens=40_000)]
    )
    assert chosen(routing, fleets.ask(prompt(15_000), max_tokens=1_000)).prefill == 0
    assert chosen(routing, fleets.ask(prompt(15_000), max_tokens=8_000)).prefill == 1
    assert routing.decide(fleets.ask(prompt(15_000), max_tokens=30_000)).reason is Reason.TOO_LONG


def test_memory_is_looked_for_as_long_answers_need_it():
    routing = fleet("H100_SXM5", "H100_SXM5")
    hear(routing, 0, word(free=0.05, batch=1))
    hear(routing, 1, word(free=0.9, batch=20))
    assert chosen(routing, fleets.ask(prompt(2_000))).prefill == 0
    assert chosen(routing, fleets.ask(prompt(2_000), most_tokens=40_000.0)).prefill == 1


def test_weights_of_another_precision_are_never_paired():
    workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
    workers[1].precision = "bf16"
    links = linked()
    routing = fleets.routing([], links=links)
    known = fleets.catalogue.builtin()
    routing.fleet._profile_of = lambda f: known.profile(f.hardware, f.model, "fp8", f.tp)
    for number, each in enumerate(workers):
        routing.learn(f"n{number}", [each], 0.0, {"RDMA_ROCE": 46.6})
    hear(routing, 0, word(batch=150))
    assert not chosen(routing, fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True)).split


def test_a_worker_without_a_beat_is_usable_at_once():
    assert chosen(fleet("H100_SXM5"), fleets.ask(prompt(100))).prefill == 0


def test_a_long_prompt_goes_where_its_first_token_comes_first():
    plan = chosen(fleet("L40S_PCIE", "H100_SXM5", "L40S_PCIE"), fleets.ask(prompt(16_000)))
    assert plan.prefill == 1


def test_the_quicker_class_wins_a_tie_in_load():
    for order in (("L40S_PCIE", "H100_SXM5"), ("H100_SXM5", "L40S_PCIE")):
        assert chosen(fleet(*order), fleets.ask(prompt(200))).prefill == order.index("H100_SXM5")


def test_ties_are_spread_over_equals():
    routing = fleet(*["H100_SXM5"] * 5)
    assert sorted(chosen(routing, fleets.ask(prompt(500, seed))).prefill for seed in range(5)) == [0, 1, 2, 3, 4]


def test_a_busy_holder_loses_to_a_cold_idle_worker_and_an_idle_one_wins():
    routing = fleet(*["H100_SXM5"] * 4)
    tokens = prompt(8_192)
    hold(routing, 2, tokens)
    plan = chosen(routing, fleets.ask(tokens))
    assert (plan.prefill, plan.cached_tokens) == (2, 8_191 if plan.cached_tokens == 8_191 else plan.cached_tokens)
    assert plan.cached_tokens > 7_000
    hear(routing, 2, word(queue=5_000.0, batch=60))
    assert chosen(routing, fleets.ask(tokens)).prefill != 2


def test_death_fences_affinity_at_once():
    routing = fleet(*["H100_SXM5"] * 3)
    tokens = prompt(8_192)
    hold(routing, 1, tokens)
    assert hear(routing, 1, word(), Verdict.DEAD) == 1
    plan = chosen(routing, fleets.ask(tokens))
    assert plan.prefill != 1
    assert plan.cached_tokens == 0


def test_a_suspect_worker_is_used_only_when_nothing_better_is_there():
    routing = fleet("H100_SXM5", "L40S_PCIE")
    hear(routing, 0, word(), Verdict.SUSPECT)
    assert chosen(routing, fleets.ask(prompt(500))).prefill == 1
    hear(routing, 1, word(), Verdict.SUSPECT)
    assert chosen(routing, fleets.ask(prompt(500))).prefill == 0


def test_a_tried_worker_is_not_tried_again():
    routing = fleet("H100_SXM5", "L40S_PCIE")
    assert chosen(routing, fleets.ask(prompt(500), excluded=1)).prefill == 1
    assert routing.decide(fleets.ask(prompt(500), excluded=3)).reason is Reason.NO_WORKER


@pytest.mark.parametrize("flag", ["throttled", "congested", "pressed"])
def test_a_card_at_its_limit_is_not_given_a_long_prompt_but_still_a_short_one(flag):
    routing = fleet("H100_SXM5", "H100_SXM5", "L40S_PCIE", long_prompt_tokens=4096, long_context_tokens=4096)
    hear(routing, 0, word(**{flag: True}))
    for seed in range(4):
        assert chosen(routing, fleets.ask(prompt(8_000, seed))).prefill == 1
    assert {chosen(routing, fleets.ask(prompt(500, seed))).prefill for seed in range(4)} >= {0, 1}


def test_the_long_prompt_rule_never_takes_the_last_candidate():
    routing = fleet("L40S_PCIE", long_prompt_tokens=4096, long_context_tokens=4096)
    hear(routing, 0, word(throttled=True))
    assert chosen(routing, fleets.ask(prompt(8_000))).prefill == 0


def test_the_long_prompt_rule_counts_uncached_tokens_only():
    routing = fleet("L40S_PCIE", "H100_SXM5", long_prompt_tokens=4096, long_context_tokens=4096)
    tokens = prompt(8_192)
    hold(routing, 0, tokens)
    hear(routing, 1, word(queue=8_000.0, batch=80))
    assert chosen(routing, fleets.ask(tokens)).prefill == 0


def test_a_prompt_goes_where_its_kv_fits():
    routing = fleet("H100_SXM5", "L40S_PCIE")
    hear(routing, 0, word(free=0.01, batch=1))
    assert chosen(routing, fleets.ask(prompt(9_000))).prefill == 1


def test_a_drifting_card_is_taken_for_what_it_is():
    routing = fleet("H100_SXM5", "H100_SXM5")
    hear(routing, 0, word(drift=3.0))
    assert {chosen(routing, fleets.ask(prompt(4_000, seed))).prefill for seed in range(3)} == {1}


def test_work_counts_when_it_is_sent():
    routing = fleet(*["H100_SXM5"] * 4)
    picked = []
    for number in range(8):
        ask = fleets.ask(prompt(16_000, number))
        plan = chosen(routing, ask)
        worker = routing.fleet.at(plan.prefill)
        routing.sent({plan.prefill: ("t", f"r{number}", 1, 1, worker.id, 1)}, plan, ask, 0.0)
        picked.append(plan.prefill)
    assert sorted(picked) == [0, 0, 1, 1, 2, 2, 3, 3]


def linked(book=None):
    book = book or LinkBook(500.0)
    book.hear(1, "c", 0.0)
    for source in ("n0", "n1", "n2"):
        for target in ("n0", "n1", "n2"):
            book.put(source, target, PricedLink("RDMA_ROCE", 28.0, 0.4, 0))
    return book


def seventy(name, hardware):
    return fleets.facts(name, hardware, "llama-3.1-70b", tp=4)


def apart(workers, **more):
    """Every worker on a node of its own, with RDMA between them."""
    routing = fleets.routing([], **more)
    for number, worker in enumerate(workers):
        routing.learn(f"n{number}", [worker], 0.0, {"RDMA_ROCE": 46.6})
    return routing


def split_fleet(**more):
    """An H100 kept for prefills, and an L40S that could do all of a request, but begins twenty times later."""
    links = linked()
    workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
    workers[0].role = "prefill"
    return apart(workers, links=links, **more), links


def test_a_request_splits_where_its_prefill_is_much_quicker_on_a_card_that_it_may_not_stay_on():
    routing, _ = split_fleet()
    ask = fleets.ask(prompt(2_000), model="llama-3.1-70b", tpot_ms=100.0, plans_split=True, output_tokens=400.0)
    plan = chosen(routing, ask)
    assert (plan.prefill, plan.decode) == (0, 1)
    assert plan.kv_bytes == 2_000 * 327_680
    assert plan.kv_ms == pytest.approx(0.4 + plan.kv_bytes / 28e6, rel=1e-3)
    assert chosen(routing, fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=False)).split is False


def test_nodes_whose_link_nobody_used_yet_are_paired_at_the_figures_of_its_class():
    routing, links = split_fleet()
    links.clear()
    ask = fleets.ask(prompt(2_000), model="llama-3.1-70b", tpot_ms=100.0, plans_split=True, output_tokens=400.0)
    plan = chosen(routing, ask)
    assert (plan.prefill, plan.decode) == (0, 1)
    assert plan.kv_ms == pytest.approx(0.4 + plan.kv_bytes / 46.6e6, rel=1e-3)


def test_without_a_coordinator_nodes_are_never_paired():
    workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
    routing = apart(workers, links=LinkBook(500.0))
    hear(routing, 0, word(batch=150))
    ask = fleets.ask(prompt(2_000), model="llama-3.1-70b", tpot_ms=100.0, plans_split=True, output_tokens=400.0)
    assert not chosen(routing, ask).split


def test_layouts_that_differ_are_never_paired():
    workers = [seventy("w0", "H100_SXM5"), fleets.facts("w1", "L40S_PCIE", "llama-3.1-70b", tp=4, engine_version="2")]
    routing = apart(workers, links=linked())
    hear(routing, 0, word(batch=60))
    assert not chosen(routing, fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True)).split


def test_a_fleet_of_halves_splits_and_without_a_pair_falls_back_or_refuses_by_configuration():
    for rule, expected in (("whole", None), ("error", Reason.NO_PREFILL_WORKER)):
        workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
        workers[0].role, workers[1].role = "prefill", "decode"
        routing = apart(workers, links=linked(), without_prefill_worker=rule)
        ask = fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True)
        assert chosen(routing, ask).split
        hear(routing, 0, word(), Verdict.DEAD)
        decision = routing.decide(ask)
        if expected is None:
            assert (decision.plan.prefill, decision.plan.decode) == (1, 1)
            assert routing.fallbacks == 1
        else:
            assert decision.reason is expected


def test_a_worker_with_more_than_two_chunks_of_work_is_waited_for_at_the_router():
    routing = fleet("H100_SXM5")
    hear(routing, 0, word(queue=1_000.0))
    decision = routing.decide(fleets.ask(prompt(2_000)))
    assert decision.hold
    hear(routing, 0, word(queue=10.0), beat=2)
    assert not routing.decide(fleets.ask(prompt(2_000))).hold
    assert fleets.MODEL in routing.freed


def test_a_new_incarnation_is_a_new_worker():
    routing = fleet("H100_SXM5", "H100_SXM5")
    ask = fleets.ask(prompt(8_192))
    hold(routing, 0, prompt(8_192))
    plan = chosen(routing, ask)
    routing.sent({plan.prefill: ("t", "r", 1, 1, "w0", 1)}, plan, ask, 0.0)
    vacated, _ = routing.learn(
        "n0", [fleets.facts("w0", "H100_SXM5", incarnation=2), fleets.facts("w1", "H100_SXM5")], 1.0
    )
    assert vacated == [0]
    assert len(routing.ledger) == 0
    assert routing.fleet.slot_of("w0") not in (None, 0)
    assert chosen(routing, ask).cached_tokens == 0
    while routing.sweeping:
        routing.sweep()
    assert hear(routing, 0, word(accepting=False)) is None  # a word on the old incarnation
    assert routing.decide(ask).plan is not None


def test_a_bad_policy_is_refused_and_the_old_one_kept():
    routing = fleet("H100_SXM5")
    with pytest.raises(UnknownPolicy, match="finish-time"):
        routing.choose_policy("best")
    assert routing.policy.name == "finish-time"


def test_a_worker_without_a_profile_is_refused_by_name():
    routing = fleet("H100_SXM5")
    _, refused = routing.learn("x", [fleets.facts("odd", "H100_SXM5", precision="int3", kv_tokens=1)], 0.0)
    assert "odd" in str(refused[0])
    assert routing.fleet.slot_of("odd") is None


def objective(routing, ask, slot, cached):
    """J of giving all of ``ask`` to ``slot``, term by term as the design writes it."""
    load, kind = routing.board.loads[slot], routing.fleet.at(slot).kind
    uncached = ask.prompt_tokens - cached
    prefill = load.drift * kind.profile.prefill_ms(cached, uncached)
    iterations = math.ceil((load.queued_tokens + uncached) / load.room)
    ttft = ask.waited_ms + load.wait_ms + prefill + iterations * load.step_ms
    harm = load.crowd * prefill / ask.output_tokens + load.harm
    return lateness(ttft / ask.ttft_ms, load.tpot_ms / ask.tpot_ms) + harm


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 3_000), st.integers(0, 80), st.booleans()), min_size=1, max_size=24),
    st.integers(64, 20_000),
    st.sampled_from([30.0, 60.0, 200.0]),
)
def test_finish_time_finds_what_a_scan_of_all_workers_finds(workers, tokens, tpot_ms):
    routing = fleet(*["H100_SXM5" if quick else "L40S_PCIE" for quick, *_ in workers])
    ids = prompt(tokens)
    for number, (_, queue, batch, holds) in enumerate(workers):
        hear(routing, number, word(queue=queue, batch=batch))
        if holds:
            hold(routing, number, ids)
    ask = fleets.ask(ids, tpot_ms=tpot_ms)
    plan = chosen(routing, ask)
    cached = dict.fromkeys(range(len(workers)), 0)
    for depth, plane in reversed(routing._filters.candidates(ask).holders):
        for slot in slots(plane):
            cached[slot] = depth
    costs = {slot: objective(routing, ask, slot, depth) for slot, depth in cached.items()}
    # Within a cell (12 % of burden, one queue level) workers count as equal.
    assert plan.cost <= 1.25 * min(costs.values()) + 0.02


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "prefix-aware", "block-cost", "decision-matrix"])
def test_every_baseline_decides(name):
    routing = fleet("H100_SXM5", "L40S_PCIE", "L40S_PCIE", policy=name)
    hear(routing, 0, word(batch=3))
    picked = {chosen(routing, fleets.ask(prompt(1_000, seed))).prefill for seed in range(6)}
    expected = {
        "round-robin": {0, 1, 2}, "least-loaded": {1, 2}, "prefix-aware": {1, 2}, "block-cost": {1, 2},
        "decision-matrix": {0, 1, 2},
    }  # fmt: skip
    assert picked == expected[name]


def test_the_decision_matrix_scores_as_the_article_does():
    routing = fleet("L40S_PCIE", "H100_SXM5", policy="decision-matrix")
    assert chosen(routing, fleets.ask(prompt(8_000), output_tokens=100.0)).prefill == 1
    assert chosen(routing, fleets.ask(prompt(500), output_tokens=2_000.0)).prefill == 0
    hear(routing, 0, word(free=0.1))
    assert chosen(routing, fleets.ask(prompt(500), output_tokens=100.0)).prefill == 1


def test_prefix_aware_follows_the_cache_until_load_is_uneven():
    routing = fleet("H100_SXM5", "H100_SXM5", policy="prefix-aware")
    tokens = prompt(4_096)
    hold(routing, 1, tokens)
    hear(routing, 1, word(batch=20))
    assert chosen(routing, fleets.ask(tokens)).prefill == 1
    hear(routing, 1, word(batch=60), beat=2)
    assert chosen(routing, fleets.ask(tokens)).prefill == 0


@pytest.mark.parametrize("name", ["round-robin", "least-loaded", "prefix-aware", "block-cost", "decision-matrix"])
def test_a_policy_that_plans_no_pairs_gives_a_fleet_of_halves_whole_requests_or_none(name):
    for rule, decided in (("whole", True), ("error", False)):
        workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
        workers[0].role, workers[1].role = "prefill", "decode"
        routing = apart(workers, links=linked(), without_prefill_worker=rule, policy=name)
        decision = routing.decide(fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True))
        assert (decision.plan is not None) is decided


def test_halves_that_do_not_pair_fall_back_like_a_missing_half():
    workers = [seventy("w0", "H100_SXM5"), fleets.facts("w1", "L40S_PCIE", "llama-3.1-70b", tp=4, engine_version="2")]
    workers[0].role, workers[1].role = "prefill", "decode"
    routing = apart(workers, links=linked())
    decision = routing.decide(fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True))
    assert decision.plan is not None
    assert not decision.plan.split
    assert routing.fallbacks == 1


def test_a_resting_worker_is_no_way_out_while_healthy_ones_are_only_busy():
    routing = fleet("H100_SXM5", "H100_SXM5")
    hear(routing, 0, word(accepting=False))
    for _ in range(3):
        routing.breakers.failed(1, 0.0)
    assert routing.decide(fleets.ask(prompt(500))).reason is Reason.ALL_BUSY
    hear(routing, 0, word(), Verdict.DEAD, beat=2)
    assert chosen(routing, fleets.ask(prompt(500))).prefill == 1


def test_a_resting_half_comes_back_into_the_choice_when_its_trial_is_due():
    workers = [seventy("w0", "H100_SXM5"), seventy("w1", "L40S_PCIE")]
    workers[0].role, workers[1].role = "prefill", "decode"
    routing = apart([*workers, seventy("w2", "H100_SXM5")], links=linked())
    routing.fleet.at(2).facts.role = "prefill"
    routing.fleet.decodes &= ~(1 << 2)
    for _ in range(3):
        routing.breakers.failed(0, 0.0)
    ask = fleets.ask(prompt(2_000), model="llama-3.1-70b", plans_split=True)
    assert {chosen(routing, ask).prefill for _ in range(4)} == {2}
    ask.at_ms = 600.0
    assert 0 in {chosen(routing, ask).prefill for _ in range(4)}


def test_death_ends_a_freeze():
    routing = fleet("H100_SXM5", "H100_SXM5")
    hear(routing, 0, word(queue=50.0), Verdict.FROZEN)
    assert routing.breakers.open == 1
    hear(routing, 0, word(), Verdict.DEAD, beat=2)
    hear(routing, 0, word(), beat=3)
    assert routing.breakers.open == 0
