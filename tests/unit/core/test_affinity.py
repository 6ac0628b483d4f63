import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quartet_core.affinity import (
    AffinityCounters,
    AffinityFull,
    AffinityTable,
    SlotDirty,
    rows_of,
    slots_within,
)
from quartet_core.ladder import MAX_STEP_BLOCKS, Sketch, covered_tokens, rungs_within
from quartet_core.planes import count, slots

# Not st.randoms(): what hypothesis draws may be all zeros, and hashes that are equal are no hashes.
SEEDED = st.integers(0, 2**32).map(random.Random)
HASHES = st.integers(0, 2**64 - 1)


@given(HASHES, st.sampled_from([4, 64, 2**17]), st.integers(1, 4))
def test_the_rows_of_a_rung_are_all_different_and_within_the_filter(rung, rows, k):
    found = rows_of(rung, rows, k)
    assert len(set(found)) == k
    assert all(0 <= row < rows for row in found)


@pytest.mark.parametrize("shape", [(0, 1), (3, 1), (64, 0), (2, 4), (1 << 33, 4)])
def test_a_shape_that_is_none_is_refused_on_both_sides(shape):
    for side in (AffinityCounters, AffinityTable):
        with pytest.raises(ValueError):
            side(*shape)


def test_counters_have_one_of_two_sizes():
    with pytest.raises(ValueError, match="8 or 16"):
        AffinityCounters(64, 2, counter_bits=4)


# Few hashes and few rows, so that collisions are the rule.
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=200))
def test_rows_are_on_exactly_while_a_counted_rung_falls_on_them(history):
    rungs = [random.Random(i).getrandbits(64) for i in range(13)]
    counters, held, on = AffinityCounters(32, 3), [], set()
    for adding, index in history:
        if adding:
            turned = counters.add(rungs[index])
            assert not on & set(turned)
            on |= set(turned)
            held.append(index)
        elif index in held:
            turned = counters.remove(rungs[index])
            assert set(turned) <= on
            on -= set(turned)
            held.remove(index)
        assert on == {row for i in held for row in rows_of(rungs[i], 32, 3)}
        assert counters.full() == sorted(on)
    assert counters.ignored_removes == 0


def test_what_was_never_added_is_not_taken_away():
    counters = AffinityCounters(1 << 12, 4)
    counters.add(1)
    assert counters.remove(2 << 32 | 77) == []
    assert counters.ignored_removes == 1
    assert counters.full() == sorted(rows_of(1, 1 << 12, 4))


def test_a_counter_at_its_top_stays_on_rather_than_going_off_too_early():
    counters = AffinityCounters(64, 1, counter_bits=8)
    for _ in range(300):
        counters.add(5)
    for _ in range(300):
        assert counters.remove(5) == []
    assert counters.full() == [5]
    assert counters.clear() == [5]
    assert counters.full() == []


ROWS, K, SLOTS = 64, 2, 9
RUNGS = [random.Random(i).getrandbits(64) for i in range(30)]
ROW_SETS = st.sets(st.integers(0, ROWS - 1), max_size=20)


