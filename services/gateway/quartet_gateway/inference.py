"""``POST /v1/chat/completions`` and ``/v1/completions``: a body becomes a request on the bus, its chunks the answer."""

from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import msgspec
from aiohttp import web

from quartet_bus.bus import BusError, PayloadTooLarge
from quartet_bus.client import Answer, InferError
from quartet_core.openai import Endpoint, Inference, Refused, too_large, upstream
from quartet_gateway.errors import broker_away, internal
from quartet_gateway.events import EventStream, Outbox
from quartet_gateway.exchange import Exchange, Outcome
from quartet_gateway.passage import request_headers
from quartet_gateway.prompt import read_inference, sketch_prompt
from quartet_gateway.replies import json_reply
from quartet_gateway.service import GatewayService
from quartet_gateway.streams import Seat

_ROOM_FOR_HEADERS_BYTES = 64 * 1024
"""What a message's headers and subject may take of the broker's payload limit."""


class Completions:
    """Answers both inference endpoints.

    However an exchange ends (done, refused, timed out, client gone, gateway stopping), its ``Answer`` is closed, and
    closing an unfinished one cancels the request on the bus.
    """

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._settings = service.config.gateway
        self._outbox = Outbox()

    async def answer(self, exchange: Exchange, endpoint: Endpoint) -> web.StreamResponse:
        """The whole exchange. Raises ``Refused`` for what fails before the first byte; later it is an error event."""
        events: EventStream | None = None
        try:
            async with self._service.streams.admit(self._settings.request_timeout_ms) as seat:
                with self._within_limits(exchange), _bus_errors_refused():
                    answer = await self._ask(exchange, seat, endpoint)
                    seat.release()
                    async with aclosing(answer):
                        if not exchange.streamed:
                            return await self._whole(exchange, answer)
                        first = await anext(answer, None)
                        events = self._events(exchange)
                        await self._relay(exchange, events, first, answer)
                        _note_usage(exchange, answer)
        except Refused as refused:
            if events is None:
                raise
            await self._fail(exchange, events, refused)
        except ConnectionError:
            raise
        except Exception:
            if events is None:
                raise
            self._service.log.exception("stream failed", request=exchange.request_id)
            await self._fail(exchange, events, internal())
        finally:
            if events is not None:
                events.close()
        assert events is not None
        return events.reply

    @contextmanager
    def _within_limits(self, exchange: Exchange) -> Iterator[None]:
        """Count a request inside, and at its end what it came to. Raises ``Refused`` (429)."""
        service = self._service
        service.quotas.admit_request(exchange.tenant, service.now_s())
        used = True
        try:
            yield
        except Refused:
            used = exchange.first_byte_ns > 0
            raise
        finally:
            if exchange.grant is not None:
                # What was broken off has no counts of its own: nearly every chunk is one token.
                output_tokens = exchange.output_tokens or exchange.chunks
                exchange.grant.settle(exchange.prompt_tokens + output_tokens if used else 0, service.now_s())

    async def _ask(self, exchange: Exchange, seat: Seat, endpoint: Endpoint) -> Answer:
        """Publish the request, and return when its answer begins."""
        service, settings = self._service, self._settings
        headers = request_headers(exchange.request.headers, exchange.request_id)
        body = await exchange.read_body(
            seat,
            limit_bytes=min(settings.max_body_bytes, service.bus.max_payload_bytes - _ROOM_FOR_HEADERS_BYTES),
            timeout_ms=settings.body_timeout_ms,
        )
        inference = await read_inference(body, endpoint)
        model = inference.model or ""
        if not service.bus.connected:  # the bus would keep the request until there is a broker: too long for HTTP
            raise broker_away()
        service.models.check(model)
        exchange.model = model
        exchange.streamed = inference.stream
        prompt = await sketch_prompt(
            inference, body, exchange.tenant, model, service.models.section(model), service.tokenizers.of(model)
        )
        exchange.prompt_tokens = prompt.tokens
        if prompt.inexact:
            service.counts.inexact_sketches.labels(model, prompt.inexact).inc()
        exchange.grant = service.quotas.admit_tokens(
            exchange.tenant,
            prompt.tokens,
            _output_tokens(inference, service.models.section(model).max_tokens),
            service.now_s(),
        )
        exchange.said.update(service.quotas.headers(exchange.tenant, service.now_s()))
        left_ms = settings.request_timeout_ms - (service.now_ns() - exchange.started_ns) // 1_000_000
        headers = msgspec.structs.replace(
            headers,
            sketch=prompt.sketch,
            prompt_tokens=prompt.tokens,
            deadline_ms=max(1, min(headers.deadline_ms or left_ms, left_ms)),
        )
        return await service.client(exchange.tenant).infer(model, body, headers=headers, via_gateway=True)

    async def _whole(self, exchange: Exchange, answer: Answer) -> web.StreamResponse:
        chunks = [chunk async for chunk in answer]
        if len(chunks) != 1:
            raise upstream(f"The worker answered with {len(chunks)} JSON objects instead of one.", "bad_answer")
        exchange.first_byte_ns = self._service.now_ns()
        exchange.sent_bytes = len(chunks[0])
        exchange.outcome = Outcome.OK
        _note_usage(exchange, answer)
        return json_reply(chunks[0], exchange)

    def _events(self, exchange: Exchange) -> EventStream:
        return EventStream(
            exchange,
            self._outbox,
            limit_bytes=self._settings.slow_client_bytes,
            patience_ms=self._settings.slow_client_ms,
            on_slow=lambda: self._drop(exchange),
        )

    async def _relay(self, exchange: Exchange, events: EventStream, first: bytes | None, answer: Answer) -> None:
        exchange.first_byte_ns = self._service.now_ns()
        exchange.status = events.reply.status
        try:
            await events.begin()
            if first is not None:
                events.take(first)
                await answer.pour(events.take)
            await events.done()
            exchange.outcome = Outcome.OK
        finally:
            exchange.sent_bytes = events.sent_bytes
            exchange.chunks = events.chunks

    async def _fail(self, exchange: Exchange, events: EventStream, refused: Refused) -> None:
        exchange.failed(refused)
        self._service.counts.failed_streams.labels(exchange.code).inc()
        await events.error(refused)
        exchange.sent_bytes = events.sent_bytes

    def _drop(self, exchange: Exchange) -> None:
        """End the connection of a client that does not read: whatever else we wrote would only wait as well.

        With the connection ends its handler, and with that the request.
        """
        if exchange.outcome is Outcome.SLOW_CLIENT:
            return
        exchange.outcome = Outcome.SLOW_CLIENT
        self._service.counts.slow_clients.inc()
        self._service.log.warning("slow client dropped", request=exchange.request_id)
        transport = exchange.request.transport
        if transport is not None:
            transport.abort()


def _output_tokens(inference: Inference, default: int) -> int:
    """The most that the answer may have, as far as anybody said."""
    if inference.endpoint is Endpoint.EMBEDDINGS:
        return 0
    return (inference.max_tokens or default) * inference.n


def _note_usage(exchange: Exchange, answer: Answer) -> None:
    """Take the worker's own counts for the log, where it gave any."""
    end = answer.end
    if end is not None:
        exchange.prompt_tokens = end.prompt_tokens or exchange.prompt_tokens
        exchange.cached_tokens = end.cached_tokens
        exchange.output_tokens = end.output_tokens


@contextmanager
def _bus_errors_refused() -> Iterator[None]:
    """Turn what the bus and its client raise into the error that the caller gets."""
    try:
        yield
    except InferError as error:
        refused = Refused(error.status, error.body.message, kind=error.body.type, retry_after_s=error.retry_after_s)
        refused.body = error.body
        raise refused from None
    except PayloadTooLarge as error:
        raise too_large(error.size_bytes, error.limit_bytes) from None
    except BusError:
        raise broker_away() from None
