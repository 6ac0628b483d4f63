"""Which readings an agent has: its cards' own where an engine is real, simulated ones where all are, or none."""

from collections.abc import Callable, Mapping, Sequence

from quartet_agent.telemetry import places
from quartet_agent.telemetry.places import Places
from quartet_agent.telemetry.port import ReadingsPort
from quartet_agent.telemetry.reader import ThreadReadings
from quartet_agent.telemetry.simulated import SimulatedReadings
from quartet_agent.worker import HostedWorker
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import AgentSection, Config, TelemetrySection
from quartet_core.links import LINK_CLASSES
from quartet_host.nvml import NvmlMissing, binding
from quartet_host.probe import HostProbe

RealReadings = Callable[[Config], tuple[Places, ReadingsPort]]
"""Makes the readings of this host: an edge, for it has a thread."""


def source_of(telemetry: TelemetrySection, agent: AgentSection) -> str:
    """ "nvml", "simulated" or "none": what ``[telemetry] source`` means on this host."""
    if telemetry.source != "auto":
        return telemetry.source
    kinds: set[str] = {engine.kind for engine in agent.engines}
    if not kinds:
        return "none"
    return "simulated" if kinds == {"simulated"} else "nvml"


def check(telemetry: TelemetrySection) -> None:
    """Raise ``ConfigError`` for limits that contradict each other."""
    if telemetry.pcie_low >= telemetry.pcie_high:
        raise ConfigError(
            WHERE, "telemetry.pcie_low", telemetry.pcie_low, f"must be below pcie_high, {telemetry.pcie_high}"
        )


def real_readings(config: Config) -> tuple[Places, ReadingsPort]:
    """NVML and this host's NICs, read in a thread.

    Raises ``ConfigError`` when NVML is asked for by name and its binding is missing; with source "auto" the telemetry
    is degraded instead, and says so.
    """
    telemetry = config.telemetry
    if telemetry.source == "nvml":
        try:
            binding()
        except NvmlMissing as missing:
            raise ConfigError(WHERE, "telemetry.source", telemetry.source, f"cannot be: {missing}") from None
    where, nics = places.real(config.agent)
    return where, ThreadReadings(HostProbe(nics), telemetry.read_timeout_ms / 1e3)


def simulated_readings(
    config: Config,
    workers: Sequence[HostedWorker],
    now_s: Callable[[], float],
    sent_bytes: Mapping[str, int],
    received_tokens: Mapping[str, int],
) -> tuple[Places, ReadingsPort]:
    """Cards and one NIC that are not there; the NIC is as fast as the node's best fabric."""
    gb_per_s = [
        config.kv.links[kind].gb_per_s if kind in config.kv.links else LINK_CLASSES[kind].gb_per_s
        for kind in config.agent.fabrics
    ]
    gpus = [gpu for worker in workers for gpu in worker.facts.gpus]
    port = SimulatedReadings(workers, now_s, 8 * max(gb_per_s, default=0.0), sent_bytes, received_tokens)
    return places.simulated(config.agent, gpus), port
