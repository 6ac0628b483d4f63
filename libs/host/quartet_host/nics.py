"""The NICs of a host: what they are, and what they have carried.

Only NICs that are PCI devices: bridges, tunnels and virtual pairs carry what these carried already. RDMA passes the
kernel's network interface by, so a NIC's bytes are looked for in two places; ``read`` says how they add up.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from quartet_core.readings import NicReading
from quartet_host import sysfs
from quartet_host.pci import PciDevice, device_at

_DATA_UNIT_BYTES = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words of four bytes (InfiniBand specification, PortCounters)."""


class Nic(Struct, frozen=True, kw_only=True):
    """One port. ``rdma`` is the name of its RDMA device, "" without; ``gbit_per_s`` None while its link is down."""

    name: str
    device: PciDevice
    up: bool = False
    gbit_per_s: float | None = None
    rdma: str = ""
    port: int = 0
    fabric: Literal["ethernet", "infiniband"] = "ethernet"
    interface: bool = True

    @property
    def link_class(self) -> str:
        """Which of ``quartet_core.links.LINK_CLASSES`` it can be."""
        if not self.rdma:
            return "TCP"
        return "RDMA_IB" if self.fabric == "infiniband" else "RDMA_ROCE"


def nics(root: Path = sysfs.SYS) -> list[Nic]:
    """All ports below ``root`` (``/sys``), network interfaces first, then RDMA ports that have none."""
    ports = list(_rdma_ports(root))
    found: list[Nic] = []
    for name in sysfs.names(root / "class" / "net"):
        entry = root / "class" / "net" / name
        device = _pci_device(entry)
        if device is None:
            continue
        own = [port for port in ports if port.device.address == device.address]
        port = next((port for port in own if port.port == (sysfs.number(entry / "dev_port") or 0) + 1), None)
        port = port or (own[0] if own else None)
        if port is not None:
            ports.remove(port)
        speed = sysfs.number(entry / "speed")
        found.append(
            Nic(
                name=name,
                device=device,
                up=sysfs.text(entry / "operstate") == "up",
                gbit_per_s=speed / 1e3 if speed is not None and speed > 0 else port.gbit_per_s if port else None,
                rdma=port.rdma if port else "",
                port=port.port if port else 0,
                fabric=port.fabric if port else "ethernet",
            )
        )
    return found + ports


def read(nic: Nic, root: Path = sysfs.SYS) -> NicReading:
    """What ``nic`` has carried.

    Over Ethernet the interface counts what the kernel sent, the RDMA port what went by RoCE: together they are all of
    it. On InfiniBand the port counts everything, IP included.
    """
    rx_bytes = tx_bytes = rx_dropped = errors = 0
    if nic.interface and nic.fabric == "ethernet":
        counters = root / "class" / "net" / nic.name / "statistics"
        rx_bytes, tx_bytes = (sysfs.number(counters / name) or 0 for name in ("rx_bytes", "tx_bytes"))
        rx_dropped = (sysfs.number(counters / "rx_dropped") or 0) + (sysfs.number(counters / "rx_missed_errors") or 0)
        errors = (sysfs.number(counters / "rx_errors") or 0) + (sysfs.number(counters / "tx_errors") or 0)
    if nic.rdma:
        counters = root / "class" / "infiniband" / nic.rdma / "ports" / str(nic.port) / "counters"
        rx_bytes += (sysfs.number(counters / "port_rcv_data") or 0) * _DATA_UNIT_BYTES
        tx_bytes += (sysfs.number(counters / "port_xmit_data") or 0) * _DATA_UNIT_BYTES
        errors += sysfs.number(counters / "port_rcv_errors") or 0
    return NicReading(
        name=nic.name,
        rx_bytes=rx_bytes,
        tx_bytes=tx_bytes,
        rx_dropped=rx_dropped,
        errors=errors,
        gbit_per_s=nic.gbit_per_s,
    )


def _rdma_ports(root: Path) -> Iterable[Nic]:
    for name in sysfs.names(root / "class" / "infiniband"):
        entry = root / "class" / "infiniband" / name
        device = _pci_device(entry)
        if device is None:
            continue
        for port in sysfs.names(entry / "ports"):
            with contextlib.suppress(ValueError):
                yield _rdma_port(entry / "ports" / port, name, int(port), device)


def _rdma_port(entry: Path, name: str, port: int, device: PciDevice) -> Nic:
    rate = re.match(r"([0-9.]+) Gb/sec", sysfs.text(entry / "rate"))
    up = sysfs.text(entry / "state").endswith("ACTIVE")
    return Nic(
        name=f"{name}/{port}",
        device=device,
        up=up,
        gbit_per_s=float(rate[1]) if rate and up else None,
        rdma=name,
        port=port,
        fabric="infiniband" if sysfs.text(entry / "link_layer") == "InfiniBand" else "ethernet",
        interface=False,
    )


def _pci_device(entry: Path) -> PciDevice | None:
    """The PCI device behind a class entry; None for virtual ones. Those of virtio stand below their PCI device."""
    real = (entry / "device").resolve() if (entry / "device").exists() else None
    while real is not None and real.name != "devices" and real.parent != real:
        if (real / "vendor").exists() and (real / "class").exists():
            return device_at(real)
        real = real.parent
    return None
