"""Where this node's cards and NICs stand: which of them share a root complex."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from quartet_agent.telemetry.simulated import NIC
from quartet_bus.config.schema import AgentSection
from quartet_core.readings import GpuReading
from quartet_host import sysfs
from quartet_host.nics import Nic, nics
from quartet_host.pci import devices

SIMULATED_ROOT = "simulated"


class Places(Struct, frozen=True):
    """Root complexes by the index and by the PCI address of cards, and by the name of NICs; "" where unknown."""

    of_gpu: dict[int, str]
    of_address: dict[str, str]
    of_nic: dict[str, str]

    def root_of(self, gpu: GpuReading) -> str:
        """The root complex that a card is below."""
        return self.of_gpu.get(gpu.index) or self.of_address.get(gpu.address, "")


def simulated(section: AgentSection, gpus: Sequence[int]) -> Places:
    """A simulated host's: as configured, else all cards and the one NIC below one root complex."""
    roots = dict.fromkeys(gpus, SIMULATED_ROOT) | {gpu.index: gpu.root for gpu in section.gpus}
    return Places(roots, {}, {NIC: SIMULATED_ROOT} | {nic.name: nic.root for nic in section.nics})


def real(section: AgentSection, root: Path = sysfs.SYS) -> tuple[Places, list[Nic]]:
    """This host's, from ``[agent] gpus`` and ``nics`` where given, else from sysfs; and the NICs that are read."""
    wanted = {nic.name: nic for nic in section.nics}
    read = [nic for nic in nics(root) if (nic.name in wanted if wanted else nic.up)]
    addresses = {address: device.root for address, device in devices(root).items() if device.is_gpu}
    of_nic = {nic.name: nic.device.root for nic in read} | {name: nic.root for name, nic in wanted.items() if nic.root}
    return Places({gpu.index: gpu.root for gpu in section.gpus if gpu.root}, addresses, of_nic), read
