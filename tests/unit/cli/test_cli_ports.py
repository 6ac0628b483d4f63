import socket

import pytest

from quartet_cli.errors import PortTaken
from quartet_cli.fleet.ports import HOST, claim_tcp, claim_udp, free_tcp_ports, free_udp_port


def test_free_ports_are_different_and_can_be_bound():
    ports = free_tcp_ports(20)
    assert len(set(ports)) == 20
    assert [claim_tcp(port, "test") for port in ports] == ports


def test_a_listener_makes_its_port_taken_and_the_error_says_whose_it_would_have_been():
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"TCP port {port} \(the gateway\) is taken.*--ports any"):
            claim_tcp(port, "the gateway")
    assert claim_tcp(port, "the gateway") == port


def test_a_udp_port_is_taken_even_by_one_who_would_share_it():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", free_udp_port()))
        with pytest.raises(PortTaken, match="UDP"):
            claim_udp(other.getsockname()[1], "heartbeats")
