"""``quartet fleet``: every node and worker as the admin last heard of it."""

import argparse
import sys
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson
from rich.table import Table

from quartet_cli.commands import admin, options
from quartet_cli.console import console, table
from quartet_cli.running import until_done
from quartet_rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_FLAGS = ("throttled", "congested", "pressed", "fault", "unusable")


def add_to(commands: "Commands") -> None:
    """Declare ``fleet``."""
    parser = commands.add_parser("fleet", help="show nodes and workers", description=__doc__)
    parser.add_argument("--model", default="", help="only workers of this model")
    parser.add_argument("--hardware", default="", help="only workers of this class")
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_fleet(arguments)))


async def _fleet(arguments: argparse.Namespace) -> int:
    request = pb.GetFleetRequest(model=arguments.model, hardware=arguments.hardware)
    fleet = await admin.ask(arguments.admin, lambda stub: stub.GetFleet(request))
    if arguments.json:
        sys.stdout.write(MessageToJson(fleet, preserving_proto_field_name=True) + "\n")
        return 0
    out = console()
    out.print(_nodes(fleet))
    out.print(_workers(fleet))
    out.print(f"collectors heard: {', '.join(fleet.collectors) or 'none'}")
    return 0


def _nodes(fleet: pb.Fleet) -> Table:
    nodes = table("Nodes", ("node", "zone", "agent", "models resident", "KV mover"), ("last beat, ms",))
    for node in fleet.nodes:
        beat = f"{node.last_beat_age_ms:.0f}" if node.HasField("last_beat_age_ms") else "never"
        nodes.add_row(node.name, node.zone, node.agent_version, ", ".join(node.resident), node.kv_address, beat)
    return nodes


def _workers(fleet: pb.Fleet) -> Table:
    numbers = ("TP", "free KV", "prefill queue, ms", "batch", "drift")
    workers = table("Workers", ("worker", "class", "model", "verdict"), numbers)
    workers.add_column("remarks")
    for worker in fleet.workers:
        verdict = pb.Verdict.Name(worker.verdict).removeprefix("VERDICT_").lower()
        cells = [worker.id, worker.hardware, f"{worker.model} {worker.precision}", verdict, str(worker.tp)]
        if worker.HasField("state"):
            state = worker.state
            cells += [f"{state.free_kv_percent:.0f} %", f"{state.queued_prefill_ms:.0f}", str(state.running)]
            cells += [f"x{state.drift:.2f}", ", ".join(_remarks(worker))]
        workers.add_row(*cells)
    return workers


def _remarks(worker: pb.Worker) -> list[str]:
    """What an operator should notice."""
    remarks = [flag for flag in _FLAGS if getattr(worker.state, flag)]
    if not worker.state.accepting:
        remarks.insert(0, "takes nothing")
    if worker.cordoned:
        remarks.insert(0, "cordoned")
    if worker.role not in (pb.ROLE_BOTH, pb.ROLE_UNSPECIFIED):
        remarks.append(pb.Role.Name(worker.role).removeprefix("ROLE_").lower() + " only")
    return remarks
