"""``quartet-agent``: the agent as a process, with beats from a child process and the movers that ``[kv]`` names."""

import platform
import secrets
from random import Random

from quartet_agent.beats.process import ChildBeats
from quartet_agent.kv.choice import make_movers
from quartet_agent.service import AgentService
from quartet_agent.telemetry.wiring import real_readings
from quartet_bus.bus import Bus
from quartet_bus.config.schema import Config
from quartet_bus.process import run


def make(bus: Bus, config: Config, instance: str, random: Random) -> AgentService:
    """The agent of the node that ``[agent] node`` names, or else of this host; ``instance`` names no node."""
    return AgentService(
        bus,
        config,
        instance=config.agent.node or platform.node(),
        random=random,
        beats=ChildBeats(config.fleet),
        mover=make_movers(config.kv),
        token_bytes=secrets.token_bytes,
        real_readings=real_readings,
    )


def main() -> None:
    """Run until a signal comes."""
    run(make)


if __name__ == "__main__":
    main()
