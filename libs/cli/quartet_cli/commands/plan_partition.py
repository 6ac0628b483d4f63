"""``quartet plan partition``: cut a model into pipeline stages over unlike cards, exactly, and say what binds.

Prints the stages, what stands in the way of a better cut, other choices, and settings to paste for the engine.
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
from quartet_cli.plans import partition_screen
from quartet_cli.plans.answers import NoPlacement, WrongCurrent
from quartet_cli.plans.catalogue import catalogue_with
from quartet_core.catalogue import UnknownProfile
from quartet_sim.partition import precision
from quartet_sim.partition.engines import ENGINES
from quartet_sim.partition.machines import Rdma, WrongMachines, decode_nodes, parse_nodes, pools_of
from quartet_sim.partition.moves import STORE_GB_PER_S
from quartet_sim.partition.placement import Limits, Placement
from quartet_sim.partition.precision import lesser
from quartet_sim.partition.question import Question, TooManyWays
from quartet_sim.partition.shape import UnknownShape, shape_of
from quartet_sim.partition.timing import Workload

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_KV_BYTES = {"bf16": 2, "fp8": 1}


def add_to(commands: "Commands") -> None:
    """Declare ``plan partition``."""
    parser = commands.add_parser("partition", help="cut a model over unlike cards", description=__doc__)
    parser.add_argument("model", help="a model of the catalogue")
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument("--gpus", metavar="CARDS", help="1xH100_SXM5,2xL40S_PCIE: ',' between nodes, '+' within one")
    machines.add_argument("--machines", type=Path, metavar="FILE", help="nodes as TOML ([[nodes]], docs/planning.md)")
    parser.add_argument("--network", choices=("roce", "ib", "tcp"), default="roce", help="between --gpus' nodes [roce]")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="keep to what it can run [vllm]")
    for name, default, what in (
        ("prompt", 1024, "mean prompt tokens"),
        ("output", 256, "mean answer tokens"),
        ("concurrency", 16, "requests under way at a time"),
        ("max-model-len", 8192, "longest sequence"),
    ):
        parser.add_argument(
            f"--{name}", type=options.positive, default=default, metavar="N", help=f"{what} [{default}]"
        )
    parser.add_argument("--precisions", default="bf16,fp8,int4", help="that may be used [bf16,fp8,int4]")
    parser.add_argument(
        "--quality-budget", type=float, default=1.0, metavar="PCT", help="quality that may be lost, in %% [1]"
    )
    parser.add_argument(
        "--loss", action="append", default=[], metavar="PRECISION=PCT",
        help="quality lost when all of this model is quantized so; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--int4-on", metavar="CLASS,...", help="classes on which int4 is in place [all but the largest, newest]"
    )
    parser.add_argument("--kv-cache", choices=tuple(_KV_BYTES), default="bf16", help="KV precision [bf16]")
    parser.add_argument(
        "--memory-utilisation", type=float, default=0.9, metavar="SHARE", help="of a card, for the engine [0.9]"
    )
    parser.add_argument("--most-stages", type=options.positive, default=16, metavar="N", help="[16]")
    parser.add_argument("--catalogue", type=Path, metavar="FILE", help="[hardware.*] and [models.*] tables to add")
    parser.add_argument("--from", dest="current", type=Path, metavar="FILE", help="JSON of the placement that is now")
    parser.add_argument(
        "--store-gb-per-s", type=float, default=STORE_GB_PER_S, metavar="GB/S",
        help=f"weights from the store, for --from [{STORE_GB_PER_S:g}]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="answer as JSON, which --from reads")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if find_spec("numpy") is None:
        raise CommandFailed("cutting a model needs NumPy: pip install 'quartet-cli[plan]'")
    from quartet_cli.plans import partition_answer  # late, since it needs NumPy, which is optional

    question = _question(arguments)
    current = None if arguments.current is None else _read(arguments.current)
    try:
        answer = partition_answer.answer(question, current, arguments.store_gb_per_s)
    except (TooManyWays, WrongCurrent) as error:
        raise CommandFailed(str(error), 2) from error
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    elif isinstance(answer, NoPlacement):
        print(f"{question.shape.model} does not fit these cards.", file=sys.stderr)
        for reason in answer.obstacles:
            print(f"  {reason.text}", file=sys.stderr)
    else:
        partition_screen.show(console(), answer)
    return 1 if isinstance(answer, NoPlacement) else 0


def _question(arguments: argparse.Namespace) -> Question:
    """Raises ``CommandFailed`` with code 2 for whatever was asked wrongly."""
    catalogue = catalogue_with(arguments.catalogue)
    try:
        rdma: Rdma = "" if arguments.network == "tcp" else arguments.network
        nodes = decode_nodes(_text(arguments.machines)) if arguments.machines else parse_nodes(arguments.gpus, rdma)
        pools = pools_of(nodes, catalogue)
        shape = shape_of(catalogue.model(arguments.model))
        table = precision.builtin().with_losses(arguments.model, _losses(arguments.loss))
        work = Workload(
            prompt_tokens=arguments.prompt,
            output_tokens=arguments.output,
            concurrency=arguments.concurrency,
            max_model_len=arguments.max_model_len,
        )
    except (WrongMachines, UnknownProfile, UnknownShape, ValueError) as error:
        raise CommandFailed(str(error), 2) from error
    if work.max_model_len > catalogue.model(arguments.model).max_context:
        longest = catalogue.model(arguments.model).max_context
        raise CommandFailed(f"--max-model-len {work.max_model_len}: {arguments.model} reads at most {longest}", 2)
    classes = {pool.hardware.name: pool.hardware for pool in pools}
    precisions = tuple(dict.fromkeys(name.strip() for name in arguments.precisions.split(",")))
    for name in precisions:
        if name not in table.precisions:
            raise CommandFailed(f"--precisions: no {name!r}; one of {', '.join(table.precisions)}", 2)
    aggressive = lesser(classes) if arguments.int4_on is None else frozenset(arguments.int4_on.split(","))
    if unknown := aggressive - set(classes):
        raise CommandFailed(f"--int4-on: no {min(unknown)!r} among the cards; there are {', '.join(classes)}", 2)
    kv_bytes = _KV_BYTES[arguments.kv_cache]
    if kv_bytes == 1:
        for hardware in classes.values():
            if hardware.fp8_tflops is None:
                raise CommandFailed(f"--kv-cache fp8: {hardware.name} has no FP8; use bf16", 2)
    if not 0.1 <= arguments.memory_utilisation <= 1:
        raise CommandFailed(f"--memory-utilisation {arguments.memory_utilisation:g} is not from 0.1 to 1", 2)
    if not 0 <= arguments.quality_budget <= 100:
        raise CommandFailed(f"--quality-budget {arguments.quality_budget:g} is not from 0 to 100 %", 2)
    if not arguments.store_gb_per_s > 0:
        raise CommandFailed(f"--store-gb-per-s {arguments.store_gb_per_s:g} is not above 0", 2)
    return Question(
        shape=shape,
        pools=pools,
        work=work,
        table=table,
        rules=ENGINES[arguments.engine],
        limits=Limits(
            kv_bytes_per_element=kv_bytes,
            utilisation=arguments.memory_utilisation,
            budget_hundredths=round(arguments.quality_budget * 100),
            most_stages=arguments.most_stages,
        ),
        precisions=precisions,
        aggressive_on=aggressive,
    )


def _losses(given: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ValueError(f"--loss {text!r}: it is PRECISION=PCT, e.g. fp8=0.2") from None
        if not equals:
            raise ValueError(f"--loss {text!r}: it is PRECISION=PCT, e.g. fp8=0.2")
    return found


def _read(path: Path) -> Placement:
    try:
        return msgspec.json.decode(_text(path), type=_Saved).placement
    except msgspec.DecodeError as error:
        raise CommandFailed(f"--from {path}: {error}; write it with quartet plan partition … --json", 2) from error


class _Saved(msgspec.Struct):
    """The part of an answer that ``--from`` reads."""

    placement: Placement


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{path}: {error}", 2) from error
