"""KV that leaves while its prefill computes: what is sent when, what the link is charged, and how it ends."""

import asyncio

import pytest

from quartet_agent.kv.flow import Charge, FlowClock
from quartet_agent.kv.memory import TimedLink
from quartet_bus.messages import KvVerb, Phase
from quartet_core.transfer_words import State
from quartet_sim.sharing import SharedLink

PROMPT = "a conversation about lanes and rungs, " * 900  # some 8,500 tokens: five chunks of 2,048
QUICK = {"gb_per_s": 46.6, "setup_ms": 0.4}
SLOW = {"gb_per_s": 2.0, "setup_ms": 0.4}


class Pair:
    """A prefill agent, a decode agent, and one transfer between them whose order comes at once."""

    def __init__(self, stage, source, target, body, tokens):
        self.stage, self.source, self.target, self.body, self.tokens = stage, source, target, body, tokens
        self.kv_bytes = tokens * 131_072

    def dispatch(self):
        self.stage.run(self.target, self.body, split=self.stage.split_of(self.source, self.tokens))
        self.stage.prefill(self.source, self.body, self.stage.split_of(self.target, self.tokens))

    async def order(self, **fields):
        lease = await self.stage.kv(self.target, KvVerb.RESERVE, tokens=self.tokens)
        told = {"kv_bytes": self.kv_bytes, "address": lease.address, "secret": lease.secret,
                "epoch": lease.epoch, "tokens": self.tokens, "link": "RDMA_ROCE"} | fields  # fmt: skip
        await self.stage.kv(self.source, KvVerb.MOVE, **told)
        return lease

    async def finish(self, lease):
        committed = await self.stage.kv(self.target, KvVerb.COMMIT, epoch=lease.epoch)
        await self.stage.kv(self.source, KvVerb.RELEASE)
        await asyncio.sleep(2)
        return committed

    def reports(self, state):
        return [report for report in self.stage.heard.progress if report.state == state]

    def free(self):
        return [
            worker.adapter.load().free_kv_fraction
            for agent in (self.source, self.target)
            for worker in agent.workers.values()
        ]


@pytest.fixture
def split(on_stage, config_of, body_of, engine_of):
    def perform(play):
        async def whole(stage):
            source = await stage.agent(config_of("p"))
            target = await stage.agent(config_of("d", engine_of("L40S_PCIE")))
            body = body_of(PROMPT, max_tokens=6)
            from quartet_core.openai import parse

            return await play(Pair(stage, source, target, body, parse(body).prompt_tokens))

        return on_stage(whole)

    return perform


