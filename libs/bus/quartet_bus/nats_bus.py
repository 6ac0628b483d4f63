"""The bus over NATS.

nats-py does the protocol, TLS and credentials of one connection. Three things are ours, because the contract asks more:

- **There is one way back.** nats-py's own reconnecting gives up for good on some errors of the broker, so it is off:
  when a connection ends, a new one is made, for ever, with every subscription made again on it.
- **Publishing is a plain call** (``nats_link.send``). While the broker is away, messages wait here, in order and
  within ``outgoing_bytes``, which also bounds what nats-py has not written yet.
- **Handlers are plain calls**, one at a time, in the order of arrival (``nats_direct``), and what they raise is counted
  and logged. Who handles more slowly than messages come does not read them: they wait at the broker, which ends the
  connection of who stays behind for too long.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from msgspec import Struct

from quartet_bus import nats_link, nats_log
from quartet_bus.bus import BusError, Disconnected, Handler, Headers, LogSpec, Message, RequestTimeout
from quartet_bus.config.schema import NatsSection
from quartet_bus.lean import hidden
from quartet_bus.logs import logger
from quartet_bus.nats_direct import DirectClient
from quartet_bus.payload import check_size
from quartet_bus.requests import Requests
from quartet_bus.subjects import token

with hidden("aiohttp"):
    import nats.errors
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as NatsSubscription

_log = logger()

FLUSH_TIMEOUT_S = 10.0
CLOSE_FLUSH_S = 2.0
RETRY_S = 0.2
WATCH_S = 0.1
SAY_SO_S = 1.0
CONTROL_LINE_BYTES = 4096
"""The broker's own limit for what precedes a payload, so more than any message adds to the buffer besides payload."""


class NatsCounts(Struct):
    """What went wrong on a bus since it was made."""

    handler_errors: int = 0
    reconnects: int = 0
    restore_drops: int = 0
    """Messages that waited for a connection, and subscriptions, that a new connection did not take."""


class _Outgoing(NamedTuple):
    subject: str
    data: bytes
    headers: Headers | None
    reply: str


class _Subscription:
    """What was subscribed, across all connections, and how it is called on the present one."""

    __slots__ = ("bus", "client", "handler", "live", "present", "queue", "subject")

    def __init__(self, bus: "NatsBus", subject: str, handler: Handler, queue: str) -> None:
        self.bus = bus
        self.subject = subject
        self.handler = handler
        self.queue = queue
        self.live = True
        self.client: DirectClient | None = None
        self.present: NatsSubscription | None = None

    async def stop(self) -> None:
        """Hear no more."""
        await self.bus.drop(self)

    async def on_message(self, message: Msg) -> None:
        """For a message that nats-py should have read before ``DirectClient.deliver`` was told of this subscription."""
        self.take(Message(message.subject, message.data, message.headers, message.reply))

    def take(self, message: Message) -> None:
        """One message, as it is read."""
        if not self.live:
            return
        try:
            self.handler(message)
        except Exception:
            self.bus.counts.handler_errors += 1
            _log.exception("handler failed", subject=message.subject)


async def connect(section: NatsSection, *, name: str = "") -> "NatsBus":
    """A connected bus. Waits for a broker that is not there yet, saying so once a second.

    Raises ``Disconnected`` after ``connect_timeout_ms`` (0: never), and ``nats_link.CredentialsRefused`` at once.
    """
    bus = NatsBus(section, name=name)
    try:
        await bus.open()
    except BaseException:
        await bus.close()
        raise
    return bus


