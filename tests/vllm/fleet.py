"""vLLM servers on the CPU, as processes, and what the agents beside them are told."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import aiohttp
from served_fleet import CLASSES, free_ports

READY_S = 500.0
"""Both servers import for a minute on a quiet machine, and for many on one that is shared."""

AGENT = """
[agent]
node = "{node}"
[[agent.engines]]
kind = "vllm"
url = "{url}"
model = "tiny"
hardware = "{hardware}"
precision = "bf16"
max_batch = 8
chunk_tokens = 1024
{kv}
adapters = ["lora"]
adapter_paths = {{ lora = "{lora}" }}
probe_interval_ms = 200
"""


CONNECTOR = Path(__file__).parents[2] / "libs" / "connector"

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def pages_config(socket: Path, *, arena_bytes: int = 64 << 20) -> dict[str, object]:
    """``--kv-transfer-config`` of a server with pages."""
    return {
        "kv_connector": "QuartetConnector",
        "kv_connector_module_path": "quartet_connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), "arena_bytes": arena_bytes},
    }


class Vllm:
    """One server process. ``pages``: with our connector, at that socket; else with NIXL's. ``blocks`` of KV, or all."""

    def __init__(
        self, python: Path, models: Path, logs: Path, name: str, *, pages: Path | None = None, blocks: int = 0
    ) -> None:
        self.name = name
        self.pages = pages
        self.port, events, replay, side_channel = free_ports(4)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = logs / f"vllm-{name}.log"
        self._command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(models / "tiny"),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--max-model-len", "1024" if pages is None else "2048",
            "--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--block-size", "32", "--dtype", "bfloat16",
            "--enforce-eager", "--enable-prefix-caching", "--kv-cache-memory-bytes", str(64 << 20),
            "--enable-prompt-tokens-details", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
            "--kv-events-config", json.dumps(
                {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
                 "replay_endpoint": f"tcp://127.0.0.1:{replay}", "topic": f"kv@{name}"}
            ),
            "--kv-transfer-config", json.dumps(NIXL if pages is None else pages_config(pages)),
            *(["--num-gpu-blocks-override", str(blocks)] if blocks else []),
        ]  # fmt: skip
        self._environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
            "PYTHONHASHSEED": "0", "PYTHONPATH": str(CONNECTOR), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        }  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a process group of its own."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    async def ready(self, until_s: float) -> None:
        """Until it answers. Raises ``AssertionError`` with its last words when it does not."""
        async with aiohttp.ClientSession() as session:
            while True:
                assert self.process is not None
                if self.process.poll() is not None or time.monotonic() > until_s:
                    raise AssertionError(f"vLLM {self.name} did not start:\n{self.log.read_text()[-3000:]}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(self.url + "/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.5)

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 when there is none."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))

    def kill(self) -> None:
        """Its whole group, at once."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """Ask it to end, and wait; then make it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def agents(servers: dict[str, Vllm], models: Path) -> dict[str, str]:
    """The configuration of an agent beside each server."""
    return {
        node: AGENT.format(
            node=node,
            url=server.url,
            hardware=CLASSES[node][0],
            lora=models / "lora",
            kv=f'kv_pages = "{server.pages}"' if server.pages else 'kv_connector = "NixlConnector"',
        )
        for node, server in servers.items()
    }
