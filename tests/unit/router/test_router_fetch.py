"""A router has a cached prefix moved to a worker with time; what becomes of the loan is nobody's failure."""

import array
import asyncio

import msgspec
import pytest
from router_stage import play, worker

from quartet_bus import frames, subjects
from quartet_bus.messages import (
    AffinityUpdate,
    Cancel,
    ControlReply,
    ControlRequest,
    LedgerNote,
    LinkInfo,
    LinkState,
    LinkTable,
    Phase,
    Prefill,
    Role,
    Run,
    TransferPlan,
    TransferReason,
    TransferReport,
)
from quartet_core.affinity import DEFAULT_K, DEFAULT_ROWS, rows_of
from quartet_core.ladder import sketch_tokens
from quartet_core.verdict import Verdict

PROMPT = list(range(16_000))
BODY = b'{"prompt":' + str(PROMPT).encode() + b',"max_tokens":8,"stream":true}'


async def fetching(stage):
    """Worker a-0 holds the prompt and is busy; b-0 is idle; c-0 is there for whatever goes wrong, and slow."""
    fabric = (LinkInfo("RDMA_ROCE", 46.6, 0.4),)
    await stage.announce(worker("a-0"), node="a", links=fabric)
    await stage.announce(worker("b-0"), node="b", links=fabric)
    await stage.announce(worker("c-0", "L40S_PCIE"), node="c")
    rows = [row for rung in sketch_tokens(PROMPT).rungs for row in rows_of(rung, DEFAULT_ROWS, DEFAULT_K)]
    on = array.array("I", sorted(set(rows))).tobytes()
    stage.say(subjects.affinity("a-0"), AffinityUpdate("a-0", 1, 1, DEFAULT_ROWS, DEFAULT_K, on, full=True))
    await stage.word("a-0", queue=900.0, batch=20)
    await stage.word("c-0", batch=50)
    links = (LinkState("a", "b", "RDMA_ROCE", 46.6, 0.4), LinkState("b", "a", "RDMA_ROCE", 46.6, 0.4))
    stage.say(subjects.kv_links(), LinkTable(1, "k", links))
    await stage.settle()


def scene(script):
    async def whole(stage):
        await fetching(stage)
        await stage.ask(BODY)
        await script(stage, *stage.of(Run), *stage.of(Prefill), *stage.of(TransferPlan))

    play(whole, long_prompt_tokens=1 << 20)


def lost(plan, **more):
    return TransferReport(plan.transfer, plan.stream, TransferReason.FETCH, "aborted", "a-0", "b-0", **more)


def test_the_worker_the_lender_and_the_coordinator_are_told_at_once():
    async def script(stage, run, prefill, plan):
        assert (run.worker, prefill.worker, run.split) == ("b-0", "a-0", None)
        assert (plan.source, plan.target, plan.reason) == ("a-0", "b-0", TransferReason.FETCH)
        assert run.fetch.transfer == prefill.split.transfer == plan.transfer
        assert (run.fetch.peer, prefill.split.peer) == ("a-0", "b-0")
        assert run.fetch.tokens == prefill.split.tokens == plan.tokens
        assert 14_000 <= plan.tokens < prefill.prompt_tokens == 16_000
        assert plan.tokens % 16 == 0
        assert plan.kv_bytes == plan.tokens * 131_072
        assert run.body == prefill.body == BODY
        # who would have to compute the prefix after all waits for it no longer than that takes
        assert plan.deadline_ms == run.fetch_wait_ms > plan.predicted_ms > 0
        assert run.predicted_prefill_ms < run.fetch_wait_ms
        notes = {note.worker: note for note in stage.of(LedgerNote)}
        assert (notes["a-0"].role, notes["a-0"].prefill_ms) == (Role.PREFILL, 0.0)
        assert (notes["b-0"].role, notes["b-0"].prefill_ms) == (Role.BOTH, run.predicted_prefill_ms)

    scene(script)


def test_a_failed_transfer_changes_nothing_and_is_counted():
    async def script(stage, run, _, plan):
        stage.event(Phase.ACCEPTED, run, beat=1)
        stage.say(subjects.kv_failed(), lost(plan, detail="deadline"))
        await asyncio.sleep(0.5)
        assert stage.of(Cancel) == []
        assert len(stage.of(Run)) == 1
        assert "quartet_router_fetches_failed_total 1.0" in stage.router.metrics.exposition().decode()

    scene(script)


