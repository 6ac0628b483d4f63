"""A whole agent under virtual time: what becomes of dispatches."""

import asyncio
import json

import pytest

from quartet_bus import frames, subjects
from quartet_bus.messages import Cancel, Phase, Role
from quartet_core import word


def test_a_run_is_accepted_streamed_and_ended_in_this_order(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=5))
        await asyncio.sleep(2)
        return stage.heard, agent.incarnation

    heard, incarnation = on_stage(play)
    assert heard.phases() == ["accepted", "first_token", "end"]
    assert heard.kinds() == ["Accepted", *["Chunk"] * 7, "End"]  # who speaks, five tokens, why it ended
    assert [frame.seq for frame in heard.frames] == list(range(9))
    assert heard.frames[0].worker == "n1-0"
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.output_tokens, end.worker) == ("ok", 200, 5, "n1-0")
    assert end.agent_incarnation == incarnation
    assert 0 < end.ttft_ms < end.e2e_ms
    assert end.predicted_ttft_ms == 12.5
    assert end.gpu_ms > 0
    assert end.joules == pytest.approx(end.gpu_ms / 1000 * 700)
    assert heard.frames[-1].output_tokens == 5


def test_the_same_prompt_gets_the_same_text_on_any_worker(on_stage, config_of, body_of, engine_of):
    async def play(stage):
        fast = await stage.agent(config_of("n1"))
        slow = await stage.agent(config_of("n2", engine_of("L40S_PCIE")))
        texts = []
        for agent in (fast, slow):
            stage.heard.frames.clear()
            stage.run(agent, body_of("what is a rung?", max_tokens=20), id=agent.instance)
            await asyncio.sleep(5)
            texts.append(stage.heard.text())
        return texts

    first, second = on_stage(play)
    assert first == second
    assert len(first) == 80  # twenty tokens of four bytes


def test_an_answer_that_does_not_stream_is_one_chunk(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=5, stream=False))
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert heard.kinds() == ["Accepted", "Chunk", "End"]
    answer = json.loads(bytes(heard.frames[1].data))
    assert answer["usage"]["completion_tokens"] == 5
    assert heard.phases() == ["accepted", "first_token", "end"]


def test_a_long_silence_is_broken_every_second(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of("x" * 400_000, max_tokens=2))  # 100,000 tokens: some seconds of prefill
        await asyncio.sleep(2.5)
        return stage.heard.kinds()

    assert on_stage(play)[:3] == ["Accepted", "Alive", "Alive"]


def test_acceptance_is_said_before_a_long_prompt_is_read(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of("x" * 100_000), predicted_prefill_ms=500.0)
        await asyncio.sleep(0)  # the dispatch is delivered, nothing else has run
        worker = next(iter(agent.workers.values()))
        unread = worker.unread_ms
        waiting = worker.adapter.load().waiting
        await asyncio.sleep(0.001)
        return unread, waiting, worker.unread_ms, stage.heard.phases()

    unread, waiting, later, phases = on_stage(play)
    assert (unread, waiting) == (500.0, 0)
    assert later == 0.0
    assert phases == ["accepted"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, None),
        (b'{"model":"chat","messages":[]}', 400, None),
        (b'{"model":"chat","prompt":"hi","n":2}', 400, None),
        (b'{"model":"chat","prompt":"hi","max_tokens":1000000}', 400, "context_length_exceeded"),
    ],
)
def test_a_bad_body_gets_an_error_frame_and_one_end(on_stage, config_of, body, status, code):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body)
        await asyncio.sleep(1)
        return stage.heard

    heard = on_stage(play)
    assert heard.kinds() == ["Accepted", "Error"]
    assert heard.frames[1].status == status
    assert heard.frames[1].error.code == code
    assert heard.phases() == ["accepted", "end"]
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.reason) == ("error", 400, "invalid")


