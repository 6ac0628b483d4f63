"""Real things that tests need: a NATS broker, from a container where Docker works, else the embedded server."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet_bus import logs
from quartet_bus.config.schema import NatsSection
from quartet_bus.server import NatsServer

NATS_IMAGE = "nats:2.12-alpine"
NATS_CONFIG = Path(__file__).parents[1] / "deploy" / "nats" / "nats.conf"


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    """As in a process: JSON on standard error, so that a failing test shows it and nothing else does. Set anew around
    each test: one that captures standard error leaves a stream behind that is closed by then."""
    logs.configure("warning", service="tests", instance="tests")
    yield
    logs.configure("warning", service="tests", instance="tests")


def docker_works() -> bool:
    """Whether there is a Docker daemon; a client without one is common."""
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker with JetStream that every test of the session shares. Subjects are the tests' own to keep apart."""
    if docker_works():
        yield from _container()
    else:
        yield from _embedded(tmp_path_factory.mktemp("nats"))


@pytest.fixture
def nats_section(nats_url: str) -> NatsSection:
    """How to reach the shared broker."""
    return NatsSection(url=nats_url, connect_timeout_ms=10_000)


def _embedded(directory: Path) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = NatsServer(directory)
    try:
        loop.run_until_complete(server.start())
        yield server.url
    finally:
        loop.run_until_complete(server.stop())
        loop.close()


def _container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    container = (
        DockerContainer(NATS_IMAGE)
        .with_command("-c /etc/nats/nats.conf")
        .with_volume_mapping(str(NATS_CONFIG), "/etc/nats/nats.conf", "ro")
        .with_exposed_ports(4222)
        .waiting_for(LogMessageWaitStrategy("Server is ready"))
    )
    with container:
        yield f"nats://{container.get_container_host_ip()}:{container.get_exposed_port(4222)}"
