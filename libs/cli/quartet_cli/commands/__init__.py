"""The subcommands: each module has ``add_to(commands)``, and sets ``run(arguments) -> exit code``."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """What ``add_subparsers`` returns; argparse has no public name for it."""
