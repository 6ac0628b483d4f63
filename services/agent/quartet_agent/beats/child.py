"""The beating child: sleeps, reads the shared words, sends one datagram; nothing else, so that nothing is in its way.

A thread of the agent would wait for the interpreter behind whatever the agent does, and manages a tenth of the rate.
The child also judges its parent: beats must not say that a hung agent accepts work.
"""

import ctypes
import os
import resource
import signal
import socket
import time
from typing import BinaryIO, Final

import msgspec

from quartet_agent.beats.schedule import Schedule
from quartet_agent.beats.shared import SharedWords
from quartet_agent.beats.targets import Address, look_up
from quartet_bus.multicast import outgoing
from quartet_core.heartbeat import BeatWriter, node_hash
from quartet_core.word import ACCEPTING

PARENT_SLOW_NS: Final = 250_000_000
"""An agent whose loop has not run for so long is not said to accept work."""
PARENT_HUNG_NS: Final = 1_000_000_000
"""An agent whose loop has not run for so long has no beats at all."""

_PARENT_EVERY: Final = 64
_REALTIME_SLICE_US: Final = 100_000
"""CPU time that a realtime child may use without sleeping; one that runs wild is ended, and started again."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1_000  # the default of 50 us would be a tenth of an interval


class BeatSettings(msgspec.Struct, frozen=True):
    """What the parent tells its child, as one line of JSON on standard input: there, no one reads the key in ``ps``.

    ``key`` is the node's key in hex, "" for beats without a tag. ``targets`` (``host:port``) replace multicast.
    ``orders`` have been given before this child was started, and are in these settings.
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
    orders: int = 0
    scheduling: str = "auto"


class Order(msgspec.Struct, frozen=True):
    """What changes while the child beats, as one more line of JSON: the node's key, and addresses instead of targets'
    names ([] leaves those found at start)."""

    key: str
    addresses: tuple[tuple[str, int], ...] = ()


def may_beat(parent_age_ns: int) -> tuple[bool, bool]:
    """(whether to beat, whether words may say "accepting") when the agent's loop last ran so long ago."""
    return parent_age_ns < PARENT_HUNG_NS, parent_age_ns < PARENT_SLOW_NS


def destinations(settings: BeatSettings) -> list[Address]:
    """Where each beat goes. Raises ``OSError`` when no target's name is known; of several, the others are beaten to."""
    if not settings.targets:
        return [(settings.multicast_group, settings.port)]
    found, troubles = look_up(settings.targets)
    if not found:
        raise OSError(f"no target can be resolved: {'; '.join(troubles)}")
    return found


def open_socket(settings: BeatSettings) -> socket.socket:
    """A datagram socket that never waits: a beat that the kernel does not take is lost, and the next one comes.

    Raises ``OSError`` for an interface that this host has not.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    if not settings.targets:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, settings.multicast_ttl)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, outgoing(settings.interface))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    return sock


class Beater:
    """Sends one beat at a time. Split from the loop so that tests hand in the time."""

    def __init__(self, settings: BeatSettings, words: SharedWords, sock: socket.socket) -> None:
        self._words = words
        self._sock = sock
        self._node, self._incarnation = node_hash(settings.node), settings.incarnation
        self._orders = settings.orders
        self._destinations = destinations(settings)
        self._writer = self._writer_with(settings.key)
        self._raw: bytes | None = None
        self._accepting = True

    def _send(self, datagram: memoryview) -> tuple[int, int]:
        """(datagrams that the kernel took, those that it did not): what is in the way heals, or shows in the count."""
        sent = 0
        for destination in self._destinations:
            try:
                self._sock.sendto(datagram, destination)
                sent += 1
            except OSError:
                continue
        return sent, len(self._destinations) - sent

    def waiting_orders(self) -> int:
        """How many orders were given and not read: one line each on standard input."""
        waiting = self._words.orders - self._orders
        self._orders += waiting
        return waiting

    def obey(self, order: Order) -> None:
        """Beat with another key, or to other addresses, from the next beat on."""
        self._writer = self._writer_with(order.key)
        self._raw = None  # the new writer has no workers yet
        if order.addresses:
            self._destinations = list(order.addresses)

    def _writer_with(self, key: str) -> BeatWriter:
        return BeatWriter(self._node, self._incarnation, bytes.fromhex(key) if key else None)

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
            workers = words.workers()
            if not accepting:
                workers = [msgspec.structs.replace(worker, word=worker.word & ~ACCEPTING.mask) for worker in workers]
            datagram = self._writer.write(sequence, now_ns, workers)
        else:
            datagram = self._writer.write(sequence, now_ns, None)
        words.count(*self._send(datagram))
        return True


def run(settings: BeatSettings, orders: BinaryIO) -> None:
    """Beat until the parent is gone; ``orders`` has one line for each order.

    Raises ``OSError`` when no target can be resolved, the socket cannot be made, or realtime is asked for and cannot be
    had; ``msgspec.DecodeError`` for an order that is none.
    """
    _follow(settings.parent)
    words = SharedWords(settings.fd)
    words.write_realtime(schedule_realtime(settings.scheduling))
    beater = Beater(settings, words, open_socket(settings))
    clock, sleep, getppid = time.monotonic_ns, time.sleep, os.getppid
    schedule = Schedule(clock(), settings.interval_us * 1000)
    skipped = 0
    beats = 0
    while beats % _PARENT_EVERY or getppid() == settings.parent:  # its death is a signal; this is for where it is not
        beats += 1
        due_ns = schedule.next_ns(clock())
        if schedule.skipped != skipped:
            words.count_skipped(schedule.skipped - skipped)
            skipped = schedule.skipped
        while (wait_ns := due_ns - clock()) > 0:
            sleep(wait_ns / 1e9)
        beater.beat(clock())
        for _ in range(beater.waiting_orders()):
            beater.obey(msgspec.json.decode(orders.readline(), type=Order))


def schedule_realtime(scheduling: str) -> bool:
    """Go before all that is not realtime if ``scheduling`` is "realtime", or "auto" and the host lets us.

    Returns whether it was done. Raises ``OSError`` where it must be and cannot.

    The child runs some 50 us of every 500, and on a host whose cores are all busy it would else wait for milliseconds
    behind whoever computes, and miss a fifth of its slots and more (``make bench ONLY=beats_sender``).
    """
    if scheduling == "normal":
        return False
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (_REALTIME_SLICE_US, _REALTIME_SLICE_US))
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except (OSError, ValueError) as error:
        if scheduling == "realtime":
            raise OSError(
                f"beats cannot be scheduled realtime ({error}): that needs CAP_SYS_NICE or RLIMIT_RTPRIO"
            ) from None
        return False
    return True


def _follow(parent: int) -> None:
    """Die with ``parent``, and leave Ctrl-C to it; have the kernel wake us when we asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl could bind us to it
        raise SystemExit(0)
