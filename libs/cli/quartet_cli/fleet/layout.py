"""What the demo fleet consists of: which processes, with which configuration, behind which doors."""

import json
from importlib import resources
from pathlib import Path
from typing import Literal

from msgspec import Struct

from quartet_bus.config.schema import Config
from quartet_cli.fleet.ports import HOST, claim_tcp, claim_udp, free_tcp_ports, free_udp_port

NODES = ("h100-0", "l40s-0", "l40s-1")
"""Three nodes of eight cards; what they run stands in ``config/<node>.toml``."""

_DEFAULTS = Config()


class FleetOptions(Struct, frozen=True, kw_only=True):
    """How a fleet is started. Several ``gateways`` listen on one port.

    ``directory`` None takes a fresh one under ``.run``; ``keep`` leaves it there. ``nats_url`` "" starts a broker of
    our own. ``ports``: "default" are those of the configuration schema, "any" free ones. ``configs`` are files that
    change the fleet's own configuration.
    """

    directory: Path | None = None
    keep: bool = False
    nats_url: str = ""
    ports: Literal["default", "any"] = "default"
    routers: int = 1
    gateways: int = 1
    policy: str = _DEFAULTS.router.policy
    configs: tuple[Path, ...] = ()


class Doors(Struct, frozen=True, kw_only=True):
    """The TCP ports on which a fleet listens, and the UDP port of its beats.

    ``nats`` 0: the broker is not ours. ``http`` are those of /readyz and /metrics, one a process.
    """

    nats: int
    gateway: int
    admin: int
    coordinator: int
    predictor: int
    beats: int
    http: tuple[int, ...]

    @property
    def gateway_url(self) -> str:
        """Where OpenAI clients point to."""
        return f"http://{HOST}:{self.gateway}/v1"

    @property
    def admin_address(self) -> str:
        """The admin's gRPC door."""
        return f"{HOST}:{self.admin}"

    @property
    def coordinator_address(self) -> str:
        """The KV coordinator's gRPC door."""
        return f"{HOST}:{self.coordinator}"


class Part(Struct, frozen=True):
    """One process: its name in messages and of its log, its module, its own configuration, and its HTTP port."""

    name: str
    module: str
    http_port: int
    configs: tuple[Path, ...] = ()


def open_doors(options: FleetOptions) -> Doors:
    """Ports for a new fleet. Raises ``PortTaken`` when a default one is not free."""
    own_broker = not options.nats_url
    # All in one go, so that none of them is found free twice.
    nats, gateway, admin, coordinator, predictor, *http = free_tcp_ports(5 + len(_modules(options)))
    if options.ports == "any":
        return Doors(
            nats=nats if own_broker else 0,
            gateway=gateway,
            admin=admin,
            coordinator=coordinator,
            predictor=predictor,
            beats=free_udp_port(),
            http=tuple(http),
        )
    return Doors(
        nats=claim_tcp(_port(_DEFAULTS.nats.url), "NATS") if own_broker else 0,
        gateway=claim_tcp(_port(_DEFAULTS.gateway.listen), "the gateway"),
        admin=claim_tcp(_port(_DEFAULTS.admin.grpc), "admin gRPC"),
        coordinator=claim_tcp(_port(_DEFAULTS.kv.grpc), "the KV coordinator's gRPC"),
        predictor=claim_tcp(_port(_DEFAULTS.prefetch.grpc), "the prefetch predictor's gRPC"),
        beats=claim_udp(_DEFAULTS.fleet.port, "heartbeats"),
        http=tuple(http),
    )


def parts_of(options: FleetOptions, doors: Doors) -> list[Part]:
    """Every process of the fleet but the broker."""
    parts: list[Part] = []
    for (name, module), port in zip(_modules(options), doors.http, strict=True):
        node = name.removeprefix("agent-")
        parts.append(Part(name, module, port, (shipped(node),) if module == "quartet_agent" else ()))
    return parts


def _modules(options: FleetOptions) -> list[tuple[str, str]]:
    gateways = ["gateway", *(f"gateway-{number}" for number in range(1, options.gateways))]
    return [
        ("collector", "quartet_heartbeat_collector"),
        *((f"router-{number}", "quartet_router") for number in range(options.routers)),
        ("predictor", "quartet_prefetch_predictor"),
        ("coordinator", "quartet_kv_coordinator"),
        ("admin", "quartet_admin"),
        *((name, "quartet_gateway") for name in gateways),
        *((f"agent-{node}", "quartet_agent") for node in NODES),
    ]


def here(doors: Doors, nats_url: str, directory: Path, options: FleetOptions) -> str:
    """The configuration of one run: addresses, ports, and the policy at start, as TOML."""
    tables: dict[str, dict[str, str | int | bool]] = {
        "nats": {"url": nats_url},
        "fleet": {"port": doors.beats, "ring_path": str(ring_path(directory))},
        # The default is left to whatever configuration was given.
        **({"router": {"policy": options.policy}} if options.policy != _DEFAULTS.router.policy else {}),
        "kv": {"grpc": f"{HOST}:{doors.coordinator}"},
        "prefetch": {"grpc": f"{HOST}:{doors.predictor}"},
        "gateway": {"listen": f"{HOST}:{doors.gateway}", "reuse_port": options.gateways > 1},
        "admin": {"grpc": f"{HOST}:{doors.admin}"},
    }
    # A JSON string is a TOML string, and so are integers and booleans.
    blocks = [
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])
        for name, table in tables.items()
    ]
    return "\n\n".join(blocks) + "\n"


def ring_path(directory: Path) -> Path:
    """Where the collector's ring lies."""
    return directory / "fleet.ring"


def shipped(name: str) -> Path:
    """A configuration file that comes with this command: ``fleet``, or a node's name."""
    return Path(str(resources.files("quartet_cli.fleet").joinpath("config", f"{name}.toml")))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