@pytest.mark.parametrize("how", ["refuses", "dies", "says nothing", "fails"])
def test_a_lender_that_does_not_lend_changes_nothing(how):
    async def script(stage, run, prefill, _):
        stage.event(Phase.ACCEPTED, run, beat=1)
        if how == "refuses":
            stage.event(Phase.REFUSED, prefill, role=Role.PREFILL, reason="draining")
        elif how == "dies":
            await stage.word("a-0", verdict=Verdict.DEAD, beat=2)
        elif how == "fails":
            stage.event(Phase.ACCEPTED, prefill, role=Role.PREFILL, beat=1)
            stage.event(Phase.END, prefill, role=Role.PREFILL, beat=2, status="error", code=503, reason="kv_failed")
        await asyncio.sleep(0.6)
        assert len(stage.of(Run)) == 1
        assert [f for f in stage.frames if isinstance(f, frames.Error)] == []
        stage.event(Phase.FIRST_TOKEN, run, beat=2)
        stage.event(Phase.END, run, beat=3, status="ok", output_tokens=8)
        await stage.settle()
        assert len(stage.router._flights) == 0
        await stage.word("b-0", beat=4)
        assert len(stage.router.routing.ledger) == 0
        told = [(cancel.try_, cancel.reason) for cancel in stage.of(Cancel)]
        assert told == ([(1, "peer_ended")] if how == "says nothing" else [])

    scene(script)


def test_a_cancel_reaches_the_lender_too():
    async def script(stage, run, prefill, _):
        stage.event(Phase.ACCEPTED, run, beat=1)
        stage.event(Phase.ACCEPTED, prefill, role=Role.PREFILL, beat=1)
        await stage.settle()
        stage.say(subjects.cancel("acme"), Cancel("q", 1))
        await stage.settle()
        assert [(c.id, c.attempt, c.try_) for c in stage.of(Cancel)] == [("q", 1, 1)] * 2
        assert len(stage.router._flights) == 0

    scene(script)


def test_a_target_that_refuses_is_replaced_and_its_lender_told():
    async def script(stage, run, prefill, _):
        stage.event(Phase.ACCEPTED, prefill, role=Role.PREFILL, beat=1)
        stage.event(Phase.REFUSED, run, reason="full")
        await asyncio.sleep(2.1)  # it may have waited for the lender, which holds the prefix and did nothing wrong
        assert [cancel.reason for cancel in stage.of(Cancel)] == ["refused"]
        second = stage.of(Run)[-1]
        assert second.worker != "b-0"
        assert (second.stream.try_, second.fetch) == (2, None)

    scene(script)


def test_explain_and_status_show_the_fetch():
    async def script(stage, run, *_):
        async def control(verb, argument=""):
            reply = await stage.bus.request(
                subjects.control("router", "r0", verb).subject,
                msgspec.msgpack.encode(ControlRequest(argument=argument)), timeout_s=1.0,
            )  # fmt: skip
            return msgspec.json.decode(msgspec.msgpack.decode(reply.data, type=ControlReply).payload)

        (decision,) = (await control("explain", "q"))["decisions"]
        assert decision["reason"] == "fetch"
        best, other = decision["plans"][:2]
        assert (best["source"], best["prefill"], best["fetched_tokens"]) == ("a-0", "b-0", run.fetch.tokens)
        assert (other["source"], other["fetched_tokens"]) == ("", 0)
        assert (await control("status"))["fetches"] == 1

    scene(script)


def test_without_a_coordinator_or_by_configuration_nothing_is_fetched():
    async def silent(stage):
        await fetching(stage)
        await asyncio.sleep(0.6)
        await stage.ask(BODY)
        assert stage.of(TransferPlan) == []
        assert [run.fetch for run in stage.of(Run)] == [None]

    async def forbidden(stage):
        await fetching(stage)
        await stage.ask(BODY)
        assert stage.of(TransferPlan) == []

    play(silent, long_prompt_tokens=1 << 20)
    play(forbidden, long_prompt_tokens=1 << 20, fetch=False)
