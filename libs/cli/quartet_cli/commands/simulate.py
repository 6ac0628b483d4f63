"""``quartet simulate``: compare policies on a trace and a fleet that exist only here, in seconds instead of GPU-hours.

The decisions are those of the router: the same code, on a virtual clock. What is simulated, how far it is from measured
serving, and the studies that --study repeats: docs/simulation.md.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quartet_bus import catalogue as configured
from quartet_bus.config.load import load
from quartet_cli.commands import options
from quartet_cli.console import console
from quartet_cli.errors import CommandFailed
from quartet_cli.simulation import asked, report, tables
from quartet_cli.simulation.asked import Asked
from quartet_core.catalogue import Catalogue, builtin
from quartet_sim.simulation import compare, knee, studies, validation
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.spec import WrongFleet
from quartet_sim.simulation.workload import Workload
from quartet_sim.traces import WrongTrace

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_TRACE = "mooncake,rate=4"
Done = Callable[[str], None]


def add_to(commands: "Commands") -> None:
    """Declare ``simulate``."""
    fleets = "; ".join(f"{name} = {text}" for name, text in asked.FLEETS.items())
    parser = commands.add_parser(
        "simulate", help="compare policies on a trace and a simulated fleet", description=__doc__,
        epilog=f"Fleets by name: {fleets}.",
    )  # fmt: skip
    parser.add_argument(
        "--fleet", default="mixed", metavar="FLEET",
        help="a name below, or COUNT[..MOST]xCLASS[xTP]:MODEL[/PRECISION][@ROLE] with commas between [mixed]",
    )  # fmt: skip
    parser.add_argument(
        "--trace", action="append", metavar="TRACE[,KEY=VALUE]", default=[],
        help="azure-conv, azure-code, mooncake, sessions, servegen:SERVICE, or KIND:FILE; keys: start, length (seconds"
        " of the trace), rate (requests/s) or speed, model, most (tokens), after (seconds); may be given again"
        f" [{_TRACE}]",
    )  # fmt: skip
    parser.add_argument(
        "--slo", action="append", metavar="SLO", default=[],
        help="interactive (2 s, 50 ms), relaxed (10 s, 150 ms) or NAME:TTFT_MS:TPOT_MS[:SHARE]; may be given again"
        " [both]",
    )  # fmt: skip
    parser.add_argument("--policy", default="all", metavar="NAMES", help="policies with commas between, or all [all]")
    parser.add_argument("--seeds", default="0,1,2", metavar="NUMBERS", help="one run each [0,1,2]")
    parser.add_argument("--knee", metavar="PERCENTS", help="find the highest rate that keeps the SLO: e.g. 90,97")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", default=[], help="change a setting of the control plane"
    )
    parser.add_argument(
        "--fail", action="append", metavar="WORKER@AT_S+FOR_S", default=[], help="a worker dies and comes back"
    )
    parser.add_argument(
        "--autoscale", type=float, metavar="N", help="keep about N requests per worker, within COUNT..MOST"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        default=[],
        help="hardware and profiles of a quartet.toml",
    )
    parser.add_argument(
        "--jobs", type=options.positive, default=os.cpu_count() or 1, metavar="N", help="processes [all cores]"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures there; - is standard output, without tables"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots there")
    parser.add_argument(
        "--validate", action="store_true", help="compare the engine with measured serving, and print the errors"
    )
    parser.add_argument(
        "--study", metavar="NAME", help=f"print a study's tables as Markdown: {', '.join(studies.STUDIES)}, or all"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.validate:
            print(validation.report(validation.errors()))
            return 0
        if arguments.study is not None:
            return _study(arguments)
        return _compare(arguments)
    except (WrongFleet, WrongTrace) as error:
        raise CommandFailed(str(error), 2) from error


def _study(arguments: argparse.Namespace) -> int:
    names = list(studies.STUDIES) if arguments.study == "all" else [arguments.study]
    for name in names:
        if name not in studies.STUDIES:
            raise CommandFailed(f"--study {name}: no such study; there are: {', '.join(studies.STUDIES)}, all", 2)
    for name in names:
        with _Bar() as told:
            made = studies.STUDIES[name](arguments.jobs, told)
        print(studies.markdown(made))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    catalogue = configured.load(load(arguments.config)) if arguments.config else None
    wanted = _asked(arguments)
    for path in (arguments.json, arguments.html):
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise CommandFailed(f"{path}: there is no such directory", 2)
    if arguments.knee:
        return _knees(arguments, wanted, catalogue)
    cases = [
        Case(
            name=wanted.fleet_text, fleet=wanted.fleet, workload=wanted.workload, policy=policy, seed=seed,
            settings=wanted.settings,
        )
        for policy in wanted.policies
        for seed in wanted.seeds
    ]  # fmt: skip
    wanted.fleet.check(catalogue or builtin())
    with _Bar() as told:
        outcomes = compare.run_all(cases, arguments.jobs, lambda case, _: told(len(cases), case.policy), catalogue)
    groups: dict[str, list[Outcome]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        groups.setdefault(case.policy, []).append(outcome)
    _write_json(arguments.json, {"fleet": wanted.fleet_text, "outcomes": outcomes})
    if arguments.html is not None:
        arguments.html.write_text(
            report.page(
                groups,
                command=f"quartet {' '.join(sys.argv[1:])}",
                fleet=wanted.fleet_text,
                traces=[part.trace for part in wanted.workload.parts],
                slos=[f"{slo.name} ({slo.ttft_ms:g} ms, {slo.tpot_ms:g} ms)" for slo in wanted.workload.slos],
            ),
            encoding="utf-8",
        )
    if str(arguments.json) != "-":
        tables.show(console(), groups)
    return 0


def _knees(arguments: argparse.Namespace, wanted: Asked, catalogue: Catalogue | None) -> int:
    try:
        shares = tuple(float(text) / 100.0 for text in arguments.knee.split(","))
        if not all(0.0 < share <= 1.0 for share in shares):
            raise ValueError(arguments.knee)
    except ValueError:
        raise CommandFailed(f"--knee {arguments.knee}: percents above 0, up to 100, with commas between", 2) from None
    sought = [
        knee.Sought(
            Case(
                name=wanted.fleet_text, fleet=wanted.fleet, workload=wanted.workload, policy=policy, seed=seed,
                settings=wanted.settings,
            ),
            shares,
        )
        for policy in wanted.policies
        for seed in wanted.seeds
    ]  # fmt: skip
    found: dict[str, list[list[knee.Knee]]] = {policy: [] for policy in wanted.policies}
    in_order: list[list[knee.Knee]] = [[] for _ in sought]
    with _Bar() as told:
        for place, knees in compare.each(knee.find, sought, arguments.jobs, catalogue):
            in_order[place] = knees
            told(len(sought), sought[place].case.policy)
    for each, knees in zip(sought, in_order, strict=True):
        found[each.case.policy].append(knees)
    _write_json(arguments.json, {"fleet": wanted.fleet_text, "knees": found})
    if str(arguments.json) != "-":
        tables.show_knees(console(), found)
    return 0


def _asked(arguments: argparse.Namespace) -> Asked:
    fleet = asked.fleet(arguments.fleet)
    models = tuple(dict.fromkeys(group.model for group in fleet.groups if group.count))
    try:
        seeds = tuple(int(text) for text in arguments.seeds.split(","))
    except ValueError:
        raise CommandFailed(f"--seeds {arguments.seeds}: whole numbers with commas between", 2) from None
    slos = tuple(asked.slo(text) for text in arguments.slo) or tuple(asked.SLOS.values())
    parts = tuple(asked.part(text, models or ("",)) for text in arguments.trace or [_TRACE])
    return Asked(
        fleet=fleet,
        fleet_text=asked.FLEETS.get(arguments.fleet, arguments.fleet),
        workload=Workload(parts=parts, slos=slos),
        policies=asked.policies(arguments.policy),
        seeds=seeds,
        settings=asked.settings(arguments.set, arguments.fail, arguments.autoscale),
    )


def _write_json(path: Path | None, figures: object) -> None:
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(figures)) + b"\n"
    if str(path) == "-":
        sys.stdout.buffer.write(text)
    else:
        path.write_bytes(text)


class _Bar:
    """A bar on standard error while that is a terminal; nothing at all elsewhere."""

    def __init__(self) -> None:
        screen = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=screen, disable=not screen.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("simulating", total=None)

    def __enter__(self) -> Callable[[int, str], None]:
        self._bar.start()
        return self._told

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _told(self, total: int, what: str) -> None:
        self._bar.update(self._task, total=total, advance=1, description=what)
