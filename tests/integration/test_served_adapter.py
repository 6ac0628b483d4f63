"""The adapter of engines behind HTTP, against a real server that speaks their dialects and fails in their ways."""

import asyncio
import json

import pytest
from adapter_bench import Bench
from wire_engine import WireEngine, engines, until

from quartet_agent.engines.base import CannotLoad, Failed, Finished, FirstToken, Output, Prefilled, Work
from quartet_bus.messages import Role
from quartet_core.ladder import sketch_text, sketch_tokens
from quartet_core.openai import Refused, parse

KINDS = ["vllm", "sglang", "openai"]


@pytest.fixture(params=KINDS)
async def bench(request):
    async with WireEngine(request.param) as engine, Bench(engine) as bench:
        yield await bench.up()


# Answers


async def test_a_stream_comes_through_as_the_engine_wrote_it_with_its_usage_kept_to_ourselves(bench):
    last, events = await bench.answer()
    kinds = [type(event) for event in events]
    assert kinds == [FirstToken, *[Output] * 5, Finished]
    for event in events[1:-1]:
        assert json.loads(event.data)["choices"]
        assert b"usage" not in event.data
    assert last.usage.output_tokens == 5
    assert last.usage.prompt_tokens == (0 if bench.engine.kind == "openai" else 5)
    assert last.usage.busy_ms > 0


async def test_usage_that_was_asked_for_is_told(bench):
    _, events = await bench.answer({"stream_options": {"include_usage": True}})
    assert json.loads(events[-2].data)["usage"]["completion_tokens"] == 5
    assert events[-1].usage.prompt_tokens == 5


async def test_an_answer_in_one_piece_is_one_output(bench):
    last, events = await bench.answer({"stream": False})
    assert [type(event) for event in events] == [FirstToken, Output, Finished]
    assert json.loads(events[1].data)["choices"][0]["text"].count(" ") == 5
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (5, 5)


async def test_chat_goes_to_chat(bench):
    messages = [{"role": "user", "content": "hi"}]
    job = bench.submit({"messages": messages, "prompt": None})
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": 2, "tools": [{"a": 1}]}).encode()
    work = Work("c", "r", "chat", body, parse(body), Role.BOTH, 64)
    bench.adapter.submit(work)
    await bench.end("c")
    await bench.end(job)
    path, _, told = bench.engine.requests[-1]
    assert path == "/v1/chat/completions"
    assert told["tools"] == [{"a": 1}]


async def test_a_body_that_trickles_is_the_same_stream(bench):
    await bench.answer()
    whole = [event.data for event in bench.of("job-1", Output)]
    bench.engine.fault = "slow"
    await bench.answer()
    assert [event.data for event in bench.of("job-2", Output)] == whole


async def test_nothing_is_read_on_while_the_bus_has_too_much_to_send():
    async with WireEngine(token_s=0.0) as engine, Bench(engine) as bench:
        await bench.up()
        bench.congested = True
        job = bench.submit({"max_tokens": 200_000})
        await until(lambda: bench.of(job, Output))
        await asyncio.sleep(0.3)
        seen = len(bench.of(job, Output))
        await asyncio.sleep(0.3)
        assert len(bench.of(job, Output)) == seen
        assert engine.running == 1  # and it waits, since nobody takes its tokens
        bench.congested = False
        await until(lambda: len(bench.of(job, Output)) > seen)
        bench.adapter.cancel(job)


# Ends


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancel_reaches_the_engine_within_a_second(bench, stream):
    bench.engine.token_s = 0.05
    job = bench.submit({"stream": stream, "max_tokens": 500})
    await until(lambda: bench.engine.running == 1)
    if stream:
        await until(lambda: bench.of(job, Output))
    assert bench.adapter.load().running + bench.adapter.load().waiting == 1
    bench.adapter.cancel(job)
    seen = len(bench.events)
    await until(lambda: bench.engine.running == 0, patience_s=1.0)
    assert job in bench.engine.aborted
    await asyncio.sleep(0.1)
    assert len(bench.events) == seen
    load = bench.adapter.load()
    assert (load.running, load.waiting, load.queued_prefill_ms, load.free_kv_fraction) == (
        0,
        0,
        0.0,
        pytest.approx(1, abs=0.3),
    )


