"""``quartet policy``: which routing policy every router has; with a name, have all of them choose it."""

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
    """Declare ``policy``."""
    parser = commands.add_parser("policy", help="show or choose the routing policy", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="the policy that every router shall have")
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_policy(arguments)))


async def _policy(arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    if name:
        reply = await admin.ask(arguments.admin, lambda stub: stub.SetPolicy(pb.SetPolicyRequest(policy=name)))
    else:
        reply = await admin.ask(arguments.admin, lambda stub: stub.GetPolicy(pb.GetPolicyRequest()))
    if arguments.json:
        sys.stdout.write(MessageToJson(reply, preserving_proto_field_name=True) + "\n")
        return 0
    for router in reply.routers:
        print(f"{router.router}: {router.policy}  (of {', '.join(router.policies)})")
    if not reply.routers:
        print("no router answered")
    return 0 if reply.routers else 1
