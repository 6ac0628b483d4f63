"""The router on a bus: what it says for what it hears, with agents played by the test under virtual time."""

import asyncio
import random
from itertools import pairwise

import msgspec
import pytest
from router_stage import BODY, INBOX, config, encode, play, worker

from quartet_bus import frames, subjects
from quartet_bus.config.load import ConfigError
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    ControlReply,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    LedgerNote,
    LinkInfo,
    LinkState,
    LinkTable,
    NodeStamp,
    Phase,
    Prefill,
    Role,
    Run,
    StreamId,
    TransferPlan,
    TransferReason,
    TransferReport,
    WorkerState,
)
from quartet_core.verdict import Verdict
from quartet_core.word import pack
from quartet_router.edge import beginning
from quartet_router.service import RouterService


def errors(stage):
    return [(frame.status, frame.error.code) for frame in stage.frames if isinstance(frame, frames.Error)]


def test_a_request_is_dispatched_with_its_body_untouched_and_noted_in_the_shared_ledger():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.ask()
        (run,) = stage.of(Run)
        assert (run.worker, run.incarnation, run.inbox, run.body) == ("n-0", 1, INBOX, BODY)
        assert run.stream == StreamId("q", 1, 1)
        (note,) = stage.of(LedgerNote)
        assert (note.worker, note.router) == ("n-0", "r0")
        assert note.prefill_ms > 0
        stage.event(Phase.ACCEPTED, run, beat=1)
        stage.event(Phase.FIRST_TOKEN, run, beat=2)
        stage.event(Phase.END, run, beat=3, status="ok", output_tokens=8)
        await stage.settle()
        await stage.word("n-0", beat=4)
        assert len(stage.router.routing.ledger) == 0

    play(script)


@pytest.mark.parametrize(
    ("body", "model", "announced", "expected"),
    [
        (BODY, "nope", True, (404, "model_not_found")),
        (BODY, "cold", True, (503, "no_worker")),
        (BODY, "m", False, (503, "no_worker")),
        (b"{", "m", True, (400, None)),
        (b'{"prompt":"x","max_tokens":"many"}', "m", True, (400, None)),
        (b'{"prompt":' + str([1] * 120_000).encode() + b"}", "m", True, (400, "context_length_exceeded")),
    ],
)
def test_what_cannot_be_answered_gets_one_precise_error(body, model, announced, expected):
    async def script(stage):
        if announced:
            await stage.announce(worker("n-0"))
        await stage.ask(body, model)
        assert errors(stage) == [expected]
        assert stage.of(Run) == []

    play(script)


def test_a_reply_outside_the_tenants_inbox_is_dropped_and_counted():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.ask(reply="_INBOX.other.x")
        await stage.ask(reply="")
        assert stage.of(Run) == []
        assert stage.frames == []
        assert b'quartet_router_dropped_total{reason="inbox"} 2.0' in stage.router.metrics.exposition()

    play(script)


def test_all_busy_is_held_and_then_429_with_a_time_to_come_back():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", accepting=False)
        await stage.ask()
        assert [type(frame) for frame in stage.frames] == [frames.Held]
        await asyncio.sleep(0.4)
        assert errors(stage) == [(429, "all_busy")]
        assert stage.frames[-1].retry_after_s > 0

    play(script, hold_max_ms=300.0)


def test_no_hold_means_now_or_never():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", accepting=False)
        await stage.ask(headers={"Quartet-No-Hold": "1"})
        assert errors(stage) == [(429, "all_busy")]
        await stage.word("n-0", queue=5_000.0, beat=2)
        await stage.ask(id="q2", headers={"Quartet-No-Hold": "1"})
        assert len(stage.of(Run)) == 1

    play(script)


def test_a_held_request_leaves_when_its_worker_frees_and_says_so_every_second():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        await stage.ask()
        assert stage.of(Run) == []
        await asyncio.sleep(2.2)
        assert [type(frame).__name__ for frame in stage.frames] == ["Held", "Alive", "Alive"]
        await stage.word("n-0", queue=1.0, beat=2)
        assert len(stage.of(Run)) == 1
        assert len(stage.router._desk.holds) == 0

    play(script, hold_max_ms=60_000.0)


def test_no_request_waits_past_hold_max():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=60_000.0)
        for number in range(20):
            await stage.ask(id=f"q{number}")
        await asyncio.sleep(0.52)
        assert len(stage.of(Run)) == 20

    play(script, hold_max_ms=500.0)


