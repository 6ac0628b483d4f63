"""The beating child as a real process: datagrams on loopback multicast and unicast, and whom it follows into death."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from itertools import pairwise

import msgspec
import pytest

from quartet_agent.beats.child import Beater, BeatSettings
from quartet_agent.beats.process import ChildBeats
from quartet_agent.beats.shared import SharedWords
from quartet_bus.config.schema import FleetSection
from quartet_core import heartbeat, word
from quartet_core.heartbeat import BeatWorker, node_hash, node_key

ACCEPTING = word.ACCEPTING.mask


def receiver(group: str | None = None) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("127.0.0.1" if group is None else group, 0))
    if group is not None:
        member = struct.pack("4s4s", socket.inet_aton(group), socket.inet_aton("127.0.0.1"))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    sock.settimeout(10.0)
    return sock, sock.getsockname()[1]


def hear(sock: socket.socket, until, keys=(), tick=lambda: None) -> list[heartbeat.Beat]:
    """Beats as they come, up to and with the first for which ``until`` holds; ``tick`` shows that the agent runs."""
    beats = []
    sock.settimeout(0.05)
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        tick()
        with contextlib.suppress(TimeoutError):
            beats.append(heartbeat.decode(sock.recv(2048), keys))
            if until(beats[-1]):
                return beats
    raise AssertionError(f"{len(beats)} beats within 30 s, and not the one that is waited for")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float = 10.0) -> bool:
    until = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.parametrize("group", [None, "239.7.7.9"])
def test_beats_arrive_in_sequence_and_follow_the_words(group):
    sock, port = receiver(group)
    targets = (f"127.0.0.1:{port}",) if group is None else ()
    beats = ChildBeats(FleetSection(multicast_group=group or "239.7.7.9", port=port, targets=targets))
    beats.start("n1", 77)
    try:
        first = [BeatWorker(0, 11, 0x80001 | ACCEPTING), BeatWorker(1, 12, 5 | ACCEPTING)]
        beats.publish(first)
        heard = hear(sock, lambda beat: beat.workers == tuple(first), tick=beats.tick)
        beats.publish([BeatWorker(0, 11, 2 | ACCEPTING), first[1]])
        said_from = beats.sequence + 1
        heard += hear(sock, lambda beat: beat.sequence >= said_from + 200, tick=beats.tick)
    finally:
        beats.stop()
        sock.close()
    assert [beat.sequence for beat in heard] == list(range(heard[0].sequence, heard[0].sequence + len(heard)))
    assert {(beat.node, beat.incarnation) for beat in heard} == {(node_hash("n1"), 77)}
    assert all(earlier.emit_ns < later.emit_ns for earlier, later in pairwise(heard))
    # what was published before the sequence was read is in every beat from then on
    assert all(beat.workers[0].word == 2 | ACCEPTING for beat in heard if beat.sequence >= said_from)
    unaccepting = [
        (worker.ordinal, worker.incarnation, worker.word & ~ACCEPTING) for beat in heard for worker in beat.workers[1:]
    ]
    assert set(unaccepting) == {(1, 12, 5)}  # before the first tick is seen, beats may not say that it accepts


def test_with_a_master_key_every_beat_carries_the_nodes_tag():
    sock, port = receiver()
    master = bytes(range(32))
    beats = ChildBeats(FleetSection(port=port, targets=(f"127.0.0.1:{port}",), master_keys=(master.hex(), "00" * 32)))
    beats.start("n1", 1)
    try:
        heard = hear(sock, lambda beat: beat.sequence > 20, keys=[node_key(master, "n1")], tick=beats.tick)
    finally:
        beats.stop()
        sock.close()
    assert len(heard) > 10


def test_stopping_ends_the_child_and_a_child_that_was_killed_is_replaced():
    sock, port = receiver()
    beats = ChildBeats(FleetSection(port=port, targets=(f"127.0.0.1:{port}",)))
    beats.start("n1", 1)
    try:
        hear(sock, lambda beat: beat.sequence > 5, tick=beats.tick)
        first = beats.pid
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        before = beats.sequence
        until = time.monotonic() + 10
        while beats.trouble == 0 and time.monotonic() < until:
            beats.tick()
            time.sleep(0.05)
        assert beats.pid != first
        heard = hear(sock, lambda beat: beat.sequence > before + 5, tick=beats.tick)
        assert heard[-1].sequence > before  # it goes on counting: to collectors it is the same node
    finally:
        second = beats.pid
        beats.stop()
        sock.close()
    assert gone(second)


PARENT = """
import os, sys, time
from quartet_agent.beats.process import ChildBeats
from quartet_bus.config.schema import FleetSection

beats = ChildBeats(FleetSection(targets=(sys.argv[1],)))
beats.start("n1", 1)
print(beats.pid, flush=True)
while True:
    beats.tick()
    time.sleep(0.02)
"""


def test_the_child_dies_with_its_parent_even_if_that_is_killed():
    sock, port = receiver()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    hear(sock, lambda beat: beat.sequence > 5)
    parent.kill()
    parent.wait()
    assert gone(child)
    parent.stdout.close()
    sock.close()


def test_a_target_that_cannot_be_resolved_is_one_line_and_exit_code_1():
    fd = SharedWords.create()
    settings = BeatSettings(fd, os.getpid(), "n1", 1, 500, "239.7.7.9", 1, "127.0.0.1", 0, ("no such host:1",))
    child = subprocess.run(
        [sys.executable, "-m", "quartet_agent.beats"],
        input=msgspec.json.encode(settings) + b"\n",
        pass_fds=(fd,),
        capture_output=True,
        timeout=30,
    )
    os.close(fd)
    assert child.returncode == 1
    assert len(child.stderr.splitlines()) == 1


@pytest.fixture
def beater():
    """A beater with the time in the test's hands."""
    sock, port = receiver()
    fd = SharedWords.create()
    words, own = SharedWords(fd), SharedWords(fd)
    settings = BeatSettings(fd, os.getpid(), "n1", 1, 500, "", port, "", 0, (f"127.0.0.1:{port}",))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    yield Beater(settings, own, sender), words, sock
    for thing in (sender, sock, words, own):
        thing.close()
    os.close(fd)


def test_an_agent_that_hangs_is_not_said_to_accept_and_then_not_beaten_for(beater):
    beater, words, sock = beater
    words.write([BeatWorker(0, 1, 7 | ACCEPTING)])
    words.write_tick(10**9)
    said = [
        (age_ms, heartbeat.decode(sock.recv(2048)).workers[0].word & ACCEPTING > 0)
        for age_ms in (0, 249, 250, 999, 1000, 5000)
        if beater.beat(10**9 + age_ms * 10**6)
    ]
    assert said == [(0, True), (249, True), (250, False), (999, False)]
    words.write_tick(10**10)
    assert beater.beat(10**10)
    beat = heartbeat.decode(sock.recv(2048))
    assert (beat.sequence, beat.workers[0].word) == (5, 7 | ACCEPTING)
    assert (words.sent, words.failed) == (5, 0)


def test_a_beat_that_the_kernel_does_not_take_is_counted_and_the_next_one_goes_on(beater):
    beater, words, _ = beater
    words.write_tick(10**9)
    beater._sock.close()
    assert beater.beat(10**9)
    assert beater.beat(10**9)
    assert (words.sent, words.failed) == (0, 2)
