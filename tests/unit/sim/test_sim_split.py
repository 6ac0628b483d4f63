"""A prompt computed here and decoded there: the same answer, and every wrong block is noticed."""

from array import array

import pytest

from quartet_sim.content import WIRE_BYTES_PER_TOKEN
from quartet_sim.engine import KV_MISMATCH, Failed, Finished, FirstToken, Job, Prefilled
from quartet_sim.pool import Fenced


def ids(tokens, seed=0):
    return array("I", [(7919 * (number + 1) + 104_729 * seed) % 128_000 for number in range(tokens)])


@pytest.fixture
def pair(drive):
    return drive(chunk_tokens=256), drive()


def prefill(run, tokens, seed=0, transfer="t"):
    run.engine.submit(Job(f"p-{transfer}", ids(tokens, seed), max_tokens=30, kind="prefill", transfer=transfer), 0.0)
    run.run()
    return list(run.engine.pool.export(transfer))


def receive(run, blocks, tokens, epoch=1):
    pool = run.engine.pool
    assert pool.reserve("t", tokens, epoch)
    for index, payload in enumerate(blocks):
        if payload is not None:
            pool.write("t", epoch, index, payload)
    pool.commit("t", epoch)


def decode(run, tokens, seed=0):
    run.engine.submit(Job("d", ids(tokens, seed), max_tokens=30, kind="decode", transfer="t"), run.now_ms)
    run.run()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 640, 1000])
