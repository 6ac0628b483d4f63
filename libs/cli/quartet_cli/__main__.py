"""``quartet``: the command. Every subcommand is a module of ``quartet_cli.commands``."""

import argparse
import os
import sys

import grpc

from quartet_bus import logs
from quartet_bus.bus import BusError
from quartet_bus.client import InferError
from quartet_bus.config.load import ConfigError
from quartet_cli.commands import (
    demo,
    detect,
    doctor,
    dryrun,
    explain,
    fleet,
    kv,
    plan,
    policy,
    publish,
    ring,
    simulate,
    telemetry,
    up,
    watch,
)
from quartet_cli.errors import CommandFailed


def main(argv: list[str] | None = None) -> None:
    """Parse, run, and exit: 0 done, 1 it failed, 2 it was asked wrongly, 128 + n ended by signal n."""
    parser = argparse.ArgumentParser(prog="quartet", description="Runs and asks a Quartet fleet.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (
        demo, up, fleet, doctor, telemetry, kv, policy, dryrun, explain, watch, publish, ring, detect, simulate, plan,
    ):  # fmt: skip
        command.add_to(commands)
    arguments = parser.parse_args(argv)
    logs.configure("error", service="quartet", instance="cli")
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        code = _failed(error, 2)
    except CommandFailed as error:
        code = _failed(error, error.code)
    except (BusError, InferError) as error:
        code = _failed(error, 1)
    except grpc.RpcError as error:
        code = _failed(getattr(error, "details", lambda: "")() or error, 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Whoever read us has read enough; without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _failed(error: object, code: int) -> int:
    print(f"quartet: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
