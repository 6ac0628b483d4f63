"""``quartet detect``: the cards, NICs and NUMA nodes of this host, as tables, as JSON, or as a part of quartet.toml."""

import argparse
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from quartet_cli.commands import detect_toml
from quartet_cli.console import console, table
from quartet_cli.errors import CommandFailed
from quartet_core.catalogue import builtin
from quartet_host import sysfs
from quartet_host.bounded import Stuck, within
from quartet_host.host import Gpu, Host, look
from quartet_host.nics import Nic
from quartet_host.nvml import Nvml, NvmlMissing, binding
from quartet_host.pci import PcieLink

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_NVML_S = 15.0
"""How long the driver may take: it starts up first where no process keeps it awake, some seconds for eight cards."""


def add_to(commands: "Commands") -> None:
    """Declare ``detect``."""
    parser = commands.add_parser("detect", help="show this host's cards, NICs and NUMA nodes", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="answer as JSON")
    form.add_argument("--toml", action="store_true", help="answer as the [agent] section of a quartet.toml")
    parser.add_argument("--node", default=platform.node(), metavar="NAME", help="the node's name [this host's]")
    parser.add_argument(
        "--sysfs", type=Path, default=sysfs.SYS, metavar="DIR",
        help="read this copy of /sys, of another host say, and ask no driver [/sys]",
    )  # fmt: skip
    parser.set_defaults(run=_detect)


def _detect(arguments: argparse.Namespace) -> int:
    if not (arguments.sysfs / "class").is_dir():
        raise CommandFailed(f"--sysfs {arguments.sysfs}: is no sysfs; there is no folder class in it", 2)
    host = found(arguments.sysfs)
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(_described(host, arguments.node))).decode() + "\n")
    elif arguments.toml:
        sys.stdout.write(detect_toml.written(host, arguments.node))
    else:
        _print(host)
    return 0


def found(root: Path) -> Host:
    """What the host has whose sysfs is at ``root``; of this host's own, its driver is asked, too."""
    catalogue = builtin()
    if root != sysfs.SYS:
        return look(catalogue, None, root)
    why = ""
    try:
        return within(_NVML_S, lambda: look(catalogue, Nvml(binding()), root))
    except (NvmlMissing, Stuck) as error:
        why = str(error) if isinstance(error, NvmlMissing) else f"NVML: {error}; its driver is stuck"
    bare = look(catalogue, None, root)
    # On a host without cards there is no driver to miss.
    return msgspec.structs.replace(bare, remarks=(*bare.remarks, why)) if bare.gpus else bare


def _described(host: Host, node: str) -> dict[str, object]:
    plain: dict[str, Any] = msgspec.to_builtins(host)  # JSON as it will be
    for gpu, told in zip(host.gpus, plain["gpus"], strict=True):
        told["neighbours"] = [nic.name for nic in host.neighbours(gpu)]
    return {"node": node} | plain


def _print(host: Host) -> None:
    out = console()
    if host.gpus:
        out.print(_gpus(host))
    if host.nics:
        out.print(_nics(host))
    if host.numa:
        out.print(_numa(host))
    if host.driver_version:
        out.print(f"driver {host.driver_version}")
    if host.nvswitches:
        out.print(f"{host.nvswitches} NVSwitches")
    for remark in host.remarks:
        out.print(f"note: {remark}", soft_wrap=True)


def _gpus(host: Host) -> Table:
    texts = ("GPU", "card", "class", "PCI", "PCIe now", "PCIe max", "NVLink", "root complex", "NICs beside it")
    shown = table("GPUs", texts, ("memory, GB", "NUMA"))
    for gpu in host.gpus:
        shown.add_row(
            str(gpu.index),
            gpu.name,
            gpu.hardware or "unknown",
            gpu.device.address,
            _link(gpu.link.gen, gpu.link.width),
            _link(gpu.link.max_gen, gpu.link.max_width),
            _nvlink(gpu),
            gpu.device.root or "unknown",
            ", ".join(nic.name for nic in host.neighbours(gpu)) or "none",
            "unknown" if gpu.memory_bytes is None else f"{gpu.memory_bytes / 1e9:.1f}",
            _number(gpu.device.numa),
        )
    return shown


def _nics(host: Host) -> Table:
    texts = ("NIC", "PCI", "driver", "link", "RDMA", "PCIe", "root complex")
    shown = table("NICs", texts, ("Gbit/s", "NUMA"))
    for nic in host.nics:
        link: PcieLink = nic.device.link
        shown.add_row(
            nic.name,
            nic.device.address,
            nic.device.driver,
            "up" if nic.up else "down",
            _rdma(nic),
            _link(link.gen, link.width),
            nic.device.root or "unknown",
            "unknown" if nic.gbit_per_s is None else f"{nic.gbit_per_s:g}",
            _number(nic.device.numa),
        )
    return shown


def _numa(host: Host) -> Table:
    shown = table("NUMA nodes", ("node", "processors", "GPUs", "NICs"))
    for node in host.numa:
        gpus = ", ".join(str(gpu.index) for gpu in host.gpus if gpu.device.numa == node.number)
        nics = ", ".join(nic.name for nic in host.nics if nic.device.numa == node.number)
        shown.add_row(str(node.number), node.cpus, gpus or "-", nics or "-")
    return shown


def _link(gen: int | None, width: int | None) -> str:
    return "unknown" if gen is None and width is None else f"Gen{gen or '?'} x{width or '?'}"


def _nvlink(gpu: Gpu) -> str:
    if not gpu.nvml:
        return "unknown"
    version = "" if gpu.nvlink_version is None else f" (version {gpu.nvlink_version})"
    return f"{gpu.nvlinks} links{version}" if gpu.nvlinks else "none"


def _rdma(nic: Nic) -> str:
    return f"{nic.rdma} ({'InfiniBand' if nic.fabric == 'infiniband' else 'RoCE'})" if nic.rdma else "none"


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)