async def test_a_cancel_reaches_a_request_that_waits_for_its_first_token(bench):
    bench.engine.fault = "hang"
    job = bench.submit()
    await until(lambda: bench.engine.running == 1)
    assert bench.adapter.load().waiting == 1
    bench.adapter.cancel(job)
    await until(lambda: bench.engine.running == 0, patience_s=1.0)
    assert bench.adapter.load().waiting == 0


async def test_sglang_is_told_to_abort_by_name_too():
    async with WireEngine("sglang", token_s=0.05) as engine, Bench(engine) as bench:
        await bench.up()
        job = bench.submit({"stream": False, "max_tokens": 500})
        await until(lambda: engine.running == 1)
        assert engine.requests[-1][2]["rid"] == job
        bench.adapter.cancel(job)
        await until(lambda: engine.probes["/abort_request"] == 1, patience_s=1.0)


@pytest.mark.parametrize(
    ("fault", "reason", "outputs"),
    [("reset", "engine_lost", 3), ("truncate", "engine_cut", 3), ("error", "engine_error", 3),
     ("503", "engine_busy", 0), ("500", "engine_error", 0)],
)  # fmt: skip
async def test_what_goes_wrong_is_one_clear_failure_that_may_be_tried_elsewhere(bench, fault, reason, outputs):
    bench.engine.fault, bench.engine.token_s = fault, 0.02
    last, events = await bench.answer()
    assert isinstance(last, Failed)
    if fault == "truncate":
        assert last.reason in ("engine_cut", "engine_lost")  # aiohttp sees the half chunk first, or we do
    else:
        assert last.reason == reason
    assert last.elsewhere
    assert len([event for event in events if isinstance(event, Output)]) == outputs
    assert last.error.status == (503 if fault == "503" else 502)
    bench.engine.fault = None
    assert isinstance((await bench.answer())[0], Finished)


async def test_an_engine_that_is_silent_for_too_long_is_given_up():
    async with WireEngine() as engine, Bench(engine, silence_ms=200) as bench:
        await bench.up()
        engine.fault = "hang_later"
        last, _ = await bench.answer()
        assert last.reason == "engine_silent"
        await until(lambda: engine.running == 0)


async def test_the_engines_word_on_a_request_is_the_clients(bench):
    last, events = await bench.answer({"prompt": "x" * 5000})
    assert (last.reason, last.elsewhere, last.error.status) == ("invalid", False, 400)
    assert "maximum context length is 4096" in last.error.body.message
    assert len(events) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hundred_streams_at_once_end_and_leave_nothing(kind):
    # Patient: all of it shares one loop, which may be late for probes on a machine that is busy.
    async with WireEngine(kind) as engine, Bench(engine, probe_timeout_ms=20_000, connect_timeout_ms=20_000) as bench:
        await bench.up()
        await hundred_streams(bench)


async def hundred_streams(bench):
    jobs = [bench.submit({"prompt": f"{number}", "max_tokens": 20}) for number in range(100)]
    ends = [await bench.end(job) for job in jobs]
    assert all(isinstance(end, Finished) for end in ends)
    load = bench.adapter.load()
    assert (load.running, load.waiting) == (0, 0)


# Lives


async def test_a_crash_fails_what_runs_and_the_next_life_is_another_one(bench):
    bench.engine.token_s = 0.05
    jobs = [bench.submit({"stream": stream, "max_tokens": 500}) for stream in (True, False)]
    await until(lambda: bench.engine.running == 2)
    await bench.engine.stop()
    for job in jobs:
        last = await bench.end(job)
        assert (type(last), last.elsewhere) == (Failed, True)
    await until(lambda: not bench.adapter.life.up)
    assert bench.adapter.load().fault
    with pytest.raises(Refused, match="away"):
        bench.submit()
    await bench.engine.start()
    await bench.up()
    assert [(life.number, life.up) for life in bench.lives] == [(1, True), (1, False), (2, True)]
    bench.engine.token_s = 0.0
    assert isinstance((await bench.answer())[0], Finished)


