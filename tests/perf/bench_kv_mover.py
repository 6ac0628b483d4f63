"""``kv_mover``: 1 GB of KV in 16 MB chunks from one process to another, over each mover, beside a plain socket copy.

The receiver checks every chunk and copies it to where its lease says, as an agent does; the plain copy is a blocking
``sendall`` and ``recv_into`` of the same chunks over loopback TCP, unchecked, into one buffer. ``ratio`` is the mover's
rate over the plain copy's, run in turns with it. What a lease costs is shown by the same bytes in 64 transfers, each
with its own lease, what checksums cost by going without. CPU is of both processes, RSS each one's peak.
"""

import asyncio
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quartet_agent.kv import nixl, wire
from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.mover import Mover
from quartet_agent.kv.nixl import NixlMemory
from quartet_agent.kv.shm import ShmMemory
from quartet_agent.kv.slots import SlotMover
from quartet_agent.kv.tcp import TcpMover
from quartet_bus.messages import KvCommand, KvVerb

GB = 1_000_000_000
CHUNK_BYTES = 16 * 1024 * 1024
BLOCK_BYTES = 2 * 1024 * 1024
"""16 tokens of an 8B model in BF16."""
BLOCK_TOKENS = 16
REGION_BLOCKS = 32
RUNS = 3


class Ground:
    """KV memory of a receiver: blocks are copied into a region that is used round and round."""

    block_tokens = BLOCK_TOKENS

    def __init__(self) -> None:
        self._region = bytearray(BLOCK_BYTES * REGION_BLOCKS)

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """Room enough."""
        return True

    def write(self, transfer: str, epoch: int, first_block: int, blocks: list[memoryview]) -> None:
        """Copy them."""
        for index, block in enumerate(blocks, first_block):
            at = index % REGION_BLOCKS * BLOCK_BYTES
            self._region[at : at + len(block)] = block

    def release(self, transfer: str) -> None:
        """Nothing is kept."""


def make(kind: str, checksums: bool) -> Mover:
    """A mover by name. Patient: a bench shares its machine."""
    if kind == "tcp":
        return TcpMover("127.0.0.1:0", checksums=checksums, silence_timeout_s=60.0)
    memory = ShmMemory() if kind == "shm" else NixlMemory()
    return SlotMover(memory, "127.0.0.1:0", checksums=checksums, silence_timeout_s=60.0)


Run = dict[str, float]


def usage() -> Run:
    """CPU seconds so far, and the peak of resident memory in MiB."""
    told = resource.getrusage(resource.RUSAGE_SELF)
    # not ru_maxrss, which remembers the process that we were forked from
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"cpu_s": told.ru_utime + told.ru_stime, "rss_mb": int(status["VmHWM"].split()[0]) / 1024}


# The receiving process -----------------------------------------------------------------------------------------------


async def receive(kind: str, checksums: bool, transfers: int, blocks: int) -> None:
    """Grant leases, say them on standard output, and take what comes until standard input closes."""
    arrivals = Arrivals(asyncio.get_running_loop(), secrets.token_bytes, lambda *_: None, lambda *_: None)
    mover, ground = make(kind, checksums), Ground()
    arrivals.address = await mover.serve(arrivals)
    begun = usage()["cpu_s"]
    for number in range(transfers):
        command = KvCommand(
            KvVerb.RESERVE, f"t{number}", 1, "c", "d-0", 1, tokens=blocks * BLOCK_TOKENS, lease_ms=600_000.0
        )
        reply = arrivals.reserve(command, "d-0", 1, ground, wire.SECRET_BYTES)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    moved = sum(lease.state == "moved" for lease in arrivals.leases())
    told = usage()
    told["cpu_s"] -= begun
    sys.stdout.buffer.write(msgspec.json.encode({**told, "moved": moved}) + b"\n")
    sys.stdout.flush()
    await mover.close()
    arrivals.close()


