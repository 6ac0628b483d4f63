"""``quartet plan``: what to buy for a demand, and how to cut a model over unlike cards. Nothing is started."""

import argparse
from typing import TYPE_CHECKING

from quartet_cli.commands import plan_accuracy, plan_capacity, plan_partition

if TYPE_CHECKING:
    from quartet_cli.commands import Commands


def add_to(commands: "Commands") -> None:
    """Declare ``plan`` and its own commands."""
    parser = commands.add_parser("plan", help="plan capacity, or partition a model", description=__doc__)
    plans: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(metavar="PLAN", required=True)
    for command in (plan_capacity, plan_partition, plan_accuracy):
        command.add_to(plans)