async def test_a_restart_between_two_probes_is_noticed_by_the_processes_start_time():
    async with WireEngine() as engine, Bench(engine, probe_interval_ms=300) as bench:
        await bench.up()
        await asyncio.sleep(0.05)
        await engine.restart()
        await until(lambda: bench.adapter.life.number == 2)
        assert bench.errors()[0] == "engine lost"


async def test_an_engine_that_hangs_is_lost_after_some_probes():
    async with WireEngine() as engine, Bench(engine, probe_timeout_ms=100) as bench:
        await bench.up()
        engine.fault = "deaf"
        await until(lambda: not bench.adapter.life.up)
        engine.fault = None
        await until(lambda: bench.adapter.life.number == 2)


async def test_what_an_engine_says_of_itself_is_taken_over():
    async with (
        WireEngine("vllm") as vllm,
        WireEngine("sglang") as sglang,
        Bench(vllm) as first,
        Bench(sglang) as second,
    ):
        await first.up()
        await second.up()
        life = first.adapter.life
        assert (life.version, life.kv_tokens, life.block_tokens, life.max_context) == ("0.32.0", 65536, 32, 4096)
        life = second.adapter.life
        assert (life.version, life.kv_tokens, life.block_tokens) == ("0.5.23", 65536, 32)


async def test_a_server_of_another_model_does_not_come_up_and_says_why():
    async with WireEngine(model="other") as engine:
        engine_of = Bench(engine, served_model="chat")
        async with engine_of as bench:
            await until(lambda: "does not serve" in bench.adapter.diagnose().why_down)
            assert not bench.adapter.life.up
            [finding] = bench.adapter.diagnose().findings
            assert "it serves other" in finding.text


