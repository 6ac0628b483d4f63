"""A prefix that one engine has cached is lent to another: it computes only the rest, and says the same."""

from array import array

import pytest

from quartet_sim.engine import Finished, FirstToken, Job, Prefilled
from quartet_sim.pool import Fenced


def ids(tokens, seed=0):
    return array("I", [(7919 * (number + 1) + 104_729 * seed) % 128_000 for number in range(tokens)])


def asked(run, name, tokens, **more):
    run.engine.submit(Job(name, tokens, max_tokens=20, **more), run.now_ms)
    run.run()
    return run.one(name, Finished)


def lend(run, tokens, transfer="t"):
    """The wire bytes of the first ``tokens`` tokens of the prompt, out of ``run``'s cache."""
    run.engine.submit(Job(f"l-{transfer}", ids(tokens), max_tokens=1, kind="prefill", transfer=transfer), run.now_ms)
    run.run()
    return list(run.engine.pool.export(transfer))


def receive(run, blocks, tokens, transfer="t"):
    pool = run.engine.pool
    assert pool.reserve(transfer, tokens, 1)
    for index, payload in enumerate(blocks):
        if payload is not None:
            pool.write(transfer, 1, index, payload)
    pool.commit(transfer, 1)


@pytest.fixture
def holder(drive):
    """An engine that has answered a prompt of 1,000 tokens."""
    run = drive()
    asked(run, "before", ids(1000))
    return run


@pytest.fixture
def alone(drive):
    """What an engine with nothing cached says to it."""
    run = drive()
    asked(run, "f", ids(1000))
    return run


def counts(run, name="f"):
    end = run.one(name, Finished)
    return end.cached_tokens, end.transferred_tokens, end.verified_blocks, end.dropped_blocks


def test_a_fetched_prefix_is_not_computed_and_the_text_is_the_same(drive, holder, alone):
    target = drive()
    receive(target, lend(holder, 800), 800)
    asked(target, "f", ids(1000), transfer="t")
    assert counts(target) == (0, 800, 50, 0)
    assert target.text("f") == alone.text("f")
    first = target.one("f", FirstToken)
    assert (first.cached_tokens, first.transferred_tokens) == (0, 800)
    assert first.ttft_ms < alone.one("f", FirstToken).ttft_ms
    assert target.engine.pool.lease("t") is None
    for run in (holder, target):
        run.engine.pool.release("t")
        assert run.engine.pool.blocks.census().referenced == 0
        assert run.engine.queued_prefill_ms() == 0.0


def test_the_fetched_prefix_serves_the_next_request_and_is_told_as_cached(drive, holder):
    target = drive()
    receive(target, lend(holder, 800), 800)
    asked(target, "f", ids(1000), transfer="t")
    asked(target, "g", ids(1000))
    assert counts(target, "g") == (992, 0, 0, 0)
    holder_rungs, target_rungs = (run.engine.drain_rungs()[0] for run in (holder, target))
    assert sorted(holder_rungs) == sorted(target_rungs)


def test_what_the_target_holds_itself_is_counted_as_cached(drive, holder, alone):
    target = drive()
    asked(target, "own", ids(320))
    receive(target, lend(holder, 800), 800)
    asked(target, "f", ids(1000), transfer="t")
    assert counts(target) == (320, 480, 50, 0)
    assert target.text("f") == alone.text("f")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(lambda b: [*b[:3], bytes(len(b[3])), *b[4:]], (0, 48, 3, 47), id="one wrong block"),
        pytest.param(lambda b: [*b[:49], None], (0, 784, 49, 1), id="the last is missing"),
        pytest.param(lambda b: [b[1], b[0], *b[2:]], (0, 0, 0, 50), id="another order"),
    ],
)
def test_wrong_blocks_and_those_behind_them_are_dropped_and_computed(drive, holder, alone, spoil, expected):
    target = drive()
    receive(target, spoil(lend(holder, 800)), 800)
    asked(target, "f", ids(1000), transfer="t")
    assert counts(target) == expected
    assert target.text("f") == alone.text("f")
    assert target.engine.pool.blocks.census().referenced == 0


def test_a_partly_filled_last_block_is_of_no_use(drive, holder, alone):
    target = drive()
    receive(target, lend(holder, 808), 808)
    asked(target, "f", ids(1000), transfer="t")
    assert counts(target) == (0, 800, 50, 1)
    assert target.text("f") == alone.text("f")


def test_one_token_is_always_computed_even_if_all_came(drive, holder):
    target, whole = drive(), drive()
    asked(whole, "f", ids(800))
    receive(target, lend(holder, 800), 800)
    asked(target, "f", ids(800), transfer="t")
    assert counts(target) == (0, 784, 50, 0)
    assert target.text("f") == whole.text("f")


def test_more_than_the_prompt_is_dropped(drive, holder):
    target = drive()
    receive(target, lend(holder, 800), 800)
    asked(target, "f", ids(100), transfer="t")
    assert counts(target) == (0, 96, 6, 44)


def test_a_cached_prefix_is_lent_at_the_end_of_the_iteration_under_way_whatever_waits(holder):
    for number in range(5):
        holder.engine.submit(Job(f"w{number}", ids(4000, number + 1), max_tokens=5), holder.now_ms)
    holder.step()
    holder.engine.submit(Job("l", ids(800), max_tokens=1, kind="prefill", transfer="t"), holder.now_ms)
    holder.step()
    lent = holder.one("l", Prefilled)
    assert (lent.cached_tokens, lent.gpu_ms) == (800, 0.0)
    assert not holder.of("w1")
    holder.run()
    assert holder.engine.pool.release("t")


def test_an_idle_engine_lends_at_once(holder):
    before = holder.now_ms
    lend(holder, 800)
    assert holder.now_ms == before


def test_what_is_not_cached_any_more_is_computed(drive, holder):
    other = drive()
    assert lend(other, 800) == lend(holder, 800)
    assert other.one("l-t", Prefilled).cached_tokens == 0


def test_lent_blocks_cannot_be_evicted_and_a_cancelled_loan_gives_them_back(holder):
    blocks = holder.engine.pool.blocks
    holder.engine.submit(Job("l", ids(800), max_tokens=1, kind="prefill", transfer="t"), holder.now_ms)
    blocks.evict(10_000)
    assert blocks.census().referenced == 50
    assert holder.engine.cancel("l")
    assert blocks.census().referenced == 0
    assert holder.engine.begin(holder.now_ms) is None


def test_without_a_committed_lease_the_job_is_not_taken(drive):
    run = drive()
    job = Job("f", ids(1000), max_tokens=20, transfer="t")
    with pytest.raises(Fenced, match="no lease"):
        run.engine.submit(job, 0.0)
    assert run.engine.pool.reserve("t", 800, 1)
    with pytest.raises(Fenced, match="not committed"):
        run.engine.submit(job, 0.0)
    run.engine.pool.release("t")
    run.engine.submit(Job("f", ids(1000), max_tokens=20), 0.0)  # its name is free
    assert run.engine.pool.blocks.census().referenced == 0


def test_a_fetching_job_behind_others_in_a_full_pool_never_stops_them(drive, holder):
    target = drive(kv_tokens=1280)
    blocks = lend(holder, 800)
    receive(target, blocks, 800)
    target.engine.submit(Job("big", ids(1100, 4), max_tokens=10), 0.0)
    asked(target, "f", ids(1000), transfer="t")
    assert target.one("big", Finished).output_tokens == 10
    assert target.one("f", Finished).output_tokens == 20
