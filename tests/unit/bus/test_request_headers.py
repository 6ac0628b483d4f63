"""Headers say what a sender wishes; they are clamped, refused, or believed of the gateway alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.headers import MAX_DEADLINE_MS, MAX_TARGET_MS, RequestHeaders, parse_headers
from quartet_core.ladder import Sketch, rungs_within
from quartet_core.openai import Refused

SKETCH = Sketch(tuple(range(rungs_within(640))), 640)


def test_what_is_said_is_read_back() -> None:
    said = RequestHeaders("req-1", 2, 150.5, 20.0, 30_000, "s", True, 3, SKETCH, 4000)
    assert parse_headers(said.encode(), trusted=True) == said


def test_nothing_said_is_all_defaults() -> None:
    assert parse_headers(None, trusted=True) == parse_headers({}, trusted=False) == RequestHeaders()
    assert RequestHeaders().encode() == {}


def test_the_gateways_headers_count_on_the_gateways_subject_alone() -> None:
    said = RequestHeaders("r", priority=5, sketch=SKETCH, prompt_tokens=99).encode()
    assert parse_headers(said, trusted=False) == RequestHeaders("r")
    parse_headers({"Quartet-Sketch": "garbage", "Quartet-Priority": "x"}, trusted=False)


def test_names_are_read_in_any_case() -> None:
    assert parse_headers({"QUARTET-TTFT-MS": "7", "quartet-no-hold": "1"}, trusted=False) == RequestHeaders(
        ttft_ms=7.0, no_hold=True
    )


@pytest.mark.parametrize("huge", ["9" * 64, "1" + "0" * 40, "99999999999999999999.5"])
def test_a_huge_target_is_clamped_so_that_it_overflows_nothing(huge: str) -> None:
    headers = parse_headers({"Quartet-Ttft-Ms": huge, "Quartet-Tpot-Ms": huge}, trusted=False)
    assert headers.ttft_ms == headers.tpot_ms == MAX_TARGET_MS
    assert parse_headers({"Quartet-Deadline-Ms": huge.split(".")[0]}, trusted=False).deadline_ms == MAX_DEADLINE_MS


def test_zero_is_clamped_to_the_least_that_can_be_meant() -> None:
    headers = parse_headers({"Quartet-Ttft-Ms": "0", "Quartet-Deadline-Ms": "0"}, trusted=False)
    assert (headers.ttft_ms, headers.deadline_ms) == (1.0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Quartet-Ttft-Ms", "-1"),
        ("Quartet-Ttft-Ms", "nan"),
        ("Quartet-Tpot-Ms", "inf"),
        ("Quartet-Tpot-Ms", "1e9"),
        ("Quartet-Ttft-Ms", ""),
        ("Quartet-Deadline-Ms", "soon"),
        ("Quartet-Deadline-Ms", "1.5"),
        ("Quartet-Deadline-Ms", "٣"),
        ("Quartet-Attempt", "-2"),
        ("Quartet-No-Hold", "yes"),
        ("Quartet-Request-Id", "a b"),
        ("Quartet-Request-Id", "x" * 129),
        ("Quartet-Session", "x" * 257),
        ("Quartet-Priority", "high"),
        ("Quartet-Sketch", "!!!"),
        ("Quartet-Prompt-Tokens", "many"),
    ],
)
def test_what_cannot_be_meant_is_refused_naming_the_header(name: str, value: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_headers({name: value}, trusted=True)
    assert (caught.value.status, caught.value.body.param) == (400, name)


@given(
    st.dictionaries(
        st.sampled_from(list(RequestHeaders("r", 2, 1.0, 1.0, 1, "s", True, 1, SKETCH, 1).encode())),
        st.text(max_size=80),
    ),
    st.booleans(),
)
def test_whatever_headers_say_the_result_is_within_bounds_or_a_400(headers: dict[str, str], trusted: bool) -> None:
    said = RequestHeaders()
    status = 400
    try:
        said = parse_headers(headers, trusted)
    except Refused as refused:
        status = refused.status
    assert status == 400
    assert 0 <= said.ttft_ms <= MAX_TARGET_MS
    assert 0 <= said.deadline_ms <= MAX_DEADLINE_MS
    assert 1 <= said.attempt <= 1000
    assert abs(said.priority) <= 100