@pytest.mark.parametrize("kind", KINDS)
async def test_the_key_goes_with_every_call_and_a_wrong_one_is_named(kind, tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    async with WireEngine(kind, key="secret") as engine:
        async with Bench(engine, api_key_file=str(file)) as bench:
            await bench.up()
            await bench.answer()
            await asyncio.sleep(0.1)
            assert engine.unauthorised == 0
        async with Bench(engine, api_key="wrong") as bench:
            await until(lambda: "key" in bench.adapter.diagnose().why_down and engine.unauthorised)
            assert not bench.adapter.life.up


async def test_a_key_file_that_is_not_there_is_named(tmp_path):
    missing = tmp_path / "no-key"
    async with WireEngine() as engine, Bench(engine, api_key_file=str(missing)) as bench:
        await bench.up()
        [finding] = [found for found in bench.adapter.diagnose().findings if found.code == "no_key"]
        assert str(missing) in finding.text
        assert "engine without a key" in bench.errors()
        missing.write_text("secret")
        bench.adapter._server.refresh_key()
        assert "no_key" not in [found.code for found in bench.adapter.diagnose().findings]


async def test_the_engines_own_name_for_the_model_is_used():
    async with WireEngine(model="org/Model-8B") as engine, Bench(engine, served_model="org/Model-8B") as bench:
        await bench.up()
        await bench.answer({"model": "chat"})
        assert engine.requests[-1][2]["model"] == "org/Model-8B"


# Metrics


async def test_a_missing_metric_is_one_alarm_and_a_flag():
    async with WireEngine() as engine, Bench(engine) as bench:
        await bench.up()
        assert bench.adapter.diagnose().degraded == ()
        engine.hidden = {"vllm:kv_cache_usage_perc"}
        await until(lambda: bench.adapter.diagnose().degraded == ("kv_usage",))
        probes = engine.probes["/metrics"]
        await until(lambda: engine.probes["/metrics"] > probes + 3)
        assert bench.errors() == ["engine metrics missing: the worker is degraded"]
        assert "metrics_missing" in [finding.code for finding in bench.adapter.diagnose().findings]
        engine.hidden = set()
        await until(lambda: not bench.adapter.diagnose().degraded)


@pytest.mark.parametrize("generation", ["current", "v1-early", "v0"])
async def test_every_generation_of_vllm_is_told_and_none_is_degraded(generation):
    async with WireEngine(generation=generation) as engine, Bench(engine) as bench:
        await bench.up()
        engine.running, engine.waiting = 7, 3
        await until(lambda: bench.adapter.load().running == 7)
        told = bench.adapter.diagnose()
        assert (told.metrics, told.degraded) == (generation, ())
        engine.running = engine.waiting = 0


async def test_steps_move_with_the_engine_and_stand_with_it(bench):
    await bench.answer()
    before = bench.adapter.load().steps
    await bench.answer({"max_tokens": 30})
    assert bench.adapter.load().steps > before


async def test_an_answer_in_one_piece_frees_its_place_in_the_queue_when_its_prompt_was_due():
    async with WireEngine(token_s=0.05) as engine, Bench(engine) as bench:
        await bench.up()
        job = bench.submit({"stream": False, "max_tokens": 40}, prefill_ms=50.0)
        await until(lambda: bench.adapter.load().waiting == 0)
        assert not bench.of(job)  # and nobody is told, so that it may still be tried elsewhere
        load = bench.adapter.load()
        assert (load.running, load.waiting, load.queued_prefill_ms) == (1, 0, 0.0)
        await bench.end(job)
        assert len(bench.of(job, FirstToken)) == 1


async def test_metrics_that_are_never_given_are_one_alarm_too():
    async with WireEngine() as engine, Bench(engine) as bench:
        await bench.up()
        engine.fault = "no metrics"
        await until(lambda: bench.adapter.diagnose().degraded == ("running", "waiting", "kv_usage", "steps"))
        assert bench.adapter.life.up
        assert bench.errors() == ["engine metrics missing: the worker is degraded"]
        before = engine.lives
        await engine.restart()  # and a restart is seen all the same, by what was read last
        engine.fault = None
        await until(lambda: bench.adapter.life.up and bench.adapter.life.number == before + 1)
        await until(lambda: not bench.adapter.diagnose().degraded)


async def test_metrics_that_begin_with_the_first_request_are_not_missed_before_it():
    async with WireEngine("sglang") as engine, Bench(engine) as bench:
        await bench.up()
        engine.hidden = {"sglang:token_usage"}
        probes = engine.probes["/metrics"]
        await until(lambda: engine.probes["/metrics"] > probes + 5)
        assert (bench.adapter.diagnose().degraded, bench.errors()) == ((), [])
        await bench.answer()
        await until(lambda: bench.adapter.diagnose().degraded == ("kv_usage",))
        assert bench.errors() == ["engine metrics missing: the worker is degraded"]


# Data-parallel ranks


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_ranks_behind_one_server_are_one_worker_that_knows_all_their_caches(kind):
    async with WireEngine(kind, ranks=3) as engine, Bench(engine, sketch="tokens") as bench:
        await bench.up()
        prompts = [[rank + 1] * 128 for rank in range(3)]
        for prompt in prompts:
            await bench.answer({"prompt": prompt})
        assert engine.rank_requests == [1, 1, 1]
        await held(bench, {rung for prompt in prompts for rung in sketch_tokens(prompt).rungs})
        await until(lambda: "ranks" in [finding.code for finding in bench.adapter.diagnose().findings])
        assert bench.adapter.diagnose().ranks == 3
        if kind == "vllm":
            assert bench.adapter.life.kv_tokens == 3 * 65536
        engine.fault = "hang"
        jobs = [bench.submit({"prompt": [9]}) for _ in range(6)]
        await until(lambda: engine.rank_running == [2, 2, 2])
        for job in jobs:
            bench.adapter.cancel(job)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_rank_may_be_a_worker_of_its_own_with_its_own_load_and_cache(kind):
    async with (
        WireEngine(kind, ranks=2) as engine,
        Bench(engine, sketch="tokens", rank=0, data_parallel=2) as first,
        Bench(engine, sketch="tokens", rank=1, data_parallel=2) as other,
    ):
        await first.up()
        await other.up()
        for _ in range(3):
            await other.answer({"prompt": IDS})
        assert engine.rank_requests == [0, 3]
        await held(other, RUNGS)
        await held(first, ())
        if kind == "vllm":
            assert other.adapter.life.kv_tokens == 65536
        engine.token_s = 0.02
        job = first.submit({"prompt": [9], "max_tokens": 200})
        await until(lambda: first.adapter.load().running == 1)
        looked = engine.probes["/metrics"]
        await until(lambda: engine.probes["/metrics"] > looked + 4)
        assert (first.adapter.load().running, other.adapter.load().running) == (1, 0)
        assert "ranks" not in [finding.code for finding in other.adapter.diagnose().findings]
        first.adapter.cancel(job)


async def test_events_of_a_rank_are_at_its_own_place_in_the_configuration():
    async with WireEngine(ranks=2) as engine:
        told = ", ".join(f"tcp://127.0.0.1:{each.port}" for each in engine.publishers)
        async with Bench(engine, sketch="tokens", rank=1, data_parallel=2, kv_events=told) as bench:
            await bench.up()
            await asyncio.sleep(0.2)  # it has no replay, so it must be there before
            await bench.answer({"prompt": IDS})
            await held(bench, RUNGS)
            assert len(bench.adapter._prefixes._lines) == 1


async def test_a_rank_that_the_server_has_not_is_no_worker():
    async with WireEngine(ranks=2) as engine, Bench(engine, rank=2, data_parallel=3) as bench:
        await until(lambda: "no data-parallel rank 2; it has 0, 1" in bench.adapter.diagnose().why_down)
        assert not bench.adapter.life.up


# Embeddings


@pytest.mark.parametrize("inputs", ["one text", ["two", "texts"]])
async def test_embeddings_are_one_output_as_the_engine_wrote_it(bench, inputs):
    body = json.dumps({"model": "chat", "input": inputs, "dimensions": 2}).encode()
    bench.adapter.submit(Work("e", "r", "chat", body, parse(body), Role.BOTH, 64))
    last = await bench.end("e")
    assert isinstance(last, Finished)
    path, _, asked = bench.engine.requests[-1]
    assert (path, asked["input"], asked["dimensions"]) == ("/v1/embeddings", inputs, 2)
    (output,) = bench.of("e", Output)
    rows = json.loads(output.data)["data"]
    assert [row["index"] for row in rows] == list(range(1 if isinstance(inputs, str) else 2))
    assert last.usage.prompt_tokens == 8
    assert last.usage.output_tokens == 0


async def test_embeddings_of_an_engine_that_makes_none_go_elsewhere(bench):
    bench.engine.fault = "no embeddings"
    body = json.dumps({"model": "chat", "input": "x"}).encode()
    bench.adapter.submit(Work("e", "r", "chat", body, parse(body), Role.BOTH, 64))
    last = await bench.end("e")
    assert (last.reason, last.elsewhere) == ("engine_model", True)


# Prefixes

IDS = [7, 8, 9, 10] * 64  # 256 tokens
RUNGS = sketch_tokens(IDS).rungs


async def held(bench, wanted):
    """Until exactly ``wanted`` rungs are held, as far as the adapter told."""

    def look():
        became, ended = bench.adapter.drain_rungs()
        bench.known.update(became)
        bench.known.difference_update(ended)
        return bench.known == set(wanted)

    await until(look)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_what_the_engine_caches_is_known_by_its_events(kind):
    async with WireEngine(kind) as engine, Bench(engine, sketch="tokens") as bench:
        await bench.up()
        assert bench.adapter.diagnose().affinity == "events"
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)
        await engine.publisher.say({"type": "AllBlocksCleared"})
        await held(bench, ())


