from itertools import pairwise

import msgspec
import pytest

from quartet_cli.demo.workload import TRACES, Arrival, arrivals, prepare, right_text
from quartet_core.catalogue import builtin
from quartet_core.ladder import sketch_tokens
from quartet_sim.engine import Job, SimulatedEngine, Token
from quartet_sim.traces import TraceRequest


def test_arrivals_are_in_order_within_the_time_and_the_same_every_time():
    workload = arrivals(10.0)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(workload))
    assert all(0.0 <= arrival.at_s < 10.0 for arrival in workload)
    assert len({arrival.id for arrival in workload}) == len(workload)
    assert workload == arrivals(10.0)


def test_each_model_gets_its_trace_sped_up_with_its_lengths_unchanged():
    workload = arrivals(10.0)
    for trace in TRACES:
        span_s = 10.0 * trace.speed_up
        recorded = [r for r in trace.read() if trace.start_s <= r.at_s < trace.start_s + span_s]
        ours = [arrival for arrival in workload if arrival.model == trace.model]
        assert [(a.request.prompt_tokens, a.request.output_tokens) for a in ours] == [
            (r.prompt_tokens, r.output_tokens) for r in recorded
        ]
        assert [a.at_s * trace.speed_up + trace.start_s for a in ours] == pytest.approx([r.at_s for r in recorded])


def test_the_right_text_is_what_an_engine_answers():
    arrival = Arrival("x", 0.0, "llama-8b", TraceRequest(7, 0.0, 300, 20))
    prepared = prepare(arrival)
    body = msgspec.json.decode(prepared.body)
    catalogue = builtin()
    engine = SimulatedEngine(catalogue.profile("H100_SXM5", "llama-3.1-8b", "fp8", 1), kv_tokens=4096, max_context=4096)
    ids = body["prompt"]
    engine.submit(Job("x", ids, body["max_tokens"], sketch_tokens(ids)), 0.0)
    now_ms, texts = 0.0, []
    while (duration_ms := engine.begin(now_ms)) is not None:
        now_ms += duration_ms
        texts += [event.text for event in engine.finish(now_ms) if isinstance(event, Token)]
    assert "".join(texts) == right_text(prepared, 20)