def receive_plain() -> None:
    """The same bytes, with nothing around them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        peer, _ = listening.accept()
    begun = usage()["cpu_s"]
    buffer = memoryview(bytearray(CHUNK_BYTES))
    left = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
    while left:
        left -= peer.recv_into(buffer[: min(left, CHUNK_BYTES)])
    peer.sendall(b"!")
    told = usage()
    told["cpu_s"] -= begun
    print(msgspec.json.encode(told).decode(), flush=True)


# The sending process -------------------------------------------------------------------------------------------------


def _child(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _memory() -> memoryview:
    return memoryview(bytearray(os.urandom(BLOCK_BYTES) * REGION_BLOCKS))


def _blocks(memory: memoryview, count: int) -> Iterator[memoryview]:
    for index in range(count):
        at = index % REGION_BLOCKS * BLOCK_BYTES
        yield memory[at : at + BLOCK_BYTES]


def send(kind: str, checksums: bool, transfers: int, size_bytes: int) -> Run:
    """One run: what it took, once every lease has all its blocks."""
    blocks = size_bytes // BLOCK_BYTES // transfers
    child = _child("receive", kind, int(checksums), transfers, blocks)
    assert child.stdout is not None
    lines = (line for line in child.stdout if line.startswith(b"{"))  # libraries talk on standard output, too
    leases = [msgspec.json.decode(next(lines), type=dict) for _ in range(transfers)]
    memory = _memory()

    async def all_of_them() -> tuple[float, float]:
        mover = make(kind, checksums)
        begun_s, begun_cpu_s = time.perf_counter(), usage()["cpu_s"]
        for lease in leases:
            secret = msgspec.json.decode(msgspec.json.encode(lease["secret"]), type=bytes)
            await mover.send(
                lease["address"], secret, lease["transfer"], lease["epoch"], _blocks(memory, blocks), CHUNK_BYTES
            )
        took_s, cpu_s = time.perf_counter() - begun_s, usage()["cpu_s"] - begun_cpu_s
        await mover.close()
        return took_s, cpu_s

    took_s, cpu_s = asyncio.run(all_of_them())
    theirs = _told(child)
    assert theirs["moved"] == transfers, "not everything arrived"
    return {
        "took_s": took_s,
        "cpu_s": cpu_s + theirs["cpu_s"],
        "rss_mb": theirs["rss_mb"],
        "sender_rss_mb": usage()["rss_mb"],
        "bytes": blocks * transfers,
    }


def send_plain(size_bytes: int) -> Run:
    """One run of the plain copy."""
    child = _child("plain")
    assert child.stdout is not None
    port = int(child.stdout.readline())
    memory = _memory()
    blocks = size_bytes // BLOCK_BYTES
    begun_s, begun_cpu_s = time.perf_counter(), usage()["cpu_s"]
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall((blocks * BLOCK_BYTES).to_bytes(8, "little"))
        for block in _blocks(memory, blocks):
            sock.sendall(block)
        sock.recv(1)
    took_s, cpu_s = time.perf_counter() - begun_s, usage()["cpu_s"] - begun_cpu_s
    theirs = _told(child)
    return {
        "took_s": took_s,
        "cpu_s": cpu_s + theirs["cpu_s"],
        "rss_mb": theirs["rss_mb"],
        "sender_rss_mb": usage()["rss_mb"],
        "bytes": blocks,
    }


def _told(child: subprocess.Popen) -> Run:
    out, _ = child.communicate(b"", timeout=120)
    return msgspec.json.decode(out.splitlines()[-1])


def _rate(run: Run) -> float:
    return run["bytes"] * BLOCK_BYTES / GB / run["took_s"]


def _line(name: str, runs: list[Run], plain: list[Run], **config: object) -> dict[str, object]:
    rates = [_rate(run) for run in runs]
    beside = [mine / _rate(base) for mine, base in zip(rates, plain, strict=True)]
    return {
        "bench": "kv_mover",
        "config": {"mover": name, "chunk_mb": CHUNK_BYTES >> 20, "block_mb": BLOCK_BYTES >> 20, **config},
        "gb_per_s": round(statistics.median(rates), 2),
        "ratio": round(statistics.median(beside), 2),
        "cpu_s_per_gb": round(statistics.median(r["cpu_s"] / (r["bytes"] * BLOCK_BYTES / GB) for r in runs), 2),
        "receiver_rss_mb": round(max(run["rss_mb"] for run in runs)),
        "sender_rss_mb": round(max(run["sender_rss_mb"] for run in runs)),
        "runs": len(runs),
        "spread": [round(min(rates), 2), round(max(rates), 2)],
    }


def run(size_bytes: int = GB, runs: int = RUNS) -> Iterator[dict[str, object]]:
    """One line a mover and variant."""
    kinds = ["tcp", "shm"] + (["nixl"] if nixl.importable() is None else [])
    if "nixl" not in kinds:
        print(f"kv_mover: no nixl here (make nixl): {nixl.importable()}", file=sys.stderr)
    plain = [send_plain(size_bytes) for _ in range(runs)]
    yield _line("plain socket", plain, plain)
    for kind in kinds:
        variants = [(True, 1), (False, 1), (True, 64)]
        for checksums, transfers in variants if kind != "nixl" else variants[:1]:
            beside, mine = [], []
            for _ in range(runs):
                beside.append(send_plain(size_bytes))
                mine.append(send(kind, checksums, transfers, size_bytes))
            yield _line(kind, mine, beside, checksums=checksums, leases=transfers)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1] == "plain":
        receive_plain()
    else:
        asyncio.run(receive(sys.argv[2], bool(int(sys.argv[3])), int(sys.argv[4]), int(sys.argv[5])))
