"""An engine's HTTP server, as its agent calls it: one connection pool, one API key, every wait bounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from quartet_bus.config.schema import EngineSection

_READ_BYTES = 64 * 1024
"""What is read ahead of a stream at most (aiohttp stops reading at twice that): beyond it the engine waits for us."""

_KEEP_ALIVE_S = 2.0
"""Idle connections are closed before the engine does (uvicorn: 5 s), so that no request meets a closing one."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""The largest answer to a request that does not stream, and to a probe."""


class EngineAway(Exception):
    """The engine did not answer. ``refused``: nobody listens there, so it does not run."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class AnswerTooLarge(Exception):
    """An answer is larger than is taken."""


class EngineServer:
    """The server at ``[[agent.engines]] url``. Used between ``open`` and ``close``.

    ``more_headers`` go with every request that is computed.
    """

    def __init__(self, section: EngineSection, more_headers: dict[str, str] | None = None) -> None:
        self.url = section.url
        self._section = section
        self._session: aiohttp.ClientSession | None = None
        self._key = section.api_key
        self.key_problem = ""
        """Why there is no key although a file is named for it."""
        self._posted = {"Content-Type": "application/json", **(more_headers or {})}

    async def open(self) -> None:
        """Make the connection pool; nothing is connected yet."""
        section = self._section
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=section.connect_timeout_ms / 1e3, sock_read=section.silence_ms / 1e3
            ),
            read_bufsize=_READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self.refresh_key()

    async def close(self) -> None:
        """Close all connections: what still runs on them ends there."""
        if self._session is not None:
            await self._session.close()

    def refresh_key(self) -> None:
        """Read the key's file again, if there is one: a key is often changed together with its engine."""
        file = self._section.api_key_file
        if file:
            try:
                self._key, self.key_problem = Path(file).read_text("utf-8").strip(), ""
            except OSError as error:
                self._key, self.key_problem = "", f"{file}: {error.strerror}"
            except UnicodeDecodeError:
                self._key, self.key_problem = "", f"{file}: is not UTF-8"

    def stream(self, path: str, body: bytes) -> "aiohttp.client._RequestContextManager":
        """A POST whose answer is read by the caller; leaving the context early closes the connection."""
        return self._opened.post(self.url + path, data=body, headers=self._headers(self._posted), allow_redirects=False)

    async def get(self, path: str, timeout_ms: float) -> tuple[int, bytes]:
        """(status, body) of a GET. Raises ``EngineAway``."""
        return await self._call(self._opened.get, path, timeout_ms)

    async def post(self, path: str, body: bytes, timeout_ms: float) -> tuple[int, bytes]:
        """(status, body) of a POST. Raises ``EngineAway``."""
        return await self._call(self._opened.post, path, timeout_ms, data=body, more=self._posted)

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engine's server was not opened")
        return self._session

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}", **more} if self._key else more

    async def _call(
        self,
        method: Callable[..., Any],
        path: str,
        timeout_ms: float,
        *,
        data: bytes | None = None,
        more: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_ms / 1e3)
        headers = self._headers(more or {})
        try:
            async with method(
                self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return int(response.status), await whole(response)
        except aiohttp.ClientConnectorError as error:
            raise EngineAway(str(error), refused=isinstance(error.os_error, ConnectionRefusedError)) from None
        except TimeoutError:
            raise EngineAway(f"no answer to {path} within {timeout_ms:g} ms") from None
        except (aiohttp.ClientError, OSError, AnswerTooLarge) as error:
            raise EngineAway(f"{path}: {type(error).__name__}: {error}") from None


async def whole(response: aiohttp.ClientResponse, limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The body of ``response``. Raises ``AnswerTooLarge``, and what aiohttp raises for one that breaks off."""
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit_bytes:
            raise AnswerTooLarge(f"more than {limit_bytes} bytes")
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
