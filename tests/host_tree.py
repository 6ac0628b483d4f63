"""A sysfs tree as the kernel of an eight-GPU HGX host shows it, written to a folder.

Two sockets, two host bridges each; below every bridge a PCIe switch with two H100s and two ConnectX-7, of which one
speaks InfiniBand and one RoCE. Besides: a console's graphics chip, a dark 10 GbE port, four NVSwitches, virtual NICs.
"""

from pathlib import Path

H100, NVSWITCH, CONNECTX, ASPEED, X550 = "10de:2330", "10de:22a3", "15b3:1021", "1a03:2000", "8086:1563"
GPU_CLASS, SWITCH_CLASS, NIC_CLASS, VGA_CLASS = 0x030200, 0x068000, 0x020000, 0x030000
BRIDGES = ("pci0000:15", "pci0000:37", "pci0000:97", "pci0000:b7")


class SysTree:
    """Writes devices below ``root``, symbolic links included."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bus/pci/devices", "class/net", "class/infiniband", "drivers"):
            (root / folder).mkdir(parents=True)

    def write(self, path: str | Path, **files: object) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
        return folder

    def device(
        self, way: str, id: str, kind: int, *, numa: int = 0, speed: str = "32.0 GT/s PCIe", width: int = 16,
        max_width: int = 16, driver: str = "",
    ) -> Path:  # fmt: skip
        """A device at ``way``, its path below ``devices``."""
        vendor, device = id.split(":")
        folder = self.write(
            f"devices/{way}", vendor=f"0x{vendor}", device=f"0x{device}", numa_node=numa,
            current_link_speed=speed, max_link_speed="32.0 GT/s PCIe",
            current_link_width=width, max_link_width=max_width, **{"class": f"0x{kind:06x}"},
        )  # fmt: skip
        if driver:
            (folder / "driver").symlink_to(self.write(f"drivers/{driver}"))
        (self.root / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def interface(self, name: str, device: Path | None, *, speed: object = 400_000, state: str = "up") -> None:
        folder = self.write(f"class/net/{name}", operstate=state, speed=speed, dev_port=0)
        if device is not None:
            (folder / "device").symlink_to(device)
        self.write(
            f"class/net/{name}/statistics", rx_bytes=1000, tx_bytes=2000, rx_dropped=3, rx_missed_errors=4,
            rx_errors=5, tx_errors=6,
        )  # fmt: skip

    def rdma(self, name: str, device: Path, layer: str, *, rate: str = "400 Gb/sec (4X NDR)") -> None:
        folder = self.write(f"class/infiniband/{name}")
        (folder / "device").symlink_to(device)
        port = f"class/infiniband/{name}/ports/1"
        self.write(port, link_layer=layer, state="4: ACTIVE", rate=rate)
        self.write(f"{port}/counters", port_rcv_data=500, port_xmit_data=700, port_rcv_errors=8)


def hgx(root: Path) -> SysTree:
    """The whole host."""
    tree = SysTree(root)
    for number, bridge in enumerate(BRIDGES):
        numa, bus = number // 2, int(bridge[-2:], 16)
        below = f"{bridge}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        for slot in range(2):
            gpu = f"{below}/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0"
            tree.device(gpu, H100, GPU_CLASS, numa=numa, driver="nvidia")
        ib = tree.device(f"{below}/0000:{bus + 2:02x}:04.0/0000:{bus + 5:02x}:00.0", CONNECTX, 0x020700, numa=numa)
        tree.rdma(f"mlx5_{2 * number}", ib, "InfiniBand")
        roce = tree.device(
            f"{below}/0000:{bus + 2:02x}:05.0/0000:{bus + 6:02x}:00.0", CONNECTX, NIC_CLASS, numa=numa,
            driver="mlx5_core",
        )  # fmt: skip
        tree.rdma(f"mlx5_{2 * number + 1}", roce, "Ethernet", rate="200 Gb/sec (4X HDR)")
        tree.interface(f"ens{number}", roce, speed=200_000)
    for number in range(4):
        tree.device(f"pci0000:80/0000:80:0{number}.0", NVSWITCH, SWITCH_CLASS, numa=1)
    tree.device("pci0000:00/0000:00:1c.0/0000:03:00.0", ASPEED, VGA_CLASS)
    lan = tree.device(
        "pci0000:00/0000:00:1d.0/0000:04:00.0", X550, NIC_CLASS, speed="8.0 GT/s PCIe", width=4, max_width=4
    )
    tree.interface("eno1", lan, speed=-1, state="down")
    tree.interface("lo", None)
    tree.interface("docker0", None)
    for node, cpus in enumerate(("0-55,112-167", "56-111,168-223")):
        tree.write(f"devices/system/node/node{node}", cpulist=cpus)
    return tree
