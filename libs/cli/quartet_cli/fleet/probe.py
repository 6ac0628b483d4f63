"""Asking processes whether they are ready, over their HTTP door."""

import asyncio
import json

from quartet_cli.fleet.ports import HOST

_TIMEOUT_S = 2.0


async def not_ready(port: int) -> str | None:
    """Why the service whose HTTP door is at ``port`` is not ready; None when it is."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, body = await _get(port, "/readyz")
    except OSError:
        return "starting"
    except TimeoutError:
        return "does not answer"
    if status == 200:
        return None
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return f"answers {status}"


async def _get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a page. Raises ``OSError`` when nobody answers properly."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError("no HTTP answer")
    return int(words[1]), body
