"""A wire between network namespaces that can be cut and can lose frames: runs in a namespace of its own, between veths.

    python tests/perf/beat_hub.py OUT IN [IN ...]

Every IPv4 frame that arrives on an IN interface goes out on OUT. Commands come on standard input, a line each, and each
is answered by one JSON line: ``loss 0.01`` (of all frames, at random), ``cut IN ...`` (answer: ``at_ns``, when the
last frame of them went out), ``heal IN ...`` (answer: when frames of all of them go out again), ``report`` (frames
``forwarded`` and ``lost``, and ``gap_ms``, the longest time that any uncut IN interface brought nothing, since the last
report: what the machine did to the wire, as against what was asked for). Kernels without ``netem`` are common in
containers and small virtual machines; a packet socket is everywhere.
"""

import json
import random
import selectors
import socket
import sys
import time
from typing import Any

_ETH_P_IP = 0x0800
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23


def _port(interface: str) -> socket.socket:
    """Frames of one interface, each behind the ten bytes that say which checksums are still to be made."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    port.bind((interface, _ETH_P_IP))
    port.setblocking(False)
    return port


class Hub:
    """The interfaces, and what may pass."""

    def __init__(self, out: str, ins: list[str]) -> None:
        self._out = _port(out)
        self._ins = {name: _port(name) for name in ins}
        self._passed_ns = dict.fromkeys(ins, 0)
        self._cut: set[str] = set()
        self._healing: set[str] = set()
        self._loss = 0.0
        self._random = random.Random(1)
        self._report = {"forwarded": 0, "lost": 0, "gap_ms": 0.0}

    def run(self) -> None:
        """Forward until standard input ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            for name, port in self._ins.items():
                selector.register(port, selectors.EVENT_READ, name)
            while True:
                for key, _ in selector.select():
                    if key.data is not None:
                        self._forward(key.data, self._ins[key.data])
                    elif line := sys.stdin.readline():
                        self._command(*line.split())
                    else:
                        return

    def _forward(self, name: str, port: socket.socket) -> None:
        while True:
            try:
                frame = port.recv(4096)
            except BlockingIOError:
                return
            if name in self._cut:
                continue
            now_ns = time.monotonic_ns()
            if self._passed_ns[name]:
                gap_ms = (now_ns - self._passed_ns[name]) / 1e6
                self._report["gap_ms"] = max(self._report["gap_ms"], gap_ms)
            self._passed_ns[name] = now_ns
            if self._random.random() < self._loss:
                self._report["lost"] += 1
                continue
            self._out.send(frame)
            self._report["forwarded"] += 1
            if name in self._healing:
                self._healing.discard(name)
                if not self._healing:
                    _say({"at_ns": now_ns})

    def _command(self, verb: str, *arguments: str) -> None:
        if verb == "loss":
            self._loss = float(arguments[0])
            _say({})
        elif verb == "cut":
            self._cut.update(arguments)
            _say({"at_ns": max(self._passed_ns[name] for name in arguments)})
        elif verb == "heal":
            self._passed_ns |= dict.fromkeys(arguments, 0)
            self._cut.difference_update(arguments)
            self._healing.update(arguments)
        elif verb == "report":
            _say(self._report)
            self._report = {"forwarded": 0, "lost": 0, "gap_ms": 0.0}
        else:
            raise ValueError(f"no command {verb!r}")


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    hub = Hub(sys.argv[1], sys.argv[2:])
    _say({})
    hub.run()
