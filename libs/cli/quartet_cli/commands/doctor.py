"""``quartet doctor``: how each worker's engine is seen, and why affinity works for it or does not.

Asks all agents over NATS, needs no admin. Agents that do not answer are named by what collectors know of their nodes.
Exit code 1 when something is wrong with any engine, or an agent is silent.
"""

import argparse
import asyncio
import secrets
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from rich.table import Table

from quartet_bus import nats_bus, subjects
from quartet_bus.bus import Bus, Message
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlReply, ControlRequest, FleetSnapshot
from quartet_bus.service import UNREADABLE
from quartet_cli.commands import options
from quartet_cli.console import console, table
from quartet_cli.errors import CommandFailed
from quartet_cli.running import until_done
from quartet_core.verdict import Verdict

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_CONNECT_MS = 5_000
_WAIT_S = 1.0
_MODES = {
    "simulated": "simulated",
    "events": "exact: the engine's KV events",
    "traffic": "approximate: this agent's own traffic",
}


class _Finding(Struct):
    code: str
    text: str
    remedy: str = ""


class _Engine(Struct):
    kind: str
    up: bool
    url: str = ""
    version: str = ""
    why_down: str = ""
    metrics: str = ""
    degraded: tuple[str, ...] = ()
    affinity: str = ""
    events: dict[str, int] = {}
    prompts: dict[str, int] = {}
    pages: dict[str, int] = {}
    findings: list[_Finding] = []


class _Worker(Struct):
    worker: str
    model: str
    sketch: str
    engine: _Engine


class _Node(Struct):
    node: str
    rows: int
    hashes: int
    workers: list[_Worker]


class _Silent(Struct):
    """A node whose agent did not answer. ``workers`` is always empty."""

    node: str
    silent: str
    workers: tuple[str, ...] = ()


class _Heard:
    """What came of one question to everybody: agents' answers, and the fleet as collectors believe it."""

    def __init__(self) -> None:
        self.replies: dict[str, ControlReply] = {}
        self._verdicts: dict[str, int] = {}

    def answer(self, message: Message) -> None:
        """An agent's answer."""
        try:
            reply = msgspec.msgpack.decode(message.data, type=ControlReply)
        except UNREADABLE:
            return
        if reply.ok:
            self.replies[reply.instance] = reply

    def fleet(self, message: Message) -> None:
        """A collector's snapshot. Of several collectors the one counts that believes a node most alive."""
        try:
            snapshot = msgspec.msgpack.decode(message.data, type=FleetSnapshot)
        except UNREADABLE:
            return
        told: dict[str, int] = {}
        for worker in snapshot.workers:
            node = worker.worker.rpartition("-")[0]
            told[node] = min(worker.verdict, told.get(node, worker.verdict))
        for stamp in snapshot.stamps:  # a node that beats, and whose engines are all down, has no worker
            told.setdefault(stamp.node, Verdict.UP)
        for node, verdict in told.items():
            self._verdicts[node] = min(verdict, self._verdicts.get(node, verdict))

    def silent(self) -> list[_Silent]:
        """The nodes that collectors know and whose agents did not answer."""
        known = sorted(self._verdicts.keys() - self.replies.keys())
        return [_Silent(node, _why(self._verdicts[node])) for node in known]


def _why(verdict: int) -> str:
    if verdict in (Verdict.DEAD, Verdict.SUSPECT):
        return "no beats either: the host, its network or its agent is down"
    return "its beats arrive: its agent hangs, or the broker does not let it hear us"


def add_to(commands: "Commands") -> None:
    """Declare ``doctor``."""
    parser = commands.add_parser(
        "doctor", help="say how each engine is seen, and why affinity works or does not", description=__doc__
    )
    parser.add_argument("--wait", type=float, default=_WAIT_S, metavar="S", help=f"seconds to hear agents [{_WAIT_S}]")
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    options.add_nats(parser)
    parser.set_defaults(run=lambda arguments: until_done(_doctor(arguments)))


