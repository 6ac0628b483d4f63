"""One connection to a NATS broker: nats-py's client, made and used in the only way that keeps our promises."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from quartet_bus.bus import BusError, Headers
from quartet_bus.config.schema import NatsSection
from quartet_bus.lean import hidden
from quartet_bus.nats_direct import DirectClient

with hidden("aiohttp"):
    import nats.errors
    from nats.aio.client import Client

CONNECT_TIMEOUT_S = 2
PING_INTERVAL_S = 5
MAX_PINGS = 2
"""A connection that swallows everything is found after three intervals."""


_BLANK = re.compile(r"[ \t\r\n]")
_HEADER_KEY = re.compile(r"[!-9;-~]+")  # printable ASCII but the colon, as RFC 7230 has it nearly


class ConnectFailed(BusError):
    """There is no connection yet; trying again may help."""


class CredentialsRefused(BusError):
    """The broker does not know us; trying again is no use."""


async def connect(
    section: NatsSection, name: str, inbox: str, on_error: Callable[[Exception], Awaitable[None]]
) -> DirectClient:
    """One try at one connection. Raises ``ConnectFailed`` or ``CredentialsRefused``."""
    client = DirectClient()
    failures: list[Exception] = []

    async def remember(error: Exception) -> None:
        failures[:] = [error]
        await on_error(error)

    try:
        await client.connect(
            section.url,
            name=name,
            user=section.user or None,
            password=section.password or None,
            user_credentials=section.credentials_file or None,
            inbox_prefix=inbox,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # 0 would try for ever in there
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_PINGS,
            # Never reached: the bus keeps a lower bound itself, because nats-py would suspend at this one.
            pending_size=2 * section.outgoing_bytes + (1 << 30),
            error_cb=remember,
        )
    except nats.errors.NoServersError as error:
        raise ConnectFailed(str(failures[0] if failures else error)) from error
    except (OSError, TimeoutError, nats.errors.Error) as error:
        if "authorization" in str(error).lower():
            raise CredentialsRefused(f"the NATS broker at {section.url} refuses our credentials") from error
        raise ConnectFailed(str(error) or type(error).__name__) from error
    except asyncio.CancelledError:
        await client.close()
        raise
    return client


def check_publish(subject: str, reply: str, headers: Headers | None) -> None:
    """Raise ``BusError`` for what no connection would send, so that it is refused alike with a broker and without.

    nats-py says so as well, but only once there is a connection, which is too late for a message that waits for one.
    """
    if not subject or _BLANK.search(subject) or (reply and _BLANK.search(reply)):
        raise BusError(f"cannot publish to {subject!r} with reply {reply!r}: no subject is empty or has blanks")
    if not _is_text(subject + reply):
        raise BusError(f"cannot publish to {subject!r} with reply {reply!r}: not valid text")
    for key, value in (headers or {}).items():
        if not _HEADER_KEY.fullmatch(key) or not _is_text(value):
            raise BusError(f"cannot publish to {subject!r} with the header {key!r}: {value!r}")


def check_subscribe(subject: str, queue: str) -> None:
    """Raise ``BusError`` for what is no subject (``*`` a whole token, ``>`` the last one) or no queue group."""
    tokens = subject.split(".")
    wrong = (
        _BLANK.search(subject)
        or not _is_text(subject + queue)
        or not all(tokens)
        or any("*" in token and token != "*" for token in tokens)
        or any(">" in token for token in tokens[:-1])
        or (">" in tokens[-1] and tokens[-1] != ">")
    )
    if wrong:
        raise BusError(f"{subject!r} is no subject to subscribe to")
    if _BLANK.search(queue):
        raise BusError(f"{queue!r} is no queue group")


def _is_text(text: str) -> bool:
    """Whether UTF-8 has it: half a surrogate pair has no bytes."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def send(
    client: DirectClient, subject: str, data: bytes, headers: Headers | None, reply: str, *, urgent: bool = False
) -> None:
    """Publish, as a plain call, what ``check_publish`` passed. A task of nats-py writes whatever was published in this
    iteration of the loop with one system call; what is ``urgent`` is written at once, and all before it.

    Raises ``BusError`` for what is no header.
    """
    try:
        client.send(subject, data, headers, reply, urgent)
    except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
        raise BusError(f"cannot publish to {subject!r} with reply {reply!r}: {error}") from error


async def ping(client: Client) -> None:
    """Return when the broker has seen everything sent before. Never cancel this on a living connection."""
    await client.flush(timeout=24 * 3600)
