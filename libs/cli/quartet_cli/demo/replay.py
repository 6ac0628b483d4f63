"""Replaying a workload: an open loop, in which arrivals wait for nobody's answer."""

import asyncio
from collections.abc import Sequence

from quartet_bus.client import Answer, Client, InferError
from quartet_bus.headers import RequestHeaders
from quartet_cli.demo.outcome import Outcome, fault_of
from quartet_cli.demo.workload import Arrival, Prepared, prepare


class Replay:
    """Sends every arrival at its time and keeps what became of it.

    Requests that have not ended ``grace_s`` after the last arrival are given up, and count as not answered.
    """

    def __init__(self, client: Client, arrivals: Sequence[Arrival], *, grace_s: float) -> None:
        self.outcomes: list[Outcome] = []
        self.started_s = 0.0
        """The loop's time at which the workload began."""
        self.sent = 0
        self.ended = 0
        self.faults = 0
        self.tokens = 0
        """Chunks that came, of answers that may still go on."""
        self._client = client
        self._arrivals = arrivals
        self._grace_s = grace_s
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    @property
    def running_s(self) -> float:
        """Since when it runs."""
        return self._loop.time() - self.started_s if self.started_s else 0.0

    async def send_all(self) -> None:
        """Return when the last arrival has been sent; ``finish`` must follow."""
        self.started_s = self._loop.time()
        for arrival in self._arrivals:
            prepared = prepare(arrival)  # before its time, so that it leaves at its time
            await asyncio.sleep(self.started_s + arrival.at_s - self._loop.time())
            outcome = Outcome(arrival.id, arrival.model, arrival.request.prompt_tokens, arrival.output_tokens)
            self.outcomes.append(outcome)
            self._tasks.append(self._loop.create_task(self._ask(arrival, prepared, outcome)))
            self.sent += 1

    async def finish(self) -> None:
        """Return when every request has ended, or ``grace_s`` is over and the rest is given up."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self._grace_s)
            await self._give_up(late)

    async def abandon(self) -> None:
        """Give up everything that goes on."""
        await self._give_up({task for task in self._tasks if not task.done()})

    async def _give_up(self, late: set[asyncio.Task[None]]) -> None:
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _ask(self, arrival: Arrival, prepared: Prepared, outcome: Outcome) -> None:
        due_s = self.started_s + arrival.at_s
        outcome.lag_ms = (self._loop.time() - due_s) * 1e3
        try:
            headers = RequestHeaders(request_id=arrival.id)
            async with await self._client.infer(arrival.model, prepared.body, headers=headers) as answer:
                await self._read(answer, arrival, prepared, outcome, due_s)
        except InferError as error:
            outcome.fault = f"{error.body.code or error.body.type}: {error}"
        except asyncio.CancelledError:
            outcome.answered = False
            outcome.fault = "not finished in time"
        self.ended += 1
        self.faults += outcome.fault != ""

    async def _read(self, answer: Answer, arrival: Arrival, prepared: Prepared, outcome: Outcome, due_s: float) -> None:
        clock = self._loop.time
        chunks: list[bytes] = []
        async for chunk in answer:
            if not chunks:
                outcome.first_ms = (clock() - due_s) * 1e3
            chunks.append(chunk)
            self.tokens += 1
        outcome.last_ms = (clock() - due_s) * 1e3
        outcome.fault, outcome.tokens = fault_of(arrival, prepared, chunks, answer.end)
