"""Multicast on an interface named as in ``[fleet] interface``: an address, a name, or "" for the system's choice.

A name is what fits a whole fleet: the same line of configuration holds on every host, where an address does not.
"""

import socket
import struct

_REQUEST = struct.Struct("@4s4si")
"""``struct ip_mreqn``: group, address of the interface, index of the interface."""


def outgoing(interface: str) -> bytes:
    """The value of ``IP_MULTICAST_IF``. Raises ``OSError`` for an interface that this host has not."""
    return _request("0.0.0.0", interface)


def membership(group: str, interface: str) -> bytes:
    """The value of ``IP_ADD_MEMBERSHIP``. Raises ``OSError`` for an interface that this host has not."""
    return _request(group, interface)


def _request(group: str, interface: str) -> bytes:
    address, index = "0.0.0.0", 0
    if interface:
        try:
            socket.inet_aton(interface)
            address = interface
        except OSError:
            index = _index(interface)
    return _REQUEST.pack(socket.inet_aton(group), socket.inet_aton(address), index)


def _index(interface: str) -> int:
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise OSError(f"no interface {interface!r} on this host; it has: {known}") from None