def test_held_requests_leave_earliest_deadline_first():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        for number, ttft in enumerate((9_000, 3_000, 6_000)):
            await stage.ask(id=f"q{number}", headers={"Quartet-Ttft-Ms": str(ttft)})
        await stage.word("n-0", queue=1.0, beat=2)
        assert [run.stream.id for run in stage.of(Run)] == ["q1", "q2", "q0"]

    play(script, hold_max_ms=60_000.0)


def test_a_silent_worker_is_given_up_after_the_ack_timeout_and_the_next_one_tried():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.ask()
        await asyncio.sleep(0.3)
        first, second = stage.of(Run)
        assert {first.worker, second.worker} == {"n-0", "n-1"}
        assert (second.stream.id, second.stream.attempt, second.stream.try_) == ("q", 1, 2)
        (cancel,) = stage.of(Cancel)
        assert (cancel.id, cancel.try_, cancel.tenant) == ("q", 1, "acme")
        await asyncio.sleep(0.3)
        assert errors(stage) == [(503, "no_worker")]

    play(script)


def test_a_refusal_excludes_that_worker():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.ask()
        (run,) = stage.of(Run)
        stage.event(Phase.REFUSED, run, reason="draining")
        await stage.settle()
        assert len({run.worker for run in stage.of(Run)}) == 2

    play(script)


def test_a_worker_that_dies_before_the_first_token_is_replaced_and_after_it_an_error_is_told():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"), worker("n-2"))
        await stage.ask()
        run = stage.of(Run)[-1]
        stage.event(Phase.ACCEPTED, run)
        await stage.settle()
        await stage.word(run.worker, verdict=Verdict.DEAD)
        second = stage.of(Run)[-1]
        assert second.worker != run.worker
        stage.event(Phase.ACCEPTED, second)
        stage.event(Phase.FIRST_TOKEN, second)
        await stage.settle()
        await stage.word(second.worker, verdict=Verdict.DEAD)
        assert errors(stage) == [(502, "worker_lost")]
        assert len(stage.of(Run)) == 2

    play(script)


def test_a_cancel_reaches_the_worker_and_a_strangers_does_not():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.ask()
        stage.say(subjects.cancel("other"), Cancel("q"))
        await stage.settle()
        assert stage.of(Cancel) == []
        stage.say(subjects.cancel("acme"), Cancel("q", 1))
        await stage.settle()
        assert [(c.id, c.attempt) for c in stage.of(Cancel)] == [("q", 1)]
        assert len(stage.router._flights) == 0

    play(script)


def test_a_passed_deadline_is_told_instead_of_dispatched():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", accepting=False)
        await stage.ask(headers={"Quartet-Deadline-Ms": "100"})
        await asyncio.sleep(0.15)
        assert [status for status, _ in errors(stage)] in ([429], [504])
        assert stage.of(Run) == []

    play(script)


def test_another_routers_work_counts_here_and_its_end_is_heard():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        for number in range(4):
            stage.say(
                subjects.routed(),
                LedgerNote(
                    "r1", "dispatched", StreamId(f"x{number}"), "acme", "n-0", 1, Role.BOTH, 900.0, 20_000, 5_000.0,
                    0.0, 50.0,
                ),
            )  # fmt: skip
        await stage.settle()
        await stage.ask()
        assert [run.worker for run in stage.of(Run)] == ["n-1"]
        for number in range(4):
            stage.say(subjects.routed(), LedgerNote("r1", "ended", StreamId(f"x{number}"), "acme", "n-0", 1))
        await stage.settle()
        assert len(stage.router.routing.ledger) == 1

    play(script)


async def split_stage(stage):
    fabric = (LinkInfo("RDMA_ROCE", 46.6, 0.4),)
    await stage.announce(worker("p-0", "H100_SXM5", "big", tp=4, role=Role.PREFILL), node="p", links=fabric)
    await stage.announce(worker("d-0", "L40S_PCIE", "big", tp=4), node="d", links=fabric)
    links = (LinkState("p", "d", "RDMA_ROCE", 46.6, 0.4), LinkState("d", "p", "RDMA_ROCE", 46.6, 0.4))
    stage.say(subjects.kv_links(), LinkTable(1, "k", links))
    await stage.settle()


BIG = b'{"prompt":' + str(list(range(2000))).encode() + b',"max_tokens":400}'


