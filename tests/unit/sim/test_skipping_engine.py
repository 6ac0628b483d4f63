"""The engine that skips ahead does what the one that makes every iteration does, at the same times."""

from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet_core.profile import Profile
from quartet_sim.engine import Finished, FirstToken, Job, Preempted, SimulatedEngine
from quartet_sim.simulation.engine import IDLE, SkippingEngine
from quartet_sim.simulation.work import FINISHED, FIRST, PREEMPTED, Work

BLOCK = 16

PROFILE = Profile(
    a_ms=5.0,
    b_ms_per_token=0.02,
    c_ms_per_token2=1e-7,
    batches=(1, 8, 64, 256),
    contexts=(32, 128, 600, 32768),
    step_ms=((5.0, 5.1, 5.2, 7.0), (5.4, 5.9, 6.0, 13.0), (7.0, 9.0, 13.0, 60.0), (13.0, 30.0, 40.0, 240.0)),
)

NAMES = {FirstToken: "first", Finished: "finished", Preempted: "preempted"}
SKIPPED = {FIRST: "first", FINISHED: "finished", PREEMPTED: "preempted"}


def every_iteration(jobs, kv_tokens, chunk, max_batch, scale):
    """(time, what, job) by the engine that makes each iteration; its state at every end of one."""
    engine = SimulatedEngine(
        PROFILE, kv_tokens=kv_tokens, block_tokens=BLOCK, chunk_tokens=chunk, max_batch=max_batch,
        max_context=1 << 20, time_scale=scale,
    )  # fmt: skip
    said, ends = [], float("inf")
    pending = list(jobs)

    def begin(now):
        duration = engine.begin(now)
        return float("inf") if duration is None else now + duration

    while pending or ends < float("inf"):
        if pending and pending[0][0] < ends:
            at, number, prompt, output, family = pending.pop(0)
            # The last token is the job's own, so that no two answers are alike: answers have no content over there.
            ids = array("I", [family * 1000 + place // BLOCK for place in range(prompt - 1)] + [1_000_000 + number])
            engine.submit(Job(str(number), ids, output), at)
            if ends == float("inf"):
                ends = begin(at)
            continue
        now = ends
        told = [event for event in engine.finish(now) if type(event) in NAMES]
        said += [(now, NAMES[type(event)], int(event.job_id)) for event in told]
        ends = begin(now)
    return said, engine


def skipping(jobs, kv_tokens, chunk, max_batch, scale):
    engine = SkippingEngine(
        PROFILE, kv_tokens=kv_tokens, block_tokens=BLOCK, chunk_tokens=chunk, max_batch=max_batch, time_scale=scale
    )
    said = []
    pending = list(jobs)
    while pending or engine.next_ms < IDLE:
        if pending and pending[0][0] < engine.next_ms:
            at, number, prompt, output, family = pending.pop(0)
            # As with the other engine: the block's content stands for all before it, and the family for its content.
            units = tuple(family * 1000 + place for place in range((prompt - 1) // BLOCK))
            engine.submit(Work(number, prompt, output, units=units, unit_tokens=BLOCK), at)
            continue
        now = engine.next_ms
        said += [(now, SKIPPED[what], work.key) for what, work in engine.advance()]
    return said, engine


JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 400.0, allow_nan=False),  # gap to the one before
        st.integers(1, 700),  # prompt
        st.integers(1, 120),  # output
        st.integers(1, 4),  # family: which prefix it shares
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    JOBS,
    st.sampled_from([1024, 1600, 4096, 65536]),
    st.sampled_from([(256, 8), (64, 64), (2048, 256), (512, 3)]),
    st.sampled_from([1.0, 1.7]),
)
def test_skipping_ahead_says_what_every_iteration_would(gaps, kv_tokens, shape, scale):
    chunk, max_batch = shape
    jobs, at = [], 0.0
    for number, (gap, prompt, output, family) in enumerate(gaps):
        at += gap + 0.0137
        jobs.append((at, number, prompt, output, family))
    slow, plain = every_iteration(jobs, kv_tokens, chunk, max_batch, scale)
    quick, skipped = skipping(jobs, kv_tokens, chunk, max_batch, scale)
    assert [event[1:] for event in quick] == [event[1:] for event in slow]
    for (quick_ms, *_), (slow_ms, *_) in zip(quick, slow, strict=True):
        assert quick_ms == pytest.approx(slow_ms, rel=1e-9, abs=1e-6)
    assert skipped.iterations == plain.steps
    assert skipped.busy_ms == pytest.approx(plain.busy_ms, rel=1e-9)
    assert skipped.prefill_busy_ms == pytest.approx(plain.prefill_busy_ms, rel=1e-6, abs=1e-6)
    assert skipped.queued_prefill_ms() == plain.queued_prefill_ms() == 0.0
    census = plain.pool.blocks.census()
    assert (skipped.pool.free, skipped.pool.idle) == (census.free, census.idle)
    assert census.referenced == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 2_000.0), st.integers(1, 1_600), st.booleans()), min_size=1, max_size=12))
def test_blocks_reserved_in_the_middle_of_a_stretch_are_never_those_of_its_steps(reservations):
    engine = SkippingEngine(PROFILE, kv_tokens=1600, block_tokens=BLOCK)
    done, now = [], 0.0
    for number in range(3):
        engine.submit(Work(number, 100, 350), 0.0)

    def run_until(until):
        while engine.next_ms <= until:
            done.extend(work.key for what, work in engine.advance() if what == FINISHED)
            pool = engine.pool
            assert pool.free >= 0
            assert pool.idle >= 0

    held = []
    for number, (gap, tokens, given_back) in enumerate(reservations, 1000):
        now += gap
        run_until(now)
        work = Work(number, tokens, 1)
        if engine.reserve(work, tokens, now):
            held.append(work)
        if given_back and held:
            engine.unreserve(held.pop(), now)
    for work in held:
        engine.unreserve(work, now)
    run_until(1e9)
    assert sorted(done) == [0, 1, 2]
    assert engine.pool.free + engine.pool.idle == engine.pool.total
