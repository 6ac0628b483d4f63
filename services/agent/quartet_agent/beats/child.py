"""The beating child: sleeps, reads the shared words, sends one datagram; nothing else, so that nothing is in its way.

A thread of the agent would wait for the interpreter behind whatever the agent does, and manages a tenth of the rate.
The child also judges its parent: beats must not say that a hung agent accepts work.
"""

import ctypes
import os
import signal
import socket
import time
from typing import Final

import msgspec

from quartet_agent.beats.schedule import Schedule
from quartet_agent.beats.shared import SharedWords
from quartet_core.heartbeat import BeatWriter, node_hash
from quartet_core.word import ACCEPTING

PARENT_SLOW_NS: Final = 250_000_000
"""An agent whose loop has not run for so long is not said to accept work."""
PARENT_HUNG_NS: Final = 1_000_000_000
"""An agent whose loop has not run for so long has no beats at all."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000  # the default of 50 us would be a tenth of an interval


class BeatSettings(msgspec.Struct, frozen=True):
    """What the parent tells its child, as one line of JSON on standard input: there, no one reads the key in ``ps``.

    ``key`` is the node's key in hex, "" for beats without a tag. ``targets`` (``host:port``) replace multicast.
    """

    fd: int
    parent: int
    node: str
    incarnation: int
    interval_us: int
    multicast_group: str
    port: int
    interface: str
    multicast_ttl: int
    targets: tuple[str, ...] = ()
    key: str = ""


def may_beat(parent_age_ns: int) -> tuple[bool, bool]:
    """(whether to beat, whether words may say "accepting") when the agent's loop last ran so long ago."""
    return parent_age_ns < PARENT_HUNG_NS, parent_age_ns < PARENT_SLOW_NS


def destinations(settings: BeatSettings) -> list[tuple[str, int]]:
    """Where each beat goes. Raises ``OSError`` for a target whose name is not known, ``ValueError`` for none at all."""
    if not settings.targets:
        return [(settings.multicast_group, settings.port)]
    found = []
    for target in settings.targets:
        host, _, port = target.rpartition(":")
        found.append((socket.gethostbyname(host), int(port)))
    return found


def open_socket(settings: BeatSettings) -> socket.socket:
    """A datagram socket that never waits: a beat that the kernel does not take is lost, and the next one comes."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    if not settings.targets:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, settings.multicast_ttl)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(settings.interface))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    return sock


class Beater:
    """Sends one beat at a time. Split from the loop so that tests hand in the time."""

    def __init__(self, settings: BeatSettings, words: SharedWords, sock: socket.socket) -> None:
        self._words = words
        self._sock = sock
        self._destinations = destinations(settings)
        self._writer = BeatWriter(
            node_hash(settings.node), settings.incarnation, bytes.fromhex(settings.key) if settings.key else None
        )
        self._raw = b""
        self._accepting = True
        self._workers = words.workers()

    def beat(self, now_ns: int) -> bool:
        """Send a beat, unless the agent hangs; return whether one was begun."""
        words = self._words
        alive, accepting = may_beat(now_ns - words.tick_ns)
        if not alive:
            return False
        sequence = words.begin()
        raw = words.raw()
        if raw != self._raw or accepting is not self._accepting:
            self._raw, self._accepting = raw, accepting
            self._workers = words.workers()
            if not accepting:
                self._workers = [
                    msgspec.structs.replace(worker, word=worker.word & ~ACCEPTING.mask) for worker in self._workers
                ]
        datagram = self._writer.write(sequence, now_ns, self._workers)
        sent = 0
        for destination in self._destinations:
            try:
                self._sock.sendto(datagram, destination)
                sent += 1
            except OSError:
                continue  # counted below: no route, a full buffer, a refused port; each heals or shows in the count
        words.count(sent, len(self._destinations) - sent)
        return True


def run(settings: BeatSettings) -> None:
    """Beat until the parent is gone. Raises ``OSError`` when a target cannot be resolved or the socket not be made."""
    _follow(settings.parent)
    words = SharedWords(settings.fd)
    beater = Beater(settings, words, open_socket(settings))
    clock, sleep, getppid = time.monotonic_ns, time.sleep, os.getppid
    schedule = Schedule(clock(), settings.interval_us * 1000)
    while getppid() == settings.parent:
        due_ns = schedule.next_ns(clock())
        while (wait_ns := due_ns - clock()) > 0:
            sleep(wait_ns / 1e9)
        beater.beat(clock())


def _follow(parent: int) -> None:
    """Die with ``parent``, and leave Ctrl-C to it; have the kernel wake us when we asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl could bind us to it
        raise SystemExit(0)
