"""Two agents share a request: prefill on one, KV moved, decode on the other. The coordinator is played by hand."""

import asyncio

import pytest

from quartet_agent.kv.memory import MemoryMover
from quartet_bus.messages import KvVerb, Phase
from quartet_core.transfer_words import State

PROMPT = "a conversation about lanes and rungs, " * 60  # some 600 tokens: 37 blocks and a part of one
FAST_LINK = {"gb_per_s": 20.0, "setup_ms": 1.0}


class Pair:
    """A prefill agent, a decode agent, and one transfer between them."""

    def __init__(self, stage, source, target, body, tokens):
        self.stage, self.source, self.target, self.body, self.tokens = stage, source, target, body, tokens

    def dispatch(self, *, prefill=True, run=True):
        stage = self.stage
        if run:
            stage.run(self.target, self.body, split=stage.split_of(self.source, self.tokens))
        if prefill:
            stage.prefill(self.source, self.body, stage.split_of(self.target, self.tokens))

    async def reserve(self, **fields):
        return await self.stage.kv(self.target, KvVerb.RESERVE, tokens=self.tokens, **fields)

    async def move(self, lease, **fields):
        told = {"kv_bytes": self.tokens * 131_072, "address": lease.address, "secret": lease.secret,
                "epoch": lease.epoch, "tokens": self.tokens, "link": "TCP"} | FAST_LINK | fields  # fmt: skip
        return await self.stage.kv(self.source, KvVerb.MOVE, **told)

    async def commit(self, lease):
        return await self.stage.kv(self.target, KvVerb.COMMIT, epoch=lease.epoch)

    async def release(self, agent, epoch=0):
        return await self.stage.kv(agent, KvVerb.RELEASE, epoch=epoch)

    def free(self):
        return [
            worker.adapter.load().free_kv_fraction
            for agent in (self.source, self.target)
            for worker in agent.workers.values()
        ]


@pytest.fixture
def split(on_stage, config_of, body_of, engine_of):
    """Runs ``play(pair)`` with two agents; ``mover`` may replace the source's."""

    def perform(play, *, mover=None, **fields):
        async def whole(stage):
            source = await stage.agent(config_of("p"), mover=mover(stage) if mover else None)
            target = await stage.agent(config_of("d", engine_of("L40S_PCIE")))
            body = body_of(PROMPT, max_tokens=6, **fields)
            from quartet_core.openai import parse

            return await play(Pair(stage, source, target, body, parse(body).prompt_tokens))

        return on_stage(whole)

    return perform