def test_a_split_tells_both_halves_and_the_coordinator_at_once():
    async def script(stage):
        await split_stage(stage)
        await stage.ask(BIG, "big")
        (run,), (prefill,), (plan,) = stage.of(Run), stage.of(Prefill), stage.of(TransferPlan)
        assert (run.worker, prefill.worker) == ("d-0", "p-0")
        assert run.split.transfer == prefill.split.transfer == plan.transfer
        assert (run.split.peer, prefill.split.peer) == ("p-0", "d-0")
        assert plan.kv_bytes == 2000 * 131_072
        assert plan.predicted_ms > 0

    play(script)


def test_a_failed_transfer_cancels_both_halves_and_runs_the_request_on_one_worker_whichever_is_best():
    async def script(stage):
        await split_stage(stage)
        await stage.announce(worker("e-0", "L40S_PCIE", "big", tp=4), node="e")
        await stage.ask(BIG, "big")
        plan = stage.of(TransferPlan)[0]
        stage.say(
            subjects.kv_failed(),
            TransferReport(plan.transfer, plan.stream, TransferReason.SPLIT, "aborted", "p-0", "d-0", detail="link"),
        )
        await stage.settle()
        assert len(stage.of(Cancel)) == 2
        again = stage.of(Run)[-1]
        assert (again.stream.try_, again.split) == (2, None)
        assert again.worker in ("p-0", "d-0", "e-0")  # neither end of the transfer did anything wrong

    play(script)


async def pair_stage(stage):
    fabric = (LinkInfo("RDMA_ROCE", 46.6, 0.4),)
    await stage.announce(worker("p-0", role=Role.PREFILL), node="p", links=fabric)
    await stage.announce(worker("d-0", role=Role.DECODE), node="d", links=fabric)
    stage.say(subjects.kv_links(), LinkTable(1, "k", (LinkState("p", "d", "RDMA_ROCE", 46.6, 0.4),)))
    await stage.settle()


async def transfer_fails(stage):
    plan = stage.of(TransferPlan)[-1]
    report = TransferReport(plan.transfer, plan.stream, TransferReason.SPLIT, "aborted", "p-0", "d-0", detail="link")
    stage.say(subjects.kv_failed(), report)
    await stage.settle()


def test_a_pair_alone_is_split_again_after_a_failed_transfer_and_no_end_of_the_first_try_takes_the_seconds_credit():
    async def script(stage):
        await pair_stage(stage)
        await stage.ask()
        run, prefill = stage.of(Run)[-1], stage.of(Prefill)[-1]
        for half in (run, prefill):
            stage.event(Phase.ACCEPTED, half, beat=1)
        await transfer_fails(stage)
        again, prefilling = stage.of(Run)[-1], stage.of(Prefill)[-1]
        assert (again.worker, again.split.peer, again.stream.try_) == ("d-0", "p-0", 2)
        assert again.split.transfer != run.split.transfer
        stage.event(Phase.END, prefill, role=Role.PREFILL, beat=2, status="cancelled", code=499)
        stage.event(Phase.END, run, role=Role.DECODE, beat=2, status="cancelled", code=499)
        for half in (again, prefilling):
            stage.event(Phase.ACCEPTED, half, beat=2)
        await stage.word("p-0", beat=3)
        await stage.word("d-0", beat=3)
        assert len(stage.router.routing.ledger) == 2
        stage.event(Phase.PREFILLED, prefilling, role=Role.PREFILL, beat=3)
        stage.event(Phase.END, prefilling, role=Role.PREFILL, beat=3, status="ok", code=200)
        stage.event(Phase.FIRST_TOKEN, again, role=Role.DECODE, beat=3)
        stage.event(Phase.END, again, role=Role.DECODE, beat=3, status="ok", code=200)
        await stage.settle()
        assert errors(stage) == []
        assert (len(stage.router.routing.ledger), len(stage.router._flights)) == (0, 0)

    play(script)


@pytest.mark.parametrize(("allowed", "splits", "answer"), [("whole", 2, []), ("error", 3, [(502, "transfer_failed")])])
def test_where_no_transfer_arrives_the_last_try_goes_to_one_half_if_that_is_allowed(allowed, splits, answer):
    async def script(stage):
        await pair_stage(stage)
        await stage.ask()
        for _ in range(splits):
            await transfer_fails(stage)
        assert [run.split is None for run in stage.of(Run)] == [False, False, allowed == "whole"]
        assert len(stage.of(TransferPlan)) == splits
        assert errors(stage) == answer
        assert stage.router.routing.fallbacks == (allowed == "whole")

    play(script, split_without_prefill_worker=allowed)


