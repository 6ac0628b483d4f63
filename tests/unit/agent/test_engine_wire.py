"""The parts of the engine adapter that do no I/O: bodies, streams, metrics, load."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from wire_engine import WireEngine

from quartet_agent.engines import bodies, exposition
from quartet_agent.engines.base import Work
from quartet_agent.engines.call import failure
from quartet_agent.engines.dialect import OPENAI, SGLANG, VLLM
from quartet_agent.engines.estimate import LoadEstimate
from quartet_agent.engines.reading import Reading, read
from quartet_agent.engines.sse import EventSplitter, EventTooLarge
from quartet_agent.engines.watch import port_of_rank
from quartet_bus.messages import Role
from quartet_core.catalogue import builtin
from quartet_core.openai import parse

PROFILE = builtin().profile("H100_SXM5", "llama-3.1-8b", "fp8", 1)


def work(body, **fields):
    data = json.dumps(body).encode()
    return Work(**(dict(job="0/t/r/1/1", answer_id="r", model="chat", body=data, inference=parse(data), role=Role.BOTH,
                        default_max_tokens=64) | fields))  # fmt: skip


def order(body, **fields):
    made = bodies.order(work(body, **fields), model="served", usage=True, salted=True, rid=False)
    return json.loads(made.body), made.hides_usage


# Bodies

FIELDS = {"prompt": "hi", "n": 2, "stop": ["a"], "tools": [{"x": 1.50}], "logprobs": 3, "seed": 18446744073709551615,
          "unknown": {"deep": [None, 1e-9]}, "text": "\u00e9\U0001f600"}  # fmt: skip


def test_every_field_goes_through_as_the_client_wrote_it():
    told, hides = order(FIELDS)
    assert told == FIELDS | {"model": "served"}
    assert not hides
    raw = bodies.order(work({"prompt": "x", "a": 1.50}), model="m", usage=True, salted=True, rid=False).body
    assert raw == b'{"prompt":"x","a":1.5,"model":"m"}'


@pytest.mark.parametrize(
    ("given", "told", "hides"),
    [
        ({}, {"include_usage": True}, True),
        ({"stream_options": None}, {"include_usage": True}, True),
        ({"stream_options": {"include_usage": False, "x": 1}}, {"include_usage": True, "x": 1}, True),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}, False),
        ({"stream_options": 5}, 5, False),
    ],
)
def test_a_stream_ends_with_its_usage_which_is_hidden_from_who_did_not_ask(given, told, hides):
    body, hidden = order({"prompt": "hi", "stream": True, **given})
    assert (body["stream_options"], hidden) == (told, hides)


def test_a_tenant_cannot_choose_its_salt_and_the_salt_can_be_read_back():
    body, _ = order({"prompt": "hi", "cache_salt": "other"}, salt=b"tenant\0lora")
    assert bodies.salt_of_cache(body["cache_salt"]) == b"tenant\0lora"
    assert order({"prompt": "hi", "cache_salt": "own"})[0]["cache_salt"] == "own"
    assert bodies.salt_of_cache("own") is None
    assert bodies.salt_of_cache("quartet:zz") is None


def test_a_prefill_asks_for_one_token_and_for_its_kv_to_be_kept():
    body, hides = order(
        {"prompt": "hi", "stream": True, "max_completion_tokens": 9, "min_tokens": 5, "stream_options": {}},
        role=Role.PREFILL,
    )
    assert not hides
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    del body["kv_transfer_params"]
    assert body == {"prompt": "hi", "model": "served", "max_tokens": 1, "stream": False}


def test_what_the_other_engine_said_goes_through_unchanged():
    parameters = b'{"remote_block_ids": [[1, 2]], "x": 1.250}'
    made = bodies.order(work({"prompt": "hi"}, role=Role.DECODE, parameters=parameters), model="m", usage=True,
                        salted=True, rid=False)  # fmt: skip
    assert parameters in made.body


@pytest.mark.parametrize(
    ("status", "answer", "reason", "told", "elsewhere"),
    [
        (400, {"error": {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}}, "invalid",
         (400, "too long", "BadRequestError", "prompt"), False),
        (400, {"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400},
         "invalid", (400, "too long", "BadRequestError", None), False),
        (422, {"detail": "no field"}, "invalid", (422, "no field", "invalid_request_error", None), False),
        (400, {"error": "plain"}, "invalid", (400, "plain", "invalid_request_error", None), False),
        (401, {"error": "Unauthorized"}, "engine_key", (502, None, "server_error", None), True),
        (404, {"error": {"message": "no model"}}, "engine_model", (502, None, "server_error", None), True),
        (429, {}, "engine_busy", (503, None, "service_unavailable", None), True),
        (503, {}, "engine_busy", (503, None, "service_unavailable", None), True),
        (500, {"error": {"message": "boom"}}, "engine_error", (502, "The engine failed: boom", "server_error", None),
         True),
    ],
)  # fmt: skip
def test_errors_are_the_clients_or_the_engines_own(status, answer, reason, told, elsewhere):
    failed = failure("j", status, json.dumps(answer).encode())
    error = failed.error
    assert (failed.reason, failed.elsewhere) == (reason, elsewhere)
    assert (error.status, error.body.type, error.body.param) == (told[0], told[2], told[3])
    assert told[1] is None or error.body.message == told[1]


@given(st.integers(300, 599), st.binary(max_size=60))
def test_any_answer_is_some_failure(status, data):
    assert 400 <= failure("j", status, data).error.status <= 599


# Streams


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_events_are_the_same_however_the_body_is_cut(texts, newline, cuts):
    body = "".join(f": a comment{newline}data: {text}{newline}{newline}" for text in texts).encode()
    splitter, found, at = EventSplitter(), [], 0
    for cut in [*cuts, len(body)]:
        found += splitter.feed(body[at : at + cut])
        at += cut
    assert found == [text.encode() for text in texts]
    assert not splitter.inside


def test_data_of_several_lines_is_one_event_and_an_event_without_end_is_none():
    splitter = EventSplitter()
    assert splitter.feed(b"event: x\ndata:a\ndata: b\n\ndata: half") == [b"a\nb"]
    assert splitter.inside


def test_an_event_is_bounded():
    splitter = EventSplitter(max_event_bytes=10)
    with pytest.raises(EventTooLarge):
        splitter.feed(b"data: " + b"x" * 11)


# Metrics


@given(
    st.dictionaries(st.text(min_size=0, max_size=10), st.floats(allow_nan=False, allow_infinity=False), max_size=6),
    st.integers(0, 1 << 40),
)
def test_samples_are_read_as_the_exporter_wrote_them(labelled, count):
    registry = CollectorRegistry()
    gauge = Gauge("vllm:usage", "words\nof help", ("engine",), registry=registry)
    for label, value in labelled.items():
        gauge.labels(label).set(value)
    Counter("other", "x", registry=registry).inc(count)
    found = exposition.samples(generate_latest(registry).decode(), {"vllm:usage"})
    assert {sample.labels["engine"]: sample.value for sample in found.get("vllm:usage", [])} == labelled
    assert set(found) <= {"vllm:usage"}


@given(st.text(max_size=200))
def test_any_text_is_read(text):
    exposition.samples(text)


@pytest.mark.parametrize("generation", ["current", "v1-early", "v0"])
def test_each_generation_of_names_is_told_and_read(generation):
    engine = WireEngine(generation=generation)
    engine.caches, engine.lives = [{("", (1,) * 32): 1}], 1
    engine.running, engine.waiting, engine.steps, engine.queries, engine.hits = 3, 2, 41, 100, 60
    reading = read(engine.exposition(), VLLM)
    assert reading.generation == generation
    assert (reading.running, reading.waiting, reading.steps, reading.kv_usage) == (3, 2, 41, 0.25)
    assert (reading.queries, reading.hits) == ((None, None) if generation == "v0" else (100, 60))
    assert reading.missing == ()
    assert reading.started_s == 1.7e9 + 1
    assert (reading.block_tokens, reading.kv_tokens) == ((32, 65536) if generation == "current" else (0, 0))


def test_sglang_is_read():
    engine = WireEngine("sglang")
    engine.caches, engine.lives, engine.running, engine.steps = [{}], 1, 3, 7
    reading = read(engine.exposition(), SGLANG)
    assert (reading.generation, reading.running, reading.steps, reading.missing) == ("current", 3, 7, ())


def test_a_required_metric_that_is_gone_is_missing_and_never_zero():
    engine = WireEngine()
    engine.caches, engine.lives, engine.hidden = [{}], 1, {"vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"}
    reading = read(engine.exposition(), VLLM)
    assert reading.missing == ("waiting", "kv_usage")
    assert (reading.waiting, reading.kv_usage) == (None, None)
    assert reading.running == 0
    assert read("", VLLM).missing == VLLM.required
    assert read("", OPENAI).missing == ()


def test_ranks_are_summed_and_their_shares_averaged():
    text = "\n".join(
        f'vllm:{name}{{engine="{rank}"}} {value}'
        for name, values in {"kv_cache_usage_perc": (0.2, 0.4), "num_requests_running": (1, 2)}.items()
        for rank, value in enumerate(values)
    )
    reading = read(text, VLLM)
    assert reading.kv_usage == pytest.approx(0.3)
    assert (reading.running, reading.ranks) == (3, ("0", "1"))
    other = read(text, VLLM, 1)
    assert (other.running, other.kv_usage, other.ranks) == (2, 0.4, ("0", "1"))
    assert read(text, VLLM, 2).missing == VLLM.required


@pytest.mark.parametrize("more", ['kv_cache_size_tokens="65536"', 'kv_cache_size_tokens="None"'])
def test_kv_of_all_ranks_is_as_much_as_they_have_together(more):
    """Of four ranks, the one who says tokens says its own, and who says blocks says those of all."""
    text = "\n".join(
        f'vllm:cache_config_info{{block_size="32",engine="{rank}",num_gpu_blocks="8192",{more}}} 1\n'
        f'vllm:num_requests_running{{engine="{rank}"}} 0'
        for rank in range(4)
    )
    assert read(text, VLLM).kv_tokens == 4 * 65536
    assert read(text, VLLM, 2).kv_tokens == 65536


RANK_LABELS = st.fixed_dictionaries(
    {"dp_rank": st.sampled_from("012"), "tp_rank": st.sampled_from("01"), "priority": st.sampled_from(["", "1", "2"])}
)


@given(st.dictionaries(RANK_LABELS.map(lambda labels: tuple(sorted(labels.items()))), st.integers(0, 50), min_size=1))
def test_what_sglang_says_twice_counts_once(said):
    """Ranks of tensor parallelism repeat each other; priorities are parts of a total that is said, too."""
    lines = [
        "sglang:num_running_reqs{" + ",".join(f'{name}="{value}"' for name, value in labels) + f"}} {running}"
        for labels, running in said.items()
    ]
    most = {}
    for labels, running in said.items():
        told = dict(labels)
        if not told["priority"]:
            most[told["dp_rank"]] = max(most.get(told["dp_rank"], 0), running)
    reading = read("\n".join(lines), SGLANG)
    assert reading.running == (sum(most.values()) if most else None)
    for rank in range(3):
        assert read("\n".join(lines), SGLANG, rank).running == most.get(str(rank))


@pytest.mark.parametrize(
    ("endpoint", "rank", "there"),
    [
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("", 1, ""),
        ("inproc://x", 1, "inproc://x"),
    ],
)
def test_each_rank_publishes_on_a_port_of_its_own(endpoint, rank, there):
    assert port_of_rank(endpoint, rank) == there


# Load


def estimate(kv_tokens=10_000):
    return LoadEstimate(PROFILE, kv_tokens)


def test_the_queue_is_the_predicted_work_and_shrinks_as_the_oldest_prompt_is_read():
    load = estimate()
    load.began("a", 100, 40.0, 0.0)
    load.began("b", 100, 60.0, 0.0)
    assert load.load(0.0, fault=False).queued_prefill_ms == pytest.approx(100.0)
    assert load.load(30.0, fault=False).queued_prefill_ms == pytest.approx(70.0)
    # one that takes longer than predicted is still there
    assert 60.0 < load.load(500.0, fault=False).queued_prefill_ms <= 62.0
    load.first_token("a", 40.0)
    told = load.load(40.0, fault=False)
    assert told.queued_prefill_ms == pytest.approx(60.0)
    assert (told.running, told.waiting) == (1, 1)


def test_what_others_sent_is_added_and_what_is_ours_is_not_counted_twice():
    load = estimate()
    load.began("a", 100, 40.0, 0.0)
    load.first_token("a", 40.0)
    load.read(Reading("current", running=3, waiting=2, kv_usage=0.5, steps=10))
    told = load.load(41.0, fault=False)
    assert (told.running, told.waiting) == (3, 2)
    assert told.queued_prefill_ms > 0
    assert told.free_kv_fraction == pytest.approx(0.5)
    load.began("b", 1000, 40.0, 42.0)
    assert load.load(42.0, fault=False).free_kv_fraction == pytest.approx(0.4)


def test_ranks_side_by_side_share_queue_and_batch():
    load = estimate()
    load.ranks = 2
    for number in range(5):
        load.began(f"{number}", 100, 40.0, 0.0)
    assert load.load(0.0, fault=False).queued_prefill_ms == pytest.approx(100.0)
    for number in range(5):
        load.first_token(f"{number}", 40.0)
    told = load.load(40.0, fault=False)
    assert (told.queued_prefill_ms, told.running) == (0.0, 3)


def test_metrics_that_are_gone_leave_nothing_of_what_they_said():
    load = estimate()
    load.read(Reading("current", running=3, waiting=2, kv_usage=0.5, steps=10))
    load.read(Reading("unknown"))
    told = load.load(0.0, fault=False)
    assert (told.running, told.waiting, told.free_kv_fraction) == (0, 0, 1.0)


def test_metrics_that_cannot_be_read_leave_what_the_agent_sees():
    load = estimate()
    load.began("a", 2500, 40.0, 0.0)
    load.read(Reading("unknown"))
    told = load.load(0.0, fault=False)
    assert (told.waiting, told.free_kv_fraction) == (1, pytest.approx(0.75))


def test_drift_is_learned_and_never_makes_a_worker_unusable():
    load, now = estimate(), 0.0
    for job in range(200):
        load.began(str(job), 100, 50.0, now)
        now += 2000.0
        load.first_token(str(job), now)
        load.ended(str(job), now)
    assert load.load(now, fault=False).drift == 5.0
    for job in range(200):
        load.began(str(job), 100, 50.0, now)
        now += 50.0
        load.first_token(str(job), now)
        load.ended(str(job), now)
    assert load.load(now, fault=False).drift == pytest.approx(1.0, abs=0.05)


@given(st.lists(st.tuples(st.sampled_from("btoe"), st.integers(0, 5), st.floats(0, 100)), max_size=60))
def test_nothing_is_left_of_jobs_that_have_ended(history):
    load, now, jobs, shares = estimate(), 0.0, set(), 0.0
    for action, number, passed in history:
        now += passed
        job = str(number)
        if action == "b" and job not in jobs:
            load.began(job, 100, 10.0, now)
            jobs.add(job)
        elif action == "t":
            assert load.first_token(job, now) >= 0.0
        elif action == "o":
            load.output(job, 1)
        elif action == "e":
            shares += load.ended(job, now)
            jobs.discard(job)
        told = load.load(now, fault=False)
        assert told.running + told.waiting == len(jobs)
    for job in jobs:
        shares += load.ended(job, now)
    told = load.load(now, fault=False)
    assert (told.running, told.waiting, told.queued_prefill_ms, told.free_kv_fraction) == (0, 0, 0.0, 1.0)
    assert shares == pytest.approx(told.busy_ms, abs=1e-6)
