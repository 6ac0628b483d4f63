"""One request of a scenario, sent as its client would send it, and what became of it."""

import asyncio
import json

import aiohttp
from scenarios.prompts import prompt_ids
from scenarios.story import Arrive

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.client import Client, InferError
from quartet_bus.headers import RequestHeaders


class Sent:
    """A request and its outcome. Times are milliseconds since it was sent; None until they happened.

    ``status`` is the HTTP status, of a stream that broke off the error's; ``last`` how an SSE stream ended.
    """

    def __init__(self, told: Arrive, id: str) -> None:
        self.told = told
        self.id = id
        self.body = _body(told)
        self.status: int | None = None
        self.code: str | None = None
        self.param: str | None = None
        self.retry_after_s = 0.0
        self.first_token_ms: float | None = None
        self.end_ms: float | None = None
        self.last = ""
        self._task: asyncio.Task[None] | None = None
        self._sent_s = 0.0

    def send(self, client: Client, url: str) -> None:
        """Publish it (or POST it to the gateway at ``url``), and follow it in a task."""
        self._sent_s = asyncio.get_running_loop().time()
        over = self._over_http(url) if self.told.over == "http" else self._over_bus(client)
        self._task = asyncio.create_task(over, name=self.id)

    async def leave(self) -> None:
        """The client goes away."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def answered(self) -> None:
        """Return when there is an outcome."""
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    def resubmit(self, bus: Bus) -> None:
        """A proxy sends the very same message once more."""
        told = self.told
        bus.publish(
            subjects.infer(told.tenant, told.model).subject, self.body,
            headers=RequestHeaders(request_id=self.id).encode(), reply=f"{subjects.inbox_prefix(told.tenant)}proxy",
        )  # fmt: skip

    def _since_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self._sent_s) * 1e3

    async def _over_bus(self, client: Client) -> None:
        told = self.told
        headers = RequestHeaders(
            request_id=self.id, ttft_ms=told.ttft_ms, tpot_ms=told.tpot_ms, deadline_ms=told.deadline_ms,
            no_hold=told.no_hold, priority=told.priority,
        )  # fmt: skip
        try:
            answer = await client.infer(told.model, self.body, headers=headers, via_gateway=told.over == "gateway")
            async with answer:
                async for _ in answer:
                    if self.first_token_ms is None:
                        self.first_token_ms = self._since_ms()
            self.status = 200
        except InferError as error:
            self.status, self.code, self.param = error.status, error.body.code, error.body.param
            self.retry_after_s = error.retry_after_s
        self.end_ms = self._since_ms()

    async def _over_http(self, url: str) -> None:
        headers = {"x-request-id": self.id, "content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + self.told.path, data=self.body, headers=headers) as reply,
        ):
            if reply.status == 200 and reply.content_type == "text/event-stream":
                await self._read_events(reply)
            else:
                answer = json.loads(await reply.read())
                if "error" in answer:
                    self.code, self.param = answer["error"]["code"], answer["error"]["param"]
                else:
                    self.first_token_ms = self._since_ms()
                self.retry_after_s = float(reply.headers.get("Retry-After", 0))
            self.status = reply.status
        self.end_ms = self._since_ms()

    async def _read_events(self, reply: aiohttp.ClientResponse) -> None:
        async for raw in reply.content:
            line = raw.decode().rstrip("\n")
            if not line:
                continue
            if not line.startswith("data: "):
                raise AssertionError(f"not a server-sent event: {line!r}")
            data = line.removeprefix("data: ")
            self.last = data
            if data != "[DONE]":
                event = json.loads(data)
                self.last = "an error event" if "error" in event else "a chunk"
                self.code = event["error"]["code"] if "error" in event else self.code
            if self.first_token_ms is None:
                self.first_token_ms = self._since_ms()


def _body(told: Arrive) -> bytes:
    if told.body:
        return told.body.encode()
    fields = {"model": told.model, "max_tokens": told.max_tokens, "stream": told.stream}
    return json.dumps({**fields, "prompt": told.text or prompt_ids(told.prompt).tolist()}).encode()