def test_a_split_request_gets_the_text_of_a_whole_one(drive, pair, tokens):
    source, target = pair
    whole = drive()
    whole.engine.submit(Job("d", ids(tokens), max_tokens=30), 0.0)
    whole.run()
    blocks = prefill(source, tokens)
    assert sum(map(len, blocks)) == tokens * WIRE_BYTES_PER_TOKEN
    receive(target, blocks, tokens)
    decode(target, tokens)
    assert target.text("d") == whole.text("d")
    end = target.one("d", Finished)
    assert (end.output_tokens, end.verified_blocks, end.cached_tokens) == (30, -(-tokens // 16), 0)
    assert source.engine.pool.release("t")
    for run in (source, target):
        assert run.engine.pool.blocks.census().referenced == 0
        assert run.engine.queued_prefill_ms() == 0.0


def test_decode_takes_only_steps_and_its_blocks_serve_the_next_request(pair, profile):
    source, target = pair
    receive(target, prefill(source, 1000), 1000)
    decode(target, 1000)
    assert target.engine.prefill_busy_ms == 0.0
    assert target.one("d", FirstToken).ttft_ms == pytest.approx(profile.step_ms_at(1, 1000))
    target.engine.submit(Job("next", ids(1000) + ids(50, 5), max_tokens=1), target.now_ms)
    target.run()
    assert target.one("next", FirstToken).cached_tokens == 992
    on, _ = target.engine.drain_rungs()
    assert on[:8] == source.engine.drain_rungs()[0][:8]


def flipped(blocks):
    changed = bytearray(blocks[3])
    changed[700] ^= 1
    return [*blocks[:3], bytes(changed), *blocks[4:]]


@pytest.mark.parametrize(
    ("spoil", "right"),
    [
        pytest.param(flipped, 62, id="one bit flipped"),
        pytest.param(lambda blocks: [*blocks[:-1], None], 62, id="last block missing"),
        pytest.param(lambda blocks: [blocks[1], blocks[0], *blocks[2:]], 61, id="blocks in another order"),
        pytest.param(lambda blocks: [bytes(len(block)) for block in blocks], 0, id="zeros"),
    ],
)
def test_a_spoilt_block_fails_the_job_and_leaves_no_trace(pair, spoil, right):
    source, target = pair
    receive(target, spoil(prefill(source, 1000)), 1000)
    decode(target, 1000)
    failed = target.one("d", Failed)
    assert target.of("d") == [failed]
    assert (failed.reason, failed.verified_blocks) == (KV_MISMATCH, right)
    assert target.engine.pool.blocks.census().referenced == 0
    assert target.engine.pool.blocks.cached == 0  # what is wrong is never found by another request
    assert target.engine.drain_rungs() == ([], [])


def test_another_prompts_kv_is_noticed(pair):
    source, target = pair
    blocks = prefill(source, 320, seed=1)
    receive(target, blocks, 320)
    decode(target, 320, seed=2)
    assert target.one("d", Failed).verified_blocks == 0


def test_others_in_the_batch_do_not_suffer_from_a_failed_one(pair):
    source, target = pair
    target.engine.submit(Job("other", ids(90, 3), max_tokens=20), 0.0)
    target.step()
    receive(target, flipped(prefill(source, 1000)), 1000)
    decode(target, 1000)
    assert target.one("other", Finished).output_tokens == 20
    assert target.engine.busy_ms == pytest.approx(target.now_ms)
    assert target.one("d", Failed).gpu_ms + target.one("other", Finished).gpu_ms == pytest.approx(target.now_ms)


def test_a_writer_with_an_old_epoch_is_fenced_and_cannot_spoil_the_new_lease(pair):
    source, target = pair
    blocks = prefill(source, 1000)
    pool = target.engine.pool
    assert pool.reserve("t", 1000, 1)
    pool.write("t", 1, 0, blocks[0])
    assert pool.reserve("t", 1000, 2)
    with pytest.raises(Fenced) as fenced:
        pool.write("t", 1, 1, bytes(len(blocks[1])))
    assert (fenced.value.transfer, fenced.value.epoch) == ("t", 1)
    for call in (lambda: pool.commit("t", 1), lambda: pool.reserve("t", 1000, 1)):
        with pytest.raises(Fenced):
            call()
    # block 0 of the old epoch does not count in the new one: it is missing until it is written again
    for index, payload in enumerate(blocks[1:], start=1):
        pool.write("t", 2, index, payload)
    pool.commit("t", 2)
    decode(target, 1000)
    assert target.one("d", Failed).verified_blocks == 62


def test_decode_needs_a_committed_lease_of_its_prompt(pair):
    _, target = pair
    job = Job("d", ids(100), max_tokens=30, kind="decode", transfer="t")
    with pytest.raises(Fenced, match="no lease"):
        target.engine.submit(job, 0.0)
    assert target.engine.pool.reserve("t", 101, 1)
    with pytest.raises(Fenced, match="not committed"):
        target.engine.submit(job, 0.0)
    target.engine.pool.commit("t", 1)
    with pytest.raises(Fenced, match="101 tokens, not 100"):
        target.engine.submit(job, 0.0)
    assert target.engine.waiting == 0
    assert not target.engine.cancel("d")
    assert target.engine.pool.release("t")
    assert target.engine.pool.blocks.census().referenced == 0


def test_a_cancelled_decode_frees_what_came_for_it(pair):
    source, target = pair
    receive(target, prefill(source, 500), 500)
    target.engine.submit(Job("d", ids(500), max_tokens=30, kind="decode", transfer="t"), 0.0)
    assert not target.engine.pool.release("t")  # the blocks are the job's now
    assert target.engine.cancel("d")
    assert target.engine.pool.blocks.census().referenced == 0


def test_transferred_jobs_pass_prompts_that_wait_for_room(drive):
    source, target = drive(), drive(kv_tokens=1280)
    receive(target, prefill(source, 640), 640)
    target.engine.submit(Job("big", ids(1000, 4), max_tokens=10), 0.0)
    decode(target, 640)
    assert target.one("d", Finished).output_tokens == 30
    assert target.one("big", Finished).output_tokens == 10


def test_a_preempted_decode_is_computed_here_and_says_the_same(drive):
    source, target, whole = drive(), drive(kv_tokens=640), drive()
    whole.engine.submit(Job("d", ids(320), max_tokens=200), 0.0)
    whole.run()
    blocks = prefill(source, 320)
    target.engine.submit(Job("older", ids(100, 3), max_tokens=300), 0.0)
    target.step()
    receive(target, blocks, 320)
    target.engine.submit(Job("d", ids(320), max_tokens=200, kind="decode", transfer="t"), target.now_ms)
    target.run()
    assert target.text("d") == whole.text("d")
    assert target.one("d", Finished).verified_blocks == 20
    assert target.engine.prefill_busy_ms > 0.0
    assert len(target.of("d", FirstToken)) == 1


def test_an_export_stops_when_its_pin_goes(pair):
    source, _ = pair
    prefill(source, 100)
    reading = source.engine.pool.export("t")
    next(reading)
    source.engine.pool.release("t")
    with pytest.raises(Fenced, match="while it was read"):
        next(reading)
    with pytest.raises(Fenced, match="nothing is pinned"):
        source.engine.pool.export("t")


def test_a_prefill_job_can_hit_what_is_cached(pair):
    source, target = pair
    prefill(source, 1000, transfer="u")
    assert prefill(source, 1000) == list(source.engine.pool.export("u"))
    assert source.one("p-t", Prefilled).cached_tokens == 992
    source.engine.pool.release("u")
    receive(target, list(source.engine.pool.export("t")), 1000)
    decode(target, 1000)
    assert target.one("d", Finished).verified_blocks == 63