def test_a_client_without_a_limit_gets_what_fits_instead_of_an_error(on_stage, config_of, body_of, engine_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of("x" * 4 * 131_000, max_tokens=None))
        await asyncio.sleep(30)
        return stage.heard

    heard = on_stage(play)
    assert heard.last(Phase.END).status == "ok"


def test_a_cancel_ends_the_stream_at_once_and_frees_its_blocks(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        worker = next(iter(agent.workers.values()))
        stage.run(agent, body_of("x" * 4000, max_tokens=4000))
        await asyncio.sleep(1)
        stage.cancel()
        await asyncio.sleep(0.03)  # an iteration
        said = len(stage.heard.frames)
        await asyncio.sleep(1)
        return stage.heard, said, worker.adapter.load(), worker.runs

    heard, said, load, runs = on_stage(play)
    assert heard.phases() == ["accepted", "first_token", "end"]
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.reason) == ("cancelled", 499, "client")
    assert end.gpu_ms > 0
    assert len(heard.frames) == said  # not even that it is alive
    assert (load.running, load.waiting, runs) == (0, 0, {})
    assert load.free_kv_fraction == 1.0


def test_a_cancel_that_overtakes_its_dispatch_is_remembered(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.cancel(attempt=1)
        stage.cancel(id="other", tenant="mallory")
        await asyncio.sleep(9)
        stage.run(agent, body_of())
        stage.run(agent, body_of(), attempt=2)
        stage.run(agent, body_of(), id="other")
        await asyncio.sleep(1)
        return stage.heard

    heard = on_stage(play)
    told = [(e.stream.id, e.stream.attempt, e.phase.value, e.reason) for e in heard.events[:3]]
    assert told == [("r", 1, "refused", "cancelled"), ("r", 2, "accepted", ""), ("other", 1, "accepted", "")]


def test_another_tenants_cancel_does_not_end_a_stream(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=30))
        await asyncio.sleep(0.05)
        stage.cancel(tenant="mallory")
        await asyncio.sleep(3)
        return stage.heard.last(Phase.END)

    assert on_stage(play).status == "ok"


def test_a_dispatch_for_another_incarnation_is_fenced(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(), incarnation=0)
        await asyncio.sleep(1)
        return stage.heard

    heard = on_stage(play)
    assert [(e.phase, e.reason) for e in heard.events] == [(Phase.REFUSED, "fenced")]
    assert heard.frames == []


def test_the_same_dispatch_twice_runs_once_and_is_acknowledged_twice(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=3))
        stage.run(agent, body_of(max_tokens=3))
        await asyncio.sleep(2)
        stage.run(agent, body_of(max_tokens=3))  # a late copy
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert heard.phases() == ["accepted", "accepted", "first_token", "end", "refused"]
    assert heard.kinds().count("Accepted") == 1
    assert [frame.seq for frame in heard.frames] == list(range(len(heard.frames)))
    assert heard.last(Phase.REFUSED).reason == "duplicate"


def test_a_second_attempt_runs_beside_the_first(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=3))
        stage.run(agent, body_of(max_tokens=3), attempt=2)
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert sorted(e.stream.attempt for e in heard.events if e.phase is Phase.END) == [1, 2]


def test_two_tenants_may_use_the_same_id(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=3))
        stage.run(agent, body_of(max_tokens=3), tenant="u")
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert sorted((e.tenant, e.status) for e in heard.events if e.phase is Phase.END) == [("t", "ok"), ("u", "ok")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "other"}, "model_not_here"),
        ({"worker": "n9-0"}, "not_here"),
        ({"deadline_ms": -1}, "deadline"),
        ({"inbox": "quartet.v1.fleet.delta"}, "inbox"),
    ],
)
def test_what_is_not_for_this_worker_is_refused_with_the_reason(on_stage, config_of, body_of, fields, reason):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        dispatch = stage.run(agent, body_of(), id="first")
        for name, value in fields.items():
            setattr(dispatch, name, value)
        dispatch.stream = type(dispatch.stream)("r")
        from quartet_bus import subjects

        stage.publish(subjects.worker_run("n1-0"), dispatch)
        await asyncio.sleep(1)
        return stage.heard

    heard = on_stage(play)
    assert heard.phases() == ["refused"]
    assert heard.last(Phase.REFUSED).reason == reason


