"""Deaths and returns over a wire that is cut and loses beats. ``run()`` is what ``make bench ONLY=partition`` prints.

Nine nodes of eight workers, a beat a millisecond, in network namespaces made here (``beat_yard.py``). First the wire
loses one beat in a hundred for a minute: ``false_deaths`` and ``suspicions`` of workers, and ``gap_ms``, the longest
time that this machine itself let nothing pass. Then three of the nodes are cut off and let back ten times: from their
last beat until all their workers are dead in the ring, and from their first until all are up.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from beat_yard import BEAT_US, FEW, MANY, NotPermitted, Yard, workers_of, yard

from quartet_core.verdict import Verdict

LOSSY_S = 60.0
LOSS = 0.01
CYCLES = 10


async def _lossy(made: Yard) -> dict[str, Any]:
    await made.command("report")
    await made.command(f"loss {LOSS}")
    before, end_s = len(made.heard.changes), time.monotonic() + LOSSY_S
    while time.monotonic() < end_s:
        made.heard.poll()
        await asyncio.sleep(0.001)
    report = await made.command("report")
    await made.command("loss 0")
    suspicions = sum(change.verdict == Verdict.SUSPECT for _, change in made.heard.changes[before:])
    return {**report, "false_deaths": len(made.heard.deaths), "suspicions": suspicions}


async def _cut(made: Yard) -> dict[str, Any]:
    few, dead_ms, up_ms = workers_of("few"), [], []
    for _ in range(CYCLES):
        await made.heard.until_all(few | workers_of("many"), Verdict.UP)
        cut = await made.command("cut few")
        dead_ms.append((await made.heard.until_all(few, Verdict.DEAD) - cut["at_ns"]) / 1e6)
        healed = await made.command("heal few")
        up_ms.append((await made.heard.until_all(few, Verdict.UP) - healed["at_ns"]) / 1e6)
    figures: dict[str, Any] = {"runs": CYCLES}
    for name, took_ms in (("dead", sorted(dead_ms)), ("up", sorted(up_ms))):
        figures |= {f"{name}_p50_ms": round(took_ms[CYCLES // 2], 1), f"{name}_max_ms": round(took_ms[-1], 1)}
    return figures


async def _both() -> list[dict[str, Any]]:
    config = {"nodes": FEW + MANY, "beat_us": BEAT_US}
    async with yard(seconds=LOSSY_S + 60.0) as made:
        lossy = {"bench": "partition", "config": config | {"loss": LOSS, "seconds": LOSSY_S}, **await _lossy(made)}
        return [lossy, {"bench": "partition", "config": config | {"cut_nodes": FEW}, **await _cut(made)}]


def run() -> Iterator[dict[str, Any]]:
    """Two lines; a minute and a half. None, and a word on standard error, where namespaces cannot be made."""
    try:
        yield from asyncio.run(_both())
    except NotPermitted as error:
        print(f"partition: skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
