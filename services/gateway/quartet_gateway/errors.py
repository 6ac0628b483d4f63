"""Errors that only an HTTP door can know, and the JSON in which OpenAI's clients expect every error."""

import msgspec
from msgspec import Struct

from quartet_core.openai import ErrorBody, Refused, invalid


class _Envelope(Struct):
    error: ErrorBody


_encode = msgspec.json.Encoder().encode


def error_json(error: ErrorBody) -> bytes:
    """``error`` in the envelope that every error answer and every SSE error event carries."""
    return _encode(_Envelope(error))


def missing_key() -> Refused:
    """401: the caller said no API key."""
    return Refused(
        401,
        "You didn't provide an API key. Send it as `Authorization: Bearer KEY`.",
        kind="invalid_request_error",
        code="missing_api_key",
    )


def wrong_key() -> Refused:
    """401: the caller's API key belongs to no tenant."""
    return Refused(401, "Incorrect API key provided.", kind="invalid_request_error", code="invalid_api_key")


def unknown_path(method: str, path: str) -> Refused:
    """404: no such address."""
    return Refused(
        404, f"Unknown request URL: {method} {path[:200]}.", kind="invalid_request_error", code="unknown_url"
    )


def wrong_method(method: str, path: str, allowed: str) -> Refused:
    """405: the address exists, but not with this method."""
    return Refused(
        405,
        f"Not allowed: {method} {path[:200]}; use {allowed}.",
        kind="invalid_request_error",
        code="method_not_allowed",
    )


def slow_body(timeout_ms: int) -> Refused:
    """408: the body did not arrive in time."""
    return Refused(
        408,
        f"The request body did not arrive within {timeout_ms} ms.",
        kind="invalid_request_error",
        code="request_timeout",
    )


def broken_body(reason: str) -> Refused:
    """400: the body ended early, or is not encoded as its headers say."""
    return invalid(f"The request body could not be read: {reason}.", code="broken_body")


def too_many_streams(limit: int) -> Refused:
    """429: this gateway answers as many requests as it may."""
    return Refused(
        429,
        f"This gateway is answering {limit} requests, its limit.",
        kind="rate_limit_error",
        code="too_many_streams",
        retry_after_s=1.0,
    )


def bodies_full(room_bytes: int) -> Refused:
    """429: the bodies of the requests that wait for their first token take all the room there is for them."""
    return Refused(
        429,
        f"The requests waiting at this gateway hold {room_bytes} bytes, its limit.",
        kind="rate_limit_error",
        code="too_many_bytes",
        retry_after_s=1.0,
    )


def too_many_per_minute(what: str, tenant: str, limit: int, wanted: int, wait_s: float) -> Refused:
    """429: the tenant used its requests or tokens of this minute; ``wait_s`` is when it may try again."""
    return Refused(
        429,
        f"Rate limit reached for `{tenant}` on {what} per minute: limit {limit}, requested {wanted}. "
        f"Please try again in {wait_s:g} s.",
        kind=what,
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def too_many_tokens_at_once(tenant: str, limit: int, wanted: int) -> Refused:
    """429: the prompt alone is more than the tenant may use in any minute, so that trying again is no use."""
    return Refused(
        429,
        f"Request too large for `{tenant}` on tokens per minute: limit {limit}, requested {wanted}. "
        "The prompt must be reduced to run.",
        kind="tokens",
        code="rate_limit_exceeded",
    )


def header_too_long(limit_bytes: int) -> Refused:
    """431: the request line or a header field is longer than is read."""
    return Refused(
        431,
        f"The request line and every header field may have at most {limit_bytes} bytes.",
        kind="invalid_request_error",
        code="headers_too_large",
    )


def timed_out(timeout_ms: float) -> Refused:
    """504: the answer was not complete in time."""
    return Refused(
        504, f"The answer was not complete within {timeout_ms:.0f} ms.", kind="server_error", code="request_timeout"
    )


def stopping() -> Refused:
    """503: this gateway is being stopped; another one will take the request."""
    return Refused(
        503, "This gateway is shutting down.", kind="service_unavailable", code="shutting_down", retry_after_s=1.0
    )


def broker_away() -> Refused:
    """503: this gateway cannot reach the bus right now."""
    return Refused(
        503,
        "The gateway has no connection to its message broker right now.",
        kind="service_unavailable",
        code="no_broker",
        retry_after_s=1.0,
    )


def fleet_unknown() -> Refused:
    """503: no node was heard since this gateway started, so it cannot say yet which models there are."""
    return Refused(
        503,
        "No worker has announced itself to this gateway yet.",
        kind="service_unavailable",
        code="no_worker",
        retry_after_s=1.0,
    )


def internal() -> Refused:
    """500: a fault of ours; the log has it under the request's id."""
    return Refused(500, "The gateway failed while handling the request.", kind="server_error", code="internal_error")
