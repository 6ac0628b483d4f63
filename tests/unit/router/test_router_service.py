"""The router on a bus: what it says for what it hears, with agents played by the test under virtual time."""

import asyncio
import random

import msgspec
import pytest

from quartet_bus import frames, subjects
from quartet_bus.config.load import ConfigError
from quartet_bus.config.schema import Config
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    ControlReply,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    KvLayout,
    LedgerNote,
    LinkInfo,
    LinkState,
    LinkTable,
    NodeInventory,
    Phase,
    Prefill,
    RequestEvent,
    Role,
    Run,
    StreamId,
    TransferPlan,
    TransferReason,
    TransferReport,
    WorkerInfo,
    WorkerState,
)
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, pack, queue_level
from quartet_router.service import RouterService

encode = msgspec.msgpack.encode
INBOX = "_INBOX.acme.x.1"
BODY = b'{"prompt":"hello","max_tokens":8,"stream":true}'


def config(**router):
    return msgspec.convert(
        {
            "models": {
                "m": {"spec": "llama-3.1-8b"},
                "big": {"spec": "llama-3.1-70b", "tpot_ms": 100.0},
                "cold": {"spec": "qwen3-32b"},
            },
            "router": router,
        },
        Config,
    )


def worker(name, hardware="H100_SXM5", model="m", *, incarnation=1, tp=1, **more):
    given = dict(
        id=name, ordinal=int(name.rsplit("-", 1)[1]), incarnation=incarnation, hardware=hardware, model=model,
        precision="fp8", tp=tp, gpus=tuple(range(tp)), kv_tokens=300_000, max_context=100_000, max_batch=256,
        chunk_tokens=2048, layout=KvLayout(16, 131_072, "bf16", tp=tp), engine="simulated",
        capabilities=("export", "import", "reserve"),
    )  # fmt: skip
    return WorkerInfo(**(given | more))


def decoded(data, kind):
    """The message, or the bytes when a test sent nonsense."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError:
        return data


class Stage:
    """A router, what it says, and the means to play agents, collectors and clients."""

    def __init__(self, **router):
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.router = RouterService(MemoryBus(self.broker), config(**router), instance="r0", random=random.Random(1))
        self.said = []
        self.frames = []
        self.number = 0

    async def __aenter__(self):
        for topic in (
            subjects.routed(), subjects.kv_plan(), subjects.request_events(),
        ):  # fmt: skip
            await self.listen(topic)
        for verb, kind in (("run", Run), ("prefill", Prefill), ("cancel", Cancel)):
            await self.listen(subjects.Topic(f"quartet.v1.worker.*.{verb}", kind))
        await self.bus.subscribe("_INBOX.>", lambda m: self.frames.append(frames.decode(m.data)) if m.data else None)
        await self.router.start()
        return self

    async def __aexit__(self, *_):
        await self.router.stop()

    async def listen(self, topic):
        await self.bus.subscribe(topic.subject, lambda m: self.said.append(decoded(m.data, topic.kind)))

    def of(self, kind):
        return [each for each in self.said if isinstance(each, kind)]

    def say(self, topic, message):
        self.bus.publish(topic.subject, encode(message))

    async def announce(self, *workers, node="n", **more):
        self.say(subjects.inventory(node), NodeInventory(node=node, incarnation=1, epoch=1, workers=workers, **more))
        await self.settle()

    async def word(self, name, *, queue=0.0, batch=0, verdict=Verdict.UP, beat=1, accepting=True):
        self.number += 1
        word = pack(free_kv=15, queue=queue_level(queue), batch=batch_level(batch), drift=0, accepting=accepting)
        change = WorkerState(name, 1, word, beat, verdict)
        self.say(subjects.fleet_delta(), FleetDelta("c", 1, self.number, (change,)))
        await self.settle()

    async def ask(self, body=BODY, model="m", *, reply=INBOX, id="q", headers=None):
        self.bus.publish(
            subjects.infer("acme", model).subject, body, reply=reply,
            headers={"Quartet-Request-Id": id, **(headers or {})},
        )  # fmt: skip
        await self.settle()

    def event(self, phase, run, **more):
        role = more.pop("role", Role.BOTH)
        self.say(
            subjects.request_event(phase),
            RequestEvent(
                phase=phase, stream=run.stream, tenant=run.tenant, model=run.model, worker=run.worker,
                incarnation=run.incarnation, role=role, **more,
            ),
        )  # fmt: skip

    async def settle(self):
        for _ in range(12):
            await asyncio.sleep(0)


def play(script, **router):
    async def whole():
        async with Stage(**router) as stage:
            await script(stage)

    run_virtual(whole())


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
    await stage.announce(worker("p-0", "H100_SXM5", "big", tp=4), node="p", links=fabric)
    await stage.announce(worker("d-0", "L40S_PCIE", "big", tp=4), node="d", links=fabric)
    await stage.word("p-0", batch=150)
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


def test_a_failed_transfer_cancels_both_halves_and_runs_the_request_elsewhere():
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
        assert stage.of(Run)[-1].worker == "e-0"
        assert stage.of(Run)[-1].split is None

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


def test_a_policy_path_that_is_none_stops_the_router_at_start():
    with pytest.raises(ConfigError, match=r"router\.policies"):
        RouterService(
            MemoryBus(MemoryBroker()), config(policies=("nowhere:Policy",)), instance="r", random=random.Random(1)
        )


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
        for subject in ("fleet.delta", "fleet.snapshot", "cancel.*", "event.request.*"):
            assert f'quartet_router_malformed_total{{subject="quartet.v1.{subject}"}} 4.0' in figures
        assert "quartet_router_failures_total{" not in figures

    play(script)
