"""The hardware of one host, whole: cards, NICs, NUMA nodes, and which of them share a root complex."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from quartet_core.catalogue import Catalogue
from quartet_host import sysfs
from quartet_host.nics import Nic, nics
from quartet_host.nvml import Nvml, NvmlCard
from quartet_host.pci import Distance, PciDevice, PcieLink, devices, distance


class Gpu(Struct, frozen=True, kw_only=True):
    """One card. ``hardware`` is its class in the catalogue, "" when no class names its PCI id; ``nvml`` says whether
    its driver told of it, or the PCI tree alone did. ``name`` is the driver's, else the PCI id."""

    index: int
    device: PciDevice
    name: str
    hardware: str = ""
    nvml: bool = False
    uuid: str = ""
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    link: PcieLink = PcieLink()
    nvlinks: int = 0
    nvlink_version: int | None = None


class NumaNode(Struct, frozen=True):
    """One NUMA node: its number, and its processors as the kernel lists them (``0-31,64-95``)."""

    number: int
    cpus: str


class Host(Struct, frozen=True, kw_only=True):
    """All of it. ``remarks`` say what could not be found out, and what an operator should look at."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    nvswitches: int = 0
    driver_version: str = ""
    remarks: tuple[str, ...] = ()

    def neighbours(self, gpu: Gpu) -> list[Nic]:
        """NICs that share the card's root complex, nearest first."""
        near = [(distance(gpu.device, nic.device), nic.name, nic) for nic in self.nics]
        return [nic for far, _, nic in sorted(near, key=lambda entry: entry[:2]) if far <= Distance.ROOT]


def look(catalogue: Catalogue, nvml: Nvml | None, root: Path = sysfs.SYS) -> Host:
    """What the host whose sysfs is at ``root`` has; without ``nvml`` cards are known by their PCI ids alone."""
    tree = devices(root)
    cards = nvml.cards() if nvml is not None else []
    gpus = _gpus(catalogue, tree, cards)
    found = Host(
        gpus=gpus,
        nics=tuple(nics(root)),
        numa=_numa(root),
        nvswitches=sum(device.is_nvswitch for device in tree.values()),
        driver_version=nvml.driver_version if nvml is not None else "",
    )
    trouble = nvml.take_trouble() if nvml is not None else ""
    remarks = [f"NVML: {trouble}"] if trouble else []
    return Host(**{name: getattr(found, name) for name in found.__struct_fields__} | {
        "remarks": (*remarks, *_remarks(found))
    })  # fmt: skip


def _gpus(catalogue: Catalogue, tree: Mapping[str, PciDevice], cards: Sequence[NvmlCard]) -> tuple[Gpu, ...]:
    classes = {id_: name for name, hardware in catalogue.hardware.items() for id_ in hardware.pci_devices}
    if cards:
        return tuple(_told(card, tree, classes) for card in cards)
    seen = [device for device in tree.values() if device.is_gpu]
    return tuple(
        Gpu(index=index, device=device, name=device.id, hardware=classes.get(device.id, ""), link=device.link)
        for index, device in enumerate(seen)
    )


def _told(card: NvmlCard, tree: Mapping[str, PciDevice], classes: Mapping[str, str]) -> Gpu:
    """A card that NVML told of; its place comes from the PCI tree, which a container may not see."""
    device = tree.get(card.address) or PciDevice(address=card.address, id=card.id, kind=0x030200, root="")
    return Gpu(
        index=card.index,
        device=device,
        name=card.name or card.id,
        hardware=classes.get(card.id, ""),
        nvml=True,
        uuid=card.uuid,
        memory_bytes=card.memory_bytes,
        power_limit_w=card.power_limit_w,
        link=card.link,
        nvlinks=card.nvlinks,
        nvlink_version=card.nvlink_version,
    )


def _numa(root: Path) -> tuple[NumaNode, ...]:
    folder = root / "devices" / "system" / "node"
    numbers = sorted(int(name[4:]) for name in sysfs.names(folder) if name.startswith("node") and name[4:].isdigit())
    return tuple(NumaNode(number, sysfs.text(folder / f"node{number}" / "cpulist")) for number in numbers)


def _remarks(host: Host) -> list[str]:
    remarks = []
    for gpu in host.gpus:
        what = f"GPU {gpu.index} ({gpu.device.address})"
        if gpu.link.narrowed:
            remarks.append(f"{what} runs on {gpu.link.width} of {gpu.link.max_width} PCIe lanes: reseat or replace it")
        if not gpu.hardware:
            remarks.append(f"{what}: no hardware class has PCI id {gpu.device.id}; add it to [hardware.*] pci_devices")
        if not gpu.device.root:
            remarks.append(f"{what} is not in sysfs, so its neighbours are not known (a container without /sys?)")
    for nic in host.nics:
        if nic.device.link.narrowed:
            link = nic.device.link
            remarks.append(f"NIC {nic.name} runs on {link.width} of {link.max_width} PCIe lanes")
    if not host.gpus:
        remarks.append("no NVIDIA GPU on this host")
    return remarks
