"""Admin and predictor as processes: they come up on a real broker, answer gRPC, and go when told."""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import Phase, RequestEvent, StreamId
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_rpc.channel import channel
from quartet_rpc.v1 import admin_pb2 as pb
from quartet_rpc.v1.admin_pb2_grpc import AdminStub
from quartet_rpc.v1.predictor_pb2 import GetForecastsRequest

START_S = 20.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """Services of this test, all on one broker, with ports of their own."""

    def __init__(self, url):
        self.admin = f"127.0.0.1:{free_port()}"
        self.predictor = f"127.0.0.1:{free_port()}"
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")
        } | {
            "QUARTET_NATS__URL": url,
            "QUARTET_ADMIN__GRPC": self.admin,
            "QUARTET_PREFETCH__GRPC": self.predictor,
            "QUARTET_PREFETCH__TICK_MS": "100",
            "QUARTET_KV__GRPC": f"127.0.0.1:{free_port()}",
        }  # fmt: skip
        self.started = []

    async def start(self, module, **environment):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module,
            env=self.environment | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    async def stop(self):
        for process in self.started:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@pytest.fixture
async def broker(tmp_path):
    async with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def processes(broker):
    started = Processes(broker.url)
    yield started
    await started.stop()


async def cost_of(address, wanted):
    """Ask for costs until they are as wanted."""
    async with channel(address) as there, asyncio.timeout(START_S):
        while True:
            cost = await AdminStub(there).Cost(pb.CostRequest())
            if wanted(cost):
                return cost
            await asyncio.sleep(0.02)


async def serving(address, service):
    """Wait until health says SERVING."""
    async with asyncio.timeout(START_S), channel(address, deadline_s=1.0) as there:
        stub = health_pb2_grpc.HealthStub(there)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
                if status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.05)


async def test_both_answer_and_end_cleanly(broker, processes):
    bus = NatsBus(NatsSection(url=broker.url), name="test")
    await bus.open()
    admin = await processes.start("quartet_admin")
    predictor = await processes.start("quartet_prefetch_predictor")
    await serving(processes.admin, "quartet.v1.Admin")
    await serving(processes.predictor, "quartet.v1.Predictor")
    event = RequestEvent(Phase.END, StreamId("r1"), "acme", "llama", hardware="L40S_PCIE", status="ok", gpu_ms=1000.0)
    bus.publish(subjects.request_event(Phase.END).subject, msgspec.msgpack.encode(event))
    await bus.flush()
    cost = await cost_of(processes.admin, lambda cost: cost.lines)
    assert [(line.tenant, line.requests, cost.history) for line in cost.lines] == [("acme", 1, "")]
    async with channel(processes.admin) as there:
        forecasts = await AdminStub(there).Forecasts(GetForecastsRequest())
        assert forecasts.number > 0
        assert forecasts.standing_down == "prefetch.act is false"
    for process in (admin, predictor):
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), START_S)
        assert (process.returncode, b"Traceback" in errors) == (0, False)

    # a successor finds what the first one counted in the kept log
    await processes.start("quartet_admin")
    await serving(processes.admin, "quartet.v1.Admin")
    cost = await cost_of(processes.admin, lambda cost: not cost.replaying)
    assert [(line.tenant, line.requests) for line in cost.lines] == [("acme", 1)]
    await bus.close()


async def test_a_taken_port_ends_the_process_with_one_line(processes):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await processes.start("quartet_admin", QUARTET_ADMIN__GRPC=address)
        _, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 1
    last = errors.decode().strip().splitlines()[-1]
    assert address in last
    assert "port is taken" in last
    assert "Traceback" not in errors.decode()


async def test_horizons_that_fall_are_a_configuration_error(processes, tmp_path):
    process = await processes.start("quartet_prefetch_predictor", QUARTET_PREFETCH__HORIZONS_S="[300.0, 25.0]")
    _, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert "prefetch.horizons_s" in errors.decode()
    assert len(errors.decode().strip().splitlines()) == 1
