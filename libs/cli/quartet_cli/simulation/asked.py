"""What a command line asks of the simulator: fleets by name or written out, traces, targets and settings."""

from dataclasses import dataclass
from typing import Any

import msgspec

from quartet_cli.errors import CommandFailed
from quartet_sim.simulation.policies import POLICIES
from quartet_sim.simulation.spec import (
    INTERACTIVE,
    RELAXED,
    Autoscale,
    Failure,
    FleetSpec,
    Settings,
    Slo,
    parse_fleet,
)
from quartet_sim.simulation.workload import Part, Workload

FLEETS = {
    "h100": "8xH100_SXM5:llama-3.1-8b/fp8",
    "mixed": "4xH100_SXM5:llama-3.1-8b/fp8,12xL40S_PCIE:llama-3.1-8b/fp8",
    "l40s": "2xH100_SXM5:llama-3.1-8b/fp8,24xL40S_PCIE:llama-3.1-8b/fp8",
    "h100-70b": "2xH100_SXM5x4:llama-3.1-70b/fp8",
    "mixed-70b": "1xH100_SXM5x4:llama-3.1-70b/fp8,3xL40S_PCIEx4:llama-3.1-70b/fp8",
}
"""Fleets by name: what each stands for is shown with ``--help``."""

SLOS = {"interactive": INTERACTIVE, "relaxed": RELAXED}

_PART_KEYS = {
    "start": ("start_s", float),
    "length": ("length_s", float),
    "rate": ("rate_per_s", float),
    "speed": ("speed", float),
    "most": ("most_tokens", int),
    "after": ("after_s", float),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A comparison: ``policies`` on one workload and fleet, once for each seed."""

    fleet: FleetSpec
    fleet_text: str
    workload: Workload
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings


def fleet(text: str) -> FleetSpec:
    """A fleet by name, or as ``parse_fleet`` reads it. Raises ``WrongFleet``."""
    return parse_fleet(FLEETS.get(text, text))


def part(text: str, models: tuple[str, ...]) -> Part:
    """``TRACE[,KEY=VALUE]...``; ``model=NAME`` (``model=A*3+B`` for weights) chooses who is asked, else the first of
    ``models``. Raises ``CommandFailed``."""
    trace, *pairs = text.split(",")
    given: dict[str, Any] = {"models": ((models[0], 1.0),)}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            if key == "model" and equals:
                given["models"] = tuple(_weighted(each) for each in value.split("+"))
            else:
                name, kind = _PART_KEYS[key]
                given[name] = kind(value)
        except (KeyError, ValueError):
            allowed = ", ".join((*(f"{name}=NUMBER" for name in _PART_KEYS), "model=NAME[*WEIGHT][+NAME...]"))
            raise CommandFailed(f"--trace {text}: cannot read {pair!r}; allowed: {allowed}", 2) from None
    for name, _ in given["models"]:
        if name not in models:
            raise CommandFailed(f"--trace {text}: the fleet does not serve {name!r}; it serves {', '.join(models)}", 2)
    return Part(trace=trace, **given)


def slo(text: str) -> Slo:
    """A class of service by name, or ``NAME:TTFT_MS:TPOT_MS[:SHARE]``. Raises ``CommandFailed``."""
    if text in SLOS:
        return SLOS[text]
    try:
        name, ttft, tpot, *share = text.split(":")
        made = Slo(name, float(ttft), float(tpot), float(share[0]) if share else 1.0)
        if not (name and made.ttft_ms > 0 and made.tpot_ms > 0 and made.share > 0 and len(share) < 2):
            raise ValueError(text)
    except ValueError:
        raise CommandFailed(
            f"--slo {text}: is {' or '.join(SLOS)}, or NAME:TTFT_MS:TPOT_MS[:SHARE] with numbers above 0", 2
        ) from None
    return made


def policies(text: str) -> tuple[str, ...]:
    """Names of policies with commas between, or ``all``. Raises ``CommandFailed``."""
    names = tuple(POLICIES) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise CommandFailed(f"--policy {name}: no such policy; there are: {', '.join(POLICIES)}", 2)
    return names


def settings(pairs: list[str], failures: list[str], autoscale: float | None) -> Settings:
    """Settings by ``KEY=VALUE``. Raises ``CommandFailed``, naming what is allowed."""
    given: dict[str, Any] = {}
    allowed = [f.name for f in msgspec.structs.fields(Settings) if f.name not in ("failures", "autoscale")]
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in allowed or not equals:
            raise CommandFailed(f"--set {pair}: is KEY=VALUE, with a key of {', '.join(allowed)}", 2)
        given[key] = {"true": True, "false": False}.get(value, value)
    try:
        made = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise CommandFailed(f"--set: {error}", 2) from None
    return msgspec.structs.replace(
        made,
        failures=tuple(_failure(each) for each in failures),
        autoscale=Autoscale(requests_per_worker=autoscale) if autoscale else None,
    )


def _failure(text: str) -> Failure:
    try:
        worker, _, times = text.partition("@")
        at_s, _, for_s = times.partition("+")
        made = Failure(worker=int(worker), at_ms=float(at_s) * 1e3, for_ms=float(for_s) * 1e3)
        if made.worker < 0 or made.at_ms < 0 or made.for_ms <= 0:
            raise ValueError(text)
    except ValueError:
        raise CommandFailed(f"--fail {text}: is WORKER@AT_S+FOR_S, e.g. 3@120+60", 2) from None
    return made


def _weighted(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("*")
    return name, float(weight or 1.0)
