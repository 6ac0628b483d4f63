"""``quartet demo``: replay two real traces on a whole fleet, ours and round-robin, and account for every request."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quartet_cli.commands import options
from quartet_cli.console import console
from quartet_cli.demo.figures import PassFigures
from quartet_cli.demo.passes import PassPlan, run_pass
from quartet_cli.demo.progress import PassProgress
from quartet_cli.demo.screen import show
from quartet_cli.demo.verdict import problems
from quartet_cli.demo.workload import TRACES, Arrival, arrivals
from quartet_cli.errors import CommandFailed
from quartet_cli.fleet.launch import Fleet
from quartet_cli.fleet.progress import StartLine
from quartet_cli.running import until_done

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

OURS = "finish-time"
OTHER = "round-robin"
_OUR_GRACE_S = 120.0
_OTHER_GRACE_S = 15.0


def add_to(commands: "Commands") -> None:
    """Declare ``demo``."""
    parser = commands.add_parser("demo", help="replay real traces on a whole fleet", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long requests come [60]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options.add_fleet(parser, ports="any")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.seconds > 0:
        raise CommandFailed("--seconds must be above 0", 2)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise CommandFailed(f"--json {arguments.json}: there is no such directory", 2)
    return until_done(_demo(arguments))


async def _demo(arguments: argparse.Namespace) -> int:
    workload = arrivals(arguments.seconds)
    for trace in TRACES:
        count = sum(arrival.model == trace.model for arrival in workload)
        print(
            f"{trace.name}: {count} requests to {trace.model} in {arguments.seconds:g} s, x{trace.speed_up:g} as fast"
        )
    ours = await _pass(arguments, "1/2", OURS, workload, _OUR_GRACE_S)
    other = await _pass(arguments, "2/2", OTHER, workload, _OTHER_GRACE_S)
    show(console(), ours, other)
    found = problems(ours)
    if arguments.json is not None:
        figures = {"ours": ours, "other": other, "problems": found}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    for problem in found:
        print(f"quartet: {problem}", file=sys.stderr)
    return 1 if found else 0


async def _pass(
    arguments: argparse.Namespace, number: str, policy: str, workload: list[Arrival], grace_s: float
) -> PassFigures:
    name = f"pass {number}, {policy}:"
    print(f"{name} starting a fleet", flush=True)
    chosen = options.fleet_options(arguments, policy=policy)
    if chosen.directory is not None:
        chosen = msgspec.structs.replace(chosen, directory=chosen.directory / policy)
    async with Fleet(chosen, StartLine()) as fleet:
        with PassProgress(console(), name, arguments.seconds) as progress:
            plan = PassPlan(policy, workload, arguments.seconds, grace_s)
            figures = await run_pass(fleet, plan, progress.tell)
    print(f"{name} {figures.right} of {figures.sent} answered right in {figures.took_s:.1f} s", flush=True)
    return figures
