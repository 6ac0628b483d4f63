"""What can be set about beats, on real sockets: TTL, interface, fan-out, keys that change; and what a pause does."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from quartet_agent.beats.child import BeatSettings
from quartet_agent.beats.process import ChildBeats
from quartet_agent.beats.shared import SharedWords
from quartet_agent.beats.targets import LookUp, has_names, look_up
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import FleetSection
from quartet_core import heartbeat
from quartet_core.heartbeat import BeatWorker, node_key

GROUP = "239.7.7.13"
INTERVAL_NS = 500_000
_IP_RECVTTL = 12
OLD, NEW = b"\x01" * 16, b"\x02" * 16


def receiver(group: str | None = None) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind((group or "127.0.0.1", 0))
    if group is not None:
        member = socket.inet_aton(group) + socket.inet_aton("127.0.0.1")
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    sock.settimeout(30.0)
    return sock, sock.getsockname()[1]


@pytest.fixture
def beating():
    """Starts beats, ticks as an agent's loop does (or they would end within a second), and stops them at the end."""
    started, over = [], threading.Event()

    def tick() -> None:
        while not over.wait(0.05):
            for beats in started:
                beats.tick()

    def start(**fleet) -> ChildBeats:
        beats = ChildBeats(FleetSection(**fleet))
        beats.start("n1", 1)
        started.append(beats)
        beats.publish([BeatWorker(0, 7, 5)])
        return beats

    ticking = threading.Thread(target=tick)
    ticking.start()
    yield start
    over.set()
    ticking.join()
    for beats in started:
        beats.stop()


def until(condition, tick=lambda: None) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "it did not come to that within 30 s"
        tick()
        time.sleep(0.01)


@pytest.mark.parametrize("interface", ["127.0.0.1", "lo"])
def test_multicast_leaves_by_the_interface_that_is_named_with_the_ttl_that_is_set(beating, interface):
    sock, port = receiver(GROUP)
    sock.setsockopt(socket.IPPROTO_IP, _IP_RECVTTL, 1)
    beating(multicast_group=GROUP, port=port, interface=interface, multicast_ttl=7)
    _, ancillary, _, _ = sock.recvmsg(2048, 64)  # it is a member on the loopback interface alone
    [(_, _, ttl)] = [entry for entry in ancillary if entry[1] == socket.IP_TTL]
    assert struct.unpack("i", ttl)[0] == 7
    sock.close()


def test_an_interface_that_is_not_there_stops_the_start_and_names_those_that_are(beating):
    with pytest.raises(
        ConfigError, match=r"fleet.interface = 'eth99': no interface 'eth99' on this host; it has: .*lo"
    ):
        beating(interface="eth99")


def test_each_beat_goes_to_all_targets_and_one_that_has_no_address_silences_nobody(beating):
    receivers = [receiver() for _ in range(3)]
    targets = tuple(f"127.0.0.1:{port}" for _, port in receivers)
    beats = beating(targets=("no-such-host.invalid:1", *targets))
    heard = [{heartbeat.decode(sock.recv(2048)).sequence for _ in range(50)} for sock, _ in receivers]
    assert all(numbers & heard[0] for numbers in heard)
    until(lambda: beats._words.sent >= 3 * 50)
    assert beats.trouble == 0
    for sock, _ in receivers:
        sock.close()


def test_names_are_looked_up_again_and_beats_follow_them_without_a_gap(beating):
    (first, first_port), (second, second_port) = receiver(), receiver()
    beats = beating(targets=(f"localhost:{first_port}",))
    heartbeat.decode(first.recv(2048))
    beats._look_up.addresses = [("127.0.0.1", second_port)]  # as if the name service had answered otherwise
    second.setblocking(False)
    heard: list[int] = []

    def listen() -> None:
        try:
            while True:
                heard.append(heartbeat.decode(second.recv(2048)).sequence)
        except BlockingIOError:
            pass

    until(lambda: len(heard) > 50, listen)
    first.setblocking(False)
    before = []
    try:
        while True:
            before.append(heartbeat.decode(first.recv(2048)).sequence)
    except BlockingIOError:
        pass
    assert heard[0] == before[-1] + 1
    first.close()
    second.close()


def test_what_is_looked_up_is_every_address_of_a_name_and_what_has_none_is_told():
    found, troubles = look_up(("localhost:7", "127.0.0.1:7", "127.0.0.2:7", "no-such-host.invalid:7", "127.0.0.1:x"))
    assert found == [("127.0.0.1", 7), ("127.0.0.2", 7)]
    assert [trouble.partition(": ")[0] for trouble in troubles] == ["no-such-host.invalid:7", "127.0.0.1:x"]
    assert (has_names(("127.0.0.1:7",)), has_names(("127.0.0.1:7", "collector:7"))) == (False, True)
    again = LookUp(("localhost:7",), interval_s=0.01)
    until(lambda: again.addresses == [("127.0.0.1", 7)])
    again.stop()


