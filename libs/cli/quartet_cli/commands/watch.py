"""``quartet watch``: decisions of all routers as they are made, until Ctrl-C."""

import argparse
import sys
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson

from quartet_cli.commands import admin, options
from quartet_cli.running import until_done
from quartet_rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from quartet_cli.commands import Commands


def add_to(commands: "Commands") -> None:
    """Declare ``watch``."""
    parser = commands.add_parser("watch", help="decisions as they are made", description=__doc__)
    parser.add_argument("--model", default="", help="only this model")
    parser.add_argument("--tenant", default="", help="only this tenant")
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_watch(arguments)))


async def _watch(arguments: argparse.Namespace) -> int:
    wanted = pb.WatchDecisionsRequest(model=arguments.model, tenant=arguments.tenant)
    async with admin.door(arguments.admin) as stub:
        async for decision in stub.WatchDecisions(wanted):
            sys.stdout.write(f"{MessageToJson(decision, indent=None) if arguments.json else _line(decision)}\n")
            sys.stdout.flush()
    return 0


def _line(decision: pb.RoutingDecision) -> str:
    """One decision in one line."""
    missed = f"({decision.dropped} missed) " if decision.dropped else ""
    what = f"{decision.phase:10} {decision.request_id:32} {decision.model:16} {decision.prompt_tokens:7} tokens"
    if decision.phase == "dispatched":
        return (
            f"{missed}{what} to {decision.worker:14} {decision.reason:10} cached {decision.cached_tokens:6} "
            f"waited {decision.waited_ms:7.1f} ms, expects TTFT {decision.predicted_ttft_ms:8.1f} ms"
        )
    return f"{missed}{what} {decision.reason}{f' {decision.code}' if decision.code else ''}"
