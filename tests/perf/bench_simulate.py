"""How quick the simulator is: 30 minutes of Mooncake's trace on 64 workers. ``run()``: ``make bench ONLY=simulate``.

Each run is a process of its own on one core, from reading the trace to the outcome, so that ``rss_mb`` is its peak and
``wall_s`` counts everything but Python's start. ``cpu_s`` is what the process used, which a busy machine does not
change.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

RUNS = 3
WORKERS = 64
SPEEDS = (1.0, 8.0)
POLICY = "finish-time"

_CODE = """
import json, resource, sys, time
began_s = time.monotonic()
from quartet_sim.simulation.compare import Case, run
from quartet_sim.simulation.spec import parse_fleet
from quartet_sim.simulation.workload import Part, Workload
case = Case(
    name="bench",
    fleet=parse_fleet("16xH100_SXM5:llama-3.1-8b/fp8,48xL40S_PCIE:llama-3.1-8b/fp8"),
    workload=Workload(parts=(Part(trace="mooncake", length_s=1800.0, speed=float(sys.argv[1])),)),
    policy=sys.argv[2],
)
outcome = run(case)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "wall_s": time.monotonic() - began_s, "cpu_s": used.ru_utime + used.ru_stime, "rss_mb": used.ru_maxrss / 1024,
    "requests": outcome.requests, "events": outcome.events, "decisions": outcome.decisions,
    "simulated_s": outcome.span_s, "log_hash": outcome.log_hash,
}))
"""


def _once(speed: float) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _CODE, str(speed), POLICY], check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def run() -> Iterator[dict[str, Any]]:
    """One line for each speed; raises if two runs of the same were not the same."""
    for speed in SPEEDS:
        found = [_once(speed) for _ in range(RUNS)]
        if len({each["log_hash"] for each in found}) != 1:
            raise AssertionError(f"at speed {speed}: the same run went otherwise")
        walls = [each["wall_s"] for each in found]
        yield {
            "bench": "simulate",
            "config": {
                "trace": "mooncake", "speed": speed, "workers": WORKERS, "policy": POLICY,
                "requests": found[0]["requests"], "simulated_s": round(found[0]["simulated_s"], 1),
            },
            "wall_s": round(statistics.median(walls), 2),
            "cpu_s": round(statistics.median(each["cpu_s"] for each in found), 2),
            "rss_mb": round(max(each["rss_mb"] for each in found), 1),
            "events": found[0]["events"],
            "decisions": found[0]["decisions"],
            "runs": RUNS,
            "spread": round(max(walls) - min(walls), 2),
        }  # fmt: skip
