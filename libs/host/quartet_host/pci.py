"""The PCI tree of a host: devices, the bridges above each of them, and how far apart two of them are.

A device's real path in sysfs is its way up: ``pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0`` is a device below a
switch, below a root port of the host bridge ``pci0000:15``. Devices below one host bridge share that root complex's
way to memory.
"""

import re
from enum import IntEnum
from pathlib import Path

from msgspec import Struct

from quartet_host import sysfs

_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "32": 5, "64.0": 6}
"""GT/s as the kernel prints them, and the generation that has them."""


class Distance(IntEnum):
    """What a packet between two devices must pass; nearer is smaller. ``nvidia-smi topo``'s words in brackets."""

    SWITCH = 0
    """Only PCIe switches (PIX, PXB)."""
    ROOT = 1
    """The host bridge that both are below (PHB)."""
    NUMA = 2
    """The fabric within a NUMA node (NODE)."""
    SYSTEM = 3
    """The fabric between NUMA nodes (SYS)."""


class PcieLink(Struct, frozen=True):
    """A device's link: what it runs at, and what device and slot could do. None where the host does not say."""

    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None

    @property
    def narrowed(self) -> bool:
        """Whether it has fewer lanes than it could: unlike a low generation, idling does not explain that."""
        return self.width is not None and self.max_width is not None and self.width < self.max_width


class PciDevice(Struct, frozen=True, kw_only=True):
    """One device. ``id`` is ``vendor:device`` in hex, ``kind`` the class code, ``bridges`` those above it, root port
    first; ``root`` names its host bridge. ``numa`` is None where the firmware does not say."""

    address: str
    id: str
    kind: int
    root: str
    bridges: tuple[str, ...] = ()
    numa: int | None = None
    link: PcieLink = PcieLink()
    driver: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a display or 3D controller of NVIDIA's: others' are a server's console."""
        return self.kind >> 16 == 0x03 and self.id.startswith("10de:")

    @property
    def is_nvswitch(self) -> bool:
        """Whether it is an NVSwitch: a bridge of class "other", made by NVIDIA."""
        return self.kind >> 8 == 0x0680 and self.id.startswith("10de:")


def devices(root: Path = sysfs.SYS) -> dict[str, PciDevice]:
    """All PCI devices below ``root`` (``/sys``), by address, in the order of addresses."""
    folder = root / "bus" / "pci" / "devices"
    return {name: device_at(folder / name) for name in sysfs.names(folder) if _ADDRESS.fullmatch(name)}


def device_at(entry: Path) -> PciDevice:
    """The device that ``entry`` (``bus/pci/devices/<address>``) leads to."""
    real = entry.resolve()
    roots = [part for part in real.parts if _ROOT.fullmatch(part)]
    numa = sysfs.number(entry / "numa_node")
    vendor, device = sysfs.number(entry / "vendor", 16), sysfs.number(entry / "device", 16)
    return PciDevice(
        address=entry.name,
        id=f"{vendor or 0:04x}:{device or 0:04x}",
        kind=sysfs.number(entry / "class", 16) or 0,
        root=roots[-1] if roots else "",
        bridges=tuple(part for part in real.parts[:-1] if _ADDRESS.fullmatch(part)),
        numa=numa if numa is not None and numa >= 0 else None,  # -1: the firmware does not say
        link=PcieLink(
            _generation(entry / "current_link_speed"),
            _width(entry / "current_link_width"),
            _generation(entry / "max_link_speed"),
            _width(entry / "max_link_width"),
        ),
        driver=(entry / "driver").resolve().name if (entry / "driver").exists() else "",
    )


def distance(one: PciDevice, other: PciDevice) -> Distance:
    """How far apart they are. What cannot be known (no host bridge, no NUMA node) counts as far."""
    if set(one.bridges) & set(other.bridges):
        return Distance.SWITCH
    if one.root and one.root == other.root:
        return Distance.ROOT
    if one.numa is not None and one.numa == other.numa:
        return Distance.NUMA
    return Distance.SYSTEM


def _generation(file: Path) -> int | None:
    return _GENERATIONS.get(sysfs.text(file).partition(" ")[0])


def _width(file: Path) -> int | None:
    width = sysfs.number(file)
    return width if width and width <= 32 else None  # 0, 63 and 255 are how a link says that it is down