@pytest.mark.parametrize(("kind", "bound_at"), [("vllm", "127.0.0.1"), ("sglang", "0.0.0.0")])
async def test_an_engine_that_listens_where_it_might_have_connected_is_heard(kind, bound_at):
    """vLLM tells the address that ``tcp://*:0`` has got it, and SGLang binds the address of all networks."""
    async with WireEngine(kind) as engine, Bench(engine, sketch="tokens") as bench:
        engine.bound_at = bound_at
        await bench.up()
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)
        assert bench.adapter.diagnose().findings == []


async def test_an_engine_that_connects_finds_its_agent_listening():
    async with WireEngine() as engine:
        engine.bound_at = "127.0.0.1"
        (publisher,) = engine.publishers
        publisher.live.unbind(f"tcp://127.0.0.1:{publisher.port}")
        publisher.live.connect(f"tcp://127.0.0.1:{publisher.port}")
        async with Bench(engine, sketch="tokens") as bench:
            await bench.up()
            await until(lambda: bench.adapter.diagnose().affinity == "events")
            await asyncio.sleep(0.3)  # it tries to connect again and again
            await bench.answer({"prompt": IDS})
            await held(bench, RUNGS)


async def test_events_from_before_the_agent_and_events_that_were_lost_are_asked_for_again():
    async with WireEngine() as engine:
        await engine.read(tuple(IDS), {})
        async with Bench(engine, sketch="tokens") as bench:
            await bench.up()
            await held(bench, RUNGS)
            other = [5] * 64
            rung = sketch_tokens(other).rungs[0]
            lost = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": other,
                    "block_size": 32}  # fmt: skip
            await engine.publisher.say(lost, lose=True)
            await engine.publisher.say({"type": "BlockRemoved", "block_hashes": [99]})
            await held(bench, (*RUNGS, rung))
            figures = bench.adapter.diagnose().events
            assert (figures["gaps"], figures["resets"]) == (1, 0)


