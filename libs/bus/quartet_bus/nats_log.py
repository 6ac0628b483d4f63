"""Kept logs on JetStream.

The broker files a message a moment after it took it, so a replay right after a publish may not have it yet.
"""

from collections.abc import AsyncIterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quartet_bus.bus import LogSpec, Message, Unavailable
from quartet_bus.lean import hidden

with hidden("aiohttp"):
    import nats.errors
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, RetentionPolicy, StreamConfig
    from nats.js.errors import APIError, BadRequestError, NotFoundError, ServiceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nats.aio.client import Client

BATCH_MESSAGES = 256
TIMEOUT_S = 5.0

_NO_JETSTREAM = (
    "the NATS broker has no JetStream, which kept logs need: "
    "start it with -js, or put jetstream {} in its configuration"
)


@contextmanager
def _available() -> "Iterator[None]":
    try:
        yield
    except (ServiceUnavailableError, nats.errors.NoRespondersError):
        raise Unavailable(_NO_JETSTREAM) from None
    except APIError as error:
        if "jetstream not enabled" in (error.description or "").lower():
            raise Unavailable(_NO_JETSTREAM) from None
        raise Unavailable(f"JetStream refuses: {error.description} (error {error.err_code})") from None
    except nats.errors.TimeoutError:
        raise Unavailable(f"JetStream does not answer within {TIMEOUT_S:g} s") from None


async def keep(client: "Client", log: LogSpec) -> None:
    """Make the stream of ``log``, or bring it to this spec. Raises ``Unavailable``."""
    stream = StreamConfig(
        name=log.name,
        subjects=list(log.subjects),
        max_age=log.max_age_s,
        max_bytes=log.max_bytes,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
    )
    manager = client.jetstream(timeout=TIMEOUT_S)
    with _available():
        try:
            await manager.add_stream(stream)
        except BadRequestError:
            # It exists with another configuration, or this one is wrong: an update tells the two apart.
            await manager.update_stream(stream)


async def replay(client: "Client", log: LogSpec, subject: str) -> AsyncIterator[Message]:
    """What the stream holds on ``subject`` now, oldest first. A stream that was never made holds nothing."""
    context = client.jetstream(timeout=TIMEOUT_S)
    reader = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.ALL,
        inactive_threshold=60.0,
        mem_storage=True,
    )
    with _available():
        try:
            subscription = await context.pull_subscribe(subject, stream=log.name, config=reader)
        except NotFoundError:
            return
    try:
        with _available():
            left = (await subscription.consumer_info()).num_pending or 0
        while left > 0:
            with _available():
                try:
                    batch = await subscription.fetch(min(left, BATCH_MESSAGES), timeout=TIMEOUT_S)
                except nats.errors.TimeoutError:
                    # What was counted may have grown too old in the meantime; if it is still there, this is a fault.
                    if (await subscription.consumer_info()).num_pending:
                        raise
                    return
            for message in batch:
                yield Message(message.subject, message.data, message.headers)
            left -= len(batch)
    finally:
        await subscription.unsubscribe()
