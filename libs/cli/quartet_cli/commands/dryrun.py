"""``quartet dry-run``: have another policy decide live traffic too, without dispatching, and see where it differs."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from quartet_cli.commands import admin, options
from quartet_cli.console import console, table
from quartet_cli.running import until_done
from quartet_rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_FIGURES = ("decisions", "differ", "mean_ttft_ms", "mean_ttft_ms_dry", "mean_total_ms", "mean_total_ms_dry")


def add_to(commands: "Commands") -> None:
    """Declare ``dry-run``."""
    parser = commands.add_parser("dry-run", help="compare a policy on live traffic", description=__doc__)
    parser.add_argument("policy", nargs="?", default="", help='the policy; "off" stops; without one, what was found')
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_dry_run(arguments)))


async def _dry_run(arguments: argparse.Namespace) -> int:
    policy: str = arguments.policy
    reply = await admin.ask(arguments.admin, lambda stub: stub.DryRun(pb.DryRunRequest(policy=policy)))
    if arguments.json:
        sys.stdout.write(json.dumps({each.router: json.loads(each.json) for each in reply.routers}) + "\n")
        return 0
    for each in reply.routers:
        found = json.loads(each.json)
        title = f"Router {each.router}: {found['dry_run'] or 'no dry run'}, {found['seconds']:g} s"
        made = table(title, ("model",), _FIGURES)
        for model, figures in found["models"].items():
            made.add_row(model, *(f"{figures[name]:g}" for name in _FIGURES))
        console().print(made)
    return 0
