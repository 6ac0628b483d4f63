"""What a batch of beats costs once it is in memory. ``run()`` is what ``make bench ONLY=heartbeat_decode`` prints.

The collector's own objects without socket, ring and bus: ``decode``, ``Fleet.hear``, and ``Fleet.tick`` and
``note_steps`` as often as the service calls them, for 125 nodes of eight busy workers that step every 30 ms; one worker
changes its state with every batch. Batches as they come of 2 ms at 100,000 and at 250,000 datagrams a second. CPU time,
so that what else the machine does matters less.
"""

import json
import statistics
import time
from typing import Any

import numpy as np
from beat_load import INCARNATION, WORKERS, node_name
from bench_heartbeat import MASTERS, NODES, inventory

from quartet_core.heartbeat import MAGIC, VERSION, WORKERS_OFFSET, beat_tag, node_hash, node_key
from quartet_core.verdict import VerdictLimits
from quartet_core.word import BATCH, DRIFT, STEPS
from quartet_heartbeat_collector.batch import ROW_WORDS, decode
from quartet_heartbeat_collector.fleet import Fleet

BATCHES = 600
WARM = 50
RUNS = 5
BATCH_NS, TICK_NS, STEPS_NS, ENGINE_STEP_NS = 2_000_000, 5_000_000, 200_000_000, 30_000_000
_WORDS = WORKERS_OFFSET // 8 + WORKERS


class Play:
    """The beats of all nodes, batch by batch."""

    def __init__(self, datagrams: int, masters: tuple[bytes, ...]) -> None:
        self._datagrams = datagrams
        names = [node_name(number) for number in range(NODES)]
        self._keys = [node_key(masters[number % len(masters)], name) for number, name in enumerate(names) if masters]
        self._template = np.zeros((NODES, _WORDS), dtype="<u8")
        self._template[:, 0] = MAGIC | VERSION << 16 | WORKERS << 24 | INCARNATION << 32
        self._template[:, 1] = [node_hash(name) for name in names]
        for ordinal in range(WORKERS):
            self._template[:, 5 + ordinal] = ordinal | INCARNATION << 16 | BATCH.put(0, 1) << 32
        self._sent = 0
        self.rows = np.zeros((datagrams, ROW_WORDS), dtype="<u8")
        self.lengths = np.full(datagrams, 8 * _WORDS, dtype=np.uint32)

    def next(self, at_ns: int) -> None:
        """Put the batch of this moment into the rows."""
        words = self._template[:, 5:]
        steps = at_ns // ENGINE_STEP_NS & 15
        words[:] = words & ~np.uint64(STEPS.mask << 32) | np.uint64(steps << (STEPS.shift + 32))
        self._template[self._sent // self._datagrams % NODES, 5] ^= np.uint64(1 << DRIFT.shift + 32)
        turns = np.arange(self._sent, self._sent + self._datagrams)
        self._sent += self._datagrams
        self.rows[:, :_WORDS] = self._template[turns % NODES]
        self.rows[:, 2] = turns // NODES + 1
        self.rows[:, 3] = at_ns
        if self._keys:
            for row, node in zip(self.rows, (turns % NODES).tolist(), strict=True):
                row[4] = int.from_bytes(beat_tag(row[:_WORDS].data.cast("B"), self._keys[node]), "little")


def _once(datagrams: int, masters: tuple[bytes, ...]) -> float:
    """CPU time in us per datagram."""
    fleet = Fleet(VerdictLimits(tick_ns=TICK_NS), masters)
    for number in range(NODES):
        fleet.announce(inventory(node_name(number)), 0)
    play, spent_ns = Play(datagrams, masters), 0
    for number in range(1, WARM + BATCHES + 1):
        now_ns = number * BATCH_NS
        play.next(now_ns)
        begin_ns = time.process_time_ns()
        fleet.hear(decode(play.rows, play.lengths), now_ns)
        if now_ns // TICK_NS != (now_ns - BATCH_NS) // TICK_NS:
            fleet.tick(now_ns)
        if now_ns % STEPS_NS == 0:
            fleet.note_steps(now_ns)
        fleet.take_changes()
        if number > WARM:
            spent_ns += time.process_time_ns() - begin_ns
    assert fleet.board.received == fleet.board.taken + fleet.board.superseded
    return spent_ns / 1000 / (BATCHES * datagrams)


def run() -> list[dict[str, Any]]:
    """A line a case; some twenty seconds."""
    lines = []
    for master_keys in (0, len(MASTERS)):
        masters = tuple(bytes.fromhex(key) for key in MASTERS[:master_keys])
        for datagrams in (200, 500):
            costs = [_once(datagrams, masters) for _ in range(RUNS)]
            middle = statistics.median(costs)
            lines.append(
                {
                    "bench": "heartbeat_decode",
                    "config": {
                        "nodes": NODES,
                        "workers": NODES * WORKERS,
                        "batch": datagrams,
                        "master_keys": master_keys,
                    },
                    "cpu_us_each": round(middle, 3),
                    "runs": RUNS,
                    "spread": round((max(costs) - min(costs)) / middle, 3),
                }
            )
    return lines


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