def test_no_more_than_max_running_streams_are_taken(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1", max_running=2))
        for name in "abc":
            stage.run(agent, body_of(max_tokens=3), id=name)
        await asyncio.sleep(2)
        stage.run(agent, body_of(max_tokens=3), id="d")
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert heard.phases("c") == ["refused"]
    assert heard.last(Phase.REFUSED).reason == "full"
    assert heard.phases("d") == ["accepted", "first_token", "end"]


def test_a_deadline_ends_the_stream_with_504(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=4000), deadline_ms=300)
        await asyncio.sleep(2)
        return stage.heard

    heard = on_stage(play)
    assert heard.phases() == ["accepted", "first_token", "end"]
    assert isinstance(heard.frames[-1], frames.Error)
    assert (heard.frames[-1].status, heard.frames[-1].error.code) == (504, "deadline_exceeded")
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.reason) == ("error", 504, "deadline")
    assert end.e2e_ms == pytest.approx(300, abs=1)


def test_draining_finishes_the_old_refuses_the_new_and_then_says_safe(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=30), id="old")
        await asyncio.sleep(0.1)
        first = json.loads((await stage.control(agent, "drain")).payload)
        accepting = word.ACCEPTING.of(stage.heard.beats[-1].workers[0].word)
        await asyncio.sleep(0.02)
        drained = word.ACCEPTING.of(stage.heard.beats[-1].workers[0].word)
        stage.run(agent, body_of(), id="new")
        await asyncio.sleep(3)
        second = json.loads((await stage.control(agent, "status")).payload)
        await stage.control(agent, "resume")
        stage.run(agent, body_of(max_tokens=2), id="newer")
        await asyncio.sleep(1)
        return stage.heard, first, second, accepting, drained

    heard, first, second, accepting, drained = on_stage(play)
    assert (first["safe"], second["safe"]) == (False, True)
    assert (accepting, drained) == (1, 0)
    assert heard.phases("old")[-1] == "end"
    assert heard.phases("new") == ["refused"]
    assert heard.phases("newer") == ["accepted", "first_token", "end"]


def test_a_stopping_agent_lets_streams_finish_and_ends_those_that_do_not(on_stage, config_of, body_of):
    async def play(stage):
        config = config_of("n1")
        config.service.stop_timeout_ms = 1000
        agent = await stage.agent(config)
        stage.run(agent, body_of(max_tokens=5), id="short")
        stage.run(agent, body_of(max_tokens=4000), id="long")
        await asyncio.sleep(0.05)
        await agent.stop()
        return stage.heard, agent.streams.running

    heard, running = on_stage(play)
    ends = {e.stream.id: (e.status, e.code, e.reason) for e in heard.events if e.phase is Phase.END}
    assert ends == {"short": ("ok", 200, ""), "long": ("error", 503, "stopping")}
    assert heard.frames[-1].error.code == "worker_stopping"
    assert running == 0


