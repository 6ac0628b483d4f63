"""What it costs a node to beat. ``run()`` is what ``make bench ONLY=beats_sender`` prints.

The sender is the one that is deployed: the agent's side in this process, its beating child, real sockets on loopback,
eight workers a beat. ``agent`` says what this process does meanwhile: "idle" ticks every 50 ms, "busy" computes without
a pause and ticks in between, as an agent's loop would. ``host`` "full" has every core computing besides. CPU is the
child's; ``realtime`` says whether it went before all other work, as ``[fleet] beat_scheduling`` allows it where the
host does; ``late_*`` is how long after its slot a beat was written; ``skipped`` are slots that had passed, which are
never made up for; ``lost`` is what the kernel took and a receiver did not get. Two more lines are parts: ``sleep`` is a
process that sleeps until each slot and does nothing then, which on a virtual machine is nearly half of a beat's cost;
``tag`` is the writing of a beat, and what a tag adds to it.
"""

import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from quartet_agent.beats.process import ChildBeats
from quartet_bus.config.schema import FleetSection
from quartet_core.heartbeat import HEADER, BeatWorker, BeatWriter, node_hash, node_key

RUNS = 3
SECONDS = 4.0
WORKERS = [BeatWorker(ordinal, 7, 0x00080401 + ordinal) for ordinal in range(8)]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CASES = (
    {"targets": 0, "keyed": False, "agent": "idle", "host": "quiet", "scheduling": "auto"},
    {"targets": 0, "keyed": True, "agent": "idle", "host": "quiet", "scheduling": "auto"},
    {"targets": 3, "keyed": True, "agent": "idle", "host": "quiet", "scheduling": "auto"},
    {"targets": 0, "keyed": True, "agent": "busy", "host": "quiet", "scheduling": "auto"},
    {"targets": 0, "keyed": True, "agent": "busy", "host": "full", "scheduling": "auto"},
    {"targets": 0, "keyed": True, "agent": "busy", "host": "full", "scheduling": "normal"},
)
GROUP = "239.7.7.11"
INTERVAL_NS = 500_000


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise LookupError("the kernel reports no peak memory")


