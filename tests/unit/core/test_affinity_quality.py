"""Affinity loses nothing worth having by being quantized: the study of ``tests/perf/affinity_quality.py``, in small."""

import random

import pytest
from affinity_index import ExactIndex, Prompt, RoundedIndex
from affinity_quality import RIVALS, fleet, mooncake, sessions, shared_prompt
from affinity_replay import replay
from affinity_server import PrefixCache
from hypothesis import given
from hypothesis import strategies as st

COUNT = 1200


@pytest.fixture(scope="module")
def conversations():
    """The first six minutes or so of the conversation trace, over sixteen workers: routed by the table, by the index
    with the table asked as well."""
    workload, arrivals_of = mooncake(COUNT)
    arrivals = arrivals_of(1, 16)
    by_table = replay(workload, arrivals, fleet(16))
    by_index = replay(workload, arrivals, fleet(16), exact=True, rivals=RIVALS)
    return by_table, by_index


def test_the_table_sends_requests_where_as_much_is_cached_as_an_exact_index_would(conversations):
    _, by_index = conversations
    table = by_index.rivals["table"]
    assert by_index.chosen.found_tokens > 0.03 * by_index.prompt_tokens
    assert table.found_tokens >= 0.995 * by_index.chosen.found_tokens
    assert table.ttft_ms == pytest.approx(by_index.chosen.ttft_ms, rel=0.005)
    same = sum(a == b for a, b in zip(table.slots, by_index.chosen.slots, strict=True))
    assert same >= 0.99 * len(table.slots)


def test_looking_at_fewer_rungs_costs_nothing_that_can_be_seen(conversations):
    _, by_index = conversations
    table, every_probe = by_index.rivals["table"], by_index.rivals["every probe"]
    assert table.found_tokens >= 0.998 * every_probe.found_tokens
    assert table.ttft_ms == pytest.approx(every_probe.ttft_ms, rel=0.002)


def test_a_long_sessions_last_turns_are_not_lost_between_two_rungs():
    workload, arrivals_of = sessions()
    outcome = replay(workload, arrivals_of(1, 16)[:1500], fleet(16), exact=True, rivals=RIVALS)
    exact, table, uncapped = outcome.chosen, outcome.rivals["table"], outcome.rivals["steps uncapped"]
    assert table.found_tokens >= 0.999 * exact.found_tokens
    assert table.ttft_ms == pytest.approx(exact.ttft_ms, rel=0.0025)
    assert uncapped.ttft_ms > 1.005 * exact.ttft_ms  # or these sessions could not tell one ladder from the other


def test_hardly_ever_is_a_worker_told_to_hold_more_than_it_does(conversations):
    by_table, _ = conversations
    assert by_table.lookups == COUNT
    assert by_table.false_holders <= 0.001 * by_table.lookups


def test_every_request_is_answered_and_the_table_stays_within_its_size_whatever_is_cached(conversations):
    by_table, by_index = conversations
    assert by_table.refused == by_index.refused == 0
    assert len(by_table.ttft_ms) == len(by_index.ttft_ms) == sum(by_table.requests) == COUNT
    assert by_table.table_bytes < 22 * 2**20


def test_a_shared_system_prompt_draws_no_more_to_one_worker_than_its_share():
    spreads = {}
    for shared_tokens in (0, 1536):
        workload, arrivals = shared_prompt(4.0, shared_tokens, 1500)
        outcome = replay(workload, arrivals, ["L40S_PCIE"] * 8)
        spreads[shared_tokens] = max(outcome.requests) * 8 / sum(outcome.requests)
    assert outcome.hit_rate > 0.5
    assert spreads[1536] < 1.25
    assert spreads[1536] < spreads[0] + 0.15


block_lists = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def chained(path):
    """Ids of a path's blocks: equal ids mean equal prefixes, as in the traces."""
    return [hash(tuple(path[: end + 1])) for end in range(len(path))]


@given(st.lists(st.tuples(st.integers(0, 5), block_lists)), st.data())
def test_the_index_tells_each_worker_at_the_depth_that_a_scan_of_all_its_blocks_finds(held, data):
    index, caches = ExactIndex(), {}
    for slot, path in held:
        gained = [block for block in chained(path) if block not in caches.setdefault(slot, set())]
        caches[slot].update(gained)
        index.turn(slot, gained, [])
    path = data.draw(block_lists)
    prompt = _prompt(chained(path))
    told = {}
    for tokens, plane in index.deepest(prompt, (1 << 6) - 1):
        told |= {slot: tokens for slot in range(6) if plane >> slot & 1}
    for slot in range(6):
        depth = sum(block in caches.get(slot, set()) for block in prompt.blocks)
        assert told.get(slot, 0) == depth * 64
    rounded = RoundedIndex(index, [128, 256, 512]).deepest(prompt, (1 << 6) - 1)
    for tokens, plane in rounded:
        for slot in range(6):
            if plane >> slot & 1:
                assert tokens <= told[slot] < 2 * tokens


@given(st.integers(0, 2**32), st.integers(8, 40))
def test_a_cache_keeps_whole_prefixes_within_its_capacity_and_says_what_it_gained_and_lost(seed, capacity):
    rng = random.Random(seed)
    cache, mirror, using = PrefixCache(capacity), set(), []
    for _ in range(60):
        if using and rng.random() < 0.5:
            cache.leave(*using.pop(rng.randrange(len(using))))
        else:
            blocks = chained([rng.randrange(2) for _ in range(rng.randint(1, 8))])
            hits = cache.match(blocks, len(blocks))
            assert [block in mirror for block in blocks] == [True] * hits + [False] * (len(blocks) - hits)
            if cache.take(blocks, hits, len(blocks) - hits + 1):
                cache.keep(blocks[hits:])
                using.append((blocks, 1))
        mirror |= set(cache.gained)
        mirror -= set(cache.lost)
        cache.gained, cache.lost = [], []
        assert all(set(blocks) <= mirror for blocks, _ in using)
        assert len(mirror) + len(using) <= capacity
        assert 0.0 <= cache.free_fraction <= 1.0


def _prompt(blocks):
    return Prompt((), len(blocks) * 64, blocks, 64, 1)
