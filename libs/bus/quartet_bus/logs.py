"""Logs: one JSON object a line on standard error, with UTC time, level, service and instance.

A process calls ``configure`` once; libraries and services get their logger from ``logger``.
"""

import logging
import sys
from typing import Any

import msgspec

from quartet_bus.lean import hidden

with hidden("rich"):
    import structlog
    from structlog.typing import FilteringBoundLogger

Logger = FilteringBoundLogger

_encoder = msgspec.json.Encoder(enc_hook=str)


def configure(level: str, *, service: str, instance: str) -> None:
    """Send everything at ``level`` (debug, info, warning, error) and above to standard error as JSON."""
    structlog.contextvars.clear_contextvars()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _whence(service, instance),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(serializer=_dump),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )


def logger(**context: Any) -> Logger:
    """A logger that says ``context`` with every line."""
    bound: Logger = structlog.get_logger(**context)
    return bound


def _whence(service: str, instance: str) -> structlog.typing.Processor:
    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("service", service)
        event.setdefault("instance", instance)
        return event

    return add


def _dump(event: dict[str, Any], **_: Any) -> bytes:
    return _encoder.encode(event)
