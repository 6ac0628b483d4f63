"""Traces from files: the quirks they have are handled, and what cannot be read is named with its line."""

import gzip
import json

import pytest

from quartet_sim import servegen
from quartet_sim.sessions import session_file
from quartet_sim.traces import WrongTrace, azure, azure_code, mooncake

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_azure_rows_may_be_out_of_order_packed_and_have_seven_digits(tmp_path):
    text = AZURE + "2023-11-16 18:17:05.0000001,30,0\n2023-11-16 18:17:03.9799600,4808,10\n\n"
    requests = azure(written(tmp_path, gzip.compress(text.encode())))
    assert [(r.number, r.prompt_tokens, r.output_tokens) for r in requests] == [(0, 4808, 10), (1, 30, 0)]
    assert requests[0].at_s == 0.0
    assert requests[1].at_s == pytest.approx(1.02004, abs=1e-6)


def test_the_code_trace_comes_in_bursts():
    requests = azure_code()
    assert len(requests) == 5100
    seconds = [int(request.at_s) for request in requests]
    assert max(seconds.count(second) for second in set(seconds)) == 67


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("time,in,out\n1,2,3\n", "line 1", "header"),
        (AZURE + "2023-11-16 18:17:03.97,1,1\nyesterday,5,5\n", "line 3", "yesterday"),
        (AZURE + "2023-11-16 18:17:03.97,0,1\n", "line 2", "at least 1 token"),
        (AZURE, "trace", "no requests"),
        ("", "trace", "empty"),
    ],
)
def test_azure_files_that_are_none(tmp_path, text, where, what):
    with pytest.raises(WrongTrace, match=what) as caught:
        azure(written(tmp_path, text))
    assert where in caught.value.where


def test_mooncake_steps_are_spread_and_rows_with_other_blocks_refused(tmp_path):
    def row(at, tokens, ids):
        return json.dumps({"timestamp": at, "input_length": tokens, "output_length": 5, "hash_ids": ids}) + "\n"

    path = written(tmp_path, row(3000, 600, [1, 2]) + row(0, 10, [7]) + row(3000, 512, [1]))
    requests = mooncake(path, seed=1)
    assert [request.prompt_tokens for request in requests] == [10, 600, 512]
    assert requests[0].at_s < 3.0 < requests[1].at_s < requests[2].at_s < 6.0
    assert requests == mooncake(path, seed=1)
    with pytest.raises(WrongTrace, match="600 with 1 hash_ids"):
        mooncake(written(tmp_path, row(0, 10, [7]) + row(0, 600, [1]), "short"))
    with pytest.raises(WrongTrace) as caught:
        mooncake(written(tmp_path, row(0, 10, [7]) + "{}\n", "keyless"))
    assert "line 2" in caught.value.where


def test_a_missing_file_is_named():
    with pytest.raises(WrongTrace, match=r"/nowhere/trace\.csv: No such file"):
        azure("/nowhere/trace.csv")


def test_sessions_follow_themselves_and_nested_agents_the_one_that_started_them(tmp_path):
    def row(t, ids, think=0.0):
        return {"t": t, "type": "s", "model": "m", "in": 64 * len(ids), "out": 3, "hash_ids": ids, "think_time": think}

    session = {
        "tool_tokens": 64, "system_tokens": 64,
        "requests": [
            row(0.0, [1, 2]),
            {
                "t": 4.0, "type": "subagent", "tool_tokens": 0, "system_tokens": 0,
                "requests": [row(0.5, [9]), row(1.0, [9, 8], 0.25)],
            },
            row(9.0, [1, 2, 3], 2.0),
        ],
    }  # fmt: skip
    ((first, nested, second, last),) = session_file(written(tmp_path, json.dumps(session)))
    assert (first.follows, nested.follows, second.follows, last.follows) == (
        -1, first.number, nested.number, first.number,
    )  # fmt: skip
    assert (last.think_s, second.think_s, nested.at_s) == (2.0, 0.25, 4.5)
    with pytest.raises(WrongTrace) as caught:
        session_file(written(tmp_path, json.dumps(session) + "\n[]\n", "bad"))
    assert "line 2" in caught.value.where


def test_servegen_clients_have_the_rate_that_is_asked_for_and_keep_their_burstiness():
    requests = servegen.requests("m-mid", 1, start_s=0.0, length_s=1200.0, rate_per_s=8.0)
    assert len(requests) == pytest.approx(9600, rel=0.1)
    assert [request.number for request in requests] == list(range(len(requests)))
    assert all(0.0 <= request.at_s < 1200.0 for request in requests)
    prompts = sorted(request.prompt_tokens for request in requests)
    outputs = sorted(request.output_tokens for request in requests)
    assert prompts[len(prompts) // 2] == pytest.approx(169, rel=0.1)
    assert outputs[len(outputs) // 2] == pytest.approx(29, rel=0.15)
    assert requests == servegen.requests("m-mid", 1, start_s=0.0, length_s=1200.0, rate_per_s=8.0)
    assert len({request.client for request in requests}) > 10


def test_servegen_services_and_spans_that_are_not_there():
    with pytest.raises(WrongTrace, match="m-mid"):
        servegen.requests("m-huge", 1, start_s=0.0, length_s=600.0, rate_per_s=1.0)
    with pytest.raises(WrongTrace, match="no client"):
        servegen.requests("m-mid", 1, start_s=1e9, length_s=600.0, rate_per_s=1.0)
