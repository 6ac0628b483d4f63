"""The simulated engine behind an HTTP server of its own, as a client would ask it without Quartet in between.

    python engine_server.py TIME_SCALE

Prints its address, and serves ``POST /v1/completions`` (streamed) until it is ended.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import chain
import uvloop
from aiohttp import web

from quartet_agent.engines.base import EngineEvent, Finished, Output, Work
from quartet_agent.engines.simulated import SimulatedAdapter
from quartet_bus.messages import Role
from quartet_core import catalogue
from quartet_core.openai import parse
from quartet_sim.engine import SimulatedEngine


class EngineServer:
    """Answers completions as the agent's engine would; every event is written as soon as it is there."""

    def __init__(self, adapter: SimulatedAdapter) -> None:
        self._adapter = adapter
        self._queues: dict[str, asyncio.Queue[bytes | None]] = {}
        self._jobs = 0

    def on_events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.job)
            if queue is None:
                continue
            if isinstance(event, Output):
                queue.put_nowait(b"data: " + event.data + b"\n\n")
            elif isinstance(event, Finished):
                queue.put_nowait(None)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self._jobs += 1
        job = f"job-{self._jobs}"
        queue = self._queues[job] = asyncio.Queue()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await reply.prepare(request)
            self._adapter.submit(Work(job, job, chain.MODEL, body, parse(body), Role.BOTH, 1024))
            while (event := await queue.get()) is not None:
                await reply.write(event)
            await reply.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self._adapter.cancel(job)
        finally:
            del self._queues[job]
        return reply


async def main(time_scale: float) -> None:
    known = catalogue.builtin()
    engine = SimulatedEngine(
        known.profile(chain.HARDWARE, chain.SPEC, "fp8", 1),
        kv_tokens=known.kv_capacity_tokens(chain.HARDWARE, chain.SPEC, "fp8", 1),
        chunk_tokens=chain.CHUNK_TOKENS,
        max_batch=chain.MAX_BATCH,
        max_context=131_072,
        time_scale=time_scale,
    )
    loop = asyncio.get_running_loop()
    adapter = SimulatedAdapter(engine, loop, lambda: loop.time() * 1e3, time.time)
    server = EngineServer(adapter)
    await adapter.start(server.on_events)
    runner = web.ServerRunner(web.Server(server.handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print("{}:{}".format(*runner.addresses[0]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(float(sys.argv[1])))