async def test_lost_events_that_nobody_keeps_make_all_that_was_known_void():
    async with WireEngine() as engine, Bench(engine, sketch="tokens") as bench:
        await bench.up()
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)
        engine.publisher.kept = 1
        for lose in (True, True, False):
            await engine.publisher.say({"type": "BlockRemoved", "block_hashes": [99]}, lose=lose)
        await held(bench, ())
        assert bench.adapter.diagnose().events["resets"] == 1


async def test_a_restarted_engine_holds_nothing_of_its_former_life():
    async with WireEngine() as engine, Bench(engine, sketch="tokens") as bench:
        await bench.up()
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)
        await engine.restart()
        await until(lambda: bench.adapter.life.number == 2 and bench.adapter.life.up)
        await held(bench, ())
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)


async def test_tenants_blocks_are_known_under_their_salt():
    async with WireEngine() as engine, Bench(engine, sketch="tokens", isolation=True) as bench:
        await bench.up()
        await bench.answer({"prompt": IDS}, salt=b"acme\0")
        await held(bench, sketch_tokens(IDS, salt=b"acme\0").rungs)


async def test_without_events_its_own_traffic_is_what_is_known(bench):
    if bench.engine.kind != "openai":
        pytest.skip("has events")
    assert bench.adapter.diagnose().affinity == "traffic"
    await bench.answer({"prompt": "x" * 600})
    await held(bench, sketch_text(b"x" * 600).rungs)
    assert [finding.code for finding in bench.adapter.diagnose().findings] == ["no_metrics", "approximate"]


async def test_prompts_as_text_are_known_by_traffic_even_where_there_are_events():
    async with WireEngine() as engine, Bench(engine) as bench:
        await bench.up()
        await bench.answer({"prompt": "x" * 600})
        await until(lambda: bench.adapter.diagnose().events["held_blocks"] == 18)
        await held(bench, (*sketch_text(b"x" * 600).rungs, *sketch_tokens(list(b"x" * 576)).rungs))
        assert "tokenizer_missing" in [finding.code for finding in bench.adapter.diagnose().findings]