class TableAgainstSets(RuleBasedStateMachine):
    """The table answers as one set of rows per slot would, whatever is on its way in or out."""

    def __init__(self):
        super().__init__()
        self.table = AffinityTable(ROWS, K)
        self.model: dict[int, set[int]] = {}  # what each slot holds, once it is swept
        self.waiting: set[int] = set()  # slots of the model that are dirty still

    def follow_dirt(self):
        self.waiting &= set(slots(self.table.dirty))

    @rule(slot=st.integers(0, SLOTS - 1), rows=ROW_SETS)
    def turn_on(self, slot, rows):
        if self.table.dirty >> slot & 1 and slot not in self.waiting:
            with pytest.raises(SlotDirty):
                self.table.turn_on(slot, rows)
            return
        self.table.turn_on(slot, rows)
        self.model.setdefault(slot, set()).update(rows)

    @rule(slot=st.integers(0, SLOTS - 1), rows=ROW_SETS)
    def turn_off(self, slot, rows):
        if self.table.dirty >> slot & 1 and slot not in self.waiting:
            with pytest.raises(SlotDirty):
                self.table.turn_off(slot, rows)
            return
        self.table.turn_off(slot, rows)
        self.model.setdefault(slot, set()).difference_update(rows)

    @rule(slot=st.integers(0, SLOTS - 1), rows=ROW_SETS)
    def replace(self, slot, rows):
        at_once = self.table.replace(slot, rows)
        self.model[slot] = set(rows)
        assert at_once is not bool(self.table.dirty >> slot & 1)
        self.waiting.discard(slot)
        if not at_once:
            self.waiting.add(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def forget(self, slot):
        self.table.forget(slot)
        self.model.pop(slot, None)
        self.waiting.discard(slot)

    @rule(max_rows=st.integers(1, ROWS))
    def sweep(self, max_rows):
        assert self.table.sweep(max_rows) is (self.table.dirty == 0)
        self.follow_dirt()

    @rule()
    def sweep_all(self):
        for _ in range(10_000):
            if self.table.sweep(7):
                break
        assert self.table.dirty == 0
        self.follow_dirt()

    @invariant()
    def holders_are_those_of_the_model(self):
        dirty = set(slots(self.table.dirty))
        assert self.waiting <= dirty
        for rung in RUNGS:
            rows = set(rows_of(rung, ROWS, K))
            expected = {slot for slot, held in self.model.items() if rows <= held and slot not in dirty}
            assert set(slots(self.table.holders(rung))) == expected


TestTableAgainstSets = TableAgainstSets.TestCase
TestTableAgainstSets.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_forgotten_worker_holds_nothing_at_once_and_its_slot_starts_empty_after_the_sweep():
    table = AffinityTable(256, 2)
    table.turn_on(3, range(256))
    table.turn_on(4, range(256))
    table.forget(3)
    assert table.holders(99) == 1 << 4
    with pytest.raises(SlotDirty):
        table.turn_on(3, [1])
    assert [table.sweep(100) for _ in range(3)] == [False, False, True]
    table.turn_on(3, [1])
    assert table.holders(99) == 1 << 4


def test_a_worker_that_never_held_anything_leaves_no_dirt():
    table = AffinityTable(64, 2)
    table.forget(7)
    assert table.dirty == 0


def test_a_sweep_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        AffinityTable(64, 2).sweep(0)


def test_slots_beyond_the_byte_budget_are_refused_and_change_nothing():
    rows = 1 << 10
    table = AffinityTable(rows, 4, affinity_bytes=rows * 100)
    assert table.capacity == slots_within(rows * 100, rows) > 0
    with pytest.raises(AffinityFull) as caught:
        table.turn_on(table.capacity, [1])
    assert (caught.value.slot, caught.value.capacity) == (table.capacity, table.capacity)
    with pytest.raises(ValueError, match="no room"):
        AffinityTable(rows, 4, affinity_bytes=rows * 8)


@pytest.mark.parametrize("rows", [[-1], [64], [3, 64]])
def test_rows_that_are_none_are_refused_whole(rows):
    table = AffinityTable(64, 2)
    for change in (table.turn_on, table.turn_off, table.replace):
        with pytest.raises(ValueError, match="rows are 0 to 63"):
            change(0, rows)
    assert table.replace(0, [])


# --- deepest


def fleet(rng, workers, rungs, rows, k, *, noise=0):
    """A table in which each worker holds the sketch to a depth of its own, beside ``noise`` other rungs."""
    table, depths = AffinityTable(rows, k), {}
    for slot in range(workers):
        depth = rng.choice([0, 0, rng.randint(0, len(rungs)), len(rungs) // 2])
        counters = AffinityCounters(rows, k)
        for rung in [*rungs[:depth], *(rng.getrandbits(64) for _ in range(noise))]:
            table.turn_on(slot, counters.add(rung))
        depths[slot] = depth - 1
    return table, depths


def by_depth(depths, mask):
    groups: dict[int, int] = {}
    for slot, index in depths.items():
        if index >= 0 and mask >> slot & 1:
            groups[index] = groups.get(index, 0) | 1 << slot
    return sorted(groups.items(), reverse=True)


@settings(deadline=None)
@given(SEEDED, st.integers(0, 80), st.integers(1, 30), st.integers(0, 2**30 - 1))
def test_deepest_is_what_a_look_at_every_worker_and_rung_would_say(rng, depth, workers, mask):
    rungs = [rng.getrandbits(64) for _ in range(depth)]
    table, depths = fleet(rng, workers, rungs, 1 << 16, 4)
    assert table.deepest(Sketch(tuple(rungs), depth * 64), mask, max_probes=1000) == by_depth(depths, mask)


@settings(deadline=None)
@given(SEEDED, st.integers(1, 80), st.integers(10, 60), st.lists(st.integers(0, 2**60 - 1), max_size=6))
def test_where_earlier_prompts_crowd_ended_changes_the_looks_and_not_the_answer(rng, depth, workers, masks):
    rungs = [rng.getrandbits(64) for _ in range(depth)]
    table, depths = fleet(rng, workers, rungs, 1 << 16, 4)
    for mask in masks:
        shared = rng.randint(1, depth)  # another prompt that begins alike, and teaches the table its own crowd's end
        other = rungs[:shared] + [rng.getrandbits(64) for _ in range(rng.randint(0, 40))]
        table.deepest(Sketch(tuple(other), len(other) * 64), mask, max_probes=1000)
        assert table.deepest(Sketch(tuple(rungs), depth * 64), mask, max_probes=1000) == by_depth(depths, mask)


@settings(deadline=None)
@given(SEEDED, st.integers(1, 80), st.integers(1, 30), st.integers(1, 20))
def test_however_crowded_the_filter_nobody_is_placed_twice_or_above_what_it_holds(rng, depth, workers, noise):
    rungs = [rng.getrandbits(64) for _ in range(depth)]
    table, depths = fleet(rng, workers, rungs, 128, 2, noise=noise)
    groups = table.deepest(Sketch(tuple(rungs), depth * 64), (1 << workers) - 1, max_probes=1000)
    assert [index for index, _ in groups] == sorted({index for index, _ in groups}, reverse=True)
    placed = {}
    for index, plane in groups:
        assert plane & ~table.holders(rungs[index]) == 0
        for slot in slots(plane):
            assert slot not in placed
            placed[slot] = index
    for slot, index in depths.items():
        assert placed.get(slot, -1) >= index


@settings(deadline=None)
@given(SEEDED, st.integers(1, 80), st.integers(1, 30), st.integers(1, 12))
def test_with_few_probes_depths_are_rounded_down_and_never_up(rng, depth, workers, probes):
    rungs = [rng.getrandbits(64) for _ in range(depth)]
    table, depths = fleet(rng, workers, rungs, 1 << 16, 4)
    groups = table.deepest(Sketch(tuple(rungs), depth * 64), (1 << workers) - 1, max_probes=probes)
    placed = {slot: index for index, plane in groups for slot in slots(plane)}
    assert set(placed) == {slot for slot, index in depths.items() if index >= 0}
    assert all(index <= depths[slot] for slot, index in placed.items())


@settings(deadline=None, max_examples=40)
@given(SEEDED, st.integers(64, 400_000), st.sampled_from([8, 24]))
def test_with_a_grain_depths_are_rounded_down_by_less_than_a_longest_step_of_the_ladder_and_its_own(rng, tokens, grain):
    rungs = [rng.getrandbits(64) for _ in range(rungs_within(tokens))]
    table, depths = fleet(rng, 8, rungs, 1 << 16, 4)
    groups = table.deepest(Sketch(tuple(rungs), tokens), (1 << 8) - 1, max_probes=1000, grain=grain)
    placed = {slot: index for index, plane in groups for slot in slots(plane)}
    longest_step = MAX_STEP_BLOCKS * 64
    for slot, index in depths.items():
        lost = covered_tokens(index) - covered_tokens(placed.get(slot, -1))
        assert 0 <= lost < min(tokens / grain, longest_step) + longest_step
        if tokens >= grain * longest_step + longest_step and covered_tokens(index) >= 24_000:
            assert lost == 0  # there the ladder is no finer than the look


def test_no_rungs_no_candidates_and_the_dead_give_no_groups():
    table = AffinityTable(1 << 12, 4)
    table.turn_on(1, rows_of(5, 1 << 12, 4))
    assert table.deepest(Sketch((), 10), 0b10) == []
    assert table.deepest(Sketch((5,), 64), 0b01) == []
    assert table.deepest(Sketch((5,), 64), 0b10) == [(0, 0b10)]
    table.forget(1)
    assert table.deepest(Sketch((5,), 64), 0b10) == []


# --- false holders, in a table as full as a real one


WORKERS, TABLE_ROWS = 400, 1 << 14
FILL = 1 - (1 - 1 / TABLE_ROWS) ** (4 * 810)


@pytest.fixture(scope="module")
def crowded():
    """Filters with k = 4 of which each worker has about 18 % of its rows on."""
    rng = random.Random(7)
    table = AffinityTable(TABLE_ROWS, 4)
    for slot in range(WORKERS):
        table.turn_on(slot, {row for _ in range(810) for row in rows_of(rng.getrandbits(64), TABLE_ROWS, 4)})
    return table, rng


def test_false_holders_of_a_rung_are_as_many_as_theory_says(crowded):
    table, rng = crowded
    lookups = 3_000
    seen = sum(count(table.holders(rng.getrandbits(64))) for _ in range(lookups))
    expected = WORKERS * FILL**4 * lookups
    assert 0.85 * expected < seen < 1.15 * expected


def test_a_false_holder_is_one_rung_too_deep_as_often_as_chance_says_and_hardly_ever_more(crowded):
    table, rng = crowded
    # Everybody holds the first rung, as with a shared system prompt. Then a worker that by chance seems to hold the
    # second cannot be told from one that does; to seem deeper it needs a second chance hit on top.
    first = rng.getrandbits(64)
    for slot in range(WORKERS):
        table.turn_on(slot, rows_of(first, TABLE_ROWS, 4))
    lookups, one_too_deep, deeper = 2_000, 0, 0
    for _ in range(lookups):
        rungs = (first, *(rng.getrandbits(64) for _ in range(60)))
        for index, plane in table.deepest(Sketch(rungs, 61 * 64), (1 << WORKERS) - 1):
            if index == 1:
                one_too_deep += count(plane)
            elif index > 1:
                deeper += count(plane)
    expected = WORKERS * FILL**4
    print(
        f"per lookup: {one_too_deep / lookups} one rung too deep ({expected:.3f} expected), {deeper / lookups} deeper"
    )
    assert 0.85 * expected < one_too_deep / lookups < 1.15 * expected
    assert deeper / lookups < 0.01
