"""Agentic sessions are read as they were recorded; starts and what they share are made as documented."""

from collections import defaultdict
from itertools import pairwise

import pytest

from quartet_sim.sessions import SESSION_BLOCK_TOKENS, agentic_sessions, overlay


@pytest.fixture(scope="module")
def sessions():
    return agentic_sessions()


def test_all_sessions_are_read_with_the_requests_of_the_agents_they_start(sessions):
    assert len(sessions) == 96
    requests = [request for session in sessions for request in session]
    assert len(requests) == 6588
    assert len({request.number for request in requests}) == 6588
    for number, session in enumerate(sessions):
        assert {request.session for request in session} == {number}
        assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(session))
    assert all(len(request.blocks) == request.prompt_tokens // SESSION_BLOCK_TOKENS for request in requests)
    assert (sessions[0][0].prompt_tokens, sessions[0][0].output_tokens) == (16981, 154)


def test_an_equal_block_is_an_equal_prefix_of_the_same_model(sessions):
    before = {}
    for session in sessions[:40]:
        for request in session:
            previous = None
            for block in request.blocks:
                assert before.setdefault(block, (previous, request.model)) == (previous, request.model)
                previous = block


def test_sessions_share_tools_and_system_prompt_and_nothing_else(sessions):
    holders, shared = defaultdict(set), set()
    for session in sessions:
        for request in session:
            shared.update(request.blocks[: request.shared_blocks])
            for block in request.blocks:
                holders[block].add(request.session)
    of_several = {block for block, sessions_of in holders.items() if len(sessions_of) > 1}
    assert of_several
    assert of_several <= shared
    # Whole blocks of some 15,000 tokens.
    assert all(request.shared_blocks * SESSION_BLOCK_TOKENS < 25_000 for session in sessions for request in session)


def test_an_overlay_is_the_seed_s_own_and_starts_about_as_often_as_asked(sessions):
    requests = overlay(sessions, 1, mean_gap_s=60.0)
    assert len(requests) == 6588
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(requests))
    assert requests == overlay(sessions, 1, mean_gap_s=60.0)
    other = overlay(sessions, 2, mean_gap_s=60.0)
    assert [request.number for request in requests] != [request.number for request in other]
    starts = {}
    for request in requests:
        starts.setdefault(request.session, request.at_s)
    assert max(starts.values()) / 95 == pytest.approx(60.0, rel=0.4)


def test_an_overlay_keeps_the_times_within_a_session(sessions):
    few = sessions[:5]
    placed = defaultdict(list)
    for request in overlay(few, 3, mean_gap_s=1.0):
        placed[request.session].append(request)
    for session in few:
        there = sorted(placed[session[0].session], key=lambda request: request.number)
        here = sorted(session, key=lambda request: request.number)
        shift = there[0].at_s - here[0].at_s
        assert [r.at_s - shift for r in there] == pytest.approx([r.at_s for r in here])
    with pytest.raises(ValueError, match="positive"):
        overlay(few, 1, mean_gap_s=0.0)
