"""The final screen: every figure of our pass, beside round-robin's."""

import math
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.table import Table

from quartet_cli.console import table
from quartet_cli.demo.figures import Latency, PassFigures
from quartet_cli.demo.workload import TRACES

Row = tuple[str, Callable[[PassFigures], str]]


def show(console: Console, ours: PassFigures, other: PassFigures) -> None:
    """Print the screen."""
    console.print()
    for made in (_requests(ours, other), _latencies(ours, other), _pools(ours, other)):
        console.print(made)
    console.print(_cut_off(ours, other), soft_wrap=True)


def _requests(ours: PassFigures, other: PassFigures) -> Table:
    traces = "\n".join(f"{trace.model}: {trace.name}, x{trace.speed_up:g}" for trace in TRACES)
    made = table(f"{ours.seconds:g} s of real traces", ("",), (ours.policy, other.policy), caption=traces)
    rows: list[Row] = [
        ("requests: sent", lambda f: str(f.sent)),
        ("  answered right", lambda f: str(f.right)),
        ("  errors and wrong answers", lambda f: str(f.faulty)),
        ("  not finished in time", lambda f: str(f.unfinished)),
        ("within SLO (goodput)", lambda f: f"{f.within_slo / max(f.sent, 1):.1%}"),
    ]
    for number, model in enumerate(ours.models):
        rows.append((f"  {model.model}", lambda f, n=number: _goodput(f, n)))  # type: ignore[misc]
    rows += [
        ("output tokens in right answers", lambda f: f"{f.output_tokens:,}"),
        ("decision p50 / p99, us", lambda f: f"{f.routing.decide_p50_us:.0f} / {f.routing.decide_p99_us:.0f}"),
        ("splits (prefill here, decode there)", lambda f: str(f.routing.splits)),
        ("holds", lambda f: str(f.routing.holds)),
        ("affinity hits", lambda f: str(f.routing.affinity_hits)),
        ("prompt tokens found cached", lambda f: f"{f.routing.cached_tokens:,}"),
        ("dispatched again", lambda f: str(f.routing.retries)),
        ("KV moved: transfers, failed", lambda f: f"{f.kv.transfers}, {f.kv.failed}"),
        ("  real / charged", lambda f: f"{_bytes(f.kv.real_bytes)} / {_bytes(f.kv.charged_bytes)}"),
        ("  blocks verified at decode", lambda f: f"{f.kv.verified_blocks:,}"),
    ]
    for number, model in enumerate(ours.models):
        rows.append((f"$ per million tokens, {model.model}", lambda f, n=number: _cost(f, n)))  # type: ignore[misc]
    for name, figure in rows:
        made.add_row(name, figure(ours), figure(other))
    return made


def _cut_off(ours: PassFigures, other: PassFigures) -> str:
    """What the two passes do not have in common, without which the columns would be read as if they had."""
    ends = " and ".join(f"{f.grace_s:g} s ({f.policy})" for f in (ours, other))
    return f"A pass ends at most {ends} after its last arrival; what is not finished then counts as missed."


def _latencies(ours: PassFigures, other: PassFigures) -> Table:
    numbers = tuple(
        f"{name}\n{unit} p{rank}"
        for name, unit in (("TTFT", "ms"), ("TPOT", "ms"), ("E2E", "s"))
        for rank in (50, 90, 99)
    )
    made = table("Latency", ("model", "answered on", "policy"), ("requests", *numbers))
    rows = {(row.model, row.hardware, f.policy): row for f in (ours, other) for row in f.latencies}
    for model, hardware in sorted({key[:2] for key in rows}):
        for policy in (ours.policy, other.policy):
            row = rows.get((model, hardware, policy))
            cells = ["0"] if row is None else [str(row.requests), *_latency(row)]
            made.add_row(model, hardware or "any, or none", policy, *cells)
    return made


def _latency(row: Latency) -> Iterable[str]:
    for spread, scale, digits in ((row.ttft_ms, 1, 0), (row.tpot_ms, 1, 0), (row.e2e_ms, 1000, 1)):
        for value_ms in (spread.p50, spread.p90, spread.p99):
            yield "missed" if math.isinf(value_ms) else f"{value_ms / scale:,.{digits}f}"


def _pools(ours: PassFigures, other: PassFigures) -> Table:
    passes = (ours, other)
    made = table(
        "Pools while requests came",
        ("model", "class"),
        ("GPUs", *(f"{name}\n{f.policy}" for name in ("used", "busy", "$ per M tokens") for f in passes)),
    )
    for pair in zip(ours.pools, other.pools, strict=True):
        row = pair[0]
        cells = [f"{pool.used:.0%}" for pool in pair] + [f"{pool.busy:.0%}" for pool in pair]
        made.add_row(
            row.model or "all", row.hardware, str(row.gpus), *cells, *(_usd(p.usd_per_million_tokens) for p in pair)
        )
    return made


def _goodput(figures: PassFigures, number: int) -> str:
    model = figures.models[number]
    return f"{model.within_slo / max(model.sent, 1):.1%} ({model.goodput_per_s:.2f}/s)"


def _cost(figures: PassFigures, number: int) -> str:
    model = figures.models[number]
    return f"{_usd(model.usd_per_million_tokens)} ({_usd(model.usd_per_million_output_tokens)} output)"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
