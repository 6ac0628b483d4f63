"""The traces are read as they were published, and their prompts share tokens exactly where requests shared blocks."""

import json
from collections import Counter
from itertools import pairwise

import pytest

from quartet_core.openai import parse
from quartet_sim.prompts import completion_body, prompt_ids
from quartet_sim.traces import TraceRequest, azure_conversation, mooncake_conversation, sped_up, window


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_azure_is_read_whole_and_in_order():
    trace = azure_conversation()
    assert len(trace) == 9754
    assert trace[0] == TraceRequest(0, 0.0, 374, 44)
    assert trace[1].at_s == pytest.approx(4.314579)
    assert trace[-1].at_s == pytest.approx(1753.257, abs=1e-3)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(trace))


def test_mooncake_arrivals_are_spread_inside_their_three_seconds_in_file_order():
    trace = mooncake_conversation(seed=1)
    assert len(trace) == 5719
    assert [request.number for request in trace] == list(range(5719))
    assert all(earlier.at_s < later.at_s for earlier, later in pairwise(trace))
    assert trace[0].at_s < 3.0
    assert 1797.0 <= trace[-1].at_s < 1800.0
    offsets = [request.at_s % 3 for request in trace]
    assert sum(offsets) / 5719 == pytest.approx(1.5, abs=0.05)
    assert trace == mooncake_conversation(seed=1)
    assert [request.at_s for request in trace] != [request.at_s for request in mooncake_conversation(seed=2)]
    assert all(len(request.blocks) == -(-request.prompt_tokens // 512) for request in trace)


def test_mooncake_prompts_share_what_the_trace_says():
    trace = mooncake_conversation()[:400]
    prompts = [prompt_ids(request) for request in trace]
    shared = 0
    for i, j in [(later, earlier) for later in range(0, 400, 20) for earlier in range(later)]:
        a, b = trace[i], trace[j]
        blocks = common_prefix(a.blocks, b.blocks)
        most = min(blocks * 512, a.prompt_tokens, b.prompt_tokens)
        # ids are drawn from 65,536: the first ones behind the shared part may be equal by chance
        assert most <= common_prefix(prompts[i], prompts[j]) <= most + 2
        shared += blocks > 1
    assert shared > 0


def test_azure_prompts_share_nothing():
    trace = azure_conversation()[:300]
    prompts = [prompt_ids(request) for request in trace]
    assert max(Counter(prompt[0] for prompt in prompts).values()) <= 2
    assert all(
        len(prompt) == request.prompt_tokens for prompt, request in zip(prompts, azure_conversation(), strict=False)
    )
    assert max(map(max, prompts)) < 65_536
    assert len(set(prompts[0])) > 0.9 * len(prompts[0])


def test_another_seed_gives_other_tokens_and_the_same_seed_the_same():
    request = mooncake_conversation()[0]
    assert prompt_ids(request, 3) == prompt_ids(request, 3)
    assert common_prefix(prompt_ids(request, 3), prompt_ids(request, 4)) <= 1


def test_a_window_starts_at_zero_and_a_speed_up_squeezes():
    trace = [TraceRequest(n, n * 1.0, 10, 5) for n in range(20)]
    cut = window(trace, 4.0, 3.0)
    assert [(request.number, request.at_s) for request in cut] == [(4, 0.0), (5, 1.0), (6, 2.0)]
    assert [request.at_s for request in sped_up(cut, 4.0)] == [0.0, 0.25, 0.5]
    with pytest.raises(ValueError, match="positive"):
        sped_up(cut, 0.0)


def test_a_body_carries_the_prompt_as_ids_and_the_traced_length():
    request = TraceRequest(3, 0.0, 700, 0, (5, 6))
    body = completion_body(request, "llama", stream=False, seed=2)
    inference = parse(body)
    assert inference.prompt_ids == list(prompt_ids(request, 2))
    assert (inference.model, inference.max_tokens, inference.stream, len(inference.prompt_ids)) == (
        "llama",
        1,
        False,
        700,
    )
    streamed = json.loads(completion_body(request, "llama", include_usage=True))
    assert (streamed["stream"], streamed["stream_options"]) == (True, {"include_usage": True})