class _Receiver:
    """Reads all that comes, and keeps when it was written."""

    def __init__(self, group: str | None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.bind((group or "127.0.0.1", 0))
        if group is not None:
            member = socket.inet_aton(group) + socket.inet_aton("127.0.0.1")
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self.sequences: list[int] = []
        self.emitted_ns: list[int] = []

    def drain(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(2048)
            except BlockingIOError:
                return
            *_, sequence, emit_ns = HEADER.unpack_from(datagram)
            self.sequences.append(sequence)
            self.emitted_ns.append(emit_ns)

    def forget(self) -> None:
        self.drain()
        self.sequences.clear()
        self.emitted_ns.clear()

    @property
    def lost(self) -> int:
        """Beats between the first and the last one heard that were not."""
        return self.sequences[-1] - self.sequences[0] + 1 - len(self.sequences)

    def close(self) -> None:
        self._socket.close()


def _burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(1000))


def _once(case: dict) -> dict[str, float]:
    receivers = [_Receiver(None if case["targets"] else GROUP) for _ in range(max(1, case["targets"]))]
    beats = ChildBeats(
        FleetSection(
            multicast_group=GROUP,
            port=receivers[0].port,
            targets=tuple(f"127.0.0.1:{receiver.port}" for receiver in receivers) if case["targets"] else (),
            master_keys=("ab" * 32,) if case["keyed"] else (),
            beat_scheduling=case["scheduling"],
        )
    )
    burners = [multiprocessing.Process(target=_burn, args=(SECONDS + 5,), daemon=True) for _ in range(os.cpu_count())]
    beats.start("bench", 1)
    beats.publish(WORKERS)
    try:
        while beats.sequence == 0:
            beats.tick()
            time.sleep(0.01)
        if case["host"] == "full":
            for burner in burners:
                burner.start()
        cpu_s, began, sent, skipped = _cpu_s(beats.pid), time.monotonic(), beats.sequence, beats.skipped
        for receiver in receivers:
            receiver.forget()
        while time.monotonic() < began + SECONDS:
            _burn(0.05) if case["agent"] == "busy" else time.sleep(0.05)
            beats.tick()
            for receiver in receivers:
                receiver.drain()
        cpu_s = _cpu_s(beats.pid) - cpu_s
        wall_s, sent, skipped = time.monotonic() - began, beats.sequence - sent, beats.skipped - skipped
        rss_mb, realtime = _peak_rss_mb(beats.pid), beats.realtime
    finally:
        beats.stop()
        for burner in burners:
            if burner.pid:
                burner.terminate()
                burner.join()
    late_us = _late_us(receivers[0].emitted_ns)
    figures = {
        "per_s": round(sent / wall_s),
        "cpu_percent": round(100 * cpu_s / wall_s, 2),
        "cpu_us_each": round(cpu_s * 1e6 / sent, 1),
        "late_p50_us": round(late_us[len(late_us) // 2], 1),
        "late_p99_us": round(late_us[len(late_us) * 99 // 100], 1),
        "skipped": skipped,
        "lost": sum(receiver.lost for receiver in receivers),
        "rss_mb": round(rss_mb, 1),
        "realtime": int(realtime),
    }
    for receiver in receivers:
        receiver.close()
    return figures


def _late_us(emitted_ns: list[int]) -> list[float]:
    """How long after its slot each beat was written, sorted. Where slots begin is not told, but nothing is written just
    before: it is where the widest gap ends between places in the interval."""
    places = sorted(ns % INTERVAL_NS for ns in emitted_ns)
    gaps = [(later - place, later) for place, later in pairwise([*places, places[0] + INTERVAL_NS])]
    begin = max(gaps)[1]
    return sorted((place - begin) % INTERVAL_NS / 1e3 for place in places)


def _line(case: dict) -> dict[str, object]:
    runs = [_once(case) for _ in range(RUNS)]
    costs = [run["cpu_us_each"] for run in runs]
    return {
        "bench": "beats_sender",
        "config": case | {"workers": len(WORKERS), "interval_us": 500, "seconds": SECONDS},
        **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
        "runs": RUNS,
        "spread": round((max(costs) - min(costs)) / statistics.median(costs), 3),
    }


_SLEEPER = """
import sys, time
from quartet_agent.beats.child import schedule_realtime
from quartet_agent.beats.schedule import Schedule
schedule_realtime("auto")
clock, sleep = time.monotonic_ns, time.sleep
begin = clock()
schedule, cpu, slots = Schedule(begin, 500_000), time.process_time(), 0
while clock() < begin + float(sys.argv[1]) * 1e9:
    due = schedule.next_ns(clock())
    while (wait := due - clock()) > 0:
        sleep(wait / 1e9)
    slots += 1
print((time.process_time() - cpu) * 1e6 / slots)
"""


def _sleep() -> dict[str, object]:
    command = [sys.executable, "-c", _SLEEPER, str(SECONDS)]
    runs = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(RUNS)]
    return {
        "bench": "beats_sender",
        "config": {"part": "sleep", "interval_us": 500, "seconds": SECONDS},
        "cpu_us_each": round(statistics.median(runs), 1),
        "runs": RUNS,
        "spread": round((max(runs) - min(runs)) / statistics.median(runs), 3),
    }


def _write_us(key: bytes | None) -> float:
    writer = BeatWriter(node_hash("bench"), 1, key)
    writer.write(0, 0, WORKERS)
    times = []
    for _ in range(2000):
        before = time.perf_counter_ns()
        for sequence in range(20):
            writer.write(sequence, before, None)
        times.append((time.perf_counter_ns() - before) / 20e3)
    return statistics.median(times)


def _tag() -> dict[str, object]:
    runs = [(_write_us(None), _write_us(node_key(b"\xab" * 32, "bench"))) for _ in range(RUNS)]
    tags = [keyed - bare for bare, keyed in runs]
    return {
        "bench": "beats_sender",
        "config": {"part": "tag", "workers": len(WORKERS)},
        "write_us": round(statistics.median(bare for bare, _ in runs), 2),
        "tag_us": round(statistics.median(tags), 2),
        "runs": RUNS,
        "spread": round((max(tags) - min(tags)) / statistics.median(tags), 3),
    }


def run() -> list[dict[str, object]]:
    """One line a case, and two for the parts; about a minute and a half altogether."""
    return [*(_line(case) for case in CASES), _sleep(), _tag()]


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
