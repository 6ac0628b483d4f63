"""The part of the OpenAI API that a control plane must understand: where the prompt is, how much is wanted, and errors.

Bodies travel unchanged from client to engine; nothing here rewrites one. Only the fields that decide routing are read.
"""

import re
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

ROUTER_STOPPING = "router_stopping"
"""The code of ``stopping``, at which clients of the bus send the request again."""


class Endpoint(StrEnum):
    """Which API a body is for, as told by its fields."""

    CHAT = "chat.completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class ErrorBody(Struct, omit_defaults=False):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Refused(Exception):
    """A request that gets an error instead of an answer.

    ``status`` is the HTTP status; ``retry_after_s`` > 0 when trying again later makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(message, kind, param, code)
        self.retry_after_s = retry_after_s


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refused:
    """400: the body is wrong; ``param`` names the field."""
    return Refused(400, message, kind="invalid_request_error", param=param, code=code)


def unknown_model(model: str) -> Refused:
    """404: no worker of this fleet has ever served the model."""
    return Refused(
        404,
        f"The model `{model}` does not exist.",
        kind="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def too_long(tokens: int, limit: int) -> Refused:
    """400: prompt and output do not fit the longest context that serves the model."""
    return invalid(
        f"This model's maximum context length is {limit} tokens; the request needs {tokens}.",
        "messages",
        "context_length_exceeded",
    )


def no_embeddings(model: str) -> Refused:
    """400: no engine that serves the model makes embeddings."""
    return invalid(f"The model `{model}` does not offer embeddings.", "model", "embeddings_not_offered")


def no_worker(model: str) -> Refused:
    """503: nothing alive serves the model right now."""
    return Refused(
        503, f"No worker serves `{model}` right now.", kind="service_unavailable", code="no_worker", retry_after_s=1.0
    )


def all_busy(model: str, retry_after_s: float) -> Refused:
    """429: every worker of the model is full."""
    return Refused(
        429,
        f"All workers of `{model}` are busy.",
        kind="rate_limit_error",
        code="all_busy",
        retry_after_s=retry_after_s,
    )


def upstream(message: str, code: str) -> Refused:
    """502: a worker or a transfer failed and the request could not be retried."""
    return Refused(502, message, kind="server_error", code=code)


def too_large(size_bytes: int | None, limit_bytes: int) -> Refused:
    """413: the body is larger than is taken; ``size_bytes`` is None where it was not read to its end."""
    size = f"more than {limit_bytes}" if size_bytes is None else str(size_bytes)
    return Refused(
        413,
        f"The request has {size} bytes; at most {limit_bytes} are taken.",
        kind="invalid_request_error",
        code="request_too_large",
    )


def broken(message: str, code: str) -> Refused:
    """500: a fault of ours."""
    return Refused(500, message, kind="server_error", code=code)


def duplicate(request_id: str) -> Refused:
    """409: a request of this id and attempt is being answered already, to somebody else."""
    return Refused(
        409, f"A request with the id `{request_id}` is running.", kind="invalid_request_error", code="duplicate_request"
    )


def late() -> Refused:
    """504: the request's own deadline passed before its answer was whole."""
    return Refused(504, "The request's deadline passed.", kind="timeout_error", code="deadline_exceeded")


def stopping() -> Refused:
    """503: this replica stops; another one may take the request."""
    return Refused(503, "The router is stopping.", kind="service_unavailable", code=ROUTER_STOPPING, retry_after_s=1.0)


class _Body(Struct):
    model: Any = UNSET
    prompt: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    max_tokens: Any = UNSET
    max_completion_tokens: Any = UNSET
    stream: Any = UNSET
    n: Any = UNSET