def test_a_worker_that_refused_its_half_stays_excluded():
    async def script(stage):
        await pair_stage(stage)
        pair = (worker("p-0", role=Role.PREFILL), worker("p-1", role=Role.PREFILL))
        await stage.announce(*pair, node="p", links=(LinkInfo("RDMA_ROCE", 46.6, 0.4),))
        await stage.ask()
        (prefill,) = stage.of(Prefill)
        stage.event(Phase.REFUSED, prefill, role=Role.PREFILL, reason="draining")
        await stage.settle()
        again = stage.of(Prefill)[-1]
        assert again.worker != prefill.worker
        assert stage.of(Run)[-1].worker == "d-0"

    play(script)


def test_without_a_coordinator_no_split_starts():
    async def script(stage):
        await split_stage(stage)
        await asyncio.sleep(0.6)
        await stage.ask(BIG, "big")
        assert stage.of(TransferPlan) == []
        assert len(stage.of(Run)) == 1

    play(script)


def test_a_gap_in_deltas_asks_for_a_snapshot_which_mends_it():
    async def script(stage):
        asked = []
        await stage.bus.subscribe("quartet.v1.ctl.collector.>", lambda m: asked.append(m.subject))
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.word("n-0")
        stage.number += 1  # a delta that is lost
        await stage.word("n-1")
        assert asked[-1].endswith("collector.c.snapshot")
        word = pack(free_kv=15, queue=0, batch=0, drift=0, accepting=False)
        stage.say(subjects.fleet_snapshot(), FleetSnapshot("c", 1, stage.number, (WorkerState("n-0", 1, word, 9, 0),)))
        await stage.settle()
        await stage.ask()
        assert [run.worker for run in stage.of(Run)] == ["n-1"]

    play(script)


def _stamped(collector, number, sequence, *changes):
    return FleetDelta(collector, 1, number, changes, (NodeStamp("n", 1, sequence, 0),))


def test_a_collector_that_lost_sight_of_a_node_kills_nobody_while_another_one_hears_it():
    async def script(stage):
        await stage.announce(worker("n-0"))
        fleet = stage.router.routing.fleet
        up, dead = WorkerState("n-0", 1, 0, 10, Verdict.UP), WorkerState("n-0", 1, 0, 900, Verdict.DEAD)
        for delta in (
            _stamped("a", 1, 10, up),
            _stamped("b", 1, 900),
            _stamped("a", 2, 950),
            _stamped("b", 2, 0, dead),
        ):
            stage.say(subjects.fleet_delta(), delta)
        await stage.settle()
        assert fleet.verdict(0) == Verdict.UP

    play(script)


def test_who_is_believed_is_decided_anew_with_the_next_stamp():
    async def script(stage):
        await stage.announce(worker("n-0"))
        fleet = stage.router.routing.fleet
        up, dead = WorkerState("n-0", 1, 0, 10, Verdict.UP), WorkerState("n-0", 1, 0, 900, Verdict.DEAD)
        stage.say(subjects.fleet_delta(), _stamped("a", 1, 10, up))
        stage.say(subjects.fleet_delta(), _stamped("b", 1, 900, dead))
        await stage.settle()
        assert fleet.verdict(0) == Verdict.DEAD
        stage.say(subjects.fleet_delta(), _stamped("a", 2, 1_000))
        await stage.settle()
        assert fleet.verdict(0) == Verdict.UP
        stage.say(subjects.fleet_delta(), _stamped("a", 3, 0, WorkerState("n-0", 1, 0, 1_001, Verdict.DEAD)))
        await stage.settle()
        assert fleet.verdict(0) == Verdict.DEAD

    play(script)


