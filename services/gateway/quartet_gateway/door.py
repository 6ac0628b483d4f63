"""The HTTP door: addresses, API keys, the access log, and OpenAI's error object on whatever goes wrong."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from quartet_core.openai import Endpoint, Refused
from quartet_gateway.browsers import Browsers
from quartet_gateway.errors import internal, unknown_path, wrong_method
from quartet_gateway.exchange import REQUEST_ID, Exchange, Outcome
from quartet_gateway.inference import Completions
from quartet_gateway.replies import error_reply, json_reply
from quartet_gateway.service import GatewayService

Route = Callable[[Exchange], Awaitable[web.StreamResponse]]

_MODELS = "/v1/models"
_QUIET = ("health", "ready", "metrics")
"""Endpoints that machines ask every few seconds; their log lines are for debugging only."""

_LAST_WORDS = ("shutting_down", "broken_body")
"""Codes after which the connection is closed: the gateway goes away, or it lost its place in what the client sends."""


class Door:
    """Answers every HTTP request of one gateway; ``handle`` is what aiohttp calls."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._browsers = Browsers(service.config.gateway.cors_origins)
        completions = Completions(service)
        self._routes: dict[str, tuple[str, str, Route]] = {
            "/v1/chat/completions": ("POST", "chat.completions", lambda x: completions.answer(x, Endpoint.CHAT)),
            "/v1/completions": ("POST", "completions", lambda x: completions.answer(x, Endpoint.COMPLETIONS)),
            "/v1/embeddings": ("POST", "embeddings", lambda x: completions.answer(x, Endpoint.EMBEDDINGS)),
            _MODELS: ("GET", "models", self._models),
            "/health": ("GET", "health", self._health),
            "/ready": ("GET", "ready", self._ready),
            "/metrics": ("GET", "metrics", self._metrics),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, count it, and log one line that holds nothing of its prompt.

        A cancellation (the client left) and a broken connection go on to aiohttp, everything else is an answer.
        """
        exchange = Exchange(request, self._service.request_ids.fresh(), self._service.now_ns())
        try:
            reply = await self._answer(exchange)
            exchange.status = reply.status
            if exchange.outcome is Outcome.CLIENT_GONE:
                exchange.outcome = Outcome.OK
            return reply
        except Refused as refused:
            return self._refuse(exchange, refused)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            self._service.log.exception("request failed", request=exchange.request_id)
            return self._refuse(exchange, internal())
        finally:
            self._account(exchange)

    def refuse_unreadable(self, request: web.BaseRequest, refused: Refused) -> web.StreamResponse:
        """Answer what could not even be parsed as HTTP, and end the connection."""
        exchange = Exchange(request, self._service.request_ids.fresh(), self._service.now_ns())
        exchange.failed(refused)
        exchange.status = refused.status
        self._account(exchange)
        return error_reply(refused, exchange, close=True)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        path = request.path
        route = self._route(path)
        if route is None:
            raise unknown_path(request.method, path)
        method, exchange.endpoint, answer = route
        exchange.said.update(self._browsers.headers(request.headers))
        if self._service.leaving:
            exchange.said["Connection"] = "close"
        if request.method == "OPTIONS" and self._browsers.asks_first(request.headers):
            return web.Response(status=204, headers={**exchange.headers, **self._browsers.allowed(method)})
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            raise wrong_method(request.method, path, method)
        if path.startswith("/v1/"):
            exchange.tenant = self._service.keys.tenant(request.headers.get("Authorization"))
        exchange.request_id = self._service.request_ids.choose(exchange.tenant, request.headers.get(REQUEST_ID))
        return await answer(exchange)

    def _refuse(self, exchange: Exchange, refused: Refused) -> web.StreamResponse:
        exchange.failed(refused)
        exchange.status = refused.status
        if refused.body.code == "rate_limit_exceeded":
            self._service.counts.limited.labels(refused.body.type).inc()
            exchange.said.update(self._service.quotas.headers(exchange.tenant, self._service.now_s()))
        allowed = ""
        if refused.status == 405:
            route = self._route(exchange.request.path)
            allowed = route[0] if route else ""
        close = refused.body.code in _LAST_WORDS
        return error_reply(refused, exchange, close=close, allowed=allowed)

    def _route(self, path: str) -> tuple[str, str, Route] | None:
        if path.startswith(_MODELS + "/") and len(path) > len(_MODELS) + 1:
            return "GET", "models", self._model
        return self._routes.get(path)

    async def _models(self, exchange: Exchange) -> web.StreamResponse:
        return json_reply(self._service.models.listing(), exchange)

    async def _model(self, exchange: Exchange) -> web.StreamResponse:
        name = exchange.request.path[len(_MODELS) + 1 :]
        return json_reply(self._service.models.entry(name), exchange)

    async def _health(self, exchange: Exchange) -> web.StreamResponse:
        return json_reply(b'{"status":"ok"}', exchange)

    async def _ready(self, exchange: Exchange) -> web.StreamResponse:
        reason = self._service.not_ready()
        if reason is not None:
            raise Refused(503, reason, kind="service_unavailable", code="not_ready", retry_after_s=1.0)
        degraded = self._service.tokenizers.degraded
        told = {"status": "ready", "degraded": degraded} if degraded else {"status": "ready"}
        return json_reply(msgspec.json.encode(told), exchange)

    async def _metrics(self, exchange: Exchange) -> web.StreamResponse:
        return web.Response(
            body=self._service.metrics.exposition(),
            headers={**exchange.headers, "Content-Type": CONTENT_TYPE_LATEST},
        )

    def _account(self, exchange: Exchange) -> None:
        counts = self._service.counts
        now_ns = self._service.now_ns()
        counts.requests.labels(exchange.endpoint, exchange.status, exchange.model).inc()
        counts.received.inc(exchange.received_bytes)
        counts.sent.inc(exchange.sent_bytes)
        first_byte_ms = None
        if exchange.first_byte_ns:
            first_byte_ms = (exchange.first_byte_ns - exchange.started_ns) / 1e6
            counts.first_byte.labels(exchange.endpoint).observe(first_byte_ms / 1e3)
        say = self._service.log.debug if exchange.endpoint in _QUIET else self._service.log.info
        say(
            "request",
            request=exchange.request_id,
            method=exchange.request.method,
            path=exchange.request.path[:200],
            status=exchange.status,
            outcome=exchange.outcome.value,
            code=exchange.code,
            tenant=exchange.tenant,
            model=exchange.model,
            stream=exchange.streamed,
            prompt_tokens=exchange.prompt_tokens,
            cached_tokens=exchange.cached_tokens,
            output_tokens=exchange.output_tokens,
            received_bytes=exchange.received_bytes,
            sent_bytes=exchange.sent_bytes,
            first_byte_ms=None if first_byte_ms is None else round(first_byte_ms, 3),
            total_ms=round((now_ns - exchange.started_ns) / 1e6, 3),
        )
