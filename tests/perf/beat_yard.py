"""Nodes and a collector in network namespaces of their own, and a wire between them that can be cut and can lose beats.

Two groups of nodes (``beat_load.py``), each behind a veth of its own, and a collector with its broker behind a third;
``beat_hub.py`` stands between. Nothing outside the namespaces made here is touched: the veths are made inside them, and
all of it is gone with the processes that hold them. What the collector says is read from its ring, which is a file.

    python tests/perf/beat_yard.py PORT RING NODES      (what ``Yard`` runs inside the collector's namespace)
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from beat_load import INCARNATION, WORKERS, node_name

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import FleetDelta, KvLayout, NodeInventory, WorkerInfo, WorkerState
from quartet_bus.nats_bus import NatsBus
from quartet_bus.ring import RingReader
from quartet_bus.server import NatsServer
from quartet_core.verdict import Verdict

HERE = Path(__file__).parent
FEW, MANY = 3, 6
"""Nodes of the two groups: fewer than half, so that their silence is their own, and the others."""
BEAT_US = 1_000
PORT = 7447
COLLECTOR_ADDRESS = "10.77.0.3"
GROUPS = {"few": ("10.77.0.1", 0, FEW), "many": ("10.77.0.2", FEW, MANY)}
GENEROUS_S = 20.0

_decode = msgspec.msgpack.Decoder(FleetDelta).decode


class NotPermitted(Exception):
    """This process may not make network namespaces, or what is needed in them; the text says which."""


class Namespace:
    """A network namespace that lives as long as the process that holds it."""

    def __init__(self, inside: "Namespace | None" = None) -> None:
        self._root = os.geteuid() == 0
        make = ["unshare", "--net"] if self._root or inside else ["unshare", "--user", "--map-root-user", "--net"]
        hold = [*make, "sh", "-c", "ip link set lo up && echo ready && exec cat"]
        self._holder = subprocess.Popen(
            [*(inside.enter if inside and not self._root else []), *hold],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            reason = self._holder.stderr.read().strip()
            self.close()
            raise NotPermitted(f"network namespaces cannot be made here: {reason}")

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._holder.pid

    @property
    def enter(self) -> list[str]:
        """What to put before a command that is to run inside."""
        user = [] if self._root else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, "--net"]

    def run(self, *command: str) -> None:
        """Run a command inside. Raises ``NotPermitted`` when it fails."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        """End it, and every interface in it."""
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()
        self._holder.wait()


class Heard:
    """What the collector's ring says, as it comes; times are this host's monotonic clock, in ns."""

    def __init__(self, path: str) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.deaths: list[str] = []
        self.changes: list[tuple[int, WorkerState]] = []
        self._reader = RingReader(path, from_oldest=True)

    def poll(self) -> None:
        """Take what came."""
        records, now_ns = self._reader.poll(), time.monotonic_ns()
        for record in records:
            for change in _decode(record).changes:
                before, verdict = self.verdicts.get(change.worker), Verdict(change.verdict)
                self.verdicts[change.worker] = verdict
                if verdict is not before:
                    self.changes.append((now_ns, change))
                if verdict is Verdict.DEAD and before is not Verdict.DEAD:
                    self.deaths.append(change.worker)

    async def until_all(self, workers: set[str], verdict: Verdict, *, within_s: float = GENEROUS_S) -> int:
        """Poll until every one of ``workers`` has this verdict; return when that was. Raises ``TimeoutError``."""
        async with asyncio.timeout(within_s):
            while True:
                self.poll()
                if all(self.verdicts.get(worker) is verdict for worker in workers):
                    return time.monotonic_ns()
                await asyncio.sleep(0.001)

    def close(self) -> None:
        """Let the ring go."""
        self._reader.close()


class Yard:
    """The wire's commands, and what is heard behind it."""

    def __init__(self, hub: asyncio.subprocess.Process, heard: Heard, collector: int) -> None:
        self._hub = hub
        self.heard = heard
        self.collector_pid = collector

    async def command(self, text: str) -> dict[str, Any]:
        """Tell the hub; return its answer."""
        assert self._hub.stdin is not None
        self._hub.stdin.write(text.encode() + b"\n")
        return await _line(self._hub)


def workers_of(group: str) -> set[str]:
    """The ids of all workers of a group."""
    _, first, nodes = GROUPS[group]
    return {f"{node_name(number)}-{worker}" for number in range(first, first + nodes) for worker in range(WORKERS)}