def test_a_restarted_collector_shows_in_the_count_of_gaps_and_nowhere_else():
    async def script(stage):
        asked = []
        await stage.bus.subscribe("quartet.v1.ctl.collector.>", lambda m: asked.append(m.subject))
        await stage.announce(worker("n-0"))
        fleet = stage.router.routing.fleet
        await stage.word("n-0", beat=10, batch=3)
        before, known = len(asked), fleet.planes.word(0)
        gaps = stage.router.metrics.exposition().decode()
        again = WorkerState("n-0", 1, known, 400, Verdict.UP)
        stage.say(subjects.fleet_delta(), FleetDelta("c", 2, 1, (again,)))
        await stage.settle()
        assert (fleet.verdict(0), fleet.planes.word(0)) == (Verdict.UP, known)
        assert stage.router.metrics.exposition().decode() != gaps
        assert 'fleet_gaps_total{kind="delta"}' in gaps
        await asyncio.sleep(0.6)
        stage.say(subjects.fleet_delta(), FleetDelta("c", 3, 7, ()))
        await stage.settle()
        assert asked[before:] == ["quartet.v1.ctl.collector.c.snapshot"]

    play(script)


def test_of_two_collectors_the_newer_word_wins_and_a_silent_one_loses_its_say():
    async def script(stage):
        await stage.announce(worker("n-0"))
        fleet = stage.router.routing.fleet
        await stage.word("n-0", beat=10)
        dead = WorkerState("n-0", 1, 0, 5, Verdict.DEAD)
        stage.say(subjects.fleet_delta(), FleetDelta("old", 1, 1, (dead,)))
        await stage.settle()
        assert fleet.verdict(0) == Verdict.UP
        stage.say(subjects.fleet_delta(), FleetDelta("old", 1, 2, (WorkerState("n-0", 1, 0, 12, Verdict.DEAD),)))
        await stage.settle()
        assert fleet.verdict(0) == Verdict.DEAD
        for beat in range(13, 17):
            await asyncio.sleep(1.0)
            await stage.word("n-0", beat=beat)
        assert list(fleet.at(0).words) == ["c"]
        await stage.word("n-0", beat=16, verdict=Verdict.DEAD)
        assert fleet.verdict(0) == Verdict.DEAD

    play(script)


async def control(stage, verb, argument=""):
    reply = await stage.bus.request(
        subjects.control("router", "r0", verb).subject, encode(ControlRequest(argument=argument)), timeout_s=1.0
    )
    return msgspec.msgpack.decode(reply.data, type=ControlReply)


def test_operators_choose_among_imported_policies_only():
    async def script(stage):
        assert (await control(stage, "policy", "round-robin")).ok
        bad = await control(stage, "policy", "best")
        assert not bad.ok
        assert "finish-time" in bad.reason
        assert msgspec.json.decode((await control(stage, "policy")).payload)["policy"] == "round-robin"

    play(script)


def test_explain_tells_the_candidates_and_the_plans_of_a_request():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1", "L40S_PCIE"))
        await stage.ask()
        told = msgspec.json.decode((await control(stage, "explain", "q")).payload)
        (decision,) = told["decisions"]
        assert decision["reason"] == "best"
        assert decision["candidates_left"]["model"] == 2
        assert decision["plans"][0]["decode"] == "n-0"
        assert not (await control(stage, "explain", "nobody")).ok
        status = msgspec.json.decode((await control(stage, "status")).payload)
        assert status["workers"] == 2
        assert status["decide_p50_us"] > 0

    play(script)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"policies": ("nowhere:Policy",)}, r"router\.policies = 'nowhere:Policy': must be an importable"),
        ({"policies": ("random:Random",)}, r"configuration: router\.policies = 'random:Random': must be a subclass"),
        ({"policy": "fastest"}, r"router\.policy = 'fastest': must be one of finish-time, .*round-robin"),
    ],
)
def test_a_policy_that_is_none_stops_the_router_at_start(wrong, line):
    with pytest.raises(ConfigError, match=line):
        RouterService(MemoryBus(MemoryBroker()), config(**wrong), instance="r", random=random.Random(1))


def test_a_router_is_ready_when_it_could_route():
    async def script(stage):
        assert stage.router.not_ready() == "no live worker known"
        await stage.announce(worker("n-0"))
        assert stage.router.not_ready() is None
        await stage.word("n-0", verdict=Verdict.DEAD)
        assert stage.router.not_ready() == "no live worker known"

    play(script)


