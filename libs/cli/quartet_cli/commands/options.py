"""Options that several commands share."""

import argparse
from pathlib import Path

from quartet_bus.config.schema import Config
from quartet_cli.fleet.layout import FleetOptions

_DEFAULTS = Config()
DEFAULT_TENANT = _DEFAULTS.gateway.anonymous_tenant


def add_fleet(parser: argparse.ArgumentParser, *, ports: str) -> None:
    """How a fleet is started; ``ports`` is what is taken when nothing is said."""
    parser.add_argument(
        "--ports",
        choices=("default", "any"),
        default=ports,
        help=f"listen on the usual ports or any free ones [{ports}]",
    )
    parser.add_argument("--nats", metavar="URL", default="", help="use this broker, and start none")
    parser.add_argument("--routers", type=positive, default=1, metavar="N", help="router replicas [1]")
    parser.add_argument("--gateways", type=positive, default=1, metavar="N", help="gateway processes on one port [1]")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="a new directory for logs and configuration")
    parser.add_argument("--keep", action="store_true", help="leave that directory behind")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="change the fleet's configuration; may be given again",
    )  # fmt: skip


def fleet_options(arguments: argparse.Namespace, *, policy: str = "") -> FleetOptions:
    """What ``add_fleet``'s options say."""
    return FleetOptions(
        directory=arguments.dir,
        keep=arguments.keep,
        nats_url=arguments.nats,
        ports=arguments.ports,
        routers=arguments.routers,
        gateways=arguments.gateways,
        policy=policy or _DEFAULTS.router.policy,
        configs=tuple(arguments.config),
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    """Where the admin is, and how to answer."""
    address = _DEFAULTS.admin.grpc
    parser.add_argument("--admin", metavar="HOST:PORT", default=address, help=f"the admin's gRPC door [{address}]")
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def add_coordinator(parser: argparse.ArgumentParser) -> None:
    """Where the active KV coordinator is, and how to answer."""
    address = _DEFAULTS.kv.grpc
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", default=address, help=f"the coordinator's gRPC door [{address}]"
    )
    parser.add_argument("--json", action="store_true", help="answer as JSON")


def add_nats(parser: argparse.ArgumentParser) -> None:
    """Where the broker is."""
    url = _DEFAULTS.nats.url
    parser.add_argument("--nats", metavar="URL", default=url, help=f"the broker [{url}]")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    return number
