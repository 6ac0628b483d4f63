"""``quartet plan capacity``: the cheapest mix of cards that serves a trace within its targets.

An integer program finds mixes, and the simulator, with the product's own routing, says which of them really does.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quartet_cli.commands import options
from quartet_cli.console import console
from quartet_cli.errors import CommandFailed
from quartet_cli.plans.catalogue import catalogue_with
from quartet_cli.simulation import asked
from quartet_core.catalogue import Catalogue
from quartet_sim.simulation.workload import Workload
from quartet_sim.traces import WrongTrace

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_TRACE = "mooncake,rate=4"
_MODEL = "llama-3.1-8b"


def add_to(commands: "Commands") -> None:
    """Declare ``plan capacity``."""
    parser = commands.add_parser("capacity", help="the cheapest mix of cards for a trace", description=__doc__)
    parser.add_argument(
        "--trace", action="append", metavar="TRACE[,KEY=VALUE]", default=[],
        help="as of quartet simulate: azure-conv, azure-code, mooncake, …, or KIND:FILE; keys: start, length, rate or"
        f" speed, model, most; may be given again [{_TRACE}]",
    )  # fmt: skip
    parser.add_argument(
        "--slo", action="append", metavar="SLO", default=[],
        help="interactive (2 s, 50 ms), relaxed (10 s, 150 ms) or NAME:TTFT_MS:TPOT_MS[:SHARE]; may be repeated [both]",
    )  # fmt: skip
    parser.add_argument(
        "--stock", required=True, metavar="CLASS=CARDS,...", help="what can be had, e.g. H100_SXM5=8,L40S_PCIE=24"
    )
    parser.add_argument("--budget", type=float, metavar="USD", help="per hour; without it whatever it takes")
    parser.add_argument("--within", type=float, default=0.9, metavar="SHARE", help="of each model's requests [0.9]")
    parser.add_argument("--precisions", default="fp8,bf16", help="of weights [fp8,bf16]")
    parser.add_argument(
        "--peak", type=float, default=95.0, metavar="PCT", help="percentile of windows to plan for [95]"
    )
    parser.add_argument("--window", type=float, default=60.0, metavar="S", help="of the peak [60]")
    parser.add_argument(
        "--runs", type=options.not_negative, default=12, metavar="N", help="simulations at most; 0: none [12]"
    )
    parser.add_argument("--alternatives", type=options.not_negative, default=3, metavar="N", help="next best mixes [3]")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, targets and the simulator [0]")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="[hardware.*] and [models.*] tables to add")
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if find_spec("scipy") is None:
        raise CommandFailed("planning capacity needs SciPy: pip install 'quartet-cli[plan]'")
    # Late, since they need SciPy, which is optional.
    from quartet_cli.plans import capacity_answer, capacity_screen

    _check(arguments)
    catalogue = catalogue_with(arguments.catalogue)
    wish = capacity_answer.Wish(
        catalogue=catalogue,
        workload=_workload(arguments, catalogue),
        stock=_stock(arguments.stock),
        budget_per_hour=arguments.budget,
        within=arguments.within,
        precisions=tuple(name.strip() for name in arguments.precisions.split(",")),
        peak_percentile=arguments.peak,
        window_s=arguments.window,
        most_runs=arguments.runs,
        alternatives=arguments.alternatives,
        seed=arguments.seed,
    )
    try:
        answer = capacity_answer.answer(wish, told=lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, WrongTrace) as error:
        raise CommandFailed(str(error), 2) from error
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    else:
        capacity_screen.show(console(), answer)
    return 0 if answer.mix is not None else 1


def _workload(arguments: argparse.Namespace, catalogue: Catalogue) -> Workload:
    """Raises ``CommandFailed``."""
    timed = dict.fromkeys(model for _, model, _, _ in catalogue.profiles)
    models = tuple(sorted(timed, key=lambda name: (name != _MODEL, name)))  # the first is asked where none is named
    return Workload(
        parts=tuple(asked.part(text, models) for text in arguments.trace or [_TRACE]),
        slos=tuple(asked.slo(text) for text in arguments.slo) or tuple(asked.SLOS.values()),
    )


def _check(arguments: argparse.Namespace) -> None:
    """Raises ``CommandFailed`` for a number out of its range."""
    if not 0 < arguments.within <= 1:
        raise CommandFailed(f"--within {arguments.within:g} is not above 0 and at most 1", 2)
    if not 0 < arguments.peak <= 100:
        raise CommandFailed(f"--peak {arguments.peak:g} is not above 0 and at most 100", 2)
    if not arguments.window > 0:
        raise CommandFailed(f"--window {arguments.window:g} is not above 0", 2)
    if arguments.budget is not None and not arguments.budget > 0:
        raise CommandFailed(f"--budget {arguments.budget:g} is not above 0", 2)


def _stock(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = part.strip().partition("=")
        if not equals or not count.isdecimal() or not name:
            raise CommandFailed(f"--stock {part.strip()!r}: it is CLASS=CARDS, e.g. H100_SXM5=8", 2)
        found[name] = int(count)
    return found
