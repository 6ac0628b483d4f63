"""Requests as an engine must get them, and what an agent reads of its answers.

A body goes through as the client wrote it. Set are only: the engine's name for the model, the salt of tenants that
must share nothing, what a handshake says, and that a stream shall end with its usage. No value is parsed for that.
"""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from quartet_agent.engines.base import Usage, Work
from quartet_bus.messages import Role
from quartet_core.openai import Refused, invalid, upstream

SALT_PREFIX: Final = "quartet:"
"""How the ``cache_salt`` begins that an agent sets; behind it stands the salt itself, so that whoever hears of a block
with it, after a restart too, knows whose it is."""

_fields = msgspec.json.Decoder(dict[str, Raw])
_options = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode

_PREFILL_DROPS: Final = ("max_completion_tokens", "min_tokens", "stream_options")
"""What has no meaning for an answer of one token that nobody reads."""

REMOTE_DECODE: Final = Raw(
    _encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)
"""``kv_transfer_params`` of a request whose KV another engine will fetch (vLLM's handshake)."""


class Order(Struct, frozen=True):
    """A body for the engine. ``hides_usage``: the client did not ask for the usage that ends the stream."""

    body: bytes
    hides_usage: bool = False


def cache_salt(salt: bytes) -> str:
    """The engine's ``cache_salt`` for a ladder's salt."""
    return SALT_PREFIX + salt.hex()


def salt_of_cache(text: str) -> bytes | None:
    """The ladder's salt in a ``cache_salt``; None when no agent has set it."""
    if not text.startswith(SALT_PREFIX):
        return None
    try:
        return bytes.fromhex(text.removeprefix(SALT_PREFIX))
    except ValueError:
        return None


def order(work: Work, *, model: str, usage: bool, salted: bool, rid: bool, handshake: bool = True) -> Order:
    """The body of ``work`` for an engine that calls the model ``model``; with a ``handshake``, that of a prefill says
    that another engine will fetch its KV. Raises ``Refused`` when it is no object."""
    try:
        fields = _fields.decode(work.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The body is not a JSON object: {error}") from None
    fields["model"] = _raw(model)
    if salted and work.salt:
        fields["cache_salt"] = _raw(cache_salt(work.salt))
    if rid:
        fields["rid"] = _raw(work.job)
    hides_usage = False
    if work.role is Role.PREFILL:
        for name in _PREFILL_DROPS:
            fields.pop(name, None)
        fields |= {"max_tokens": _raw(1), "stream": _raw(False)}
        if handshake:
            fields["kv_transfer_params"] = REMOTE_DECODE
    elif usage and work.inference.stream:
        hides_usage = _ask_for_usage(fields)
    if work.parameters:
        fields["kv_transfer_params"] = Raw(work.parameters)
    return Order(_encode(fields), hides_usage)


def discharge(work: Work, *, model: str) -> bytes:
    """A body that makes an engine fetch what another one keeps for it, and so frees it there."""
    fields = _fields.decode(work.body)
    for name in _PREFILL_DROPS:
        fields.pop(name, None)
    fields |= {"model": _raw(model), "max_tokens": _raw(1), "stream": _raw(False)}
    fields["kv_transfer_params"] = Raw(work.parameters)
    return _encode(fields)


def _raw(value: object) -> Raw:
    return Raw(_encode(value))


def _ask_for_usage(fields: dict[str, Raw]) -> bool:
    """Have the stream end with its usage; return whether the client did not ask for that."""
    given = fields.get("stream_options")
    options: dict[str, Any] = {}
    if given is not None and bytes(given) != b"null":
        try:
            options = _options.decode(given)
        except msgspec.DecodeError:
            return False  # the engine will say what is wrong with it
    if options.get("include_usage"):
        return False
    fields["stream_options"] = _raw({**options, "include_usage": True})
    return True


# Answers


class _Cached(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Answer(Struct):
    usage: _Usage | None = None
    choices: list[Raw] = []
    kv_transfer_params: Raw | UnsetType = UNSET


class _Error(Struct):
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None


class _ErrorAnswer(Struct):
    error: _Error | str | None = None
    message: Any = None
    type: Any = None
    param: Any = None
    code: Any = None
    detail: Any = None


_answer = msgspec.json.Decoder(_Answer)
_error = msgspec.json.Decoder(_ErrorAnswer)


class Told(Struct, frozen=True):
    """What one JSON object of an answer tells. ``usage_only``: it carries nothing else."""

    usage: Usage | None = None
    usage_only: bool = False
    parameters: bytes = b""


def told(data: bytes) -> Told:
    """What ``data`` tells; nothing when it is not as OpenAI's: it is the client's to read, not ours."""
    try:
        answer = _answer.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return Told()
    usage = None
    if answer.usage is not None:
        details = answer.usage.prompt_tokens_details
        usage = Usage(
            prompt_tokens=max(0, answer.usage.prompt_tokens or 0),
            cached_tokens=max(0, (details.cached_tokens or 0) if details is not None else 0),
            output_tokens=max(0, answer.usage.completion_tokens or 0),
        )
    parameters = answer.kv_transfer_params
    return Told(
        usage,
        usage is not None and not answer.choices,
        b"" if parameters is UNSET or bytes(parameters) == b"null" else bytes(parameters),
    )


def has_usage(data: bytes) -> bool:
    """Whether ``data`` may tell usage: a cheap look, right for any text, since quotes within it are escaped."""
    return b'"usage"' in data


def is_error(data: bytes) -> bool:
    """Whether a stream's object is an error in the place of a chunk."""
    return data.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"'))


def refusal(status: int, data: bytes) -> Refused:
    """The engine's own error as the client shall hear it; engines have three ways to write one."""
    try:
        found = _error.decode(data)
    except (msgspec.DecodeError, RecursionError):
        found = _ErrorAnswer()
    error = found.error if isinstance(found.error, _Error) else found
    message = found.error if isinstance(found.error, str) else error.message
    if message is None:
        message = found.detail if isinstance(found.detail, str) else f"The engine answered {status}."
    if status >= 500:
        return upstream(f"The engine failed: {message}", "engine_error")
    return Refused(
        status,
        str(message),
        kind=str(error.type or "invalid_request_error"),
        param=_text(error.param),
        code=_text(error.code) if isinstance(error.code, str) else None,
    )


def error_status(data: bytes) -> int:
    """The HTTP status that an error within a stream stands for; 500 when it names none."""
    try:
        found = _error.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return 500
    code = found.error.code if isinstance(found.error, _Error) else found.code
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def _text(value: object) -> str | None:
    return None if value is None else str(value)