def test_an_idle_agent_stops_at_once(on_stage, config_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        before = asyncio.get_running_loop().time()
        await agent.stop()
        return asyncio.get_running_loop().time() - before

    assert on_stage(play) == 0.0


def test_many_streams_share_the_batch_and_every_one_ends_exactly_once(on_stage, config_of, body_of, engine_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1", engine_of(count=2)))
        for index in range(60):
            stage.run(agent, body_of(f"prompt {index}", max_tokens=1 + index % 7), id=f"q{index}", worker=index % 2)
            await asyncio.sleep(0.003)
            if index % 5 == 0:
                stage.cancel(id=f"q{index}")
        await asyncio.sleep(5)
        return stage.heard, agent

    heard, agent = on_stage(play)
    ended = [e.stream.id for e in heard.events if e.phase is Phase.END]
    assert sorted(ended) == sorted(f"q{index}" for index in range(60))
    assert agent.streams.running == 0
    assert all(w.adapter.load().free_kv_fraction == 1.0 and w.unread_ms == 0.0 for w in agent.workers.values())


def test_the_same_stage_twice_gives_the_same_log(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        for index in range(10):
            stage.run(agent, body_of(f"prompt {index}"), id=f"q{index}")
            await asyncio.sleep(0.01)
        await asyncio.sleep(2)
        return stage.heard.events, stage.heard.frames, stage.heard.beats

    assert on_stage(play) == on_stage(play)


def test_a_role_is_announced_and_an_unknown_one_refused(on_stage, config_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        good = await stage.control(agent, "role", "n1-0", "decode")
        bad = await stage.control(agent, "role", "n1-0", "driver")
        nobody = await stage.control(agent, "cordon", "n1-7")
        verb = await stage.control(agent, "explode")
        await stage.control(agent, "cordon", "n1-0")
        await asyncio.sleep(0.1)
        return good, bad, nobody, verb, stage.heard.inventories, stage.heard.beats[-1].workers[0].word

    good, bad, nobody, verb, inventories, last_word = on_stage(play)
    assert good.ok
    assert "both, prefill, decode" in bad.reason
    assert "n1-0" in nobody.reason
    assert "drain" in verb.reason
    assert [i.epoch for i in inventories] == [1, 2, 3]
    assert inventories[1].workers[0].role is Role.DECODE
    assert (inventories[2].workers[0].cordoned, inventories[1].workers[0].cordoned) == (True, False)
    assert word.epoch_of(last_word) == 3
    assert word.ACCEPTING.of(last_word) == 1  # a cordon is the routers' business


def router_cancel(stage, agent, reason):
    worker = next(iter(agent.workers))
    stage.publish(subjects.worker_cancel(worker), Cancel("r", 1, 1, reason, "t"))


@pytest.mark.parametrize("reason", ["ack_timeout", "trial_failed"])
def test_a_router_that_gave_up_too_late_does_not_end_an_answer_that_has_begun(on_stage, config_of, body_of, reason):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of(max_tokens=50))
        while "Chunk" not in stage.heard.kinds():  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)
        router_cancel(stage, agent, reason)
        await asyncio.sleep(5)
        return stage.heard

    heard = on_stage(play)
    assert heard.phases() == ["accepted", "first_token", "end"]
    assert heard.last(Phase.END).status == "ok"
    assert heard.kinds()[-1] == "End"


@pytest.mark.parametrize(("reason", "wait_s"), [("ack_timeout", 0.0005), ("client", 0.5), ("failed", 0.5)])
def test_any_other_cancel_of_a_router_ends_the_run_once(on_stage, config_of, body_of, reason, wait_s):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body_of("x" * 4000, max_tokens=4000))
        await asyncio.sleep(wait_s)
        began = "Chunk" in stage.heard.kinds()
        router_cancel(stage, agent, reason)
        await asyncio.sleep(5)
        return stage.heard, began

    heard, began = on_stage(play)
    assert began is (reason != "ack_timeout")
    assert heard.phases().count("end") == 1
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.reason) == ("cancelled", 499, reason)


def test_an_engine_that_raises_at_a_job_ends_the_run_with_an_error(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        adapter = next(iter(agent.workers.values())).adapter

        def broken(*_):
            raise RuntimeError("no engine")

        adapter.submit = adapter.cancel = broken
        stage.run(agent, body_of())
        await asyncio.sleep(1)
        return stage.heard, agent.streams.running

    heard, running = on_stage(play)
    assert running == 0
    assert heard.kinds() == ["Accepted", "Error"]
    assert (heard.frames[1].status, heard.frames[1].error.code) == (500, "engine_error")
    assert heard.phases() == ["accepted", "end"]
    end = heard.last(Phase.END)
    assert (end.status, end.code, end.reason) == ("error", 500, "engine_error")