async def _doctor(arguments: argparse.Namespace) -> int:
    bus = await nats_bus.connect(NatsSection(url=arguments.nats, connect_timeout_ms=_CONNECT_MS), name="quartet-doctor")
    try:
        heard = await _ask_all(bus, arguments.wait)
    finally:
        await bus.close()
    silent = heard.silent()
    replies = [heard.replies[name] for name in sorted(heard.replies)]
    if not replies and not silent:
        raise CommandFailed(f"no agent answered within {arguments.wait:g} s at {arguments.nats}")
    nodes = [msgspec.json.decode(reply.payload, type=_Node) for reply in replies]
    shapes = {(node.rows, node.hashes) for node in nodes}
    if arguments.json:
        answers = [*(msgspec.Raw(reply.payload) for reply in replies), *silent]
        sys.stdout.write(msgspec.json.encode(answers).decode() + "\n")
    else:
        _print(nodes, silent, shapes)
    found = any(worker.engine.findings for node in nodes for worker in node.workers)
    return int(found or len(shapes) > 1 or bool(silent))


async def _ask_all(bus: Bus, wait_s: float) -> _Heard:
    """What all agents answer, and collectors say, until the time is over."""
    inbox = f"_INBOX.doctor.{secrets.token_hex(8)}"
    heard = _Heard()
    subscriptions = [
        await bus.subscribe(inbox, heard.answer),
        await bus.subscribe(subjects.fleet_snapshot().subject, heard.fleet),
    ]
    question = msgspec.msgpack.encode(ControlRequest())
    bus.publish(subjects.control("agent", "_all", "doctor").subject, question, reply=inbox)
    await asyncio.sleep(wait_s)
    for subscription in subscriptions:
        await subscription.stop()
    return heard


def _print(nodes: list[_Node], silent: list[_Silent], shapes: set[tuple[int, int]]) -> None:
    out = console()
    out.print(_table(nodes))
    for node in silent:
        out.print(f"{node.node}: the agent does not answer [silent]", markup=False)
        out.print(f"    {node.silent}", markup=False)
    for each in nodes:
        for worker in each.workers:
            if worker.engine.pages:
                out.print(f"{worker.worker}: {_pages(worker.engine.pages)}", markup=False)
            for finding in worker.engine.findings:
                out.print(f"{worker.worker}: {finding.text} [{finding.code}]", markup=False)
                if finding.remedy:
                    out.print(f"    {finding.remedy}", markup=False)
    if len(shapes) > 1:
        told = ", ".join(f"{rows} rows of {hashes} hashes" for rows, hashes in sorted(shapes))
        out.print(f"agents fill filters of different shapes ({told}): routers take in one of them only", markup=False)
        out.print("    give all of them the same [router] affinity_rows and affinity_hashes", markup=False)


def _pages(figures: dict[str, int]) -> str:
    """What an engine with the connector does with its pages, in a line."""
    told = {name: f"{count:,}" for name, count in figures.items()}
    return (
        "KV pages: {pages} of {slots} slots, {granted} more kept for what comes; {saved} saved, {loaded} loaded, "
        "{evicted} evicted, {kept} came, {dropped} dropped after they left"
    ).format_map(defaultdict(lambda: "?", told))


def _table(nodes: list[_Node]) -> Table:
    workers = table("Engines", ("worker", "engine", "model (sketch)", "metrics", "affinity"), ("blocks held",))
    for node in nodes:
        for worker in node.workers:
            engine = worker.engine
            state = f"{engine.kind} {engine.version}".strip() if engine.up else f"{engine.kind}: down"
            metrics = f"{engine.metrics}, degraded" if engine.degraded else engine.metrics
            held = str(engine.events["held_blocks"]) if "held_blocks" in engine.events else ""
            workers.add_row(
                worker.worker, state, f"{worker.model} ({worker.sketch})", metrics,
                _MODES.get(engine.affinity, engine.affinity), held,
            )  # fmt: skip
    return workers