async def test_events_off_is_traffic_alone():
    async with WireEngine() as engine, Bench(engine, sketch="tokens", kv_events="off") as bench:
        await bench.up()
        await bench.answer({"prompt": IDS})
        await held(bench, RUNGS)
        [finding] = bench.adapter.diagnose().findings
        assert (finding.code, finding.remedy) == ("no_events", 'set kv_events = "auto"')


async def test_events_where_the_configuration_says_they_are():
    async with WireEngine() as engine:
        events = f"tcp://127.0.0.1:{engine.publisher.port}"
        async with Bench(engine, sketch="tokens", kv_events=events) as bench:
            await bench.up()
            await asyncio.sleep(0.3)  # no replay: what is said before the subscription is there is lost
            await bench.answer({"prompt": IDS})
            await held(bench, RUNGS)


# Adapters


async def test_adapters_are_loaded_at_the_engines_start_and_at_run_time():
    async with WireEngine() as engine:
        paths = {"lora": "/adapters/lora"}
        async with Bench(engine, adapters=("lora",), adapter_paths=paths) as bench:
            await bench.up()
            await until(lambda: bench.adapter.life.adapters == ("lora",))
            assert engine.adapters == paths
            body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
            bench.adapter.submit(Work("l", "r", "lora", body, parse(body), Role.BOTH, 64))
            await bench.end("l")
            assert engine.requests[-1][2]["model"] == "lora"
            await bench.adapter.unload_adapter("lora")
            assert bench.adapter.life.adapters == ()
            assert engine.adapters == {}
            await bench.adapter.unload_adapter("lora")  # twice does nothing
            await bench.adapter.load_adapter("lora")
            await bench.adapter.load_adapter("lora")  # as another worker of the same server may have done
            assert (bench.adapter.life.adapters, engine.adapters) == (("lora",), paths)
            with pytest.raises(CannotLoad, match="other"):
                await bench.adapter.load_adapter("other")


# Prefill and decode apart


async def test_kv_goes_from_engine_to_engine_by_their_own_handshake():
    async with (
        engines(WireEngine(), WireEngine()) as (prefill, decode),
        Bench(prefill, kv_connector="NixlConnector") as first,
        Bench(decode, kv_connector="NixlConnector") as other,
    ):
        await first.up()
        await other.up()
        done, events = await first.answer({"prompt": IDS}, role=Role.PREFILL, transfer="x")
        assert isinstance(done, Prefilled)
        assert len(events) == 1
        assert len(prefill.kept) == 1
        last, _ = await other.answer({"prompt": IDS}, role=Role.DECODE, transfer="x", parameters=done.parameters)
        assert isinstance(last, Finished)
        assert prefill.kept == {}


async def test_kv_that_nobody_wants_is_freed_by_fetching_it():
    async with (
        engines(WireEngine(), WireEngine()) as (prefill, decode),
        Bench(prefill, kv_connector="NixlConnector") as first,
        Bench(decode, kv_connector="NixlConnector") as other,
    ):
        await first.up()
        await other.up()
        done, _ = await first.answer({"prompt": IDS}, role=Role.PREFILL, transfer="x")
        body = json.dumps({"prompt": IDS, "stream": True, "max_tokens": 500}).encode()
        other.adapter.discharge(Work("d", "r", "chat", body, parse(body), Role.DECODE, 64, parameters=done.parameters))
        await until(lambda: not prefill.kept)
        assert (decode.requests[-1][2]["max_tokens"], decode.requests[-1][2]["stream"]) == (1, False)


async def test_an_engine_without_the_connector_says_so():
    async with WireEngine(handshake=False) as engine, Bench(engine, kv_connector="NixlConnector") as bench:
        await bench.up()
        last, _ = await bench.answer(role=Role.PREFILL, transfer="x")
        assert (type(last), last.reason) == (Failed, "no_handshake")
