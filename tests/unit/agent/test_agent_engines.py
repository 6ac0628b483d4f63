import random

from structlog.testing import CapturingLogger

from quartet_agent.beats.virtual import VirtualBeats
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork
from quartet_agent.service import AgentService
from quartet_bus.config.schema import AgentSection, Config
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
