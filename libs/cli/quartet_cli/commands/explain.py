"""``quartet explain``: why a request went where it went, as the routers remember it."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.table import Table

from quartet_cli.commands import admin, options
from quartet_cli.console import console, table
from quartet_cli.running import until_done
from quartet_rpc.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_TERMS = (
    "cached_tokens", "fetched_tokens", "ahead_ms", "prefill_ms", "kv_ms", "ttft_ms", "tpot_ms", "total_ms", "cost",
)  # fmt: skip


def add_to(commands: "Commands") -> None:
    """Declare ``explain``."""
    parser = commands.add_parser("explain", help="why a request went where it went", description=__doc__)
    parser.add_argument("id", help="the request's id")
    options.add_admin(parser)
    parser.set_defaults(run=lambda arguments: until_done(_explain(arguments)))


async def _explain(arguments: argparse.Namespace) -> int:
    request_id: str = arguments.id
    reply = await admin.ask(arguments.admin, lambda stub: stub.Explain(pb.ExplainRequest(request_id=request_id)))
    if arguments.json:
        sys.stdout.write(reply.json + "\n")
        return 0
    out = console()
    for number, decision in enumerate(json.loads(reply.json)["decisions"], 1):
        out.print(_decision(number, decision, reply.router))
    return 0


def _decision(number: int, decision: dict[str, Any], router: str) -> Table:
    """One decision: what was asked in the title, the best plans as rows, the filters below."""
    targets = decision["targets_ms"]
    held = ", held" if decision["hold"] else ""
    made = table(
        f"Decision {number} of {router}, policy {decision['policy']}: {decision['reason']}{held}",
        ("prefill", "decode", "source"),
        _TERMS,
        caption=f"{decision['prompt_tokens']} prompt tokens, about {decision['expected_output_tokens']:g} to come; "
        f"targets TTFT {targets['ttft']:g} ms, TPOT {targets['tpot']:g} ms\ncandidates left after each filter: "
        + ", ".join(f"{name} {count}" for name, count in decision["candidates_left"].items()),
    )
    for plan in decision["plans"]:
        made.add_row(plan["prefill"], plan["decode"], plan["source"], *(f"{plan[term]:g}" for term in _TERMS))
    return made
