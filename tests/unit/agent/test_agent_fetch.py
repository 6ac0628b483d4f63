"""A run fetches its prompt's first part from a worker that has it cached. Whatever becomes of that, it is answered."""

import asyncio

import pytest

from quartet_agent.kv.memory import MemoryMover
from quartet_bus import subjects
from quartet_bus.messages import KvVerb, Phase, Prefill, Split, StreamId
from quartet_core.openai import parse
from quartet_core.transfer_words import State

PROMPT = "a conversation about lanes and rungs, " * 1200
LENT = 9600
FAST_LINK = {"gb_per_s": 20.0, "setup_ms": 1.0}


class Pair:
    """A worker that has answered the prompt before, one that has not, and a transfer between them."""

    def __init__(self, stage, source, target, body):
        self.stage, self.source, self.target, self.body = stage, source, target, body
        self.tokens = parse(body).prompt_tokens

    async def warm_up(self):
        self.stage.run(self.source, self.body, id="before", prompt_tokens=self.tokens)
        await asyncio.sleep(5)
        self.stage.heard.frames.clear()

    def run(self, wait_ms=1000.0, **fields):
        fetch = self.stage.split_of(self.source, LENT)
        fields = {"predicted_prefill_ms": 30.0, "prompt_tokens": self.tokens} | fields
        self.stage.run(self.target, self.body, fetch=fetch, fetch_wait_ms=wait_ms, **fields)

    def lend(self):
        hosted = next(iter(self.source.workers.values()))
        split = self.stage.split_of(self.target, LENT)
        self.stage.publish(
            subjects.worker_prefill(hosted.id),
            Prefill(
                stream=StreamId("r"), tenant="t", model="chat", worker=hosted.id, incarnation=hosted.incarnation,
                body=self.body, router="router", prompt_tokens=self.tokens, split=split,
            ),
        )  # fmt: skip

    async def reserve(self, **fields):
        return await self.stage.kv(self.target, KvVerb.RESERVE, tokens=LENT, **fields)

    async def move(self, lease, **fields):
        told = {"kv_bytes": LENT * 131_072, "address": lease.address, "secret": lease.secret, "epoch": lease.epoch,
                "tokens": LENT, "link": "TCP"} | FAST_LINK | fields  # fmt: skip
        return await self.stage.kv(self.source, KvVerb.MOVE, **told)

    async def commit(self, lease):
        return await self.stage.kv(self.target, KvVerb.COMMIT, epoch=lease.epoch)

    async def release(self, agent, epoch=0):
        return await self.stage.kv(agent, KvVerb.RELEASE, epoch=epoch)

    async def bring(self):
        """All of the transfer, as a coordinator would do it."""
        lease = await self.reserve()
        await self.move(lease)
        await asyncio.sleep(0.2)
        committed = await self.commit(lease)
        await self.release(self.source)
        return committed

    def end(self, worker):
        [end] = [e for e in self.stage.heard.events if (e.phase, e.worker, e.stream.id) == (Phase.END, worker, "r")]
        return end

    def outcomes(self):
        lines = self.target.metrics.exposition().decode().splitlines()
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines if "prefix_fetches_total{" in line}

    def free(self):
        return [
            worker.adapter.load().free_kv_fraction
            for agent in (self.source, self.target)
            for worker in agent.workers.values()
        ]


@pytest.fixture
def fetch(on_stage, config_of, body_of):
    """Runs ``play(pair)`` with two agents, the first of which has the prompt cached."""

    def perform(play, *, mover=None):
        async def whole(stage):
            source = await stage.agent(config_of("s"), mover=mover(stage) if mover else None)
            target = await stage.agent(config_of("d"))
            pair = Pair(stage, source, target, body_of(PROMPT, max_tokens=6))
            await pair.warm_up()
            await play(pair)
            await asyncio.sleep(3)
            assert pair.free() == [1.0, 1.0]
            return pair

        return on_stage(whole)

    return perform


@pytest.fixture
def alone(on_stage, config_of, body_of):
    """(text, time to first token) of the request on a worker with nothing cached."""

    async def whole(stage):
        stage.run(await stage.agent(config_of("n")), body_of(PROMPT, max_tokens=6))
        await asyncio.sleep(5)
        return stage.heard.text(), stage.heard.last(Phase.FIRST_TOKEN).ttft_ms

    return on_stage(whole)


