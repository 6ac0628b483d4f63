"""A whole Quartet as processes before engines behind HTTP: for tests that ask it as its users do."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Patient: these tests are about what happens, and must hold on a machine that is shared.
CONFIG = """
[nats]
url = "{nats}"
[fleet]
targets = ["127.0.0.1:{beats}"]
port = {beats}
beat_interval_us = 5000
suspect_ms = 5000
dead_ms = 30000
inventory_interval_ms = 5000
[router]
dispatch_ack_ms = 5000
[gateway]
listen = "127.0.0.1:{gateway}"
[kv]
coordinator_silence_ms = 8000
grpc = "127.0.0.1:{coordinator}"
{kv}

[specs.tiny]
layers = 2
kv_heads = 2
head_dim = 32
max_context = 1024
block_tokens = 32
weight_bytes = {{ bf16 = 1_000_000 }}
[models.tiny]
spec = "tiny"
sketch = "tokens"
ttft_ms = 10000
tpot_ms = 1000
[models.lora]
spec = "tiny"
base = "tiny"
sketch = "tokens"
ttft_ms = 10000
tpot_ms = 1000
"""

HARDWARE = """
[hardware.{name}]
memory_gb = 8.0
memory_bandwidth_gb_s = 20.0
bf16_tflops = 0.1
host_link = {{ pcie_gen = 4, gb_per_s = 5.0 }}
gpu_link = {{ kind = "pcie", gb_per_s = 5.0 }}
tdp_w = 65.0
idle_w = 20.0
price_per_hour = {price}
[[hardware.{name}.profiles]]
model = "tiny"
precision = "bf16"
tp = 1
[hardware.{name}.profiles.profile]
a_ms = {a_ms}
b_ms_per_token = 10.0
c_ms_per_token2 = 0.0
batches = [1, 8]
contexts = [0, 1024]
step_ms = [[{a_ms}, {a_ms}], [{full_ms}, {full_ms}]]
"""

CLASSES = {"a": ("CPU_QUICK", 0.2, 200.0, 300.0), "b": ("CPU_SLOW", 0.1, 250.0, 400.0)}
"""Node → its hardware class, price, and milliseconds of a step for one sequence and for eight."""


_ports = iter(random.sample(range(20_000, 30_000), 1000))
"""Below the range that systems give to outgoing connections: a server may bind its port minutes after it was chosen."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses just now, each given once."""
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            found.append(port)
    return found


class Quartet:
    """Collector, router, coordinator, gateway, and an agent on each node of ``agents``: its ``[agent]`` as TOML. ``kv``
    is more of ``[kv]``."""

    def __init__(self, directory: Path, nats: str, agents: dict[str, str], *, kv: str = "") -> None:
        beats, gateway, coordinator = free_ports(3)
        self.gateway = f"http://127.0.0.1:{gateway}/v1"
        self.directory = directory
        shared = CONFIG.format(nats=nats, beats=beats, gateway=gateway, coordinator=coordinator, kv=kv)
        for name, price, a_ms, full_ms in CLASSES.values():
            shared += HARDWARE.format(name=name, price=price, a_ms=a_ms, full_ms=full_ms)
        (directory / "fleet.toml").write_text(shared)
        for node, agent in agents.items():
            (directory / f"{node}.toml").write_text(agent)
        self._nodes = tuple(agents)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._named: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all processes."""
        for module in ("heartbeat_collector", "router", "kv_coordinator", "gateway"):
            self._start(module, module)
        for node in self._nodes:
            self.start_agent(node)

    def start_agent(self, node: str) -> None:
        """Start the agent of ``node``."""
        self._start("agent", f"agent-{node}", node)

    def kill_agent(self, node: str) -> None:
        """End the agent of ``node`` at once."""
        agent = self._named[f"agent-{node}"]
        agent.kill()
        agent.wait()

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Inside, the process of this name does nothing, as one that hangs."""
        self._named[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._named[name].send_signal(signal.SIGCONT)

    def logs(self) -> str:
        """The last words of every process."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.directory.glob("*.log")))

    def _start(self, module: str, name: str, node: str = "") -> None:
        command = [sys.executable, "-m", f"quartet_{module}", "--config", str(self.directory / "fleet.toml")]
        if node:
            command += ["--config", str(self.directory / f"{node}.toml")]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._named[name] = subprocess.Popen(command, stdout=log, stderr=log)
            self._processes.append(self._named[name])