def test_a_split_request_is_prefilled_moved_decoded_and_verified(split, on_stage, config_of, body_of):
    async def play(pair):
        pair.dispatch()
        lease = await pair.reserve()
        taken = await pair.move(lease)
        await asyncio.sleep(0.5)
        states = [report.state for report in pair.stage.heard.progress]
        committed = await pair.commit(lease)
        again = await pair.commit(lease)
        await pair.release(pair.source)
        await asyncio.sleep(2)
        return pair, lease, taken, committed, again, states

    pair, lease, taken, committed, again, states = split(play)
    heard = pair.stage.heard
    assert (lease.ok, taken.ok, committed.ok, again.ok) == (True,) * 4
    assert states == [State.MOVING, State.MOVED]
    phases = [(e.phase.value, e.worker) for e in heard.events]
    assert phases == [
        ("accepted", "d-0"), ("accepted", "p-0"), ("prefilled", "p-0"), ("end", "p-0"), ("first_token", "d-0"),
        ("end", "d-0"),
    ]  # fmt: skip
    prefill_end, decode_end = (e for e in heard.events if e.phase is Phase.END)
    assert (prefill_end.role, prefill_end.status, prefill_end.output_tokens) == ("prefill", "ok", 0)
    assert (decode_end.role, decode_end.status, decode_end.output_tokens) == ("decode", "ok", 6)
    assert decode_end.verified_blocks == -(-pair.tokens // 16)
    assert decode_end.transferred_tokens == pair.tokens
    assert prefill_end.gpu_ms > decode_end.gpu_ms / 10 > 0
    moved = heard.progress[-1]
    assert moved.wire_bytes == pair.tokens * 64
    assert moved.kv_bytes == pair.tokens * 131_072
    # 1 ms of setup, then bytes at 20 GB/s: the link is charged the model's size, not what we send for it
    assert moved.took_ms == pytest.approx(1.0 + pair.tokens * 131_072 / 20e6, abs=0.01)
    assert pair.free() == [1.0, 1.0]

    async def whole(stage):
        stage.run(await stage.agent(config_of("n1")), body_of(PROMPT, max_tokens=6))
        await asyncio.sleep(2)
        return stage.heard.text()

    assert heard.text() == on_stage(whole)


def test_commit_before_the_run_arrives_is_used_when_it_does(split):
    async def play(pair):
        pair.dispatch(run=False)
        lease = await pair.reserve()
        await pair.move(lease)
        await asyncio.sleep(0.5)
        await pair.commit(lease)
        pair.dispatch(prefill=False)
        await asyncio.sleep(2)
        await pair.release(pair.source)
        return pair

    assert [e.status for e in split(play).stage.heard.events if e.phase is Phase.END and e.role == "decode"] == ["ok"]


def test_an_order_to_move_may_come_before_its_prefill(split):
    async def play(pair):
        lease = await pair.reserve()
        await pair.move(lease)
        await asyncio.sleep(0.1)
        pair.dispatch()
        await asyncio.sleep(0.5)
        await pair.commit(lease)
        await asyncio.sleep(1)
        await pair.release(pair.source)
        return pair.stage.heard

    heard = split(play)
    assert heard.last(Phase.END).status == "ok"
    assert [e.verified_blocks > 0 for e in heard.events if e.phase is Phase.END and e.role == "decode"] == [True]


def test_a_lease_that_nobody_renews_expires_and_the_waiting_decode_is_turned_back(split):
    async def play(pair):
        pair.dispatch(prefill=False)
        await pair.reserve(lease_ms=200.0)
        await asyncio.sleep(0.15)
        renewed = await pair.stage.kv(pair.target, KvVerb.RENEW, lease_ms=200.0)
        await asyncio.sleep(0.15)
        still = len(pair.target.arrivals)
        await asyncio.sleep(0.2)
        late = await pair.stage.kv(pair.target, KvVerb.RENEW, lease_ms=200.0)
        return pair, renewed, still, late

    pair, renewed, still, late = split(play)
    assert (renewed.ok, still, late.ok) == (True, 1, False)
    assert pair.stage.heard.phases() == ["accepted", "refused", "end"]
    assert pair.stage.heard.last(Phase.REFUSED).reason == "kv_expired"
    assert pair.stage.heard.kinds() == ["Accepted"]
    assert pair.free() == [1.0, 1.0]
    assert pair.target.arrivals.expired == 1


def test_without_any_coordinator_the_decode_is_turned_back_once_a_standby_would_have_taken_over(split):
    async def play(pair):
        pair.dispatch(prefill=False)
        await asyncio.sleep(1.4)
        assert pair.stage.heard.phases() == ["accepted"]
        await asyncio.sleep(0.2)
        return pair.stage.heard

    heard = split(play)
    assert heard.phases() == ["accepted", "refused", "end"]
    assert heard.last(Phase.REFUSED).reason == "kv_expired"


def test_kept_kv_that_nobody_fetches_is_freed_by_expiry(split):
    async def play(pair):
        pair.dispatch(run=False)
        await asyncio.sleep(1)
        kept = pair.free()
        await asyncio.sleep(5)
        return pair, kept

    pair, kept = split(play)
    assert kept[0] < 1.0
    assert pair.free()[0] == 1.0
    end = pair.stage.heard.last(Phase.END)
    assert (end.role, end.status, end.reason) == ("prefill", "error", "kv_expired")


@pytest.mark.parametrize("when_s", [0.0, 0.001, 0.5])
def test_a_cancel_frees_both_halves_whenever_it_comes(split, when_s):
    async def play(pair):
        pair.dispatch()
        await pair.reserve()
        await asyncio.sleep(when_s)
        pair.stage.cancel()
        await asyncio.sleep(0.5)
        return pair, len(pair.source.departures), len(pair.target.arrivals)

    pair, departures, arrivals = split(play)
    ends = [(e.worker, e.status) for e in pair.stage.heard.events if e.phase is Phase.END]
    assert sorted(ends) == [("d-0", "cancelled"), ("p-0", "cancelled")]
    assert (departures, arrivals) == (0, 0)
    assert pair.free() == [1.0, 1.0]
    assert [report.state for report in pair.stage.heard.progress] == [State.ABORTED]  # the coordinator is told


def test_a_release_in_mid_transfer_stops_it_and_frees_the_source(split):
    async def play(pair):
        pair.dispatch()
        lease = await pair.reserve()
        await pair.move(lease, gb_per_s=0.001)  # would take minutes
        await asyncio.sleep(0.5)
        await pair.release(pair.source, lease.epoch)
        await pair.release(pair.target, lease.epoch)
        await asyncio.sleep(0.5)
        return pair

    pair = split(play)
    assert pair.free() == [1.0, 1.0]
    assert pair.stage.heard.last(Phase.REFUSED).reason == "kv_released"
    assert State.MOVED not in [report.state for report in pair.stage.heard.progress]


class SpoilingMover(MemoryMover):
    """Sends one block of another prompt, with a checksum that is right for it."""

    async def send(self, address, secret, transfer, epoch, blocks, chunk_bytes):
        spoiled = [block async for batch in blocks for block in batch]
        spoiled[3] = spoiled[4]
        return await super().send(address, secret, transfer, epoch, spoiled, chunk_bytes)


def test_a_stale_block_is_noticed_before_anything_is_said_to_the_client(split):
    async def play(pair):
        pair.dispatch()
        lease = await pair.reserve()
        await pair.move(lease)
        await asyncio.sleep(0.5)
        await pair.commit(lease)
        await asyncio.sleep(1)
        await pair.release(pair.source)
        return pair

    pair = split(play, mover=lambda stage: SpoilingMover(stage.network, "p"))
    heard = pair.stage.heard
    assert heard.last(Phase.REFUSED).reason == "kv_mismatch"
    [end] = [e for e in heard.events if e.phase is Phase.END and e.role == "decode"]
    assert (end.status, end.reason) == ("error", "kv_mismatch")
    assert end.verified_blocks == -(-pair.tokens // 16) - 1
    assert heard.kinds() == ["Accepted"]
    assert pair.free() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"secret": bytes(16)}, "lease"), ({"epoch": 99}, "fenced"), ({"address": "nobody"}, "connection")],
)
def test_a_sender_without_the_lease_writes_nothing_and_says_why(split, wrong, reason):
    async def play(pair):
        pair.dispatch(run=False)
        lease = await pair.reserve()
        await pair.move(lease, **wrong)
        await asyncio.sleep(0.5)
        refused = await pair.commit(lease)
        await pair.release(pair.target)
        return pair, refused

    pair, refused = split(play)
    [moving, failed] = pair.stage.heard.progress
    assert (moving.state, failed.state) == (State.MOVING, State.ABORTED)
    assert failed.detail.startswith(reason)
    assert (refused.ok, refused.reason) == (False, "incomplete")
    assert pair.stage.heard.last(Phase.END).reason == "kv_failed"
    assert pair.free() == [1.0, 1.0]