async def until(condition, patience_s=5.0):
    """Wait for it in steps of 0.2 ms; the time that it took."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while not condition():
        assert loop.time() - begun < patience_s
        await asyncio.sleep(0.0002)
    return loop.time() - begun


@pytest.mark.parametrize("link", [QUICK, SLOW], ids=["computing binds", "the link binds"])
def test_a_transfer_that_began_with_the_first_chunk_is_there_when_its_rest_has_crossed(split, link):
    async def play(pair):
        pair.dispatch()
        lease = await pair.order(**link)
        await until(lambda: pair.reports(State.MOVING))
        first_ms = asyncio.get_running_loop().time() * 1e3
        computing = pair.reports(State.MOVING)[0].computing
        await until(lambda: len(pair.reports(State.MOVING)) == 2)
        prefilled_ms = asyncio.get_running_loop().time() * 1e3
        left_ms = 1e3 * await until(lambda: pair.reports(State.MOVED))
        return pair, await pair.finish(lease), computing, prefilled_ms - first_ms, left_ms

    pair, committed, computing, meanwhile_ms, left_ms = split(play)
    heard = pair.stage.heard
    through, moved = pair.reports(State.MOVING)[1], pair.reports(State.MOVED)[0]
    alone_ms = link["setup_ms"] + pair.kv_bytes / (link["gb_per_s"] * 1e6)
    assert (computing, through.computing, committed.ok) == (True, False, True)
    # waits for chunks are in neither time
    assert moved.took_ms == pytest.approx(alone_ms, abs=0.1)
    assert moved.overlap_ms == pytest.approx(alone_ms - left_ms, abs=1.0)
    last_share = (pair.tokens - pair.tokens // 2048 * 2048) / pair.tokens
    expected_ms = max(alone_ms * last_share, alone_ms - meanwhile_ms)
    assert left_ms == pytest.approx(expected_ms, abs=1.0)
    assert through.left_bytes == pytest.approx(expected_ms / alone_ms * pair.kv_bytes, rel=0.05)
    ends = {e.role: e for e in heard.events if e.phase is Phase.END}
    assert (ends["decode"].status, ends["decode"].verified_blocks) == ("ok", -(-pair.tokens // 16))
    assert ends["prefill"].status == "ok"
    assert pair.free() == [1.0, 1.0]


def test_a_source_without_an_order_says_once_that_it_could_begin(split):
    async def play(pair):
        pair.dispatch()
        await until(lambda: Phase.PREFILLED in {event.phase for event in pair.stage.heard.events})
        said = [report.state for report in pair.stage.heard.progress]
        lease = await pair.order(**QUICK)
        await until(lambda: pair.reports(State.MOVED))
        return pair, said, await pair.finish(lease)

    pair, said, committed = split(play)
    assert said == [State.COMPUTING]
    assert committed.ok
    assert pair.reports(State.MOVED)[0].overlap_ms == 0.0


@pytest.mark.parametrize("how", ["cancel", "release"])
def test_a_prefill_that_ends_in_mid_send_leaves_nothing_committed_and_nothing_kept(split, how):
    async def play(pair):
        pair.dispatch()
        lease = await pair.order(**QUICK)
        await until(lambda: pair.reports(State.MOVING))
        await asyncio.sleep(0.02)
        if how == "cancel":
            pair.stage.cancel()
        else:
            await pair.stage.kv(pair.source, KvVerb.RELEASE)
        await asyncio.sleep(0.2)
        committed = await pair.stage.kv(pair.target, KvVerb.COMMIT, epoch=lease.epoch)
        await pair.stage.kv(pair.target, KvVerb.RELEASE)
        await asyncio.sleep(1)
        return pair, committed

    pair, committed = split(play)
    assert (committed.ok, pair.reports(State.MOVED)) == (False, [])
    assert [report.state for report in pair.reports(State.ABORTED)] == ([State.ABORTED] if how == "cancel" else [])
    assert pair.free() == [1.0, 1.0]
    assert (len(pair.source.departures), len(pair.target.arrivals)) == (0, 0)


def charge(link, now_ms, gb_per_s=1.0, kv_bytes=100_000_000):
    return Charge(0.0, kv_bytes, gb_per_s, link, now_ms)


def test_a_flow_that_waits_for_compute_leaves_the_link_to_the_others(on_stage):
    async def whole(stage):
        loop = asyncio.get_running_loop()

        def now_ms():
            return loop.time() * 1e3

        begun_ms = now_ms()
        link = TimedLink(SharedLink(1.0), now_ms)
        trickle, steady = charge(link, now_ms), charge(link, now_ms)
        tasks = [asyncio.ensure_future(each.run()) for each in (trickle, steady)]
        steady.reach(1.0)
        trickle.reach(0.1)  # 10 ms of it; both share for 20 ms
        await tasks[1]
        alone_ms = now_ms()
        trickle.reach(1.0)
        await tasks[0]
        return alone_ms - begun_ms, now_ms() - begun_ms, trickle.clock.flowed_ms

    alone_ms, end_ms, flowed_ms = on_stage(whole)
    assert (alone_ms, end_ms, flowed_ms) == pytest.approx((110.0, 200.0, 110.0), abs=0.5)


def test_a_clock_counts_what_flowed_and_how_much_of_it_before_all_was_computed():
    times = iter([0.0, 10.0, 20.0, 25.0, 40.0, 50.0, 60.0])
    clock = FlowClock(lambda: next(times))
    clock.start()
    clock.stop()
    clock.start()
    clock.whole()  # at 25
    clock.stop()
    clock.start()
    clock.stop()
    assert (clock.flowed_ms, clock.overlap_ms) == (10.0 + 20.0 + 10.0, 10.0 + 5.0)