def test_malformed_messages_are_counted_and_change_nothing():
    async def script(stage):
        await stage.announce(worker("n-0"))
        for subject in (
            "quartet.v1.fleet.delta", "quartet.v1.fleet.snapshot", "quartet.v1.node.n.inventory", "quartet.v1.routed",
            "quartet.v1.affinity.n-0", "quartet.v1.kv.links", "quartet.v1.kv.failed", "quartet.v1.cancel.acme",
            "quartet.v1.event.request.end",
        ):  # fmt: skip
            for data in (b"", b"\xff\x00", b"{}", encode([1, 2, 3])):
                stage.bus.publish(subject, data)
        await stage.settle()
        await stage.ask()
        assert [run.worker for run in stage.of(Run)] == ["n-0"]
        figures = stage.router.metrics.exposition().decode()
        for subject in ("fleet.delta", "fleet.snapshot", "cancel.*", "event.request.end"):
            assert f'quartet_router_malformed_total{{subject="quartet.v1.{subject}"}} 4.0' in figures
        assert "quartet_router_failures_total{" not in figures

    play(script)


def test_a_dry_run_decides_without_dispatching_and_tells_where_it_differs():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1", "L40S_PCIE"))
        assert not (await control(stage, "dryrun", "best")).ok
        assert not (await control(stage, "dryrun", "finish-time")).ok
        assert (await control(stage, "dryrun", "round-robin")).ok
        for number in range(6):
            await stage.ask(id=f"q{number}")
        told = msgspec.json.decode((await control(stage, "dryrun")).payload)
        assert told["dry_run"] == "round-robin"
        found = told["models"]["m"]
        assert found["decisions"] == 6
        assert 0 < found["differ"] < 6
        assert found["mean_total_ms_dry"] > found["mean_total_ms"] > 0
        assert len(stage.of(Run)) == 6
        assert (await control(stage, "dryrun", "off")).ok
        await stage.ask(id="last")
        told = msgspec.json.decode((await control(stage, "dryrun")).payload)
        assert told["models"]["m"]["decisions"] == 6

    play(script)


def test_a_frozen_worker_gets_one_small_request_a_second_and_is_back_when_it_answers():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.word("n-0", queue=500.0, verdict=Verdict.FROZEN)
        for number in range(6):
            await stage.ask(id=f"q{number}")
        runs = stage.of(Run)
        assert [run.worker for run in runs].count("n-0") == 1
        trial = next(run for run in runs if run.worker == "n-0")
        for run in runs:
            stage.event(Phase.ACCEPTED, run)
        stage.event(Phase.FIRST_TOKEN, trial)
        await stage.word("n-0", verdict=Verdict.UP, beat=2)
        for number in range(6):
            await stage.ask(id=f"p{number}")
        assert [run.worker for run in stage.of(Run)[6:]].count("n-0") >= 2

    play(script)


def test_a_trial_that_gets_no_first_token_runs_elsewhere():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.word("n-0", verdict=Verdict.FROZEN)
        await stage.ask()
        (run,) = stage.of(Run)
        assert run.worker == "n-0"
        stage.event(Phase.ACCEPTED, run)
        await asyncio.sleep(1.0)
        assert [each.worker for each in stage.of(Run)] == ["n-0", "n-1"]
        assert stage.of(Cancel)[0].reason == "trial_failed"

    play(script)


def test_three_missed_acks_rest_a_worker_but_bad_requests_never_do():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1", "L40S_PCIE"))
        for number in range(4):
            await stage.ask(id=f"bad{number}")
            run = stage.of(Run)[-1]
            stage.event(Phase.ACCEPTED, run)
            stage.event(Phase.END, run, status="error", code=400)
            await stage.settle()
        assert stage.router.routing.breakers.open == 0
        while not stage.router.routing.breakers.open:
            await stage.ask(id=f"q{len(stage.said)}")
            await asyncio.sleep(0.3)
            assert len(stage.of(Run)) < 20
        (rested,) = [name for name in ("n-0", "n-1") if stage.router.routing.breakers.open >> int(name[-1]) & 1]
        before = len(stage.of(Run))
        for number in range(3):
            await stage.ask(id=f"after{number}")
        assert rested not in [run.worker for run in stage.of(Run)[before:]]

    play(script)


def test_one_tenants_flood_does_not_hold_up_anothers_request():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        body = b'{"prompt":' + str(list(range(3000))).encode() + b',"max_tokens":8}'
        for number in range(12):
            await stage.ask(body, id=f"flood{number}")
        stage.bus.publish(
            subjects.infer("other", "m").subject, body, reply="_INBOX.other.1", headers={"Quartet-Request-Id": "one"}
        )
        await stage.settle()
        await stage.word("n-0", queue=1.0, beat=2)
        assert "one" in [run.stream.id for run in stage.of(Run)][:2]

    play(script, hold_max_ms=60_000.0)


