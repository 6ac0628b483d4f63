import asyncio

import msgspec
import pytest

from quartet_bus import frames, subjects
from quartet_bus.bus import Message
from quartet_bus.client import Client
from quartet_bus.headers import parse_headers
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_cli.demo.replay import Replay
from quartet_cli.demo.workload import Arrival, prepare, right_text
from quartet_core.openai import all_busy
from quartet_sim.traces import TraceRequest


def arrival(number: int, at_s: float, output: int = 3) -> Arrival:
    return Arrival(f"r{number}", at_s, "m", TraceRequest(number, at_s, 20, output))


class OneRouterFleet:
    """Answers every request ``delay_s`` after it came: right, with 429 (``busy``), or never (``silent``)."""

    def __init__(self, bus: MemoryBus, arrivals: list[Arrival], delay_s: float) -> None:
        self.came_s: list[float] = []
        self.busy: set[str] = set()
        self.silent: set[str] = set()
        self._bus = bus
        self._arrivals = {each.id: each for each in arrivals}
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()

    def on_request(self, message: Message) -> None:
        id = parse_headers(message.headers, trusted=False).request_id
        self.came_s.append(self._loop.time())
        if id in self.busy:
            error = all_busy("m", 1.0)
            self._say(message, frames.Error(id=id, attempt=1, try_=0, status=429, error=error.body))
        else:
            self._loop.call_later(self._delay_s, self._answer, message, id)

    def _answer(self, message: Message, id: str) -> None:
        if id in self.silent:
            self._say(message, frames.Alive(id=id, attempt=1, try_=0))
            self._loop.call_later(1.0, self._answer, message, id)
            return
        asked = self._arrivals[id]
        text = right_text(prepare(asked), asked.output_tokens)
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        choices = [{"text": piece} for piece in pieces] + [{"text": "", "finish_reason": "length"}]
        self._say(message, frames.Accepted(id=id, attempt=1, try_=1, seq=0, worker="w"))
        for seq, choice in enumerate(choices, 1):
            data = msgspec.Raw(msgspec.json.encode({"choices": [choice]}))
            self._say(message, frames.Chunk(id=id, attempt=1, try_=1, seq=seq, data=data))
        last = frames.End(id=id, attempt=1, try_=1, seq=len(choices) + 1, output_tokens=asked.output_tokens)
        self._say(message, last)

    def _say(self, message: Message, frame: frames.AnyFrame) -> None:
        self._bus.publish(message.reply, frames.encode(frame))


async def replayed(arrivals: list[Arrival], *, delay_s: float, busy=(), silent=(), grace_s: float = 60.0):
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    fleet = OneRouterFleet(bus, arrivals, delay_s)
    fleet.busy.update(busy)
    fleet.silent.update(silent)
    await bus.subscribe(subjects.infer_all().subject, fleet.on_request)
    replay = Replay(Client(MemoryBus(broker), "public"), arrivals, grace_s=grace_s)
    await replay.send_all()
    await replay.finish()
    return replay, fleet


def test_arrivals_wait_for_nobodys_answer():
    arrivals = [arrival(number, number * 0.5) for number in range(4)]
    replay, fleet = run_virtual(replayed(arrivals, delay_s=1.5))
    gaps = [came_s - replay.started_s for came_s in fleet.came_s]
    assert gaps == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=1e-3)
    assert [outcome.fault for outcome in replay.outcomes] == ["", "", "", ""]
    assert [outcome.first_ms for outcome in replay.outcomes] == pytest.approx([1500.0] * 4, abs=2.0)
    assert (replay.sent, replay.ended, replay.faults) == (4, 4, 0)


def test_a_refusal_is_a_fault_with_the_routers_words():
    replay, _ = run_virtual(replayed([arrival(0, 0.0), arrival(1, 0.1)], delay_s=0.2, busy=["r1"]))
    right, refused = replay.outcomes
    assert right.fault == ""
    assert refused.fault.startswith("all_busy: 429")
    assert refused.answered
    assert refused.tokens == 0


def test_what_has_not_ended_when_the_grace_is_over_was_not_answered():
    replay, _ = run_virtual(replayed([arrival(0, 0.0), arrival(1, 0.1)], delay_s=0.2, silent=["r0"], grace_s=15.0))
    late, right = replay.outcomes
    assert (late.answered, late.fault) == (False, "not finished in time")
    assert late.first_ms == float("inf")
    assert right.fault == ""
    assert replay.running_s == pytest.approx(15.1, abs=0.01)


def test_a_replay_of_nothing_ends_at_once():
    replay, _ = run_virtual(replayed([], delay_s=0.0))
    assert replay.outcomes == []
