"""What the studies are made on: fleets, parts of traces, loads.

Every trace is cut in two. On the first half (``TRAIN``) loads were set and rules tried; the second (``TEST``) is what
the tables about policies are from. A load is a rate at which our policy kept about 95 % of the requests within their
targets on ``TRAIN`` (``quartet simulate --knee 95``), rounded.
"""

from collections.abc import Mapping
from typing import Final

from quartet_sim.simulation.spec import FleetSpec, parse_fleet
from quartet_sim.simulation.workload import Part, Workload

TRAIN: Final[Mapping[str, tuple[float, float]]] = {
    "azure-conv": (0.0, 400.0),
    "azure-code": (0.0, 600.0),
    "mooncake": (0.0, 400.0),
}
TEST: Final[Mapping[str, tuple[float, float]]] = {
    "azure-conv": (900.0, 400.0),
    "azure-code": (820.0, 600.0),
    "mooncake": (900.0, 400.0),
}
"""By trace: where the part begins, and how long it is, in seconds of the trace."""

SMALL, LARGE = "llama-3.1-8b", "llama-3.1-70b"

FLEETS: Final[Mapping[tuple[str, str], FleetSpec]] = {
    ("8 H100", SMALL): parse_fleet("8xH100_SXM5:llama-3.1-8b"),
    ("4 H100 + 12 L40S", SMALL): parse_fleet("4xH100_SXM5:llama-3.1-8b,12xL40S_PCIE:llama-3.1-8b"),
    ("2 H100 + 24 L40S", SMALL): parse_fleet("2xH100_SXM5:llama-3.1-8b,24xL40S_PCIE:llama-3.1-8b"),
    ("8 H100", LARGE): parse_fleet("2xH100_SXM5x4:llama-3.1-70b"),
    ("4 H100 + 12 L40S", LARGE): parse_fleet("1xH100_SXM5x4:llama-3.1-70b,3xL40S_PCIEx4:llama-3.1-70b"),
}
"""By fleet and model. Two H100 cannot hold a 70B at TP 4, and six groups of four L40S cannot prefill it within any of
the targets, so the third fleet has no 70B."""

LOADS: Final[Mapping[tuple[str, str, str], float]] = {
    ("8 H100", SMALL, "azure-conv"): 250.0,
    ("8 H100", SMALL, "azure-code"): 150.0,
    ("8 H100", SMALL, "mooncake"): 11.0,
    ("4 H100 + 12 L40S", SMALL, "azure-conv"): 220.0,
    ("4 H100 + 12 L40S", SMALL, "azure-code"): 100.0,
    ("4 H100 + 12 L40S", SMALL, "mooncake"): 8.0,
    ("2 H100 + 24 L40S", SMALL, "azure-conv"): 230.0,
    ("2 H100 + 24 L40S", SMALL, "azure-code"): 90.0,
    ("2 H100 + 24 L40S", SMALL, "mooncake"): 7.0,
    ("8 H100", LARGE, "azure-conv"): 16.0,
    ("4 H100 + 12 L40S", LARGE, "azure-conv"): 8.0,
}
"""Requests a second by fleet, model and trace. The 70B gets one trace."""


def workload(trace: str, model: str, rate_per_s: float, halves: Mapping[str, tuple[float, float]] = TEST) -> Workload:
    """A half of a trace at a rate, both SLO classes mixed, half of the requests each."""
    start_s, length_s = halves[trace]
    part = Part(trace=trace, start_s=start_s, length_s=length_s, rate_per_s=rate_per_s, models=((model, 1.0),))
    return Workload(parts=(part,))