def test_a_fetched_prefix_is_not_computed_and_the_answer_is_the_same(fetch, alone):
    async def play(pair):
        pair.run()
        pair.lend()
        assert (await pair.bring()).ok

    pair = fetch(play)
    text, ttft_ms = alone
    end = pair.end("d-0")
    assert (end.role, end.status, end.output_tokens) == ("both", "ok", 6)
    assert (end.cached_tokens, end.transferred_tokens, end.verified_blocks) == (0, LENT, LENT // 16)
    assert pair.stage.heard.text() == text
    first = next(e for e in pair.stage.heard.events if (e.phase, e.worker) == (Phase.FIRST_TOKEN, "d-0"))
    assert first.transferred_tokens == LENT
    # 200 ms passed until the commit; the wait for the prefix is in the queue time
    assert first.ttft_ms > first.queue_ms >= 200.0
    assert first.ttft_ms - first.queue_ms < ttft_ms / 3
    lender = pair.end("s-0")
    assert (lender.role, lender.status, lender.cached_tokens, lender.gpu_ms) == ("prefill", "ok", LENT, 0.0)
    assert pair.outcomes() == {"used": 1.0}
    moved = [report for report in pair.stage.heard.progress if report.state == State.MOVED]
    assert [report.wire_bytes for report in moved] == [LENT * 64]


def test_it_is_accepted_at_once_and_counts_as_queued_until_the_engine_has_it(fetch):
    async def play(pair):
        pair.run()
        await asyncio.sleep(0.05)
        hosted = pair.target.workers["d-0"]
        assert (pair.stage.heard.phases(), hosted.unread_ms) == (["accepted"], 30.0)
        pair.lend()
        await pair.bring()
        assert hosted.unread_ms == 0.0

    assert fetch(play).end("d-0").status == "ok"


def test_a_commit_that_overtook_the_run_is_used(fetch):
    async def play(pair):
        pair.lend()
        await pair.bring()
        pair.run(wait_ms=0.0)

    pair = fetch(play)
    assert pair.end("d-0").transferred_tokens == LENT
    assert pair.outcomes() == {"used": 1.0}


async def released(pair):
    await pair.release(pair.target, (await pair.reserve()).epoch)


async def expired(pair):
    await pair.reserve(lease_ms=50.0)


async def nothing(pair):
    pass


@pytest.mark.parametrize(
    ("what", "outcome", "after_ms"),
    [(released, "kv_released", 0.0), (expired, "kv_expired", 50.0), (nothing, "late", 400.0)],
)
def test_without_its_prefix_it_runs_all_the_same(fetch, alone, what, outcome, after_ms):
    async def play(pair):
        pair.run(wait_ms=400.0)
        await what(pair)

    pair = fetch(play)
    text, ttft_ms = alone
    end = pair.end("d-0")
    assert (end.status, end.cached_tokens, end.transferred_tokens) == ("ok", 0, 0)
    assert pair.stage.heard.phases() == ["accepted", "first_token", "end"]
    assert pair.stage.heard.text() == text
    assert pair.outcomes() == {outcome: 1.0}
    assert end.ttft_ms == pytest.approx(ttft_ms + after_ms, abs=1.0)


def test_a_prefix_that_comes_too_late_gets_no_blocks_and_its_lender_is_told(fetch):
    async def play(pair):
        pair.run(wait_ms=20.0)
        lease = await pair.reserve()
        await asyncio.sleep(0.05)
        pair.lend()
        await pair.move(lease)
        await asyncio.sleep(0.2)
        pair.late = await pair.commit(lease)
        pair.again = await pair.reserve()

    pair = fetch(play)
    assert pair.end("d-0").status == "ok"
    assert (pair.late.ok, pair.again.ok, pair.again.reason) == (False, False, "fenced")
    assert pair.stage.heard.progress[-1].state == State.ABORTED
    assert pair.end("s-0").reason == "kv_failed"
    assert pair.outcomes() == {"late": 1.0}


@pytest.mark.parametrize("when", ["unread", "waiting", "arriving", "committed"])
def test_a_cancel_frees_both_ends_whenever_it_comes(fetch, when):
    async def play(pair):
        pair.run()
        pair.lend()
        if when != "unread":
            lease = await pair.reserve()
        if when in ("arriving", "committed"):
            await pair.move(lease)
            await asyncio.sleep(0.2 if when == "committed" else 0.01)
        if when == "committed":
            await pair.commit(lease)
        pair.stage.cancel()
        await asyncio.sleep(0.1)
        assert (len(pair.source.departures), len(pair.target.arrivals)) == (0, 0)

    pair = fetch(play)
    assert (pair.end("d-0").status, pair.end("s-0").status) == ("cancelled", "cancelled")
    assert pair.outcomes() == {"used" if when == "committed" else "abandoned": 1.0}


def test_a_deadline_ends_the_wait_with_an_error(fetch):
    async def play(pair):
        pair.run(wait_ms=5000.0, deadline_ms=100)
        await pair.reserve()

    pair = fetch(play)
    assert (pair.end("d-0").code, pair.end("d-0").reason) == (504, "deadline")
    assert len(pair.target.arrivals) == 0


class SpoilingMover(MemoryMover):
    """Sends one block of another prompt, with a checksum that is right for it."""

    async def send(self, address, secret, transfer, epoch, blocks, chunk_bytes):
        spoiled = [block async for batch in blocks for block in batch]
        spoiled[300] = spoiled[4]
        return await super().send(address, secret, transfer, epoch, spoiled, chunk_bytes)


def test_stale_blocks_are_computed_anew_and_counted(fetch, alone):
    async def play(pair):
        pair.run()
        pair.lend()
        await pair.bring()

    pair = fetch(play, mover=lambda stage: SpoilingMover(stage.network, "s"))
    end = pair.end("d-0")
    assert (end.status, end.transferred_tokens, end.verified_blocks) == ("ok", 4800, 300)
    assert pair.stage.heard.text() == alone[0]
    assert "quartet_agent_prefix_blocks_dropped_total 300.0" in pair.target.metrics.exposition().decode()


def test_a_stopping_agent_lets_a_waiting_run_finish(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("d"))
        fetch = Split("x", "s-0", 1, 9600)
        stage.run(agent, body_of(PROMPT, max_tokens=6), fetch=fetch, fetch_wait_ms=300.0)
        await asyncio.sleep(0.01)
        await agent.stop()
        return stage.heard

    heard = on_stage(play)
    assert heard.last(Phase.END).status == "ok"