def test_a_request_that_is_held_again_keeps_its_body_whatever_its_first_try_says_late():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        await stage.word("n-1", queue=3_000.0)
        await stage.ask()
        (first,) = stage.of(Run)
        assert first.worker == "n-0"
        await asyncio.sleep(0.3)  # no ack: tried elsewhere, and n-1 is worth waiting for
        assert stage.router._desk.holds
        stage.event(Phase.ACCEPTED, first)
        stage.event(Phase.FIRST_TOKEN, first)
        await stage.settle()
        await stage.word("n-1", queue=1.0, beat=2)
        assert [run.body for run in stage.of(Run)] == [BODY, BODY]

    play(script, hold_max_ms=60_000.0)


def test_two_lives_of_a_router_never_name_two_transfers_alike():
    lives = [
        RouterService(MemoryBus(MemoryBroker()), config(), instance="r0", random=random.Random(seed))._desk._life
        for seed in (1, 2)
    ]
    assert lives[0] != lives[1]

    async def script(stage):
        await split_stage(stage)
        await stage.ask(BIG, "big")
        (plan,) = stage.of(TransferPlan)
        assert plan.transfer == f"{stage.router._desk._life}-1"

    play(script)


def test_an_id_that_is_running_already_is_told_to_whoever_uses_it_again():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.ask()
        await stage.ask()
        assert stage.frames == []
        await stage.ask(reply="_INBOX.acme.x.2")
        assert errors(stage) == [(409, "duplicate_request")]
        assert len(stage.of(Run)) == 1

    play(script)


def test_a_model_that_the_fleet_has_but_this_router_cannot_route_is_503_and_not_404():
    async def script(stage):
        await stage.announce(worker("n-0", model="odd", precision="int3"))
        await stage.ask(model="odd")
        assert errors(stage) == [(503, "no_worker")]

    play(script)


def test_a_worker_that_no_collector_hears_is_doubted_and_a_node_that_announces_nothing_is_forgotten():
    async def script(stage):
        await stage.announce(worker("n-0"))
        for beat in range(1, 12):
            await stage.announce(worker("m-0", "L40S_PCIE"), node="m")
            await stage.word("m-0", beat=beat)
            if beat == 5:
                assert stage.router.routing.fleet.verdict(0) == Verdict.SUSPECT
                await stage.ask()
                assert stage.of(Run)[-1].worker == "m-0"
            await asyncio.sleep(1.0)
        assert stage.router.routing.fleet.slot_of("n-0") is None
        assert stage.router.routing.fleet.slot_of("m-0") is not None

    play(script)


def test_a_retry_after_a_failed_split_goes_to_one_worker():
    async def script(stage):
        await split_stage(stage)
        await stage.announce(worker("q-0", "H100_SXM5", "big", tp=4), node="q")
        await stage.word("q-0", batch=150)
        await stage.announce(worker("e-0", "L40S_PCIE", "big", tp=4), node="e")
        await stage.ask(BIG, "big")
        for _ in range(2):
            plan = stage.of(TransferPlan)[-1]
            report = TransferReport(plan.transfer, plan.stream, TransferReason.SPLIT, "aborted", "p-0", "d-0")
            stage.say(subjects.kv_failed(), report)
            await stage.settle()
        assert len(stage.of(TransferPlan)) == 1
        assert stage.of(Run)[-1].split is None

    play(script)


def test_a_request_whose_end_is_never_heard_is_given_up_in_the_end():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.ask()
        (run,) = stage.of(Run)
        stage.event(Phase.ACCEPTED, run)
        stage.event(Phase.FIRST_TOKEN, run)
        await asyncio.sleep(30.0)
        assert len(stage.router._flights) == 1
        await asyncio.sleep(120.0)
        assert len(stage.router._flights) == 0
        assert errors(stage) == [(502, "stream_lost")]
        assert len(stage.router.routing.ledger) == 0

    play(script)


def test_a_hold_is_measured_once_from_its_begin_to_its_end():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        await stage.ask()
        for beat in range(2, 6):
            await asyncio.sleep(0.1)
            await stage.word("n-0", queue=3_000.0, beat=beat)
        await stage.word("n-0", queue=1.0, beat=9)
        figures = stage.router.metrics.exposition().decode()
        assert "quartet_router_held_ms_count 1.0" in figures
        assert 390.0 < float(figures.split("quartet_router_held_ms_sum ")[1].split()[0]) < 460.0

    play(script, hold_max_ms=60_000.0)