class NatsBus:
    """One client of a NATS broker; see ``quartet_bus.bus.Bus`` for the contract and ``connect`` to make one."""

    def __init__(self, section: NatsSection, *, name: str = "") -> None:
        self.counts = NatsCounts()
        self._section = section
        self._name = name
        self._client: DirectClient | None = None
        self._max_payload_bytes = 1024 * 1024
        self._subscriptions: list[_Subscription] = []
        self._waiting: deque[_Outgoing] = deque()
        self._waiting_bytes = 0
        self._online = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._last_error: Exception | None = None
        # A user may subscribe below its own inbox prefix alone, hence its name.
        self._inbox = f"_INBOX.{token(section.user) if section.user else 'service'}"
        self._requests = Requests(self, f"{self._inbox}.{secrets.token_hex(12)}")

    async def open(self) -> None:
        """Make the first connection; see ``connect``."""
        timeout_ms = self._section.connect_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
                await self._connect_until_there()
        except TimeoutError:
            raise Disconnected(
                f"no NATS broker at {self._section.url} within {timeout_ms} ms: {self._last_error}"
            ) from None
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="nats connection")

    @property
    def max_payload_bytes(self) -> int:
        """The broker's limit, as it said when we connected."""
        return self._max_payload_bytes

    @property
    def unsent_bytes(self) -> int:
        """As ``Bus.unsent_bytes``."""
        return self._waiting_bytes + (self._client.pending_data_size if self._client is not None else 0)

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now."""
        return self._client is not None and self._client.is_connected

    def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "", urgent: bool = False
    ) -> None:
        """Hand one message to the connection, or keep it until there is one again."""
        if self._closed:
            raise Disconnected("the bus is closed")
        nats_link.check_publish(subject, reply, headers)
        check_size(subject, data, headers, self._max_payload_bytes)
        message = _Outgoing(subject, data, headers, reply)
        if self._client is None or not self._client.is_connected or self._waiting:
            size = len(data) + CONTROL_LINE_BYTES
            if self._waiting_bytes + size > self._section.outgoing_bytes:
                raise Disconnected(f"the broker is away and {self._waiting_bytes} bytes wait for it already")
            self._waiting.append(message)
            self._waiting_bytes += size
            return
        pending = self._client.pending_data_size
        if pending and pending + len(data) + CONTROL_LINE_BYTES > self._section.outgoing_bytes:
            raise Disconnected(f"the broker does not take our messages: {pending} bytes wait for it")
        nats_link.send(self._client, *message, urgent=urgent)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """Call ``handler`` with every message on ``subject``, on this connection and all that follow it."""
        if self._closed:
            raise Disconnected("the bus is closed")
        nats_link.check_subscribe(subject, queue)
        subscription = _Subscription(self, subject, handler, queue)
        self._subscriptions.append(subscription)
        try:
            if self.connected and self._client is not None:
                await self._subscribe_on(self._client, subscription)
            await self.flush()
        except BaseException:
            await self.drop(subscription)
            raise
        return subscription

    async def drop(self, subscription: _Subscription) -> None:
        """End ``subscription``; ending it twice does nothing."""
        if not subscription.live:
            return
        subscription.live = False
        self._subscriptions.remove(subscription)
        if subscription.present is not None and self.connected:
            try:
                await subscription.present.unsubscribe()
            except nats.errors.Error as error:
                # The connection just ended, and with it the subscription.
                _log.debug("unsubscribe came too late", subject=subscription.subject, error=str(error))

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Publish and return the first answer."""
        return await self._requests.ask(subject, data, timeout_s=timeout_s, headers=headers)

    async def flush(self) -> None:
        """Return when the broker has taken everything published so far."""
        if self._closed:
            raise RequestTimeout("flush", 0.0)
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while True:
                    await self._online.wait()
                    client = self._client
                    if client is not None and await self._flush_on(client, FLUSH_TIMEOUT_S):
                        return
                    await asyncio.sleep(WATCH_S)
        except TimeoutError:
            raise RequestTimeout("flush", FLUSH_TIMEOUT_S) from None

    async def keep(self, log: LogSpec) -> None:
        """Have JetStream keep ``log``. Raises ``Unavailable`` when the broker has none."""
        await nats_log.keep(self._connection(), log)

    async def replay(self, log: LogSpec, subject: str) -> AsyncIterator[Message]:
        """What ``log`` holds on ``subject`` right now, oldest first. Raises ``Unavailable``."""
        async for message in nats_log.replay(self._connection(), log, subject):
            yield message

    async def close(self) -> None:
        """Send what is queued (if the broker is there), then end everything."""
        if self._closed:
            return
        if self.connected and self._client is not None:
            await self._flush_on(self._client, CLOSE_FLUSH_S)
        self._closed = True
        self._requests.close()
        await self._end_watch()
        for subscription in self._subscriptions:
            subscription.live = False
        self._subscriptions.clear()
        self._waiting.clear()
        if self._client is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._client.close(), CLOSE_FLUSH_S)
        self._end_flushes()

    # The connection

    async def _end_watch(self) -> None:
        """End the task that looks after the connection. One cancel may be lost: nats-py swallows what reaches it while
        it ends a connection, as when broker and process are stopped together."""
        if self._watching is not None:
            while not self._watching.done():
                self._watching.cancel()
                await asyncio.wait([self._watching], timeout=RETRY_S)

    def _connection(self) -> DirectClient:
        if self._client is None or not self._client.is_connected:
            raise Disconnected(f"the broker at {self._section.url} is away")
        return self._client

    async def _connect_until_there(self) -> None:
        """Connect, subscribe to everything again, and send what waited, trying until it works."""
        loop = asyncio.get_running_loop()
        say_so_at = loop.time() + SAY_SO_S
        while not self._closed:
            try:
                client = await nats_link.connect(self._section, self._name, self._inbox, self._on_error)
                try:
                    if await self._restore(client):
                        return
                except BaseException:
                    await client.close()
                    raise
            except nats_link.ConnectFailed as error:
                self._last_error = error
            if loop.time() >= say_so_at:
                say_so_at = loop.time() + SAY_SO_S
                _log.warning("waiting for the NATS broker", url=self._section.url, error=str(self._last_error))
            await asyncio.sleep(RETRY_S)

    async def _restore(self, client: DirectClient) -> bool:
        """Make ``client`` the present connection; False when it ended before it was.

        What it does not take is counted, logged and left out: one bad message must not keep the bus from its broker.
        """
        while missing := [known for known in self._subscriptions if known.client is not client]:
            for subscription in missing:
                try:
                    await self._subscribe_on(client, subscription)
                except Exception:  # tried again on the next connection
                    self.counts.restore_drops += 1
                    _log.exception("cannot subscribe again", subject=subscription.subject)
        if not client.is_connected:
            return False
        # From here on nothing is awaited, so that no new message overtakes one that waited.
        self._max_payload_bytes = client.max_payload
        while self._waiting:
            message = self._waiting.popleft()
            self._waiting_bytes -= len(message.data) + CONTROL_LINE_BYTES
            try:
                # The broker may have come back with a lower limit, and ends the connection of who exceeds it.
                check_size(message.subject, message.data, message.headers, self._max_payload_bytes)
                nats_link.send(client, *message)
            except Exception:
                self.counts.restore_drops += 1
                _log.exception("dropped a message that waited for the NATS broker", subject=message.subject)
        self._client = client
        self._online.set()
        return True

    async def _watch(self) -> None:
        """Get a new connection whenever the present one has ended.

        The state of nats-py's client is looked at, not its callbacks waited for: these are left out when the
        connection breaks with messages still unsent.

        Nothing ends this but ``close``: without it the bus would never be back.
        """
        while not self._closed:
            await asyncio.sleep(WATCH_S)
            try:
                client = self._client
                if client is not None:
                    if client.is_connected:
                        continue
                    self._client = None
                    self._online.clear()
                    self._end_flushes()
                    _log.warning("lost the NATS broker", url=self._section.url, error=str(client.last_error or ""))
                    await client.close()
                await self._connect_until_there()
            except nats_link.CredentialsRefused as error:
                # Credentials that were good before may be good again once the operator is done changing them.
                _log.error("cannot return to the NATS broker", error=str(error))
                await asyncio.sleep(SAY_SO_S)
                continue
            except Exception as error:
                self._last_error = error
                _log.exception("failed to return to the NATS broker; trying again", url=self._section.url)
                await asyncio.sleep(SAY_SO_S)
                continue
            self.counts.reconnects += 1
            _log.info("back at the NATS broker", url=self._section.url)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if "permissions violation" in str(error):
            _log.error("the NATS broker refuses this", error=str(error))

    async def _subscribe_on(self, client: DirectClient, subscription: _Subscription) -> None:
        subscription.client = client
        try:
            subscription.present = await client.subscribe(
                subscription.subject,
                queue=subscription.queue,
                cb=subscription.on_message,
            )
            client.deliver(subscription.present, subscription.take)
        except nats.errors.ConnectionClosedError as error:
            # The next connection subscribes again.
            _log.debug("connection ended while subscribing", subject=subscription.subject, error=str(error))
        except nats.errors.BadSubjectError as error:
            raise BusError(f"{subscription.subject!r} is no subject to subscribe to") from error

    async def _flush_on(self, client: DirectClient, timeout_s: float) -> bool:
        """Whether the broker answered a ping on this very connection.

        nats-py must not see its flush cancelled or timed out: a pong that arrives for it later ends its reading task.
        """
        task = asyncio.get_running_loop().create_task(nats_link.ping(client), name="nats flush")
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        return bool(done) and not task.cancelled() and task.exception() is None

    def _end_flushes(self) -> None:
        for task in self._flushes:
            task.cancel()
