import asyncio
import random

import pytest
from structlog.testing import CapturingLogger

from quartet_agent.beats.virtual import VirtualBeats
from quartet_agent.engines.hosted import host_workers
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork
from quartet_agent.service import AgentService
from quartet_bus import catalogue
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import AgentSection, Config, EngineSection, ModelSection
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus


def test_an_agent_without_engines_says_so_once_and_is_a_node_without_workers():
    async def script() -> None:
        agent = AgentService(
            MemoryBus(MemoryBroker()),
            Config(agent=AgentSection(node="n")),
            instance="n",
            random=random.Random(1),
            beats=VirtualBeats(lambda _: None, 0.005),
            mover=MemoryMover(MemoryNetwork(), "n"),
        )
        agent.log = log = CapturingLogger()
        await agent.start()
        await agent.stop()
        warnings = [call.args[0] for call in log.calls if call.method_name == "warning"]
        assert warnings == ["no engines in [agent], so this node has no workers"]
        assert agent.workers == {}

    run_virtual(script())


def test_each_rank_of_a_server_is_a_worker_on_its_own_cards():
    loop, log = asyncio.new_event_loop(), CapturingLogger()
    section = EngineSection("vllm", "chat", "H100_SXM5", url="http://127.0.0.1:1", tp=4, data_parallel=3, first_gpu=1)
    config = Config(models={"chat": ModelSection("llama-3.1-70b")}, agent=AgentSection(node="n", engines=(section,)))
    workers = host_workers(
        config, catalogue.load(config), "n", random.Random(1), loop, lambda: 0.0, lambda: 0.0, lambda: False, log
    )
    assert {worker.id: worker.facts.gpus for worker in workers} == {
        "n-0": (1, 2, 3, 4),
        "n-1": (5, 6, 7, 8),
        "n-2": (9, 10, 11, 12),
    }
    assert [worker.adapter._rank for worker in workers] == [0, 1, 2]
    loop.close()


@pytest.mark.parametrize(
    ("fields", "key", "says"),
    [
        ({"kind": "vllm"}, "url", "http://host:port"),
        ({"kind": "vllm", "url": "http://h:1", "count": 2}, "count", "one table for each server"),
        ({"kind": "vllm", "url": "http://h:1", "adapter_paths": {"lora": "/x"}}, "adapter_paths", "adapters"),
        ({"kind": "sglang", "url": "http://h:1", "kv_connector": "NixlConnector"}, "kv_connector", "vllm"),
        ({"kind": "openai", "url": "http://h:1", "data_parallel": 2}, "data_parallel", "no ranks"),
        ({"kind": "simulated", "data_parallel": 2}, "data_parallel", "have a count"),
        (
            {"kind": "vllm", "url": "http://h:1", "data_parallel": 2, "kv_events": "tcp://h:5"},
            "kv_events",
            "each of the 2 ranks, not 1",
        ),
        ({"kind": "sglang", "url": "http://h:1", "kv_pages": "/x"}, "kv_pages", "vllm"),
        ({"kind": "vllm", "url": "http://h:1", "kv_pages": "/x", "kv_connector": "N"}, "kv_pages", "not both"),
        ({"kind": "simulated", "kv_pages": "/x"}, "kv_pages", "no server"),
        ({"kind": "simulated", "url": "http://h:1"}, "url", "no server"),
        ({"kind": "simulated", "api_key": "x"}, "api_key", "no server"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_its_key(fields, key, says):
    async def script() -> None:
        section = EngineSection(**({"model": "chat", "hardware": "H100_SXM5"} | fields))
        agent = AgentService(
            MemoryBus(MemoryBroker()),
            Config(models={"chat": ModelSection("llama-3.1-8b")}, agent=AgentSection(node="n", engines=(section,))),
            instance="n",
            random=random.Random(1),
            beats=VirtualBeats(lambda _: None, 0.005),
            mover=MemoryMover(MemoryNetwork(), "n"),
        )
        with pytest.raises(ConfigError, match=says) as caught:
            await agent.start()
        assert caught.value.key == f"agent.engines[0].{key}"
        await agent.stop()

    run_virtual(script())