def test_more_held_requests_than_one_look_takes_leave_without_another_word():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        for number in range(40):
            await stage.ask(id=f"q{number}")
        assert stage.of(Run) == []
        await stage.word("n-0", queue=0.0, beat=2)
        await asyncio.sleep(0.01)
        # As many as the worker keeps ahead, which is more than one look decides; the others wait for it again.
        assert 16 < len(stage.of(Run)) < 40

    play(script, hold_max_ms=60_000.0)


def test_with_a_ring_only_its_own_collectors_deltas_on_the_bus_are_skipped():
    async def script(stage):
        await stage.announce(worker("n-0"), worker("n-1"))
        ring = encode(FleetDelta("here", 1, 1, (WorkerState("n-0", 1, 0, 5, Verdict.DEAD),)))
        stage.router.ring_prefix = beginning(ring)
        stage.bus.publish(subjects.fleet_delta().subject, ring)
        there = FleetDelta("there", 1, 1, (WorkerState("n-1", 1, 0, 5, Verdict.DEAD),))
        stage.say(subjects.fleet_delta(), there)
        await stage.settle()
        fleet = stage.router.routing.fleet
        assert (fleet.verdict(0), fleet.verdict(1)) == (Verdict.UP, Verdict.DEAD)

    play(script)


def test_a_policy_that_raises_leaves_no_request_without_an_answer():
    async def script(stage):
        await stage.announce(worker("n-0"))
        stage.router.routing.policy.choose = lambda ask, candidates: 1 / 0
        await stage.ask()
        assert errors(stage) == [(500, "policy_failed")]
        assert len(stage.router._flights) == 0
        assert b"quartet_router_policy_failures_total 1.0" in stage.router.metrics.exposition()

    play(script)


def test_a_held_request_is_never_silent_for_long():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        at_s = []
        loop = asyncio.get_running_loop()
        await stage.bus.subscribe("_INBOX.>", lambda _: at_s.append(loop.time()))
        await stage.ask()
        await asyncio.sleep(10.0)
        assert max(later - earlier for earlier, later in pairwise(at_s)) < 1.3

    play(script, hold_max_ms=60_000.0)


def test_bodies_of_requests_that_may_be_sent_again_are_bounded():
    async def script(stage):
        await stage.announce(worker("n-0"))
        for number in range(4):
            await stage.ask(id=f"q{number}")
        assert len(stage.of(Run)) == 2
        assert errors(stage) == [(429, "all_busy")] * 2

    play(script, body_max_bytes=2 * len(BODY))


def test_what_replicas_are_told_is_what_stands_in_the_ledger():
    async def script(stage):
        await stage.announce(worker("n-0"))
        slow = pack(free_kv=15, queue=0, batch=0, drift=5, accepting=True)
        stage.say(subjects.fleet_delta(), FleetDelta("c", 1, 1, (WorkerState("n-0", 1, slow, 1, 0),)))
        await stage.settle()
        await stage.ask()
        (note,) = stage.of(LedgerNote)
        (entry,) = stage.router.routing.ledger.entries(0)
        assert (note.prefill_ms, note.prompt_tokens) == (entry.prefill_ms, entry.tokens)
        assert note.prefill_ms < stage.of(Run)[0].predicted_prefill_ms

    play(script)


def test_a_stopping_router_leaves_the_queue_group_before_it_refuses_what_it_holds():
    async def script(stage):
        await stage.announce(worker("n-0"))
        await stage.word("n-0", queue=3_000.0)
        await stage.ask()
        await stage.router.stop()
        await stage.settle()
        assert errors(stage) == [(503, "router_stopping")]
        await stage.ask(id="late")
        assert len(errors(stage)) == 1

    play(script, hold_max_ms=60_000.0)


def test_a_deadline_of_the_clients_own_never_rests_a_worker():
    async def script(stage):
        await stage.announce(worker("n-0"))
        for number in range(5):
            await stage.ask(id=f"q{number}", headers={"Quartet-Deadline-Ms": "1"})
            run = stage.of(Run)[-1]
            stage.event(Phase.ACCEPTED, run)
            stage.event(Phase.END, run, status="error", code=504, reason="deadline")
            await stage.settle()
        assert stage.router.routing.breakers.open == 0

    play(script)
