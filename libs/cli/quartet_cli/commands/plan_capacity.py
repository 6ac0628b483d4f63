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
from quartet_sim.simulation.spec import INTERACTIVE, RELAXED, Slo
from quartet_sim.simulation.workload import Part, Workload

if TYPE_CHECKING:
    from quartet_cli.commands import Commands


def add_to(commands: "Commands") -> None:
    """Declare ``plan capacity``."""
    parser = commands.add_parser("capacity", help="the cheapest mix of cards for a trace", description=__doc__)
    parser.add_argument(
        "--trace", default="mooncake", help="azure-conv, azure-code, mooncake, …, or KIND:FILE [mooncake]"
    )
    parser.add_argument("--start", type=float, default=0.0, metavar="S", help="where in the trace to begin [0]")
    parser.add_argument("--length", type=float, default=600.0, metavar="S", help="how much of it to take [600]")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as the trace was [1]")
    pace.add_argument("--rate", type=float, default=0.0, metavar="PER_S", help="as fast as gives this mean rate")
    parser.add_argument(
        "--model", action="append", default=[], metavar="MODEL[=WEIGHT]",
        help="who is asked; may be given again [llama-3.1-8b]",
    )  # fmt: skip
    parser.add_argument(
        "--slo", action="append", default=[], metavar="NAME:TTFT_MS:TPOT_MS[:SHARE]",
        help="a class of service; may be given again [interactive:2000:50:0.5 relaxed:10000:150:0.5]",
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

    wish = capacity_answer.Wish(
        catalogue=catalogue_with(arguments.catalogue),
        workload=_workload(arguments),
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
    except ValueError as error:
        raise CommandFailed(str(error), 2) from error
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    else:
        capacity_screen.show(console(), answer)
    return 0 if answer.mix is not None else 1


def _workload(arguments: argparse.Namespace) -> Workload:
    for name in ("length", "speed", "window"):
        if not getattr(arguments, name) > 0:
            raise CommandFailed(f"--{name} {getattr(arguments, name):g} is not above 0", 2)
    if arguments.start < 0 or arguments.rate < 0:
        raise CommandFailed("--start and --rate must not be below 0", 2)
    if not 0 < arguments.within <= 1:
        raise CommandFailed(f"--within {arguments.within:g} is not above 0 and at most 1", 2)
    if not 0 < arguments.peak <= 100:
        raise CommandFailed(f"--peak {arguments.peak:g} is not above 0 and at most 100", 2)
    if arguments.budget is not None and not arguments.budget > 0:
        raise CommandFailed(f"--budget {arguments.budget:g} is not above 0", 2)
    models = tuple(_model(text) for text in arguments.model) or (("llama-3.1-8b", 1.0),)
    part = Part(
        trace=arguments.trace,
        start_s=arguments.start,
        length_s=arguments.length,
        speed=arguments.speed,
        rate_per_s=arguments.rate,
        models=models,
    )
    return Workload(parts=(part,), slos=tuple(_slo(text) for text in arguments.slo) or (INTERACTIVE, RELAXED))


def _model(text: str) -> tuple[str, float]:
    name, equals, weight = text.partition("=")
    return name, _number(weight, f"--model {text!r}", "MODEL[=WEIGHT]") if equals else 1.0


def _slo(text: str) -> Slo:
    grammar = "NAME:TTFT_MS:TPOT_MS[:SHARE], numbers above 0"
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise CommandFailed(f"--slo {text!r}: it is {grammar}", 2)
    return Slo(parts[0], *(_number(part, f"--slo {text!r}", grammar) for part in parts[1:]))


def _stock(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = part.strip().partition("=")
        if not equals or not count.isdecimal() or not name:
            raise CommandFailed(f"--stock {part.strip()!r}: it is CLASS=CARDS, e.g. H100_SXM5=8", 2)
        found[name] = int(count)
    return found


def _number(text: str, what: str, grammar: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise CommandFailed(f"{what}: it is {grammar}", 2)
    return number
