"""Answers as an OpenAI-compatible engine gives them: chunks and whole answers, chat and completions, as JSON bytes.

A token's chunk is a fixed head, the text, and a fixed tail: the head and tail are made once for each answer.
"""

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quartet_core.openai import Endpoint, Inference, invalid


class AnswerOptions(Struct, frozen=True):
    """What of a body decides the shape of its answer. ``limited``: the client set how long it may be."""

    include_usage: bool = False
    limited: bool = False


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Fields(Struct):
    stream_options: _StreamOptions | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None


_fields = msgspec.json.Decoder(_Fields)
_encode = msgspec.json.Encoder().encode


def read_options(body: bytes, inference: Inference) -> AnswerOptions:
    """Read what ``quartet_core.openai.parse`` leaves out of ``body``.

    Raises ``Refused`` (400) for fields of a wrong type, and for what this engine does not do: several answers to one
    prompt, echoing it, log probabilities.
    """
    try:
        fields = _fields.decode(body)
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid: {error}") from None
    if inference.n != 1:
        raise invalid("`n` must be 1: the simulated engine gives one answer to a prompt.", "n")
    if fields.best_of not in (None, 1):
        raise invalid("`best_of` must be 1: the simulated engine gives one answer to a prompt.", "best_of")
    if fields.echo:
        raise invalid("`echo` must be false: the simulated engine has only tokens, not their text.", "echo")
    if fields.logprobs not in (None, False):
        raise invalid("`logprobs` must be absent: the simulated engine has no probabilities.", "logprobs")
    options = fields.stream_options
    if options is not None and not inference.stream:
        raise invalid("`stream_options` may only be set when `stream` is true.", "stream_options")
    return AnswerOptions(
        include_usage=options is not None and options.include_usage is True,
        limited=inference.max_tokens is not None,
    )


class _CachedTokens(Struct):
    cached_tokens: int


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens


class _Message(Struct):
    content: str
    role: str = "assistant"


class _Choice(Struct, omit_defaults=False):
    finish_reason: str
    message: _Message | UnsetType = UNSET
    text: str | UnsetType = UNSET
    index: int = 0
    logprobs: None = None


class _Answer(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: _Usage


class AnswerWriter:
    """Writes the answer to one request. ``created`` is in Unix seconds; ``id`` as the client shall see it.

    Streaming: ``first`` (if any), ``token`` for each, then all of ``last``. Else: ``whole``.
    """

    __slots__ = ("_chat", "_created", "_end", "_head", "_head_token", "_id", "_include_usage", "_model", "_tail")

    def __init__(
        self, inference: Inference, model: str, id: str, created: int, options: AnswerOptions | None = None
    ) -> None:
        self._chat = inference.endpoint is Endpoint.CHAT
        self._id = id
        self._model = model
        self._created = created
        self._include_usage = options is not None and options.include_usage
        kind = b"chat.completion.chunk" if self._chat else b"text_completion"
        self._head = b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _encode(id),
            kind,
            created,
            _encode(model),
        )
        # with include_usage every chunk but the last says that its usage is not known yet
        self._end = b'],"usage":null}' if self._include_usage else b"]}"
        opening = b'{"index":0,"delta":{"content":' if self._chat else b'{"index":0,"text":'
        closing = (
            b'},"logprobs":null,"finish_reason":null}' if self._chat else b',"logprobs":null,"finish_reason":null}'
        )
        self._tail = closing + self._end
        self._head_token = self._head + opening

    def first(self) -> bytes | None:
        """The chunk before the first token: of a chat, who speaks; of a completion there is none."""
        if not self._chat:
            return None
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._head + delta + self._end

    def token(self, text: str) -> bytes:
        """The chunk of one token."""
        return self._head_token + _encode(text) + self._tail

    def last(self, finish_reason: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> list[bytes]:
        """The chunk that says why it ended, and, if the client asked for it, the one with the usage."""
        choice = b'{"index":0,"delta":{}' if self._chat else b'{"index":0,"text":""'
        chunks = [
            b'%b%b,"logprobs":null,"finish_reason":%b}%b' % (self._head, choice, _encode(finish_reason), self._end)
        ]
        if self._include_usage:
            usage = _usage(prompt_tokens, cached_tokens, output_tokens)
            chunks.append(b'%b],"usage":%b}' % (self._head, _encode(usage)))
        return chunks

    def whole(
        self,
        texts: Iterable[str],
        finish_reason: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> bytes:
        """The answer to a request that did not stream, from the texts of all its tokens."""
        text = "".join(texts)
        choice = _Choice(finish_reason, message=_Message(text)) if self._chat else _Choice(finish_reason, text=text)
        kind = "chat.completion" if self._chat else "text_completion"
        usage = _usage(prompt_tokens, cached_tokens, output_tokens)
        return _encode(_Answer(self._id, kind, self._created, self._model, (choice,), usage))


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> _Usage:
    return _Usage(prompt_tokens, output_tokens, prompt_tokens + output_tokens, _CachedTokens(cached_tokens))
