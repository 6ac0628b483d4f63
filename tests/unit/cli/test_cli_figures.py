import io
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quartet_bus.messages import Phase, RequestEvent, Role, StreamId, TransferReason, TransferReport
from quartet_cli.demo.capacity import Pool, PoolCapacity
from quartet_cli.demo.figures import PassFigures, PassRecord, Spread, Targets, figures_of, spread
from quartet_cli.demo.outcome import Outcome
from quartet_cli.demo.screen import show
from quartet_cli.demo.verdict import problems
from quartet_cli.demo.witness import RouterStatus
from quartet_core.catalogue import builtin

CATALOGUE = builtin()
MODEL, CLASS = "llama-8b", "H100_SXM5"
POOL = Pool(MODEL, CLASS)


def ended(id: str, role: Role = Role.BOTH, **fields: object) -> RequestEvent:
    event = RequestEvent(
        phase=Phase.END, stream=StreamId(id), tenant="t", model=MODEL, hardware=CLASS, role=role, status="ok",
        prompt_tokens=100, output_tokens=11,
    )  # fmt: skip
    return msgspec.structs.replace(event, **fields)


def answered(id: str, first_ms: float = 50.0, last_ms: float = 150.0, fault: str = "") -> Outcome:
    return Outcome(id, MODEL, 100, 11, 0.0, first_ms, last_ms, 11, True, fault)


def figures(
    outcomes: list[Outcome], ends: list[RequestEvent], moved: int = 0, busy_ms: float = 4_000.0, **router: int
) -> PassFigures:
    capacity = PoolCapacity(
        CATALOGUE.profile(CLASS, "llama-3.1-8b", "fp8", 1), max_batch=256, kv_tokens=487_000, tpot_ms=100.0
    )
    capacity.workers = capacity.gpus = 4
    report = TransferReport("t", StreamId("x"), TransferReason.SPLIT, "committed", "a", "b", wire_bytes=6400,
                            kv_bytes=13_000_000)  # fmt: skip
    counts = {"dispatched": len(ends), "splits": 1, "affinity_hits": 2, "holds": 3, "retries": 0} | router
    record = PassRecord(
        policy="finish-time",
        seconds=10.0,
        grace_s=120.0,
        took_s=12.0,
        outcomes=outcomes,
        ends=ends,
        answers={end.stream.id: end for end in ends if end.role is not Role.PREFILL},
        moved=[report] * moved,
        failed_moves=[],
        routers=[RouterStatus(workers=1, up=1, coordinator="c", decide_p50_us=20.0, decide_p99_us=60.0, **counts)],
        busy_arriving_ms={POOL: busy_ms},
        busy_ms={POOL: busy_ms + 1_000.0},
    )
    return figures_of(record, {POOL: capacity}, CATALOGUE.hardware, {MODEL: Targets(2000.0, 100.0)}, 16)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values):
    for percent, value in zip((50, 90, 99), msgspec.structs.astuple(spread(values)), strict=True):
        assert sum(v <= value for v in values) * 100 >= percent * len(values)
        assert sum(v < value for v in values) * 100 < percent * len(values)


def test_no_values_have_a_spread_of_zeros():
    assert spread([]) == Spread(0.0, 0.0, 0.0)


def test_right_faulty_and_unfinished_requests_are_told_apart():
    got = figures(
        [
            answered("a"),
            answered("b", first_ms=2500.0, last_ms=2600.0),
            answered("c", fault="429: all busy"),
            Outcome("d", MODEL, 100, 11, answered=False, fault="not finished in time"),
        ],
        [ended("a"), ended("b")],
    )
    assert (got.sent, got.right, got.faulty, got.unfinished, got.within_slo) == (4, 2, 1, 1, 1)
    assert got.faults == ("c: 429: all busy",)
    assert got.output_tokens == 22
    assert got.models[0].goodput_per_s == pytest.approx(0.1)


