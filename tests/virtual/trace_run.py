"""A virtual fleet answering the start of two real traces; as a program, prints the event log's length and hash."""

import asyncio
import sys

import msgspec
from virtual.virtual_fleet import VirtualFleet

from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual
from quartet_bus.messages import RequestEvent
from quartet_bus.subjects import request_events
from quartet_sim.prompts import completion_body
from quartet_sim.traces import azure_conversation, mooncake_conversation, sped_up, window


def load(count):
    """``count`` requests of both traces in order of arrival: (seconds, model, request)."""
    chat = [(r.at_s, "llama-8b", r) for r in window(sped_up(mooncake_conversation(1), 2.0), 0.0, 400.0)]
    azure = [(r.at_s, "llama-70b", r) for r in window(sped_up(azure_conversation(1), 2.0), 0.0, 400.0)]
    return sorted(chat + azure, key=lambda each: each[0])[:count]


async def replay(fleet, requests):
    """Send each request at its time; return (output chunks, error status) of each, in order."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def one(at_s, model, request):
        await asyncio.sleep(start + at_s - loop.time())
        chunks = 0
        try:
            async with await fleet.client.infer(model, completion_body(request, model)) as answer:
                async for _ in answer:
                    chunks += 1
        except InferError as error:
            return chunks, error.status
        return chunks, 0

    return await asyncio.gather(*(one(*each) for each in requests))


class Outcome:
    """What a run left: answers, every request event, and the fleet itself."""

    def __init__(self, fleet, requests):
        self.fleet = fleet
        self.requests = requests
        self.events = []
        self.answers = []

    def note(self, message):
        """Keep one request event."""
        self.events.append(msgspec.msgpack.decode(message.data, type=RequestEvent))


async def run(seed, count, during=None, **fleet_options):
    """Play ``count`` requests; ``during(fleet)`` runs beside them. Whatever was started has ended on return."""
    async with VirtualFleet(seed, **fleet_options) as fleet:
        outcome = Outcome(fleet, load(count))
        await fleet.buses["client"].subscribe(request_events().subject, outcome.note)
        await asyncio.sleep(1.0)
        beside = asyncio.ensure_future(during(fleet)) if during else None
        outcome.answers = await replay(fleet, outcome.requests)
        if beside is not None:
            await beside
        await asyncio.sleep(1.0)
        router = fleet.router()
        outcome.left = (len(router.routing.ledger), len(router._flights), len(router._desk.holds))
    return outcome


if __name__ == "__main__":
    log = run_virtual(run(int(sys.argv[1]), int(sys.argv[2]))).fleet.log
    print(log.count, log.digest)
