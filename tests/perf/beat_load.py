"""Plays the agents of many nodes: beats at a set rate to a multicast group, as fast as ``sendmmsg`` can where asked.

    python tests/perf/beat_load.py --port 7447 --nodes 125 --rate 10000 --seconds 3

Rate 0 is as fast as it can. Two of these share a fleet by ``--first``. With ``--keys`` every datagram has a tag, made
with the node's key from one of the master keys, by turns. Prints one JSON object: ``sent``, ``wall_s``, ``cpu_s``
and ``marks``, the moments (monotonic ns) just before beats were sent in which worker 0 of some node took a state that
nobody had before.
"""

import argparse
import ctypes
import json
import os
import socket
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quartet_core.heartbeat import MAGIC, VERSION, WORKERS_OFFSET, beat_tag, node_hash, node_key
from quartet_core.word import BATCH, STEPS

WORKERS = 8
INCARNATION = 1
BURST = 256
STEP_S = 0.03
MARK_S = 0.005
FIRST_MARK = 0x10000
"""States from here on (drift above 0) are marks; all other words say an idle-looking batch of 1."""

_WORDS = WORKERS_OFFSET // 8 + WORKERS


def node_name(number: int) -> str:
    """What the node of this number is called."""
    return f"load-{number:03d}"


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("sent", ctypes.c_uint32))


class Load:
    """All nodes of one generator; nodes take turns, so that each beats at rate / nodes."""

    def __init__(
        self, group: str, port: int, interface: str, nodes: int, *, first: int = 0, masters: Sequence[bytes] = ()
    ) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
        self._socket.connect((group, port))
        self._sendmmsg = ctypes.CDLL(None, use_errno=True).sendmmsg
        self._nodes = nodes
        self._template = np.zeros((nodes, _WORDS), dtype="<u8")
        self._template[:, 0] = MAGIC | VERSION << 16 | WORKERS << 24 | INCARNATION << 32
        names = [node_name(number) for number in range(first, first + nodes)]
        self._template[:, 1] = [node_hash(name) for name in names]
        self._keys = [node_key(masters[number % len(masters)], name) for number, name in enumerate(names) if masters]
        for ordinal in range(WORKERS):
            self._template[:, 5 + ordinal] = ordinal | INCARNATION << 16 | BATCH.put(0, 1) << 32
        self._rows = np.zeros((BURST, _WORDS), dtype="<u8")
        self._iovecs = (_Iovec * BURST)()
        self._messages = (_Message * BURST)()
        for index, (iovec, message) in enumerate(zip(self._iovecs, self._messages, strict=True)):
            iovec.base = self._rows.ctypes.data + index * self._rows.strides[0]
            iovec.length = self._rows.strides[0]
            message.header.iov = ctypes.addressof(iovec)
            message.header.iov_length = 1
        self.sent = 0

    def step(self, count: int) -> None:
        """Every engine has made ``count`` steps."""
        words = self._template[:, 5:]
        words[:] = words & ~np.uint64(STEPS.mask << 32) | np.uint64((count & 15) << (STEPS.shift + 32))

    def mark(self, number: int) -> None:
        """Worker 0 of the node whose turn is next takes a state of its own."""
        node = self.sent % self._nodes
        word = int(self._template[node, 5]) & ~(0xFFFFFF << 32)
        self._template[node, 5] = word | (FIRST_MARK + number) << 32

    def send(self, number: int) -> None:
        """The next ``number`` beats."""
        while number > 0:
            burst = min(number, BURST)
            turns = np.arange(self.sent, self.sent + burst)
            self._rows[:burst] = self._template[turns % self._nodes]
            self._rows[:burst, 2] = turns // self._nodes + 1
            self._rows[:burst, 3] = time.monotonic_ns()
            if self._keys:
                self._tag(turns)
            done = self._sendmmsg(self._socket.fileno(), self._messages, burst, 0)
            if done < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self.sent += done
            number -= done

    def _tag(self, turns: NDArray[np.int64]) -> None:
        for row, node in zip(self._rows, (turns % self._nodes).tolist(), strict=False):
            row[4] = int.from_bytes(beat_tag(row.data.cast("B"), self._keys[node]), "little")


def play(load: Load, rate_per_s: float, seconds: float, *, marking: bool = True) -> dict[str, object]:
    """Send for ``seconds``, a little every millisecond; after a pause the missed beats are skipped, never burst."""
    marks: list[int] = []
    started_s = time.process_time()
    begin = now = time.monotonic()
    budget, stepped, marked = 0.0, begin, begin
    while now < begin + seconds:
        if now - stepped >= STEP_S:
            stepped = now
            load.step(int((now - begin) / STEP_S))
        if marking and now - marked >= MARK_S:
            marked = now
            load.mark(len(marks))
            marks.append(time.monotonic_ns())
        if not rate_per_s:
            load.send(BURST)
            now = time.monotonic()
            continue
        load.send(int(budget))
        budget -= int(budget)
        time.sleep(0.001)
        before, now = now, time.monotonic()
        budget += min(now - before, 0.02) * rate_per_s
    return {
        "sent": load.sent,
        "wall_s": round(now - begin, 3),
        "cpu_s": round(time.process_time() - started_s, 3),
        "marks": marks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Heartbeats of many nodes.")
    parser.add_argument("--group", default="239.7.7.7")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interface", default="127.0.0.1")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument(
        "--rate", type=float, required=True, help="datagrams a second, all nodes together; 0: all it can"
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--first", type=int, default=0, help="the first node's number; marks come only from 0")
    parser.add_argument("--keys", default="", help="master keys in hex, by comma")
    arguments = parser.parse_args()
    masters = [bytes.fromhex(key) for key in arguments.keys.split(",") if key]
    load = Load(
        *(arguments.group, arguments.port, arguments.interface, arguments.nodes),
        first=arguments.first,
        masters=masters,
    )
    print(json.dumps(play(load, arguments.rate, arguments.seconds, marking=arguments.first == 0)))


if __name__ == "__main__":
    main()
