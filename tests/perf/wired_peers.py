"""The other end of the wire, as a process: ``python wired_peers.py agents|echo URL``.

``agents`` answers for every worker at once: notes when each dispatch arrived, then says what an agent says, events and
frames, the first token after 5 ms and the end after 10. ``echo`` passes each message on, and nothing else: what two
hops cost without a router between them. Either prints ``ready`` when it listens.
"""

import asyncio
import os
import signal
import sys
import time

import msgspec
import uvloop

from quartet_bus import frames, subjects
from quartet_bus.bus import Message
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import Phase, RequestEvent, Run
from quartet_bus.nats_bus import NatsBus, connect

RUNS = "quartet.v1.worker.*.run"
HOP_1, HOP_2 = "bench.hop1", "bench.hop2"
ARRIVED = "bench.arrived"
"""Asks for (and clears) what arrived: a map from request id to monotonic nanoseconds."""

FIRST_TOKEN_S, END_S = 0.005, 0.010


class Agents:
    """All agents of a fleet, reduced to what a router can see of them."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._run = msgspec.msgpack.Decoder(Run).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrived: dict[str, int] = {}

    async def listen(self) -> None:
        """Take all dispatches."""
        await self._bus.subscribe(RUNS, self._on_run)
        await self._bus.subscribe(HOP_2, self._on_hop)
        await self._bus.subscribe(ARRIVED, self._on_arrived)

    def _on_run(self, message: Message) -> None:
        now_ns = time.monotonic_ns()
        run = self._run(message.data)
        self._arrived[run.stream.id] = now_ns
        self._say(run, Phase.ACCEPTED)
        self._frame(run, frames.Accepted(**self._stream(run), seq=0, worker=run.worker))
        loop = asyncio.get_running_loop()
        loop.call_later(FIRST_TOKEN_S, self._first_token, run)
        loop.call_later(END_S, self._end, run)

    def _on_hop(self, message: Message) -> None:
        now_ns = time.monotonic_ns()
        assert message.headers is not None
        self._arrived[message.headers["Quartet-Request-Id"]] = now_ns

    def _on_arrived(self, message: Message) -> None:
        self._bus.publish(message.reply, self._encode(self._arrived))
        self._arrived = {}

    def _first_token(self, run: Run) -> None:
        self._say(run, Phase.FIRST_TOKEN)
        self._frame(run, frames.Chunk(**self._stream(run), seq=1, data=msgspec.Raw(b'{"choices":[]}')))

    def _end(self, run: Run) -> None:
        self._say(run, Phase.END)
        self._frame(run, frames.End(**self._stream(run), seq=2, output_tokens=1))

    def _say(self, run: Run, phase: Phase) -> None:
        event = RequestEvent(
            phase=phase, stream=run.stream, tenant=run.tenant, model=run.model, worker=run.worker,
            incarnation=run.incarnation, agent_incarnation=1, beat=1, router=run.router, status="ok", output_tokens=1,
        )  # fmt: skip
        self._bus.publish(subjects.request_event(phase).subject, self._encode(event))

    def _frame(self, run: Run, frame: frames.Frame) -> None:
        self._bus.publish(run.inbox, frames.encode(frame))

    @staticmethod
    def _stream(run: Run) -> dict[str, object]:
        return {"id": run.stream.id, "attempt": run.stream.attempt, "try_": run.stream.try_}


async def _main(role: str, url: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bus = await connect(NatsSection(url=url), name=f"bench-{role}")
    if role == "agents":
        await Agents(bus).listen()
    else:
        await bus.subscribe(HOP_1, lambda message: bus.publish(HOP_2, message.data, headers=message.headers))
    await bus.flush()
    print("ready", flush=True)
    os.dup2(2, 1)  # nobody reads on: what is logged from now on is for the terminal
    await stop.wait()
    await bus.close()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2]))
