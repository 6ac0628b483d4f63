"""Discovery as the NATS services API has it: what a service answers on ``$SRV.PING``, ``INFO`` and ``STATS``.

Answered by ourselves, because it must be the same on every bus; tools such as ``nats micro ls`` see our services.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import msgspec
from msgspec import Struct, field

from quartet_bus.subjects import token

VERSION = "0.1.0"
_TYPE = "io.nats.micro.v1."

_encode = msgspec.json.Encoder().encode


class Endpoint(Struct):
    """One subscription of a service and how it fares."""

    name: str
    subject: str
    queue_group: str
    requests: int = field(default=0, name="num_requests")
    errors: int = field(default=0, name="num_errors")
    last_error: str = ""
    processing_time: int = 0
    average_processing_time: int = 0

    def fail(self, error: str) -> None:
        """Count one error."""
        self.errors += 1
        self.last_error = error[:200]


class _EndpointInfo(Struct):
    name: str
    subject: str
    queue_group: str
    metadata: dict[str, str] = field(default_factory=dict)


class _Ping(Struct):
    type: str
    name: str
    id: str
    version: str = VERSION
    metadata: dict[str, str] = field(default_factory=dict)


class _Info(_Ping):
    description: str = ""
    endpoints: list[_EndpointInfo] = field(default_factory=list)


class _Stats(_Ping):
    endpoints: list[Endpoint] = field(default_factory=list)
    started: str = ""


class MicroService:
    """The discovery side of one service instance."""

    def __init__(self, name: str, instance: str) -> None:
        self._name = name
        self._instance = instance
        self._endpoints: list[Endpoint] = []
        self._started = ""

    def started(self, now_ns: int, *, virtual: bool) -> None:
        """Note when the service started; virtual time counts from 1970, as it has no date."""
        at = datetime.fromtimestamp(now_ns / 1e9, UTC) if virtual else datetime.now(UTC)
        self._started = at.isoformat().replace("+00:00", "Z")

    def endpoint(self, subject: str, queue: str) -> Endpoint:
        """Register one subscription. Its name is its subject in the characters that the API allows."""
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in subject)
        endpoint = Endpoint(name, subject, queue)
        self._endpoints.append(endpoint)
        return endpoint

    def subjects(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Where to listen, and what to answer there."""
        for verb, answer in (("PING", self.ping), ("INFO", self.info), ("STATS", self.stats)):
            for tail in ("", f".{self._name}", f".{self._name}.{token(self._instance)}"):
                yield f"$SRV.{verb}{tail}", answer

    def ping(self) -> bytes:
        """Who this is."""
        return _encode(_Ping(_TYPE + "ping_response", self._name, self._instance))

    def info(self) -> bytes:
        """Who this is and what it listens to."""
        endpoints = [_EndpointInfo(known.name, known.subject, known.queue_group) for known in self._endpoints]
        return _encode(_Info(_TYPE + "info_response", self._name, self._instance, endpoints=endpoints))

    def stats(self) -> bytes:
        """How much each subscription heard and how often it failed. Times are not taken, and 0."""
        return _encode(
            _Stats(
                _TYPE + "stats_response",
                self._name,
                self._instance,
                endpoints=self._endpoints,
                started=self._started,
            )
        )