def test_a_secret_opens_its_lease_once(split):
    async def play(pair):
        pair.dispatch(run=False)
        lease = await pair.reserve()
        await pair.move(lease)
        await asyncio.sleep(0.5)
        from quartet_agent.kv.mover import MoveError

        with pytest.raises(MoveError) as error:
            pair.target.arrivals.open("x", lease.epoch, lease.secret)
        await pair.release(pair.target)
        await pair.release(pair.source)
        return error.value.reason

    assert split(play) == "lease"


def test_a_replaced_coordinator_is_not_obeyed(split):
    async def play(pair):
        newer = await pair.reserve(term=2)
        old = await pair.stage.kv(pair.target, KvVerb.RELEASE, term=1)
        held = len(pair.target.arrivals)
        found = await pair.stage.kv(pair.target, KvVerb.LEASES, term=2)
        same_term = await pair.stage.kv(pair.target, KvVerb.RELEASE, term=2, coordinator="b")
        await pair.stage.kv(pair.target, KvVerb.RELEASE, term=2)
        return newer, old, held, found, same_term

    newer, old, held, found, same_term = split(play)
    assert newer.ok
    assert (old.ok, old.reason, held) == (False, "old_term", 1)
    assert (same_term.ok, same_term.reason) == (False, "old_term")
    assert old.term == same_term.term > 0, "the term that counts, so that whoever is refused can lead above it"
    [lease] = found.leases
    assert (lease.transfer, lease.worker, lease.epoch, lease.state) == ("x", "d-0", newer.epoch, "reserved")
    assert 0 < lease.remaining_ms <= 5000


def test_reserve_again_is_the_same_lease_and_too_much_is_no_space(split):
    async def play(pair):
        first, second = await pair.reserve(), await pair.reserve()
        huge = await pair.stage.kv(pair.target, KvVerb.RESERVE, transfer="y", tokens=10**9)
        other = await pair.stage.kv(pair.target, KvVerb.RESERVE, transfer="z", tokens=16)
        await pair.release(pair.target)
        await pair.stage.kv(pair.target, KvVerb.RELEASE, transfer="z")
        return first, second, huge, other

    first, second, huge, other = split(play)
    assert (first.epoch, first.secret) == (second.epoch, second.secret)
    assert (huge.ok, huge.reason) == (False, "no_space")
    assert other.epoch > first.epoch
    assert other.secret != first.secret


def test_a_probe_after_the_blocks_were_handed_over_learns_their_epoch(split):
    async def play(pair):
        pair.dispatch()
        lease = await pair.reserve()
        await pair.move(lease)
        await asyncio.sleep(0.5)
        await pair.commit(lease)
        probe = await pair.stage.kv(pair.target, KvVerb.COMMIT, epoch=0)
        again = await pair.reserve()
        await pair.release(pair.source)
        await asyncio.sleep(1)
        return lease, probe, again

    lease, probe, again = split(play)
    assert (probe.ok, probe.epoch) == (False, lease.epoch)
    assert not again.ok  # never a second lease for a transfer that is over