def test_a_request_that_never_ended_is_slower_than_all_others():
    got = figures([answered("a"), Outcome("d", MODEL, 100, 11, answered=False, fault="late")], [ended("a")])
    everything, of_class = got.latencies
    assert (everything.hardware, everything.requests, of_class.hardware, of_class.requests) == ("", 2, CLASS, 1)
    assert everything.e2e_ms.p50 == 150.0
    assert everything.e2e_ms.p90 == math.inf
    assert of_class.e2e_ms.p99 == 150.0


def test_a_pools_cost_is_all_its_time_while_requests_came_and_its_work_after():
    got = figures([answered("a")], [ended("a")])
    # 4 cards for 10 s, and another second of one: at $3.50 an hour, for 111 tokens.
    usd = 41.0 * 3.5 / 3600
    assert got.models[0].usd_per_million_tokens == pytest.approx(usd / 111 * 1e6)
    assert got.models[0].usd_per_million_output_tokens == pytest.approx(usd / 11 * 1e6)
    pool, of_class = got.pools
    assert pool.busy == pytest.approx(0.1)
    assert (of_class.model, of_class.used, of_class.gpus) == ("", pool.used, 4)


def test_tokens_of_a_wrong_answer_pay_for_nothing():
    got = figures([answered("a"), answered("b", fault="the text is not this prompt's")], [ended("a"), ended("b")])
    assert (
        got.models[0].usd_per_million_tokens == figures([answered("a")], [ended("a")]).models[0].usd_per_million_tokens
    )


def test_both_halves_of_a_split_are_work_and_its_blocks_are_counted():
    whole = figures([answered("a")], [ended("a")])
    split = figures(
        [answered("a")],
        [ended("a", Role.PREFILL, output_tokens=0), ended("a", Role.DECODE, verified_blocks=7)],
        moved=1,
    )
    assert split.pools[0].used == pytest.approx(whole.pools[0].used)
    assert (split.kv.transfers, split.kv.real_bytes, split.kv.charged_bytes) == (1, 6400, 13_000_000)
    assert split.kv.verified_blocks == 7
    assert split.kv.unverified == ()


def test_a_pass_in_which_all_went_well_has_no_problems():
    assert problems(figures([answered("a")], [ended("a")])) == []


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (lambda: figures([], []), "no request was sent"),
        (lambda: figures([answered("a", fault="429: busy")], []), "1 of 1 requests were not answered right"),
        (lambda: figures([Outcome("a", MODEL, 1, 1, answered=False, fault="late")], []), "(1 of them unfinished)"),
        (lambda: figures([answered("a")], [ended("a", Role.DECODE, verified_blocks=6)]), "without all KV blocks"),
        (lambda: figures([answered("a")], [ended("a")], splits=0), "there was no split"),
        (lambda: figures([answered("a")], [ended("a")], holds=0), "there was no hold"),
        (lambda: figures([answered("a")], [ended("a")], affinity_hits=0), "there was no affinity hit"),
    ],
)
def test_every_way_to_fail_is_named(got, problem):
    assert any(problem in said for said in problems(got()))


def test_the_screen_shows_both_passes_and_calls_the_unfinished_missed():
    ours = figures([answered("a")], [ended("a")], moved=2)
    other = msgspec.structs.replace(
        figures([Outcome("a", MODEL, 100, 11, answered=False, fault="late")], []), policy="round-robin", grace_s=15.0
    )
    out = io.StringIO()
    show(Console(file=out, width=160), ours, other)
    text = out.getvalue()
    assert "missed" in text
    assert "20 / 60" in text
    assert "12.8 kB / 26 MB" in text
    assert text.count("round-robin") >= 3
    assert "A pass ends at most 120 s (finish-time) and 15 s (round-robin) after its last arrival" in text


def test_figures_are_json_in_which_missed_is_null():
    other = figures([Outcome("a", MODEL, 100, 11, answered=False, fault="late")], [])
    decoded = msgspec.json.decode(msgspec.json.encode(other))
    assert decoded["latencies"][0]["e2e_ms"] == {"p50": None, "p90": None, "p99": None}
