"""Cells: the staircase holds every worker that could be best, and no dominated one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core import catalogue
from quartet_core.fleet import Kind
from quartet_core.ledger import Belief
from quartet_core.load import Cells, Load, LoadBoard
from quartet_core.planes import slots
from quartet_core.word import queue_bounds_ms

workers = st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 63), st.integers(0, 63)), max_size=30)


@given(workers, st.integers(0, (1 << 41) - 1))
def test_the_staircase_is_the_pareto_front_of_the_masked_workers(placed, mask):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    there = {slot: cell for slot, cell in placed.items() if mask >> slot & 1}
    front = {
        cell
        for cell in there.values()
        if not any(other != cell and other[0] <= cell[0] and other[1] <= cell[1] for other in there.values())
    }
    found = list(cells.staircase(mask))
    assert [wait_ms for wait_ms, _ in found] == sorted(queue_bounds_ms(wait)[0] for wait, _ in front)
    assert {slot for _, plane in found for slot in slots(plane)} == {s for s, cell in there.items() if cell in front}


@given(workers, st.integers(0, (1 << 41) - 1))
def test_by_burden_gives_every_masked_worker_once_in_order(placed, mask):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    order = [slot for plane in cells.by_burden(mask) for slot in slots(plane)]
    assert sorted(order) == sorted(slot for slot in placed if mask >> slot & 1)
    burdens = [placed[slot][1] for slot in order]
    assert burdens == sorted(burdens)


@given(workers)
def test_the_lightest_are_the_least_burdened_of_all(placed):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    least = min((burden for _, burden in placed.values()), default=None)
    assert set(slots(cells.lightest)) == {slot for slot, (_, burden) in placed.items() if burden == least}


@given(workers)
def test_cells_are_empty_after_all_were_taken(placed):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    assert cells.count == len(set(placed.values()))
    for slot, (wait, burden) in placed.items():
        cells.take(slot, wait, burden)
    assert cells.count == 0
    assert list(cells.staircase((1 << 41) - 1)) == []


@given(workers, st.integers(0, (1 << 41) - 1), st.integers(0, (1 << 41) - 1))
def test_workers_beside_the_mask_dominate_unseen(placed, mask, beside):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    everybody = {slot: cell for slot, cell in placed.items() if (mask | beside) >> slot & 1}
    expected = {
        slot
        for slot, cell in everybody.items()
        if mask >> slot & 1
        and not any(other != cell and other[0] <= cell[0] and other[1] <= cell[1] for other in everybody.values())
    }
    found = cells.staircase(mask, beside=beside)
    assert {slot for _, plane in found for slot in slots(plane)} == expected


@given(workers, st.integers(0, (1 << 41) - 1), st.sampled_from([0.0, 1.0, 30.0, 5_000.0]))
def test_a_walk_within_a_wait_is_the_beginning_of_the_whole_walk(placed, mask, within_ms):
    cells = Cells()
    for slot, (wait, burden) in placed.items():
        cells.put(slot, wait, burden)
    expected = [(wait_ms, plane) for wait_ms, plane in cells.staircase(mask) if wait_ms <= within_ms]
    assert list(cells.staircase(mask, within_ms=within_ms)) == expected


def kind(hardware="H100_SXM5"):
    profile = catalogue.builtin().profile(hardware, "llama-3.1-8b", "fp8", 1)
    return Kind(
        index=0, hardware=hardware, model="m", precision="fp8", tp=1, profile=profile, kv_tokens=400_000,
        max_context=131_072, max_batch=256, chunk_tokens=2048, layout=None, long_context=True, facts=None,
        ahead_ms=70.0,
    )  # fmt: skip


def belief(queue_ms=0.0, batch=0.0, phi=0.0):
    return Belief(queue_ms=queue_ms, batch=batch, context=2000.0, urgency=0.01, phi=phi, reserved_ms=0.0)


@pytest.mark.parametrize(
    ("lighter", "heavier"),
    [
        (belief(), belief(queue_ms=500.0)),
        (belief(batch=4), belief(batch=40)),
        (belief(batch=4), belief(batch=4, phi=0.6)),
    ],
)
def test_more_work_is_never_less_load(lighter, heavier):
    first, second = Load(kind(), lighter, 1.0, 1.0), Load(kind(), heavier, 1.0, 1.0)
    assert (first.wait_level, first.burden_level) != (second.wait_level, second.burden_level)
    assert first.wait_ms <= second.wait_ms
    assert first.tpot_ms <= second.tpot_ms
    assert first.harm <= second.harm


def test_the_same_work_is_dearer_on_slower_hardware():
    assert Load(kind("L40S_PCIE"), belief(batch=8), 1.0, 1.0).tpot_ms > Load(kind(), belief(batch=8), 1.0, 1.0).tpot_ms


@given(
    st.lists(st.tuples(st.floats(0, 2_000), st.integers(0, 60)), min_size=2, max_size=14),
    st.integers(1, (1 << 14) - 1),
    st.integers(0, (1 << 14) - 1),
)
def test_a_few_workers_stand_on_the_staircase_that_a_walk_through_all_cells_finds(loads, mask, beside):
    board, h100 = LoadBoard(1.0), kind()
    for slot, (queue_ms, batch) in enumerate(loads):
        board.update(slot, h100, belief(queue_ms=queue_ms, batch=batch), 1.0)
    mask, beside = mask & (1 << len(loads)) - 1, beside & (1 << len(loads)) - 1
    found = list(board.staircase(h100, mask, beside=beside))
    if mask.bit_count() > 1:
        assert found == list(board.cells(h100).staircase(mask, beside=beside))
    elif mask:
        assert found == [(0.0, mask)]  # one alone is weighed at once, whoever is beside it


def test_the_board_moves_a_worker_between_cells_and_drops_it():
    board, h100 = LoadBoard(1.0), kind()
    board.update(5, h100, belief(), 1.0)
    board.update(5, h100, belief(queue_ms=1000.0), 1.0)
    assert [plane for _, plane in board.cells(h100).staircase(1 << 5)] == [1 << 5]
    assert board.groups == 1
    board.drop(5)
    assert board.groups == 0