class Inference(Struct):
    """What routing reads of a request body; of embeddings, all inputs together are the prompt.

    ``prompt_ids`` is the prompt as token ids when the client sent ids; else ``prompt_text`` is its UTF-8 text (of a
    chat: compact JSON with sorted keys of tools and messages, so that equal conversations have equal bytes).
    ``max_tokens`` is None when the client set no limit.
    """

    endpoint: Endpoint
    stream: bool
    n: int
    max_tokens: int | None
    model: str | None
    prompt_ids: list[int] | None = None
    prompt_text: bytes = b""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: exact for ids, four bytes a token for text (256 bytes stand for a 64-token block)."""
        return len(self.prompt_ids) if self.prompt_ids is not None else -(-len(self.prompt_text) // 4)


_body = msgspec.json.Decoder(_Body)
_ids = msgspec.json.Decoder(list[int])
_text = msgspec.json.Decoder(str)
_inputs = msgspec.json.Decoder(str | list[str | int | list[int]])
_any = msgspec.json.Decoder(Any)
_messages = msgspec.json.Decoder(list[dict[str, Any]])
_QUOTE = ord('"')
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair is passed over as a whole
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\[^u]"  # so is any other escape: an escaped backslash begins none
)
_sorted = msgspec.json.Encoder(order="deterministic")


def parse(body: bytes, *, prompt: bool = True) -> Inference:
    """Read a chat, completions or embeddings body. Raises ``Refused`` (400, naming the field) for anything else.

    ``prompt`` False leaves the prompt unread, for a router whose gateway has sketched it already.
    """
    try:
        fields = _body.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The body is not a JSON object: {_why(body, error)}") from None
    stream = fields.stream
    if stream is not UNSET and stream is not None and not isinstance(stream, bool):
        raise invalid("`stream` must be true or false.", "stream")
    model = fields.model
    if model is not UNSET and not isinstance(model, str):
        raise invalid("`model` must be a string.", "model")
    inference = Inference(
        endpoint=Endpoint.CHAT,
        stream=stream is True,
        n=_count(fields.n, "n", 1) or 1,
        max_tokens=_limit(fields),
        model=None if model is UNSET else model,
    )
    if fields.messages is not UNSET:
        if prompt:
            inference.prompt_text = _chat_text(fields.messages, fields.tools)
    elif fields.prompt is not UNSET:
        inference.endpoint = Endpoint.COMPLETIONS
        if prompt:
            _read_prompt(fields.prompt, inference)
    elif fields.input is not UNSET:
        inference.endpoint = Endpoint.EMBEDDINGS
        if inference.stream:
            raise invalid("`stream` must be absent: embeddings come in one piece.", "stream")
        if prompt:
            _read_inputs(fields.input, inference)
    else:
        raise invalid(
            "One of `messages` (chat), `prompt` (completions) or `input` (embeddings) is required.", "messages"
        )
    return inference


def _why(body: bytes, error: Exception) -> str:
    """What is wrong with ``body``, in words. Of half a surrogate pair msgspec says anything from "malformed" to
    "truncated", and half a pair is what a client sends that cuts a text between two UTF-16 units."""
    for found in _LONE_SURROGATE.finditer(body):
        if found["lone"]:
            return (
                f"`{found['lone'].decode()}` at byte {found.start()} is half of a surrogate pair, which is no character"
            )
    return str(error)


def _limit(fields: _Body) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _count(getattr(fields, name), name, 1)
        if value is not None:
            return value
    return None


def _count(value: Any, name: str, least: int) -> int | None:
    if value is UNSET or value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid(f"`{name}` must be an integer of at least {least}.", name)
    return value


def _chat_text(messages: Raw, tools: Raw | UnsetType) -> bytes:
    try:
        parsed = _messages.decode(messages)
    except (msgspec.DecodeError, RecursionError):
        raise invalid("`messages` must be a list of objects.", "messages") from None
    if not parsed:
        raise invalid("`messages` must not be empty.", "messages")
    for index, message in enumerate(parsed):
        if not isinstance(message.get("role"), str):
            raise invalid(f"`messages[{index}].role` must be a string.", f"messages[{index}].role")
    try:
        text = _sorted.encode(parsed)
        return text if tools is UNSET else _sorted.encode(_any.decode(tools)) + text
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise invalid(f"`messages` or `tools` is not valid: {error}", "messages") from None


def _read_prompt(raw: Raw, inference: Inference) -> None:
    if memoryview(raw)[0] == _QUOTE:
        try:
            inference.prompt_text = _text.decode(raw).encode()
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise invalid(f"`prompt` is not valid text: {error}", "prompt") from None
        if not inference.prompt_text:
            raise invalid("`prompt` must not be empty.", "prompt")
        return
    try:
        ids = _ids.decode(raw)
    except msgspec.DecodeError:
        raise invalid(
            "`prompt` must be a string or a list of token ids; batches of prompts are not routed.", "prompt"
        ) from None
    if not ids:
        raise invalid("`prompt` must not be empty.", "prompt")
    if min(ids) < 0 or max(ids) > 0xFFFFFFFF:
        raise invalid("`prompt` holds a token id outside 0..4294967295.", "prompt")
    inference.prompt_ids = ids


def _read_inputs(raw: Raw, inference: Inference) -> None:
    inputs = embedding_inputs(raw)
    ids = [token for each in inputs if isinstance(each, list) for token in each]
    if ids:
        inference.prompt_ids = ids
    else:
        inference.prompt_text = "\0".join(each for each in inputs if isinstance(each, str)).encode()


def embedding_inputs(raw: Raw) -> list[str] | list[list[int]]:
    """The inputs to embed, one or many, as texts or as token ids. Raises ``Refused`` (400, naming ``input``)."""
    try:
        told = _inputs.decode(raw)
    except msgspec.DecodeError:
        told = []
    inputs: list[Any] = [told] if isinstance(told, str) else list(told)
    kinds = {type(each) for each in inputs}
    if kinds == {int}:
        inputs, kinds = [inputs], {list}
    if len(kinds) != 1 or not all(inputs):
        raise invalid(
            "`input` must be a text, a list of texts, a list of token ids, or a list of such lists; none may be empty.",
            "input",
        )
    try:
        if isinstance(inputs[0], str):
            "".join(inputs).encode()
        elif not all(0 <= token <= 0xFFFFFFFF for each in inputs for token in each):
            raise invalid("`input` holds a token id outside 0..4294967295.", "input")
    except UnicodeEncodeError as error:
        raise invalid(f"`input` is not valid text: {error}", "input") from None
    return inputs