def test_a_key_that_changes_in_its_file_signs_the_next_beats_without_a_gap(beating, tmp_path):
    sock, port = receiver()
    file = tmp_path / "keys"
    file.write_text(OLD.hex())
    beats = beating(targets=(f"127.0.0.1:{port}",), master_keys_file=str(file))
    keys = {"old": node_key(OLD, "n1"), "new": node_key(NEW, "n1")}
    signed: list[tuple[int, str]] = []

    def listen() -> None:
        for _ in range(100):
            datagram = sock.recv(2048)
            [name] = [name for name, key in keys.items() if heartbeat.beat_tag(datagram, key) == datagram[32:40]]
            signed.append((heartbeat.decode(datagram).sequence, name))

    until(lambda: len(signed) > 20, listen)
    # as Kubernetes does with a secret: another file takes its place
    (tmp_path / "next").write_text(f"{NEW.hex()}\n{OLD.hex()}\n")
    (tmp_path / "next").replace(file)
    until(lambda: signed[-1][1] == "new", listen)
    numbers = [number for number, _ in signed]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [name for _, name in signed] == sorted((name for _, name in signed), reverse=True)  # old, then new

    file.write_text("not a key")
    until(lambda: beats._keys.trouble != "", listen)
    until(lambda: signed[-1][1] == "new", listen)
    assert "not a key" not in beats._keys.trouble

    # a child that is started again begins with the key of now
    os.kill(beats.pid, signal.SIGKILL)
    restarted = len(signed)
    sock.settimeout(0.05)

    def survive() -> None:
        with contextlib.suppress(TimeoutError):
            listen()

    until(lambda: beats.trouble > 0 and len(signed) > restarted + 20, survive)
    assert {name for _, name in signed[restarted:]} == {"new"}
    sock.close()


def test_after_a_pause_beats_come_in_their_slots_and_none_is_made_up_for(beating):
    sock, port = receiver()
    beats = beating(targets=(f"127.0.0.1:{port}",))
    until(lambda: beats.sequence > 200)
    os.kill(beats.pid, signal.SIGSTOP)
    time.sleep(0.2)
    skipped, stopped_at = beats.skipped, beats.sequence
    os.kill(beats.pid, signal.SIGCONT)
    until(lambda: beats.sequence > stopped_at + 1000)
    beats.stop()
    sock.setblocking(False)
    emitted = {}
    try:
        while True:
            beat = heartbeat.decode(sock.recv(2048))
            emitted[beat.sequence] = beat.emit_ns
    except BlockingIOError:
        pass
    sock.close()
    assert beats.skipped - skipped >= 0.2e9 / INTERVAL_NS * 0.9
    # Wherever one looks, there are no more beats than slots.
    times = [emitted[number] for number in sorted(emitted)]
    for first in range(len(times) - 20):
        slots = (times[first + 20] - times[first]) / INTERVAL_NS
        assert slots > 18, "a beat may be late, and the next one in time; more than that would be a burst"
    # And nothing drifts: beats and skipped slots together are the time that passed. Sleeping 500 us again and again
    # would lose a tenth of it; only the first and the last beat may be some slots late.
    span = (times[-1] - times[0]) / INTERVAL_NS
    assert abs(span - (len(times) - 1 + beats.skipped)) < 40


def without_sys_nice() -> None:
    """Before exec: even root's process is then without the right to be realtime. Others have not got it anyhow."""
    pr_capbset_drop, cap_sys_nice = 24, 23
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_sys_nice, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))


def test_realtime_that_cannot_be_had_is_one_line_where_it_is_asked_for():
    fd = SharedWords.create()
    settings = BeatSettings(
        fd, os.getpid(), "n1", 1, 500, GROUP, 7, "127.0.0.1", 0, ("127.0.0.1:1",), scheduling="realtime"
    )
    child = subprocess.run(
        [sys.executable, "-m", "quartet_agent.beats"],
        input=msgspec.json.encode(settings) + b"\n",
        pass_fds=(fd,), capture_output=True, timeout=30, preexec_fn=without_sys_nice,
    )  # fmt: skip
    os.close(fd)
    assert child.returncode == 1
    assert b"beats cannot be scheduled realtime" in child.stderr
    assert len(child.stderr.splitlines()) == 1


def with_a_realtime_limit_alone() -> None:
    resource.setrlimit(resource.RLIMIT_RTPRIO, (1, 1))
    pr_capbset_drop, cap_sys_nice = 24, 23
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_sys_nice, 0, 0, 0)


def test_a_realtime_limit_of_one_is_enough_to_be_realtime():
    limits = resource.getrlimit(resource.RLIMIT_RTPRIO)
    try:
        resource.setrlimit(resource.RLIMIT_RTPRIO, (1, max(1, limits[1])))
    except ValueError:
        pytest.skip("this process may not have a realtime limit")
    finally:
        resource.setrlimit(resource.RLIMIT_RTPRIO, limits)
    command = [sys.executable, "-c", "from quartet_agent.beats.child import *; print(schedule_realtime('realtime'))"]
    child = subprocess.run(command, capture_output=True, text=True, preexec_fn=with_a_realtime_limit_alone)
    assert (child.stdout, child.stderr) == ("True\n", "")


@pytest.mark.parametrize("scheduling", ["auto", "normal"])
def test_how_beats_are_scheduled_is_told(beating, scheduling):
    _, port = receiver()
    beats = beating(targets=(f"127.0.0.1:{port}",), beat_scheduling=scheduling)
    until(lambda: beats.sequence > 5)
    assert beats.realtime is (os.sched_getscheduler(beats.pid) == os.SCHED_RR)
    assert scheduling == "auto" or not beats.realtime
