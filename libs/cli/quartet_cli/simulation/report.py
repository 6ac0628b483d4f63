"""A comparison as one HTML page that needs nothing else: tables, and plots as inline SVG. No script, no font, no
link."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from quartet_sim.simulation.compare import spread
from quartet_sim.simulation.figures import Outcome

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
body { color: #1b1f24; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
p.note { color: #57606a; } code { background: #f2f4f6; padding: .1rem .3rem; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e8ea; background: #14171a; } td, th { border-color: #333; }
  code { background: #262a2e; } p.note { color: #9aa4ae; }
}
"""

_COLOURS = ("#2f6fde", "#d9822b", "#3a9d5d", "#b5487c", "#7a64c9", "#8a8f98", "#2aa1b3", "#b08d2f")
_WIDTH, _BAR, _LABELS = 520, 22, 130

_Group = Mapping[str, Sequence[Outcome]]


def page(groups: _Group, *, command: str, fleet: str, traces: Sequence[str], slos: Sequence[str]) -> str:
    """The page. ``command`` is what makes it again."""
    seeds = [outcome.seed for outcome in next(iter(groups.values()))]
    plots = [
        _bars("Goodput within SLO, requests/s", groups, lambda o: o.goodput_per_s, 2),
        _bars("Within SLO, %", groups, lambda o: 100 * o.within_slo, 1),
        _bars("$ per million output tokens within SLO", groups, lambda o: o.usd_per_million_good, 2),
        _bars("kJ per million output tokens within SLO", groups, lambda o: o.j_per_million_good / 1e3, 0),
        _bars("TTFT p99, ms", groups, lambda o: o.ttft_ms.p99, 0),
        _bars("TPOT p99, ms", groups, lambda o: o.tpot_ms.p99, 1),
        _bars("Prompt tokens found in the cache, %", groups, lambda o: 100 * o.hit_rate, 1),
        _bars("Worst wait for a first token, s", groups, lambda o: o.worst_wait_ms / 1e3, 1),
    ]
    lines = [_lines(policy, outcomes[0]) for policy, outcomes in groups.items()]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Quartet: simulated policies</title><style>{_STYLE}</style></head><body>
