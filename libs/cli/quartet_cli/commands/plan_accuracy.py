"""``quartet plan accuracy``: how far the stage times of ``plan partition`` are from the catalogue's profiles."""

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec

from quartet_cli.console import console, table
from quartet_core import catalogue
from quartet_sim.partition import precision
from quartet_sim.partition.accuracy import accuracy

if TYPE_CHECKING:
    from quartet_cli.commands import Commands


def add_to(commands: "Commands") -> None:
    """Declare ``plan accuracy``."""
    parser = commands.add_parser("accuracy", help="stage times against fitted profiles", description=__doc__)
    parser.add_argument("--json", action="store_true", help="answer as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    rows = accuracy(catalogue.builtin(), precision.builtin())
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        return 0
    made = table(
        "Computed over profiled, less 1",
        ("class", "model", "precision", "timed on"),
        ("TP", "decode step", "prefill"),
        caption="medians over batches 1 to 64 and contexts to 4k, prompts of 512 to 8k tokens",
    )
    for row in rows:
        cells = (row.hardware, row.model, row.precision, "today's kernels" if row.kernels else "an older engine")
        made.add_row(*cells, str(row.tp), f"{row.step_pct:+.0f} %", f"{row.prefill_pct:+.0f} %")
    console().print(made)
    return 0
