"""Move plans: replayed step by step they lead from one placement to the other, and no card ever holds too much."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unit.sim.partition.questions import CATALOGUE, TABLE, big_layers

from quartet_sim.partition.machines import Node, pools_of
from quartet_sim.partition.moves import holdings, move_plan
from quartet_sim.partition.placement import Cut, Limits, place
from quartet_sim.partition.timing import Workload

LIMITS = Limits(utilisation=0.9)


def replay(plan, current, wanted, shape, kv_element=2):
    """What each card holds after every step, checked as it goes; returns who has what at the end."""
    kv_tokens = min(current.workload.kv_tokens, wanted.workload.kv_tokens)
    before = holdings(current, shape, TABLE, kv_tokens, kv_element)
    after = holdings(wanted, shape, TABLE, kv_tokens, kv_element)
    held = {}
    for placement in (current, wanted):
        for stage in placement.stages:
            for gpu in stage.gpus:
                held[gpu] = max(held.get(gpu, 0), stage.memory.activations + stage.memory.runtime)
    has = dict(before)
    for holding in before.values():
        for gpu in holding.gpus:
            held[gpu] += holding.each_bytes
    parked = set()
    for move in plan.moves:
        old, new = before[move.piece], after[move.piece]
        if move.kind == "park":
            parked.add(move.piece)
        else:
            assert move.target == new.gpus
            assert move.precision == new.precision
            for gpu in new.gpus:  # the new holders have it before the old ones drop it
                held[gpu] += new.each_bytes
                assert held[gpu] <= plan.limit_bytes[gpu]
                assert held[gpu] <= plan.peak_bytes[gpu]
            has[move.piece] = new
        if move.kind == "fetch":
            assert move.piece in parked
        else:
            assert move.source == old.gpus
            for gpu in old.gpus:
                held[gpu] -= old.each_bytes
        assert move.ms > 0
        kept = old.precision == new.precision
        assert move.store_bytes == (new.weight_bytes if move.kind in ("load", "fetch") and not kept else 0)
    return has, after


@st.composite
def two_placements(draw):
    shape = big_layers(draw(st.integers(3, 8)), kv_heads=8)
    cards_of_nodes = st.tuples(st.sampled_from(["H100_SXM5", "L40S_PCIE"]), st.integers(1, 2))
    held = draw(st.lists(cards_of_nodes, min_size=1, max_size=3))
    nodes = tuple(Node(f"n{i}", {hardware: count}) for i, (hardware, count) in enumerate(held))
    pools = pools_of(nodes, CATALOGUE)

    def one():
        precision = draw(st.sampled_from(["bf16", "fp8", "int4"]))
        cards = [(number, 1) for number, pool in enumerate(pools) for _ in range(pool.gpus)]
        groups = draw(st.permutations(cards))[: draw(st.integers(1, min(len(cards), shape.layers)))]
        cut_in = len(groups) - 1
        borders = sorted(draw(st.sets(st.integers(1, shape.layers - 1), min_size=cut_in, max_size=cut_in)))
        edges = [0, *borders, shape.layers]
        cuts = [Cut(pool, tp, precision, b - a) for (pool, tp), a, b in zip(groups, edges, edges[1:], strict=False)]
        work = Workload(
            prompt_tokens=1024, output_tokens=128, concurrency=draw(st.sampled_from([1, 16])), max_model_len=8192
        )
        return place(shape, pools, cuts, work, TABLE, LIMITS)

    return shape, pools, one(), one()


@settings(deadline=None, max_examples=100)
@given(two_placements())
def test_every_step_fits_and_the_end_is_what_was_wanted(given_pair):
    shape, pools, current, wanted = given_pair
    assume(current.fits and wanted.fits)
    plan = move_plan(current, wanted, shape, pools, TABLE)
    has, after = replay(plan, current, wanted, shape)
    assert has == after
    assert plan.stays + len({move.piece for move in plan.moves}) == shape.layers + 2
    assert plan.ms == pytest.approx(sum(move.ms for move in plan.moves))
    moved = [move.piece for move in plan.moves if move.kind != "park"]
    assert len(set(moved)) == len(moved), "nothing arrives twice"


def test_nothing_moves_to_where_it_is():
    shape, pools, cuts, work = _two_full_cards()
    same = place(shape, pools, cuts, work, TABLE, LIMITS)
    plan = move_plan(same, same, shape, pools, TABLE)
    assert plan.moves == ()
    assert plan.stays == shape.layers + 2


def test_two_full_cards_exchange_their_layers_by_way_of_host_memory():
    shape, pools, cuts, work = _two_full_cards()
    current = place(shape, pools, cuts, work, TABLE, LIMITS)
    wanted = place(shape, pools, cuts[::-1], work, TABLE, LIMITS)
    assert current.fits
    assert wanted.fits
    plan = move_plan(current, wanted, shape, pools, TABLE)
    kinds = [move.kind for move in plan.moves]
    assert "park" in kinds
    assert kinds.count("park") == kinds.count("fetch")
    has, after = replay(plan, current, wanted, shape)
    assert has == after


def test_another_precision_comes_from_the_store_and_only_kv_over_the_link():
    shape = big_layers(2)
    pools = pools_of((Node("a", {"H100_SXM5": 1}), Node("b", {"H100_SXM5": 1})), CATALOGUE)
    work = Workload(prompt_tokens=1024, output_tokens=128, concurrency=1, max_model_len=4096)
    current = place(shape, pools, [Cut(0, 1, "fp8", 2)], work, TABLE, LIMITS)
    wanted = place(shape, pools, [Cut(1, 1, "int4", 2)], work, TABLE, LIMITS)
    plan = move_plan(current, wanted, shape, pools, TABLE)
    layers = [move for move in plan.moves if move.piece.startswith("layer")]
    assert {move.kind for move in layers} == {"load"}
    for move in layers:
        assert move.store_bytes == int(shape.layer_weights * TABLE.precisions["int4"].bytes_per_weight)
        assert move.sent_bytes == 4096 * shape.kv_layer_bytes
    tables = [move for move in plan.moves if not move.piece.startswith("layer")]
    assert {move.kind for move in tables} == {"copy"}, "embedding and head stay in BF16"


def test_a_current_placement_that_holds_too_much_is_named_with_its_card():
    shape, pools, cuts, work = _two_full_cards()
    wanted = place(shape, pools, cuts, work, TABLE, LIMITS)
    crammed = place(shape, pools, [Cut(0, 1, "bf16", shape.layers)], work, TABLE, LIMITS)
    with pytest.raises(ValueError, match=r"current placement needs .* GB of n0:0"):
        move_plan(crammed, wanted, shape, pools, TABLE)


def _two_full_cards():
    """Two H100, each with three layers of 22 GB: room for none more."""
    shape = big_layers(6)
    pools = pools_of((Node("n0", {"H100_SXM5": 1}), Node("n1", {"H100_SXM5": 1})), CATALOGUE)
    work = Workload(prompt_tokens=512, output_tokens=64, concurrency=1, max_model_len=1024)
    return shape, pools, [Cut(0, 1, "bf16", 3), Cut(1, 1, "bf16", 3)], work