@contextlib.asynccontextmanager
async def yard(seconds: float) -> AsyncIterator[Yard]:
    """The whole scene, with nodes that beat for at most ``seconds``. Raises ``NotPermitted``."""
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        names = _wired(stack)
        ring = str(Path(directory) / "ring")
        async with contextlib.AsyncExitStack() as processes:
            hub = await _start(processes, names["hub"], HERE / "beat_hub.py", "collector", *GROUPS)
            await _line(hub)
            stage = await _start(processes, names["collector"], HERE / "beat_yard.py", str(PORT), ring, str(FEW + MANY))
            collector = (await _line(stage))["collector"]
            for group, (address, first, nodes) in GROUPS.items():
                rate = nodes * 1_000_000 // BEAT_US
                await _start(
                    *(processes, names[group], HERE / "beat_load.py", "--port", str(PORT), "--interface", address),
                    *("--nodes", str(nodes), "--first", str(first), "--rate", str(rate), "--seconds", str(seconds)),
                )
            heard = Heard(ring)
            processes.callback(heard.close)
            made = Yard(hub, heard, collector)
            await heard.until_all(workers_of("few") | workers_of("many"), Verdict.UP)
            yield made


def _wired(stack: contextlib.ExitStack) -> dict[str, Namespace]:
    """A hub in the middle, and a veth from it to each of the others."""

    def made(inside: Namespace | None) -> Namespace:
        try:
            namespace = Namespace(inside)
        except FileNotFoundError as error:
            raise NotPermitted(f"{error.filename} is not installed") from error
        stack.callback(namespace.close)
        return namespace

    hub = made(None)
    names = {"hub": hub}
    addresses = {group: address for group, (address, _, _) in GROUPS.items()} | {"collector": COLLECTOR_ADDRESS}
    for name, address in addresses.items():
        end = names[name] = made(hub)
        hub.run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(end.pid))
        hub.run("ip", "link", "set", name, "up")
        end.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        end.run("ip", "link", "set", "eth0", "up")
    return names


async def _start(
    processes: contextlib.AsyncExitStack, namespace: Namespace, program: Path, *arguments: str
) -> asyncio.subprocess.Process:
    """A Python program of ours inside ``namespace``; killed when ``processes`` close, if it runs still."""
    process = await asyncio.create_subprocess_exec(
        *(*namespace.enter, sys.executable, str(program), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    async def stop() -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 0.1 if program.name == "beat_load.py" else GENEROUS_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    processes.push_async_callback(stop)
    return process


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), GENEROUS_S)
    if not line:
        raise NotPermitted(f"process {process.pid} ended: see its standard error")
    answer: dict[str, Any] = json.loads(line)
    return answer


# Inside the collector's namespace


def _inventory(node: str) -> NodeInventory:
    workers = tuple(
        WorkerInfo(
            id=f"{node}-{ordinal}", ordinal=ordinal, incarnation=INCARNATION, hardware="L40S_PCIE",
            model="llama-3.1-8b", precision="fp8", tp=1, gpus=(ordinal,), kv_tokens=100_000, max_context=32_768,
            max_batch=256, chunk_tokens=2048, layout=KvLayout(16, 65_536, "fp8"), engine="simulated", step_ms=20.0,
        )
        for ordinal in range(WORKERS)
    )  # fmt: skip
    return NodeInventory(node, INCARNATION, 0, workers)


@contextlib.contextmanager
def _collector(url: str, port: str, ring: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = {
        "NATS__URL": url,
        "SERVICE__INSTANCE": "yard",
        "SERVICE__LOG_LEVEL": "error",
        "FLEET__PORT": port,
        "FLEET__INTERFACE": COLLECTOR_ADDRESS,
        "FLEET__RING_PATH": ring,
        "FLEET__BEAT_INTERVAL_US": str(BEAT_US),
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
    environment |= {f"QUARTET_{key}": value for key, value in settings.items()}
    process = subprocess.Popen([sys.executable, "-m", "quartet_heartbeat_collector"], env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


async def _stage(port: str, ring: str, nodes: int) -> None:
    """A broker and a collector, and every node's inventory again and again, until standard input ends."""
    with tempfile.TemporaryDirectory() as directory:
        async with NatsServer(Path(directory), jetstream=False) as server:
            bus = NatsBus(NatsSection(url=server.url), name="yard")
            await bus.open()
            with _collector(server.url, port, ring) as process:
                print(json.dumps({"collector": process.pid}), flush=True)
                ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
                while not ended.done():
                    for number in range(nodes):
                        inventory = _inventory(node_name(number))
                        bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
                    await asyncio.wait([ended], timeout=0.2)
            await bus.close()


if __name__ == "__main__":
    asyncio.run(_stage(sys.argv[1], sys.argv[2], int(sys.argv[3])))
