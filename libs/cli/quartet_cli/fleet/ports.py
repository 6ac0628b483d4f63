"""Ports of this machine: which are free, and whether one that is wanted is."""

import socket
from contextlib import ExitStack

from quartet_cli.errors import PortTaken

HOST = "127.0.0.1"


def free_tcp_ports(count: int) -> list[int]:
    """``count`` different TCP ports on which nobody listens right now.

    They are all held until the last is found, then let go: whoever binds them next should do so soon.
    """
    return _free(count, socket.SOCK_STREAM)


def free_udp_port() -> int:
    """A UDP port that nobody has bound right now."""
    return _free(1, socket.SOCK_DGRAM)[0]


def claim_tcp(port: int, whose: str) -> int:
    """``port``, if it is free. Raises ``PortTaken``, naming ``whose`` it would be."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # A port whose last connections only linger is free to a listener, as all services set this option, too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _claim(probe, HOST, port, whose, "TCP")


def claim_udp(port: int, whose: str) -> int:
    """``port``, if nobody has bound it, not even to share it. Raises ``PortTaken``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _claim(probe, "", port, whose, "UDP")


def _claim(probe: socket.socket, host: str, port: int, whose: str, protocol: str) -> int:
    try:
        probe.bind((host, port))
    except OSError:
        raise PortTaken(port, whose, protocol) from None
    return port


def _free(count: int, kind: socket.SocketKind) -> list[int]:
    with ExitStack() as held:
        ports: list[int] = []
        for _ in range(count):
            probe = held.enter_context(socket.socket(socket.AF_INET, kind))
            probe.bind((HOST if kind is socket.SOCK_STREAM else "", 0))
            ports.append(probe.getsockname()[1])
        return ports
