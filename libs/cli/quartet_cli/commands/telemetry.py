"""``quartet telemetry``: how the cards and NICs of the fleet fare, and which root complexes are congested."""

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.table import Table

from quartet_cli.commands import admin, options
from quartet_cli.console import console, table
from quartet_cli.errors import CommandFailed
from quartet_cli.running import until_done
from quartet_rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_NOT_KNOWN = "-"


def add_to(commands: "Commands") -> None:
    """Declare ``telemetry``."""
    parser = commands.add_parser("telemetry", help="how cards and NICs fare", description=__doc__)
    parser.add_argument("--node", default="", help="only this node")
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_telemetry(arguments)))


async def _telemetry(arguments: argparse.Namespace) -> int:
    wanted = pb.GetTelemetryRequest(node=arguments.node)
    told = await admin.ask(arguments.admin, lambda stub: stub.GetTelemetry(wanted))
    if arguments.node and not told.nodes:
        raise CommandFailed(f"no telemetry of a node {arguments.node} within the last minute")
    if arguments.json:
        sys.stdout.write(MessageToJson(told, preserving_proto_field_name=True) + "\n")
        return 0
    out = console()
    if not told.nodes:
        out.print("no telemetry heard")
        return 0
    out.print(_cards(told.nodes))
    out.print(_nics(told.nodes))
    for line in _notes(told.nodes):
        out.print(line, soft_wrap=True)
    return 0


def _cards(nodes: Iterable[pb.NodeTelemetry]) -> Table:
    numbers = ("busy", "temp, °C", "power, W", "SM, MHz", "PCIe in, GB/s", "out", "replays")
    cards = table("Cards", ("node", "GPU", "workers", "root complex", "link"), numbers)
    cards.add_column("remarks")
    for node in nodes:
        for gpu in node.gpus:
            link = f"Gen{gpu.pcie_gen} x{gpu.pcie_width}" if gpu.HasField("pcie_gen") else _NOT_KNOWN
            cards.add_row(
                node.node, str(gpu.index), ", ".join(gpu.workers), gpu.root or _NOT_KNOWN, link,
                f"{gpu.busy_share:.0%}" if gpu.HasField("busy_share") else _NOT_KNOWN,
                _of(gpu, "temperature_c"), _of(gpu, "power_w"), _of(gpu, "sm_mhz"),
                _of(gpu, "pcie_rx_gb_per_s", 2), _of(gpu, "pcie_tx_gb_per_s", 2), _of(gpu, "replays"),
                ", ".join(_remarks(gpu)),
            )  # fmt: skip
    return cards


def _remarks(gpu: pb.GpuTelemetry) -> list[str]:
    """What an operator should notice."""
    remarks = [flag for flag in ("throttled", "congested") if getattr(gpu, flag)]
    return remarks + [reason for reason in gpu.reasons if reason != "idle"]


def _nics(nodes: Iterable[pb.NodeTelemetry]) -> Table:
    nics = table("NICs", ("node", "NIC", "root complex"), ("Gbit/s", "in, GB/s", "out, GB/s", "dropped", "errors"))
    for node in nodes:
        for nic in node.nics:
            nics.add_row(
                node.node, nic.name, nic.root or _NOT_KNOWN, _of(nic, "gbit_per_s"), _of(nic, "rx_gb_per_s", 2),
                _of(nic, "tx_gb_per_s", 2), str(nic.rx_dropped), str(nic.errors),
            )  # fmt: skip
    return nics


def _notes(nodes: Iterable[pb.NodeTelemetry]) -> Iterable[str]:
    sources: dict[str, list[str]] = {}
    for node in nodes:
        sources.setdefault(node.source, []).append(node.node)
        for alert in node.alerts:
            yield (
                f"ALERT {node.node}: root complex {alert.root} is congested: {alert.worker} has drift "
                f"x{alert.drift_busy:.2f} while {alert.nic} is busy, x{alert.drift_quiet:.2f} while it is quiet "
                f"(rank correlation {alert.correlation:.2f}, t {alert.t:.1f})"
            )
        if node.degraded:
            yield f"DEGRADED {node.node}: {node.degraded} (reading {node.age_ms / 1e3:.0f} s old)"
    for source, names in sources.items():
        yield f"source {source}: {', '.join(names)}"


def _of(told: Message, field: str, digits: int = 0) -> str:
    return f"{getattr(told, field):.{digits}f}" if told.HasField(field) else _NOT_KNOWN
