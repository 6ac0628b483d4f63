"""Answers in one piece: a JSON body, or OpenAI's error object. Streamed ones are in ``events``."""

import math

from aiohttp import web

from quartet_core.openai import Refused
from quartet_gateway.errors import error_json
from quartet_gateway.exchange import Exchange


def json_reply(body: bytes, exchange: Exchange) -> web.Response:
    """200 with ``body``."""
    return web.Response(body=body, content_type="application/json", headers=exchange.headers)


def error_reply(refused: Refused, exchange: Exchange, *, close: bool = False, allowed: str = "") -> web.Response:
    """The error as status, headers and OpenAI's error object; ``close`` ends the connection after it."""
    headers = exchange.headers
    if refused.retry_after_s > 0:
        headers["Retry-After"] = str(math.ceil(refused.retry_after_s))
        headers["Retry-After-Ms"] = str(math.ceil(refused.retry_after_s * 1e3))
    elif refused.status == 429:
        headers["x-should-retry"] = "false"  # OpenAI's clients would else try every 429 again
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if allowed:
        headers["Allow"] = allowed
    reply = web.Response(
        status=refused.status, body=error_json(refused.body), content_type="application/json", headers=headers
    )
    if close:
        reply.force_close()
    return reply
