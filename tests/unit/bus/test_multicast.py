"""Interfaces by address, by name, and by the system's choice, on real sockets."""

import socket

import pytest

from quartet_bus.multicast import membership, outgoing

GROUP = "239.7.7.15"


@pytest.mark.parametrize("joined", ["127.0.0.1", "lo"])
@pytest.mark.parametrize("sent", ["127.0.0.1", "lo"])
def test_who_joins_on_an_interface_hears_what_leaves_by_it_however_it_is_named(joined, sent):
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.settimeout(10.0)
        receiver.bind((GROUP, 0))
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership(GROUP, joined))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, outgoing(sent))
        sender.sendto(b"beat", (GROUP, receiver.getsockname()[1]))
        assert receiver.recv(16) == b"beat"


def test_no_interface_leaves_the_choice_to_the_system():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, outgoing(""))
        assert sender.getsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, 4) == bytes(4)


def test_an_interface_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(OSError, match=r"no interface 'eth99' on this host; it has: .*lo"):
        membership(GROUP, "eth99")