<h1>Simulated policies on one fleet</h1>
<p>Fleet <code>{escape(fleet)}</code>; traces {", ".join(f"<code>{escape(trace)}</code>" for trace in traces)}; targets
{", ".join(escape(slo) for slo in slos)}; seeds {", ".join(map(str, seeds))}.
Made by <code>{escape(command)}</code>.</p>
<p class="note">Everything here is simulated, from fitted hardware profiles and public traces: see docs/simulation.md
for what is modelled, how far it is from measured serving, and what is not captured. Bars are means over seeds; the
whiskers reach from the least seed to the most.</p>
{_table(groups)}
<div class="plots">{"".join(plots)}</div>
<h2>Who worked when (seed {seeds[0]})</h2>
<p class="note">Busy share of each hardware class (line), and the part of it that is prefill (area).</p>
<div class="plots">{"".join(lines)}</div>
</body></html>
"""


def _table(groups: _Group) -> str:
    head = (
        "policy", "within SLO %", "goodput /s", "TTFT p50", "p90", "p99 ms", "TPOT p50", "p90", "p99 ms",
        "E2E p50", "p90", "p99 s", "$/M good", "$/M", "hit %", "unserved",
    )  # fmt: skip
    rows = []
    for policy, outcomes in groups.items():

        def mean(figure: Callable[[Outcome], float], outcomes: Sequence[Outcome] = outcomes) -> float:
            return sum(figure(outcome) for outcome in outcomes) / len(outcomes)

        cells = (
            escape(policy), f"{mean(lambda o: 100 * o.within_slo):.1f}", f"{mean(lambda o: o.goodput_per_s):.2f}",
            f"{mean(lambda o: o.ttft_ms.p50):,.0f}", f"{mean(lambda o: o.ttft_ms.p90):,.0f}",
            f"{mean(lambda o: o.ttft_ms.p99):,.0f}", f"{mean(lambda o: o.tpot_ms.p50):.1f}",
            f"{mean(lambda o: o.tpot_ms.p90):.1f}", f"{mean(lambda o: o.tpot_ms.p99):.1f}",
            f"{mean(lambda o: o.e2e_ms.p50 / 1e3):.1f}", f"{mean(lambda o: o.e2e_ms.p90 / 1e3):.1f}",
            f"{mean(lambda o: o.e2e_ms.p99 / 1e3):.1f}", f"{mean(lambda o: o.usd_per_million_good):.2f}",
            f"{mean(lambda o: o.usd_per_million):.2f}", f"{mean(lambda o: 100 * o.hit_rate):.1f}",
            f"{mean(lambda o: o.refused + o.failed + o.unfinished):.0f}",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _bars(title: str, groups: _Group, figure: Callable[[Outcome], float], digits: int) -> str:
    over = {policy: spread([figure(outcome) for outcome in outcomes]) for policy, outcomes in groups.items()}
    top = max((each.most for each in over.values()), default=0.0) or 1.0
    room = _WIDTH - _LABELS - 90
    parts = []
    for place, (policy, each) in enumerate(over.items()):
        y = place * (_BAR + 8)
        width, least, most = (room * value / top for value in (each.mean, each.least, each.most))
        middle = y + _BAR / 2
        colour = _COLOURS[place % len(_COLOURS)]
        parts.append(
            f'<text x="{_LABELS - 8}" y="{middle + 4}" text-anchor="end">{escape(policy)}</text>'
            f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
            f'<path d="M{_LABELS + least:.1f} {middle}H{_LABELS + most:.1f}" stroke="currentColor" stroke-width="1.5"/>'
            f'<text x="{_LABELS + most + 8:.1f}" y="{middle + 4}">{each.mean:,.{digits}f}</text>'
        )
    height = len(over) * (_BAR + 8)
    return (
        f'<figure><h2>{escape(title)}</h2><svg width="{_WIDTH}" height="{height}" role="img"'
        f' aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _lines(policy: str, outcome: Outcome) -> str:
    width, height, left = _WIDTH, 150, 40
    until_s = max((sample.at_s for sample in outcome.series), default=0.0) or 1.0
    parts = []
    for place, hardware in enumerate(sorted({sample.hardware for sample in outcome.series})):
        colour = _COLOURS[place % len(_COLOURS)]
        points = [
            (left + (width - left) * s.at_s / until_s, s.utilisation, s.prefill_share)
            for s in outcome.series
            if s.hardware == hardware
        ]
        if not points:
            continue
        line = " ".join(f"{x:.1f},{height * (1 - min(busy, 1.0)):.1f}" for x, busy, _ in points)
        area = " ".join(f"{x:.1f},{height * (1 - min(busy * share, 1.0)):.1f}" for x, busy, share in points)
        parts.append(
            f'<polygon points="{points[0][0]:.1f},{height} {area} {points[-1][0]:.1f},{height}"'
            f' fill="{colour}" opacity="0.25"/>'
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{left + 6 + 130 * place}" y="{height + 34}" style="fill:{colour}">{escape(hardware)}</text>'
        )
    axis = (
        f'<path d="M{left} 0V{height}H{width}" fill="none" stroke="currentColor" opacity="0.4"/>'
        f'<text x="{left - 6}" y="10" text-anchor="end">100 %</text>'
        f'<text x="{left - 6}" y="{height}" text-anchor="end">0</text>'
        f'<text x="{width}" y="{height + 16}" text-anchor="end">{until_s:,.0f} s</text>'
    )
    return (
        f'<figure><h2>{escape(policy)}</h2><svg width="{width}" height="{height + 40}" role="img"'
        f' aria-label="work over time under {escape(policy)}">{axis}{"".join(parts)}</svg></figure>'
    )
