import socket
from collections.abc import Callable

import pytest

from quartet_bus.config.schema import FleetSection
from quartet_core.heartbeat import Beat, BeatWorker, encode
from quartet_heartbeat_collector import receive
from quartet_heartbeat_collector.receive import CannotReceive, Receiver


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _multicast(port: int) -> Callable[[bytes], None]:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    return lambda data: sender.sendto(data, ("239.7.7.7", port)) and None


def _beat(sequence: int, workers: int) -> bytes:
    return encode(Beat(5, 6, sequence, 7, tuple(BeatWorker(ordinal, 1, sequence) for ordinal in range(workers))))


@pytest.fixture(params=["recvmmsg", "recv_into"])
def way(request, monkeypatch):
    """Both ways of reading: the system call for whole batches, and the loop where it does not exist."""
    if request.param == "recv_into":
        monkeypatch.setattr(receive, "_recvmmsg", None)
    elif receive._recvmmsg is None:
        pytest.skip("this system has no recvmmsg")


@pytest.mark.usefixtures("way")
def test_multicast_datagrams_of_all_sizes_arrive_whole_and_in_order():
    port = _free_port()
    receiver, send = Receiver(FleetSection(port=port)), _multicast(port)
    sent = [_beat(number, number % 256) for number in range(600)]
    got = []
    try:
        for first in range(0, len(sent), 50):
            for data in sent[first : first + 50]:
                send(data)
            receiver.drain(lambda batch: got.extend(bytes(batch.datagram(at)) for at in range(batch.nodes.size)))
    finally:
        receiver.close()
    assert got == sent


@pytest.mark.usefixtures("way")
def test_what_is_too_long_for_a_beat_is_counted_and_spoils_nothing():
    port = _free_port()
    receiver, send = Receiver(FleetSection(port=port)), _multicast(port)
    batches = []
    try:
        for data in (_beat(1, 8), _beat(2, 255) + b"x", bytes(9000), b"", _beat(3, 8)):
            send(data)
        total = receiver.drain(lambda batch: batches.append((batch.sequences.tolist(), dict(batch.malformed))))
    finally:
        receiver.close()
    assert total == 5
    (batch,) = batches
    assert batch[0] == [1, 3]
    assert sum(batch[1].values()) == 3


def test_targets_replace_multicast_by_unicast():
    port = _free_port()
    receiver = Receiver(FleetSection(port=port, targets=(f"127.0.0.1:{port}",)))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(_beat(1, 3), ("127.0.0.1", port))
        _multicast(port)(_beat(2, 3))
        sequences = []
        receiver.drain(lambda batch: sequences.extend(batch.sequences.tolist()))
        assert sequences == [1]
        with pytest.raises(CannotReceive, match="in use"):
            Receiver(FleetSection(port=port, targets=(f"127.0.0.1:{port}",)))
    finally:
        receiver.close()


def test_two_collectors_of_one_host_each_hear_every_beat():
    port = _free_port()
    receivers, send = [Receiver(FleetSection(port=port)) for _ in range(2)], _multicast(port)
    try:
        send(_beat(1, 3))
        assert [receiver.drain(lambda batch: None) for receiver in receivers] == [1, 1]
    finally:
        for receiver in receivers:
            receiver.close()


@pytest.mark.skipif(not receive._LINUX, reason="only Linux tells what it dropped")
def test_what_the_kernel_drops_is_known_to_the_datagram():
    port = _free_port()
    receiver, send = Receiver(FleetSection(port=port, receive_buffer_bytes=20_000)), _multicast(port)
    try:
        for number in range(500):
            send(_beat(number, 8))
        received = receiver.drain(lambda batch: None)
        assert 0 < received < 500
        assert receiver.kernel_drops() == 500 - received
    finally:
        receiver.close()


@pytest.mark.skipif(not receive._LINUX, reason="only Linux tells what it dropped")
def test_the_default_buffer_keeps_fifteen_thousand_beats_while_nobody_reads():
    port = _free_port()
    fleet = FleetSection(port=port)
    receiver, send = Receiver(fleet), _multicast(port)
    try:
        if receiver.buffer_bytes < fleet.receive_buffer_bytes:
            pytest.skip(receiver.warning)
        for number in range(15_000):
            send(_beat(number, 8))
        assert receiver.kernel_drops() == 0
        assert receiver.drain(lambda batch: None) == 15_000
    finally:
        receiver.close()


def test_a_receive_buffer_that_the_kernel_caps_is_one_clear_warning(monkeypatch):
    monkeypatch.setattr(receive, "_size_buffer", lambda heard, wanted_bytes: 212_992)
    receiver = Receiver(FleetSection(port=_free_port()))
    receiver.close()
    assert "net.core.rmem_max" in receiver.warning
    assert "212992 of the 8388608" in receiver.warning


def test_an_interface_this_host_does_not_have_is_one_clear_error():
    with pytest.raises(CannotReceive, match=r"interface 203\.0\.113\.9"):
        Receiver(FleetSection(port=_free_port(), interface="203.0.113.9"))
