"""``quartet kv``: transfers of KV, the links that they take, and the pool, as the active coordinator has them."""

import argparse
import sys
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from quartet_cli.commands import admin, options
from quartet_cli.console import console, table
from quartet_cli.kv_costs import rows
from quartet_cli.running import until_done
from quartet_rpc.v1 import coordinator_pb2 as pb
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorStub

if TYPE_CHECKING:
    from quartet_cli.commands import Commands


def add_to(commands: "Commands") -> None:
    """Declare ``kv`` and what it can do."""
    parser = commands.add_parser("kv", help="KV transfers, links, and what moving costs", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listed = actions.add_parser("transfers", help="transfers under way and lately ended, newest first")
    listed.add_argument("--live", action="store_true", help="only those under way")
    listed.add_argument("--limit", type=options.positive, default=40, metavar="N", help="at most so many [40]")
    listed.set_defaults(run=lambda arguments: until_done(_transfers(arguments)))
    watched = actions.add_parser("watch", help="transfers as their states change, until Ctrl-C")
    watched.set_defaults(run=lambda arguments: until_done(_watch(arguments)))
    linked = actions.add_parser("links", help="links between nodes: promised, measured, in use")
    linked.add_argument("--slowed", action="store_true", help="only those far below what they promise")
    linked.set_defaults(run=lambda arguments: until_done(_links(arguments)))
    cancelled = actions.add_parser("cancel", help="abort a transfer; both sides are freed")
    cancelled.add_argument("transfer")
    cancelled.set_defaults(run=lambda arguments: until_done(_cancel(arguments)))
    planned = actions.add_parser("plan", help="what moving a prefix would take now, or computing it; begins nothing")
    planned.add_argument("source", help="worker that has it")
    planned.add_argument("target", help="worker that wants it")
    planned.add_argument("tokens", type=options.positive, help="of the prefix")
    planned.add_argument("--held", type=options.not_negative, default=0, metavar="N", help="tokens the target has [0]")
    planned.add_argument("--deadline-ms", type=float, default=0.0, metavar="MS", help="must be there by then [none]")
    planned.set_defaults(run=lambda arguments: until_done(_plan(arguments)))
    pooled = actions.add_parser("pool", help="the virtual VRAM pool: room, pages in and out, hits (docs/pool.md)")
    pooled.set_defaults(run=lambda arguments: until_done(_pool(arguments)))
    for action in (listed, watched, linked, cancelled, planned, pooled):
        options.add_coordinator(action)
    costs = actions.add_parser("costs", help="what KV costs over each kind of path (docs/kv-costs.md)")
    costs.set_defaults(run=_costs)


async def _transfers(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        reply = await CoordinatorStub(link).ListTransfers(
            pb.ListTransfersRequest(live_only=arguments.live, limit=arguments.limit)
        )
    if arguments.json:
        return _json(reply)
    role = "active" if reply.active else "standing by"
    made = table(
        f"Transfers ({reply.coordinator}, {role}, term {reply.term})",
        ("transfer", "why", "state", "from", "to", "link"),
        ("tokens", "KV, MB", "predicted, ms", "took, ms", "overlapped, ms", "age, s"),
    )
    made.add_column("detail")
    for each in reply.transfers:
        made.add_row(
            each.transfer, each.reason, each.state, each.source, each.target, each.link, str(each.tokens),
            f"{each.kv_bytes / 1e6:.0f}", f"{each.predicted_ms:.1f}", f"{each.took_ms:.1f}",
            f"{each.overlap_ms:.1f}", f"{each.age_ms / 1e3:.1f}", each.detail,
        )  # fmt: skip
    console().print(made)
    return 0


async def _watch(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        async for each in CoordinatorStub(link).WatchTransfers(pb.WatchTransfersRequest()):
            line = (
                f"{each.transfer} {each.state:10} {each.source} -> {each.target} {each.link} "
                f"{each.kv_bytes / 1e6:.0f} MB predicted {each.predicted_ms:.1f} took {each.took_ms:.1f} ms "
                f"({each.overlap_ms:.1f} overlapped) "
                f"{each.detail}"
            )
            sys.stdout.write(f"{MessageToJson(each, indent=None) if arguments.json else line.rstrip()}\n")
            sys.stdout.flush()
    return 0


async def _links(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        reply = await CoordinatorStub(link).ListLinks(pb.ListLinksRequest())
    found = [each for each in reply.links if each.slowed or not arguments.slowed]
    if arguments.json:
        return _json(pb.ListLinksReply(links=found, coordinator=reply.coordinator, term=reply.term))
    numbers = ("GB/s", "promised", "setup, ms", "in flight, MB", "sending", "waiting")
    made = table(f"Links ({reply.coordinator}, term {reply.term})", ("from", "to", "class"), numbers)
    made.add_column("remarks")
    for each in found:
        remark = "SLOWED: not what it is taken for" if each.slowed else "" if each.measured else "not measured yet"
        made.add_row(
            each.source, each.target, each.kind, f"{each.gb_per_s:.2f}", f"{each.promised_gb_per_s:.2f}",
            f"{each.setup_ms:.2f}", f"{each.in_flight_bytes / 1e6:.0f}", str(each.transfers), str(each.waiting), remark,
        )  # fmt: skip
    console().print(made)
    return 0


async def _cancel(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        reply = await CoordinatorStub(link).CancelTransfer(pb.CancelTransferRequest(transfer=arguments.transfer))
    if arguments.json:
        return _json(reply)
    print(f"{arguments.transfer} is {reply.state}")
    return 0


async def _plan(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        reply = await CoordinatorStub(link).PlanTransfer(
            pb.PlanTransferRequest(
                source=arguments.source, target=arguments.target, tokens=arguments.tokens, held_tokens=arguments.held,
                deadline_ms=arguments.deadline_ms,
            )
        )  # fmt: skip
    if arguments.json:
        return _json(reply)
    if not reply.possible:
        print(f"would not be moved: {reply.failure}: {reply.detail}")
        return 1
    print(
        f"{reply.kv_bytes / 1e6:.0f} MB over {reply.link}: {reply.move_ms:.1f} ms; "
        f"computed: {reply.recompute_ms:.1f} ms. "
        f"{'Move it.' if reply.move else 'Compute it.'}"
    )
    return 0


async def _pool(arguments: argparse.Namespace) -> int:
    async with admin.knocked(arguments.coordinator, "coordinator") as link:
        reply = await CoordinatorStub(link).GetPool(pb.GetPoolRequest())
    if arguments.json:
        return _json(reply)
    if not reply.on:
        print("the pool is off: [kv] pool = true turns it on (docs/pool.md)")
        return 0
    role = "active" if reply.active else "standing by"
    numbers = ("room, tokens", "empty", "cached", "in", "out", "hit", "going", "coming")
    made = table(f"Pool ({reply.coordinator}, {role}, term {reply.term})", ("tier", "worker", "model"), numbers)
    made.add_column("remarks")
    for each in reply.parts:
        counts = (
            each.total_tokens, each.empty_tokens, each.cached_tokens, each.in_tokens, each.out_tokens, each.hit_tokens,
            each.leaving, each.coming,
        )  # fmt: skip
        remark = "pressed" if each.pressed else f"silent for {each.age_ms / 1e3:.0f} s" if each.age_ms > 5000 else ""
        made.add_row(each.tier, each.worker, each.model, *(f"{count:,}" for count in counts), remark)
    console().print(made)
    for title, found in (("page-outs", reply.pages), ("stayed", reply.refused)):
        print(f"{title}: {', '.join(f'{why} {count}' for why, count in sorted(found.items())) or 'none'}")
    return 0


def _costs(arguments: argparse.Namespace) -> int:
    for line in rows():
        print(line)
    return 0


def _json(message: Message) -> int:
    sys.stdout.write(MessageToJson(message, preserving_proto_field_name=True) + "\n")
    return 0
