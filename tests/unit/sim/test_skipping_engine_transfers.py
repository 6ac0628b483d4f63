"""Transfers take blocks in the middle of a stretch of decode steps: what it was planned to take stays its own."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.catalogue import builtin
from quartet_sim.simulation.engine import IDLE, SkippingEngine
from quartet_sim.simulation.work import Work

PROFILE = builtin().profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)
BLOCK = 16


def decoding(kv_tokens, jobs):
    """An engine whose ``jobs`` of (prompt, output) tokens are past their prefill."""
    engine = SkippingEngine(PROFILE, kv_tokens=kv_tokens)
    for key, (prompt, output) in enumerate(jobs):
        engine.submit(Work(key, prompt, output), 0.0)
    while engine.running < len(jobs) and engine.next_ms < IDLE:
        engine.advance()
    return engine


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(50, 300)), min_size=1, max_size=4),
    st.integers(40, 120),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 600)), min_size=1, max_size=5),
)
def test_reservations_during_a_stretch_leave_its_steps_their_blocks(jobs, blocks, transfers):
    engine = decoding(blocks * BLOCK, jobs)
    held = []
    for key, (share, tokens) in enumerate(transfers, 100):
        if engine.next_ms == IDLE:
            break
        began = engine._start_ms
        now = began + share * (engine.next_ms - began)
        work = Work(key, tokens, 1, kind="decode")
        if engine.reserve(work, tokens, now):
            held.append(work)
        if tokens % 2:
            engine.submit(Work(key + 100, 8, 1), now)  # ends the stretch early
        engine.advance()
    while engine.next_ms < IDLE:
        engine.advance()
        if held:
            engine.unreserve(held.pop(), engine.next_ms if engine.next_ms < IDLE else now)
    while held:
        engine.unreserve(held.pop(), now)
        while engine.next_ms < IDLE:
            engine.advance()
    assert engine.pool.referenced == 0
    assert engine.pool.free + engine.pool.idle == blocks
